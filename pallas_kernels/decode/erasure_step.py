"""One token of every running request that erases at a key of its own and writes at another, by the kernel of `step`.

    S <- Diag(exp(g)) S;   S <- S - gamma e (S^T e)^T;   u = beta (v - S^T k);   S <- S + k u^T;   o = scale S^T q

The state is read once, changed once and written once. All sums over it are taken of what was read, with decayed
vectors, and what the erasure changes in them is a product of two vectors of the token:

    x = S^T (alpha e),  y = S^T (alpha k),  z = S^T (alpha q),  w = gamma re x
    u = beta (v - rk (y - re (k . e) w)),  o = scale rq (z - re (q . e) w + rk (q . k) u)
    S <- alpha S - e (re w)^T + k (rk u)^T

with re, rk, rq the reciprocal norms.

Inputs (GMEM): as for `channel_step` with T = 1, and erase_key [N, 1, Hk K] in k's dtype, w [N, 1, HV], the raw input
of gamma = sigmoid(w).
Grid, hardware, limits: those of `step`. One sum over warps more than `channel_step`.
Source: Qwen Team, "Erase-then-Delta Attention".
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.decode.channel_step import ChannelCta, ChannelTile, channel_step
from pallas_kernels.decode.cta import Config
from pallas_kernels.decode.tiles import GRANULE, Norms, Sizes, Token, load, vector_layout, write_strength
from pallas_kernels.device.launch import num_sms
from pallas_kernels.device.layouts import L2NORM_EPS
from pallas_kernels.device.needs import Needs

NEEDS = Needs.NOTHING


class Erasure(NamedTuple):
    """An erasure of a token: the key it is at, and its strength."""

    key: jax.Array
    """e along the tile, float32."""
    whole: jax.Array
    """e whole in every warp, float32."""
    strength: jax.Array
    """gamma."""


class ErasureNorms(NamedTuple):
    """Lengths and products of a token's q, k and e."""

    keys: Norms
    e: Any
    """1 / |e|; 1 without normalisation."""
    qe: jax.Array
    """q . e of the vectors as they came."""
    ke: jax.Array
    """k . e, likewise."""


class ErasureTile(ChannelTile):
    """A tile whose token erases before it writes."""

    erasure: Erasure
    """The erasure of the token; `ErasureCta.gates` sets it."""

    def norms(self, q: jax.Array, k: jax.Array) -> Any:
        """See `Tile.norms`."""
        e, keys = self.erasure.whole, super().norms(q, k)
        length = lax.rsqrt(jnp.sum(e * e) + L2NORM_EPS) if self.sizes.use_qk_l2norm else 1.0
        return ErasureNorms(keys, length, jnp.sum(q * e), jnp.sum(k * e))

    def update(
        self, S: jax.Array, token: Token, norms: Callable[[], Any], again: Any = lambda S: S, add: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """See `ChannelTile.update`."""
        del add
        q, k, v, alpha, beta = token
        e, _, gamma = self.erasure
        (rq, rk, qk), re, qe, ke = norms()
        x, y, z = self.products(S.astype(jnp.float32), [alpha * e, alpha * k, alpha * q])
        w = (gamma * re) * x
        u = beta * (v - rk * (y - (re * ke) * w))
        o = (self.sizes.scale * rq) * (z - (re * qe) * w + (rk * qk) * u)
        S = again(S).astype(jnp.float32) * self.over_v(alpha) - self.over_v(e) * self.over_k(re * w)
        return S + self.over_v(k) * self.over_k(rk * u), o


class ErasureCta(ChannelCta):
    """A warpgroup's tile and token, with an erase key of each key head and an erase strength of each value head."""

    tile_type = ErasureTile

    @classmethod
    def default_config(cls, sizes: Sizes, pool_dtype: Any, T: int, alone: int) -> Config:
        """See `Cta.default_config`.

        With K = 128, states [K, V] and float32, tiles of 64 entries of V take 185 registers and leave two warpgroups
        on an SM; those of 32 entries take 126 and leave four (ptxas of 2026-11-28). Others are as of `ChannelCta`.
        """
        config = super().default_config(sizes, pool_dtype, T, alone)
        if not sizes.kv_layout or jnp.dtype(pool_dtype).itemsize == 2:
            return config
        return dataclasses.replace(config, block=GRANULE, ahead=2 * num_sms())

    def gates(self, t: Any) -> tuple[jax.Array, jax.Array]:
        """See `ChannelCta.gates`. The tile gets the erasure."""
        K, tile = self.sizes.K, cast(ErasureTile, self.tile)
        key = self.gmem.erase_key.at[self.row, t, pl.ds(self.k_head * K, K)]
        along, whole = (load(key, x).astype(jnp.float32) for x in (tile.k_layout, vector_layout(K)))
        strength = write_strength(self.gmem.w[self.row, t, self.head], False)
        tile.erasure = Erasure(along, whole, strength)
        return super().gates(t)


def erasure_step(
    q: Float[Array, "N 1 Cq"],
    k: Float[Array, "N 1 Ck"],
    v: Float[Array, "N 1 Cv"],
    a: Float[Array, "N 1 HV K"],
    b: Float[Array, "N 1 HV"],
    erase_key: Float[Array, "N 1 Hk K"],
    w: Float[Array, "N 1 HV"],
    pool: Float[Array, "slots *layers HV rows columns"],
    **options: Any,
) -> tuple[Float[Array, "N 1 HV V"], Float[Array, "slots *layers HV rows columns"]]:
    """A token of N requests, and the pool with the states after it; all other slots keep their bits.

    Args:
      q, k, v, a, b, pool: as for `channel_step`.
      erase_key: the key that is erased at, normalised as k is.
      w: raw input of the erase strength.
      options: of `channel_step`, without num_tokens and parents.
    """
    assert q.shape[1] == 1
    keys = erase_key.reshape(*erase_key.shape[:2], -1)
    return channel_step(q, k, v, a, b, pool, erase_key=keys, w=w, kind=ErasureCta, **options)
