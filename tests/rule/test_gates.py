"""Gates, norm and converters against NumPy float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tolerances import assert_close, tolerance

import gdn_jax
from gdn_jax import gates

SAMPLE = np.random.default_rng(0)
EXACT = tolerance("o", "float32")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_log_decay(dtype):
    """-exp(A_log) softplus(a + dt_bias), in float32 whatever the dtype of a, also far out in both tails."""
    a = np.concatenate(
        [SAMPLE.standard_normal((3, 5, 4)), np.full((3, 1, 4), 80.0), np.full((3, 1, 4), -60.0)], 1
    )
    a = a.astype(dtype)
    A_log, dt_bias = np.log([1e-3, 0.5, 4, 16]).astype(np.float32), np.array([-7, -2, 0, 1.0], np.float32)
    g = np.asarray(jax.jit(gdn_jax.log_decay)(a, A_log, dt_bias))
    expected = -np.exp(A_log.astype(np.float64)) * np.logaddexp(0, a.astype(np.float64) + dt_bias)
    assert g.dtype == jnp.float32 and (g <= 0).all()
    np.testing.assert_allclose(g, expected, rtol=EXACT)


def test_log_decay_of_the_slowest_head_survives_bfloat16():
    """g = -1e-6: computed in bfloat16, 1 + exp(-14) would round to 1 and the head would never forget."""
    a, zero = np.full((1, 1), -13.8, ml_dtypes.bfloat16), np.zeros(1, ml_dtypes.bfloat16)
    g = jax.jit(gdn_jax.log_decay)(a, zero, zero)
    assert_close(-np.log1p(np.exp(a.astype(np.float64))), g, EXACT)


@pytest.mark.parametrize(
    ("lower_bound", "bound"), [(None, "sigmoid"), (-5.0, "sigmoid"), (-5.0, "exponential")]
)
def test_channel_log_decay(lower_bound, bound):
    """All kinds and all their derivatives against float64 formulas, finite for any rate."""
    A_log, f = (
        y.ravel()
        for y in np.meshgrid(
            np.array([-20, -5, 0, 1, 2.77, 10, 40, 80.0, 90.0]),
            np.array([-120, -20, -8, -1e-3, 0, 1e-3, 1, 8, 60, 100.0]),
        )
    )

    def gate(f, A_log):
        bias = jnp.zeros((len(f), 1), f.dtype)
        return gdn_jax.channel_log_decay(f[:, None], A_log, bias, lower_bound, bound=bound)[:, 0]

    @jax.jit
    def both(*given):
        g, vjp = jax.vjp(gate, *given)
        return g, *vjp(jnp.ones_like(g))

    got = jax.device_get(both(f.astype(np.float32), A_log.astype(np.float32)))
    assert all(np.isfinite(y).all() for y in got)
    with np.errstate(over="ignore"):
        softplus, sigmoid = np.logaddexp(0, f), np.exp(-np.logaddexp(0, -f))
        if lower_bound is None:
            expected = -np.exp(A_log) * softplus, -np.exp(A_log) * sigmoid, -np.exp(A_log) * softplus
        elif bound == "exponential":
            w = np.exp(A_log) * softplus / -lower_bound
            slope = lower_bound * np.exp(-w)
            rate = np.exp(A_log) / -lower_bound
            expected = lower_bound * -np.expm1(-w), slope * rate * sigmoid, slope * w
        else:
            z = np.exp(A_log) * f
            both_sides = np.exp(-np.abs(z) - 2 * np.log1p(np.exp(-np.abs(z))))  # sigmoid(z) sigmoid(-z)
            s = np.exp(-np.logaddexp(0, -z))
            expected = (
                lower_bound * s,
                lower_bound * both_sides * np.exp(A_log),
                lower_bound * both_sides * z,
            )
    for name, want, y in zip(("g", "df", "dA_log"), expected, got, strict=True):
        representable = np.isfinite(want) & (np.abs(want) > 1e-30) & (np.abs(want) < 1e37)
        error = np.abs(y - want)[representable] / np.abs(want)[representable]
        assert error.max() < 1e-5, (name, error.max())


def test_a_bound_has_a_name():
    f, zeros = (jax.device_put(np.zeros(s, np.float32)) for s in ((1, 1, 1), (1, 1)))
    with pytest.raises(ValueError, match="bound: expected one of"):
        gdn_jax.channel_log_decay(f, None, zeros, -5.0, bound="clamp")


def test_channel_log_decay_is_in_float32():
    """A bfloat16 input is widened before the sum with the bias."""
    f, bias = np.full((1, 1, 1), 1 / 3, jnp.bfloat16), np.full((1, 1), 1e-3, np.float32)
    g = np.asarray(jax.jit(gdn_jax.channel_log_decay)(f, np.zeros(1, np.float32), bias))
    assert g.dtype == np.float32
    assert_close(-np.logaddexp(0, np.float64(f[0, 0, 0]) + 1e-3), g[0, 0, 0], 1e-6)


def test_write_strength():
    b = np.linspace(-20, 20, 41).astype(np.float32)
    expected = 1 / (1 + np.exp(-b.astype(np.float64)))
    write_strength = gdn_jax.write_strength
    plain, doubled = jax.jit(lambda b: (write_strength(b), write_strength(b, allow_neg_eigval=True)))(b)
    np.testing.assert_allclose(plain, expected, rtol=EXACT)
    np.testing.assert_allclose(doubled, 2 * expected, rtol=EXACT)
    low = jax.eval_shape(write_strength, b.astype(ml_dtypes.bfloat16))
    assert low.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_l2norm(dtype):
    """x rsqrt(sum x^2 + eps), computed in float32, in the dtype of x; a vector of zeros stays one."""
    x = (SAMPLE.standard_normal((4, 7, 64)) * 10.0 ** SAMPLE.integers(-3, 4, (4, 7, 1))).astype(dtype)
    x[0, 0] = 0
    y = jax.jit(gdn_jax.l2norm)(x)
    x64 = x.astype(np.float64)
    assert y.dtype == dtype
    expected = x64 / np.sqrt((x64**2).sum(-1, keepdims=True) + 1e-6)
    assert_close(expected, y, EXACT if dtype == np.float32 else tolerance("o", "bfloat16"))
    gradient = jax.jit(jax.grad(lambda x: gdn_jax.l2norm(x).sum()))(np.zeros(8, np.float32))
    assert np.isfinite(gradient).all()


def test_converters():
    """There and back; 0 is a full reset, 1 is no decay."""
    alpha = np.array([0.0, 1e-30, 0.3, 0.999, 1.0], np.float32)

    @jax.jit
    def there_and_back(alpha):
        g = gdn_jax.log_decay_from_alpha(alpha)
        return g, gdn_jax.alpha_from_log_decay(g)

    g, back = jax.device_get(there_and_back(alpha))
    assert g[0] == -np.inf and g[-1] == 0
    assert_close(np.log(alpha[1:].astype(np.float64)), g[1:], EXACT)
    assert_close(alpha, back, EXACT)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_converters_compute_in_float32(dtype):
    """Whatever is given: g of a narrow alpha, and alpha of a narrow g, have the digits of float32."""
    alpha = np.array([0.004, 0.3, 0.75, 0.99, 0.996], dtype)
    g = jax.jit(gdn_jax.log_decay_from_alpha)(alpha)
    assert g.dtype == jnp.float32
    assert_close(np.log(alpha.astype(np.float64)), g, EXACT)
    narrow = np.array([-5.5, -0.3, -0.01, -0.004], dtype)
    back = jax.jit(gdn_jax.alpha_from_log_decay)(narrow)
    assert back.dtype == jnp.float32
    assert_close(np.exp(narrow.astype(np.float64)), back, EXACT)


def test_double_precision():
    with jax.enable_x64(True):
        a = SAMPLE.standard_normal((2, 3))

        @jax.jit
        def run(a):
            zero, g = jnp.zeros(3), gdn_jax.alpha_from_log_decay(-(a**2))
            return gdn_jax.log_decay(a, zero, zero), gdn_jax.write_strength(a), gdn_jax.l2norm(a), g

        got = run(a)
    norm = np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)
    expected = -np.logaddexp(0, a), 1 / (1 + np.exp(-a)), a / norm, np.exp(-(a**2))
    for y, want in zip(got, expected, strict=True):
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, want, rtol=1e-14)


def test_gradients_are_finite_in_the_tails():
    def loss(a, A_log, dt_bias):
        return gdn_jax.log_decay(a, A_log, dt_bias).sum()

    a, zeros = np.array([[-1e4, -50.0, 0.0, 50.0, 1e4]], np.float32), np.zeros(5, np.float32)
    for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(a, zeros, zeros):
        assert np.isfinite(gradient).all()


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    "x, got", [(np.ones(3, int), "int64"), ([1.0], "list"), ("x", "str"), (None, "NoneType")]
)
def test_what_is_no_floating_array_is_refused(x, got):
    calls = (gates.l2norm, gates.log_decay_from_alpha, gates.alpha_from_log_decay, gates.write_strength)
    rate = jax.device_put(np.ones(3, np.float32))
    for f in (*calls, lambda x: gates.log_decay(x, rate, rate)):
        with pytest.raises(ValueError, match=f"expected .*float.*, got {got}"):
            f(x)
