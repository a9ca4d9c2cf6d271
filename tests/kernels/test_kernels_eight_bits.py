"""The kernels of 8-bit operands, interpreted and on a GPU, and the products and the SwiGLU that take them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from flax import nnx
from fused_harness import draws
from jax.custom_derivatives import SymbolicZero
from layer_kernels import INTERPRET, interpret, plain_kernels
from tolerances import rms_ratio

from gdn_jax.layers import GatedDeltaNet
from gdn_jax.layers.blocks import RMSNorm
from gdn_jax.models import ModelConfig
from gdn_jax.models.block import make_block
from gdn_jax.parts import eight_bits as fused_eight_bits
from gdn_jax.parts import mixer, products
from gdn_jax.parts.eight_bits import scale_of_norm
from gdn_jax.parts.norms import GatedNorm, plain_gated_norm
from gdn_jax.parts.products import (
    PRODUCTS,
    Addend,
    cotangent_operand,
    counting,
    operand,
    rounded,
    sample,
    scale_of_sample,
    times,
)
from gdn_jax.parts.swiglu import _branches, gated, swiglu
from pallas_kernels.layer import eight_bits, gated_norm_eight_bits, norm, norm_eight_bits, swiglu_eight_bits

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
    """Large numbers saturate, NaN and infinite ones are NaN, and all of them count; every bit is as JAX rounds."""
    rows, how = way
    x = draws(1)(rows, 128, dtype="bfloat16", scale=300)
    x = x.at[70, 100].set(1e5).at[3, 5].set(-1e5).at[100, 2].set(jnp.nan).at[-1, 127].set(jnp.inf)
    most, wide = float(jnp.finfo(dtype).max), x.astype(jnp.float32) * 2
    want = jnp.where(jnp.isfinite(x), jnp.clip(wide, -most, most), jnp.nan).astype(dtype)
    got = eight_bits.eight_bits(x, put(2, "float32"), dtype, interpret=how)
    check(got, want)
    assert np.isnan(np.asarray(want, np.float32)).sum() == 2
    assert float(got[2]) == np.sum(~(np.abs(np.asarray(wide)) <= most)) >= 4


def test_swiglu_in_eight_bits(way):
    draw, (rows, how) = draws(2), way
    ab, dh = draw(rows, 256, dtype="bfloat16"), draw(rows, 128, dtype="bfloat16")
    h, back = jax.vjp(lambda ab: gated(*_branches(ab)), ab)
    for got, want, dtype in (
        (swiglu_eight_bits.swiglu(ab, put(4, "float32"), DTYPES[0], interpret=how), h, DTYPES[0]),
        (
            swiglu_eight_bits.swiglu_backward(ab, dh, put(4, "float32"), DTYPES[1], interpret=how),
            back(dh)[0],
            DTYPES[1],
        ),
    ):
        want = (want.astype(jnp.float32) * 4).astype(dtype)
        assert (codes(got[0]) != codes(want)).mean() < 1e-3  # sigmoids differ in their last bits
        np.testing.assert_array_equal(codes(got[1]), codes(by_columns(got[0])))
        assert float(got[2]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("has_y", [True, False], ids=["sum", "alone"])
def test_norm_in_eight_bits(has_y, way):
    """Every bit is that of the norm's kernels and of `eight_bits` behind them."""
    draw, (N, how), D = draws(5), way, 256
    x, ds, dn = draw(N, D), draw(N, D), draw(N, D, dtype="bfloat16")
    y = draw(N, D, dtype="bfloat16") if has_y else None
    ds = ds.at[70, 100].set(jnp.nan) if has_y else None
    options = dict(eps=1e-5, dtype=jnp.bfloat16, interpret=how)
    *results, made = norm_eight_bits.add_norm_eight_bits(x, y, **options, scale=8.0, codes=DTYPES[0])
    *expected, factors = norm.add_norm(x, y, None, **options, keep=True)
    for got, want in zip(results, (*expected, factors), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    n, scale = expected[1], put(4, "float32")
    check(made, eight_bits.eight_bits(n, put(8, "float32"), DTYPES[0], interpret=how)[0])
    options = dict(x_dtype=jnp.float32, interpret=how)
    dx, made = norm_eight_bits.add_norm_eight_bits_backward(
        n, factors, ds, dn, scale, codes=DTYPES[1], **options
    )
    like, dy, _ = norm.add_norm_backward(
        n, None, ds, dn, eps=1e-5, y_dtype=jnp.bfloat16, factors=factors, **options
    )
    np.testing.assert_array_equal(np.asarray(dx), np.asarray(like))
    *want, saturated = eight_bits.eight_bits(dy, scale, DTYPES[1], interpret=how)
    check(made, want[0])
    assert float(made[2]) == float(saturated) == int(has_y)  # the NaN


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm_in_eight_bits(activation, way):
    draw, (N, how), H, V = draws(6), way, 2, 128
    o, z, w = draw(N, H * V, dtype="bfloat16"), draw(N, 384 + H * V, dtype="bfloat16"), draw(V)
    options, scale = dict(eps=1e-5, activation=activation), put(16, "float32")
    got = gated_norm_eight_bits.gated_norm_eight_bits(o, z, w, scale, DTYPES[0], **options, interpret=how)
    heads, gates = o.reshape(N, H, V), z[:, 384:].reshape(N, H, V)
    y = plain_gated_norm(GatedNorm(**options), heads, gates, w, None).reshape(N, -1)
    want = (y.astype(jnp.float32) * scale).astype(DTYPES[0])
    assert (codes(got[0]) != codes(want)).mean() < 1e-3  # sums and sigmoids differ in their last bits
    np.testing.assert_array_equal(codes(got[1]), codes(by_columns(got[0])))


def test_the_scale_of_a_norm():
    """No number of a norm of D channels is larger than the root of D."""
    assert scale_of_norm(1024, "float8_e4m3fn") == 8  # 448 / 32 is 14
    assert scale_of_norm(256, "float8_e4m3fn") == 16  # 28


def test_refusals():
    check_supported, shape = eight_bits.check_supported, jax.ShapeDtypeStruct
    assert check_supported(shape((128, 192), jnp.bfloat16)) is None
    assert "float32; the kernel takes" in check_supported(shape((128, 64), jnp.float32))
    for sizes in ((96, 64), (128, 96), (0, 64)):
        assert "multiples of 64 tokens and 64 columns" in check_supported(shape(sizes, jnp.bfloat16))
    check_supported = norm_eight_bits.check_supported
    assert check_supported(shape((1, 64, 1024), jnp.float32), jnp.bfloat16) is None
    assert "the norm is float32" in check_supported(shape((64, 1024), jnp.float32), jnp.float32)
    assert "rows of 2048" in check_supported(shape((64, 2048), jnp.float32), jnp.bfloat16)
    assert "96 rows" in check_supported(shape((96, 1024), jnp.float32), jnp.bfloat16)
    check_supported = gated_norm_eight_bits.check_supported
    assert check_supported(shape((2, 32, 8, 128), jnp.bfloat16)) is None
    assert "V = 64" in check_supported(shape((2, 32, 8, 64), jnp.bfloat16))
    assert "31 tokens" in check_supported(shape((1, 31, 8, 128), jnp.bfloat16))
    assert "float32" in check_supported(shape((2, 32, 8, 128), jnp.float32))


@pytest.mark.parametrize("given", ["array", "codes", "both"])
def test_cotangents_of_an_addend(given, monkeypatch):
    """Of the array, of the zeros that stand for its 8 bits, or of both, for a reader that knows of no zeros."""
    interpret(monkeypatch)
    dy, policy = draws(7)(64, 64, dtype="bfloat16"), PRODUCTS["float8"]
    made = operand(dy, policy.cotangents, True)
    zeros = jax.tree.map(lambda x: SymbolicZero(jax.typeof(x)), Addend(dy, made))
    cotangent = {"array": zeros._replace(value=dy), "codes": zeros._replace(cotangent=made)}
    got = cotangent_operand(policy, cotangent.get(given, Addend(dy, made)))
    if given == "both":  # two roundings to E5M2, of at most 2^-3 each
        both = np.asarray(dy, np.float64) + np.asarray(made.rows, np.float64) / float(made.scale)
        assert rms_ratio(both, np.asarray(got.rows, np.float64) / float(got.scale)) < 2**-3
    else:
        np.testing.assert_array_equal(codes(got.rows), codes(made.rows))
        np.testing.assert_array_equal(codes(got.columns), codes(made.columns))


@pytest.mark.slow
def test_blocks_whose_operands_norms_make(monkeypatch):
    """A block twice: results and gradients have the bits that they have where a kernel makes every operand, with the
    same scales."""
    config = ModelConfig(
        hidden_size=128,
        num_heads=8,
        head_dim=128,
        expand_v=1.0,
        intermediate_size=64,
        dtype="bfloat16",
        matmul="float8",
    )
    block, norm = make_block(config, 0, rngs=nnx.Rngs(0)), RMSNorm(128, dtype=jnp.bfloat16)
    graphdef, state = nnx.split(block)
    x, dn = draws(8)(1, 64, 128), draws(9)(1, 64, 128, dtype="bfloat16")

    def rule(q, k, v, g, beta, *, segment_ids):
        return v + q * k * beta[..., None].astype(v.dtype), None

    def run(x, state):
        block, y = nnx.merge(graphdef, state), None
        for _ in range(2):
            x, y, _ = block(x, y)
        return norm.add(x, y)[1]

    def gated_norm(policy, options, o, channels, weight):  # sums of the kernel differ in their last bits
        gates = channels[..., -o.shape[2] * o.shape[3] :].reshape(o.shape)
        y = plain_gated_norm(options, o, gates, weight, None)
        return operand(y.reshape(-1, o.shape[2] * o.shape[3]), policy.operands, True)

    calls = interpret(monkeypatch)
    plain_kernels(monkeypatch)
    monkeypatch.setattr(mixer, "gated_norm", gated_norm)
    monkeypatch.setattr(GatedDeltaNet, "_rule", lambda _: rule)
    for module in ("parts.swiglu", "layers.blocks"):
        monkeypatch.setattr(f"gdn_jax.{module}.FEW_ROWS", 0)
    own = products._scale
    monkeypatch.setattr(fused_eight_bits, "scale_of_norm", lambda *_: 64.0)
    monkeypatch.setattr(
        products,
        "_scale",
        lambda x, t, room: put(64, "float32") if t == jnp.float8_e4m3fn else own(x, t, room),
    )

    def both():
        calls.clear()
        n, back = jax.vjp(run, x, state)
        return jax.tree.leaves((n, back(dn)))

    got = both()
    assert calls["add_norm_eight_bits"] == 4 and calls["add_norm_eight_bits_backward"] == 3
    # Of the cotangents of channels, of gated norms, and of what was added before the last norm.
    assert calls["eight_bits"] == 5
    monkeypatch.setattr(fused_eight_bits, "takes", lambda *_: False)
    for y, want in zip(got, both(), strict=True):
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(want, np.float32))
    assert calls["eight_bits"] == 12 and not calls["add_norm_eight_bits"]


