"""A product of one row, with what makes the row in the same kernel: a norm, and the sum before it or the gate."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.parts.conv import causal_conv1d_update
from gdn_jax.parts.kernels import fused_op, kernels_run
from gdn_jax.parts.token import is_whole
from gdn_jax.parts.unsummed import Parts, addends
from gdn_jax.shapes import Convolution


class Stream(NamedTuple):
    """Static arguments of `stream_product`."""

    eps: float
    dtype: Any
    keep: Any
    first: int


class _Heads(NamedTuple):
    """Static arguments of `heads_product`."""

    eps: float
    activation: str
    dtype: Any


def takes_stream(
    x: Float[Array, "*S C"],
    weight: Float[Array, "F D"],
    implementation: str | None,
    convolution: Convolution | None = None,
) -> bool:
    """Whether `stream_product` takes a stream, a matrix and a convolution: one row, on one device."""
    arrays = x, weight, *(() if convolution is None else convolution[:2])
    if x.size != x.shape[-1] or not kernels_run(implementation) or not is_whole(*arrays):
        return False
    from pallas_kernels.layer import row_product as kernels

    reason = kernels.check_stream(x.reshape(1, -1), weight)
    if convolution is not None:
        reason = reason or kernels.check_convolution(weight, convolution, weight.dtype)
    return reason is None


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
      x: residual stream, for which `takes_stream` is true.
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


def takes_heads(
    o: Float[Array, "H V"], channels: int, weight: Float[Array, "F D"], implementation: str | None
) -> bool:
    """Whether `heads_product` takes heads, so many channels that end in their gates, and a matrix."""
    if not kernels_run(implementation) or not is_whole(o, weight):
        return False
    from pallas_kernels.layer.row_product import check_heads

    return check_heads(o, channels, weight) is None


def heads_product(
    o: Float[Array, "H V"],
    channels: Float[Array, " C"],
    norm: Float[Array, " V"],
    weight: Float[Array, "F D"],
    *,
    eps: float,
    activation: str,
    ahead: Sequence[jax.Array] = (),
) -> Float[Array, "1 F"]:
    """The gated norm of a token's heads, side by side, times weight^T, in one kernel.

        v = o (mean(o^2) + eps)^(-1/2) norm f(z),   z the last H V channels

    The result can be differentiated once, in reverse.

    Args:
      o: heads, for which `takes_heads` is true.
      channels: of which the last are the gates.
      norm: weight of the norm, float32.
      weight: the matrix.
      eps: of the norm.
      activation: f, "silu" or "sigmoid".
      ahead: as for `stream_product`.

    Returns:
      [1, F] in the matrix' dtype. Numerics: float32; v is not rounded.
    """
    return _heads(_Heads(eps, activation, weight.dtype), o, channels, norm, weight, tuple(ahead))


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


def _heads_by_kernel(static: _Heads, o, channels, norm, weight, ahead):
    from pallas_kernels.layer.row_product import heads_product

    z = channels.reshape(-1, o.shape[1])
    return heads_product(o, z, norm, weight, ahead=ahead, **static._asdict())


_ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def plain_heads(eps: float, activation: str, o, channels, norm, weight):
    """`heads_product` in plain JAX, for derivatives."""
    wide, z = o.astype(jnp.float32), channels[-o.size :].reshape(o.shape).astype(jnp.float32)
    v = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps) * norm
    v = (v * _ACTIVATIONS[activation](z)).reshape(1, -1)
    return jnp.einsum("nd,fd->nf", v, weight.astype(jnp.float32), precision="highest").astype(weight.dtype)


_heads = fused_op(
    lambda static, *args: (_heads_by_kernel(static, *args), args[:-1]),
    lambda static, saved, cotangents: (
        *jax.vjp(partial(plain_heads, static.eps, static.activation), *saved)[1](cotangents),
        None,
    ),
)
