"""Matrices of a layer of the delta rule for one token: numbers, or codes of 8 bits with a scale for each block.

    W[f, d] = codes[f, d] * scales[f // BLOCK, d // BLOCK]

A kind of weights is an object with the same methods. Of codes, heads are as wide as a block, so that a tile of W_in and
a head's columns of W_o lie in one block of rows and of columns: a scale of W_in is multiplied into the sum over a
block's columns, of which a thread has a part, and one of W_o into a row's sum.
"""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.lanes import WARP, WARPS, lane_layout, load
from pallas_kernels.device.memory import Buffer, Memory, store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.dense_weights import BLOCK
from pallas_kernels.token.rooms import CLAIMED, ROWS, WARPGROUPS, WIDEST

EACH = WIDEST // WARP
"""Neighbouring numbers of a piece that a thread has."""


class Whole:
    """Numbers."""

    stages: ClassVar[int] = 2
    """Tiles of a warpgroup in shared memory, where it has as many."""
    units_at_once: ClassVar[tuple[int, ...]] = (4, 2, 1)
    """Multiples of the rows of W_o that one access of a warpgroup covers: the first that divides a copy is multiplied
    at once, where not all rows are."""

    @functools.cached_property
    def layout(self) -> Any:
        """Layout of a tile's piece: rows lie over the warps."""
        return lane_layout(WARP, EACH)

    @functools.cached_property
    def of_rows(self) -> Any:
        """Layout of one number of each of a tile's rows."""
        return self.layout.reduce(1)

    def reason(self, plan: Any) -> str | None:
        """Why a layer of these weights cannot be divided so; None if it can."""
        del plan

    def memory(self, plan: Any) -> Memory:
        """Shared memory of the first stage besides its room's."""
        del plan
        return {}

    def ask(self, stage: Any, lines: Any) -> list[jax.Array]:
        """Asks for what belongs to some lines of the stream, [lines, CHUNK]."""
        del stage, lines
        return []

    def keep(self, stage: Any, lines: Any, asked: list[jax.Array]) -> None:
        """Writes it to shared memory."""

    def row(self, stage: Any) -> list[jax.Array]:
        """s w in pieces."""
        return [load(stage.piece(i), self.layout.reduce(0)) for i in range(stage.pieces)]

    def product(self, stage: Any, tile: Any, number: Any, row: list[jax.Array]) -> jax.Array:
        """Sums over the rows of a tile in shared memory, the head's number-th one, each times s w."""
        del number
        total = None
        for i, v in enumerate(row):
            x = load(tile.at[:, i], self.layout)
            v = plgpu.layout_cast(lax.broadcast_in_dim(v, x.shape, [1]), self.layout)
            part = x.astype(jnp.float32) * v
            total = part if total is None else total + part
        assert total is not None
        return jnp.sum(total, axis=1)

    def read(self, head: Any) -> None:
        """Asks, before the token is there, for what belongs to this warpgroup's rows of W_o."""

    def scaled(self, head: Any, place: tuple[Any, int], sums: jax.Array) -> jax.Array:
        """Sums over some of these rows, times what belongs to them.

        Args:
          place: the piece of W_o, and their first row in it.
        """
        del head, place
        return sums


