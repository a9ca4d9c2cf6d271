"""The loss without logits against its definition: full logits in NumPy float64."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import rms_ratio

from gdn_jax.losses import TILE_LOGITS, TILE_TOKENS, default_tile, linear_softmax_cross_entropy

# float32: a logit is a sum of D = 24 products, off by about sqrt(D) 2^-24 = 3e-7 of its size, a few nats, and at
# random in every token: the sum over a hundred tokens, each of a few nats, is off by a tenth of that, and by the
# roundings of the sums themselves, a few times 6e-8.
LOSS = 1e-6
# An entry of dl is off by the error of its logit and by that of an exponential and a quotient, 1e-6 of its value at
# most; dx and dW are sums over V = 97 and T = 75 such terms. 1e-5 leaves a factor of ten.
GRADIENTS = 1e-5
# bfloat16: the inputs are rounded before both sides see them, and products of bfloat16 are exact in float32, so the
# loss keeps its bound. A rounding to nearest is off by at most 2^-8 of the value: 2^-8 / sqrt(3) rms for the worst
# significand. dl is rounded once: both of its products are sums of terms that are off by so much, independently, and
# do not cancel more than their errors do. A gradient that leaves as bfloat16 is rounded a second time, and a third
# time when the backward pass scales it. Independent roundings add in squares.
ROUNDING = 2.0**-8 / math.sqrt(3)

T, D, V = 75, 24, 97
SHAPE = (3, 25)


def definition(x, weight, targets, label_weights, z):
    """The fields of LossSums, and the gradients of the loss by x, weight and label_weights: float64."""
    x, weight, a = (np.asarray(y).astype(np.float64) for y in (x, weight, label_weights))
    logits = x @ weight.T
    lse = np.log(np.exp(logits).sum(-1))
    onehot = np.asarray(targets)[..., None] == np.arange(len(weight))
    losses = np.where(onehot.any(-1), lse - (logits * onehot).sum(-1) + z * lse**2, 0)
    correct = logits.argmax(-1) == targets
    sums = ((a * losses).sum(), (a * z * lse**2).sum(), (a * correct).sum(), a.sum())
    p = np.exp(logits - lse[..., None])
    dl = a[..., None] * (p - onehot + 2 * z * lse[..., None] * p)
    return sums, (dl @ weight, np.einsum("btv,btd->vd", dl, x), losses)


def inputs(dtype="float32", weight_dtype="float32"):
    """x, weight, targets, label_weights: logits of size 2, a fifth of the tokens left out, at impossible targets."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((*SHAPE, D)).astype(dtype)
    weight = (rng.standard_normal((V, D)) * 2 * D**-0.5).astype(dtype).astype(weight_dtype)
    best = (x.astype(np.float64) @ weight.astype(np.float64).T).argmax(-1)
    targets = np.where(rng.random(SHAPE) < 0.3, best, rng.integers(0, V, SHAPE))
    out = rng.random(SHAPE) < 0.2
    targets = np.where(out, rng.choice([-100, -1, V, 2**31 - 1], SHAPE), targets)
    label_weights = np.where(out, 0, rng.uniform(0.5, 2, SHAPE))
    return x, weight, targets.astype(np.int32), label_weights.astype(np.float32)


def loss(x, weight, targets, label_weights, **options):
    return linear_softmax_cross_entropy(x, weight, targets, label_weights=label_weights, **options).loss


def gradients(**options):
    """A function of the arguments: gradients of `loss` by x, weight and label_weights."""
    return jax.grad(lambda *args: loss(*args, **options), (0, 1, 3))


def check(arguments, z, tile, bounds, cotangent=1.0):
    """Sums without and with differentiation, and the gradients, against the definition."""

    def scaled(x, weight, targets, label_weights):
        sums = linear_softmax_cross_entropy(
            x, weight, targets, label_weights=label_weights, z_loss=z, tile=tile
        )
        return cotangent * sums.loss, sums

    (_, sums), got = jax.jit(jax.value_and_grad(scaled, (0, 1, 3), has_aux=True))(*arguments)
    expected, want = definition(*arguments, z)
    for one in (sums, jax.jit(scaled)(*arguments)[1]):
        np.testing.assert_allclose(one, expected, rtol=LOSS, atol=0)
    x, weight, _, label_weights = arguments
    for i, (name, primal) in enumerate({"dx": x, "dweight": weight, "dlabel_weights": label_weights}.items()):
        assert got[i].dtype == primal.dtype and got[i].shape == primal.shape, name
        ratio = rms_ratio(cotangent * want[i], got[i])
        assert ratio <= bounds[i], f"{name}: {ratio:.2e}, allowed {bounds[i]:.1e}"


