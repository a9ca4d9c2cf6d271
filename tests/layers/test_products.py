"""Products of operands in 8 bits: their rounding, their gradients, what a GPU is given, and who multiplies so."""

import re
from functools import partial

import fused_harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from fused_harness import draws
from layer_kernels import joining_layer, plain_kernels
from small_layers import drawn
from small_models import made
from tolerances import rms_ratio

from gdn_jax.layers import GatedDeltaNet, blocks
from gdn_jax.layers.blocks import SwiGLU
from gdn_jax.models import ModelConfig
from gdn_jax.models.inference.program import for_inference
from gdn_jax.models.lora import add_lora
from gdn_jax.parts import mixer, products
from gdn_jax.parts.products import PLAIN, PRODUCTS, Float8, counting, rounded, times
from pallas_kernels.device import launch

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
F8_DOT = re.compile(r"stablehlo\.dot_general.*: \(tensor<\S*xf8E\w+>, tensor<\S*xf8E\w+>\)")


def numbers(x, dtype):
    """An array as 8 bits hold it, by NumPy in float64."""
    x = np.asarray(x, np.float64)
    scale = 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max) / np.abs(x).max()))
    return (x * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


@pytest.mark.parametrize("name, cotangents", [("float8", E5M2), ("float8_e4m3", E4M3)])
def test_products_and_gradients(name, cotangents):
    """Products of the rounded numbers, in both passes, and no other error than float32's; so near the exact ones as
    such numbers are."""
    draw = draws(0)
    x, w, dy = draw(2, 24, 64), draw(64, 48, scale=1e-3), draw(2, 24, 48, scale=1e5)
    y, gradients = fused_harness.compiled_vjp(lambda x, w: times(PRODUCTS[name], x, w))(dy, x, w)
    got = (y, *gradients)
    x, w, dy = map(np.asarray, (x, w, dy))
    x8, w8, dy8 = numbers(x, E4M3), numbers(w, E4M3), numbers(dy, cotangents)
    exact, want = (
        (x @ w, dy @ w.T, np.einsum("btd,btf->df", x, dy)) for x, w, dy in ((x, w, dy), (x8, w8, dy8))
    )
    # Roundings of two operands, each of at most 2^-4 (E4M3) or 2^-3 (E5M2) and 3^(-1/2) of it in the mean.
    bounds = (0.05, *(2 * [0.09 if cotangents is E5M2 else 0.05]))
    for like, mine, true, bound in zip(want, got, exact, bounds, strict=True):
        assert rms_ratio(like, mine) < 1e-6
        assert 0.01 < rms_ratio(true, mine) < bound


def test_scales():
    """Powers of two, under which the largest number is within a factor of two of what 8 bits hold."""
    x = np.asarray(draws(0)(40))
    to_e4m3 = jax.jit(lambda x: rounded(x, E4M3))
    values, scale = to_e4m3(x)
    assert np.log2(scale) == np.round(np.log2(scale))
    assert 224 < np.abs(np.asarray(values, np.float32)).max() <= 448
    for power in (-60, 30):  # the same bits, whatever the size
        same, other = to_e4m3(x * np.float32(2.0**power))
        np.testing.assert_array_equal(np.asarray(values).view(np.uint8), np.asarray(same).view(np.uint8))
        assert np.asarray(other) * 2.0**power == np.asarray(scale)
    zeros, one = jax.device_get(jax.jit(lambda x: rounded(x, E5M2))(np.zeros(3, np.float32)))
    assert one == 1 and not zeros.astype(np.float32).any()
    product = jax.jit(lambda x, w: times(Float8(), x, w))
    for number in (np.nan, -np.inf):
        spoiled = np.where(np.arange(40) == 1, np.float32(number), x)
        assert np.isnan(product(spoiled[None], np.ones((40, 8), np.float32))).all()
    tiny = product(np.full((1, 4), 1e-25, np.float32), np.full((4, 8), 1e-4, np.float32))
    np.testing.assert_allclose(tiny, 4e-29, rtol=0.1)
    half = np.asarray(product(np.full((1, 512), 2.0, np.float16), np.ones((512, 8), np.float16)))
    assert half.dtype == np.float16 and (half == 1024).all()


def test_other_products_are_refused():
    x, w = (jax.device_put(np.ones(shape, np.float32)) for shape in ((3, 4), (4, 5)))
    with pytest.raises(NotImplementedError, match="dimension_numbers: expected those of x @ w"):
        Float8()(x, w, (((1,), (1,)), ((), ())))
    with pytest.raises(NotImplementedError, match="precision: expected None"):
        Float8()(x, w, (((1,), (0,)), ((), ())), precision="highest")


def lowered(f, *args) -> str:
    """The program of f that a GPU's compiler is given."""
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def losses(module):
    graphdef, params = nnx.split(module)

    def loss(params, x):
        y = nnx.merge(graphdef, params)(x)
        return jnp.sum((y[0] if isinstance(y, tuple) else y).astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1)), params


