"""A ring and its tokens with a decay for each key channel: what `deferred` and `drafts` are given for such gates.

With D_j = exp(g_j+1 + ... + g_t) [K] the decay since entry j of the ring, and D that since the checkpoint S0,

    u = w v - ((D e k)^T S0 + sum_j (e k . D_j k_j) u_j)
    o = scale ((D q)^T S0 + sum_j (q . D_j k_j) u_j + (q . k) u)
    S = Diag(D) S0 + sum_j (D_j k_j) u_j^T + k u^T

The gates of the decay are those of `channel_step`, the strengths e and w those of `apart_step` where they are apart,
else both are beta. Decays are exponentials of sums of log decays, never quotients: a gate may be as low as -inf. Each
is split in two factors of at most 1, the ring's up to its last entry and the tokens' from there on.

Inputs (GMEM): as for `deferred` and `drafts`, but a [N, T, HV, K], dt_bias [HV, K], and where the strengths are apart
b [N, T, HV, K] and w [N, T, HV, V]; ring_g [slots, HV, L, K].
Shared memory of a warpgroup beside that of the kernel:

| rows of `started` | what                                                                        |
|-------------------|-----------------------------------------------------------------------------|
| 2 t, 2 t + 1      | e k and q of token t times the decay from the ring's last entry up to t     |
| 2 T               | log decays of the last token                                                |
| 2 T + 1           | the decay of a state that is written                                        |

`keys` holds D_j of the ring's entries until they are multiplied by the keys of a state that is written.
Hardware: `NEEDS`. Limits: those of the kernels; states in 32 or 16 bits; no trees.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.decode import deferred, drafts, vectors
from pallas_kernels.decode.channel_step import log_decays
from pallas_kernels.decode.codes import Rows
from pallas_kernels.decode.ring import LENGTH, ChannelTokens, Rings
from pallas_kernels.decode.ring_products import Decay, Held
from pallas_kernels.decode.tiles import Sizes, column_layout, load, spread, vector_layout, write_strength
from pallas_kernels.decode.vectors import Answer
from pallas_kernels.decode.walk import Unit
from pallas_kernels.device.memory import Buffer, Memory, store_any
from pallas_kernels.device.needs import Needs

NEEDS = Needs.TMA | Needs.LARGE

WARPGROUPS = {True: 3, False: 2}
"""Warpgroups of `channel_drafts` with states [K, V] and [V, K]. With one more each, the registers of four tokens
spill 36 to 96 bytes (ptxas of 2026-11-26)."""


class ChannelToken(NamedTuple):
    """A token before the state is there, vectors along K whole in every warp."""

    q: jax.Array
    """q, normalised."""
    k: jax.Array
    """k, likewise."""
    erased: jax.Array
    """k times the strength of erasing, where that is one a channel."""
    stored_k: jax.Array
    """k as the ring has it."""
    v: jax.Array
    """v, times the strength of writing where that is one a channel."""
    g: jax.Array
    """Log decays."""
    beta: Any
    """The strength of both; None where they are apart."""


class ChannelRaw(NamedTuple):
    """A unit's tokens as they were loaded."""

    A_log: jax.Array
    dt_bias: jax.Array
    tokens: list[tuple[Any, ...]]
    """q, k, v, a, b and w of each."""


