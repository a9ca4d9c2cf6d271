"""A few tokens of every running request with erase and write strengths apart, by the kernel of `step`.

    S <- Diag(exp(g)) S;   u = w v - S^T (e k);   S <- S + k u^T;   o = scale q^T S

with a decay exp(g) [K], an erase strength e = sigmoid(b) [K] and a write strength sigmoid(w) [V] of each channel. The
gates of the decay are those of `channel_step`; e may be twice that. Only one of the sums over the state that was read
changes, and the value:

    y = S^T (alpha e k),  z = S^T (alpha q),  u = w v - rk y,  o = scale rq (z + rk (q . k) u)

Inputs (GMEM): as for `channel_step`, but b [N, T, HV K], and w [N, T, HV V] of any floating dtype.
Grid, hardware, limits: those of `step`.
Source: "Gated DeltaNet-2", whose rule has both strengths of each channel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.decode.channel_step import ChannelCta, ChannelTile, channel_step
from pallas_kernels.decode.tiles import Sizes, load, write_strength
from pallas_kernels.device.memory import Buffer, Memory, store_any
from pallas_kernels.device.needs import Needs

NEEDS = Needs.NOTHING


class ApartTile(ChannelTile):
    """A tile of which every channel of the key erases with a strength of its own; `beta` is that, along the tile."""

    def erased(self, k: jax.Array, beta: jax.Array) -> jax.Array:
        """See `ChannelTile.erased`."""
        return beta * k

    def written(self, u: jax.Array, beta: jax.Array) -> jax.Array:
        """See `ChannelTile.written`; the value has been multiplied by its strength before."""
        return u


class ApartCta(ChannelCta):
    """A warpgroup's tile and tokens, with a decay and an erase strength of each key channel, and a write strength of
    each value channel."""

    tile_type = ApartTile

    @classmethod
    def gate_memory(cls, sizes: Sizes, T: int) -> Memory:
        """See `Cta.gate_memory`."""
        return {**super().gate_memory(sizes, T), "erases": Buffer((T, sizes.K))}

    def keep_gates(self, t: Any, alpha: jax.Array, beta: jax.Array) -> None:
        """See `Cta.keep_gates`."""
        store_any(self.smem.decays.at[t], alpha)
        store_any(self.smem.erases.at[t], beta)

    def kept_gates(self, t: Any) -> tuple[jax.Array, jax.Array]:
        """See `Cta.kept_gates`."""
        smem, along = self.smem, self.tile.k_layout
        return load(smem.decays.at[t], along), load(smem.erases.at[t], along)

    def written(self, t: Any, v: jax.Array) -> jax.Array:
        """v of token t times its write strength."""
        channel = self.head * self.sizes.V + self.entries.start
        w = load(self.gmem.w.at[self.row, t, pl.ds(channel, self.config.block)], self.tile.v_layout)
        return write_strength(w, False) * v

    def _gates(self, t: Any, layout: Any) -> tuple[jax.Array, jax.Array]:
        K = self.sizes.K
        b = load(self.gmem.b.at[self.row, t, pl.ds(self.first.b + self.head * K, K)], layout)
        return self.decays(t, layout), write_strength(b, self.sizes.allow_neg_eigval)


def apart_step(
    q: Float[Array, "N T Cq"],
    k: Float[Array, "N T Ck"],
    v: Float[Array, "N T Cv"],
    a: Float[Array, "N T HV K"],
    b: Float[Array, "N T HV K"],
    w: Float[Array, "N T HV V"],
    pool: Float[Array, "slots *layers HV rows columns"],
    **options: Any,
) -> tuple[Float[Array, "N T HV V"], Float[Array, "slots *layers HV rows columns"]]:
    """T tokens of N requests, and the pool with the states after them; all other slots keep their bits.

    Args:
      q, k, v, a, pool: as for `channel_step`.
      b: raw input of each key channel's erase strength.
      w: raw input of each value channel's write strength.
      options: of `channel_step`.
    """
    b, w = (jnp.reshape(x, (*x.shape[:2], -1)) for x in (b, w))
    return channel_step(q, k, v, a, b, pool, w=w, kind=ApartCta, **options)
