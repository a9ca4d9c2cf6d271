"""Write strengths taken apart, so that what is rounded never holds a small factor.

    beta = mantissa x power

A gradient of what a token writes is proportional to its beta, and dbeta is not: it must not be found by dividing by
beta, which may be 0. What is stored and rounded for it takes in the mantissa, which is never 0 and by which dbeta is
divided in the end; the power is a factor of what leaves for the other gradients.

bfloat16 has the exponents of float32: there the mantissa is beta itself, LEAST where it is less, and the power 1.
What a LEAST adds to the other gradients is far below their rounding. float16 ends at 2^-24: there the mantissa is
1 to 2 in size, the power a power of two, 0 for 0, and the product of both is exact.
"""

import jax
import jax.numpy as jnp
from jax import lax

LEAST = 2.0**-64
"""Least size of a mantissa in bfloat16. Products of three such factors would leave the range of float32."""


def mantissa(beta: jax.Array, dtype) -> jax.Array:
    """The mantissa of float32 write strengths, for arrays of a dtype. Never 0."""
    if dtype == jnp.float16:
        bits = lax.bitcast_convert_type(beta, jnp.int32) & -0x7F800001 | 0x3F800000
        return lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where((beta < LEAST) & (beta > -LEAST), LEAST, beta)


def power(beta: jax.Array) -> jax.Array:
    """The power of two of float32 write strengths in float16: 0 for 0, and for what is no number."""
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(beta, jnp.int32) & 0x7F800000, jnp.float32)
    return jnp.where(power < jnp.inf, power, 0.0)