class ChannelRingCta(vectors.Cta):
    """The knowledge of a warpgroup, with a decay of each key channel."""

    def __init__(self, gmem: Any, smem: Any, *, lower_bound: float | None, **static: Any):
        super().__init__(gmem, smem, **static)
        self.lower_bound = lower_bound
        self.started, self.decays = smem.started.at[self.wg], smem.keys.at[self.wg]
        self.along_k = column_layout(self.sizes.K).reduce(0)

    @classmethod
    def gate_memory(cls, sizes: Sizes, warpgroups: int, T: int) -> Memory:
        """See `vectors.Cta.gate_memory`."""
        return {
            "started": Buffer((warpgroups, 2 * T + 2, sizes.K)),
            "keys": Buffer((warpgroups, LENGTH, sizes.K)),
        }

    def load_ring(self, at: Unit, count: jax.Array, with_u: bool) -> Held:
        """See `vectors.Cta.load_ring`; the log decays of its result are one vector, of the whole ring."""
        # All loads come before the first use of one.
        k, u = load(at.ring_k, self.ring.k_layout), load(at.ring_u, self.ring.u_layout) if with_u else None
        gates = [load(at.ring_g.at[j], self.along_k) for j in range(LENGTH)]
        since = jnp.zeros_like(gates[0])
        for j, g in reversed([*enumerate(gates)]):
            store_any(self.decays.at[j], jnp.exp(since))
            since = since + jnp.where(j < count, g, jnp.zeros_like(g))
        plgpu.commit_smem()  # other warps read the decays
        held = Held(k, u, jnp.float32(0), since, count)
        return held if u is None else held._replace(u=self.ring.tokens_of(u, count))

    def decay_of_state(self, held: Held, g: Any = None) -> Decay:
        """See `vectors.Cta.decay_of_state`; the last token's log decays wait in shared memory."""
        place, T = self.started.at[2 * self.T + 1], self.T
        total = held.total if g is None else held.total + load(self.started.at[2 * T], self.along_k)
        store_any(place, jnp.exp(total))
        plgpu.commit_smem()

        def times(S: jax.Array, rows: Rows, here: Any, layout: Any) -> jax.Array:
            if self.sizes.kv_layout:
                return S * spread(load(place.at[here], layout.reduce(1)), S.shape, 0, layout)
            return S * spread(load(place, layout.reduce(0)), S.shape, 1, layout)

        return times

    def spill(self, held: Held, g: Any = None) -> None:
        """See `vectors.Cta.spill`."""
        keys, values = (ref.at[pl.ds(0, LENGTH)] for ref in self.spilled())
        layout = self.ring.k_layout
        k = held.k.astype(jnp.float32) * load(keys, layout)
        if g is not None:
            last = load(self.started.at[2 * self.T], layout.reduce(0))
            k = k * spread(jnp.exp(last), k.shape, 1, layout)
        position = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=self.ring.rows)
        store_any(keys, jnp.where(spread(position < held.count, k.shape, 0, layout), k, 0.0))
        store_any(values, held.u)

    def load_tokens(self, at: Unit) -> ChannelRaw:  # pyrefly: ignore[bad-override]
        """See `vectors.Cta.load_tokens`."""
        gmem, row, head = self.gmem, at.row, at.head
        whole = vector_layout(self.sizes.K)
        A_log, dt_bias = gmem.A_log[head], load(gmem.dt_bias.at[head], whole)

        def token(t: int) -> tuple[Any, ...]:
            place = row, t, head
            strengths = (
                (gmem.b[place], None)
                if gmem.w is None
                else (load(gmem.b.at[place], whole), load(gmem.w.at[*place, at.entries], self.along_v))
            )
            return (
                load(gmem.q.at[row, t, at.q_head], whole),
                load(gmem.k.at[row, t, at.k_head], whole),
                load(gmem.v.at[*place, at.entries], self.along_v),
                load(gmem.a.at[place], whole),
                *strengths,
            )

        return ChannelRaw(A_log, dt_bias, [token(t) for t in range(self.T)])

    def prepare_tokens(self, raw: ChannelRaw, held: Held) -> list[ChannelToken]:  # pyrefly: ignore[bad-override]
        """See `vectors.Cta.prepare_tokens`."""
        tokens, passed = [], None
        A_log, bias = (x.astype(jnp.float32) for x in raw[:2])
        for t, x in enumerate(raw.tokens):
            q, k, v, a = (y.astype(jnp.float32) for y in x[:4])
            rq, rk, _ = self.tile.norms(q, k)
            q, k = q * rq, k * rk
            g = log_decays(a + bias, A_log, self.lower_bound)
            strength = write_strength(x[4], self.sizes.allow_neg_eigval)
            if self.gmem.w is None:
                token = ChannelToken(q, k, k, k.astype(self.gmem.ring_k.dtype), v, g, strength)
            else:
                v = write_strength(x[5], False) * v
                token = ChannelToken(q, k, strength * k, k.astype(self.gmem.ring_k.dtype), v, g, None)
            tokens.append(token)
            passed = g if passed is None else passed + g
            decay = jnp.exp(passed)
            # Every warp writes the same.
            store_any(self.started.at[2 * t], token.erased * decay)
            store_any(self.started.at[2 * t + 1], q * decay)
        store_any(self.started.at[2 * self.T], tokens[-1].g)
        plgpu.commit_smem()
        layout, total = self.ring.k_layout, jnp.exp(held.total)
        keys = held.k.astype(jnp.float32) * load(self.decays.at[pl.ds(0, LENGTH)], layout)
        position = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=self.ring.rows)
        for j in range(2 * self.T):
            # The state's products are with what lies here.
            store_any(self.vectors.at[j], load(self.started.at[j], self.along_k) * total)
            x = load(self.started.at[j], layout.reduce(0))
            products = jnp.sum(keys * spread(x, keys.shape, 1, layout), axis=1)
            store_any(self.weights.at[j], jnp.where(position < held.count, products, 0.0))
        plgpu.commit_smem()
        return tokens

    def answers(  # pyrefly: ignore[bad-override]
        self, held: Held, tokens: list[ChannelToken], carry: list[jax.Array]
    ) -> Iterator[Answer]:
        """See `vectors.Cta.answers`."""
        us: list[jax.Array] = []
        since: list[Any] = []
        for t, token in enumerate(tokens):
            y, z = self.products.of_token(t, carry)
            found = y + self.ring.recall(held, self.weights.at[2 * t])
            read = z + self.ring.recall(held, self.weights.at[2 * t + 1])
            since = [token.g if x is None else x + token.g for x in since]
            for earlier, passed, u in zip(tokens[:t], since, us, strict=True):
                k = jnp.exp(passed) * earlier.stored_k.astype(jnp.float32)
                found = found + jnp.sum(token.erased * k) * u
                read = read + jnp.sum(token.q * k) * u
            u = token.v - found
            u = u if token.beta is None else token.beta * u
            o = self.sizes.scale * (read + jnp.sum(token.q * token.k) * u)
            stored_u = u.astype(self.gmem.ring_u.dtype)
            yield Answer(o, u, stored_u)
            us.append(stored_u.astype(jnp.float32))
            since.append(None)

    def keep_gate(self, ring_g: Any, position: jax.Array, g: jax.Array) -> None:
        """See `vectors.Cta.keep_gate`: of every channel."""
        store_any(ring_g.at[position], g)


