"""The algebra of deferred writes: outputs from a state that is older than the present one, and the tokens since.

With S0 the older state, tokens j since then with key k_j, written value u_j and log decay g_j, and
D_j = exp(g_j+1 + ... + g_t) the decay since token j, a new token t needs no newer state than S0:

    found = exp(g_1 + ... + g_t) k_t^T S0 + sum_{j < t} D_j (k_t . k_j) u_j          k_t^T times the decayed state
    u_t   = beta_t (v_t - found)
    o_t   = scale (exp(g_1 + ... + g_t) q_t^T S0 + sum_{j <= t} D_j (q_t . k_j) u_j)

and the present state is exp(g_1 + ... + g_t) S0 + sum_j D_j k_j u_j^T. Where the tokens of a call are a tree, sums
are those along a token's path: D_j is 0 for a token j that t does not follow.

Per-channel decays stand inside the sums over channels, and with erase and write apart there are two strengths. With
D_j [K] and total = exp(g_1 + ... + g_t) [K]

    found(x) = (x * total)^T S0 + sum_{j < t} (x * D_j . k_j) u_j
    u_t      = w_t * v_t - found(b_t * k_t)
    o_t      = scale (found(q_t) + (q_t . k_t) u_t)

and the present state is Diag(total) S0 + sum_j (D_j * k_j) u_j^T. Of D_j the part up to the call's first token and
the part from there on are factors of either side: tokens of the ring meet all tokens of a call in one product.

Decays are exponentials of sums of log decays, never quotients of two decays: a gate may be as low as -inf.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
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
    g: Float[Array, "B HO L *K"]
    count: Int[Array, " B"]

    def split(self, split: Callable[[Array], Array]) -> Any:
        """The same with split heads."""
        return Entry(split(self.state), split(self.k), split(self.u), split(self.g), self.count)

    def present(self) -> Float[Array, "B HO K V"]:
        """The present states. Without a token since, they are the older ones, bit for bit."""
        counts = (self.k.shape[1], self.u.shape[1])
        S0, k, u, g, count = self.split(lambda x: split_heads(x, 1, counts))
        if self.g.ndim < self.u.ndim:
            total, since = _decays(g, -1)
            new = total[..., None, None] * S0 + einsum("...jk,...jv->...kv", k, since[..., None] * u)
        else:
            total, since = _decays(g, -2)
            new = total[..., None] * S0 + einsum("...jk,...jv->...kv", since * k, u)
        return jnp.where(like(count == 0, new), S0, new).reshape(self.state.shape)

    def respond(
        self, x: Tokens, parents: Int[Array, "B T"] | None = None, *, call: Call, ring_dtype: Any
    ) -> Appended:
        """The module's equations for tokens [B, T, heads, ...] one after the other, over one reading of the states.

        A token's key and value meet later tokens as a ring of that dtype stores them.

        Args:
          parents: which of them each token follows, -1 for the last one of the ring; None for a chain.
        """
        algebra = _respond_by_heads if x.write is None else _respond_by_channels
        entry = self.split(x.split)
        tokens = jax.tree.map(lambda y: x.split(jnp.moveaxis(y, 1, 2)), x)  # [B, *heads, T, ...]
        out = algebra(entry, tokens, parents, call.scale, ring_dtype)  # [T, B, *heads, V]
        shape = (*x.v.shape[:2], self.u.shape[1], x.v.shape[-1])
        return Appended(*(jnp.moveaxis(y, 0, 1).reshape(shape) for y in out))


def like(mask: Bool[Array, " B"], x: Array) -> Array:
    """A mask of requests with axes of size 1 appended, to broadcast against x."""
    return mask.reshape(mask.shape[0], *(1,) * (x.ndim - 1))


def _respond_by_heads(
    entry: Entry, x: Tokens, parents: Int[Array, "B T"] | None, scale: float, ring_dtype: Any
) -> tuple[Array, Array]:
    """`Entry.respond` with one decay a head: o and u."""
    q, k, v, g, beta, _ = x
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
        return seen_k, seen_u, since.at[..., 1 + L + t].set(0), (scale * o, u)

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

    since = with_room(_log_decays(entry.g, -1), -1, -jnp.inf)
    if parents is not None:  # those after every token, behind those before the first
        since = jnp.zeros((T + 1, *since.shape), since.dtype).at[0].set(since)
    xs = [jnp.moveaxis(y, -2, 0) for y in (q, k, v)] + [jnp.moveaxis(y, -1, 0) for y in (g, beta)]
    xs += [jnp.moveaxis(y, -2, 0) for y in (found, read)]
    in_order = (jnp.arange(T), None if parents is None else parents.T.astype(jnp.int32), xs)
    carry = (with_room(entry.k, -2), with_room(entry.u, -2), since)
    return lax.scan(follow, carry, in_order)[1]


def _respond_by_channels(
    entry: Entry, x: Tokens, parents: Int[Array, "B T"] | None, scale: float, ring_dtype: Any
) -> tuple[Array, Array]:
    """`Entry.respond` with per-channel decays, and with erase and write apart: o and u."""
    q, k, v, g, erase, write = x
    S0, ring_k, ring_u, ring_g, _ = entry
    e, T = erase * k, v.shape[-2]
    stored_k = k.astype(ring_dtype).astype(k.dtype)
    since = jnp.exp(_along_paths(g, parents))  # [B, *heads, T, 1 + T, K]
    total, ring = _decays(ring_g, -2)
    is_earlier = jnp.tril(jnp.ones((T, T), bool), -1)

    def earlier(y: Array) -> tuple[Array, Array]:
        """Finds keys in the state and the ring [.., T, V], and matches them with earlier tokens [.., T, T]."""
        started = y * since[..., 0, :]
        matches = einsum("...tk,...jk->...tj", started, ring * ring_k)
        base = einsum("...tk,...kv->...tv", started * total[..., None, :], S0)
        base = base + einsum("...tj,...jv->...tv", matches, ring_u)
        seen = einsum("...tk,...tjk,...jk->...tj", y, since[..., 1:, :], stored_k)
        return base, jnp.where(is_earlier, seen, 0)  # a later token may be padding, and no number

    (found, seen_by_e), (read, seen_by_q) = earlier(e), earlier(q)
    wanted = write * v - found

    def token(seen_u: Array, inputs: tuple) -> tuple[Array, tuple[Array, Array]]:
        t, wanted, read, seen_by_e, seen_by_q, own = inputs
        u = wanted - einsum("...j,...jv->...v", seen_by_e, seen_u)
        o = read + einsum("...j,...jv->...v", seen_by_q, seen_u) + own[..., None] * u
        return seen_u.at[..., t, :].set(u.astype(ring_dtype).astype(u.dtype)), (scale * o, u)

    # A token's own value is not in seen_u yet when its row meets it: it is added, before it is rounded.
    own = jnp.broadcast_to(jnp.sum(q * k, -1), wanted.shape[:-1])
    rows = (jnp.moveaxis(y, -2, 0) for y in (wanted, read, seen_by_e, seen_by_q))
    inputs = (jnp.arange(T), *rows, jnp.moveaxis(own, -1, 0))
    return lax.scan(token, jnp.zeros_like(wanted), inputs)[1]


def _along_paths(g: Array, parents: Int[Array, "B T"] | None) -> Array:
    """Log decays of tokens [.., T, 1 + T, K], since the call's start and since each token, their own included.

    They are -inf since a token that is not followed.
    """
    T = g.shape[-2]
    start = jnp.full_like(g, -jnp.inf, shape=(*g.shape[:-2], 1 + T, g.shape[-1])).at[..., 0, :].set(0)
    paths = jnp.zeros((T + 1, *start.shape), g.dtype).at[0].set(start)

    def follow(paths: Array, inputs: tuple) -> tuple[Array, Array]:
        t, parent, g = inputs
        before = paths[t] if parent is None else paths[parent + 1, jnp.arange(g.shape[0])]
        path = before + g[..., None, :]
        return paths.at[t + 1].set(path.at[..., 1 + t, :].set(0)), path

    parents = None if parents is None else parents.T.astype(jnp.int32)
    _, out = lax.scan(follow, paths, (jnp.arange(T), parents, jnp.moveaxis(g, -2, 0)))
    return jnp.moveaxis(out, 0, -3)


def _decays(g: Array, tokens: int) -> tuple[Array, Array]:
    """Decays over a ring of log decays, tokens being the axis of its entries: of all of it, and since each entry."""
    decays = jnp.exp(_log_decays(g, tokens))
    return lax.index_in_dim(decays, 0, tokens, keepdims=False), lax.slice_in_dim(decays, 1, None, axis=tokens)


def _log_decays(g: Array, tokens: int) -> Array:
    """Sums of a ring's log decays, 1 + L along the axis of its entries: of all, and of those after each entry."""
    until = jnp.flip(jnp.cumsum(jnp.flip(g, tokens), tokens), tokens)
    return jnp.concatenate([until, jnp.zeros_like(lax.slice_in_dim(until, 0, 1, axis=tokens))], tokens)
