"""One row times a matrix, made by every CTA as it needs it, while the matrix is on its way.

    s = x + y,  v = s (mean(s^2) + eps)^(-1/2) w        `Stream`: the sum of the residual stream and its norm
    v = o (mean(o^2) + eps)^(-1/2) w f(z), for each head    `Heads`: the gated norm
    out = v W^T

A token of one row is many short kernels, each of which begins when the one before has ended. Here the copies of the
first rows of W are on their way while v is made. The first C results may pass through the short convolution of
`decode.conv_update`, each with the state of its channel.

Inputs (GMEM): W [F, D] float32, bfloat16 or float16; for `Stream` x [1, D], y [P, D], which are added up, or none,
w [D] float32; for `Heads` o [H, V], z [G, V], whose last H rows are the gates, w [V] float32; with a convolution its
filters [C, taps] and bias [C] or none. In place (GMEM): states of the convolution [1, C, taps - 1]. Outputs (GMEM):
out [1, F] in the dtype asked for; for `Stream` s [1, D] of x's dtype, and v [1, D], if asked for.
Grid: persistent, CTAs of some warpgroups, see `Config`, which make the row together. Then each takes tiles of
`Config.rows` rows of W by itself, in pieces of `columns` columns. Shared memory: `_memory`.
Numerics: float32; v is not rounded. The same bits in every call. Hardware: compute capability 9.0. Limits:
`check_stream`, `check_heads`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.lanes import WARP, lane_layout, load
from pallas_kernels.device.launch import NUM_SMS, compiled, grid_index, launch, warpgroup_index
from pallas_kernels.device.memory import SMEM_LIMIT, Barriers, Buffer, Memory, smem_bytes, store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.gated_norm import ACTIVATIONS

WIDEST = 256
"""Columns of a piece at most: what is copied at once."""

BYTES = 192 * 1024
"""Shared memory of a multiprocessor's CTAs for tiles of W, at most."""

WIDE = 512
"""Numbers that a warpgroup reads at once, 16 bytes a thread."""

HELD = 2048
"""The longest row that every warp holds in registers while it multiplies; a longer one waits in shared memory."""

REDUCTION_BYTES = 2048


@runtime_checkable
class Row(Protocol):
    """How the row is made: static, and hashable."""

    def make(self, gmem: Any, x: Any, wg: Any, warpgroups: int) -> None:
        """Writes this warpgroup's part of what the row is made of to shared memory x, and of what else is asked
        for."""
        ...

    def finish(self, gmem: Any, pieces: list[jax.Array], is_first: Any) -> list[jax.Array]:
        """The row from the pieces of what all have written, of which every warp has all; the first warpgroup
        also writes what else is asked for."""
        ...


@dataclasses.dataclass(frozen=True)
class Stream:
    """The norm of the residual stream."""

    eps: float
    first: int = 0
    """Number of the channel that x begins with; without y the stream may be some channels of an array."""

    def make(self, gmem: Any, x: Any, wg: Any, warpgroups: int) -> None:
        """See `Row.make`."""
        D = gmem.w.shape[0]
        makers = next(n for n in range(warpgroups, 0, -1) if D % (n * WIDE) == 0 or n == 1)
        width = D // makers
        own = pl.ds(wg * width, width)

        @pl.when(wg < makers)
        def _():
            s = r.load(gmem.x.at[:, pl.ds(self.first + wg * width, width)], 0, width, 1)
            if gmem.y is not None:
                for part in range(gmem.y.shape[0]):
                    s = s + r.load(gmem.y.at[:, own], part, width, 1)
            store_any(x.at[:, own], s)
            if gmem.s is not None:
                pl.when(grid_index() == 0)(lambda: r.store(gmem.s.at[:, own], 0, s))

    def finish(self, gmem: Any, pieces: list[jax.Array], is_first: Any) -> list[jax.Array]:
        """See `Row.finish`."""
        columns = pieces[0].shape[0]
        D = len(pieces) * columns
        scale = lax.rsqrt(jnp.sum(functools.reduce(jnp.add, [s * s for s in pieces])) / D + self.eps)
        row = []
        for i, s in enumerate(pieces):
            own = pl.ds(i * columns, columns)
            row.append(s * scale * load(gmem.w.at[own], _along(columns)))
            if gmem.v is not None:
                pl.when(is_first)(
                    lambda v=row[-1], own=own: store_any(gmem.v.at[0, own], v.astype(gmem.v.dtype))
                )
        return row


