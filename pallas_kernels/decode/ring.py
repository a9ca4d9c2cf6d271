"""A ring of tokens beside a state, in memory.

A slot of a pool holds a checkpoint S0 and L entries (k_j, u_j, g_j), of which the first `count` are tokens:
normalised keys, written values, log decays. They stand for the state

    S = D S0 + sum_j D_j k_j u_j^T

where D_j = exp(g_j+1 + ... + g_count) is the decay since token j, and D that since the checkpoint.
"""

from typing import Any

import jax

from pallas_kernels.decode.tiles import Tile

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


COUNT, BEFORE = 0, 1
"""Cursors of a ring: how many entries are tokens, and how many were before the last call's. Each value head has those
of its slot, as the warpgroup that works on the head reads and writes them: no other one reads what it writes."""
