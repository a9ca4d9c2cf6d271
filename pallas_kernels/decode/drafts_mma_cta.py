"""Sizes, shared memory and layouts of `drafts_mma`."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.decode import walk
from pallas_kernels.decode.ring import LENGTH
from pallas_kernels.decode.tiles import WARP, WARPS, across_layout, lane_layout, vector_layout
from pallas_kernels.device.layouts import round_up
from pallas_kernels.device.memory import (
    ALIGNMENT,
    REDUCTION_BYTES,
    SMEM_LIMIT,
    Barriers,
    Buffer,
    Memory,
    smem_bytes,
)

GRANULE = 64
"""Rows of a wgmma and of a chunk, columns of a swizzled tile: K and V are multiples of it."""

BLOCKS = (128, GRANULE)
"""Entries of V that a warpgroup may take at once."""

PADDED = 2
"""Columns behind the sums of a row, so that few threads meet in a bank."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs, not what it computes."""

    block: int
    """Entries of V that a warpgroup takes at once."""
    warpgroups: int
    """Warpgroups of a CTA."""
    states: int
    """States in shared memory, for each warpgroup."""

    @classmethod
    def default(cls, K: int, V: int, T: int) -> "Config":
        """Two states for each of two warpgroups, or what there is room for.

        Two were fastest on an H200 with K = V = 128 and four tokens (docs/log/decode.md).
        """
        block = next(n for n in BLOCKS if V % n == 0)
        choices = (cls(block, *n) for n in ((2, 2), (2, 1), (1, 2)))
        return next((x for x in choices if _bytes(x, K, T) <= SMEM_LIMIT - ALIGNMENT), cls(block, 1, 1))


class Columns(NamedTuple):
    """Columns of the products of T tokens."""

    half: int
    """Columns of keys and queries, those of keys first."""

    @property
    def all(self) -> int:
        """Columns with those of the second terms of sums behind them."""
        return 2 * self.half

    @property
    def operand_rows(self) -> int:
        """Rows of an array with the keys of the ring and a row for each column."""
        return max(GRANULE, LENGTH + self.all)

    @classmethod
    def of(cls, T: int) -> "Columns":
        """The columns of T tokens. A tile of wgmma has eight."""
        return cls(round_up(2 * T, 8))


def memory(K: int, config: Config, T: int, is_tree: bool) -> Memory:
    """Shared memory of a CTA: everything once for each warpgroup."""
    W, columns, stages = config.warpgroups, Columns.of(T), config.states * (K // GRANULE)
    return {
        "state": Buffer((W, stages, GRANULE, config.block), jnp.bfloat16, swizzle=128),
        "operands": Buffer((W, columns.operand_rows, K), jnp.bfloat16, swizzle=128),
        "values": Buffer((W, 2 * LENGTH, config.block), jnp.bfloat16, swizzle=32),
        "weights": Buffer((W, GRANULE, columns.all), jnp.bfloat16, swizzle=32),
        "vectors": Buffer((W, columns.half, K)),
        "between": Buffer((W, GRANULE, columns.half)),
        "sums": Buffer((W, config.block, columns.half + PADDED)),
        "logs": Buffer((W, GRANULE)),
        "decayed": Buffer((W, columns.half)),
        "own": Buffer((W, round_up(T, WARPS))),
        "ancestors": Buffer((W, columns.half), jnp.int32) if is_tree else None,
        "arrived": Barriers(1, W * stages),
    }


def _bytes(config: Config, K: int, T: int) -> int:
    return smem_bytes(memory(K, config, T, is_tree=True), REDUCTION_BYTES)


class Cta(walk.Cta):
    """The knowledge of a warpgroup, with its buffers by name."""

    def __init__(self, gmem: Any, smem: Any, **static: Any):
        super().__init__(gmem, smem, **static)
        K, wg = self.sizes.K, self.wg
        self.num_chunks, self.columns = K // GRANULE, Columns.of(self.T)
        self.operands, self.values, self.weights = (
            smem.operands.at[wg],
            smem.values.at[wg],
            smem.weights.at[wg],
        )
        self.vectors, self.between, self.sums = smem.vectors.at[wg], smem.between.at[wg], smem.sums.at[wg]
        self.logs, self.decayed, self.own = smem.logs.at[wg], smem.decayed.at[wg], smem.own.at[wg]
        self.ancestors: Any = None if smem.ancestors is None else smem.ancestors.at[wg]
        # Entries of a ring, 8 neighbours to a thread, so that those of a warp fill whole tiles of shared memory.
        self.key_layout, self.value_layout = lane_layout(8, 8), across_layout(GRANULE, 2)
        self.g_layout = lane_layout(8, LENGTH // 8)
        self.some_layout = lane_layout(WARP, 4 if K % 128 == 0 else 2)

    def stage_of(self, i: jax.Array, c: int) -> jax.Array:
        """The stage of chunk c of the i-th unit's state."""
        return lax.rem(i, self.config.states) * self.num_chunks + c

    def copy_state(self, i: jax.Array) -> None:
        """Starts the copies of the i-th unit's state."""
        self.copy(i, self.slot_of(i), range(self.num_chunks), lambda c: self.stage_of(i, c))

    def groups(self) -> Iterator[tuple[Any, Any, Any]]:
        """The tokens, each a warp's where there are as many: where keys and queries lie, and in which layout.

        The others are taken one by one.
        """
        T, whole = self.T, vector_layout(self.sizes.K)
        for t in range(0, T, WARPS):
            if t + WARPS <= T:
                yield pl.ds(t, WARPS), pl.ds(T + t, WARPS), self.some_layout
            else:
                yield from ((s, T + s, whole) for s in range(t, T))


def rows_of(c: int) -> Any:
    """Rows of chunk c, or entries of V of a part of a block."""
    return pl.ds(c * GRANULE, GRANULE)
