"""Matrices of a layer of the delta rule for one token: numbers, or codes of 8 bits with a scale for each block.

Kinds of weights as in `rows.weights`. Of codes, heads are as wide as a block, so that a tile of W_in and a
head's columns of W_o lie in one block of rows and of columns.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.lanes import load, spread
from pallas_kernels.device.memory import Buffer, Memory, store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.rows.delta_rooms import CLAIMED, ROWS, WARPGROUPS
from pallas_kernels.rows.weights import BLOCK, WIDEST, Codes, Numbers

MOST_CODES = 2560
"""Numbers of a row that codes are multiplied by, at most: a thread has a 32nd of them in registers. Of 4096 numbers
some are spilled, and a token of qwen3.5-9b takes 3.13 ms, where several kernels take 2.96."""


class Whole(Numbers):
    """Numbers."""

    units_at_once: ClassVar[tuple[int, ...]] = (4, 2, 1)
    """Multiples of the rows of W_o that one access of a warpgroup covers: the first that divides a copy is multiplied
    at once, where not all rows are."""

    def reason(self, plan: Any) -> str | None:
        """Why a layer of these weights cannot be divided so; None if it can."""
        del plan

    def memory(self, plan: Any) -> Memory:
        """Shared memory of the first stage besides its room's."""
        del plan
        return {}

    def ask(self, stage: Any, lines: Any) -> list[jax.Array]:
        """Asks for what belongs to some lines of the stream, [lines, LINE]."""
        del stage, lines
        return []

    def keep(self, stage: Any, lines: Any, asked: list[jax.Array]) -> None:
        """Writes it to shared memory."""

    def product(self, stage: Any, tile: Any, number: Any, row: list[jax.Array]) -> jax.Array:
        """Sums over the rows of a tile in shared memory, the head's number-th one, each times s w."""

        def scales(i: int, layout: Any) -> jax.Array:
            place = self.place(stage, lax.div(number, jnp.int32(BLOCK // ROWS)), i * each, each)
            return lax.bitcast_convert_type(load(place, layout), jnp.float32)

        each = WIDEST // BLOCK
        return self.sums(self.products(stage.dev, tile, row, scales))

    def place(self, stage: Any, block: Any, first: Any, count: int) -> Any:
        """A reference to some scales of a block of rows, as integers after what is claimed."""
        return stage.smem.claimed.at[pl.ds(CLAIMED + block * (stage.plan.D // BLOCK) + first, count)]

    def read(self, head: Any) -> list[jax.Array]:
        """Asks, before the token is there, for what belongs to this warpgroup's rows of W_o."""
        del head
        return []

    def scaled(self, head: Any, place: tuple[Any, int], sums: jax.Array) -> jax.Array:
        """Sums over some of these rows, times what belongs to them.

        Args:
          place: the piece of W_o, and their first row in it.
        """
        del head, place
        return sums


class Blocks(Codes, Whole):
    """Codes of E4M3, and scales in global memory: scales of W_in [blocks of F, blocks of D], output_scales of W_o."""

    units_at_once: ClassVar[tuple[int, ...]] = (5, 4, 2, 1)

    def reason(self, plan: Any) -> str | None:
        if plan.K != BLOCK or plan.E % BLOCK:
            takes = f"of weights in 8 bits the kernel takes heads of {BLOCK}, and multiples of it"
            return f"heads of {plan.K} and {plan.E} outputs; {takes}"
        if plan.D > MOST_CODES:
            return f"rows of {plan.D}; of weights in 8 bits the kernel takes at most {MOST_CODES} numbers"
        return None

    def memory(self, plan: Any) -> Memory:
        """See `Whole.memory`: scales of the blocks of a key head's rows of W_in.

        A buffer of their own would take 1024 bytes, which the widest layers do not have.
        """
        blocks = sum(kind.heads for kind in plan.kinds)
        return {"claimed": Buffer((CLAIMED + blocks * (plan.D // BLOCK),), jnp.int32)}

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
            place = self.place(stage, n, lines.start, lines.size)
            store_any(place, lax.bitcast_convert_type(scales, jnp.int32))

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
        factors = spread(scale, sums.shape, (), layout)
        for n, other in enumerate(others):
            factors = jnp.where(at < (first + n + 1) * BLOCK, factors, other)
        return sums * factors


def of_dtype(dtype: Any) -> Whole | None:
    """The kind of weights of a dtype; None where there is none."""
    kinds = dict.fromkeys(("float32", "bfloat16", "float16"), Whole()) | {"float8_e4m3fn": Blocks()}
    return kinds.get(jnp.dtype(dtype).name)
