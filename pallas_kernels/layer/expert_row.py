"""One row times its experts and a shared expert: two kernels that read weights at the speed of the memory.

    h_j = silu(x A_e) * (x B_e)   with [A_e | B_e] = gate_up[e], e = experts[j];   the shared expert behind them
    y = sum_j weights_j h_j W_e + weight h_shared W

With one row a product is as long as its weights take to arrive, and a tile of the tensor cores would be empty but for
one row. Here weights pass through shared memory in tiles of [`DEPTH`, `COLUMNS`], and threads multiply and add. All
tiles of all experts are shared out evenly, so that every multiprocessor reads as much: a sum is made in parts by
several CTAs, and who reads it adds the parts up, always in one order.

Inputs (GMEM): x [1, D]; gate_up [E, D, 2 F]; down [E, F, D]; experts [1, k] int32, below E; weights [1, k] float32;
of the shared expert, if there is one, gate, up [D, S] and shared_down [S, D], and its weight [1] float32, or none
for 1. x and all matrices bfloat16 or float16, of one dtype. Between the kernels (GMEM): both branches in parts,
[2, parts, k F + S and what fills it up] float32. Output (GMEM): y in parts [parts, D] float32.
Grid: persistent, CTAs of one warpgroup, see `Config`. The copies of a CTA's first tiles are on their way while it
makes its part of h. Shared memory: `_memory`.
Numerics: float32, h too. The same bits in every call. Hardware: compute capability 9.0. Limits: `check_supported`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.lanes import lane_layout, load, vector_layout
from pallas_kernels.device.launch import NUM_SMS, compiled, grid_index, launch
from pallas_kernels.device.layouts import round_up
from pallas_kernels.device.memory import SMEM_LIMIT, Barriers, Buffer, Memory, smem_bytes, store_any

DEPTH = 64
"""Numbers of the sum in a tile."""

COLUMNS = 128
"""Columns of a tile."""

TILE = DEPTH, COLUMNS

WIDTH = 4
"""Neighbouring numbers of a thread, as many as sums over warps take."""

LAYOUT = lane_layout(COLUMNS // WIDTH, WIDTH)
"""A tile in registers."""

ALONG = LAYOUT.reduce(1)
"""Numbers of the sum beside a tile."""

ACROSS = LAYOUT.reduce(0)
"""Columns of a tile."""

REDUCTION_BYTES = 4096
"""Shared memory for sums over warps."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the tiles are shared out, not what is computed."""

    ctas: int = 3 * NUM_SMS
    """CTAs of the branches: one on a multiprocessor multiplies more slowly than memory is read.

    (H200, 2026-11-26, 9 experts of 1536 x 512: one, two, three and four of them 10.7, 10.0, 9.6 and 10.2 us.)
    """
    stages: int = 4
    """Tiles of one of them in shared memory."""
    down_ctas: int = NUM_SMS
    """CTAs of the projection down: its result has a part for each CTA of a tile of columns."""
    down_stages: int = 8


class Sizes(NamedTuple):
    """Static sizes of a call."""

    D: int
    F: int
    k: int
    S: int
    """Inner width of the shared expert; 0 without one."""

    @property
    def inner(self) -> int:
        """Inner columns of all experts of the row."""
        return self.k * self.F + self.S


class Parts(NamedTuple):
    """How a kernel's tiles are shared out."""

    each: int
    """Tiles of a CTA."""
    ctas: int
    parts: int
    """Parts of a sum at most."""


