"""A ring of tokens beside a state, in memory.

A slot of a pool holds a checkpoint S0 and L entries (k_j, u_j, g_j), of which the first `count` are tokens:
normalised keys, written values, log decays. They stand for the state

    S = D S0 + sum_j D_j k_j u_j^T

where D_j = exp(g_j+1 + ... + g_count) is the decay since token j, and D that since the checkpoint.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.tiles import Tile, load

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
