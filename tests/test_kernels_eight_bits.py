"""The kernels of 8-bit operands, interpreted and on a GPU, and the products and the SwiGLU that take them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_harness import draws
from layer_kernels import INTERPRET, interpret
from tolerances import rms_ratio

from gdn_jax.fused.swiglu import _branches, gated, swiglu
from gdn_jax.products import PRODUCTS, operand, rounded, sample, scale_of_sample, times
from pallas_kernels.layer import eight_bits, swiglu_eight_bits

DTYPES = ("float8_e4m3fn", "float8_e5m2")


def codes(x):
    return np.asarray(x).view(np.uint8)


def by_columns(rows):
    """What a kernel writes beside rows [T, D]: columns, with each 64 tokens in its own order."""
    T, D = rows.shape
    return np.asarray(rows).reshape(T // 64, 8, 4, 2, D).swapaxes(1, 2).reshape(T, D).T


def check(got, want):
    np.testing.assert_array_equal(codes(got[0]), codes(want))
    np.testing.assert_array_equal(codes(got[1]), codes(by_columns(want)))


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def way(request, monkeypatch):
    """Rows of an array, and how a kernel runs on it: every CTA walks over several tiles."""
    if request.param == "gpu":
        return 1 << 16, None
    monkeypatch.setattr(eight_bits.r, "num_ctas", lambda tiles, _: min(tiles, 2))
    return 192, INTERPRET


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits(dtype, way):
    """Large numbers are cut, NaN and infinite ones are NaN; every bit is as JAX rounds."""
    rows, how = way
    x = draws(1)(rows, 128, dtype="bfloat16", scale=300)
    x = x.at[70, 100].set(1e5).at[3, 5].set(-1e5).at[100, 2].set(jnp.nan).at[-1, 127].set(jnp.inf)
    most, wide = float(jnp.finfo(dtype).max), x.astype(jnp.float32) * 2
    want = jnp.where(jnp.isfinite(x), jnp.clip(wide, -most, most), jnp.nan).astype(dtype)
    check(eight_bits.eight_bits(x, jnp.float32(2), dtype, interpret=how), want)
    assert np.isnan(np.asarray(want, np.float32)).sum() == 2


def test_swiglu_in_eight_bits(way):
    draw, (rows, how) = draws(2), way
    ab, dh = draw(rows, 256, dtype="bfloat16"), draw(rows, 128, dtype="bfloat16")
    h, back = jax.vjp(lambda ab: gated(*_branches(ab)), ab)
    for got, want, dtype in (
        (swiglu_eight_bits.swiglu(ab, jnp.float32(4), DTYPES[0], interpret=how), h, DTYPES[0]),
        (
            swiglu_eight_bits.swiglu_backward(ab, dh, jnp.float32(4), DTYPES[1], interpret=how),
            back(dh)[0],
            DTYPES[1],
        ),
    ):
        want = (want.astype(jnp.float32) * 4).astype(dtype)
        assert (codes(got[0]) != codes(want)).mean() < 1e-3  # sigmoids differ in their last bits
        np.testing.assert_array_equal(codes(got[1]), codes(by_columns(got[0])))


def test_refusals():
    check_supported, shape = eight_bits.check_supported, jax.ShapeDtypeStruct
    assert check_supported(shape((128, 192), jnp.bfloat16)) is None
    assert "float32; the kernel takes" in check_supported(shape((128, 64), jnp.float32))
    for sizes in ((96, 64), (128, 96), (0, 64)):
        assert "multiples of 64 tokens and 64 columns" in check_supported(shape(sizes, jnp.bfloat16))


def test_a_scale_by_some_tokens():
    """One in 16 of many tokens makes the scale, with room for larger numbers; what has none is cut."""
    x = draws(3)(2**15, 2)
    x = x.at[::16].set(jnp.clip(x[::16], -1, 1)).at[16, 1].set(1.0)
    x = x.at[1, 0].set(7.0).at[2, 0].set(-100.0).at[3, 0].set(jnp.inf)
    assert sample(x).shape == (2048, 2)
    assert scale_of_sample(sample(x), len(x), "float8_e4m3fn") == 2.0**5  # 448 / 1 is 2^8 and more
    x8 = operand(x, "float8_e4m3fn", False)
    np.testing.assert_array_equal(codes(x8.columns), codes(x8.rows.T))
    assert [float(y) for y in x8.rows[1:3, 0]] == [7 * 32, -448]
    assert np.isnan(float(x8.rows[3, 0])) and np.isfinite(np.asarray(x8.rows[4:], np.float32)).all()
    few = x[:4095]
    few = few.at[3, 0].set(0.0)
    assert scale_of_sample(sample(few), len(few), "float8_e4m3fn") == rounded(few, "float8_e4m3fn").scale


@pytest.mark.slow
def test_products_and_swiglu_by_kernels(monkeypatch):
    """As without kernels, but for the order of sums and h, whose sigmoid differs in its last bits."""
    draw, F = draws(4), 48
    x, w, dy = (
        draw(2, 64, 64, dtype="bfloat16"),
        draw(64, 128, dtype="bfloat16"),
        draw(2, 64, 128, dtype="bfloat16"),
    )
    weights = tuple(draw(*s, dtype="bfloat16", scale=0.1) for s in ((64, F), (64, F), (F, 64)))
    product = PRODUCTS["float8"]

    def both(x, w, weights):
        f = jax.vjp(lambda x, w: times(product, x, w), x, w)
        # More rows than that would be slow here.
        monkeypatch.setattr("gdn_jax.fused.swiglu.FEW_ROWS", 0)
        g = jax.vjp(lambda x, *w: swiglu(x, *w, product=product), x, *weights)
        return jax.tree.leaves((f[0], f[1](dy), g[0], g[1](x)))

    plain = both(x, w, weights)
    calls = interpret(monkeypatch)
    kernels = both(x, w, weights)
    assert calls == {"eight_bits": 4, "swiglu": 1, "swiglu_backward": 1}
    for got, want in zip(kernels, plain, strict=True):
        assert rms_ratio(np.asarray(want, np.float32), np.asarray(got, np.float32)) < 6e-3
