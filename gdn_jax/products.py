"""How a model multiplies activations by weights: objects that flax's layers take as their `dot_general`.

`PLAIN` multiplies in the dtype of its operands. A `Float8` rounds both operands to 8 bits first, those of the
backward pass too, and a GPU that has such products makes them from 8 bits:

    x8 = E4M3(x sx), w8 = E4M3(w sw)                 y = (x8 w8) / (sx sw)
    dy8 = E5M2(dy sdy)                               dx = (dy8 w8^T) / (sdy sw),  dw = (x8^T dy8) / (sx sdy)

A scale is a power of two, and that of the operand's own largest number at this call ("current scaling"). Multiplying
by it and dividing by it rounds nothing. x8 and w8 are what is kept for the backward pass, in half the bytes of x.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.shapes import accumulation_dtype

PLAIN = lax.dot_general
"""Products in the dtype of the operands."""


@dataclasses.dataclass(frozen=True)
class Float8:
    """Products of operands in 8 bits.

    Numerics: a number in E4M3 is rounded by at most 2^-4 of itself, one in E5M2 by 2^-3; numbers below 2^-15 of the
    largest one (E4M3, of 2^-6 to 448) or 2^-30 (E5M2) lose more. Sums are in float32, but those of the forward on a
    GPU of compute capability 9.0, which may have some bits less. The result is rounded once to x's dtype.
    """

    operands: DTypeLike = jnp.float8_e4m3fn
    """The dtype of activations and weights."""
    cotangents: DTypeLike = jnp.float8_e5m2
    """The dtype of the results' cotangents."""
    gradient_sums: lax.Precision = lax.Precision.HIGHEST
    """Precision of the gradients' sums. The default leaves them to the tensor cores of a GPU, which keep some bits
    less, and a weight's gradient is a sum over all tokens."""

    def __call__(
        self,
        x: Array,
        w: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> Array:
        """x @ w [.., F], as `lax.dot_general` is called for it.

        Args:
          x: activations [.., D], any floating dtype of at least 16 bits.
          w: weight [D, F] of the same dtype.
          dimension_numbers: those of x @ w.
          precision, preferred_element_type, out_sharding: None, as there is no choice.

        Raises:
          NotImplementedError: another product is asked for.
        """
        if dimension_numbers != of_matrix(x) or w.ndim != 2:
            raise NotImplementedError(f"dimension_numbers: expected those of x @ w, got {dimension_numbers}")
        options = dict(
            precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding
        )
        for name, value in options.items():
            if value is not None:
                raise NotImplementedError(f"{name}: expected None, got {value}")
        return _float8(self, x, w)


PRODUCTS: dict[str, Any] = {
    "default": PLAIN,
    "float8": Float8(),
    "float8_e4m3": Float8(cotangents=jnp.float8_e4m3fn),
}
"""Products by the name that `ModelConfig.matmul` has for them."""


def of_matrix(x: Any) -> Any:
    """The dimension numbers of x @ w for x [.., D] and w [D, F]."""
    return ((x.ndim - 1,), (0,)), ((), ())


def times(product: Any, x: Float[Array, "*S D"], w: Float[Array, "D F"]) -> Float[Array, "*S F"]:
    """x @ w by a product."""
    return product(x, w, of_matrix(x))


class Scaled(NamedTuple):
    """An array in 8 bits: values / scale are its numbers."""

    values: Float[Array, "..."]
    scale: Float[Array, ""]
    """A power of two, float32."""


def rounded(x: Float[Array, "..."], dtype: DTypeLike) -> Scaled:
    """An array in 8 bits, with the largest power of two as its scale under which no number is too large.

    An array of zeros has scale 1. One with a NaN or an infinity is NaN as a whole, so that it is seen.
    """
    largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.float32(jnp.finfo(dtype).max) / largest)
    # The inverse of two scales is a number. Beyond it an operand of 10^21 or more is NaN, and is seen.
    scale = jnp.ldexp(jnp.float32(1), jnp.clip(exponent - 1, -63, 126))  # exp2 would not be a power of two
    scale = jnp.where(largest > 0, scale, 1)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    wide = accumulation_dtype(x)
    return Scaled((x.astype(wide) * scale).astype(dtype), scale)


def _product(
    x: Scaled, y: Scaled, dims: Any, dtype: DTypeLike, precision: lax.Precision | None = None
) -> Array:
    """The product of two scaled arrays over pairs of their axes, rounded once to a dtype."""
    # Before it is divided by the scales a result may be larger than any number of float16.
    wide = jnp.promote_types(dtype, jnp.bfloat16)
    options: Any = dict(precision=precision, preferred_element_type=wide)
    z = lax.dot_general(x.values, y.values, (dims, ((), ())), **options)
    # One factor, which XLA makes a factor of the product itself (docs/log/training.md).
    return (z * (1 / x.scale * (1 / y.scale)).astype(wide)).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _float8(policy: Float8, x: Array, w: Array) -> Array:
    return _forward(policy, x, w)[0]


def _forward(policy, x, w):
    x8, w8 = (rounded(y, policy.operands) for y in (x, w))
    y = _product(x8, w8, ((x.ndim - 1,), (0,)), x.dtype)
    return y, (x8, w8)


def _backward(policy, saved, dy):
    x8, w8 = saved
    dy8, rows = rounded(dy, policy.cotangents), tuple(range(dy.ndim - 1))
    dx = _product(dy8, w8, ((dy.ndim - 1,), (1,)), dy.dtype, policy.gradient_sums)
    return dx, _product(x8, dy8, (rows, rows), dy.dtype, policy.gradient_sums)


_float8.defvjp(_forward, _backward)
