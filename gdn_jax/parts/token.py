"""One token of every row on states that kernels change in place: the step of generation.

`mix_token` is the convolution and the rule from the products of a layer's input, which its two kernels read where
they lie. On a mesh, and without a convolution, `token_step` is the rule alone.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float

from gdn_jax.gates import l2norm, log_decay, write_strength
from gdn_jax.partitioning import expected_shards, on_explicit_shards
from gdn_jax.parts.conv import causal_conv1d_update
from gdn_jax.parts.kernels import fused_op, run, trusted_whole, usable
from gdn_jax.parts.short_conv import split_normalized
from gdn_jax.rule.definition import recurrent_step
from gdn_jax.shapes import split_heads


def has_kernel(q, k, v, a, b, A_log, dt_bias, state, implementation: str | None) -> bool:
    """Whether the kernel takes a call of `token_step`, from its arrays or their shapes.

    Args:
      implementation: None takes the kernel where it can run (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not.
    """
    from pallas_kernels.decode import step

    if any(x.dtype == jnp.float64 for x in (q, k, v, a, b, A_log, dt_bias)):
        return False
    return usable("the step of a token", implementation, step.check_supported(q, k, v, state))


def token_step(
    q: Float[Array, "B Hq K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B HV V"],
    a: Float[Array, "B HV"],
    b: Float[Array, "B HV"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    state: Float[Array, "B HV K V"],
    *,
    allow_neg_eigval: bool = False,
) -> tuple[Float[Array, "B HV V"], Float[Array, "B HV K V"]]:
    """One token of every row by the kernel: norms, gates, the rule and the new state in one pass over the state.

        g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b);   q and k to unit length
        S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = K^(-1/2) q^T S

    A loop that carries the state has it changed where it lies; elsewhere XLA copies it. The result can be
    differentiated once, in reverse.

    Args:
      q, k, v: queries, keys and values of any length, for which `has_kernel` is true.
      a, b: raw inputs of the gates.
      A_log, dt_bias: parameters of the decay.
      state: the states before the token.
      allow_neg_eigval: beta = 2 sigmoid(b).

    Returns:
      o in v's dtype, and the states after the token in the state's dtype. Numerics: all in float32, rounded once.
    """
    args = (q, k, v, a, b, A_log, dt_bias, state)
    return on_explicit_shards(partial(_token_step, allow_neg_eigval), args, _OPERANDS, _RESULTS, _sizes(args))


_OPERANDS = ("b h .", "b h .", "b h .", "b h", "b h", "h", "h", "b h . .")
_RESULTS = ("b h .", "b h . .")


def _sizes(args) -> dict[str, int]:
    """Rows, and heads of q and k where they have as many."""
    (B, Hq, _), (_, Hk, _) = args[0].shape, args[1].shape
    return {"b": B, "h": Hq} if Hq == Hk else {"b": B}


def _forward(allow_neg_eigval: bool, *args):
    return run(_by_kernel, allow_neg_eigval, args, _OPERANDS, _RESULTS, _sizes(args)), args


def _by_kernel(allow_neg_eigval: bool, q, k, v, a, b, A_log, dt_bias, state):
    from pallas_kernels.decode.step import step

    options: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias, "allow_neg_eigval": allow_neg_eigval}
    options |= {"read_slots": None, "write_slots": None, "scale": q.shape[-1] ** -0.5}
    o, state = step(*(x[:, None] for x in (q, k, v, a, b)), pool=state, **options)
    return o[:, 0], state


def _plain(allow_neg_eigval: bool, q, k, v, a, b, A_log, dt_bias, state):
    """The operation in plain JAX, for its derivative."""
    counts = (q.shape[1], k.shape[1], v.shape[1], v.shape[1])
    g, beta = log_decay(a, A_log, dt_bias), write_strength(b, allow_neg_eigval=allow_neg_eigval)
    q, k = (l2norm(x.astype(jnp.float32)) for x in (q, k))
    tokens = (split_heads(x, 1, counts) for x in (q, k, v.astype(jnp.float32), g, beta))
    S = split_heads(state.astype(jnp.float32), 1, counts)
    S, o = recurrent_step(S, *tokens, scale=q.shape[-1] ** -0.5)
    return o.reshape(v.shape).astype(v.dtype), S.reshape(state.shape).astype(state.dtype)


def _backward(allow_neg_eigval: bool, args, cotangents):
    return jax.vjp(partial(_plain, allow_neg_eigval), *args)[1](cotangents)


_token_step = fused_op(_forward, _backward)


class Heads(NamedTuple):
    """Places at which `mix_token` finds the parts of a token."""

    H: int
    """Heads of q, and of k, which are the first channels; those of v follow."""
    a: int
    """First channel of a in the array of the gates."""
    b: int


class HeadGates(NamedTuple):
    """The heads and gates of a layer, besides its arrays."""

    heads: Heads
    allow_neg_eigval: bool = False
    """Whether beta = 2 sigmoid(b)."""

    @property
    def places(self) -> tuple[int, int, int]:
        """See `delta_layer.Gates.places`."""
        return self.heads

    def kernel_decay(self) -> Any:
        """See `delta_layer.Gates.kernel_decay`."""
        from pallas_kernels.token.decays import HeadDecay

        return HeadDecay()

    def plain(self, row: Array, layer: Any) -> tuple[Array, Array]:
        """See `delta_layer.Gates.plain`."""
        qkv = row[:, : layer.convolution.filters.shape[0]]
        return _plain_of_channels(self, qkv, row, layer.A_log, layer.dt_bias, layer.state)


class Token(NamedTuple):
    """Arrays that `mix_token` takes."""

    channels: Float[Array, "B C"]
    """Products of the layer's input: q, k and v before the convolution, then any others."""
    gates: Float[Array, "B G"]
    """Array in which a and b lie; may be `channels` itself."""
    weight: Float[Array, "D W"]
    """Filters of the convolution, of the D channels of q, k and v."""
    bias: Float[Array, " D"] | None
    A_log: Float[Array, " HV"]
    dt_bias: Float[Array, " HV"]
    conv_state: Float[Array, "B D W1"]
    """Inputs before the token, oldest first."""
    state: Float[Array, "B HV K V"]
    """States of the rule before the token."""