@dataclasses.dataclass(frozen=True)
class Heads:
    """The gated norm of each head."""

    eps: float
    activation: str

    def make(self, gmem: Any, x: Any, wg: Any, warpgroups: int) -> None:
        """See `Row.make`."""
        H, V = gmem.o.shape
        makers = next(n for n in range(warpgroups, 0, -1) if H % (n * r.WARPS) == 0)
        heads = H // makers

        @pl.when(wg < makers)
        def _():
            o = r.load(gmem.o, wg * heads, V, heads)
            z = r.load(gmem.z, gmem.z.shape[0] - H + wg * heads, V, heads)
            scale = r.spread(lax.rsqrt(r.row_sum(o * o) / V + self.eps), V)
            f = ACTIVATIONS[self.activation].value(z, r.sigmoid(z))
            store_any(x.at[pl.ds(wg * heads, heads)], o * scale * r.load_along(gmem.w, heads) * f)

    def finish(self, gmem: Any, pieces: list[jax.Array], is_first: Any) -> list[jax.Array]:
        """See `Row.finish`."""
        return pieces


@dataclasses.dataclass(frozen=True)
class Config:
    """How the matrix is walked over, not what is computed."""

    rows: int
    """Rows of a tile, a multiple of 4."""
    ctas: int = NUM_SMS
    warpgroups: int = 4
    """Warpgroups of a CTA: one multiplies more slowly than memory is read."""

    @classmethod
    def heads(cls) -> "Config":
        """For a row that is soon made."""
        return cls(4)

    @classmethod
    def stream(cls, F: int) -> "Config":
        """For a row that every CTA adds up from all parts of y."""
        return cls(4)


def _check_matrix(weight) -> str | None:
    F = weight.shape[0]
    if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the weight is {weight.dtype}; the kernel takes float32, bfloat16 and float16"
    return f"{F} outputs; the kernel takes a multiple of 8" if F % 8 or not F else None


