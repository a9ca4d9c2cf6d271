"""A ring in registers, and sums of products with a state that comes in chunks, for `deferred` and `drafts`.

Nothing here touches global memory but the loads of a ring, and the states that tokens are added to.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.codes import Floats, Rows
from pallas_kernels.decode.ring import LENGTH
from pallas_kernels.decode.tiles import (
    ACCESS_BYTES,
    WARP,
    WARPS,
    Sizes,
    column_layout,
    lane_layout,
    load,
    spread,
)
from pallas_kernels.decode.walk import Unit
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.operations import Device

VECTOR_REGISTERS = 64
"""Registers of a thread for vectors along K, beside states [V, K]."""

ROW_ALIGNMENT = 16
"""Rows of a chunk are a multiple of this: a warpgroup takes so many at once."""


class Shape(NamedTuple):
    """A state's tile in chunks."""

    rows: int
    """Rows of a chunk."""
    columns: int
    """Columns of the tile."""
    chunks: int
    """Chunks of the tile."""

    @classmethod
    def of(cls, sizes: Sizes, block: int, chunk_bytes: int, itemsize: int) -> "Shape":
        """The shape of a tile of `block` entries of V, in chunks of at most so many bytes."""
        total, columns = (sizes.K, block) if sizes.kv_layout else (block, sizes.K)
        heights = (n for n in range(ROW_ALIGNMENT, total + 1, ROW_ALIGNMENT) if total % n == 0)
        rows = max((n for n in heights if n * columns * itemsize <= chunk_bytes), default=ROW_ALIGNMENT)
        return cls(rows, columns, total // rows)


class Slices(NamedTuple):
    """How a warpgroup takes rows of a state: so many at once, in a layout."""

    rows: int
    layout: Any


def row_slices(columns: int, lanes: int = WARP) -> Slices:
    """Slices with four neighbours to a thread, and at most so many threads along a row."""
    lanes = math.gcd(columns // 4, lanes)
    return Slices(WARPS * WARP // lanes, lane_layout(lanes, 4))


TALL_ROWS = 16
"""Rows that a warpgroup takes at once in the tall layout: four to a thread."""


def tall_layout(rows: int) -> Any:
    """The tall layout, of [rows, 128]: a thread has four neighbours of each of its warp's rows, which lie below each
    other. Numbers that belong to these rows are neighbours in a vector, and come in one access."""
    tiling = plgpu.Tiling(((rows, 4 * WARP), (rows // WARPS, 4)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3,), vector_dim=-1)


class Held(NamedTuple):
    """A ring in registers, zeros or ignored where there is no token."""

    k: jax.Array
    """[L, K], each row in a few lanes of a warp."""
    u: Any
    """[L, block], float32, each column in a thread; None before `Ring.with_values`."""
    since: jax.Array
    """Log decays since each token [L]."""
    total: jax.Array
    """Log decay since the checkpoint."""
    count: jax.Array
    """Tokens in the ring."""

    def emptied(self, now: jax.Array) -> "Held":
        """The ring without tokens, if they are dropped now."""
        u = jnp.where(now, jnp.zeros_like(self.u), self.u)
        return self._replace(
            u=u,
            total=jnp.where(now, jnp.zeros_like(self.total), self.total),
            count=jnp.where(now, 0, self.count),
        )


class Ring:
    """The layouts of a ring, and what is done with it."""

    LANES = 8
    """Threads along a key."""

    def __init__(self, K: int, block: int, itemsize: int):
        lanes = math.gcd(K // 4, self.LANES)
        self.k_layout = lane_layout(lanes, math.gcd(K // lanes, ACCESS_BYTES // itemsize))
        self.u_layout = column_layout(block)
        self.g_layout = lane_layout(lanes, LENGTH // lanes)
        self.rows = self.k_layout.reduce(1)

    def load(self, here: Unit, count: jax.Array, with_u: bool) -> Held:
        along, shape = self.g_layout.reduce(0), (LENGTH, LENGTH)
        # All loads come before the first use of one.
        k, u = load(here.ring_k, self.k_layout), load(here.ring_u, self.u_layout) if with_u else None
        g = load(here.ring_g, along)
        position = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=along)
        g = jnp.where(position < count, g, 0.0)
        row, column = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=self.g_layout) for i in range(2))
        since = jnp.sum(jnp.where(column > row, spread(g, shape, 1, self.g_layout), 0.0), axis=1)
        u = None if u is None else self.tokens_of(u, count)
        return Held(k, u, since, jnp.sum(g), count)

    def with_values(self, held: Held, u: Any) -> Held:
        """A ring and its values, which are in shared memory."""
        return held._replace(u=self.tokens_of(load(u, self.u_layout), held.count))

    def tokens_of(self, u: jax.Array, count: jax.Array) -> jax.Array:
        """The values of the tokens in float32, zeros behind them."""
        entry = plgpu.broadcasted_iota(jnp.int32, u.shape, 0, layout=self.u_layout)
        return jnp.where(entry < count, u.astype(jnp.float32), 0.0)

    def weights(self, held: Held, x: jax.Array, log_decay: jax.Array) -> jax.Array:
        """D_j (x . k_j) [L] for a vector x [K].

        Args:
          log_decay: since the ring's last token.
        """
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


Decay = Callable[[jax.Array, Rows, Any, Any], jax.Array]
"""decay(S, rows, here, layout): rows of a state, widened, times their decay; `here` are their places in the state."""


def add_tokens(
    numbers: Floats,
    source: Rows,
    targets: tuple[Rows, ...],
    first: jax.Array,
    decay: Decay,
    keys: Any,
    values: Any,
    kv_layout: bool,
    device: Device,
    tall: bool = False,
) -> None:
    """Writes decay source + sum_j keys_j values_j^T for some rows of a state to memory.

    Args:
      numbers: how they lie there.
      source: the rows, of [K, block] or [block, K].
      targets: where they are written.
      first: number of the first row in the state.
      keys, values: [tokens, K] and [tokens, block] in shared memory, float32, which all warps have written.
      tall: whether rows of 128 columns are taken in the tall layout.
    """
    size = source.numbers.shape
    tall = tall and size[1] == 4 * WARP
    layout, here = tall_layout(size[0]) if tall else row_slices(size[1]).layout, pl.ds(first, size[0])
    x, y = (keys, values) if kv_layout else (values, keys)
    S = numbers.widened(load(source.numbers, layout), layout, device if tall else None)
    S = decay(S, source, here, layout)
    for j in range(keys.shape[0]):
        along_rows, along_columns = load(x.at[j, here], layout.reduce(1)), load(y.at[j], layout.reduce(0))
        S = S + spread(along_rows, size, 0, layout) * spread(along_columns, size, 1, layout)
    numbers.put(S, layout, *targets)


class Products:
    """x^T S of vectors x [K] in shared memory, from the chunks of a state one after the other.

    Args:
      numbers: how states lie in memory.
      sums: shared memory that nothing else uses between `start` and the last `of_token`.
      tall: whether rows of 128 columns, of states [K, V], are taken in the tall layout.
    """

    def __init__(
        self,
        numbers: Floats,
        sizes: Sizes,
        shape: Shape,
        sums: Any,
        vectors: Any,
        count: int,
        v_layout: Any,
        device: Device,
        tall: bool,
    ):
        self.kv, self.shape, self.v_layout = sizes.kv_layout, shape, v_layout
        self.numbers = numbers
        self.sums, self.vectors, self.device = sums, vectors, device
        self.tall = tall and self.kv and shape.columns == 4 * WARP
        # With states [V, K] a sum goes over lanes: few of them, as far as the vectors leave registers.
        lanes = next(n for n in (8, 16, WARP) if n == WARP or sizes.K // n * count <= VECTOR_REGISTERS)
        self.slices = row_slices(shape.columns, WARP if self.kv else lanes)
        if self.tall:
            self.slices = Slices(TALL_ROWS, tall_layout(TALL_ROWS))
        self.count = count

    def start(self) -> list[jax.Array]:
        """The carry from chunk to chunk: sums where states are [K, V], the vectors where they are [V, K]."""
        rows, layout = self.slices
        if not self.kv:
            return [load(self.vectors.at[i], layout.reduce(0)) for i in range(self.count)]
        zeros = jnp.zeros((rows, self.shape.columns), jnp.float32)
        return [plgpu.layout_cast(zeros, layout) for _ in range(self.count)]

    def add(self, chunk: Rows, first_row: jax.Array, carry: list[jax.Array]) -> list[jax.Array]:
        rows, layout = self.slices
        for i in range(0, self.shape.rows, rows):
            some = chunk.some(i, rows)
            s = load(some.numbers, layout)
            s = self.numbers.widened(s, layout, self.device if self.tall else None)
            here = pl.ds(first_row + i, rows)
            if self.kv:
                x = [load(self.vectors.at[j, here], layout.reduce(1)) for j in range(self.count)]
                x = self.numbers.scaled(x, some, layout)
                carry = [c + s * spread(y, s.shape, 0, layout) for c, y in zip(carry, x, strict=True)]
            else:
                for j, x in enumerate(carry):
                    sums = [jnp.sum(s * spread(x, s.shape, 1, layout), axis=1)]
                    store_any(self.sums.at[j, here], *self.numbers.scaled(sums, some, layout))
        return carry

    def of_token(self, t: int, carry: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """k^T S and q^T S of token t along V, after all chunks. Called for one token after the other."""
        if not self.kv:
            if t == 0:
                plgpu.commit_smem()
            y, z = (load(self.sums.at[2 * t + i], self.v_layout.reduce(0)) for i in range(2))
            return y, z
        # The sums of warps meet in shared memory.
        own = carry[2 * t : 2 * t + 2]
        if self.tall:
            own = [self.device.sum_of_threads_rows(x, self.slices.layout, lane_layout(WARP, 4)) for x in own]
        plgpu.commit_smem()
        rows = own[0].shape[0]
        places = [self.sums.at[pl.ds(i * rows, rows)] for i in range(2)]
        for place, x in zip(places, own, strict=True):
            store_any(place, x)
        plgpu.commit_smem()
        y, z = (jnp.sum(load(place, self.v_layout), axis=0) for place in places)
        return y, z
