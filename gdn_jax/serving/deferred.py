"""The algebra of deferred writes: outputs from a state that is older than the present one, and the tokens since.

With S0 the older state, tokens j since then with key k_j, written value u_j and log decay g_j, and
D_j = exp(g_j+1 + ... + g_t) the decay since token j, a new token t needs no newer state than S0:

    found = exp(g_1 + ... + g_t) k_t^T S0 + sum_{j < t} D_j (k_t . k_j) u_j          k_t^T times the decayed state
    u_t   = beta_t (v_t - found)
    o_t   = scale (exp(g_1 + ... + g_t) q_t^T S0 + sum_{j <= t} D_j (q_t . k_j) u_j)

and the present state is exp(g_1 + ... + g_t) S0 + sum_j D_j k_j u_j^T. Where the tokens of a call are a tree, sums
are those along a token's path: D_j is 0 for a token j that t does not follow.

Decays are exponentials of sums of log decays, never quotients of two decays: a gate may be as low as -inf.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.serving.call import Call
from gdn_jax.serving.tokens import Tokens
from gdn_jax.shapes import split_heads

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Appended(NamedTuple):
    """Results of the algebra for one or more tokens of every request."""

    o: Float[Array, "B T HO V"]
    u: Float[Array, "B T HO V"]


class Entry(NamedTuple):
    """Older states and the tokens since, in float32 or float64; k, u and g are 0 where there is no token."""

    state: Float[Array, "B HO K V"]
    k: Float[Array, "B Hk L K"]
    u: Float[Array, "B HO L V"]
    g: Float[Array, "B HO L"]
    count: Int[Array, " B"]

    def split(self, split: Callable[[Array], Array]) -> Any:
        """The same with split heads."""
        return type(self)(split(self.state), split(self.k), split(self.u), split(self.g), self.count)

    def present(self) -> Float[Array, "B HO K V"]:
        """The present states. Without a token since, they are the older ones, bit for bit."""
        counts = (self.k.shape[1], self.u.shape[1])
        S0, k, u, g, count = self.split(lambda x: split_heads(x, 1, counts))
        decays = jnp.exp(_log_decays(g))
        total, since = decays[..., 0], decays[..., 1:]
        new = total[..., None, None] * S0 + einsum("...jk,...jv->...kv", k, since[..., None] * u)
        return jnp.where(like(count == 0, new), S0, new).reshape(self.state.shape)

    def respond(
        self, x: Tokens, parents: Int[Array, "B T"] | None = None, *, call: Call, ring_dtype: Any
    ) -> Appended:
        """The module's equations for tokens [B, T, heads, ...] one after the other, over one reading of the states.

        A token's key and value meet later tokens as a ring of that dtype stores them.

        Args:
          parents: which of them each token follows, -1 for the last one of the ring; None for a chain.
        """
        entry = self.split(x.split)
        q, k, v, g, beta = (x.split(jnp.moveaxis(y, 1, 2)) for y in x)  # [B, *heads, T, ...]
        found, read = (einsum("...tk,...kv->...tv", y, entry.state) for y in (k, q))
        (B, *_, T, _), L = v.shape, entry.g.shape[-1]

        def token(seen_k, seen_u, since, t, x):
            """since: log decays since the checkpoint, each entry and token; -inf for what is not followed."""
            q, k, v, g, beta, found, read = x
            since = since + g[..., None]
            total, decay = jnp.exp(since[..., :1]), jnp.exp(since[..., 1:])

            def recall(y):
                return einsum("...j,...jv->...v", decay * einsum("...k,...jk->...j", y, seen_k), seen_u)

            u = beta[..., None] * (v - (total * found + recall(k)))
            o = total * read + recall(q) + jnp.sum(q * k, -1, keepdims=True) * u
            stored_k, stored_u = (y.astype(ring_dtype).astype(y.dtype) for y in (k, u))
            seen_k, seen_u = seen_k.at[..., L + t, :].set(stored_k), seen_u.at[..., L + t, :].set(stored_u)
            return seen_k, seen_u, since.at[..., 1 + L + t].set(0), (call.scale * o, u)

        def follow(carry, x):
            seen_k, seen_u, since = carry
            t, parent, x = x
            before = since if parents is None else since[parent + 1, jnp.arange(B)]
            seen_k, seen_u, after, out = token(seen_k, seen_u, before, t, x)
            return (seen_k, seen_u, after if parents is None else since.at[t + 1].set(after)), out

        def with_room(ring: Array, axis: int, fill: float = 0) -> Array:
            widths = [(0, 0)] * ring.ndim
            widths[axis] = (0, T)
            return jnp.pad(ring, widths, constant_values=fill)

        since = with_room(_log_decays(entry.g), -1, -jnp.inf)
        if parents is not None:  # those after every token, behind those before the first
            since = jnp.zeros((T + 1, *since.shape), since.dtype).at[0].set(since)
        xs = [jnp.moveaxis(y, -2, 0) for y in (q, k, v)] + [jnp.moveaxis(y, -1, 0) for y in (g, beta)]
        xs += [jnp.moveaxis(y, -2, 0) for y in (found, read)]
        in_order = (jnp.arange(T), None if parents is None else parents.T.astype(jnp.int32), xs)
        carry = (with_room(entry.k, -2), with_room(entry.u, -2), since)
        _, out = lax.scan(follow, carry, in_order)  # [T, B, *heads, V]
        return Appended(*(jnp.moveaxis(y, 0, 1).reshape(B, T, x.g.shape[-1], v.shape[-1]) for y in out))


def like(mask: Bool[Array, " B"], x: Array) -> Array:
    """A mask of requests with axes of size 1 appended, to broadcast against x."""
    return mask.reshape(mask.shape[0], *(1,) * (x.ndim - 1))


def _log_decays(g: Array) -> Array:
    """Sums of the log decays [..., L] of a ring, [..., 1 + L]: of all, and of those after each entry."""
    until = jnp.flip(jnp.cumsum(jnp.flip(g, -1), -1), -1)
    return jnp.concatenate([until, jnp.zeros_like(until[..., :1])], -1)
