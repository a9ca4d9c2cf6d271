"""Log decays of each key channel, with derivatives that are finite for any parameter."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Sizes of exp(A_log) x that a sigmoid can tell from infinity, and of x that its logarithm needs.
_LARGEST_EXPONENT = 80.0


def channel_log_decay(
    f: Float[Array, "*B H K"],
    A_log: Float[Array, " H"] | None,
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None = None,
) -> Float[Array, "*B H K"]:
    """Log decay of each key channel, in float32.

        g = -exp(A_log) softplus(f + dt_bias)                          without a lower bound
        g = lower_bound sigmoid(exp(A_log) (f + dt_bias))              with one

    The second is no clamped form of the first: at A_log = 0 the two differ by up to 2.3.

    Args:
      f: raw gate input [.., H, K] of any floating dtype and range.
      A_log: logarithm of the rate of each head [H]; None for 0.
      dt_bias: bias of each channel [H, K].
      lower_bound: the strongest log decay of a token, below 0; -5 in released models.

    Returns:
      g <= 0 [.., H, K], float32 (float64 when an argument is float64).

    Raises:
      ValueError: lower_bound is not below 0, or a shape does not fit.

    Numerics: float32 from f on. A product of an exponential with something is the exponential of one sum, so that no
      infinity meets a zero: values and derivatives are finite for any finite A_log.
    Source: fla's `fused_kda_gate` (first form) and the bounded gate of Kimi K3, GLM-5.3-Flash and Ling-3.0 (second).
    """
    if lower_bound is not None and not (isinstance(lower_bound, (int, float)) and lower_bound < 0):
        raise ValueError(f"lower_bound: expected a number below 0 or None, got {lower_bound!r}")
    H, K = f.shape[-2:]
    for name, x, shape in (("A_log", A_log, (H,)), ("dt_bias", dt_bias, (H, K))):
        if x is not None and x.shape != shape:
            raise ValueError(
                f"{name}: expected shape {list(shape)} for f of {list(f.shape)}, got {list(x.shape)}"
            )
    given = [x for x in (f, A_log, dt_bias) if x is not None]
    dtype = jnp.promote_types(jnp.result_type(*given), jnp.float32)
    A_log = jnp.zeros_like(dt_bias, dtype, (H, 1)) if A_log is None else A_log.astype(dtype)[:, None]
    x = f.astype(dtype) + dt_bias.astype(dtype)
    return _softplus_gate(x, A_log) if lower_bound is None else _bounded_gate(float(lower_bound), x, A_log)


def _exp(x: jax.Array) -> jax.Array:
    """exp(x), and the largest number of x's dtype (but for a factor of e) in place of infinity."""
    return jnp.exp(jnp.minimum(x, math.log(float(jnp.finfo(x.dtype).max)) - 1))


@jax.custom_jvp
def _softplus_gate(x: jax.Array, A_log: jax.Array) -> jax.Array:
    """-exp(A_log) softplus(x)."""
    log_softplus = jnp.where(
        x < -_LARGEST_EXPONENT, x, jnp.log(jax.nn.softplus(jnp.maximum(x, -_LARGEST_EXPONENT)))
    )
    return -_exp(A_log + log_softplus)


@_softplus_gate.defjvp
def _softplus_gate_jvp(primals, tangents):
    (x, A_log), (dx, dA_log) = primals, tangents
    g = _softplus_gate(x, A_log)
    return g, g * dA_log - _exp(A_log + jax.nn.log_sigmoid(x)) * dx


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _bounded_gate(lower_bound: float, x: jax.Array, A_log: jax.Array) -> jax.Array:
    """lower_bound sigmoid(exp(A_log) x)."""
    return lower_bound * jax.nn.sigmoid(_scaled(x, A_log))


@_bounded_gate.defjvp
def _bounded_gate_jvp(lower_bound, primals, tangents):
    (x, A_log), (dx, dA_log) = primals, tangents
    z = _scaled(x, A_log)
    log_slope = jax.nn.log_sigmoid(z) + jax.nn.log_sigmoid(-z)  # of sigmoid in z
    dg = _exp(jnp.minimum(A_log, _LARGEST_EXPONENT) + log_slope) * dx + jnp.exp(log_slope) * z * dA_log
    return lower_bound * jax.nn.sigmoid(z), lower_bound * dg


def _scaled(x: jax.Array, A_log: jax.Array) -> jax.Array:
    """exp(A_log) x, with a size of at most exp of the largest exponent."""
    size = jnp.abs(x)
    log_size = jnp.log(jnp.where(size > 0, size, 1))
    return jnp.where(size > 0, jnp.sign(x) * jnp.exp(jnp.minimum(A_log + log_size, _LARGEST_EXPONENT)), 0)
