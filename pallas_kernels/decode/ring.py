"""A ring of tokens beside a state, in memory.

A slot of a pool holds a checkpoint S0 and L entries (k_j, u_j, g_j), of which the first `count` are tokens:
normalised keys, written values, log decays. They stand for the state

    S = D S0 + sum_j D_j k_j u_j^T

where D_j = exp(g_j+1 + ... + g_count) is the decay since token j, and D that since the checkpoint.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.step import Config
from pallas_kernels.decode.tiles import GRANULE, Tile, load

LENGTH = 16
"""L: entries of a ring."""


class Slot:
    """What belongs to a slot and a tile."""

    def __init__(
        self, gmem: Any, tile: Tile, place: jax.Array, head: jax.Array, k_head: jax.Array, entries: Any
    ):
        self.state = tile.state(gmem.state, place, head, entries)
        self.k, self.g = gmem.ring_k.at[place, k_head], gmem.ring_g.at[place, head]
        self.u = gmem.ring_u.at[place, head, :, entries]

    def log_decays(self, count: jax.Array, layout: Any) -> jax.Array:
        """[L], zeros in place of what is left over in the ring."""
        position = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=layout)
        return jnp.where(position < count, load(self.g, layout), 0.0)

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
