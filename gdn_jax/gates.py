"""Gates of the rule: log decay, write strength, L2 norm, converters, and initial values of the decay's parameters.

The log decays of key channels have derivatives that are finite for any parameter.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.shapes import check_choice, check_flags, check_floating

# Decay rates A are drawn from U(MIN_RATE, MAX_RATE). A rate of 0 would be A_log = -inf, a head that neither
# forgets nor learns to. 1e-4 with the longest time step, 0.1, is a half-life of 70 000 tokens, and leaves out
# one draw of U(0, 16) in 160 000.
MIN_RATE, MAX_RATE = 1e-4, 16.0
MIN_STEP, MAX_STEP, STEP_FLOOR = 1e-3, 1e-1, 1e-4

# Sizes of exp(A_log) x that a sigmoid can tell from infinity, and of x that its logarithm needs.
_LARGEST_EXPONENT = 80.0


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


def channel_log_decay(
    f: Float[Array, "*B H K"],
    A_log: Float[Array, " H"] | None,
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None = None,
    *,
    bound: str = "sigmoid",
) -> Float[Array, "*B H K"]:
    """Log decay of each key channel, in float32.

        g = -exp(A_log) softplus(f + dt_bias)                          without a lower bound
        g = lower_bound sigmoid(exp(A_log) (f + dt_bias))              with one, and bound "sigmoid"
        g = lower_bound (1 - exp(exp(A_log) softplus(f + dt_bias) / lower_bound))            "exponential"

    The second gate does not clamp the first: at A_log = 0 the two differ by up to 2.3. The third equals the first
    near 0, and never reaches the bound.

    Args:
      f: raw gate input [.., H, K] of any floating dtype and range.
      A_log: logarithm of the rate of each head [H]; None for 0.
      dt_bias: bias for each channel [H, K].
      lower_bound: the strongest log decay of a token, below 0; -5 in released models.
      bound: how g comes to the lower bound; without one it has no effect.

    Returns:
      g <= 0 [.., H, K], float32 (float64 when an argument is float64).

    Raises:
      ValueError: lower_bound is not below 0, bound is neither name, or a shape does not fit.

    Numerics: float32 from f on. A product of an exponential with something is the exponential of one sum, so that no
      infinity meets a zero: values and derivatives are finite for any finite A_log.
    Source: fla's `fused_kda_gate` (first form), the bounded gate of Kimi K3, GLM-5.3-Flash and Ling-3.0 (second), and
      equation 15 of Erase-then-Delta Attention (arXiv 2606.26560; third).
    """
    if lower_bound is not None and not (isinstance(lower_bound, (int, float)) and lower_bound < 0):
        raise ValueError(f"lower_bound: expected a number below 0 or None, got {lower_bound!r}")
    check_choice("bound", bound, tuple(_BOUNDED))
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
    if lower_bound is None:
        return _softplus_gate(x, A_log)
    return _BOUNDED[bound](float(lower_bound), x, A_log)


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


def _exp(x: jax.Array) -> jax.Array:
    """exp(x), and the largest number of x's dtype (but for a factor of e) in place of infinity."""
    return jnp.exp(jnp.minimum(x, math.log(float(jnp.finfo(x.dtype).max)) - 1))


@jax.custom_jvp
def _softplus_gate(x: jax.Array, A_log: jax.Array) -> jax.Array:
    """-exp(A_log) softplus(x)."""
    return -_exp(A_log + _log_softplus(x))


def _log_softplus(x: jax.Array) -> jax.Array:
    """log(softplus(x)), which is x far below 0."""
    return jnp.where(x < -_LARGEST_EXPONENT, x, jnp.log(jax.nn.softplus(jnp.maximum(x, -_LARGEST_EXPONENT))))


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


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _saturating_gate(lower_bound: float, x: jax.Array, A_log: jax.Array) -> jax.Array:
    """lower_bound (1 - exp(-w)), w = exp(A_log) softplus(x) / |lower_bound|."""
    return -lower_bound * jnp.expm1(-_exp(A_log - math.log(-lower_bound) + _log_softplus(x)))


@_saturating_gate.defjvp
def _saturating_gate_jvp(lower_bound, primals, tangents):
    (x, A_log), (dx, dA_log) = primals, tangents
    rate = A_log - math.log(-lower_bound)
    log_w = rate + _log_softplus(x)
    w = _exp(log_w)
    dg = _exp(log_w - w) * dA_log + _exp(rate + jax.nn.log_sigmoid(x) - w) * dx
    return -lower_bound * jnp.expm1(-w), lower_bound * dg


_BOUNDED = {"sigmoid": _bounded_gate, "exponential": _saturating_gate}
"""How a gate comes to its lower bound -> the gate."""
