"""Log decays of key channels and their slopes in a kernel, in float32: the formulas of `gdn_jax.gates`.

A product of an exponential with something is the exponential of one sum, so that no infinity meets a zero.
"""

import jax
import jax.numpy as jnp

LARGEST_EXPONENT = 80.0
"""Sizes of exp(A_log) x that a sigmoid can tell from infinity, and of x that its logarithm needs."""

LARGEST_LOG = 87.0
"""exp of this is a finite float32."""


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)) in float32."""
    return jnp.maximum(x, 0.0) + _log1p(jnp.exp(-jnp.abs(x)))


def _log1p(z: jax.Array) -> jax.Array:
    """log(1 + z) of z in [0, 1] with float32's relative accuracy, which log(1 + z) loses for small z."""
    # 2 artanh(s), s <= 1/3: the first term that is left out is 2^-29 of the sum.
    s = z / (2.0 + z)
    power, total = s * s, 1.0 / 17
    for n in (15, 13, 11, 9, 7, 5, 3, 1):
        total = total * power + 1.0 / n
    return 2.0 * s * total


def log_decays(x: jax.Array, A_log: jax.Array, lower_bound: float | None) -> jax.Array:
    """g of x = f + dt_bias and A_log, float32."""
    if lower_bound is None:
        bounded = jnp.maximum(x, -LARGEST_EXPONENT)
        return -_exp(A_log + jnp.where(x < -LARGEST_EXPONENT, x, jnp.log(softplus(bounded))))
    return lower_bound / (1.0 + jnp.exp(-_scaled(x, A_log)))


def log_decay_slopes(
    x: jax.Array, A_log: jax.Array, lower_bound: float | None
) -> tuple[jax.Array, jax.Array]:
    """Derivatives of `log_decays` for x and for A_log."""
    if lower_bound is None:
        bounded = jnp.maximum(x, -LARGEST_EXPONENT)
        small = _log1p(jnp.exp(-jnp.abs(bounded)))
        log_softplus = jnp.where(x < -LARGEST_EXPONENT, x, jnp.log(jnp.maximum(bounded, 0.0) + small))
        log_sigmoid = jnp.minimum(x, 0.0) - small
        return -_exp(A_log + log_sigmoid), -_exp(A_log + log_softplus)
    z = _scaled(x, A_log)
    log_slope = -jnp.abs(z) - 2.0 * _log1p(jnp.exp(-jnp.abs(z)))  # of a sigmoid in z
    of_x = lower_bound * _exp(jnp.minimum(A_log, LARGEST_EXPONENT) + log_slope)
    return of_x, lower_bound * (jnp.exp(log_slope) * z)


def _exp(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.minimum(x, LARGEST_LOG))


def _scaled(x: jax.Array, A_log: jax.Array) -> jax.Array:
    """exp(A_log) x, with a size of at most exp of the largest exponent."""
    size = jnp.abs(x)
    # At x = 0 any finite logarithm serves: what it gives is multiplied by 0.
    log_size = jnp.log(jnp.maximum(size, jnp.finfo(jnp.float32).tiny))
    z = jnp.exp(jnp.minimum(A_log + log_size, LARGEST_EXPONENT))
    return jnp.where(x < 0.0, -z, jnp.where(x > 0.0, z, 0.0))