def first_parts(sizes: Sizes, config: Config) -> Parts:
    """Shares of the branches: CTAs go on from one tile of columns to the next where they have to."""
    steps, items = sizes.D // DEPTH, 2 * sizes.inner // COLUMNS
    each = pl.cdiv(items * steps, config.ctas)
    spans = ((i * steps + steps - 1) // each - i * steps // each + 1 for i in range(items))
    return Parts(each, pl.cdiv(items * steps, each), max(spans))


def second_parts(sizes: Sizes, config: Config) -> Parts:
    """Shares of the projection down: as many CTAs for each tile of columns."""
    items, steps = sizes.D // COLUMNS, sizes.inner // DEPTH
    each = pl.cdiv(steps, max(1, config.down_ctas // items))
    parts = pl.cdiv(steps, each)
    return Parts(each, items * parts, parts)


def check_supported(
    x: jax.ShapeDtypeStruct | jax.Array,
    gate_up: jax.ShapeDtypeStruct | jax.Array,
    shared: int,
) -> str | None:
    """Why the kernels cannot take a row x [1, D] and experts gate_up [E, D, 2 F] with a shared one of inner width
    `shared`, 0 for none; None if they can."""
    (rows, D), F = x.shape, gate_up.shape[2] // 2
    if rows != 1:
        return f"{rows} rows; the kernel takes one"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or gate_up.dtype != x.dtype:
        return f"x is {x.dtype}, the experts {gate_up.dtype}; the kernel takes bfloat16 or float16"
    if D % COLUMNS or F % COLUMNS or shared % COLUMNS or not gate_up.size:
        return f"widths {D}, {F} and {shared}; the kernel takes multiples of {COLUMNS}"
    return None


def _memory(numbers: int, stages: int, dtype: Any) -> Memory:
    return {
        "tiles": Buffer((stages, *TILE), dtype),
        "x": Buffer((numbers,)),
        "full": Barriers(arrivals=1, count=stages),
    }


def _walk(
    smem: Any,
    count: Any,
    steps: Callable[[Any], tuple[Any, Any]],
    copy: Callable[[Any, Any, Any], None],
    factor: Callable[[Any], Any],
    prepare: Callable[[], None],
    flush: Callable[[Any, jax.Array], None],
) -> None:
    """Multiplies and adds the tiles of a CTA.

    Args:
      count: how many there are.
      steps: from the number of a tile to where its numbers of the sum begin in smem.x, and how many tiles of the
        same columns are left, itself counted.
      copy: copy(i, destination, barrier) starts the copy of tile i.
      factor: from a tile's number to what its products are multiplied by.
      prepare: writes smem.x.
      flush: flush(i, sums) is called behind the last tile i of some columns.
    """
    stages = smem.tiles.shape[0]

    def start(i):
        slot = lax.rem(i, jnp.int32(stages))
        copy(i, smem.tiles.at[slot], smem.full.at[slot])

    lax.fori_loop(0, jnp.minimum(count, stages), lambda i, _: start(i), None)
    prepare()
    plgpu.commit_smem()

    def multiply(i, acc):
        slot, (first, _) = lax.rem(i, jnp.int32(stages)), steps(i)
        plgpu.barrier_wait(smem.full.at[slot])
        x = load(smem.x.at[pl.ds(first, DEPTH)], ALONG) * factor(i)
        x = plgpu.layout_cast(lax.broadcast_in_dim(x, TILE, [0]), LAYOUT)
        acc = acc + load(smem.tiles.at[slot], LAYOUT).astype(jnp.float32) * x

        @pl.when(i + stages < count)
        def _():
            plgpu.commit_smem()  # a barrier: every thread has read the tile
            start(i + stages)

        return acc

    def columns(carry):
        i = carry
        end = jnp.minimum(i + steps(i)[1], count)
        zeros = plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), LAYOUT)
        acc = lax.fori_loop(i, end, multiply, zeros)
        flush(end - 1, jnp.sum(acc, axis=0))
        return end

    lax.while_loop(lambda i: i < count, columns, jnp.int32(0))


def _branches(gmem: Any, smem: Any, *, sizes: Sizes, parts: Parts) -> None:
    """The first kernel."""
    D, F, k, S = sizes
    steps, of_expert, first = D // DEPTH, 2 * F // COLUMNS, grid_index() * parts.each
    count = jnp.clip(2 * sizes.inner // COLUMNS * steps - first, 0, parts.each)

    def where(i):
        """The tile of columns of step i, and the place in the sum."""
        return lax.div(first + i, jnp.int32(steps)), lax.rem(first + i, jnp.int32(steps))

    def copy(i, destination, barrier):
        item, step = where(i)
        j, rows = lax.div(item, jnp.int32(of_expert)), pl.ds(step * DEPTH, DEPTH)

        @pl.when(j < k)
        def _():
            columns = pl.ds((item - j * of_expert) * COLUMNS, COLUMNS)
            w = gmem.gate_up.at[gmem.experts[0, jnp.minimum(j, k - 1)], rows, columns]
            plgpu.copy_gmem_to_smem(w, destination, barrier)

        column = (item - k * of_expert) * COLUMNS
        for ref, start in ((gmem.gate, 0), (gmem.up, S)) if S else ():

            @pl.when((column >= start) & (column < start + S))
            def _(ref=ref, start=start):
                plgpu.copy_gmem_to_smem(ref.at[rows, pl.ds(column - start, COLUMNS)], destination, barrier)

    def prepare():
        layout = plgpu.Layout.WG_STRIDED((D,), vec_size=1)
        store_any(smem.x, load(gmem.x.at[0], layout).astype(jnp.float32))

    def flush(i, sums):
        item, step = where(i)
        j = jnp.minimum(lax.div(item, jnp.int32(of_expert)), k)
        column, width = (item - j * of_expert) * COLUMNS, jnp.where(j < k, F, S)
        branch = jnp.where(column < width, 0, 1)
        own = pl.ds(j * F + column - branch * width, COLUMNS)
        part = grid_index() - lax.div(item * steps, jnp.int32(parts.each))
        store_any(gmem.h.at[branch, part, own], sums)
        zeros = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), ACROSS)
        for other in range(1, parts.parts):  # those that no CTA has

            @pl.when((part < other) & (step == steps - 1))
            def _(other=other):
                store_any(gmem.h.at[branch, other, own], zeros)

    def place(i):
        step = where(i)[1]
        return step * DEPTH, steps - step

    _walk(smem, count, place, copy, lambda i: 1.0, prepare, flush)


