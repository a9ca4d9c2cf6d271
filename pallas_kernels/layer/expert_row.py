"""One row times its experts and a shared expert: two kernels that read weights at the speed of the memory.

    h_j = silu(x A_e) * (x B_e)   with [A_e | B_e] = gate_up[e], e = experts[j];   the shared expert behind them
    y = sum_j weights_j h_j W_e + weight h_shared W

With one row a product is as long as its weights take to arrive, and a tile of the tensor cores would be empty but for
one row. Here weights pass through shared memory in tiles of `DEPTH` rows, and threads multiply and add. All tiles of
all experts are shared out evenly, so that every multiprocessor reads as much: a sum is made in parts by several CTAs,
and who reads it adds the parts up, always in one order.

Inputs (GMEM): x [1, D]; gate_up [E, D, 2 F]; down [E, F, D]; experts [1, k] int32, below E; weights [1, k] float32;
of the shared expert, if there is one, gate, up [D, S] and shared_down [S, D], and its weight [1] float32, or none
for 1. x and all matrices bfloat16 or float16, of one dtype. Between the kernels (GMEM): both branches in parts,
[2, parts, k F + S and what fills it up] float32. Output (GMEM): y in parts [parts, D] float32.
Grid: persistent, CTAs of some warpgroups, see `Config`, which take the tiles of a CTA in turn and add up at its end.
The copies of the first tiles are on their way while a CTA makes its part of h. Each kernel asks the L2 cache for
what is read after it. Shared memory: `expert_walk.memory_of`.
Numerics: float32, h too. The same bits in every call. Hardware: `NEEDS`. Limits: `check_supported`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.ahead import WIDTH, bring, rows_of
from pallas_kernels.device.lanes import load
from pallas_kernels.device.launch import compiled, grid_index, launch, num_sms, warpgroup_index
from pallas_kernels.device.layouts import round_up
from pallas_kernels.device.memory import (
    REDUCTION_BYTES,
    SMEM_LIMIT,
    Memory,
    smem_bytes,
    store_any,
)
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer.expert_walk import DEPTH, memory_of, tile_layout, walk

NEEDS = Needs.TMA

COLUMNS = 128
"""Columns of a tile of the branches."""

BROUGHT_ROWS = 64
"""Rows of an expert's projection down that the first kernel asks for at once."""

DOWN_COLUMNS = 64
"""Columns of a tile of the projection down: fewer CTAs then share a sum, and its reader has fewer parts to add up."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the tiles are shared out, not what is computed."""

    ctas: int = dataclasses.field(default_factory=num_sms)
    """CTAs of the branches.

    (H200, 2026-11-26, 9 experts of 1536 x 512 that are known: one and two of them on a multiprocessor, of four
    warpgroups, 10.1 and 11.1 us.)
    """
    stages: int = 6
    """Tiles of a warpgroup in shared memory."""
    down_ctas: int = dataclasses.field(default_factory=lambda: 2 * num_sms())
    """CTAs of the projection down: its result has a part for each CTA of a tile of columns.

    (H200, 2026-11-26, 9 experts of 512 x 1536: one and two of them on a multiprocessor 7.4 and 6.6 us.)
    """
    down_stages: int = 4
    warpgroups: int = 4
    """Warpgroups of a CTA."""


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
    items, steps = sizes.D // DOWN_COLUMNS, sizes.inner // DEPTH
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


