"""Chunks that several sequences share: the tokens of others are masked on the way in and left alone on the way out.

In a chunk that a span shares with another sequence, the tokens of the others are replaced: zeros in the tiles of
tokens, the nearest owned gate in g2_cum. That is exact.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.layouts import CHUNK, ROW, WGMMA, iota
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
      tiles: [C, columns]; rows of other tokens become 0.
      tiles_if: a condition and one more tile, masked where the condition holds.
      square: a [C, C] tile whose columns are tokens too.
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
            x = plgpu.load(square, layout=WGMMA)
            square[...] = jnp.where(_owned(1, begin, end), x, jnp.zeros((), x.dtype))
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
    tokens: int = CHUNK,
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
      tokens: of a chunk.
    """

    def whole():
        tile[1][...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile[0], destination(pl.ds(chunk * tokens, tokens)))

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


def _owned(dimension: int, begin, end) -> jax.Array:
    """Marks the entries of a [C, C] array that have an index of [begin, end) along a dimension."""
    index = iota((CHUNK, CHUNK), dimension)
    return (index >= begin) & (index < end)


def _keep_rows(ref, begin, end) -> None:
    """Zeroes the rows of a tile outside [begin, end), 64 columns at a time."""
    for column in range(0, ref.shape[1], CHUNK):
        part = ref.at[:, column : column + CHUNK]
        x = plgpu.load(part, layout=WGMMA)
        part[...] = jnp.where(_owned(0, begin, end), x, jnp.zeros((), x.dtype))


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
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (CHUNK,), 0), ROW)
    plgpu.commit_smem()  # every warp reads the vector, and one writes it
    ref[...] = jnp.where((row >= begin) & (row < end), x, 0.0)