@pytest.mark.parametrize("tile, z", [(16, 0.0), (16, 1e-2), (25, 1e-2), (T, 0.0), (None, 1e-2)])
def test_float32_is_the_definition(tile, z):
    """Tiles that do not divide the tokens, that do, and one tile."""
    check(inputs(), z, tile, (GRADIENTS,) * 3, cotangent=-0.3)


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cotangent", [1.0, -0.3])
def test_bfloat16_rounds_the_cotangent_once(weight_dtype, cotangent):
    scaled = cotangent != 1
    roundings = 2 + scaled, 1 if weight_dtype == "float32" else 2 + scaled
    bounds = [*(math.sqrt(n) * ROUNDING for n in roundings), GRADIENTS]
    check(inputs("bfloat16", weight_dtype), 1e-2, 16, bounds, cotangent)


def test_finite_differences():
    """The derivative along a random direction in float64 is that of central differences."""
    with jax.enable_x64(True):
        x, weight, targets, label_weights = inputs("float64", "float64")
        rng = np.random.default_rng(1)
        primals = (x, weight, label_weights.astype(np.float64))
        weighted = label_weights > 0  # the loss of an impossible target has no derivative
        direction = [rng.standard_normal(p.shape) for p in primals]
        direction[2] *= weighted

        @jax.jit
        def along(s):
            x, weight, a = (p + s * d for p, d in zip(primals, direction, strict=True))
            return loss(x, weight, jnp.asarray(targets), a, z_loss=1e-2, tile=16)

        h = 1e-5
        difference = (float(along(h)) - float(along(-h))) / (2 * h)
        derivative = jax.jit(jax.grad(along))(0.0)
        assert derivative.dtype == np.float64
        # The loss is a few hundred: its rounding over h is 1e-8, its third derivative times h^2 about as much.
        np.testing.assert_allclose(derivative, difference, rtol=0, atol=1e-6)


def shapes(text):
    """Dimensions of all arrays of a StableHLO program."""
    return {tuple(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+)", text)}


@pytest.mark.parametrize("differentiated", [False, True])
def test_no_more_than_a_tile_of_logits(differentiated):
    """No array of the program has more entries than a tile of logits, but for arguments and gradients."""

    def largest(tile):
        f = gradients(tile=tile) if differentiated else lambda *args: loss(*args, tile=tile)
        found = shapes(jax.jit(f).lower(*inputs()).as_text())
        return max(math.prod(dims) for dims in found if V in dims and dims != (V, D))

    assert largest(32) == 32 * V
    assert largest(T) == T * V


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products(dtype):
    """One product without differentiation, three with it; their operands have x's dtype, their sums are float32."""
    for f, count in ((loss, 1), (gradients(tile=16), 3)):
        text = jax.jit(f).lower(*inputs(dtype)).as_text()
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(products) == count
        short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        for line in products:
            types = re.findall(r"tensor<(?:\d+x)+(\w+)>", line)
            assert types == [short, short, "f32"], line
            assert ("HIGHEST" in line) == (dtype == "float32"), line


def test_checkpoint_and_repeats_give_the_same_bits():
    """A second call, another compilation, and the same under jax.checkpoint."""
    arguments = inputs()
    once = jax.jit(gradients(tile=16))
    checkpointed = jax.grad(jax.checkpoint(lambda *args: loss(*args, tile=16)), (0, 1, 3))
    first = once(*arguments)
    for call in (once, jax.jit(gradients(tile=16)), jax.jit(checkpointed)):
        jax.tree.map(np.testing.assert_array_equal, first, call(*arguments))


def test_vmap_is_one_call_a_row():
    x, weight, targets, label_weights = inputs()
    f = gradients(tile=16)
    got = jax.device_get(jax.jit(jax.vmap(f, (0, None, 0, 0)))(x, weight, targets, label_weights))
    alone = jax.jit(f)
    for i in range(SHAPE[0]):
        for a, b in zip(got, alone(x[i], weight, targets[i], label_weights[i]), strict=True):
            assert rms_ratio(b, a[i]) <= GRADIENTS


def test_zero_weight_leaves_a_token_out():
    """Whatever its target is, the bits are the same; with a weight, an impossible target gives NaN."""
    x, weight, targets, label_weights = inputs()
    call = jax.jit(jax.value_and_grad(loss, (0, 1)))
    first = call(x, weight, targets, label_weights)
    others = np.where(label_weights == 0, 5, targets).astype(np.int32)
    jax.tree.map(np.testing.assert_array_equal, first, call(x, weight, others, label_weights))
    assert np.isfinite(first[0]) and (np.asarray(first[1][0])[label_weights == 0] == 0).all()
    nats, _ = call(x, weight, targets, np.ones_like(label_weights))
    assert np.isnan(nats)


def test_only_loss_and_weight_carry_gradients():
    x, weight, targets, label_weights = inputs()

    def field(name):
        def f(x, weight, a):
            options = {"label_weights": a, "z_loss": 0.1, "tile": 16}
            return getattr(linear_softmax_cross_entropy(x, weight, jnp.asarray(targets), **options), name)

        return jax.device_get(jax.jit(jax.grad(f, (0, 1, 2)))(x, weight, label_weights))

    for name in ("z_loss", "correct", "weight"):
        dx, dweight, da = field(name)
        assert not dx.any() and not dweight.any()
        assert (da == (name == "weight")).all()


def test_first_of_equal_logits_is_the_prediction():
    x, weight = np.zeros((4, D), np.float32), np.ones((V, D), np.float32)
    sums = jax.device_get(jax.jit(linear_softmax_cross_entropy)(x, weight, np.array([0, 1, 0, 96])))
    assert sums.correct == 2 and sums.weight == 4


def test_no_tokens():
    def loss(x, weight):
        return linear_softmax_cross_entropy(x, weight, jnp.zeros(0, int)).loss

    x, weight = np.zeros((0, D), np.float32), np.ones((V, D), np.float32)
    sums, (dx, dweight) = jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1)))(x, weight))
    assert sums == 0 and dx.shape == (0, D) and not dweight.any()