def _down(gmem: Any, smem: Any, *, sizes: Sizes, parts: Parts) -> None:
    """The second kernel."""
    _, F, k, S = sizes
    item, part = lax.div(grid_index(), jnp.int32(parts.parts)), lax.rem(grid_index(), jnp.int32(parts.parts))
    first = part * parts.each
    count = jnp.clip(sizes.inner // DEPTH - first, 0, parts.each)

    def where(i):
        """The expert among those of the row, and the first of its inner numbers."""
        number = (first + i) * DEPTH
        j = jnp.minimum(lax.div(number, jnp.int32(F)), k)
        return j, number - j * F

    def copy(i, destination, barrier):
        (j, number), columns = where(i), pl.ds(item * COLUMNS, COLUMNS)
        rows = pl.ds(number, DEPTH)

        @pl.when(j < k)
        def _():
            w = gmem.down.at[gmem.experts[0, jnp.minimum(j, k - 1)], rows, columns]
            plgpu.copy_gmem_to_smem(w, destination, barrier)

        if S:
            pl.when(j >= k)(
                lambda: plgpu.copy_gmem_to_smem(gmem.shared_down.at[rows, columns], destination, barrier)
            )

    def factor(i):
        j, _ = where(i)
        weight = gmem.weights[0, jnp.minimum(j, k - 1)]
        own = jnp.float32(1) if gmem.weight is None else gmem.weight[0]
        return jnp.where(j < k, weight, own)

    def prepare():
        numbers = parts.each * DEPTH
        layout, own = vector_layout(numbers), pl.ds(first * DEPTH, numbers)

        def branch(b):
            return functools.reduce(
                jnp.add, [load(gmem.h.at[b, p, own], layout) for p in range(gmem.h.shape[1])]
            )

        gate, up = branch(0), branch(1)
        store_any(smem.x, gate / (1.0 + jnp.exp(-gate)) * up)

    def flush(i, sums):
        store_any(gmem.y.at[part, pl.ds(item * COLUMNS, COLUMNS)], sums)

    _walk(smem, count, lambda i: (i * DEPTH, count - i), copy, factor, prepare, flush)


def expert_row(
    x: Float[Array, "1 D"],
    weights: Float[Array, "1 k"],
    experts: Int[Array, "1 k"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    shared: tuple[Float[Array, "D S"], Float[Array, "D S"], Float[Array, "S D"]] | None = None,
    weight: Float[Array, "1"] | None = None,
    *,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "parts D"]:
    """The weighted sum of a row's experts, in parts that are to be added up, where `check_supported` says so.

    Args:
      x: the row.
      weights: of its experts.
      experts: their numbers.
      gate_up, down: weights of all experts.
      shared: both branches and the projection down of an expert that every row has.
      weight: its weight; None: 1.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    arrays = x, weights, experts, gate_up, down, shared, weight
    return compiled(_run, interpret, static=2)(config or Config(), interpret, *arrays)


def _run(config, interpret, x, weights, experts, gate_up, down, shared, weight):
    (_, D), F = x.shape, down.shape[1]
    gate, up, shared_down = shared or (None,) * 3
    sizes = Sizes(D, F, experts.shape[1], 0 if shared is None else shared[0].shape[1])
    first, second = first_parts(sizes, config), second_parts(sizes, config)
    padded = round_up(sizes.inner, second.each * DEPTH)
    options: dict[str, Any] = dict(auto_barriers=False, reduction_bytes=REDUCTION_BYTES)
    options |= {"interpret": interpret}
    memories = [
        _memory(numbers, min(stages, parts.each), x.dtype)
        for numbers, stages, parts in (
            (D, config.stages, first),
            (second.each * DEPTH, config.down_stages, second),
        )
    ]
    for memory in memories:
        assert smem_bytes(memory, REDUCTION_BYTES) <= SMEM_LIMIT, f"{config}: {smem_bytes(memory)} bytes"
    h = launch(
        "expert_row",
        functools.partial(_branches, sizes=sizes, parts=first),
        inputs={"x": x, "experts": experts, "gate_up": gate_up, "gate": gate, "up": up},
        outputs={"h": jax.ShapeDtypeStruct((2, first.parts, padded), jnp.float32)},
        memory=memories[0],
        ctas=first.ctas,
        **options,
    )["h"]
    return launch(
        "expert_row_down",
        functools.partial(_down, sizes=sizes, parts=second),
        inputs={
            "h": h,
            "experts": experts,
            "weights": weights,
            "weight": weight,
            "down": down,
            "shared_down": shared_down,
        },
        outputs={"y": jax.ShapeDtypeStruct((second.parts, D), jnp.float32)},
        memory=memories[1],
        ctas=second.ctas,
        **options,
    )["y"]
