"""All that the convolution and the output gate read of a layer's input as one array, [q | k | v | gate].

Each of the two kernels reads its channels of the array where they lie. In the backward pass the gated norm makes an
array for the cotangents of all channels and writes those of the gate, and the convolution writes the others beside
them. So the cotangent of the layer's input is one product, as the array itself is, instead of two and their sum.
"""

from functools import partial

import jax
from jaxtyping import Array, Float, Int

from gdn_jax.conv import last_inputs, segment_starts
from gdn_jax.fused.kernels import run, usable
from gdn_jax.partitioning import on_explicit_shards


def has_kernels(
    joined: jax.ShapeDtypeStruct,
    weight: jax.ShapeDtypeStruct | jax.Array,
    o: jax.ShapeDtypeStruct,
    *,
    heads: int,
    width: int,
    implementation: str | None = None,
) -> bool:
    """Whether `short_conv` and `norms.gated_norm` take their channels from one array.

    Args:
      joined: [B, T, C], the channels of q, k, v and of the gate.
      weight, heads, width: of `short_conv`.
      o: outputs of the rule [B, T, H, V].
      implementation: as for `norms.add_norm`.
    """
    from pallas_kernels.layer import gated_norm
    from pallas_kernels.layer import short_conv as kernel

    reason = kernel.check_supported(joined, weight, heads, width) or gated_norm.check_supported(o)
    return usable(implementation, reason or gated_norm.check_gates(o, joined.shape[-1]))


def short_conv(
    joined: Float[Array, "B T C"],
    weight: Float[Array, "D W"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    heads: int,
    width: int,
    normalize: bool = True,
) -> tuple[
    Float[Array, "B T H K"],
    Float[Array, "B T H K"],
    Float[Array, "B T Dv"],
    Float[Array, "N D W1"],
    Float[Array, "B T C"],
]:
    """`fused.short_conv.short_conv` of the first D channels, and the array for those who read the others.

    Args:
      joined: inputs of the convolution and C - D other channels, where `has_kernels` says so.
      weight: filters [D, W].
      segment_ids, heads, width, normalize: of `fused.short_conv.short_conv`.

    Returns:
      q, k, v and the final state, and `joined` with a cotangent of which only the other channels count: what it holds
      for the first D is overwritten. It is for `norms.gated_norm`, which leaves those as they are in memory.
    """
    fresh = None if segment_ids is None else segment_starts(segment_ids).astype("int32")
    call = partial(_short_conv, heads=heads, width=width, normalize=normalize)
    args, operands, results = (joined, weight, fresh), ("b . .", ". .", "b ."), _RESULTS
    q, k, v, rest = on_explicit_shards(call, args, operands, results, {"b": joined.shape[0]})
    final = last_inputs(joined[..., : weight.shape[0]], segment_ids, weight.shape[1])
    return q, k, v, final, rest


_PARTS = ("b . . .", "b . . .", "b . .")
_RESULTS = (*_PARTS, "b . .")


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _short_conv(joined, weight, fresh, heads, width, normalize):
    static, args = (heads, width, normalize), (joined, weight, fresh)
    parts = run(_forward, static, args, ("b . .", ". .", "b ."), _PARTS, {"b": joined.shape[0]})
    return *parts, joined


def _forward(static, x, weight, fresh):
    from pallas_kernels.layer import short_conv as kernels

    heads, width, normalize = static
    return kernels.short_conv(x, weight, fresh, heads=heads, width=width, normalize=normalize)


def _short_conv_fwd(joined, weight, fresh, heads, width, normalize):
    return _short_conv(joined, weight, fresh, heads, width, normalize), (joined, weight, fresh)


def _short_conv_bwd(heads, width, normalize, saved, cotangents):
    joined, weight, _ = saved
    operands, sizes = ("b . .", ". .", "b .", *_RESULTS), {"b": joined.shape[0]}
    djoined, dweight = run(_backward, normalize, (*saved, *cotangents), operands, ("b . .", ". . +b"), sizes)
    return djoined, dweight.astype(weight.dtype), None


def _backward(normalize, x, weight, fresh, *cotangents):
    from pallas_kernels.layer import short_conv as kernels

    return kernels.short_conv_backward(x, weight, fresh, *cotangents, normalize=normalize)


_short_conv.defvjp(_short_conv_fwd, _short_conv_bwd)
