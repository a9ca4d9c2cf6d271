"""A ring of tokens beside a state: in memory, and in the registers of a warpgroup beside its tile of the state.

A slot of a pool holds a checkpoint S0 and L entries (k_j, u_j, g_j), of which the first `count` are tokens:
normalised keys, written values, log decays. They stand for the state

    S = D S0 + sum_j D_j k_j u_j^T

where D_j = exp(g_j+1 + ... + g_count) is the decay since token j, and D that since the checkpoint.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.step import Config
from pallas_kernels.decode.tiles import ACCESS_BYTES, GRANULE, Tile, lane_layout, load

LENGTH = 16
"""L: entries of a ring."""


class Held(NamedTuple):
    """A ring in registers, and log decays up to the present."""

    k: jax.Array
    u: jax.Array
    since: jax.Array
    """Since each token."""
    total: jax.Array
    """Since the checkpoint."""
    count: jax.Array


class Ring:
    """A ring in registers: rows [L, columns], each in a few lanes of one warp."""

    def __init__(self, tile: Tile, itemsize: int, exchange: Any):
        self.tile, self.exchange = tile, exchange
        K, lanes = tile.rule.K, tile.lanes
        self.k_layout = lane_layout(lanes, math.gcd(K // lanes, ACCESS_BYTES // itemsize))
        self.u_layout = lane_layout(lanes, min(tile.block // lanes, 4))
        self.g_layout = lane_layout(lanes, LENGTH // lanes)
        self.rows = self.k_layout.reduce(1)

    def by_row(self, x: jax.Array, like: jax.Array, layout: Any) -> jax.Array:
        """A number for each row, repeated along it."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, like.shape, [0]), layout)

    def by_column(self, x: jax.Array, layout: Any) -> jax.Array:
        """A vector, repeated in every row."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (LENGTH, x.shape[0]), [1]), layout)

    def row(self, columns: int, layout: Any) -> jax.Array:
        """The row of each entry."""
        return plgpu.broadcasted_iota(jnp.int32, (LENGTH, columns), 0, layout=layout)

    def load(self, k: Any, u: Any, g: Any, count: jax.Array) -> Held:
        """What a ring holds, zeros in place of what is left over in it."""
        held_u = load(u, self.u_layout)
        held_u = jnp.where(self.row(self.tile.block, self.u_layout) < count, held_u, jnp.zeros_like(held_u))
        g = self.decays(g, count)
        column = plgpu.broadcasted_iota(jnp.int32, (LENGTH, LENGTH), 1, layout=self.g_layout)
        later = column > self.row(LENGTH, self.g_layout)
        since = jnp.sum(jnp.where(later, self.by_column(g, self.g_layout), 0.0), axis=1)
        return Held(load(k, self.k_layout), held_u, since, jnp.sum(g), count)

    def decays(self, g: Any, count: jax.Array) -> jax.Array:
        """Log decays of a ring in every warp, zeros in place of what is left over in it."""
        layout = self.g_layout.reduce(0)
        position = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=layout)
        return jnp.where(position < count, load(g, layout), 0.0)

    def recall(self, held: Held, decay: jax.Array, x: jax.Array, norm: Any) -> jax.Array:
        """sum_j D_j (x . k_j) u_j along V, for x along K, times norm."""
        products = jnp.sum(held.k.astype(jnp.float32) * self.by_column(x, self.k_layout), axis=1)
        position = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=self.rows)
        weight = jnp.where(position < held.count, decay * products * norm, 0.0)
        u = held.u.astype(jnp.float32)
        return self.to_v(jnp.sum(u * self.by_row(weight, u, self.u_layout), axis=0))

    def to_v(self, x: jax.Array) -> jax.Array:
        """From the columns of a ring to the tile's V."""
        return self._exchange(x, self.tile.v_layout)

    def from_v(self, x: jax.Array) -> jax.Array:
        """And back."""
        return self._exchange(x, self.u_layout.reduce(0))

    def _exchange(self, x: jax.Array, layout: Any) -> jax.Array:
        if self.exchange is None:
            return plgpu.layout_cast(x, layout)
        plgpu.commit_smem()
        self.exchange[...] = x
        plgpu.commit_smem()
        return load(self.exchange, layout)

    def append(self, held: Held, k: jax.Array, u: jax.Array) -> Held:
        """With a token at the present; a ring that is full stays."""
        new_k = self.by_column(k, self.k_layout)
        new_u = self.by_column(self.from_v(u).astype(held.u.dtype), self.u_layout)
        at_k = self.row(k.shape[0], self.k_layout) == held.count
        at_u = self.row(u.shape[0], self.u_layout) == held.count
        position = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=self.rows)
        return Held(
            jnp.where(at_k, new_k, held.k),
            jnp.where(at_u, new_u, held.u),
            jnp.where(position == held.count, 0.0, held.since),
            held.total,
            held.count + 1,
        )


class Slot:
    """What belongs to a slot and a tile."""

    def __init__(
        self, gmem: Any, tile: Tile, place: jax.Array, head: jax.Array, k_head: jax.Array, entries: Any
    ):
        self.state = tile.state(gmem.state, place, head, entries)
        self.k, self.g = gmem.ring_k.at[place, k_head], gmem.ring_g.at[place, head]
        self.u = gmem.ring_u.at[place, head, :, entries]

    def folded(self, tile: Tile, S: jax.Array, count: jax.Array, total: jax.Array, g: Any) -> jax.Array:
        """D S + sum_j D_j k_j u_j^T, for the log decay `total` since the checkpoint, and g after the last token."""

        def entry(j):
            k, u = load(self.k.at[j], tile.k_layout), load(self.u.at[j], tile.v_layout)
            return k, u, self.g[j]

        def add(i, carry):
            S, since, (k, u, g) = carry
            # The entry before is on its way while this one is added.
            following = entry(jnp.maximum(count - 2 - i, 0))
            k = tile.over_v(k.astype(jnp.float32) * jnp.exp(since))
            return S + k * tile.over_k(u.astype(jnp.float32)), since + g, following

        carry = (S.astype(jnp.float32) * jnp.exp(total), jnp.float32(0) + g, entry(jnp.maximum(count - 1, 0)))
        return lax.fori_loop(0, count, add, carry)[0]


def default_config(V: int, state_dtype: Any, kv_layout: bool) -> Config:
    """What was fastest on an H200 with K = V = 128 (docs/log/decode.md), where V allows it."""
    block = 64 if kv_layout or jnp.dtype(state_dtype).itemsize == 2 else GRANULE
    return Config(block if V % block == 0 else GRANULE)