class Blocks(Whole):
    """Codes of E4M3, and scales in global memory: scales of W_in [blocks of F, blocks of D], output_scales of W_o."""

    stages: ClassVar[int] = 4
    units_at_once: ClassVar[tuple[int, ...]] = (5, 4, 2, 1)

    shape: ClassVar[tuple[int, ...]] = (WIDEST // BLOCK, BLOCK // EACH, EACH)
    """A piece by blocks, threads and a thread's numbers."""

    @functools.cached_property
    def layout(self) -> Any:
        tiling = plgpu.Tiling(((ROWS, *self.shape),))
        return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)

    @functools.cached_property
    def of_rows(self) -> Any:
        return self.layout.reduce((1, 2, 3))

    def reason(self, plan: Any) -> str | None:
        if plan.K != BLOCK or plan.E % BLOCK:
            return (
                f"heads of {plan.K} and {plan.E} outputs; of weights in 8 bits the kernel takes heads of {BLOCK}, and "
                f"multiples of it"
            )
        return None

    def memory(self, plan: Any) -> Memory:
        """See `Whole.memory`: scales of the blocks of a key head's rows of W_in, as integers after what is claimed.

        A buffer of their own would take 1024 bytes, which the widest layers do not have.
        """
        blocks = sum(kind.heads for kind in plan.kinds)
        return {"claimed": Buffer((CLAIMED + blocks * (plan.D // BLOCK),), jnp.int32)}

    def _place(self, stage: Any, block: Any, first: Any, count: int) -> Any:
        """A reference to some scales of a block of rows."""
        return stage.smem.claimed.at[pl.ds(CLAIMED + block * (stage.plan.D // BLOCK) + first, count)]

    def ask(self, stage: Any, lines: Any) -> list[jax.Array]:
        layout = r.layout(BLOCK, lines.size).reduce(1)
        heads = [(kind, n) for kind in stage.plan.kinds for n in range(kind.heads)]
        blocks = [
            lax.div(getattr(stage.places, kind.name) + stage.first * kind.heads, jnp.int32(BLOCK)) + n
            for kind, n in heads
        ]
        return [load(stage.gmem.scales.at[block, lines], layout) for block in blocks]

    def keep(self, stage: Any, lines: Any, asked: list[jax.Array]) -> None:
        for n, scales in enumerate(asked):
            place = self._place(stage, n, lines.start, lines.size)
            store_any(place, lax.bitcast_convert_type(scales, jnp.int32))

    def row(self, stage: Any) -> list[jax.Array]:
        return [self._load(stage, stage.piece(i), 0) for i in range(stage.pieces)]

    def _load(self, stage: Any, ref: Any, *reduced: int) -> jax.Array:
        """A piece, or a tile's, as `layout` has it. The interpreter knows no other view of a reference."""
        shape = (*ref.shape[:-1], *self.shape)
        if stage.dev.interpreted:
            return ref[...].reshape(shape)
        return load(ref.reshape(*shape), self.layout.reduce(reduced) if reduced else self.layout)

    def product(self, stage: Any, tile: Any, number: Any, row: list[jax.Array]) -> jax.Array:
        block, total = lax.div(number, jnp.int32(BLOCK // ROWS)), None
        of_blocks, each = self.layout.reduce((0, 2, 3)), self.shape[0]
        for i, v in enumerate(row):
            x = self._load(stage, tile.at[:, i])
            v = plgpu.layout_cast(lax.broadcast_in_dim(v, x.shape, [1, 2, 3]), self.layout)
            part = jnp.sum(x.astype(jnp.float32) * v, axis=3)
            scale = load(self._place(stage, block, i * each, each), of_blocks)
            scale = lax.broadcast_in_dim(lax.bitcast_convert_type(scale, jnp.float32), part.shape, [1])
            part = part * plgpu.layout_cast(scale, self.layout.reduce(3))
            total = part if total is None else total + part
        assert total is not None
        return jnp.sum(jnp.sum(total, axis=2), axis=1)

    def read(self, head: Any) -> list[jax.Array]:
        """The scales of all blocks that the warpgroup's rows lie in."""
        first, scales = lax.div(head.first, jnp.int32(BLOCK)), head.gmem.output_scales
        count = (head.plan.E // (head.plan.m * WARPGROUPS) - 2) // BLOCK + 2
        last = scales.shape[0] - 1
        return [scales[jnp.minimum(first + n, last), head.head] for n in range(count)]

    def scaled(self, head: Any, place: tuple[Any, int], sums: jax.Array) -> jax.Array:
        layout, rows = head.layout.reduce(1), head.rows(*place, len(sums))
        at = plgpu.broadcasted_iota(jnp.int32, sums.shape, 0, layout=layout) + rows.start
        first, (scale, *others) = lax.div(head.first, jnp.int32(BLOCK)), head.scales
        factors = plgpu.layout_cast(lax.broadcast_in_dim(scale, sums.shape, []), layout)
        for n, other in enumerate(others):
            factors = jnp.where(at < (first + n + 1) * BLOCK, factors, other)
        return sums * factors


def of_dtype(dtype: Any) -> Whole | None:
    """The kind of weights of a dtype; None where there is none."""
    kinds = dict.fromkeys(("float32", "bfloat16", "float16"), Whole()) | {"float8_e4m3fn": Blocks()}
    return kinds.get(jnp.dtype(dtype).name)
