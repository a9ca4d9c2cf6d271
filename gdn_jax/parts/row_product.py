"""Products of one row whose kernel makes the row: the norm of the residual stream, or the gated norm of heads."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import is_whole, token_op, usable


def takes(
    x: Float[Array, "*S C"],
    weight: Float[Array, "F D"],
    implementation: str | None,
    scales: Float[Array, "M D"] | None = None,
    channels: int | None = None,
) -> bool:
    """Whether `stream_product` takes a stream and a matrix, one row on one device; or `heads_product` heads x [H, V]
    and this number of channels that end in their gates."""
    from pallas_kernels.rows import row_product as kernels

    if not usable(implementation, kernels) or not is_whole(x, weight):
        return False
    if channels is not None:
        reason = kernels.Heads.check_supported(x, channels)
    elif x.size != x.shape[-1]:
        return False
    else:
        reason = kernels.Stream.check_supported(x.reshape(1, -1), weight)
    return (reason or kernels.check_supported(weight, scales)) is None


@token_op
def stream_product(
    x: Float[Array, "*S C"],
    y: Float[Array, "*P D"] | None,
    norm: Float[Array, " D"],
    weight: Float[Array, "F D"],
    scales: Float[Array, "M D"] | None = None,
    *,
    eps: float,
    dtype: DTypeLike,
    first: int = 0,
    ahead: Sequence[jax.Array] = (),
) -> tuple[Float[Array, "*S C"], Float[Array, "*S F"]]:
    """The stream s = x + y, and n weight^T of its norm n = s (mean(s^2) + eps)^(-1/2) norm, in one kernel.

    Args: as for the kernel's function; x, for which `takes` is true, and y may have more axes, of length 1.

    Returns:
      s in x's dtype, and the product. Numerics: float32; n is not rounded.
    """
    from pallas_kernels.rows import row_product as kernels

    row, parts = x.reshape(1, -1), None if y is None else y.reshape(-1, y.shape[-1])
    static: Any = dict(eps=eps, dtype=jnp.dtype(dtype), first=first, ahead=tuple(ahead))
    s, product = kernels.stream_product(row, parts, norm, weight, scales, **static)
    leading = x.shape[:-1]
    return s.reshape(*leading, -1), product.reshape(*leading, -1)


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

    Args: those of the kernel's function, for which `takes` is true; the last channels are the gates.

    Returns:
      [1, F] in the matrix' dtype, of codes in that of channels. Numerics: float32; v is not rounded.
    """
    from pallas_kernels.rows import row_product as kernels

    dtype = weight.dtype if scales is None else channels.dtype
    static: Any = dict(eps=eps, activation=activation, dtype=dtype, ahead=tuple(ahead))
    return kernels.heads_product(o, channels.reshape(-1, o.shape[1]), norm, weight, scales, **static)
