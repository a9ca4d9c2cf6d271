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


class Tokens(NamedTuple):
    """T tokens of N requests, with the parameters of their gates."""

    q: Float[Array, "N T Hq K"]
    k: Float[Array, "N T Hk K"]
    v: Float[Array, "N T HV V"]
    a: Float[Array, "N T HV"]
    b: Float[Array, "N T HV"]
    A_log: Float[Array, " HV"]
    dt_bias: Float[Array, " HV"]

    @property
    def heads(self) -> tuple[int, int, int]:
        """Hq, Hk and HV."""
        return self.q.shape[2], self.k.shape[2], self.v.shape[2]


class ChannelTokens(NamedTuple):
    """`Tokens` with a decay of each key channel."""

    q: Float[Array, "N T Hq K"]
    k: Float[Array, "N T Hk K"]
    v: Float[Array, "N T HV V"]
    a: Float[Array, "N T HV K"]
    b: Float[Array, "N T HV *K"]
    w: Float[Array, "N T HV V"] | None
    """None where both strengths are one number a head, b's."""
    A_log: Float[Array, " HV"]
    dt_bias: Float[Array, "HV K"]

    @property
    def heads(self) -> tuple[int, int, int]:
        """Hq, Hk and HV."""
        return self.q.shape[2], self.k.shape[2], self.v.shape[2]


class Rings(NamedTuple):
    """States of a pool and the rings beside them."""

    state: Float[Array, "slots *layers HV rows columns"]
    ring_k: Float[Array, "slots *layers Hk L K"]
    """Keys since the states, oldest first."""
    ring_u: Float[Array, "slots *layers HV L V"]
    """Values that were written since."""
    ring_g: Float[Array, "slots *layers HV L"]
    """Log decays since; with a decay of each channel [.., L, K]."""
    cursors: Int[Array, "slots *layers HV 2"]
    """Count and before of every ring, each value head's its slot's."""
    scale: Float[Array, "slots *layers HV rows"] | None = None
    """Scales of states in 8 bits, one for each row, float32."""
