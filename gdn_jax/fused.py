"""What stands around the rule in a layer, with a kernel where there is one and it is faster."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax import mosaic
from gdn_jax.conv import causal_conv1d


def short_conv(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    initial_state: Float[Array, "N D W1"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "N D W1"]]:
    """The short convolution with SiLU: `causal_conv1d`, whose gradients a kernel makes where it can.

    The kernel takes whole rows of 16-bit inputs without a bias, of lengths that are multiples of 64 and channels that
    are multiples of 64, on a GPU of compute capability 9.0. With it the result can be differentiated once, in
    reverse.

    Args: those of `causal_conv1d`.
      implementation: that of the delta rule. "chunked" and "recurrent" never use the kernel.

    Returns:
      y [B, T, D] in x's dtype, and the last W - 1 inputs of each sequence, as `causal_conv1d`.
    """
    plain = bias is None and initial_state is None and cu_seqlens is None and segment_ids is None
    if plain and implementation in (None, "mosaic_gpu") and mosaic.short_conv_supported(x, weight) is None:
        return mosaic.short_conv(x, weight), jnp.swapaxes(x[:, 1 - weight.shape[1] :], 1, 2)
    options = dict(initial_state=initial_state, cu_seqlens=cu_seqlens, segment_ids=segment_ids)
    return causal_conv1d(x, weight, bias, **options)