class ChannelDraftsCta(drafts.Cta, ChannelRingCta):
    """The knowledge of a warpgroup of `drafts`, with a decay of each key channel."""


def check_supported(q, k, v, rings: Rings, *, kv_layout: bool = True) -> str | None:
    """Why the kernels cannot take a call, from its arrays or their shapes; None if they can. See `vectors`."""
    if rings.scale is not None:
        return "states in 8 bits beside a ring with a decay of each channel; the kernel takes 32 and 16 bits"
    return vectors.check_supported(q, k, v, rings, kv_layout=kv_layout)


def channel_deferred(
    x: ChannelTokens, rings: Rings, *, lower_bound: float | None, **options: Any
) -> tuple[Float[Array, "N 1 HV V"], Rings]:
    """`deferred` with a decay of each channel.

    Args:
      x, rings: tokens, T = 1, and rings that `check_supported` accepts.
      lower_bound: the strongest log decay of the bounded gate, below 0; None for the other gate.
      options: of `deferred`.
    """
    gates: Any = dict(kind=ChannelRingCta, settings=dict(lower_bound=lower_bound))
    return deferred.deferred(x, rings, **gates, **options)


def channel_drafts(
    x: ChannelTokens,
    rings: Rings,
    *,
    lower_bound: float | None,
    config: vectors.Config | None = None,
    **options: Any,
) -> tuple[Float[Array, "N T HV V"], Rings]:
    """`drafts` with a decay of each channel.

    Args:
      x, rings, lower_bound: as for `channel_deferred`, of T tokens.
      config: None for the default with `WARPGROUPS`.
      options: of `drafts`.
    """
    gates: Any = dict(kind=ChannelDraftsCta, settings=dict(lower_bound=lower_bound))
    warpgroups = WARPGROUPS[options.get("kv_layout", True)]
    config = config or dataclasses.replace(vectors.Config.default(x.v.shape[-1]), warpgroups=warpgroups)
    return drafts.drafts(x, rings, config=config, **gates, **options)
