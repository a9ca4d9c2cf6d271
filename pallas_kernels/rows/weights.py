"""Weights of one row's kernels: numbers of 16 bits, or codes of 8 with a scale for each block of 128 x 128.

    W[f, d] = codes[f, d] * scales[f // BLOCK, d // BLOCK]

A kind of weights is an object with the same methods. Tiles of codes are multiplied as those of numbers are. A tile's
rows lie in one block of rows; a scale is multiplied into sums over some of a block's numbers, which a thread has.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import generations
from pallas_kernels.device.lanes import WARP, WARPS, lane_layout, load, spread
from pallas_kernels.device.memory import Buffer, Memory, store_any
from pallas_kernels.device.operations import Device
from pallas_kernels.layer import rows as r

BLOCK = 128
"""Rows, and columns, that share a scale."""

WIDEST = 256
"""Numbers of a piece of a row: as many as a bulk copy takes of a dimension, and eight for each thread of a warp."""

EACH = WIDEST // WARP
"""Neighbouring numbers of a piece that a thread has."""


class Numbers:
    """Products of a row and tiles of numbers, whose rows lie over the warps."""

    @functools.cached_property
    def layout(self) -> Any:
        """Layout of a tile's piece."""
        return lane_layout(WARP, EACH)

    @functools.cached_property
    def of_rows(self) -> Any:
        """Layout of one number of each of a tile's rows."""
        return self.layout.reduce(1)

    def row(self, dev: Device, pieces: Sequence[Any]) -> list[jax.Array]:
        """A row of which shared memory has pieces."""
        del dev
        return [load(piece, self.layout.reduce(0)) for piece in pieces]

    def products(
        self, dev: Device, tile: Any, row: list[jax.Array], scales: Callable[[int, Any], jax.Array]
    ) -> jax.Array:
        """Sums over what a thread has of a tile [rows, pieces, WIDEST] in shared memory, times a row.

        Args:
          scales: scales(i, layout) loads the scales of the tile's i-th piece, one for each block.
        """
        del dev, scales
        total = None
        for i, v in enumerate(row):
            x = load(tile.at[:, i], self.layout)
            v = spread(v, x.shape, 1, self.layout)
            part = x.astype(jnp.float32) * v
            total = part if total is None else total + part
        assert total is not None
        return total

    def sums(self, products: jax.Array) -> jax.Array:
        """Sums over the rows, [rows]."""
        return jnp.sum(products, axis=1)


class Codes(Numbers):
    """The same of codes of E4M3."""

    shape: ClassVar[tuple[int, ...]] = (WIDEST // BLOCK, BLOCK // EACH, EACH)
    """A piece by blocks, threads and a thread's numbers."""

    @functools.cached_property
    def layout(self) -> Any:
        tiling = plgpu.Tiling(((WARPS, *self.shape),))
        return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)

    @functools.cached_property
    def of_rows(self) -> Any:
        return self.layout.reduce((1, 2, 3))

    def row(self, dev: Device, pieces: Sequence[Any]) -> list[jax.Array]:
        return [self._load(dev, piece, self.layout.reduce(0)) for piece in pieces]

    def _load(self, dev: Device, ref: Any, layout: Any) -> jax.Array:
        """A piece, by blocks and threads. The interpreter knows no other view of a reference."""
        shape = (*ref.shape[:-1], *self.shape)
        return ref[...].reshape(shape) if dev.interpreted else load(ref.reshape(*shape), layout)

    def products(
        self, dev: Device, tile: Any, row: list[jax.Array], scales: Callable[[int, Any], jax.Array]
    ) -> jax.Array:
        total = None
        for i, v in enumerate(row):
            x = self._load(dev, tile.at[:, i], self.layout)
            v = spread(v, x.shape, (1, 2, 3), self.layout)
            part = jnp.sum(x.astype(jnp.float32) * v, axis=3)
            scale = scales(i, self.layout.reduce((0, 2, 3)))
            part = part * spread(scale, part.shape, 1, self.layout.reduce(3))
            total = part if total is None else total + part
        assert total is not None
        return total

    def sums(self, products: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sum(products, axis=2), axis=1)


class Whole(Numbers):
    """Numbers of 16 bits, as `rows.dense_stream` has them."""

    def rows(self, F: int, own: int) -> int:
        """Rows of a tile, where CTAs have `own` numbers each of an inner width F."""
        del F, own
        return WARPS

    unit: ClassVar[int] = 1
    """The rows of a slice are a multiple of it."""

    def reason(self, F: int, own: int) -> str | None:
        """Why an inner width F is not cut into slices of `own` numbers, the last of which ends with it; None if it
        is."""
        del F, own
        return None

    def memory(self, D: int) -> Memory:
        """The row in shared memory, and scales."""
        return {"v": Buffer((D,))}

    def ask(self, gmem: Any, first: Any, lines: Any) -> Sequence[jax.Array]:
        """Asks global memory for numbers that belong to some lines of the row."""
        del gmem, first, lines
        return ()

    def keep(self, smem: Any, asked: Sequence[jax.Array], lines: Any) -> None:
        """Writes them to shared memory."""
        del smem, asked, lines

    def add(self, total: jax.Array, products: list[jax.Array], scale: Callable[[], jax.Array]) -> jax.Array:
        """A sum of the projection down and products of a tile's rows, of some columns; scale() has their scales."""
        del scale
        return functools.reduce(jnp.add, products, total)


class Blocks(Codes, Whole):
    """Codes of E4M3, and scales [3, blocks of F, blocks of D] of A, B and W in global memory."""

    unit = WARPS

    def rows(self, F: int, own: int) -> int:
        return WARPS if F % (2 * WARPS) or own % (2 * WARPS) else 2 * WARPS

    def reason(self, F: int, own: int) -> str | None:
        if not generations.has_bulk_copies():
            return "weights in 8 bits; the kernel takes them from compute capability 9.0"
        if F % self.unit:
            return f"an inner width of {F}; of weights in 8 bits the kernel takes multiples of {self.unit}"
        if all(min(start, F - own) % BLOCK + own <= 2 * BLOCK for start in range(0, F, own)):
            return None
        return f"slices of {own} of an inner width of {F}, some of which lie in three blocks of {BLOCK}"

    def memory(self, D: int) -> Memory:
        return {**super().memory(D), "scales": Buffer((6, D // BLOCK))}

    def ask(self, gmem: Any, first: Any, lines: Any) -> Sequence[jax.Array]:
        block, last = lax.div(first, jnp.int32(BLOCK)), gmem.scales.shape[1] - 1
        layout = r.layout(BLOCK, lines.size).reduce(1)
        places = [(matrix, jnp.minimum(block + n, last)) for matrix in range(3) for n in range(2)]
        return [load(gmem.scales.at[matrix, row, lines], layout) for matrix, row in places]

    def keep(self, smem: Any, asked: Sequence[jax.Array], lines: Any) -> None:
        for n, scales in enumerate(asked):
            store_any(smem.scales.at[n, lines], scales)

    def add(self, total: jax.Array, products: list[jax.Array], scale: Callable[[], jax.Array]) -> jax.Array:
        return total + functools.reduce(jnp.add, products) * scale()


def of_dtype(dtype: Any) -> Whole | None:
    """The kind of weights of a dtype; None where there is none."""
    kinds = {"bfloat16": Whole(), "float16": Whole(), "float8_e4m3fn": Blocks()}
    return kinds.get(jnp.dtype(dtype).name)
