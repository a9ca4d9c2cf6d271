"""Chunks that several sequences share: the tokens of others are masked on the way in and left alone on the way out.

In a chunk that a span shares with another sequence, the tokens of the others are replaced: zeros in the tiles of
tokens, the nearest owned gate in g2_cum. That is exact.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.layouts import CHUNK, COL, ROW, WGMMA, along_columns, along_rows
from pallas_kernels.device.memory import store_any
from pallas_kernels.work.spans import Span, owned_rows


def mask_foreign(
    span: Span,
    chunk: jax.Array,
    tiles: Iterable[Any],
    *,
    tiles_if: tuple[jax.Array, Any] | None = None,
    square: Any = None,
    gates: Any = None,
    vectors: Iterable[Any] = (),
) -> None:
    """Replaces what a chunk in shared memory holds of other sequences' tokens, where it holds any.

    Args:
      tiles: [C, columns], or n of them [n, C, columns]; rows of other tokens become 0.
      tiles_if: a condition and one more tile, masked where the condition holds.
      square: a [C, C] tile whose rows and columns are tokens.
      gates: g2_cum [C]. All exponents stay <= 0.
      vectors: [C], 0 at other tokens.
    """
    begin, end, is_shared = owned_rows(span, chunk)

    @pl.when(is_shared)
    def _():
        for tile in tiles:
            _keep_rows(tile, begin, end)
        if tiles_if is not None:
            pl.when(tiles_if[0])(lambda: _keep_rows(tiles_if[1], begin, end))
        if square is not None:
            owned = along_rows(_owned(ROW, begin, end), CHUNK) & along_columns(_owned(COL, begin, end), CHUNK)
            _keep(square, owned)
        if gates is not None:
            _keep_gates(gates, begin, end)
        for vector in vectors:
            _keep_vector(vector, begin, end)
        plgpu.commit_smem()


def store_owned(
    span: Span,
    chunk: jax.Array,
    x: jax.Array,
    tile: tuple[Any, Any],
    flat: tuple[Any, Any] | None,
    destination: Callable[[Any], Any],
    *,
    waits_for_rows: bool = False,
) -> None:
    """A tile of a chunk to memory, through shared memory: whole, or row by row those that the span owns.

    Earlier stores from the tile must have been waited for.

    Args:
      x: the tile, in registers.
      tile: a reference to swizzled shared memory [C, columns], and the view of it into which x goes.
      flat: the same bytes as a plain array, likewise; None where rows are not packed.
      destination: from tokens of the row of the batch, a slice or a number, to where they go.
      waits_for_rows: whether a chunk that goes row by row has left the tile at the end, so that behind any chunk one
        store at most is on its way.
    """

    def whole():
        tile[1][...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile[0], destination(pl.ds(chunk * CHUNK, CHUNK)))

    if flat is None:
        return whole()
    begin, end, is_shared = owned_rows(span, chunk)

    @pl.when(is_shared)
    def _():
        store_any(flat[1], x)
        plgpu.commit_smem()

        def one(t, _):
            plgpu.copy_smem_to_gmem(flat[0].at[t], destination(chunk * CHUNK + t))
            return ()

        lax.fori_loop(begin, end, one, ())
        if waits_for_rows:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.when(jnp.logical_not(is_shared))(whole)


def _owned(layout, begin, end) -> jax.Array:
    """Which rows of a chunk are [begin, end), as a vector in a layout."""
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (CHUNK,), 0), layout)
    return (row >= begin) & (row < end)


def _keep(ref, owned) -> None:
    """Zeroes what is not owned of a [C, C] tile."""
    x = plgpu.load(ref, layout=WGMMA)
    ref[...] = jnp.where(owned, x, jnp.zeros((), x.dtype))


def _keep_rows(ref, begin, end) -> None:
    """Zeroes the rows of tiles outside [begin, end), 64 columns at a time.

    In a loop, because few chunks are shared and all that is unrolled here is compiled into every kernel.
    """
    columns = ref.shape[-1] // CHUNK

    def one(i, _):
        owned = along_rows(_owned(ROW, begin, end), CHUNK)
        part = pl.ds(lax.rem(i, columns) * CHUNK, CHUNK)
        _keep(ref.at[:, part] if len(ref.shape) == 2 else ref.at[lax.div(i, columns), :, part], owned)
        return ()

    lax.fori_loop(0, math.prod(ref.shape[:-2]) * columns, one, ())


def _keep_gates(gates, begin, end) -> None:
    """Before the first owned token no decay, after the last one the last sum."""
    last = gates[end - 1]
    g = plgpu.load(gates, layout=ROW)
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (CHUNK,), 0), ROW)
    plgpu.commit_smem()  # every warp reads the vector, and one writes it
    gates[...] = jnp.where(row < begin, 0.0, jnp.where(row >= end, last, g))


def _keep_vector(ref, begin, end) -> None:
    """Zeroes a vector outside [begin, end)."""
    x = plgpu.load(ref, layout=ROW)
    plgpu.commit_smem()  # every warp reads the vector, and one writes it
    ref[...] = jnp.where(_owned(ROW, begin, end), x, 0.0)
