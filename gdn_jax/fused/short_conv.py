"""The short convolution of q, k and v with SiLU, and unit length for the heads of q and k."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.conv import causal_conv1d, last_inputs, segment_starts
from gdn_jax.fused.kernels import run, usable
from gdn_jax.gates import l2norm
from gdn_jax.partitioning import on_explicit_shards


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
        "recurrent" do not.

    Returns:
      q, k [B, T, heads, width] and v [B, T, the other channels] in x's dtype, and the final state of `causal_conv1d`.
    """
    from pallas_kernels.layer import short_conv as kernel

    plain = bias is None and initial_state is None and cu_seqlens is None
    if plain and usable(implementation, kernel.check_supported(x, weight, heads, width)):
        fresh = None if segment_ids is None else segment_starts(segment_ids).astype(jnp.int32)
        call = partial(_short_conv, heads=heads, width=width, normalize=normalize)
        args, operands, results = (x, weight, fresh), ("b . .", ". .", "b ."), ("b . . .", "b . . .", "b . .")
        q, k, v = on_explicit_shards(call, args, operands, results, {"b": x.shape[0]})
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


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _short_conv(x, weight, fresh, heads, width, normalize):
    results = ("b . . .", "b . . .", "b . .")
    static, args = (heads, width, normalize), (x, weight, fresh)
    return run(_forward, static, args, ("b . .", ". .", "b ."), results, {"b": x.shape[0]})


def _forward(static, x, weight, fresh):
    from pallas_kernels.layer import short_conv as kernels

    heads, width, normalize = static
    return kernels.short_conv(x, weight, fresh, heads=heads, width=width, normalize=normalize)


def _short_conv_fwd(x, weight, fresh, heads, width, normalize):
    return _short_conv(x, weight, fresh, heads, width, normalize), (x, weight, fresh)


def _short_conv_bwd(heads, width, normalize, saved, cotangents):
    operands = ("b . .", ". .", "b .", "b . . .", "b . . .", "b . .")
    sizes = {"b": saved[0].shape[0]}
    dx, dweight = run(_backward, normalize, (*saved, *cotangents), operands, ("b . .", ". . +b"), sizes)
    return dx, dweight.astype(saved[1].dtype), None


def _backward(normalize, x, weight, fresh, dq, dk, dv):
    from pallas_kernels.layer import short_conv as kernels

    return kernels.short_conv_backward(x, weight, fresh, dq, dk, dv, normalize=normalize)


_short_conv.defvjp(_short_conv_fwd, _short_conv_bwd)
