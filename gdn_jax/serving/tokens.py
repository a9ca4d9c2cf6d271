"""Tokens as a caller gives them and as the rule takes them: gates from raw inputs, unit queries and keys.

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
    ArgumentError,
    Dims,
    accumulation_dtype,
    check_array,
    check_floating,
    real_number,
    split_heads,
)


class Packed(NamedTuple):
    """Tokens whose heads lie side by side in arrays of channels [N, T, ..], some of which may be one array."""

    q: Array
    k: Array
    v: Array
    a: Array
    b: Array
    w: Array | None
    A_log: Any
    dt_bias: Array
    """[HO], or with a decay of each channel [HO, K]."""
    heads: tuple[int, int, int]
    """Hq, Hk and HV."""
    first: Any
    """Where the heads of each begin, a `Channels` of `pallas_kernels.decode.step`."""
    erase_key: Array | None = None
    erase_strength: Array | None = None

    def with_token_axis(self) -> "Packed":
        """See `Raw.with_token_axis`: they have one."""
        return self

    def packed(self) -> "Packed":
        """See `Raw.packed`."""
        return self


class Raw(NamedTuple):
    """Tokens as the caller gave them, [..., heads, width], and the raw inputs and parameters of their gates.

    Gates have one number a head, [..., HO]. With a per-channel decay, or with erase and write apart, every gate has
    an axis of channels, of length 1 where it has one number a head.
    """

    q: Array
    k: Array
    v: Array
    a: Array
    """Raw input of the decay [..., HO] or [..., HO, K]."""
    b: Array
    """Raw input of the strength, or of what is erased [..., HO] or [..., HO, K]."""
    w: Array | None
    """Raw input of what is written [..., HO, V]; None: as what is erased."""
    A_log: Any
    """[HO], or with an axis of channels None, too."""
    dt_bias: Array
    """[HO] or [HO, K]."""
    qkv: Array | None = None
    """An array [..., D] whose channels q, k and v are, one after the other, if there is one. A kernel then reads
    them there, and q, k and v are never made."""
    erase_key: Array | None = None
    """Keys that are erased at before the write [..., Hk, K], for pools that `erases_at_once`; None for no erasure."""
    erase_strength: Array | None = None
    """Raw input of how much is erased there [..., HO]."""

    @property
    def by_channels(self) -> bool:
        """Whether gates have an axis of channels."""
        return any(_has_axes(x, len(self.q.shape)) for x in (self.a, self.b, self.w))

    def check(self, *, letters: str, state_layout: str) -> Dims:
        """Dimensions of the call; raises ValueError for arrays that are not those of its tokens."""
        q, k, v, a, b, w, A_log, dt_bias = self[:8]
        dims = token_dims(q, k, v, letters=letters, state_layout=state_layout)

        def check(name: str, x: Any, shape: tuple[int, ...], axes: str, width: int, letter: str) -> None:
            if self.by_channels:
                one = getattr(x, "shape", (width,))[-1] == 1
                shape, axes = (*shape, 1 if one else width), f"{axes}, {letter}"
            check_array(name, x, shape, axes)
            check_floating(name, x)

        heads = (*q.shape[:-2], dims.HO), f"{letters}, HO"
        check("a", a, *heads, dims.K, "K")
        check("b", b, *heads, dims.K, "K")
        if w is not None:
            check("w", w, *heads, dims.V, "V")
        elif self.by_channels and b.shape[-1] > 1:
            raise ArgumentError("w", "an array, since b has a number for each key channel", None)
        if A_log is not None or not self.by_channels:
            check_array("A_log", A_log, (dims.HO,), "HO")
            check_floating("A_log", A_log)
        check("dt_bias", dt_bias, (dims.HO,), "HO", a.shape[-1], "K")
        if self.erase_key is not None:
            check_array("w", self.erase_strength, *heads)
            check_floating("w", self.erase_strength)
        return dims

    def prepare(self, states: Any, call: Call) -> "Tokens":
        """Gates, norms and dtypes.

        Args:
          states: the array of the states, or another of its dtype.
        """
        dtype = accumulation_dtype(*self, states)
        q, k, v, a, b = (x.astype(dtype) for x in self[:5])
        if call.use_qk_l2norm:
            q, k = gates.l2norm(q), gates.l2norm(k)
        if not self.by_channels:
            g = gates.log_decay(a, self.A_log, self.dt_bias)
            return Tokens(q, k, v, g, gates.write_strength(b, allow_neg_eigval=call.allow_neg_eigval), None)
        bias = jnp.broadcast_to(self.dt_bias, a.shape[-2:])
        g = gates.channel_log_decay(a, self.A_log, bias, call.lower_bound)
        g = jnp.broadcast_to(g, (*g.shape[:-1], k.shape[-1]))
        erase = gates.write_strength(b, allow_neg_eigval=call.allow_neg_eigval)
        write = erase if self.w is None else gates.write_strength(self.w.astype(dtype))
        return Tokens(q, k, v, g, erase, write)

    def with_token_axis(self) -> "Raw":
        """One token of every request, [B, ...], as [B, 1, ...]."""
        q, k, v, a, b = (x[:, None] for x in self[:5])
        w, *rest = (None if x is None else x[:, None] for x in (self.w, *self[8:]))
        return Raw(q, k, v, a, b, w, self.A_log, self.dt_bias, *rest)

    def packed(self) -> Packed:
        """Tokens [B, T, ...] as arrays of channels."""
        from pallas_kernels.decode.step import Channels

        (Hq, Hk, HV), K = (y.shape[-2] for y in self[:3]), self.k.shape[-1]
        (q, k, v), first = (y.reshape(*y.shape[:2], -1) for y in self[:3]), Channels()
        if self.qkv is not None:
            q, k, v, first = self.qkv, self.qkv, self.qkv, Channels(k=Hq * K, v=(Hq + Hk) * K)
        a, b, w, A_log, dt_bias = self.gates_of_kernels()
        erasure = self.erase_key, self.erase_strength
        return Packed(q, k, v, a, b, w, A_log, dt_bias, (Hq, Hk, HV), first, *erasure)

    def gates_of_kernels(self) -> tuple[Array, Array, Array | None, Any, Array]:
        """a, b, w, A_log and dt_bias as kernels take them: strengths apart are of every channel, as decays are."""
        if not self.by_channels:
            return self.a, self.b, None, self.A_log, self.dt_bias
        (*axes, HO, _), K, V = self.a.shape, self.k.shape[-1], self.v.shape[-1]
        a, dt_bias = jnp.broadcast_to(self.a, (*axes, HO, K)), jnp.broadcast_to(self.dt_bias, (HO, K))
        if self.w is None:  # then what is erased is one number a head, too
            return a, self.b[..., 0], None, self.A_log, dt_bias
        b, w = jnp.broadcast_to(self.b, (*axes, HO, K)), jnp.broadcast_to(self.w, (*axes, HO, V))
        return a, b, w, self.A_log, dt_bias


class Tokens(NamedTuple):
    """Tokens as a step of `definition` takes them, without its state; their heads are not split yet."""

    q: Float[Array, "*B Hq K"]
    k: Float[Array, "*B Hk K"]
    v: Float[Array, "*B HV V"]
    g: Array
    """[*B, HO], or with a write [*B, HO, K]."""
    erase: Array
    """[*B, HO], or with a write [*B, HO, K] or [*B, HO, 1]."""
    write: Any
    """[*B, HO, V] or [*B, HO, 1]; None for tokens of one gate a head, whose strength is `erase`."""

    def split(self, x: Array) -> Array:
        """The head axis of an array [B, heads, ...], as axes that broadcast: see `split_heads`."""
        HO = self.g.shape[self.q.ndim - 2]
        return split_heads(x, 1, (*(y.shape[-2] for y in self[:3]), HO))

    def step(self, h: Float[Array, "B HO K V"], call: Call) -> tuple[Array, Array]:
        """One token of every request: the new states [B, HO, K, V] and the outputs [B, HO, V]."""
        step = definition.recurrent_step if self.write is None else definition.channel_step
        new, o = step(self.split(h), *(self.split(x) for x in self if x is not None), scale=call.scale)
        return new.reshape(h.shape), o.reshape(*h.shape[:2], h.shape[3])


def raw_tokens(
    q: Array,
    k: Array,
    v: Array,
    a: Any,
    b: Any,
    w: Any,
    A_log: Any,
    dt_bias: Any,
    *,
    qkv: Array | None = None,
    lower_bound: Any,
) -> Raw:
    """The record of tokens that the arguments of `decode` or `verify` are.

    Raises:
      ValueError: lower_bound is not below 0.
    """
    if lower_bound is not None and not real_number("lower_bound", lower_bound) < 0:
        raise ArgumentError("lower_bound", "a number below 0 or None", lower_bound)
    heads = len(getattr(q, "shape", ())) - 1
    if w is None and lower_bound is None and not _has_axes(a, heads + 1) and not _has_axes(b, heads + 1):
        return Raw(q, k, v, a, b, w, A_log, dt_bias, qkv)

    def channels(x: Any, axes: int = heads) -> Any:
        return x if _has_axes(x, axes + 1) or not hasattr(x, "shape") else x[..., None]

    return Raw(q, k, v, channels(a), channels(b), channels(w), A_log, channels(dt_bias, 1), qkv)


def _has_axes(x: Any, number: int) -> bool:
    return len(getattr(x, "shape", ())) >= number


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
