"""The gated norm of a token's heads, with a product of one row in the same kernel."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import is_whole, token_op, usable


def takes(
    o: Float[Array, "H V"],
    channels: int,
    weight: Float[Array, "F D"],
    implementation: str | None,
    scales: Float[Array, "M D"] | None = None,
) -> bool:
    """Whether `heads_product` takes heads, a number of channels that end in their gates, and a matrix."""
    from pallas_kernels.layer import row_product as kernels

    if not usable(implementation, kernels) or not is_whole(o, weight):
        return False
    return (kernels.Heads.check_supported(o, channels) or kernels.check_supported(weight, scales)) is None


@token_op
def heads_product(
    o: Float[Array, "H V"],
    channels: Float[Array, " C"],
    norm: Float[Array, " V"],
    weight: Float[Array, "F D"],
    scales: Float[Array, "M D"] | None = None,
    *,
    eps: float,
    activation: str,
    ahead: Sequence[jax.Array] = (),
) -> Float[Array, "1 F"]:
    """The gated norm of a token's heads, side by side, times weight^T, in one kernel.

        v = o (mean(o^2) + eps)^(-1/2) norm f(z),   z the last H V channels

    Args:
      o: heads, for which `takes` is true.
      channels: of which the last are the gates.
      norm: weight of the norm, float32.
      weight: the matrix.
      scales: as for `row_product.stream_product`.
      eps: of the norm.
      activation: f, "silu" or "sigmoid".
      ahead: as for `row_product.stream_product`.

    Returns:
      [1, F] in the matrix' dtype, of codes in that of channels. Numerics: float32; v is not rounded.
    """
    from pallas_kernels.layer import row_product as kernels

    dtype = weight.dtype if scales is None else channels.dtype
    static: Any = dict(eps=eps, activation=activation, dtype=dtype, ahead=tuple(ahead))
    return kernels.heads_product(o, channels.reshape(-1, o.shape[1]), norm, weight, scales, **static)
