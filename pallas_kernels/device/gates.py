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


def log_decays(
    x: jax.Array, A_log: jax.Array, lower_bound: float | None, bound: str = "sigmoid"
) -> jax.Array:
    """g of x = f + dt_bias and A_log, float32.

    Args:
      bound: how g comes to the lower bound, as for `gdn_jax.gates.channel_log_decay`.
    """
    if lower_bound is None or bound == "exponential":
        bounded = jnp.maximum(x, -LARGEST_EXPONENT)
        g = -_exp(A_log + jnp.where(x < -LARGEST_EXPONENT, x, jnp.log(softplus(bounded))))
        return g if lower_bound is None else lower_bound * _one_minus_exp(g / -lower_bound)
    return lower_bound / (1.0 + jnp.exp(-_scaled(x, A_log)))


def _one_minus_exp(x: jax.Array) -> jax.Array:
    """1 - exp(x) of x <= 0 with float32's relative accuracy, which the difference loses for small x."""
    # Terms of the series up to the eighth: the first one that is left out is 2^-26 of the sum.
    small, total = jnp.maximum(x, -0.5), 1.0
    for n in (8, 7, 6, 5, 4, 3, 2):
        total = 1.0 + small / n * total
    return jnp.where(x < -0.5, 1.0 - jnp.exp(x), -small * total)


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