def test_default_tile():
    for vocab_size in (97, 256, 32768, 65536):
        tile = default_tile(vocab_size)
        assert tile.bit_count() == 1 and tile * vocab_size <= TILE_LOGITS < 2 * tile * vocab_size
    for vocab_size in (131_072, 151_936, 248_320):
        assert default_tile(vocab_size) == TILE_TOKENS
    assert default_tile(2**20) == 512  # with 2^29 logits
    assert default_tile(2**29) == default_tile(2**30) == 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": np.zeros((), np.float32)}, "x: expected an array [.., D], got ()"),
        ({"x": np.zeros((*SHAPE, D), int)}, "x: expected dtype"),
        (
            {"weight": np.zeros((V, D + 1), np.float32)},
            "weight: expected shape [V, D] = [?, 24], got [97, 25]",
        ),
        ({"weight": np.zeros((V, D), int)}, "weight: expected dtype"),
        ({"weight": np.zeros((0, D), np.float32)}, "weight: expected at least one row, got 0"),
        ({"targets": np.zeros((3, 24), int)}, "targets: expected shape [..] = [3, 25], got [3, 24]"),
        ({"targets": np.zeros(SHAPE, np.float32)}, "targets: expected an integer dtype, got float32"),
        ({"label_weights": np.zeros(3, np.float32)}, "label_weights: expected shape [..] = [3, 25], got [3]"),
        ({"label_weights": np.zeros(SHAPE, bool)}, "label_weights: expected dtype"),
        ({"z_loss": -1.0}, "z_loss: expected a finite number >= 0, got -1.0"),
        ({"z_loss": math.nan}, "z_loss: expected a finite number >= 0, got nan"),
        ({"tile": 0}, "tile: expected a whole number of tokens >= 1, got 0"),
        ({"tile": 2.0}, "tile: expected a whole number of tokens >= 1, got 2.0"),
    ],
)
def test_errors(change, message, no_type_checks):
    x, weight, targets, label_weights = inputs()
    arguments = {"x": x, "weight": weight, "targets": targets, "label_weights": label_weights} | change
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        linear_softmax_cross_entropy(**arguments)


def test_float16_is_refused():
    x, weight, targets, _ = map(jnp.asarray, inputs("float16"))
    with pytest.raises(NotImplementedError, match=r"^x: float16"):
        linear_softmax_cross_entropy(x, weight, targets)
