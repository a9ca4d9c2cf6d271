"""The short convolution of q, k and v with SiLU, and unit length for the heads of q and k."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.gates import l2norm
from gdn_jax.partitioning import on_explicit_shards
from gdn_jax.parts.conv import causal_conv1d, last_inputs, segment_starts
from gdn_jax.parts.kernels import fused_op, run, usable


class KeyHeads(NamedTuple):
    """How q and k lie in the first channels of a convolution."""

    heads: int
    """Heads of q, and of k."""
    width: int
    normalize: bool = True
    """False leaves q and k as the convolution makes them."""


def short_conv(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    heads: int,
    width: int,
    normalize: bool = True,
    initial_state: Float[Array, "N D W1"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"], Float[Array, "B T Dv"], Float[Array, "N D W1"]]:
    """q, k and v = silu(conv(x)), `causal_conv1d`, with the heads of q and k at unit length, `l2norm`.

    The kernels take rows of 16-bit inputs of lengths that are multiples of 8, whole or with segments, without a bias
    or an initial state. With them the result can be differentiated once, in reverse.

    Args:
      x: inputs of `causal_conv1d`, the channels of q, then those of k, then those of v.
      weight, bias, initial_state, cu_seqlens, segment_ids: of `causal_conv1d`.
      heads, width: of q and of k.
      normalize: False leaves q and k as the convolution makes them.
      implementation: None takes the kernels where they can (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not. "mosaic_gpu" is None with a warning where they cannot.

    Returns:
      q, k [B, T, heads, width] and v [B, T, the other channels] in x's dtype, and the final state of `causal_conv1d`.
    """
    from pallas_kernels.layer import short_conv as kernel

    others = {"a bias": bias, "an initial state": initial_state, "cu_seqlens": cu_seqlens}
    reasons = [f"{name}; the kernel takes none" for name, array in others.items() if array is not None]
    reason = reasons[0] if reasons else kernel.check_supported(x, weight, heads, width)
    if usable(implementation, kernel, part="the short convolution", reason=reason):
        fresh = None if segment_ids is None else segment_starts(segment_ids).astype(jnp.int32)
        how = KeyHeads(heads, width, normalize)
        args, sizes = (x, weight, fresh), {"b": x.shape[0]}
        q, k, v = on_explicit_shards(lambda *args: _short_conv(how, *args), args, _OPERANDS, _RESULTS, sizes)
        return q, k, v, last_inputs(x, segment_ids, weight.shape[1])
    options = dict(initial_state=initial_state, cu_seqlens=cu_seqlens, segment_ids=segment_ids)
    y, state = causal_conv1d(x, weight, bias, **options)
    return *split_normalized(y, heads, width, normalize), state


def split_normalized(
    y: Float[Array, "*S D"], heads: int, width: int, normalize: bool
) -> tuple[Float[Array, "*S H K"], Float[Array, "*S H K"], Float[Array, "*S Dv"]]:
    """Channels as q, k and v, with the heads of q and k at unit length if `normalize`."""
    keys = heads * width
    q, k = (x.reshape(*y.shape[:-1], heads, width) for x in (y[..., :keys], y[..., keys : 2 * keys]))
    q, k = (l2norm(q), l2norm(k)) if normalize else (q, k)
    return q, k, y[..., 2 * keys :]


_OPERANDS = ("b . .", ". .", "b .")
_RESULTS = ("b . . .", "b . . .", "b . .")


def filtered(
    how: KeyHeads,
    x: Float[Array, "B T C"],
    weight: Float[Array, "D W"],
    fresh: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"], Float[Array, "B T Dv"]]:
    """q, k and v by the kernel, without a derivative, of the first D channels of x.

    Args:
      how: where q and k lie.
      x: inputs for which the kernel's `check_supported` has no reason.
      weight: filters.
      fresh: 1 at the first token of every segment; None: every row is one.
    """
    return run(_kernel, how, (x, weight, fresh), _OPERANDS, _RESULTS, {"b": x.shape[0]})


def filtered_gradients(
    how: KeyHeads,
    saved: tuple[Array, Array, Array | None],
    cotangents: tuple[Array, Array, Array],
    others: tuple[Array, Array] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "D W"]]:
    """Gradients of <cotangents, filtered(x, weight, fresh)> for x and weight, the latter in float32.

    Args:
      how: where q and k lie.
      saved: x, weight and fresh.
      cotangents: of q, k and v.
      others: where x has more than D channels, the cotangents of the next few, and an array like x of which the rest
        is that of the channels after these. What the array holds before them is overwritten.
    """
    args = (*saved, *cotangents, *(others or (None, None)))
    operands = (*_OPERANDS, *_RESULTS, "b . .", "b . .")
    return run(_kernel_backward, how.normalize, args, operands, ("b . .", ". . +b"), {"b": saved[0].shape[0]})


def _kernel(how, x, weight, fresh):
    from pallas_kernels.layer import short_conv as kernels

    return kernels.short_conv(x, weight, fresh, **how._asdict())


def _kernel_backward(normalize, x, weight, fresh, dq, dk, dv, dnext, dothers):
    from pallas_kernels.layer import short_conv as kernels

    if dothers is not None:
        dothers = jax.lax.dynamic_update_slice_in_dim(dothers, dnext, weight.shape[0], axis=2)
    return kernels.short_conv_backward(x, weight, fresh, dq, dk, dv, dothers, normalize=normalize)


def _backward(how, saved, cotangents):
    return *filtered_gradients(how, saved, cotangents), None


_short_conv = fused_op(lambda how, *args: (filtered(how, *args), args), _backward)
