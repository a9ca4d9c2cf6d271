"""One token of every row of a layer whose past is in its cache: the step of generation.

Where kernels run, `step` is all that stands before the gated norm. On a whole array they take the convolution too and
read every product of the layer's input where it lies; on a mesh, and without a convolution, they take the rule alone.
Elsewhere a token is a row of length 1, for which `convolve` is here and all else in `gated_delta_net`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gdn_jax.blocks import ProjectionGroup, ProjectionOfGroup, group_of, shared_products
from gdn_jax.conv import causal_conv1d_update
from gdn_jax.fused import joined
from gdn_jax.fused.short_conv import split_normalized
from gdn_jax.fused.token import Heads, Token, has_kernel, has_kernels, is_whole, mix_token, token_step
from gdn_jax.layers.parameters import GatedDeltaNetCache, GatedDeltaNetParameters
from gdn_jax.shapes import accumulation_dtype


def takes_kernels(
    layer: GatedDeltaNetParameters, x: Float[Array, "B T D"], cache: GatedDeltaNetCache
) -> bool:
    """Whether `step` takes x: one token of every row, which none of is padding, where the kernels run."""
    if x.shape[1] > 1 or layer.rule != "gated_delta":
        return False
    *inputs, _ = jax.eval_shape(lambda x, past: _rule_inputs(layer, x, past), x, cache.conv)
    return has_kernel(*inputs, state=cache.state, implementation=layer.implementation)


def step(
    layer: GatedDeltaNetParameters, x: Float[Array, "B 1 D"], cache: GatedDeltaNetCache
) -> tuple[Float[Array, "B 1 HV V"], Float[Array, "B 1 G V"] | None, GatedDeltaNetCache]:
    """What the kernels make of one token of every row.

    Args:
      layer: the layer.
      x: its input, for which `takes_kernels` is true.
      cache: of the tokens before.

    Returns:
      The output of the rule; `gate` of `GatedDeltaNet.rule_output`; and the cache after the token.
    """
    options = dict(allow_neg_eigval=layer.allow_neg_eigval)
    if not _takes_all(layer, x, cache):
        *inputs, conv = _rule_inputs(layer, x, cache.conv)
        o, state = token_step(*inputs, state=cache.state, **options)
        return o[:, None], None, GatedDeltaNetCache(conv, state)
    token = _products(layer, x, cache)
    o, *after = mix_token(token, _heads(layer), **options)
    return o[:, None], _joined_gate(layer, token.channels), GatedDeltaNetCache(*after)


def _takes_all(layer, x, cache) -> bool:
    """Whether kernels take the token's convolution too, and read all products where they lie."""
    if layer.conv_weight is None or not is_whole(x, *cache):
        return False
    token = jax.eval_shape(lambda x, cache: _products(layer, x, cache), x, cache)
    return has_kernels(token, _heads(layer), layer.implementation)


def _products(layer, x, cache) -> Token:
    """What `mix_token` takes."""
    group = _group(layer)
    if group is None:
        groups = (layer.q_proj, layer.k_proj, layer.v_proj), (layer.a_proj, layer.b_proj)
        channels, gates = shared_products(x, groups, layer.dtype)
    else:
        channels = gates = group(x)
    parameters = *layer.filters(), layer.A_log[...], layer.dt_bias[...]
    return Token(channels[:, 0], gates[:, 0], *parameters, *cache)


def _heads(layer) -> Heads:
    """Where the parts of `_products` lie."""
    first = 0 if _group(layer) is None else layer.conv_dim
    return Heads(layer.num_heads, first, first + layer.num_v_heads)


def _group(layer) -> ProjectionGroup | None:
    """What all projections of x are one product of, in a copy of the layer for single tokens."""
    return group_of((layer.q_proj, layer.k_proj, layer.v_proj, layer.a_proj, layer.b_proj))


def _joined_gate(layer, channels):
    """All channels of a token as heads, if the last of them are the output gate; else None."""
    gate, width = layer.g_proj, layer.head_v_dim
    if not isinstance(gate, ProjectionOfGroup) or gate.group is not _group(layer):
        return None
    if gate.stop != channels.shape[-1] or gate.stop % width or gate.bias is not None:
        return None
    return joined.gate_heads(channels[:, None], layer.num_v_heads, width)


def _rule_inputs(layer, x, past):
    """What `token_step` takes before the states, and the new convolution state."""
    qkv, a, b = layer.project(x)
    y, past = convolve(layer, qkv, past, None)
    q, k, v = split_normalized(y[:, 0], layer.num_heads, layer.head_dim, normalize=False)
    v = v.reshape(-1, layer.num_v_heads, layer.head_v_dim)
    return q, k, v, a[:, 0], b[:, 0], layer.A_log[...], layer.dt_bias[...], past


def convolve(
    layer: GatedDeltaNetParameters,
    qkv: Float[Array, "B 1 conv_dim"],
    past: Float[Array, "B conv_dim W1"],
    mask: Bool[Array, "B 1"] | None,
) -> tuple[Float[Array, "B 1 conv_dim"], Float[Array, "B conv_dim W1"]]:
    """[q | k | v] of one token behind the convolution, and the new convolution state.

    Args:
      layer: the layer.
      qkv: projections of the token's input.
      past: `GatedDeltaNetCache.conv` of the tokens before.
      mask: False where the token is padding, whose result is 0 and which leaves the state as it is.
    """
    if layer.conv_weight is None:
        return silu(qkv), past
    y, state = causal_conv1d_update(qkv[:, 0], past, *layer.filters())
    if mask is not None:
        y = jnp.where(mask, y, 0)
        state = jnp.where(mask[:, :, None], state, past)
    return y[:, None], state


def silu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """silu(x) in float32 (float64 when x is), rounded once to x's dtype: a layer without the convolution."""
    return jax.nn.silu(x.astype(accumulation_dtype(x))).astype(x.dtype)