def is_whole(*arrays: jax.Array) -> bool:
    """Whether these arrays lie on one device, as `mix_token` needs them.

    Of an array that holds several kinds of heads side by side, no device could have its own. Inside jax.shard_map its
    kernels run where JAX does not keep in the types of arrays over which mesh axes they vary.
    """
    if (known := trusted_whole()) is not None:
        return known
    types = [jax.typeof(x) for x in arrays]
    is_typed = any(
        x.manual_axis_type.varying or AxisType.Explicit in x.sharding.mesh.axis_types for x in types
    )
    return not is_typed and expected_shards(arrays) is None


def has_kernels(token: Token, heads: Heads, implementation: str | None) -> bool:
    """Whether the kernels take a call of `mix_token`, from the shapes of its arrays, for which `is_whole` is true."""
    from pallas_kernels.decode import conv_update, step

    if any(x is not None and x.dtype == jnp.float64 for x in token):
        return False
    (B, HV, K, V), dtype = token.state.shape, token.channels.dtype
    q, v = (jax.ShapeDtypeStruct((B, n, width), dtype) for n, width in ((heads.H, K), (HV, V)))
    reason = conv_update.check_supported(token.channels, token.conv_state, token.weight, token.bias)
    return usable("the step of a token", implementation, reason or step.check_supported(q, q, v, token.state))


def mix_token(
    token: Token, heads: Heads, *, allow_neg_eigval: bool = False
) -> tuple[Float[Array, "B HV V"], Float[Array, "B D W1"], Float[Array, "B HV K V"]]:
    """One token of every row by two kernels, which change both states where they lie.

        [q | k | v] = silu(conv(channels))

    and `token_step` of that. A loop that carries the states has them changed where they lie; elsewhere XLA copies
    them. The result can be differentiated once, in reverse.

    Args:
      token: arrays for which `is_whole` and `has_kernels` are true.
      heads: where the parts lie.
      allow_neg_eigval: beta = 2 sigmoid(b).

    Returns:
      o in the channels' dtype, and both states after the token in their dtypes. Numerics: float32, rounded behind the
      convolution and at the end.
    """
    return _mix_token((heads, allow_neg_eigval), token)


def _mix_by_kernels(static, token: Token):
    from pallas_kernels.decode.conv_update import conv_update
    from pallas_kernels.decode.step import Channels, step_of_channels

    heads, allow_neg_eigval = static
    everywhere: dict[str, Any] = {"read_slots": None, "write_slots": None}
    filters = token.weight, token.bias
    qkv, conv_state = conv_update(token.channels, token.conv_state, *filters, **everywhere)
    (HV, K), H = token.state.shape[1:3], heads.H
    options: dict[str, Any] = {"A_log": token.A_log, "dt_bias": token.dt_bias, "scale": K**-0.5}
    options |= {"heads": (H, H, HV), "first": Channels(0, H * K, 2 * H * K, heads.a, heads.b)}
    qkv, gates = qkv[:, None], token.gates[:, None]
    options |= {"allow_neg_eigval": allow_neg_eigval} | everywhere
    o, state = step_of_channels(qkv, qkv, qkv, gates, gates, token.state, **options)
    return o[:, 0], conv_state, state


def _mix_token_plain(static, token: Token):
    """The operation in plain JAX, for its derivative."""
    D = token.weight.shape[0]
    qkv, conv_state = causal_conv1d_update(token.channels[:, :D], token.conv_state, token.weight, token.bias)
    parameters = token.A_log, token.dt_bias, token.state
    o, state = _plain_of_channels(static, qkv, token.gates, *parameters)
    return o, conv_state, state


def _plain_of_channels(static, qkv, gates, A_log, dt_bias, state):
    """`_plain` of channels that have passed through the convolution, and those in which a and b lie."""
    heads, allow_neg_eigval = static
    (B, HV, K, V), H = state.shape, heads.H
    q, k, v = split_normalized(qkv, H, K, normalize=False)
    a, b = (gates[:, first : first + HV] for first in (heads.a, heads.b))
    return _plain(allow_neg_eigval, q, k, v.reshape(B, HV, V), a, b, A_log, dt_bias, state)


def _mix_forward(static, token: Token):
    return _mix_by_kernels(static, token), token


def _mix_backward(static, token: Token, cotangents):
    return jax.vjp(partial(_mix_token_plain, static), token)[1](cotangents)


_mix_token = fused_op(_mix_forward, _mix_backward)