@pytest.mark.slow
def test_a_gpu_multiplies_eight_bits(monkeypatch):
    """Of a layer by kernels, whose projections of x are one product, and of a SwiGLU, both branches of which are."""
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    x = jax.ShapeDtypeStruct((1, 512, 32), "bfloat16")
    swiglu = drawn(lambda rngs: SwiGLU(32, 64, dtype=jnp.bfloat16, rngs=rngs))
    for part, wide in ((nnx.clone(joining_layer()), "4352"), (swiglu, "128")):
        blocks.set_product(part, Float8())
        text = lowered(*(lambda f, params: (f, params, x))(*losses(part)))
        products = [line for line in text.splitlines() if F8_DOT.search(line)]
        assert len(products) == 6
        assert sum(re.search(rf"\b{wide}x|x{wide}x", line) is not None for line in products) == 3
        assert "mosaic_gpu" in text


@pytest.mark.parametrize(("reason", "count"), [("no GPU", 0), (None, 2)])
def test_weights_and_gradients_stay_by_rows(monkeypatch, reason, count):
    """Where kernels make the operands of their products, so that nothing has to be transposed for the optimiser."""
    monkeypatch.setattr(launch, "device_reason", lambda *_: reason)
    x, w, dy = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((64, 64), (64, 128), (64, 128)))
    both = jax.make_jaxpr(lambda x, w, dy: jax.vjp(partial(times, Float8()), x, w)[1](dy))(x, w, dy)
    assert str(both).count("layout_constraint[") == count


@pytest.mark.slow
def test_a_layer_by_kernels_multiplies_so(monkeypatch):
    """As its parts do: a power of two as scale makes it matter little whether weights have one together or each."""
    sizes = dict(num_heads=2, num_v_heads=4, head_dim=16)
    layer = drawn(lambda rngs: GatedDeltaNet(24, **sizes, rngs=rngs))
    blocks.set_product(layer, Float8())
    graphdef, params = nnx.split(layer)

    def run(params, x):
        return nnx.merge(graphdef, params)(x)[0]

    draw = draws(0)
    args, cotangent = (params, draw(1, 9, 24)), draw(1, 9, 24)
    expected = fused_harness.compiled_vjp(run)(cotangent, *args)
    plain_kernels(monkeypatch)
    monkeypatch.setattr(mixer, "takes", lambda *_: True)
    monkeypatch.setattr(blocks, "is_one_product", lambda *_: True)
    got = fused_harness.compiled_vjp(run)(cotangent, *args)
    for like, y in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert rms_ratio(np.asarray(like), np.asarray(y)) < 0.02


@pytest.mark.slow
def test_a_model():
    """All projections of its blocks, in both passes, and neither the output projection nor a copy for inference."""
    config = ModelConfig(num_layers=2, hidden_size=32, head_dim=16, dtype="bfloat16", matmul="float8")
    model = made(config)
    graphdef, params = nnx.split(model)
    tokens = jax.device_put(np.random.default_rng(0).integers(0, 256, (2, 16)))

    def loss(params):
        logits = nnx.merge(graphdef, params)(tokens)
        logits = logits[0] if isinstance(logits, tuple) else logits
        return jnp.mean(logits.astype(jnp.float32) ** 2)

    text = lowered(jax.grad(loss), params)
    # q, k, v, a, b, gate and output of a mixer, and three of a SwiGLU.
    assert len(F8_DOT.findall(text)) == 2 * 3 * 10
    copy = for_inference(model)
    assert copy.blocks[0].mixer.q_proj.dot_general is PLAIN
    assert model.blocks[0].mixer.q_proj.dot_general is PRODUCTS["float8"]
    add_lora(model, 2, rngs=nnx.Rngs(0))
    assert model.blocks[0].mixer.q_proj.dot_general is PRODUCTS["float8"]
    with pytest.raises(ValueError, match="matmul: expected"):
        ModelConfig(matmul="int4")


@pytest.mark.slow
def test_counts_of_a_model(monkeypatch):
    """As many numbers saturate where a block is computed twice or layers are a loop: nothing counts twice."""
    monkeypatch.setattr(products, "SAMPLE", 4)  # as of many tokens
    monkeypatch.setattr(products, "ROOM", 0)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 32))

    def count(**options):
        config = ModelConfig(
            num_layers=2, hidden_size=32, head_dim=16, dtype="float32", matmul="float8", **options
        )
        graphdef, params = nnx.split(made(config))

        @jax.jit
        @jax.grad
        def saturated(variables):
            with counting(variables[1]):
                x, _ = nnx.merge(graphdef, variables[0]).hidden_states(jnp.asarray(tokens))
            return jnp.sum(x**2)

        return float(saturated((params, np.float32(0)))[1])

    once, twice, looped = count(), count(remat="full"), count(scan_layers=True)
    assert once == twice > 0
    assert abs(once - looped) < 0.01 * once  # sums in another order
