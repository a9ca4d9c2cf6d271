"""What `ring_step` has in registers: a ring, and sums of products with a state that comes in chunks.

Nothing here touches global memory but the loads of a ring, and the states that tokens are added to.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from old_ring.ring import LENGTH, Slot
from pallas_kernels.decode.tiles import ACCESS_BYTES, GRANULE, WARP, WARPS, Rule, lane_layout, load
from pallas_kernels.device.memory import store_any

PART_ROWS = 64
"""Of a state, in registers while tokens are added to them."""

VECTOR_REGISTERS = 64
"""That a thread has for vectors along K, beside states [V, K]."""

ROW_ALIGNMENT = 16
"""Rows of a chunk are a multiple of this, which is as many as a warpgroup has beside each other."""


class Shape(NamedTuple):
    """A state's tile in chunks."""

    rows: int
    """Of a chunk."""
    columns: int
    chunks: int

    @classmethod
    def of(cls, rule: Rule, block: int, chunk_bytes: int, itemsize: int) -> "Shape":
        """Of `block` entries of V, in chunks of at most so many bytes."""
        total, columns = (rule.K, block) if rule.kv_layout else (block, rule.K)
        sizes = (n for n in range(ROW_ALIGNMENT, total + 1, ROW_ALIGNMENT) if total % n == 0)
        rows = max((n for n in sizes if n * columns * itemsize <= chunk_bytes), default=ROW_ALIGNMENT)
        return cls(rows, columns, total // rows)


class Slices(NamedTuple):
    """How a warpgroup takes rows of a state: so many at once, in a layout."""

    rows: int
    layout: Any


def row_slices(columns: int, lanes: int = WARP) -> Slices:
    """Of four neighbours to a thread, at most so many threads along a row."""
    lanes = math.gcd(columns // 4, lanes)
    return Slices(WARPS * WARP // lanes, lane_layout(lanes, 4))


def column_layout(columns: int) -> Any:
    """Of [rows, columns]: a column to a thread where there are enough, so that sums over rows stay in a warp."""
    lanes = math.gcd(columns // WARPS, WARP)
    if lanes == WARP:
        tiling = plgpu.Tiling(((1, WARPS * WARP), (WARP,), (1,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((WARP // lanes, WARPS * lanes), (lanes,), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1)


def spread(x: jax.Array, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """A vector along `axis` of an array, repeated along the other axis."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), layout)


class Held(NamedTuple):
    """A ring in registers, zeros or ignored where there is no token."""

    k: jax.Array
    """[L, K], each row in a few lanes of a warp."""
    u: jax.Array
    """[L, block], float32, each column in a thread."""
    since: jax.Array
    """Log decays since each token [L]."""
    total: jax.Array
    """Log decay since the checkpoint."""
    count: jax.Array


class Ring:
    """The layouts of a ring, and what is done with it."""

    LANES = 8
    """Along a key."""

    def __init__(self, K: int, block: int, itemsize: int):
        lanes = math.gcd(K // 4, self.LANES)
        self.k_layout = lane_layout(lanes, math.gcd(K // lanes, ACCESS_BYTES // itemsize))
        self.u_layout = column_layout(block)
        self.g_layout = lane_layout(lanes, LENGTH // lanes)
        self.rows = self.k_layout.reduce(1)

    def load(self, here: Slot, count: jax.Array) -> Held:
        k, u = load(here.k, self.k_layout), load(here.u, self.u_layout)
        along, shape = self.g_layout.reduce(0), (LENGTH, LENGTH)
        g = here.log_decays(count, along)
        row, column = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=self.g_layout) for i in range(2))
        since = jnp.sum(jnp.where(column > row, spread(g, shape, 1, self.g_layout), 0.0), axis=1)
        entry = plgpu.broadcasted_iota(jnp.int32, u.shape, 0, layout=self.u_layout)
        u = jnp.where(entry < count, u.astype(jnp.float32), 0.0)
        return Held(k, u, since, jnp.sum(g), count)

    def weights(self, held: Held, x: jax.Array, log_decay: jax.Array) -> jax.Array:
        """D_j (x . k_j) [L] of a vector [K], with what decayed since the ring's last token."""
        k = held.k.astype(jnp.float32)
        products = jnp.sum(k * spread(x, k.shape, 1, self.k_layout), axis=1)
        position = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=self.rows)
        return jnp.where(position < held.count, jnp.exp(held.since + log_decay) * products, 0.0)

    def spill(self, held: Held, log_decay: jax.Array, keys: Any, values: Any) -> None:
        """Writes D_j k_j [L, K] and u_j [L, block] to shared memory's first L rows, zeros where there is no token.

        Args:
          log_decay: since the ring's last token.
        """
        position = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=self.rows)
        decays = jnp.exp(held.since + log_decay)
        is_token = spread(position < held.count, held.k.shape, 0, self.k_layout)
        k = held.k.astype(jnp.float32) * spread(decays, held.k.shape, 0, self.k_layout)
        store_any(keys.at[pl.ds(0, LENGTH)], jnp.where(is_token, k, 0.0))
        store_any(values.at[pl.ds(0, LENGTH)], held.u)

    def recall(self, held: Held, weights: Any) -> jax.Array:
        """sum_j weights_j u_j along V."""
        w = load(weights, self.u_layout.reduce(1))
        return jnp.sum(held.u * spread(w, held.u.shape, 0, self.u_layout), axis=0)


def add_tokens(state: Any, decay: jax.Array, keys: Any, values: Any, kv_layout: bool) -> None:
    """state <- decay state + sum_j keys_j values_j^T, part by part, of a state in memory.

    Args:
      state: [K, block], or [block, K].
      keys, values: [tokens, K] and [tokens, block] in shared memory, float32, which all warps have written.
    """
    total_rows, columns = state.shape
    slices = row_slices(columns)
    # Longer rows would need more registers than there are.
    rows = PART_ROWS if total_rows % PART_ROWS == 0 and columns <= 128 else GRANULE
    size = (rows, columns)
    x, y = (keys, values) if kv_layout else (values, keys)

    def part(i, _):
        here = pl.ds(i * rows, rows)
        S = load(state.at[here], slices.layout).astype(jnp.float32) * decay
        for j in range(keys.shape[0]):
            along_rows = load(x.at[j, here], slices.layout.reduce(1))
            along_columns = load(y.at[j], slices.layout.reduce(0))
            S = S + spread(along_rows, size, 0, slices.layout) * spread(along_columns, size, 1, slices.layout)
        store_any(state.at[here], S.astype(state.dtype))

    lax.fori_loop(0, total_rows // rows, part, None)


class Products:
    """x^T S of vectors x [K] in shared memory, from the chunks of a state one after the other."""

    def __init__(self, rule: Rule, shape: Shape, sums: Any, vectors: Any, count: int, v_layout: Any):
        self.kv, self.shape, self.v_layout = rule.kv_layout, shape, v_layout
        self.sums, self.vectors = sums, vectors
        # With states [V, K] a sum goes over lanes: few of them, as far as the vectors leave registers.
        lanes = next(n for n in (8, 16, WARP) if n == WARP or rule.K // n * count <= VECTOR_REGISTERS)
        self.slices = row_slices(shape.columns, WARP if self.kv else lanes)
        self.count = count

    def start(self) -> list[jax.Array]:
        """What is carried from chunk to chunk: sums of [K, V], the vectors of [V, K]."""
        layout = self.slices.layout
        if not self.kv:
            return [load(self.vectors.at[i], layout.reduce(0)) for i in range(self.count)]
        zeros = jnp.zeros((self.slices.rows, self.shape.columns), jnp.float32)
        return [plgpu.layout_cast(zeros, layout) for _ in range(self.count)]

    def add(self, chunk: Any, first_row: jax.Array, carry: list[jax.Array]) -> list[jax.Array]:
        rows, layout = self.slices
        for i in range(0, self.shape.rows, rows):
            s = load(chunk.at[pl.ds(i, rows)], layout).astype(jnp.float32)
            here = pl.ds(first_row + i, rows)
            if self.kv:
                x = [load(self.vectors.at[j, here], layout.reduce(1)) for j in range(self.count)]
                carry = [c + s * spread(y, s.shape, 0, layout) for c, y in zip(carry, x, strict=True)]
            else:
                for j, x in enumerate(carry):
                    store_any(self.sums.at[j, here], jnp.sum(s * spread(x, s.shape, 1, layout), axis=1))
        return carry

    def of_token(self, t: int, carry: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """k^T S and q^T S of token t along V, after all chunks. It is called for one token after the other."""
        if not self.kv:
            if t == 0:
                plgpu.commit_smem()
            y, z = (load(self.sums.at[2 * t + i], self.v_layout.reduce(0)) for i in range(2))
            return y, z
        # The sums of warps meet in shared memory.
        plgpu.commit_smem()
        for i in range(2):
            store_any(self.sums.at[i], carry[2 * t + i])
        plgpu.commit_smem()
        y, z = (jnp.sum(load(self.sums.at[i], self.v_layout), axis=0) for i in range(2))
        return y, z
