"""Tokens as a caller gives them and as the rule takes them: gates from raw a and b, unit queries and keys.

All of it is computed in float32, or float64 where an argument is: no gate and no norm is rounded between its input
and its last use, whatever the dtypes of the inputs and of the pool. Heads that are shared are not repeated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax import gates
from gdn_jax.rule import definition
from gdn_jax.serving.arguments import token_dims
from gdn_jax.serving.call import Call
from gdn_jax.shapes import (
    STATE_LAYOUTS,
    Dims,
    accumulation_dtype,
    check_array,
    check_floating,
    split_heads,
)


class Raw(NamedTuple):
    """Tokens as the caller gave them, [..., heads, width] and [..., HO], and the parameters of the gates [HO].

    Another rule has a record of its own with `check` and `prepare`, whose tokens have `split` and `step`: `channels`.
    """

    q: Array
    k: Array
    v: Array
    a: Array
    b: Array
    A_log: Array
    dt_bias: Array
    qkv: Array | None = None
    """An array [..., D] whose channels q, k and v are, one behind the other, if there is one. A kernel then reads
    them there, and q, k and v are never made."""

    gates = "one gate a head"
    """The gates, in words."""

    def check(self, *, letters: str, state_layout: str) -> Dims:
        """Dimensions of the call; raises ValueError for arrays that are not those of its tokens."""
        q, k, v, a, b, A_log, dt_bias, _ = self
        dims = token_dims(q, k, v, letters=letters, state_layout=state_layout)
        for name, x in (("a", a), ("b", b)):
            check_array(name, x, (*q.shape[:-2], dims.HO), f"{letters}, HO")
            check_floating(name, x)
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            check_array(name, x, (dims.HO,), "HO")
            check_floating(name, x)
        return dims

    def prepare(self, states: Any, call: Call) -> "Tokens":
        """Gates, norms and dtypes.

        Args:
          states: the array of the states, or another of its dtype.
        """
        dtype = accumulation_dtype(*self, states)
        q, k, v = (x.astype(dtype) for x in self[:3])
        if call.use_qk_l2norm:
            q, k = gates.l2norm(q), gates.l2norm(k)
        g = gates.log_decay(self.a.astype(dtype), self.A_log, self.dt_bias)
        beta = gates.write_strength(self.b.astype(dtype), allow_neg_eigval=call.allow_neg_eigval)
        return Tokens(q, k, v, g, beta)

    def with_token_axis(self) -> "Raw":
        """One token of every request, [B, ...], as [B, 1, ...]."""
        q, k, v, a, b = (x[:, None] for x in self[:5])
        return Raw(q, k, v, a, b, self.A_log, self.dt_bias, None if self.qkv is None else self.qkv[:, None])


class Tokens(NamedTuple):
    """Tokens as `definition.recurrent_step` takes them, without its state; their heads are not split yet."""

    q: Float[Array, "*B Hq K"]
    k: Float[Array, "*B Hk K"]
    v: Float[Array, "*B HV V"]
    g: Float[Array, "*B HO"]
    beta: Float[Array, "*B HO"]

    def split(self, x: Array) -> Array:
        """The head axis of an array [B, heads, ...], as axes that broadcast: see `split_heads`."""
        return split_heads(x, 1, (*(y.shape[-2] for y in self[:3]), self.g.shape[-1]))

    def step(self, h: Float[Array, "B HO K V"], call: Call) -> tuple[Array, Array]:
        """One token of every request: the new states [B, HO, K, V] and the outputs [B, HO, V]."""
        new, o = definition.recurrent_step(self.split(h), *map(self.split, self), scale=call.scale)
        return new.reshape(h.shape), o.reshape(*h.shape[:2], h.shape[3])


def by_row(f: Callable, call: Call, *rows: Any) -> Any:
    """f over requests, the leading axis of its arguments and results: all at once, or one after the other.

    One after the other, every request meets the same compiled code, whatever else is in the batch and however many
    there are: its bits do not depend on its neighbours. A lone request gets a neighbour, because a loop of one
    iteration would be compiled as no loop at all.
    """
    if not call.batch_invariant:
        return f(*rows)
    B = jax.tree.leaves(rows)[0].shape[0]
    if B == 1:
        rows = jax.tree.map(lambda x: jnp.concatenate([x, x]), rows)

    def one(row):
        return jax.tree.map(lambda y: y[0], alone(f)(*jax.tree.map(lambda x: x[None], row)))

    return jax.tree.map(lambda y: y[:B], jax.lax.map(one, rows))


def alone(f: Callable) -> Callable:
    """The function compiled without regard to where its arguments come from and where its results go."""

    def g(*args):
        return jax.lax.optimization_barrier(f(*jax.lax.optimization_barrier(args)))

    return g


def walk(step: Callable, state: Array, tokens: Any, parents: Array | None) -> tuple[Array, Array]:
    """Applies step(state, token) -> (state, output) along the tokens of every request.

    Args:
      state: before the first token [N, ...].
      tokens: a pytree of arrays [N, T, ...].
      parents: [N, T], see `verify`; None for chains.

    Returns:
      The states after every token and the outputs, [N, T, ...].
    """
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    if parents is None:

        def follow(state, x):
            state, o = step(state, x)
            return state, (state, o)

        _, (states, o) = jax.lax.scan(follow, state, tokens)
    else:
        N, T = parents.shape
        request = jnp.arange(N)
        states = jnp.zeros((T + 1, *state.shape), state.dtype).at[0].set(state)

        def branch(states, x):
            t, parent, x = x
            state, o = step(states[parent + 1, request], x)
            return states.at[t + 1].set(state), o

        states, o = jax.lax.scan(branch, states, (jnp.arange(T), parents.T.astype(jnp.int32), tokens))
        states = states[1:]
    return jnp.moveaxis(states, 0, 1), jnp.moveaxis(o, 0, 1)


def heads_of(
    qkv: Float[Array, "T D"], pool: Any
) -> tuple[Float[Array, "T Hk K"], Float[Array, "T Hk K"], Float[Array, "T HV V"]]:
    """Queries, keys and values of packed channels.

    Raises:
      ValueError: the channels are not those of the pool's heads.
    """
    HV, *widths = pool.states.shape[-3:]
    K, V = widths if pool.layout == STATE_LAYOUTS[0] else widths[::-1]
    check_array("qkv", qkv, (None, None), "T, D")
    T, D = qkv.shape
    key_dim, rest = divmod(D - HV * V, 2)
    if rest or key_dim < K or key_dim % K:
        raise ValueError(
            f"qkv: expected 2 Hk K + HV V channels with HV V = {HV} * {V} and K = {K}, which are the pool's, got {D}"
        )
    q, k, v = jnp.split(qkv, [key_dim, 2 * key_dim], axis=-1)
    Hk = key_dim // K
    return q.reshape(T, Hk, K), k.reshape(T, Hk, K), v.reshape(T, HV, V)
