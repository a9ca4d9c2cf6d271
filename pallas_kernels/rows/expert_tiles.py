"""Few rows put into tiles of the experts that they have chosen, in one kernel.

The rows that have chosen an expert lie side by side in as many tiles as they fill, in their order, and the tiles in
the order of the experts. A sort, and what goes with it, would be a dozen kernels. Here every CTA counts the rows of
all experts, finds the expert and the rows of its own tile, and copies them.

Inputs (GMEM): x [N, D], of 16 bits; chosen [rows, k] int32, N rows and what fills them up to 32, 64 or 128, numbers
of experts that are all different in a row, or of none: `experts` and above. (Of equal ones in a row the last one
alone has a place, so that such a row still changes no other one.) Outputs (GMEM): tiles [T * size, D],
where places that no choice has are not written, or hold any row; experts and counts [T] int32, of each tile its
expert and how many rows it has; used [1] int32, how many tiles there are: of those behind nothing is written; places
[rows k] int32, where each choice lies, not written for one of no expert.
Grid: a CTA of one warpgroup for each tile. Limits: `check_supported`. Hardware: `NEEDS`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.lanes import WARP, lane_layout, load, spread
from pallas_kernels.device.launch import grid_index, kernel, launch
from pallas_kernels.device.layouts import round_up
from pallas_kernels.device.memory import Buffer, Memory, store_any
from pallas_kernels.device.needs import Needs

NEEDS = Needs.TMA

MOST = 128
"""Rows of a call at most."""

COPIED = 8
"""Rows that are copied at once."""

AT_ONCE = 32
"""Experts whose rows are counted at once."""


def check_supported(rows: int, D: int) -> str | None:
    """Why the kernel cannot put so many rows of width D into tiles; None if it can."""
    if rows > MOST:
        return f"{rows} rows; the kernel takes up to {MOST}"
    return f"rows of width {D}; the kernel takes multiples of {4 * WARP}" if D % (4 * WARP) else None


def most_tiles(rows: int, per_row: int, experts: int, size: int) -> int:
    """Tiles that so many rows may fill."""
    pairs = rows * per_row
    return (pairs + (size - 1) * min(experts, pairs)) // size


def _memory(rows: int, size: int, experts: int) -> Memory:
    return {
        "count": Buffer((round_up(experts, AT_ONCE),), jnp.int32),
        "rank": Buffer((rows,)),
        "pairs": Buffer((size,), jnp.int32),
    }


def _body(gmem: Any, smem: Any, *, size: int, experts: int) -> None:
    (rows, k), tile = gmem.chosen.shape, grid_index()
    layout = lane_layout(WARP, 1)

    def number(axis):
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    chosen = [load(gmem.chosen.at[:, j], layout.reduce(0)) for j in range(k)]
    shape = AT_ONCE, rows

    def counts(i, _):
        expert, count = number(0) + i * AT_ONCE, jnp.float32(0)
        for c in chosen:
            count = jnp.where(spread(c, shape, 1, layout) == expert, 1.0, count)
        count = jnp.sum(count, axis=1).astype(jnp.int32)
        store_any(smem.count.at[pl.ds(i * AT_ONCE, AT_ONCE)], count)
        return ()

    lax.fori_loop(0, smem.count.shape[0] // AT_ONCE, counts, ())
    plgpu.commit_smem()

    def tiles_of(e, carry):
        end, expert, first = carry
        end = end + lax.div(smem.count[e] + (size - 1), jnp.int32(size))
        return end, expert + jnp.where(end <= tile, 1, 0), jnp.where(end <= tile, end, first)

    zero = jnp.int32(0)
    used, expert, first = lax.fori_loop(0, experts, tiles_of, (zero, zero, zero), unroll=8)

    @pl.when(tile == 0)
    def _():
        gmem.used[0] = used

    @pl.when(tile < used)
    def _():
        own = (tile - first) * size
        rest = jnp.minimum(smem.count[expert] - own, size)
        gmem.experts[tile], gmem.counts[tile] = expert, rest
        is_one = functools.reduce(jnp.maximum, [jnp.where(c == expert, 1.0, 0.0) for c in chosen])

        def ranks(i, _):
            before = number(1) < number(0) + i * AT_ONCE
            rank = jnp.sum(jnp.where(before, spread(is_one, shape, 1, layout), 0.0), axis=1)
            store_any(smem.rank.at[pl.ds(i * AT_ONCE, AT_ONCE)], rank)
            return ()

        lax.fori_loop(0, rows // AT_ONCE, ranks, ())
        plgpu.commit_smem()
        rank = load(smem.rank, layout.reduce(0)) + 1.0
        choice = functools.reduce(
            jnp.maximum, [jnp.where(c == expert, float(j), 0.0) for j, c in enumerate(chosen)]
        )
        of_tile = size, rows
        place, choice = (spread(x, of_tile, 1, layout) for x in (jnp.where(is_one > 0.0, rank, 0.0), choice))
        i, row = (plgpu.broadcasted_iota(jnp.int32, of_tile, d, layout=layout) for d in (0, 1))
        is_there = place == (i + (own + 1)).astype(jnp.float32)  # ranks are from 1 on
        pair = jnp.where(is_there, row.astype(jnp.float32) * float(k) + choice, 0.0)
        store_any(smem.pairs, jnp.sum(pair, axis=1).astype(jnp.int32))
        plgpu.commit_smem()
        _copy(gmem, smem, tile, rest)


def _copy(gmem: Any, smem: Any, tile: Any, rest: Any) -> None:
    """The `rest` rows of a tile, and the places of their choices."""
    (size,), k, D = smem.pairs.shape, gmem.chosen.shape[1], gmem.x.shape[1]
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=2 if D % (8 * WARP) == 0 else 1)
    for first in range(0, size, COPIED):

        @pl.when(first < rest)
        def _(first=first):
            pairs = [smem.pairs[first + r] for r in range(COPIED)]
            some = [load(gmem.x.at[lax.div(pair, jnp.int32(k))], layout) for pair in pairs]
            for r, (pair, x) in enumerate(zip(pairs, some, strict=True), first):
                store_any(gmem.tiles.at[tile * size + r], x)

                @pl.when(r < rest)
                def _(r=r, pair=pair):
                    gmem.places[pair] = tile * size + r


@kernel("experts", "size")
def expert_tiles(
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    *,
    experts: int,
    size: int,
    interpret: Any = None,
) -> tuple[Float[Array, "M D"], Int[Array, " T"], Int[Array, " T"], Int[Array, "1"], Int[Array, "P k"]]:
    """The rows in tiles of the experts that they have chosen, where `check_supported` says so.

    Args:
      x: rows.
      chosen: numbers of the experts of each row, all different; `experts` and above for none.
      experts: how many there are.
      size: rows of a tile, a multiple of 8.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      The tiles one behind the other [T * size, D]; the expert of each [T]; how many rows it has [T]; how many tiles
      there are [1]; and where each choice lies, in N rows or more, which is no place for one of no expert.
    """
    (N, D), k = x.shape, chosen.shape[1]
    rows = next(n for n in (32, 64, MOST) if n >= N)
    if N < rows:
        chosen = jnp.pad(chosen, ((0, rows - N), (0, 0)), constant_values=round_up(experts, AT_ONCE))
    tiles, i32 = most_tiles(N, k, experts, size), jnp.int32
    found = launch(
        "expert_tiles",
        functools.partial(_body, size=size, experts=experts),
        inputs={"x": x, "chosen": chosen},
        outputs={
            "tiles": jax.ShapeDtypeStruct((tiles * size, D), x.dtype),
            "experts": jax.ShapeDtypeStruct((tiles,), i32),
            "counts": jax.ShapeDtypeStruct((tiles,), i32),
            "used": jax.ShapeDtypeStruct((1,), i32),
            "places": jax.ShapeDtypeStruct((rows * k,), i32),
        },
        memory=_memory(rows, size, experts),
        ctas=tiles,
        auto_barriers=True,
        interpret=interpret,
    )
    return found["tiles"], found["experts"], found["counts"], found["used"], found["places"].reshape(rows, k)
