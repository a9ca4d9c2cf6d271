"""The algebra of deferred writes: outputs from a state that is older than the present one, and the tokens since.

With S0 the older state, tokens j since then with key k_j, written value u_j and log decay g_j, and
D_j = exp(g_j+1 + ... + g_t) the decay since token j, a new token t needs no newer state than S0:

    found = exp(g_1 + ... + g_t) k_t^T S0 + sum_{j < t} D_j (k_t . k_j) u_j          k_t^T times the decayed state
    u_t   = beta_t (v_t - found)
    o_t   = scale (exp(g_1 + ... + g_t) q_t^T S0 + sum_{j <= t} D_j (q_t . k_j) u_j)

and the present state is exp(g_1 + ... + g_t) S0 + sum_j D_j k_j u_j^T.

Decays are exponentials of sums of log decays, never quotients of two decays: a gate may be as low as -inf.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.serving.tokens import Options, Tokens
from gdn_jax.shapes import split_heads

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Entry(NamedTuple):
    """Older states and the tokens since, in float32 or float64; k, u and g are 0 where there is no token."""

    state: Float[Array, "B HO K V"]
    k: Float[Array, "B Hk L K"]
    u: Float[Array, "B HO L V"]
    g: Float[Array, "B HO L"]
    count: Int[Array, " B"]

    def split(self, split: Callable[[Array], Array]) -> "Entry":
        """The same with split heads."""
        return Entry(split(self.state), split(self.k), split(self.u), split(self.g), self.count)

    def present(self) -> Float[Array, "B HO K V"]:
        """The present states. Without a token since, they are the older ones, bit for bit."""
        counts = (self.k.shape[1], self.u.shape[1])
        S0, k, u, g, count = self.split(lambda x: split_heads(x, 1, counts))
        total, since = _decays(g)
        new = total[..., None, None] * S0 + einsum("...jk,...jv->...kv", k, since[..., None] * u)
        return jnp.where(_like(count == 0, new), S0, new).reshape(self.state.shape)

    def append(self, k: Array, u: Array, g: Array) -> "Entry":
        """With one more token, of which the heads are split as here."""
        here = jnp.arange(self.g.shape[-1]) == self.count[:, None]

        def placed(ring, x, axis):
            x = jnp.expand_dims(x, axis)
            B, L = here.shape
            mask = here.reshape(B, *(1,) * (ring.ndim + axis - 1), L, *(1,) * (-1 - axis))
            return jnp.where(mask, x, ring)

        return Entry(
            self.state, placed(self.k, k, -2), placed(self.u, u, -2), placed(self.g, g, -1), self.count + 1
        )


def _like(mask: Bool[Array, " B"], x: Array) -> Array:
    return mask.reshape(mask.shape[0], *(1,) * (x.ndim - 1))


def _decays(g: Array) -> tuple[Array, Array]:
    """exp of the sum of all log decays [..., L] of a ring, and of those after each entry."""
    until = jnp.flip(jnp.cumsum(jnp.flip(g, -1), -1), -1)
    after = jnp.concatenate([until[..., 1:], jnp.zeros_like(until[..., :1])], -1)
    return jnp.exp(until[..., 0]), jnp.exp(after)


class Appended(NamedTuple):
    """Results of the algebra for one or more tokens of every request."""

    o: Float[Array, "B T HO V"]
    u: Float[Array, "B T HO V"]


def respond(entry: Entry, x: Tokens, options: Options, ring_dtype: Any) -> Appended:
    """The module's equations for tokens [B, T, heads, ...] one after the other, over one reading of the states.

    A token's key and value meet later tokens as a ring of that dtype stores them.
    """
    entry = entry.split(options.split)
    q, k, v, g, beta = (options.split(jnp.moveaxis(y, 1, 2)) for y in x)  # [B, *heads, T, ...]
    found, read = (einsum("...tk,...kv->...tv", y, entry.state) for y in (k, q))

    def token(entry: Entry, x):
        q, k, v, g, beta, found, read = x
        total, since = _decays(jnp.concatenate([entry.g, g[..., None]], -1))
        total, since = total[..., None], since[..., :-1]

        def recall(y):
            return einsum("...j,...jv->...v", since * einsum("...k,...jk->...j", y, entry.k), entry.u)

        u = beta[..., None] * (v - (total * found + recall(k)))
        o = total * read + recall(q) + jnp.sum(q * k, -1, keepdims=True) * u
        stored_k, stored_u = (y.astype(ring_dtype).astype(y.dtype) for y in (k, u))
        return entry.append(stored_k, stored_u, g), (options.scale * o, u)

    def with_room(ring: Array, axis: int) -> Array:
        widths = [(0, 0)] * ring.ndim
        widths[axis] = (0, v.shape[-2])
        return jnp.pad(ring, widths)

    entry = entry._replace(k=with_room(entry.k, -2), u=with_room(entry.u, -2), g=with_room(entry.g, -1))
    xs = [jnp.moveaxis(y, -2, 0) for y in (q, k, v)] + [jnp.moveaxis(y, -1, 0) for y in (g, beta)]
    xs += [jnp.moveaxis(y, -2, 0) for y in (found, read)]
    _, out = lax.scan(token, entry, xs)  # [T, B, *heads, V]
    shape = (options.dims.HO, options.dims.V)
    return Appended(*(jnp.moveaxis(y, 0, 1).reshape(y.shape[1], y.shape[0], *shape) for y in out))
