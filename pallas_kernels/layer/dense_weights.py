"""Weights of `layer.dense_stream`: numbers of 16 bits, or codes of 8 with a scale for each block of 128 x 128.

    W[f, d] = codes[f, d] * scales[f // BLOCK, d // BLOCK]

A kind of weights is an object with the same methods. Tiles of codes are multiplied as those of numbers are; a scale
counts where it is cheap. Of the branches it is multiplied into the row, of which there is one version for every block
of rows that a CTA's slice lies in. Of the projection down it is multiplied into the sums over such a block of rows. A
slice lies in two blocks at most.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import generations
from pallas_kernels.device.lanes import WARPS, load
from pallas_kernels.device.memory import Buffer, Memory, store_any
from pallas_kernels.device.operations import Device
from pallas_kernels.layer import rows as r

BLOCK = 128
"""Rows, and columns, that share a scale."""


class Whole:
    """Numbers of 16 bits."""

    unit: ClassVar[int] = 1
    """The rows of a slice are a multiple of it."""

    def reason(self, F: int, own: int) -> str | None:
        """Why an inner width F is not cut into slices of `own` numbers, the last of which ends with it; None if it
        is."""
        del F, own
        return None

    def memory(self, D: int) -> Memory:
        """The row in shared memory."""
        return {"v": Buffer((D,))}

    def ask(self, gmem: Any, first: Any, lines: Any) -> Sequence[jax.Array]:
        """Asks global memory for numbers that belong to some lines of the row."""
        del gmem, first, lines
        return ()

    def keep(
        self, dev: Device, smem: Any, asked: Sequence[jax.Array], part: Any, s: jax.Array, w: jax.Array
    ) -> None:
        """Writes s w to shared memory: lines [n, width] of the row, its part-th ones."""
        del asked
        dev.store_flat(smem.v.at[_flat(part, s)], s * w)

    def branches(self, smem: Any, tiles: Any) -> list[tuple[Any, Any, Any]]:
        """Versions of the row, each with the first and the last but one of a warpgroup's tiles that it is for."""
        return [(smem.v, 0, tiles.turn)]

    def down(
        self, smem: Any, tiles: Any, layout: Any, total: Callable[[Any, Any], tuple[jax.Array, ...]]
    ) -> tuple[jax.Array, ...]:
        """Sums over the warpgroup's tiles of the projection down; total(first, end) has those of some of them."""
        del smem, layout
        return total(tiles.turn, tiles.end)


class Blocks(Whole):
    """Codes of E4M3, and scales [3, blocks of F, blocks of D] of A, B and W in global memory.

    A tile of four rows lies in one block.
    """

    unit = WARPS

    def reason(self, F: int, own: int) -> str | None:
        if not generations.has_bulk_copies():
            return "weights in 8 bits; the kernel takes them from compute capability 9.0"
        if F % self.unit:
            return f"an inner width of {F}; of weights in 8 bits the kernel takes multiples of {self.unit}"
        if all(min(start, F - own) % BLOCK + own <= 2 * BLOCK for start in range(0, F, own)):
            return None
        return f"slices of {own} of an inner width of {F}, some of which lie in three blocks of {BLOCK}"

    def memory(self, D: int) -> Memory:
        return {"v": Buffer((4, D)), "scales": Buffer((2, D // BLOCK))}

    def ask(self, gmem: Any, first: Any, lines: Any) -> Sequence[jax.Array]:
        block, last = lax.div(first, jnp.int32(BLOCK)), gmem.scales.shape[1] - 1
        layout = r.layout(BLOCK, lines.size).reduce(1)
        places = [(matrix, jnp.minimum(block + n, last)) for matrix in range(3) for n in range(2)]
        return [load(gmem.scales.at[matrix, row, lines], layout) for matrix, row in places]

    def keep(
        self, dev: Device, smem: Any, asked: Sequence[jax.Array], part: Any, s: jax.Array, w: jax.Array
    ) -> None:
        v, lines = s * w, pl.ds(part * s.shape[0], s.shape[0])
        for n, scale in enumerate(asked[:4]):
            dev.store_flat(smem.v.at[n, _flat(part, v)], v * r.spread(scale, BLOCK))
        for n, scale in enumerate(asked[4:]):
            store_any(smem.scales.at[n, lines], scale)

    def branches(self, smem: Any, tiles: Any) -> list[tuple[Any, Any, Any]]:
        a, b, c = (tiles.of_blocks(matrix) for matrix in range(3))
        ends = [*a, *b, c[0]]
        return [(smem.v.at[n], ends[n], ends[n + 1]) for n in range(4)]

    def down(
        self, smem: Any, tiles: Any, layout: Any, total: Callable[[Any, Any], tuple[jax.Array, ...]]
    ) -> tuple[jax.Array, ...]:
        begin, middle = tiles.of_blocks(2)
        first = tiles.chunk * (tiles.sizes.pieces * (tiles.piece // BLOCK))
        at = plgpu.broadcasted_iota(jnp.int32, (1, tiles.piece), 1, layout=layout)

        def scaled(n: int, p: int, x: jax.Array) -> jax.Array:
            line = first + p * (tiles.piece // BLOCK)
            return jnp.where(at < BLOCK, x * smem.scales[n, line], x * smem.scales[n, line + 1])

        parts = total(begin, middle), total(middle, tiles.end)
        low, high = ([scaled(n, p, x) for p, x in enumerate(part)] for n, part in enumerate(parts))
        return tuple(x + y for x, y in zip(low, high, strict=True))


def _flat(part: Any, v: jax.Array) -> Any:
    return pl.ds(part * v.size, v.size)


def of_dtype(dtype: Any) -> Whole | None:
    """The kind of weights of a dtype; None where there is none."""
    kinds = {"bfloat16": Whole(), "float16": Whole(), "float8_e4m3fn": Blocks()}
    return kinds.get(jnp.dtype(dtype).name)
