"""One token of every running request through the short convolution, its state changed where it lies in a pool.

    y = silu(bias + sum over j < W - 1 of w[j] s[j] + w[W - 1] x),   s <- s[1], .., s[W - 2], x

for every channel by itself. The state s of a request is its last W - 1 inputs, oldest first.

Inputs (GMEM): x [N, C] bfloat16, float16 or float32, of whose channels the first D are read: the others may be
further products of the same input; w [D, W] and optionally bias [D], each of any of these dtypes; optionally
read_slots [N] and write_slots [N] int32.
In place (GMEM): pool [slots, D, W - 1] of any of these dtypes; with an axis of layers after the first in a pool that
serves a whole model.
Outputs (GMEM): y [N, D] in x's dtype.
Grid: a warpgroup for each (row, `Config.channels` channels), `LANES` of which, side by side, are its threads'. Their
numbers lie W - 1 apart in a state and W apart in w, so that a warp reads the same sectors of memory W - 1 and W
times, all but the first time from the L1 cache. Where D is no multiple, the last warpgroup of a row also takes the
last channels of the row. Some of those it has already: it reads all that it takes before it writes. No shared memory.
Numerics: the sum in float32, oldest input first, then the bias; y is rounded once. What a state keeps of itself keeps
its bits.
Hardware: `NEEDS`. Limits: W from 2 to 4; D of at least `LANES`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.decode.tiles import load
from pallas_kernels.device import generations
from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.work.slots import Slots, layer_input, one_for_all_layers

NEEDS = Needs.NOTHING

LANES = 128
"""Threads of a warpgroup, which take as many channels at once."""

TAPS = (2, 3, 4)
"""Widths W of the filter."""

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs, not what it computes."""

    channels: int
    """Channels of a warpgroup, a multiple of `LANES`."""

    @classmethod
    def default(cls, D: int) -> "Config":
        """Two channels to a thread where they divide D.

        (H200, 2026-11-23, D = 8192, with `step` behind it: 1, 2, 4 and 8 of them take 4.52, 4.56, 4.62 and 4.94 us
        with one request, and differ by less than 1 % with 128 from a float32 pool.)
        """
        return cls(LANES if D % (2 * LANES) else 2 * LANES)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes and switches of one kernel."""

    D: int
    W: int
    silu: bool
    slots: Slots


def check_supported(
    x: jax.Array | jax.ShapeDtypeStruct,
    pool: jax.Array | jax.ShapeDtypeStruct,
    weight: jax.Array | jax.ShapeDtypeStruct,
    bias: jax.Array | jax.ShapeDtypeStruct | None,
) -> str | None:
    """Why the kernel cannot take a call, from its arrays or their shapes; None if it can."""
    D, W = weight.shape
    for name, array in (("x", x), ("the pool", pool), ("weight", weight), ("bias", bias)):
        if array is not None and jnp.dtype(array.dtype).name not in DTYPES:
            return f"{name} is {jnp.dtype(array.dtype).name}; the kernel takes {', '.join(DTYPES)}"
    if W not in TAPS:
        return f"W = {W}; the kernel takes {TAPS[0]} to {TAPS[-1]}"
    if D < LANES:
        return f"D = {D}; the kernel takes {LANES} channels or more"
    if not x.shape[0] or not pool.shape[0]:
        return "there are no requests, or no slots"
    return None


def _body(gmem: Any, smem: Any, *, sizes: Sizes, config: Config) -> None:
    blocks = sizes.D // config.channels
    row, block = lax.div(grid_index(), blocks), lax.rem(grid_index(), blocks)
    slot = row if gmem.read_slots is None else gmem.read_slots[row]
    to = row if gmem.write_slots is None else gmem.write_slots[row]
    is_slot = sizes.slots.is_slot(slot)
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    def states(slot, channels):
        """References to the inputs of a slot, oldest first."""
        return [gmem.pool.at[sizes.slots.place(slot, gmem.layer), channels, j] for j in range(sizes.W - 1)]

    def read(first):
        channels = pl.ds(first, LANES)
        inputs = [load(s, layout) for s in states(slot, channels)]
        inputs.append(load(gmem.x.at[row, channels], layout))
        taps = [load(gmem.w.at[channels, j], layout) for j in range(sizes.W)]
        bias = None if gmem.bias is None else load(gmem.bias.at[channels], layout)
        return channels, inputs, taps, bias

    def write(channels, inputs, taps, bias):
        total = inputs[0].astype(jnp.float32) * taps[0].astype(jnp.float32)
        for s, w in zip(inputs[1:], taps[1:], strict=True):
            total = total + s.astype(jnp.float32) * w.astype(jnp.float32)
        if bias is not None:
            total = total + bias.astype(jnp.float32)
        y = total / (1.0 + jnp.exp(-total)) if sizes.silu else total
        store_any(gmem.y.at[row, channels], y.astype(gmem.y.dtype))

        @pl.when(sizes.slots.is_slot(to))
        def _():
            for reference, s in zip(states(to, channels), inputs[1:], strict=True):
                store_any(reference, s.astype(gmem.pool.dtype))

    def take(*more):
        """The warpgroup's channels, and pieces that begin with these."""
        firsts = [block * config.channels + piece for piece in range(0, config.channels, LANES)]
        firsts += more

        @pl.when(is_slot)
        def _():
            pieces = [read(first) for first in firsts]
            # A barrier: what is written below has been read by every thread.
            if more:
                generations.commit()
            for piece in pieces:
                write(*piece)

        @pl.when(jnp.logical_not(is_slot))
        def _():
            zeros = plgpu.layout_cast(jnp.zeros((LANES,), gmem.y.dtype), layout)
            for first in firsts:
                store_any(gmem.y.at[row, pl.ds(first, LANES)], zeros)

    rest = sizes.D % config.channels
    if not rest:
        take()
    else:
        is_last = block == blocks - 1
        pl.when(jnp.logical_not(is_last))(take)
        pl.when(is_last)(lambda: take(*(sizes.D - LANES - piece for piece in range(0, rest, LANES))))


