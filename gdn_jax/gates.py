"""Gates of the rule: log decay, write strength, L2 norm, converters, and initial values of the decay's parameters."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.shapes import check_flags, check_floating

# Decay rates A are drawn from U(MIN_RATE, MAX_RATE). A rate of 0 would be A_log = -inf, a head that neither
# forgets nor learns to. 1e-4 with the longest time step, 0.1, is a half-life of 70 000 tokens, and leaves out
# one draw of U(0, 16) in 160 000.
MIN_RATE, MAX_RATE = 1e-4, 16.0
MIN_STEP, MAX_STEP, STEP_FLOOR = 1e-3, 1e-1, 1e-4


def log_decay(
    a: Float[Array, "*B HO"], A_log: Float[Array, " HO"], dt_bias: Float[Array, " HO"]
) -> Float[Array, "*B HO"]:
    """Log decay of a Mamba2-style gate, in float32.

        g = -exp(A_log) * softplus(a + dt_bias)

    Args:
      a: raw gate input of any floating dtype and range.
      A_log: logarithm of the decay rate of each head, finite (a rate of 0 is a head that never forgets and
        never learns to: keep it away from 0 when sampling).
      dt_bias: bias of the time step of each head.

    Returns:
      g <= 0, float32 (float64 when an argument is float64).

    Raises:
      ValueError: an argument has no floating dtype.

    Numerics: computed in float32 whatever the dtype of a; bfloat16 would lose the slow heads.
    Source: Mamba2's discretisation as in fla's `fused_gdn_gate`. Modular's documentation writes
      exp(-softplus), which leaves out the learned rate exp(A_log).
    """
    for name, x in (("a", a), ("A_log", A_log), ("dt_bias", dt_bias)):
        check_floating(name, x)
    dtype = jnp.promote_types(jnp.result_type(a, A_log, dt_bias), jnp.float32)
    a, A_log, dt_bias = (x.astype(dtype) for x in (a, A_log, dt_bias))
    return -jnp.exp(A_log) * jax.nn.softplus(a + dt_bias)


def write_strength(b: Float[Array, "*S"], *, allow_neg_eigval: bool = False) -> Float[Array, "*S"]:
    """Write strength beta = sigmoid(b), or 2 sigmoid(b) with negative eigenvalues, in float32.

    The transition I - beta k k^T of a unit key has the eigenvalue 1 - beta along k: in [0, 1] for
    beta <= 1, in [-1, 1] for beta <= 2.

    Args:
      b: raw gate input of any floating dtype and range.
      allow_neg_eigval: doubles the range to [0, 2].

    Returns:
      beta, float32 (float64 when b is).

    Raises:
      ValueError: b has no floating dtype, or allow_neg_eigval is no bool.
    """
    check_floating("b", b)
    check_flags(allow_neg_eigval=allow_neg_eigval)
    beta = jax.nn.sigmoid(b.astype(jnp.promote_types(b.dtype, jnp.float32)))
    return 2 * beta if allow_neg_eigval else beta


def logit(strength: float) -> float:
    """Inverse of the sigmoid: the b with which `write_strength` is `strength`, between 0 and 1."""
    return math.log(strength) - math.log1p(-strength)


def l2norm(x: Float[Array, "*S D"], eps: float = 1e-6) -> Float[Array, "*S D"]:
    """Unit length along the last axis, x * rsqrt(sum(x^2) + eps).

    Args:
      x: vectors [.., D] of any floating dtype.
      eps: added to the sum of squares; a vector of zeros stays one.

    Returns:
      The vectors [.., D], computed in float32 (float64 when x is), in x's dtype.

    Raises:
      ValueError: x has no floating dtype.

    Source: fla's `l2norm` and Hugging Face's `l2norm` (eps inside the root).
    """
    check_floating("x", x)
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (x32 * jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def log_decay_from_alpha(alpha: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """g = log(alpha) for a linear decay (FlashInfer, MLX, Modular).

    Near alpha = 1 the linear form has already lost what a log decay keeps: float32 cannot tell
    alpha = 1 - 1e-8 from 1. Convert once, at the boundary.

    Args:
      alpha: linear decay in [0, 1], of any shape and floating dtype; 0 gives -inf, a full reset.

    Returns:
      g <= 0 of the same shape, float32 (float64 when alpha is).

    Raises:
      ValueError: alpha has no floating dtype.
    """
    check_floating("alpha", alpha)
    return jnp.log(alpha.astype(jnp.promote_types(alpha.dtype, jnp.float32)))


def alpha_from_log_decay(g: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Linear decay alpha = exp(g) of a log decay.

    Args:
      g: log decay <= 0, of any shape and floating dtype.

    Returns:
      alpha in [0, 1] of the same shape, float32 (float64 when g is).

    Raises:
      ValueError: g has no floating dtype.
    """
    check_floating("g", g)
    return jnp.exp(g.astype(jnp.promote_types(g.dtype, jnp.float32)))


def no_gate(like: Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Array:
    """Log decays of 0, on the devices of `like`.

    XLA does not see that they are a constant: on a GPU it would add it up while compiling, for seconds where it is
    large.

    Args:
      like: an array of the call.
      shape: of the result.
      dtype: of the result.
    """
    return jax.lax.optimization_barrier(jnp.zeros_like(like, dtype, shape))


def init_A_log(key: Array, num_heads: int, least: float = MIN_RATE) -> Float[Array, " HO"]:
    """Logarithm of decay rates A ~ U(least, 16), float32 [num_heads]; least is 1e-4 by default.

    Drawn in float32 whatever the model's dtype: bfloat16 draws hit 0, whose logarithm kills the head.
    """
    return jnp.log(jax.random.uniform(key, (num_heads,), jnp.float32, least, MAX_RATE))


def init_dt_bias(key: Array, *shape: int) -> Float[Array, "*S"]:
    """Inverse softplus of time steps dt = exp(U(log 1e-3, log 1e-1)), not below 1e-4, float32 of that shape."""
    log_dt = jax.random.uniform(key, shape, jnp.float32, math.log(MIN_STEP), math.log(MAX_STEP))
    dt = jnp.maximum(jnp.exp(log_dt), STEP_FLOOR)
    return dt + jnp.log(-jnp.expm1(-dt))
