"""Operands of products in 8 bits, made by the kernels of what stands before the products.

The norm of the residual stream writes its result in 8 bits, too, and its derivative the cotangent of what was added
to the stream; the gated norm writes nothing else. So no kernel reads these arrays once more to round them.

A scale is that of a sample of the tokens, as in `gdn_jax.parts.products`, here worked out before the kernel runs. The
scale of a norm is known: no number of it is larger than the root of the width.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from gdn_jax.partitioning import expected_shards
from gdn_jax.parts.kernels import fused_op, usable
from gdn_jax.parts.norms import GatedNorm, plain_gated_norm
from gdn_jax.parts.products import Addend, Float8, Operand, Prepared, array_of, sample, scale_of_sample


def takes(
    product: Any,
    x: Float[Array, "*S D"],
    weights: Sequence[Float[Array, "D F"]],
    dtype: Any,
    implementation: str | None,
) -> bool:
    """Whether `add_norm` takes a stream x whose norm of a dtype is multiplied by weights alone, by a product."""
    from pallas_kernels.layer import norm_eight_bits as kernels

    if not isinstance(product, Float8) or not usable(implementation):
        return False
    return (expected_shards((x, *weights)) or 1) == 1 and kernels.check_supported(x, dtype) is None


def add_norm(
    policy: Float8, x: Float[Array, "*S D"], y: Any, *, eps: float, dtype: Any
) -> tuple[Float[Array, "*S D"], Prepared]:
    """`parts.norms.add_norm` without a weight, for a call that `takes` accepts: the stream, and n `Prepared`.

    Args:
      policy: of the products that read n.
      x: residual stream.
      y: what is added to it, an array of x's shape or an `Addend`, whose cotangent is made in 8 bits; None: nothing.
      eps: added to the mean square.
      dtype: of n.
    """
    static = _Norm(policy, eps, jnp.dtype(dtype))
    s, n, made = _add_norm(static, x, array_of(y), y.cotangent if isinstance(y, Addend) else None)
    return s, Prepared(n, made)


class _Norm(NamedTuple):
    """Options of a sum with its norm."""

    policy: Float8
    eps: float
    dtype: Any


def _rows(x):
    return x.reshape(-1, x.shape[-1])


def scale_of_norm(D: int, dtype: Any) -> float:
    """The largest power of two under which no number of a norm of D channels is too large for a dtype."""
    return 2.0 ** math.floor(math.log2(float(jnp.finfo(dtype).max) / D**0.5))


def _forward(static, x, y, cotangent):
    from pallas_kernels.layer import norm_eight_bits as kernels

    policy, eps, dtype = static
    scale = scale_of_norm(x.shape[-1], policy.operands)
    options = dict(eps=eps, dtype=dtype, scale=scale, codes=policy.operands)
    s, n, factors, codes = kernels.add_norm_eight_bits(_rows(x), None if y is None else _rows(y), **options)
    made = Operand(*codes, jnp.float32(0), jnp.float32(scale))  # a scale that has room for every number
    empty = jnp.zeros((0,), None if y is None else y.dtype)
    kept = n, factors, None if y is None else empty, None if cotangent is None else empty
    return (s.reshape(x.shape), n.reshape(x.shape), made), kept


def _backward(static, kept, cotangents):
    from pallas_kernels.layer import norm, norm_eight_bits

    (n, factors, like_y, in_eight_bits), (ds, dn, _) = kept, cotangents
    shape, x_dtype = ds.shape, ds.dtype
    ds = None if isinstance(ds, SymbolicZero) else _rows(ds)
    dn = jnp.zeros(n.shape, n.dtype) if isinstance(dn, SymbolicZero) else _rows(dn)
    if in_eight_bits is None:
        y_dtype = None if like_y is None else like_y.dtype
        options: Any = dict(eps=static.eps, x_dtype=x_dtype, y_dtype=y_dtype, factors=factors)
        dx, dy, _ = norm.add_norm_backward(n, None, ds, dn, **options)
        return dx.reshape(shape), None if dy is None else dy.reshape(shape), None
    codes = static.policy.cotangents
    some = _derivative(*(None if x is None else sample(x) for x in (n, factors, ds, dn)))
    scale = scale_of_sample(some.astype(n.dtype), len(n), codes)
    options = dict(x_dtype=x_dtype, codes=codes)
    dx, made = norm_eight_bits.add_norm_eight_bits_backward(n, factors, ds, dn, scale, **options)
    return dx.reshape(shape), None, Operand(*made, scale)


def _derivative(n, factors, ds, dn):
    """The cotangent of the stream, in float32."""
    n, dn = n.astype(jnp.float32), dn.astype(jnp.float32)
    dx = factors[:, None] * (dn - n * jnp.mean(dn * n, axis=-1, keepdims=True))
    return dx if ds is None else dx + ds.astype(jnp.float32)


_add_norm = fused_op(_forward, _backward, symbolic_zeros=True)


def gated_norm(
    policy: Float8,
    options: GatedNorm,
    o: Float[Array, "B T H V"],
    channels: Float[Array, "B T C"],
    weight: Float[Array, " V"],
) -> Operand:
    """The gated norm of outputs that its kernel accepts, as an operand; without a derivative.

    Args:
      channels: of which the last H V are the gates.
    """
    from pallas_kernels.layer import gated_norm_eight_bits as kernels

    heads, (M, F) = o.shape[2:], (o.shape[0] * o.shape[1], o.shape[2] * o.shape[3])
    o, channels = o.reshape(M, F), _rows(channels)
    some, gates = sample(o).reshape(-1, *heads), sample(channels)[:, -F:].reshape(-1, *heads)
    scale = scale_of_sample(plain_gated_norm(options, some, gates, weight, None), M, policy.operands)
    return Operand(
        *kernels.gated_norm_eight_bits(o, channels, weight, scale, policy.operands, **options._asdict()),
        scale,
    )
