"""Tokens with a decay for each key channel, or with erase and write apart: what `tokens` is to one decay a head."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax import gates
from gdn_jax.rule import definition
from gdn_jax.serving.arguments import token_dims
from gdn_jax.serving.call import Call
from gdn_jax.serving.tokens import Raw
from gdn_jax.shapes import (
    ArgumentError,
    Dims,
    accumulation_dtype,
    check_array,
    check_floating,
    real_number,
    split_heads,
)


class ChannelRaw(NamedTuple):
    """Tokens as the caller gave them, as `Raw` has them, with an axis of channels behind the heads of every gate.

    It is of length 1 where there is one number a head.
    """

    q: Array
    k: Array
    v: Array
    f: Array
    """Raw input of the decay [..., HO, K], the `a` of a caller."""
    erase: Array
    """Raw input of what is erased [..., HO, K], the caller's `b`."""
    write: Array | None
    """Raw input of what is written [..., HO, V], the caller's `w`; None: as what is erased."""
    A_log: Array | None
    f_bias: Array
    """The caller's dt_bias [HO, K]."""
    qkv: Array | None = None
    """See `Raw.qkv`."""

    gates = "gates of each channel, or erase and write apart"

    def check(self, *, letters: str, state_layout: str) -> Dims:
        """Dimensions of the call; raises ValueError for arrays that are not those of its tokens."""
        q, k, v, f, erase, write, A_log, f_bias, _ = self
        dims = token_dims(q, k, v, letters=letters, state_layout=state_layout)

        def check(name: str, x: Any, leading: tuple[int, ...], width: int, axes: str) -> None:
            one = getattr(x, "shape", (width,))[-1] == 1
            check_array(name, x, (*leading, 1 if one else width), axes)
            check_floating(name, x)

        heads = (*q.shape[:-2], dims.HO)
        check("a", f, heads, dims.K, f"{letters}, HO, K")
        check("b", erase, heads, dims.K, f"{letters}, HO, K")
        if write is not None:
            check("w", write, heads, dims.V, f"{letters}, HO, V")
        elif erase.shape[-1] > 1:
            raise ArgumentError("w", "an array, since b has a number for each key channel", None)
        check("dt_bias", f_bias, (dims.HO,), f.shape[-1], "HO, K")
        if A_log is not None:
            check_array("A_log", A_log, (dims.HO,), "HO")
            check_floating("A_log", A_log)
        return dims

    def prepare(self, states: Any, call: Call) -> "ChannelTokens":
        """Gates, norms and dtypes, see `Raw.prepare`."""
        dtype = accumulation_dtype(*self, states)
        q, k, v, f, erase = (x.astype(dtype) for x in self[:5])
        if call.use_qk_l2norm:
            q, k = gates.l2norm(q), gates.l2norm(k)
        bias = jnp.broadcast_to(self.f_bias, f.shape[-2:])
        g = gates.channel_log_decay(f, self.A_log, bias, call.lower_bound)
        g = jnp.broadcast_to(g, (*g.shape[:-1], k.shape[-1]))
        erase = gates.write_strength(erase, allow_neg_eigval=call.allow_neg_eigval)
        write = erase if self.write is None else gates.write_strength(self.write.astype(dtype))
        return ChannelTokens(q, k, v, g, erase, write)

    def with_token_axis(self) -> "ChannelRaw":
        """One token of every request, see `Raw.with_token_axis`."""
        q, k, v, f, erase = (x[:, None] for x in self[:5])
        write, qkv = (None if x is None else x[:, None] for x in (self.write, self.qkv))
        return ChannelRaw(q, k, v, f, erase, write, self.A_log, self.f_bias, qkv)


class ChannelTokens(NamedTuple):
    """Tokens as `definition.channel_step` takes them, without its state; their heads are not split yet."""

    q: Float[Array, "*B Hq K"]
    k: Float[Array, "*B Hk K"]
    v: Float[Array, "*B HV V"]
    g: Float[Array, "*B HO K"]
    erase: Float[Array, "*B HO _"]
    write: Float[Array, "*B HO _"]

    def split(self, x: Array) -> Array:
        """The head axis of an array [B, heads, ...], as axes that broadcast: see `split_heads`."""
        return split_heads(x, 1, tuple(y.shape[-2] for y in self[:4]))

    def step(self, h: Float[Array, "B HO K V"], call: Call) -> tuple[Array, Array]:
        """One token of every request: the new states [B, HO, K, V] and the outputs [B, HO, V]."""
        new, o = definition.channel_step(self.split(h), *map(self.split, self), scale=call.scale)
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
) -> Raw | ChannelRaw:
    """The record of tokens that the arguments of `decode` or `verify` are.

    Raises:
      ValueError: lower_bound is not below 0.
    """
    if lower_bound is not None and not real_number("lower_bound", lower_bound) < 0:
        raise ArgumentError("lower_bound", "a number below 0 or None", lower_bound)
    heads = len(getattr(q, "shape", ())) - 1

    def has_channels(x: Any, axes: int) -> bool:
        return len(getattr(x, "shape", ())) > axes

    if w is None and lower_bound is None and not has_channels(a, heads) and not has_channels(b, heads):
        return Raw(q, k, v, a, b, A_log, dt_bias, qkv)

    def channels(x: Any, axes: int = heads) -> Any:
        return x if has_channels(x, axes) or not hasattr(x, "shape") else x[..., None]

    return ChannelRaw(q, k, v, channels(a), channels(b), channels(w), A_log, channels(dt_bias, 1), qkv)
