"""A ring of tokens beside a state, as it lies in memory.

A slot of a pool holds a checkpoint S0 and L entries (k_j, u_j, g_j), of which the first `count` are tokens:
normalised keys, written values, log decays. They stand for the state

    S = D S0 + sum_j D_j k_j u_j^T

where D_j = exp(g_j+1 + ... + g_count) is the decay since token j, and D that since the checkpoint.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

LENGTH = 16
"""L: entries of a ring."""

COUNT, BEFORE = 0, 1
"""Cursors of a ring: how many entries are tokens, and how many were before the last call's. Each value head has those
of its slot, as the warpgroup that works on the head reads and writes them: no other one reads what it writes."""


class Results(NamedTuple):
    """Outputs, and states and rings after them."""

    o: Float[Array, "N T HV V"]
    state: Float[Array, "slots *layers HV rows columns"]
    ring_k: Float[Array, "slots *layers Hk L K"]
    ring_u: Float[Array, "slots *layers HV L V"]
    ring_g: Float[Array, "slots *layers HV L"]
    cursors: Int[Array, "slots *layers HV 2"]
