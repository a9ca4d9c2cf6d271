"""The norm of the residual stream, and the sum before it, with a product of one row in the same kernel."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.parts.conv import causal_conv1d_update
from gdn_jax.parts.kernels import fused_op, is_whole, usable
from gdn_jax.parts.unsummed import Parts, addends
from gdn_jax.shapes import Convolution


class Stream(NamedTuple):
    """Static arguments of `stream_product`."""

    eps: float
    dtype: Any
    keep: Any
    first: int


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


def stream_product(
    x: Float[Array, "*S C"],
    y: Float[Array, "*P D"] | Parts | None,
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
    lies. The result can be differentiated once, in reverse.

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
    static = Stream(eps, jnp.dtype(dtype), None if keep is None else jnp.dtype(keep), first)
    return _stream(static, x, addends(y), norm, weight, convolution, tuple(ahead))


def _stream_by_kernel(static: Stream, x, y, norm, weight, convolution, ahead):
    from pallas_kernels.layer import row_product as kernels

    row, parts = x.reshape(1, -1), None if y is None else y.reshape(-1, y.shape[-1])
    options: dict[str, Any] = static._asdict() | {"convolution": convolution, "ahead": ahead}
    *results, state = kernels.stream_product(row, parts, norm, weight, **options)
    return *(None if a is None else a.reshape(*x.shape[:-1], -1) for a in results), state


def plain_stream(static: Stream, x, y, norm, weight, convolution):
    """`stream_product` in plain JAX, for derivatives."""
    s = x[..., static.first : static.first + weight.shape[1]].astype(jnp.float32)
    if y is not None:
        s = s + jnp.sum(y.astype(jnp.float32).reshape(-1, *x.shape), axis=0)
    n = s * jax.lax.rsqrt(jnp.mean(s * s, axis=-1, keepdims=True) + static.eps) * norm
    product = jnp.einsum("...d,fd->...f", n, weight.astype(jnp.float32), precision="highest")
    kept, product, state = (
        None if static.keep is None else n.astype(static.keep),
        product.astype(static.dtype),
        None,
    )
    if convolution is not None:
        row, C = product.reshape(1, -1), convolution.filters.shape[0]
        filtered, state = causal_conv1d_update(row[:, :C], *convolution)
        product = jnp.concatenate([filtered, row[:, C:]], axis=1).reshape(product.shape)
    return (x if y is None else s.astype(x.dtype)), kept, product, state


_stream = fused_op(
    lambda static, *args: (_stream_by_kernel(static, *args), args[:-1]),
    lambda static, saved, cotangents: (*jax.vjp(partial(plain_stream, static), *saved)[1](cotangents), None),
)
