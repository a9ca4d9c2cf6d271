"""Log-probabilities of single tokens against their definition: full logits in NumPy float64."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_losses import GRADIENTS, LOSS, ROUNDING, SHAPE, D, T, V, definition, inputs, loss, shapes
from tolerances import rms_ratio

from gdn_jax.losses import token_log_probs

COTANGENTS = np.random.default_rng(2).standard_normal(SHAPE).astype(np.float32)


def log_probs(x, weight, targets, label_weights, **options):
    return token_log_probs(x, weight, targets, label_weights=label_weights, **options)


def both(cotangents=COTANGENTS, **options):
    """A function of the arguments: log-probabilities, and gradients of x, weight and label_weights."""

    def call(x, weight, targets, label_weights):
        def f(x, weight, a):
            return log_probs(x, weight, targets, a, **options)

        got, back = jax.vjp(f, x, weight, label_weights)
        return got, back(jnp.asarray(cotangents, got.dtype))

    return jax.jit(call)


def check(arguments, tile, bounds):
    x, weight, targets, a = arguments
    got, gradients = both(tile=tile)(*arguments)
    _, (_, _, losses) = definition(x, weight, targets, a, 0.0)
    want = -np.float64(a) * losses
    assert got.dtype == jnp.float32 and got.shape == SHAPE
    # One token has no sum over tokens in which errors are lost: a logit and lse are each off by 3e-7 of a few nats.
    np.testing.assert_allclose(got, want, rtol=0, atol=10 * LOSS)
    _, (dx, dweight, _) = definition(x, weight, targets, -np.float64(COTANGENTS) * a, 0.0)
    for i, (name, value) in enumerate({"dx": dx, "dweight": dweight, "da": -COTANGENTS * losses}.items()):
        primal = (x, weight, a)[i]
        assert gradients[i].dtype == primal.dtype and gradients[i].shape == primal.shape, name
        ratio = rms_ratio(value, gradients[i])
        assert ratio <= bounds[i], f"{name}: {ratio:.2e}, allowed {bounds[i]:.1e}"


@pytest.mark.parametrize("tile", [16, 25, T, None])
def test_float32_is_the_definition(tile):
    """Tiles that do not divide the tokens, that do, and one tile; a fifth of the tokens left out."""
    check(inputs(), tile, (GRADIENTS,) * 3)


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_bfloat16_rounds_the_cotangent_once(weight_dtype):
    """And nothing scales the gradients: they leave in bfloat16 with one rounding more."""
    roundings = 2, 1 if weight_dtype == "float32" else 2
    bounds = [*(math.sqrt(n) * ROUNDING for n in roundings), GRADIENTS]
    check(inputs("bfloat16", weight_dtype), 16, bounds)


def test_float64_and_its_derivative():
    """The derivative of a sum of squares along a random direction is that of central differences."""
    with jax.enable_x64(True):
        x, weight, targets, a = inputs("float64", "float64")
        rng = np.random.default_rng(1)
        primals = (x, weight, a.astype(np.float64))
        direction = [rng.standard_normal(p.shape) for p in primals]
        direction[2] *= a > 0  # the log-probability of an impossible target has no derivative

        @jax.jit
        def along(s):
            x, weight, a = (p + s * d for p, d in zip(primals, direction, strict=True))
            return jnp.sum(log_probs(x, weight, jnp.asarray(targets), a, tile=16) ** 2)

        got = log_probs(*map(jnp.asarray, (x, weight, targets, a)), tile=16)
        _, (_, _, losses) = definition(x, weight, targets, a, 0.0)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, -a * losses, rtol=1e-12)
        h = 1e-5
        difference = (float(along(h)) - float(along(-h))) / (2 * h)
        # Squares of some nats in a hundred tokens: a few thousand, whose rounding over h is 1e-7.
        np.testing.assert_allclose(float(jax.jit(jax.grad(along))(0.0)), difference, rtol=1e-7)


def test_the_sum_is_minus_the_loss_and_so_are_its_gradients():
    """To the bit for the gradients of x: both are the same walk over tiles."""
    x, weight, targets, a = inputs()
    f = jax.jit(jax.value_and_grad(functools.partial(loss, tile=16), (0, 1, 3)))
    value, (dx, dweight, da) = f(x, weight, targets, a)
    got, gradients = both(-np.ones(SHAPE, np.float32), tile=16)(x, weight, targets, a)
    np.testing.assert_allclose(-np.asarray(got, np.float64).sum(), value, rtol=LOSS)
    for one, other in zip(gradients, (dx, dweight, da), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_same_bits_with_and_without_differentiation():
    arguments = inputs()
    plain = jax.jit(lambda *p: log_probs(*p, tile=16))(*arguments)
    np.testing.assert_array_equal(plain, both(tile=16)(*arguments)[0])


def test_a_token_of_weight_zero_is_left_out():
    """Whatever its target is; another one with an impossible target is NaN, and spoils no gradient if not used."""
    x, weight, targets, a = inputs()
    out = a == 0
    got, gradients = both(tile=16)(x, weight, targets, a)
    others = both(tile=16)(x, weight, np.where(out, 5, targets).astype(np.int32), a)
    assert (np.asarray(got)[out] == 0).all() and (np.asarray(gradients[0])[out] == 0).all()
    np.testing.assert_array_equal(others[0], got)
    jax.tree.map(np.testing.assert_array_equal, others[1][:2], gradients[:2])
    got, gradients = both(COTANGENTS * ~out, tile=16)(x, weight, targets, np.ones_like(a))
    np.testing.assert_array_equal(np.isnan(got), out)
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("differentiated", [False, True])
def test_no_more_than_a_tile_of_logits(differentiated):
    """No array of the program has more entries than a tile of logits, but for arguments and gradients."""
    f = both(tile=32) if differentiated else jax.jit(lambda *p: log_probs(*p, tile=32))
    found = shapes(f.lower(*inputs()).as_text())
    assert max(math.prod(dims) for dims in found if V in dims and dims != (V, D)) == 32 * V


def test_errors(no_type_checks):
    x, weight, targets, _ = inputs()
    for change, message in (
        (
            {"weight": np.zeros((V, D + 1), np.float32)},
            "weight: expected shape [V, D] = [?, 24], got [97, 25]",
        ),
        ({"targets": np.zeros((3, 24), int)}, "targets: expected shape [..] = [3, 25], got [3, 24]"),
        ({"label_weights": np.zeros(3, np.float32)}, "label_weights: expected shape [..] = [3, 25], got [3]"),
        ({"tile": 0}, "tile: expected a whole number of tokens >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            token_log_probs(**({"x": x, "weight": weight, "targets": targets} | change))
    with pytest.raises(NotImplementedError, match=r"^x: float16"):
        token_log_probs(x.astype(np.float16), weight, targets)
