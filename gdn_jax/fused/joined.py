"""All products of a layer's input as one array of channels, [q | k | v | gates | output gate].

The kernels of the convolution and of the gated norm read their channels where they lie. In the backward pass the
gated norm makes an array for the cotangents of all channels and writes those of the output gate; those of the gates
and, by the convolution's kernel, those of q, k and v are written beside them. So the cotangent of the layer's input
is one product, as the array itself is, instead of three and their sum.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from gdn_jax.conv import last_inputs, segment_starts
from gdn_jax.fused.kernels import run, usable


def has_kernels(
    x: Float[Array, "B T D"] | jax.ShapeDtypeStruct,
    joined: jax.ShapeDtypeStruct,
    weight: jax.ShapeDtypeStruct | jax.Array,
    o: jax.ShapeDtypeStruct,
    *,
    heads: int,
    width: int,
    implementation: str | None = None,
) -> bool:
    """Whether `short_conv` and `norms.gated_norm` take their channels from one array.

    They do not inside jax.shard_map, nor on explicit axes of a mesh: Pallas has no references to arrays that vary
    over a mesh, through which a kernel changes an array.

    Args:
      x: the layer's input.
      joined: [B, T, C], all channels.
      weight, heads, width: of `short_conv`.
      o: outputs of the rule [B, T, H, V].
      implementation: as for `norms.add_norm`.
    """
    from pallas_kernels.layer import gated_norm
    from pallas_kernels.layer import short_conv as kernel

    here = jax.typeof(x)
    if here.manual_axis_type.varying or AxisType.Explicit in here.sharding.mesh.axis_types:
        return False
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
    behind: int,
) -> tuple[
    Float[Array, "B T H K"],
    Float[Array, "B T H K"],
    Float[Array, "B T Dv"],
    Float[Array, "N D W1"],
    Float[Array, "B T G"],
    Float[Array, "B T C"],
]:
    """`fused.short_conv.short_conv` of the first D channels, the next G, and the array for who reads the others.

    Args:
      joined: all channels, where `has_kernels` says so.
      weight: filters [D, W].
      segment_ids, heads, width, normalize: of `fused.short_conv.short_conv`.
      behind: G.

    Returns:
      q, k, v and the final state; the next G channels; and `joined` again, of whose cotangent only the other channels
      count: what it holds for the first D + G is overwritten. It is for `norms.gated_norm`, which leaves in those
      whatever lies in memory.
    """
    fresh = None if segment_ids is None else segment_starts(segment_ids).astype("int32")
    q, k, v, gates, rest = _short_conv(joined, weight, fresh, heads, width, normalize, behind)
    final = last_inputs(joined[..., : weight.shape[0]], segment_ids, weight.shape[1])
    return q, k, v, final, gates, rest


def gate_heads(joined: Float[Array, "B T C"], heads: int, width: int) -> Float[Array, "B T G V"]:
    """All channels as heads [.., C / width, width] for `norms.gated_norm`, the last ones of which are the gates.

    Args:
      joined: the channels, a multiple of width.
      heads: of the gates.
      width: of a head, V.
    """
    return _gate_heads((heads, width), joined)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gate_heads(static, joined):
    return joined.reshape(*joined.shape[:2], -1, static[1])


def _gate_heads_fwd(static, joined):
    return _gate_heads(static, joined), None


def _gate_heads_bwd(static, _, dgates):
    """What the norm's kernel leaves for the other heads counts for nothing."""
    heads, _ = static
    own = dgates[..., -heads:, :]
    others = ((0, 0), (0, 0), (dgates.shape[2] - heads, 0), (0, 0))
    return (jnp.pad(own, others).reshape(*dgates.shape[:2], -1),)


_gate_heads.defvjp(_gate_heads_fwd, _gate_heads_bwd)


_PARTS = ("b . . .", "b . . .", "b . .")
_RESULTS = (*_PARTS, "b . .", "b . .")


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _short_conv(joined, weight, fresh, heads, width, normalize, behind):
    D = weight.shape[0]
    static, args = (heads, width, normalize), (joined, weight, fresh)
    parts = run(_forward, static, args, ("b . .", ". .", "b ."), _PARTS, {"b": joined.shape[0]})
    return *parts, joined[..., D : D + behind], joined


def _forward(static, x, weight, fresh):
    from pallas_kernels.layer import short_conv as kernels

    heads, width, normalize = static
    return kernels.short_conv(x, weight, fresh, heads=heads, width=width, normalize=normalize)


def _short_conv_fwd(joined, weight, fresh, heads, width, normalize, behind):
    return _short_conv(joined, weight, fresh, heads, width, normalize, behind), (joined, weight, fresh)


def _short_conv_bwd(heads, width, normalize, behind, saved, cotangents):
    joined, weight, _ = saved
    operands, sizes = ("b . .", ". .", "b .", *_RESULTS), {"b": joined.shape[0]}
    djoined, dweight = run(_backward, normalize, (*saved, *cotangents), operands, ("b . .", ". . +b"), sizes)
    return djoined, dweight.astype(weight.dtype), None


def _backward(normalize, x, weight, fresh, dq, dk, dv, dgates, dothers):
    from pallas_kernels.layer import short_conv as kernels

    dothers = jax.lax.dynamic_update_slice_in_dim(dothers, dgates, weight.shape[0], axis=2)
    return kernels.short_conv_backward(x, weight, fresh, dq, dk, dv, dothers, normalize=normalize)


_short_conv.defvjp(_short_conv_fwd, _short_conv_bwd)
