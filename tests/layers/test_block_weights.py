"""Weights that are kept in 8 bits with scales of blocks: what they mean, products by them, and no derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from flax import nnx
from small_layers import drawn

from gdn_jax.hf import float8
from gdn_jax.layers.block_weights import BlockLinear, BlockSwiGLU
from gdn_jax.layers.blocks import SwiGLU, set_product
from gdn_jax.parts import block_weights
from gdn_jax.parts.products import PLAIN


def weight(*shape, seed=0):
    """Numbers whose size differs by block, one of the blocks zero."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(shape).astype(np.float32)
    numbers *= np.exp2(np.arange(shape[-2]) // 128 - 3.0).astype(np.float32)[:, None]
    numbers[..., 128:, 128:] = 0
    return numbers


@pytest.mark.parametrize("shape", [(200, 300), (128, 256), (3, 7), (2, 130, 129)])
def test_codes_and_scales_are_those_that_are_written(shape):
    """By NumPy, for each of several matrices; ragged blocks too."""
    numbers = weight(*shape)
    codes, scales = map(np.asarray, jax.jit(block_weights.quantised)(numbers))
    assert codes.dtype == jnp.float8_e4m3fn and scales.dtype == np.float32
    for matrix, c, s in zip(*(x.reshape(-1, *x.shape[-2:]) for x in (numbers, codes, scales)), strict=True):
        of_blocks = float8.block_scales(matrix, float8.BLOCK).astype(np.float32)
        np.testing.assert_array_equal(s, np.repeat(of_blocks, 128, 0)[: len(matrix)])
        np.testing.assert_array_equal(
            c.astype(np.float32), float8.quantized(matrix, float8.BLOCK).astype(np.float32)
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_the_dequantised_weight(dtype):
    """In both forms, of one row and of several; sums of 300 products in float32 are off by some roundings of 2^-24,
    and results, and the weight in one form, are rounded to bfloat16."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 300)).astype(dtype)

    @jax.jit
    def results(x, numbers):
        codes, scales = block_weights.quantised(numbers)
        forms = block_weights.product, block_weights.by_sums, block_weights.by_whole_weight
        ys = [form(rows, codes, scales) for form in forms for rows in (x, x[:1, None])]
        return ys, block_weights.dequantised(codes, scales, jnp.float32), codes, scales

    ys, *kept = results(x, weight(200, 300))
    whole, codes, scales = map(np.asarray, kept)
    np.testing.assert_array_equal(whole, codes.astype(np.float32) * np.repeat(scales, 128, 1)[:, :300])
    want = x.astype(np.float64) @ whole.astype(np.float64).T
    size = np.abs(x.astype(np.float64)) @ np.abs(whole.astype(np.float64)).T
    step = 2.0**-24 * 300**0.5 if dtype == "float32" else 2.0**-8
    for y in map(np.asarray, ys):
        assert y.dtype == x.dtype and y.shape in ((3, 200), (1, 1, 200))
        rows = y.reshape(-1, 200)
        assert np.all(np.abs(rows - want[: len(rows)]) <= 2 * step * size[: len(rows)])


def test_a_gpu_reads_codes_and_dequantises_no_weight_of_few_rows():
    """Its program has no product of matrices for up to four rows, and one for five."""
    codes = jax.ShapeDtypeStruct((256, 384), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((256, 3), jnp.float32)
    for rows in (1, 4, 5):
        x = jax.ShapeDtypeStruct((rows, 384), jnp.bfloat16)
        traced = jax.jit(block_weights.product).trace(x, codes, scales)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("dot_general" in program) == (rows > block_weights.FEW)
        assert "dot_general" in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_gradients_reach_activations_and_no_weight():
    linear = drawn(lambda rngs: BlockLinear(nnx.Linear(40, 30, rngs=rngs)))
    x = put(np.random.default_rng(2).standard_normal((2, 40)).astype(np.float32))
    graphdef, state = nnx.split(linear)

    def total(x, state):
        return jnp.sum(nnx.merge(graphdef, state)(x) ** 2)

    @jax.jit
    def both(x, state):
        kernel = nnx.merge(graphdef, state).kernel
        return jax.grad(total)(x, state), jax.grad(lambda x: jnp.sum((x @ kernel) ** 2))(x)

    got, want = both(x, state)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="weights that are kept in 8 bits have no derivative"):
        jax.grad(total, 1, allow_int=True)(x, state)


def test_a_projection_and_a_swiglu():
    """A bias is kept; of few and of many rows the results are those of the dequantised weights; nobody gives such
    projections another product."""

    def make(rngs):
        return nnx.Linear(24, 40, rngs=rngs, bias_init=lambda _, n, dtype: jnp.arange(n[0], dtype=dtype))

    plain, linear = drawn(make), drawn(lambda rngs: BlockLinear(make(rngs)))
    kept, product = drawn(lambda rngs: BlockSwiGLU(SwiGLU(24, 40, rngs=rngs))), linear.dot_general
    set_product(kept, PLAIN)
    set_product(linear, PLAIN)
    assert linear.dot_general is kept.gate_proj.dot_general is product is not PLAIN
    rows = np.random.default_rng(4).standard_normal((300, 24)).astype(np.float32)

    @jax.jit
    def results(x):
        gate, up, down = (p.kernel for p in (kept.gate_proj, kept.up_proj, kept.down_proj))
        swiglu = (jax.nn.silu(x @ gate) * (x @ up)) @ down
        y = linear(x), x @ linear.kernel + plain.bias[...], plain(x)
        return *y, kept(x), swiglu, kept(x[:1]), kept(x[:4])

    y, y_want, rounded_not, z, z_want, one, few = map(np.asarray, results(rows))
    np.testing.assert_allclose(y, y_want, rtol=1e-5, atol=1e-5)
    for found, n in ((z, 300), (one, 1), (few, 4)):
        np.testing.assert_allclose(found, z_want[:n], rtol=1e-4, atol=1e-5)
    assert 1e-3 < np.max(np.abs(y - rounded_not)) < 1