def check_stream(x: jax.ShapeDtypeStruct | jax.Array, weight: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernel cannot take a stream [1, D], or D of more channels, and a matrix [F, D]; None if it can."""
    if x.shape[0] != 1:
        return f"{x.shape[0]} rows; the kernel takes one"
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x is {x.dtype}; the kernel takes float32, bfloat16 and float16"
    D = weight.shape[1]
    if D % WIDEST or D > r.WIDEST:
        return f"rows of {D}; the kernel takes multiples of {WIDEST} up to {r.WIDEST}"
    if 8 * D * weight.dtype.itemsize > BYTES:
        return f"rows of {D} numbers of {weight.dtype}; the kernel takes {BYTES // 8} bytes"
    return _check_matrix(weight)


def check_heads(
    o: jax.ShapeDtypeStruct | jax.Array, channels: int, weight: jax.ShapeDtypeStruct | jax.Array
) -> str | None:
    """Why the kernel cannot take heads [H, V], gates among so many channels and a matrix [F, H V]; None if it can."""
    H, V = o.shape
    if V not in (64, 128, 256) or H % r.WARPS or H * V > r.WIDEST:
        return f"{H} heads of {V}; the kernel takes multiples of 4, of 64, 128 or 256"
    if channels % V:
        return f"{channels} channels; the kernel takes whole heads of {V}"
    if o.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"o is {o.dtype}; the kernel takes float32, bfloat16 and float16"
    return _check_matrix(weight)


def check_convolution(
    weight: jax.ShapeDtypeStruct | jax.Array, convolution: "Convolution", dtype: Any
) -> str | None:
    """Why the kernel cannot pass the first results, in a dtype, through a convolution; None if it can."""
    channels, taps = convolution.filters.shape
    if any(jnp.dtype(x).itemsize > 4 for x in (dtype, *(y.dtype for y in convolution if y is not None))):
        return "an array of the convolution has more than 32 bits; the kernel takes at most these"
    if channels % 8 or channels > weight.shape[0] or taps < 2:
        return f"{channels} channels and {taps} taps; the kernel takes a multiple of 8, and 2 taps or more"
    return None


def _along(columns: int) -> Any:
    """Layout of a piece of the row, which every warp has whole."""
    return lane_layout(WARP, columns // WARP).reduce(0)


def _memory(config: Config, shape: tuple[int, int], D: int, tiles: int, dtype: Any) -> Memory:
    columns = min(shape[1], WIDEST)
    pieces, walkers = D // columns, config.ctas * config.warpgroups
    tile = pieces * config.rows * columns * jnp.dtype(dtype).itemsize
    room = BYTES // pl.cdiv(config.ctas, NUM_SMS) // config.warpgroups
    stages = max(1, min(room // tile, pl.cdiv(tiles, walkers)))
    return {
        "tiles": Buffer((config.warpgroups * stages, pieces, config.rows, columns), dtype),
        "row": Buffer(shape),
        "full": Barriers(arrivals=pieces, count=config.warpgroups * stages),
        "made": Barriers(arrivals=config.warpgroups),
    }


def _body(gmem: Any, smem: Any, *, row: Row, config: Config) -> None:
    slots, pieces, rows, columns = smem.tiles.shape
    layout, wg = lane_layout(WARP, columns // WARP), warpgroup_index()
    stages, walkers = slots // config.warpgroups, config.ctas * config.warpgroups
    own, tiles = wg * config.ctas + grid_index(), gmem.weight.shape[0] // rows
    count = lax.div(jnp.int32(tiles + walkers - 1) - own, jnp.int32(walkers))

    def first_row(i):
        return (own + i * walkers) * rows

    def slot_of(i):
        return wg * stages + lax.rem(i, jnp.int32(stages))

    def start(i):
        slot = slot_of(i)
        for piece in range(pieces):
            source = gmem.weight.at[pl.ds(first_row(i), rows), pl.ds(piece * columns, columns)]
            plgpu.copy_gmem_to_smem(source, smem.tiles.at[slot, piece], smem.full.at[slot])

    def past_of(i):
        if gmem.state is None:
            return ()
        is_own = (i < count) & (first_row(i) < gmem.filters.shape[0])
        return _load_past(gmem, first_row(i), rows, layout.reduce(1), is_own)

    def meet():
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.made)
        plgpu.barrier_wait(smem.made)

    def stored(piece):
        at = (0, pl.ds(piece * columns, columns)) if smem.row.shape[0] == 1 else (piece,)
        return smem.row.at[at]

    lax.fori_loop(0, jnp.minimum(count, stages), lambda i, _: start(i), None)
    first_past = past_of(0)
    row.make(gmem, smem.row, wg, config.warpgroups)
    meet()
    whole = [load(stored(piece), layout.reduce(0)) for piece in range(pieces)]
    vector = row.finish(gmem, whole, (grid_index() == 0) & (wg == 0))
    if len(vector) * columns > HELD:
        meet()  # all have read what the row is made of
        for piece, v in enumerate(vector):
            pl.when(piece % config.warpgroups == wg)(lambda piece=piece, v=v: store_any(stored(piece), v))
        meet()

    def tile(i, past):
        slot, later = slot_of(i), past_of(i + 1)
        plgpu.barrier_wait(smem.full.at[slot])
        total = None
        for piece in range(pieces):
            v = vector[piece] if pieces * columns <= HELD else load(stored(piece), layout.reduce(0))
            v = plgpu.layout_cast(lax.broadcast_in_dim(v, (rows, columns), [1]), layout)
            part = load(smem.tiles.at[slot, piece], layout).astype(jnp.float32) * v
            total = part if total is None else total + part
        assert total is not None
        sums = jnp.sum(total, axis=1)
        place, sums = pl.ds(first_row(i), rows), sums.astype(gmem.out.dtype)
        if not past:
            store_any(gmem.out.at[place], sums)
        else:
            is_filtered = first_row(i) < gmem.filters.shape[0]
            pl.when(is_filtered)(lambda: _filter(gmem, place, sums, past))
            pl.when(jnp.logical_not(is_filtered))(lambda: store_any(gmem.out.at[place], sums))

        @pl.when(i + stages < count)
        def _():
            plgpu.commit_smem()  # a barrier: every thread has read the tile
            start(i + stages)

        return later

    lax.fori_loop(0, count, tile, first_past)


def _load_past(gmem: Any, first: Any, rows: int, layout: Any, is_own: Any) -> tuple[jax.Array, ...]:
    """States, oldest first, filters and the bias if there is one of a tile's channels; zeros of one that has none."""
    own, taps = pl.ds(first, rows), gmem.filters.shape[1]
    refs = [gmem.state.at[0, own, j] for j in range(taps - 1)]
    refs += [gmem.filters.at[own, j] for j in range(taps)]
    refs += [] if gmem.bias is None else [gmem.bias.at[own]]

    def zeros():
        return tuple(plgpu.layout_cast(jnp.zeros((rows,), ref.dtype), layout) for ref in refs)

    return lax.cond(is_own, lambda: tuple(load(ref, layout) for ref in refs), zeros)


def _filter(gmem: Any, own: Any, x: jax.Array, past: tuple[jax.Array, ...]) -> None:
    """The convolution of a tile's channels, as in `decode.conv_update`."""
    taps = gmem.filters.shape[1]
    inputs, filters, bias = [*past[: taps - 1], x], past[taps - 1 : 2 * taps - 1], past[2 * taps - 1 :]
    total = sum(s.astype(jnp.float32) * w.astype(jnp.float32) for s, w in zip(inputs, filters, strict=True))
    total = total + bias[0].astype(jnp.float32) if bias else total
    store_any(gmem.out.at[own], (total / (1.0 + jnp.exp(-total))).astype(gmem.out.dtype))
    for j, s in enumerate(inputs[1:]):
        store_any(gmem.state.at[0, own, j], s.astype(gmem.state.dtype))


class Convolution(NamedTuple):
    """A short convolution of the first channels."""

    state: Float[Array, "1 C W1"]
    """Inputs before the token, oldest first."""
    filters: Float[Array, "C W"]
    bias: Float[Array, " C"] | None


def stream_product(
    x: Float[Array, "1 C"],
    y: Float[Array, "P D"] | None,
    norm: Float[Array, " D"],
    weight: Float[Array, "F D"],
    *,
    eps: float,
    dtype: Any,
    keep: Any = None,
    convolution: Convolution | None = None,
    first: int = 0,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[
    Float[Array, "1 C"], Float[Array, "1 D"] | None, Float[Array, "1 F"], Float[Array, "1 B W1"] | None
]:
    """The stream x + y, its norm, the norm times the matrix, and the state of a convolution after it.

    The state is updated in place where it is donated to the compiled function around this call; else XLA copies it.

    Args:
      x: stream that `check_stream` accepts.
      y: what is added to it, in parts.
      norm: weight of the norm.
      weight: the matrix.
      eps: of the norm.
      dtype: of the product.
      keep: dtype of the norm as a result; None where it is none.
      convolution: of the first channels, that `check_convolution` accepts; None: there is none.
      first: without y, the channel of x with which the stream begins, a multiple of 4.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    assert y is not None or first % 4 == 0, first
    row = Stream(eps, first)
    config = config or Config.stream(weight.shape[0])
    keep = None if keep is None else jnp.dtype(keep)
    static = row, config, jnp.dtype(dtype), keep, interpret
    return compiled(_run_stream, interpret, static=5)(*static, x, y, norm, weight, convolution)


def _run_stream(row, config, dtype, keep, interpret, x, y, norm, weight, convolution):
    D, like = weight.shape[1], jax.ShapeDtypeStruct
    inputs = {"x": x, "y": y, "w": norm.astype(jnp.float32)}
    outputs = {
        "s": None if y is None else like(x.shape, x.dtype),
        "v": None if keep is None else like((1, D), keep),
    }
    state, filters, bias = (None,) * 3 if convolution is None else convolution
    inputs |= {"filters": filters, "bias": bias}
    options: dict[str, Any] = dict(updated={"state": state}, interpret=interpret)
    results = _launch("stream_product", row, config, (1, D), inputs, outputs, dtype, weight, **options)
    return results.get("s", x), results.get("v"), results["out"][None], results.get("state")


def heads_product(
    o: Float[Array, "H V"],
    z: Float[Array, "G V"],
    norm: Float[Array, " V"],
    weight: Float[Array, "F D"],
    *,
    eps: float,
    activation: str,
    dtype: Any,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "1 F"]:
    """The gated norm of heads times the matrix.

    Args:
      o: heads that `check_heads` accepts.
      z: heads whose last H are the gates.
      norm: weight of the norm.
      weight: the matrix.
      eps: of the norm.
      activation: of the gate, one of `gated_norm.ACTIVATIONS`.
      dtype: of the result.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    row = Heads(eps, activation)
    config = config or Config.heads()
    return compiled(_run_heads, interpret, static=4)(
        row, config, jnp.dtype(dtype), interpret, o, z, norm, weight
    )


def _run_heads(row, config, dtype, interpret, o, z, norm, weight):
    inputs = {"o": o, "z": z, "w": norm.astype(jnp.float32), "filters": None, "bias": None}
    options: dict[str, Any] = dict(updated={"state": None}, interpret=interpret)
    return _launch("heads_product", row, config, o.shape, inputs, {}, dtype, weight, **options)["out"][None]


def _launch(name, row, config, shape, inputs, outputs, dtype, weight, *, updated, interpret):
    F, D = weight.shape
    config = dataclasses.replace(config, ctas=min(config.ctas, F // config.rows))
    memory = _memory(config, shape, D, F // config.rows, weight.dtype)
    assert smem_bytes(memory, REDUCTION_BYTES) <= SMEM_LIMIT, f"{config}: {smem_bytes(memory)} bytes"
    return launch(
        name,
        functools.partial(_body, row=row, config=config),
        inputs=inputs | {"weight": weight},
        outputs=outputs | {"out": jax.ShapeDtypeStruct((F,), dtype)},
        updated=updated,
        memory=memory,
        auto_barriers=False,
        reduction_bytes=REDUCTION_BYTES,
        ctas=config.ctas,
        warpgroups=config.warpgroups,
        interpret=interpret,
    )