def _branches(gmem: Any, smem: Any, *, sizes: Sizes, parts: Parts) -> None:
    """The first kernel."""
    wg = warpgroup_index()
    D, F, k, S = sizes
    steps, of_expert, first = D // DEPTH, 2 * F // COLUMNS, grid_index() * parts.each
    count = jnp.clip(2 * sizes.inner // COLUMNS * steps - first, 0, parts.each)
    rest = steps - lax.rem(first, jnp.int32(steps))
    """Tiles of the columns that this CTA begins with."""
    spans, warpgroups = smem.sums.shape[:2]
    bounds = [jnp.int32(0), *(jnp.minimum(count, rest + i * steps) for i in range(spans))]

    def item_of(i):
        """The tile of columns of step i, and its expert among those of the row."""
        item = lax.div(first + i, jnp.int32(steps))
        return item, jnp.minimum(lax.div(item, jnp.int32(of_expert)), k)

    def place(i):
        return lax.rem(first + i, jnp.int32(steps)) * DEPTH

    def copy(i, destination, barrier):
        (item, j), rows = item_of(i), pl.ds(place(i), DEPTH)

        @pl.when(j < k)
        def _():
            columns = pl.ds((item - j * of_expert) * COLUMNS, COLUMNS)
            number = jnp.minimum(j, k - 1)
            expert = gmem.experts[0, number]
            plgpu.copy_gmem_to_smem(gmem.gate_up.at[expert, rows, columns], destination, barrier)

        column = (item - k * of_expert) * COLUMNS
        for ref, start in ((gmem.gate, 0), (gmem.up, S)) if S else ():

            @pl.when((column >= start) & (column < start + S))
            def _(ref=ref, start=start):
                plgpu.copy_gmem_to_smem(ref.at[rows, pl.ds(column - start, COLUMNS)], destination, barrier)

    makers = next(n for n in range(warpgroups, 0, -1) if D % (n * COLUMNS) == 0)
    own_of_row = pl.ds(jnp.minimum(wg, makers - 1) * (D // makers), D // makers)

    def load_row(_):
        return load(gmem.x.at[0, own_of_row], plgpu.Layout.WG_STRIDED((D // makers,), vec_size=1))

    def keep_row(wg, x):
        pl.when(wg < makers)(lambda: store_any(smem.x.at[own_of_row], x.astype(jnp.float32)))

    def flush(span, sums):
        end = bounds[span + 1]

        @pl.when(bounds[span] < end)
        def _():
            item, j = item_of(end - 1)
            column, width = (item - j * of_expert) * COLUMNS, jnp.where(j < k, F, S)
            branch = jnp.where(column < width, 0, 1)
            own = pl.ds(j * F + column - branch * width, COLUMNS)
            part = grid_index() - lax.div(item * steps, jnp.int32(parts.each))
            store_any(gmem.h.at[branch, part, own], sums)
            zeros = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), tile_layout(COLUMNS).reduce(0))
            for other in range(1, parts.parts):  # those that no CTA has

                @pl.when((part < other) & (place(end - 1) == (steps - 1) * DEPTH))
                def _(other=other):
                    store_any(gmem.h.at[branch, other, own], zeros)

    def bring_later():
        """Asks for what the second kernel multiplies by."""
        columns = next(n for n in (WIDTH, COLUMNS) if D % n == 0)
        across, below = D // columns, F // BROUGHT_ROWS

        def ask(i, _):
            box = grid_index() + i * parts.ctas
            j = lax.div(box, jnp.int32(across * below))
            row, column = lax.div(box, jnp.int32(across)) - j * below, lax.rem(box, jnp.int32(across))
            own = pl.ds(row * BROUGHT_ROWS, BROUGHT_ROWS), pl.ds(column * columns, columns)
            plgpu.async_prefetch(gmem.down.at[gmem.experts[0, j], *own])

        boxes = k * across * below - grid_index()
        lax.fori_loop(0, lax.div(boxes + (parts.ctas - 1), jnp.int32(parts.ctas)), ask, None)

    walk(smem, bounds, copy, place, load_row, keep_row, bring_later, flush)


def _down(gmem: Any, smem: Any, *, sizes: Sizes, parts: Parts) -> None:
    """The second kernel."""
    _, F, k, S = sizes
    item, part = lax.div(grid_index(), jnp.int32(parts.parts)), lax.rem(grid_index(), jnp.int32(parts.parts))
    first = part * parts.each
    count = jnp.clip(sizes.inner // DEPTH - first, 0, parts.each)
    columns = pl.ds(item * DOWN_COLUMNS, DOWN_COLUMNS)
    experts = [gmem.experts[0, j] for j in range(k)]

    def copy(i, destination, barrier):
        number = (first + i) * DEPTH
        j = jnp.minimum(lax.div(number, jnp.int32(F)), k)
        rows = pl.ds(number - j * F, DEPTH)

        @pl.when(j < k)
        def _():
            e = functools.reduce(lambda e, n: jnp.where(j == n, experts[n], e), range(1, k), experts[0])
            plgpu.copy_gmem_to_smem(gmem.down.at[e, rows, columns], destination, barrier)

        if S:
            pl.when(j >= k)(
                lambda: plgpu.copy_gmem_to_smem(gmem.shared_down.at[rows, columns], destination, barrier)
            )

    numbers = smem.x.shape[0] // smem.sums.shape[1]
    layout = plgpu.Layout.WG_STRIDED((numbers,), vec_size=1)

    def load_row(wg):
        own = pl.ds(first * DEPTH + wg * numbers, numbers)
        return [[load(gmem.h.at[b, p, own], layout) for p in range(gmem.h.shape[1])] for b in (0, 1)]

    def keep_row(wg, branches):
        start = first * DEPTH + wg * numbers
        gate, up = (functools.reduce(jnp.add, parts) for parts in branches)
        h = gate / (1.0 + jnp.exp(-gate)) * up
        own = plgpu.broadcasted_iota(jnp.int32, (numbers,), 0, layout=layout) + start
        factor: Any = None
        for n in range((numbers - 2) // F + 2):  # so many experts may have part of these numbers
            j = lax.div(start, jnp.int32(F)) + n
            weight = jnp.where(
                j < k,
                gmem.weights[0, jnp.minimum(j, k - 1)],
                jnp.float32(1) if gmem.weight is None else gmem.weight[0],
            )
            factor = jnp.where(own < jnp.minimum(j, k) * F, factor, weight) if n else weight
        store_any(smem.x.at[pl.ds(wg * numbers, numbers)], h * factor)

    def flush(_, sums):
        store_any(gmem.y.at[part, columns], sums)

    bounds = [jnp.int32(0), count]

    def bring_later():
        bring(gmem.ahead, parts.ctas)

    walk(smem, bounds, copy, lambda i: i * DEPTH, load_row, keep_row, bring_later, flush)


def expert_row(
    x: Float[Array, "1 D"],
    weights: Float[Array, "1 k"],
    experts: Int[Array, "1 k"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    shared: tuple[Float[Array, "D S"], Float[Array, "D S"], Float[Array, "S D"]] | None = None,
    weight: Float[Array, "1"] | None = None,
    *,
    ahead: Sequence[jax.Array] = (),
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
      ahead: arrays that the kernels after these read first, see `device.ahead`.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    arrays = x, weights, experts, gate_up, down, shared, weight, rows_of(ahead)
    return compiled(_run, interpret, static=2)(config or Config(), interpret, *arrays)


def _fitting(stages: int, memory: Callable[[int], Memory]) -> Memory:
    """Shared memory with as many tiles of a warpgroup as there is room for, up to a number: rows may be wide."""
    every = (memory(n) for n in range(stages, 0, -1))
    return next(m for m in every if smem_bytes(m, REDUCTION_BYTES) <= SMEM_LIMIT)


def _run(config, interpret, x, weights, experts, gate_up, down, shared, weight, ahead):
    D, F2, k = *gate_up.shape[1:], experts.shape[1]
    gate, up, shared_down = shared or (None,) * 3
    sizes = Sizes(D, F2 // 2, k, 0 if shared is None else shared[0].shape[1])
    first, second = first_parts(sizes, config), second_parts(sizes, config)
    warpgroups = config.warpgroups
    numbers = round_up(second.each * DEPTH, warpgroups * COLUMNS)
    padded = (second.parts - 1) * second.each * DEPTH + numbers
    spans = (first.each - 2) // (D // DEPTH) + 2
    options: dict[str, Any] = dict(auto_barriers=False, warpgroups=warpgroups, interpret=interpret)
    memories = [
        _fitting(
            min(stages, pl.cdiv(parts.each, warpgroups)),
            functools.partial(memory_of, numbers, columns, spans=spans, warpgroups=warpgroups, dtype=x.dtype),
        )
        for numbers, columns, stages, spans, parts in (
            (D, COLUMNS, config.stages, spans, first),
            (numbers, DOWN_COLUMNS, config.down_stages, 1, second),
        )
    ]
    inputs = {"x": x, "gate_up": gate_up, "gate": gate, "up": up, "down": down, "experts": experts}
    outputs = {"h": jax.ShapeDtypeStruct((2, first.parts, padded), jnp.float32)}
    made = launch(
        "expert_row",
        functools.partial(_branches, sizes=sizes, parts=first),
        inputs=inputs,
        outputs=outputs,
        memory=memories[0],
        ctas=first.ctas,
        **options,
    )
    return launch(
        "expert_row_down",
        functools.partial(_down, sizes=sizes, parts=second),
        inputs={"h": made["h"], "experts": experts, "weights": weights, "weight": weight}
        | {"down": down, "shared_down": shared_down},
        outputs={"y": jax.ShapeDtypeStruct((second.parts, D), jnp.float32)},
        ahead=ahead,
        memory=memories[1],
        ctas=second.ctas,
        **options,
    )["y"]
