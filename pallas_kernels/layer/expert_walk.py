"""Tiles of the experts of a row, which warpgroups take in turn: what both kernels of `layer.expert_row` do.

    sum_i x_i W_i,   over the rows i of the tiles of a CTA, for each span of tiles of the same columns

Tiles of `DEPTH` rows come to shared memory by bulk copies. What x is made of is asked for before them. Threads
multiply and add; the sums of all warps are added up at the end, always in one order.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.lanes import WARP, WARPS, lane_layout, load
from pallas_kernels.device.launch import warpgroup_index
from pallas_kernels.device.memory import Barriers, Buffer, Memory, store_any

DEPTH = 32
"""Numbers of the sum in a tile."""


def tile_layout(columns: int) -> Any:
    """A tile in registers, whose rows lie below each other over the warps."""
    return lane_layout(WARP, columns // WARP)


def memory_of(numbers: int, columns: int, stages: int, spans: int, warpgroups: int, dtype: Any) -> Memory:
    return {
        "tiles": Buffer((warpgroups * stages, DEPTH, columns), dtype),
        "x": Buffer((numbers,)),
        "sums": Buffer((spans, warpgroups, WARPS, columns)),
        "full": Barriers(arrivals=1, count=warpgroups * stages),
        "made": Barriers(arrivals=warpgroups),
    }


def walk(
    smem: Any,
    bounds: list[Any],
    copy: Callable[[Any, Any, Any], None],
    place: Callable[[Any], Any],
    load_row: Callable[[Any], Any],
    keep_row: Callable[[Any, Any], None],
    bring_later: Callable[[], None],
    flush: Callable[[int, jax.Array], None],
) -> None:
    """Multiplies and adds the tiles of a CTA, which its warpgroups take in turn.

    Args:
      bounds: the first tile, 0, and behind the last one of the same columns, for each of `smem.sums`' spans.
      copy: copy(i, destination, barrier) starts the copy of tile i.
      place: from the number of a tile to where its numbers of the sum begin in smem.x.
      load_row: load_row(wg) asks for what a warpgroup's part of smem.x is made of. Behind the copies it would come
        after all of them.
      keep_row: keep_row(wg, loaded) writes that part.
      bring_later: asks for what kernels need after this one; called by the first warpgroup, behind its tiles.
      flush: flush(span, sums) is called with the sums of a span.
    """
    spans, warpgroups, _, columns = smem.sums.shape
    layout, wg, stages = tile_layout(columns), warpgroup_index(), smem.tiles.shape[0] // warpgroups

    def before(end):
        """How many tiles of this warpgroup there are before tile `end`."""
        return lax.div(end + (warpgroups - 1) - wg, jnp.int32(warpgroups))

    count = before(bounds[-1])

    def start(i):
        slot = wg * stages + lax.rem(i, jnp.int32(stages))
        copy(i * warpgroups + wg, smem.tiles.at[slot], smem.full.at[slot])

    def meet():
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.made)
        plgpu.barrier_wait(smem.made)

    loaded = load_row(wg)
    lax.fori_loop(0, jnp.minimum(count, stages), lambda i, _: start(i), None)
    keep_row(wg, loaded)
    meet()

    def multiply(i, acc):
        slot = wg * stages + lax.rem(i, jnp.int32(stages))
        x = load(smem.x.at[pl.ds(place(i * warpgroups + wg), DEPTH)], layout.reduce(1))
        plgpu.barrier_wait(smem.full.at[slot])
        x = plgpu.layout_cast(lax.broadcast_in_dim(x, (DEPTH, columns), [0]), layout)
        products = load(smem.tiles.at[slot], layout).astype(jnp.float32) * x
        for first in range(0, DEPTH, WARPS):
            acc = acc + products[first : first + WARPS]

        @pl.when(i + stages < count)
        def _():
            plgpu.commit_smem()  # a barrier: every thread has read the tile
            start(i + stages)

        return acc

    for span in range(spans):
        zeros = plgpu.layout_cast(jnp.zeros((WARPS, columns), jnp.float32), layout)
        acc = lax.fori_loop(before(bounds[span]), before(bounds[span + 1]), multiply, zeros)
        store_any(smem.sums.at[span, wg], acc)
    pl.when(wg == 0)(bring_later)
    meet()
    for span in range(spans):

        @pl.when(span % warpgroups == wg)
        def _(span=span):
            rows = [smem.sums.at[span, w, warp] for w in range(warpgroups) for warp in range(WARPS)]
            flush(span, functools.reduce(jnp.add, [load(row, layout.reduce(0)) for row in rows]))
