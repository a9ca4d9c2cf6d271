"""A few tokens of every running request with a decay for each key channel, by the kernel of `step`.

    S <- Diag(exp(g)) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = scale q^T S

    g = -exp(A_log) softplus(a + dt_bias), or lower_bound sigmoid(exp(A_log) (a + dt_bias)), or
        lower_bound (1 - exp(exp(A_log) softplus(a + dt_bias) / lower_bound))

The decay scales rows of the state, so the sums over the state that was read are taken with decayed vectors:

    y = S^T (alpha k),  z = S^T (alpha q),  u = beta (v - rk y),  o = scale rq (z + rk (q . k) u)

Inputs (GMEM): as for `step`, but a [N, T, HV K] and dt_bias [HV K].
Grid, hardware, limits: those of `step`.
Source: Kimi Team, "Kimi Linear", section 3; the gates are those of fla's `fused_kda_gate`, and its bounded form.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.decode.cta import ALONE, Channels, Config, Cta
from pallas_kernels.decode.step import step_of_channels
from pallas_kernels.decode.tiles import Sizes, Tile, Token, load, vector_layout, write_strength
from pallas_kernels.device.gates import log_decays
from pallas_kernels.device.launch import num_sms
from pallas_kernels.device.memory import Buffer, Memory, store_any
from pallas_kernels.device.needs import Needs

NEEDS = Needs.NOTHING


class ChannelTile(Tile):
    """A tile whose decay is a vector along K."""

    def erased(self, k: jax.Array, beta: jax.Array) -> jax.Array:
        """The key whose value is erased."""
        return k

    def written(self, u: jax.Array, beta: jax.Array) -> jax.Array:
        """The part of the difference between a value and the erased one that is written."""
        return beta * u

    def update(
        self, S: jax.Array, token: Token, norms: Callable[[], Any], again: Any = lambda S: S, add: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """The state after a token, and its output, see `Tile.update`. No sum leaves open how it is rounded."""
        del add
        q, k, v, alpha, beta = token
        y, z = self.products(S.astype(jnp.float32), [alpha * self.erased(k, beta), alpha * q])
        rq, rk, qk = norms()
        u = self.written(v - rk * y, beta)
        o = (self.sizes.scale * rq) * (z + (rk * qk) * u)
        return again(S).astype(jnp.float32) * self.over_v(alpha) + self.over_v(k) * self.over_k(rk * u), o

    def follow(
        self, S: jax.Array, k: jax.Array, v: jax.Array, alpha: jax.Array, beta: jax.Array, rk: jax.Array
    ) -> jax.Array:
        """The state of `update` after a token whose output is not asked for."""
        (y,) = self.products(S, [alpha * self.erased(k, beta)])
        u = self.written(v - rk * y, beta)
        return S * self.over_v(alpha) + self.over_v(k) * self.over_k(rk * u)


class ChannelCta(Cta):
    """A warpgroup's tile and tokens, with a gate of each key channel."""

    tile_type = ChannelTile

    def __init__(self, *arguments: Any, lower_bound: float | None, bound: str = "sigmoid", **static: Any):
        super().__init__(*arguments, **static)
        self.lower_bound, self.bound = lower_bound, bound

    @classmethod
    def default_config(cls, sizes: Sizes, pool_dtype: Any, T: int, alone: int) -> Config:
        """See `Cta.default_config`.

        A tile of a bfloat16 pool is brought near half as early as with a decay of each head (docs/log/decode.md).
        """
        config = Config.default(sizes.K, sizes.V, pool_dtype, sizes.kv_layout, T)
        return dataclasses.replace(config, ahead=num_sms()) if config.narrow else config

    @classmethod
    def gate_memory(cls, sizes: Sizes, T: int) -> Memory:
        """See `Cta.gate_memory`."""
        return {"decays": Buffer((T, sizes.K))}

    def keep_gates(self, t: Any, alpha: jax.Array, beta: jax.Array) -> None:
        """See `Cta.keep_gates`."""
        store_any(self.smem.decays.at[t], alpha)
        self.smem.scalars[t, 1] = jnp.float32(beta)

    def kept_gates(self, t: Any) -> tuple[jax.Array, jax.Array]:
        """See `Cta.kept_gates`."""
        return load(self.smem.decays.at[t], self.tile.k_layout), self.smem.scalars[t, 1]

    def gates_to_keep(self, t: Any) -> tuple[jax.Array, jax.Array]:
        """`gates`, with every warp having the decays whole."""
        return self._gates(t, vector_layout(self.sizes.K))

    def gates(self, t: Any) -> tuple[jax.Array, jax.Array]:
        """exp(g) along the tile, and beta."""
        return self._gates(t, self.tile.k_layout)

    def _gates(self, t: Any, layout: Any) -> tuple[jax.Array, jax.Array]:
        alpha = self.decays(t, layout)
        b = self.gmem.b[self.row, t, self.first.b + self.head]
        return alpha, write_strength(b, self.sizes.allow_neg_eigval)

    def decays(self, t: Any, layout: Any) -> jax.Array:
        """exp(g) of token t."""
        gmem, K, head = self.gmem, self.sizes.K, self.head
        a = load(gmem.a.at[self.row, t, pl.ds(self.first.a + head * K, K)], layout)
        bias = load(gmem.dt_bias.at[pl.ds(head * K, K)], layout)
        x = a.astype(jnp.float32) + bias.astype(jnp.float32)
        return jnp.exp(log_decays(x, gmem.A_log[head].astype(jnp.float32), self.lower_bound, self.bound))


def channel_step(
    q: Float[Array, "N T Cq"],
    k: Float[Array, "N T Ck"],
    v: Float[Array, "N T Cv"],
    a: Float[Array, "N T *channels"],
    b: Float[Array, "N T Cb"],
    pool: Float[Array, "slots *layers HV rows columns"],
    *,
    A_log: Float[Array, " HV"] | None,
    dt_bias: Float[Array, "HV K"],
    lower_bound: float | None,
    bound: str = "sigmoid",
    first: Channels = ALONE,
    kind: type[ChannelCta] = ChannelCta,
    **options: Any,
) -> tuple[Float[Array, "N T HV V"], Float[Array, "slots *layers HV rows columns"]]:
    """T tokens of N requests, and the pool with the states after them; all other slots keep their bits.

    Args:
      q, k, v, b, pool, first: as for `step_of_channels`.
      a: raw input of each channel's decay [N, T, HV, K], or channels that begin with that at `first.a`.
      A_log: rate of each head; None for 0.
      dt_bias: bias of each channel.
      lower_bound: the strongest log decay of the bounded gate, below 0; None for the other gate.
      bound: how the gate comes to it, see `device.gates.log_decays`.
      kind: the `Cta` that knows the gates.
      options: of `step_of_channels`.
    """
    A_log = jnp.zeros(dt_bias.shape[:1], jnp.float32) if A_log is None else A_log
    gates: dict[str, Any] = dict(A_log=A_log, dt_bias=dt_bias.reshape(-1))
    gates |= dict(kind=kind, settings=dict(lower_bound=lower_bound, bound=bound))
    return step_of_channels(q, k, v, a.reshape(*a.shape[:2], -1), b, pool, first=first, **gates, **options)