def test_a_scale_by_some_tokens():
    """One in 16 of many tokens makes the scale, with room for larger numbers; what has none is cut."""
    x = draws(3)(2**15, 2)
    x = x.at[::16].set(jnp.clip(x[::16], -1, 1)).at[16, 1].set(1.0)
    x = x.at[1, 0].set(7.0).at[2, 0].set(-100.0).at[3, 0].set(jnp.inf)
    assert sample(x).shape == (2048, 2)
    assert scale_of_sample(sample(x), len(x), "float8_e4m3fn") == 2.0**5  # 448 / 1 is 2^8 and more
    x8 = operand(x, "float8_e4m3fn", False)
    assert float(x8.saturated) == 2  # the large number, and the infinite one
    np.testing.assert_array_equal(codes(x8.columns), codes(x8.rows.T))
    assert [float(y) for y in x8.rows[1:3, 0]] == [7 * 32, -448]
    assert np.isnan(float(x8.rows[3, 0])) and np.isfinite(np.asarray(x8.rows[4:], np.float32)).all()
    few = x[:4095]
    few = few.at[3, 0].set(0.0)
    assert scale_of_sample(sample(few), len(few), "float8_e4m3fn") == rounded(few, "float8_e4m3fn").scale


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_outliers_outside_the_sample_are_counted(kernels, monkeypatch):
    """A token at a place that no sample has, of which 16 numbers of h are 500 times as large as all others: they
    saturate, and so do some of the branches' cotangents there. The derivative by the argument of `counting` says how
    many."""
    monkeypatch.setattr(products, "SAMPLE", 4)  # as of 32 thousand tokens
    rng, out, D, F = np.random.default_rng(3), 16 + 5, 64, 64
    x, w = rng.standard_normal((128, D)), 0.1 * rng.standard_normal((3, D, F))
    direction = x[out] / np.linalg.norm(x[out])
    aligned = x - (x @ direction)[:, None] * direction
    aligned[out] = x[out]
    along = 22 * direction / np.linalg.norm(x[out])
    w[:2, :, :16] = (w[:2, :, :16] - direction[:, None] * (direction @ w[:2, :, :16])[:, None]) + along[
        :, None
    ]
    ordinary = np.where(np.arange(128)[:, None] == out, aligned[0], aligned)
    if kernels:
        monkeypatch.setattr("gdn_jax.parts.swiglu.FEW_ROWS", 0)
        calls = interpret(monkeypatch)

    def f(zero, x, *w):
        with counting(zero):
            y = swiglu(x, *w, product=PRODUCTS["float8"], implementation=None if kernels else "chunked")
        return jnp.sum(y.astype(jnp.float32))

    step = jax.grad(f) if kernels else jax.jit(jax.grad(f))
    weights = [put(y, jnp.bfloat16) for y in w]
    h = np.abs(np.asarray(gated(*(put(aligned @ y) for y in w[:2]))))
    assert (h[out, :16] > 400).all() and np.delete(h, out, 0).max() < 8
    counts = [float(step(put(0, "float32"), put(x, jnp.bfloat16), *weights)) for x in (aligned, ordinary)]
    assert 16 < counts[0] <= 16 + 2 * 16 and counts[1] == 0
    if kernels:
        assert calls["swiglu"] == calls["swiglu_backward"] == 2


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
        monkeypatch.setattr("gdn_jax.parts.swiglu.FEW_ROWS", 0)
        g = jax.vjp(lambda x, *w: swiglu(x, *w, product=product), x, *weights)
        return jax.tree.leaves((f[0], f[1](dy), g[0], g[1](x)))

    plain = both(x, w, weights)
    calls = interpret(monkeypatch)
    kernels = both(x, w, weights)
    assert calls == {"eight_bits": 4, "swiglu": 1, "swiglu_backward": 1}
    for got, want in zip(kernels, plain, strict=True):
        assert rms_ratio(np.asarray(want, np.float32), np.asarray(got, np.float32)) < 6e-3