def conv_update(
    x: Float[Array, "N C"],
    pool: Float[Array, "slots *layers D W1"],
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    read_slots: Int[Array, " N"] | None,
    write_slots: Int[Array, " N"] | None,
    silu: bool = True,
    null_slot: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    config: Config | None = None,
    interpret=None,
) -> tuple[Float[Array, "N D"], Float[Array, "slots *layers D W1"]]:
    """A token of N requests, and the pool with the states after it; all other slots keep their bits.

    The pool is updated in place where it is donated to the compiled function around this call; else XLA copies it.

    Args:
      x, pool, weight, bias: inputs that `check_supported` accepts.
      read_slots: where each request's state is. One that is negative, past the pool or null_slot is padding: its
        output is 0, and nothing is read or written. None: that of request i is in slot i.
      write_slots: where the new state goes, which is dropped where that is padding. No slot twice, and none that
        another request reads. None, without read_slots: where the states were.
      silu: whether y is silu of the sum.
      null_slot: a slot that is padding too.
      layer: index of the second axis of a pool that serves a whole model.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    N, (D, W) = x.shape[0], weight.shape
    config = config or Config.default(D)
    slots = Slots(pool.shape[0], null_slot, 1 if layer is None else pool.shape[1])
    results = launch(
        "conv_update",
        functools.partial(_body, sizes=Sizes(D, W, silu, slots), config=config),
        inputs={
            "x": x,
            "w": weight,
            "bias": bias,
            "read_slots": read_slots,
            "write_slots": write_slots,
            "layer": layer_input(layer),
        },
        outputs={"y": jax.ShapeDtypeStruct((N, D), x.dtype)},
        updated={"pool": one_for_all_layers(pool, layer)},
        ctas=N * (D // config.channels),
        interpret=interpret,
    )
    return results["y"], results["pool"].reshape(pool.shape)
