"""The algebra of `deferred` with a decay for each key channel, and with erase and write apart.

Decays stand inside the sums over channels. With D_j = exp(g_j+1 + ... + g_t) [K] and total = exp(g_1 + ... + g_t) [K]

    found(x) = (x * total)^T S0 + sum_{j < t} (x * D_j . k_j) u_j
    u_t      = w_t * v_t - found(b_t * k_t)
    o_t      = scale (found(q_t) + (q_t . k_t) u_t)

and the present state is Diag(total) S0 + sum_j (D_j * k_j) u_j^T. Of D_j the part up to the call's first token and
the part from there on are factors of either side: tokens of the ring meet all tokens of a call in one product.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax.serving.call import Call
from gdn_jax.serving.channels import ChannelTokens
from gdn_jax.serving.deferred import Appended, Entry, einsum, like
from gdn_jax.shapes import split_heads


class ChannelEntry(Entry):
    """An `Entry` whose log decays g are [B, HO, L, K]."""

    __slots__ = ()

    def present(self) -> Float[Array, "B HO K V"]:
        """The present states. Without a token since, they are the older ones, bit for bit."""
        S0, k, u, g, count = self.split(lambda x: split_heads(x, 1, (self.k.shape[1], self.u.shape[1])))
        total, since = _decays(g)
        new = total[..., None] * S0 + einsum("...jk,...jv->...kv", since * k, u)
        return jnp.where(like(count == 0, new), S0, new).reshape(self.state.shape)

    def respond(  # pyrefly: ignore[bad-override]
        self, x: ChannelTokens, parents: Int[Array, "B T"] | None = None, *, call: Call, ring_dtype: Any
    ) -> Appended:
        """The module's equations for tokens [B, T, heads, ...], see `Entry.respond`."""
        S0, ring_k, ring_u, ring_g, _ = self.split(x.split)
        q, k, v, g, erase, write = (x.split(jnp.moveaxis(y, 1, 2)) for y in x)  # [B, *heads, T, ...]
        e, T = erase * k, v.shape[-2]
        stored_k = k.astype(ring_dtype).astype(k.dtype)
        since = jnp.exp(_along_paths(g, parents))  # [B, *heads, T, 1 + T, K]
        total, ring = _decays(ring_g)
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
            return seen_u.at[..., t, :].set(u.astype(ring_dtype).astype(u.dtype)), (call.scale * o, u)

        # A token's own value is not in seen_u yet when its row meets it: it is added, before it is rounded.
        own = jnp.broadcast_to(jnp.sum(q * k, -1), wanted.shape[:-1])
        rows = (jnp.moveaxis(y, -2, 0) for y in (wanted, read, seen_by_e, seen_by_q))
        inputs = (jnp.arange(T), *rows, jnp.moveaxis(own, -1, 0))
        _, out = lax.scan(token, jnp.zeros_like(wanted), inputs)  # [T, B, *heads, V]
        shape = (v.shape[0], T, x.g.shape[-2], v.shape[-1])
        return Appended(*(jnp.moveaxis(y, 0, 1).reshape(shape) for y in out))


def _decays(g: Array) -> tuple[Array, Array]:
    """Decays over a ring of log decays [..., L, K]: of all of it [..., K], and since each entry [..., L, K]."""
    until = jnp.flip(jnp.cumsum(jnp.flip(g, -2), -2), -2)
    decays = jnp.exp(jnp.concatenate([until, jnp.zeros_like(until[..., :1, :])], -2))
    return decays[..., 0, :], decays[..., 1:, :]


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
