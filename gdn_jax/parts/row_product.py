"""The norm of the residual stream, and the sum before it, with a product of one row in the same kernel."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import is_whole, token_op, usable
from gdn_jax.shapes import Convolution


def takes(
    x: Float[Array, "*S C"],
    weight: Float[Array, "F D"],
    implementation: str | None,
    convolution: Convolution | None = None,
) -> bool:
    """Whether `stream_product` takes a stream, a matrix and a convolution: one row, on one device."""
    arrays = x, weight, *(() if convolution is None else convolution[:2])
    if x.size != x.shape[-1] or not usable(implementation) or not is_whole(*arrays):
        return False
    from pallas_kernels.layer import row_product as kernels

    reason = kernels.Stream.check_supported(x.reshape(1, -1), weight)
    return (reason or kernels.check_supported(weight, convolution)) is None


@token_op
def stream_product(
    x: Float[Array, "*S C"],
    y: Float[Array, "*P D"] | None,
    norm: Float[Array, " D"],
    weight: Float[Array, "F D"],
    convolution: Convolution | None = None,
    *,
    eps: float,
    dtype: DTypeLike,
    keep: DTypeLike | None = None,
    first: int = 0,
    ahead: Sequence[jax.Array] = (),
) -> tuple[
    Float[Array, "*S C"], Float[Array, "*S D"] | None, Float[Array, "*S F"], Float[Array, "1 B W1"] | None
]:
    """The stream s = x + y, its norm n = s (mean(s^2) + eps)^(-1/2) norm, and n weight^T, in one kernel.

    The first C results may pass through a short convolution, whose state a loop that carries it has changed where it
    lies.

    Args:
      x: residual stream, for which `takes` is true.
      y: what is added to it, or parts of that, [P, .., D]; None: nothing.
      norm: weight of the norm, float32.
      weight: the matrix.
      convolution: of the first results, as if they were rounded before it; None: there is none.
      eps: of the norm.
      dtype: of the product.
      keep: dtype of n as a result; None: n is none.
      first: without y, the channel of x with which the stream begins; it is as wide as the norm.
      ahead: arrays that the next kernels read first: this one brings them near, see `pallas_kernels.device.ahead`.

    Returns:
      s in x's dtype, n or None, the product, and the state of the convolution or None. Numerics: float32; n is
      rounded as a result only.
    """
    from pallas_kernels.layer import row_product as kernels

    row, parts = x.reshape(1, -1), None if y is None else y.reshape(-1, y.shape[-1])
    keep = None if keep is None else jnp.dtype(keep)
    static: Any = dict(eps=eps, dtype=jnp.dtype(dtype), keep=keep, first=first, ahead=tuple(ahead))
    s, n, product, state = kernels.stream_product(row, parts, norm, weight, convolution=convolution, **static)
    leading = x.shape[:-1]
    n = None if n is None else n.reshape(*leading, -1)
    return s.reshape(*leading, -1), n, product.reshape(*leading, -1), state
