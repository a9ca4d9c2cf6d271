"""Kernels around the rule without a GPU: right and free of races when interpreted, and used by layers and models."""

import collections
import functools
import re

import fused_harness
import fused_oracle
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fused_harness import SWIGLU_NAMES, SWIGLU_ROUNDINGS, close, draws
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax.conv import causal_conv1d
from gdn_jax.fused import embedding as fused_embedding
from gdn_jax.fused import joined as fused_joined
from gdn_jax.fused import norms as fused_norms
from gdn_jax.fused import swiglu as fused_swiglu
from gdn_jax.fused.short_conv import short_conv as fused_short_conv
from gdn_jax.layers import GatedDeltaNet
from gdn_jax.losses import linear_softmax_cross_entropy
from gdn_jax.models import LanguageModel, ModelConfig
from pallas_kernels.device import launch
from pallas_kernels.layer import (
    cross_entropy,
    embedding,
    gated_norm,
    logit_cotangents,
    norm,
    rows,
    short_conv,
    swiglu,
    swiglu_cotangents,
    swiglu_product,
    tiles,
    weight_gradient,
)

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

# Each has a piece of its own: rows of one warp with four numbers a thread side by side, and with one; rows over four
# warps, two of them at once, and one; more rows than CTAs take at once, in unequal shares.
NORMS = {
    "256": ((16, 256), "float32", "bfloat16"),
    "96, no y": ((8, 96), "float16", None),
    "2048": ((6, 2048), "float32", "float16"),
    "5120, one dtype": ((3, 5120), "bfloat16", "bfloat16"),
    "1280, no y": ((2, 1280), "bfloat16", None),
    "1024, one row": ((1, 1024), "float32", "bfloat16"),
    "many": ((40, 32), "float32", "bfloat16"),
}


@pytest.mark.parametrize("name", NORMS)
def test_add_norm(name, monkeypatch):
    """Its derivative also without a cotangent of the stream."""
    if name == "many":  # ten blocks for four CTAs
        monkeypatch.setattr(rows, "NUM_SMS", 1)
    (N, D), dtype, y_dtype = NORMS[name]
    draw = draws(D)
    x, weight = draw(N, D, dtype=dtype), draw(D)
    y = None if y_dtype is None else draw(N, D, dtype=y_dtype)
    assert norm.check_supported(x) is None
    s, n, kept = norm.add_norm(x, y, weight, eps=1e-5, dtype=jnp.bfloat16, keep=True, interpret=INTERPRET)
    expected_s, expected_n = fused_oracle.add_norm(x, y, weight)
    close(expected_n, n, "n")  # of the sum before it is rounded
    if y is None:
        assert s is x
    else:
        assert s.dtype == x.dtype
        close(expected_s, s, "s")
    assert kept.dtype == (jnp.bfloat16 if dtype == "float32" else dtype)
    np.testing.assert_array_equal(kept, s.astype(kept.dtype))
    ds, dn = None if y is None else draw(N, D, dtype=dtype), draw(N, D, dtype="bfloat16")
    dx, dy, dweight = norm.add_norm_backward(
        *(kept, weight, ds, dn),
        eps=1e-5,
        x_dtype=x.dtype,
        y_dtype=y_dtype and jnp.dtype(y_dtype),
        interpret=INTERPRET,
    )
    expected_dx, expected_dweight = fused_oracle.add_norm_gradients(kept, weight, ds, dn)
    close(expected_dx, dx, "dx")
    close(expected_dweight, dweight, "dweight")
    assert dx.dtype == x.dtype and dweight.dtype == jnp.float32
    if y is None:
        assert dy is None
    else:
        assert dy.dtype == y.dtype
        close(expected_dx, dy, "dy")


@pytest.mark.parametrize("name", NORMS)
def test_add_norm_without_a_weight(name, monkeypatch):
    """Its derivative reads the norm's result, from whose rounding dx differs by as much as from that of dn."""
    if name == "many":
        monkeypatch.setattr(rows, "NUM_SMS", 1)
    (N, D), dtype, y_dtype = NORMS[name]
    draw = draws(D)
    x = draw(N, D, dtype=dtype)
    y = None if y_dtype is None else draw(N, D, dtype=y_dtype)
    options = dict(eps=1e-5, dtype=jnp.bfloat16, keep=True, interpret=INTERPRET)
    s, n, factors = norm.add_norm(x, y, None, **options)
    weighted = norm.add_norm(x, y, jnp.ones(D), **options)
    np.testing.assert_array_equal(s, weighted[0])
    np.testing.assert_array_equal(n, weighted[1])
    expected_s, _ = fused_oracle.add_norm(x, y, np.ones(D))
    close(1 / np.sqrt((expected_s**2).mean(1) + 1e-5), factors, "factors")
    assert factors.shape == (N,) and factors.dtype == jnp.float32
    ds, dn = None if y is None else draw(N, D, dtype=dtype), draw(N, D, dtype="bfloat16")
    dx, dy, dweight = norm.add_norm_backward(
        *(n, None, ds, dn),
        eps=1e-5,
        x_dtype=x.dtype,
        y_dtype=y_dtype and jnp.dtype(y_dtype),
        factors=factors,
        interpret=INTERPRET,
    )
    expected, _ = fused_oracle.add_norm_gradients(expected_s, np.ones(D), ds, dn)
    close(expected, dx, "dx", 2, dtype="bfloat16")
    assert dx.dtype == x.dtype and dweight is None
    assert dy is None if y is None else np.array_equal(dy, dx.astype(dy.dtype))


@pytest.mark.parametrize(
    ("N", "V", "dtype"), [(64, 32, "bfloat16"), (24, 128, "float16"), (16, 256, "bfloat16")]
)
def test_gated_norm(N, V, dtype):
    draw = draws(V)
    o, z, dy = (draw(N, V, dtype=dtype) for _ in range(3))
    weight = draw(V)
    assert gated_norm.check_supported(o) is None
    y = gated_norm.gated_norm(o, z, weight, eps=1e-5, interpret=INTERPRET)
    close(fused_oracle.gated_norm(o, z, weight), y, "y")
    *got, again = gated_norm.gated_norm_backward(o, z, weight, dy, eps=1e-5, again=True, interpret=INTERPRET)
    np.testing.assert_array_equal(again, y)
    expected = fused_oracle.gated_norm_gradients(o, z, weight, dy)
    for name, a, b in zip(("do", "dz", "dweight"), expected, got, strict=True):
        close(a, b, name)
    assert [x.dtype.name for x in (y, *got)] == [dtype, dtype, dtype, "float32"]


@pytest.mark.parametrize(("N", "dtype"), [(4096, "bfloat16"), (2048, "float16")])
def test_swiglu(N, dtype):
    draw = draws(N)
    a, b, dh = (draw(N, dtype=dtype) for _ in range(3))
    assert swiglu.check_supported(a) is None
    ab = fused_swiglu.side_by_side(a, b, swiglu.GROUP)
    h = swiglu.swiglu(ab, interpret=INTERPRET)
    close(fused_oracle.branches(a, b), h, "h")
    dab = swiglu.swiglu_backward(ab, dh, interpret=INTERPRET)
    gradients = np.moveaxis(np.asarray(dab).reshape(-1, 2, swiglu.GROUP), 1, 0)
    for name, x, y in zip(("da", "db"), fused_oracle.branches_gradients(a, b, dh), gradients, strict=True):
        close(x, y.reshape(-1), name)


@pytest.mark.parametrize(
    ("sizes", "lead", "dtype"),
    [
        ((264, 64, 160), 2, "bfloat16"),
        pytest.param((8, 192, 32), 2, "float16", marks=pytest.mark.slow),
        pytest.param((136, 128, 32), 0, "bfloat16", marks=pytest.mark.slow),
    ],
    ids=["ends in tiles", "one tile", "no lead"],
)
def test_swiglu_in_its_products(sizes, lead, dtype):
    """One cluster for all tiles; rows and columns that end inside tiles; sums of one step and of several."""
    (M, D, F), draw = sizes, draws(7)
    x, dy = draw(M, D, dtype=dtype), draw(M, D, dtype=dtype)
    gate, up, down = (draw(*s, dtype=dtype, scale=D**-0.5) for s in ((D, F), (D, F), (F, D)))
    assert swiglu_product.check_supported(x, F) is swiglu_cotangents.check_supported(dy, F) is None
    config = tiles.Config(lead=lead, clusters=1)
    weight = fused_swiglu.side_by_side(gate, up, swiglu_product.GROUP)
    ab, h = swiglu_product.swiglu_product(x, weight, config=config, interpret=INTERPRET)

    def branches(ab):
        return np.moveaxis(np.asarray(ab).reshape(M, -1, 2, swiglu_product.GROUP), 2, 0).reshape(2, M, F)

    x, dy, gate, up, down = (fused_oracle.wide(y) for y in (x, dy, gate, up, down))
    a, b = branches(ab)
    for name, expected, got in (("a", x @ gate, a), ("b", x @ up, b), ("h", fused_oracle.branches(a, b), h)):
        close(expected, got, name)
    args = (jnp.asarray(y, dtype) for y in (dy, down))
    dab = swiglu_cotangents.swiglu_cotangents(*args, ab, config=config, interpret=INTERPRET)
    gradients = fused_oracle.branches_gradients(a, b, dy @ down.T)
    for name, expected, got in zip(("da", "db"), gradients, branches(dab), strict=True):
        close(expected, got, name)


@pytest.mark.parametrize(
    ("sizes", "parts", "dtype"),
    [
        ((136, 192, 64), 2, "bfloat16"),
        pytest.param((328, 320, 320), 3, "float16", marks=pytest.mark.slow),
    ],
    ids=["two parts", "three parts"],
)
def test_weight_gradient(sizes, parts, dtype):
    """Rows that end inside a step, the last part shorter than the first; channels that end inside tiles."""
    (T, M, N), draw = sizes, draws(8)
    x, dy = draw(T, M, dtype=dtype), draw(T, N, dtype=dtype)
    assert weight_gradient.check_supported(x, N) is None
    config = tiles.Config(clusters=1)
    got = weight_gradient.weight_gradient(x, dy, parts=parts, config=config, interpret=INTERPRET)
    close(fused_oracle.wide(x).T @ fused_oracle.wide(dy), got, "dw", dtype="float32")


def test_parts_of_a_weight_gradient():
    """Three parts fill a GPU where one leaves a third of the last tiles' time; no number of parts does for 4224
    columns; parts of few rows would cost more than they gain."""
    parts = weight_gradient.num_parts
    assert parts(65536, 1024, 5504) == parts(65536, 2752, 1024) == 3
    assert parts(65536, 1024, 4224) is parts(32768, 1024, 5504) is None


@pytest.mark.parametrize(("D", "dtype"), [(256, "float32"), (384, "bfloat16")])
def test_embedding_gradient(D, dtype):
    """Ids of no token, of one, of as many as are read at once, and of more; columns of one CTA and of three. The last
    three tokens have no id."""
    counts = (3, 0, 8, 1, 17, 0)
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(7), (*counts, 3)))
    order = np.argsort(ids, kind="stable").astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    dx = draws(D)(len(ids), D, dtype=dtype)
    assert embedding.check_supported(dx) is None
    got = embedding.embedding_gradient(dx, jnp.asarray(order), jnp.asarray(starts), interpret=INTERPRET)
    assert got.dtype == jnp.float32
    close(fused_oracle.embedding_gradient(ids, dx, 6), got, "gradient")


BORDERS = (3, 5, 7, 9, 14, 18, 24)
"""First tokens of segments. Strips of 8 tokens begin one and two tokens behind one, one and two before one, with one
and without; 3 and 5 are nearer to each other than the filter is long."""

# Rows that end inside a strip, without segments and with; a strip longer than the row, and no norm; the defaults.
CONVOLUTIONS = {
    "defaults": (dict(B=1, T=40, HV=4), None, "bfloat16"),
    "strips": (dict(B=2, T=24, HV=4), short_conv.Config(16, 2, turns=2, depth=3), "bfloat16"),
    "segments": (dict(B=1, T=40, HV=4, borders=BORDERS), short_conv.Config(8, 2), "bfloat16"),
    "one strip": (
        dict(B=1, T=8, HV=8, width=64, borders=(1, 2, 4), normalize=False),
        short_conv.Config(64, 4),
        "float16",
    ),
}


def convolution(dtype, *, B, T, HV, heads=4, width=32, borders=None, normalize=True):
    """Arrays and options of a convolution, and what float64 makes of them.

    Returns (x, weight, segment_ids), cotangents, options of the operation, and the expected results.
    """
    draw, D = draws(T), (2 * heads + HV) * width
    segments = None
    if borders is not None:
        segments = np.cumsum(np.isin(np.arange(T), borders))[None].repeat(B, 0).astype(np.int32)
    x, weight = draw(B, T, D, dtype=dtype), draw(D, short_conv.WIDTH, scale=0.5)
    cotangents = tuple(draw(B, T, *shape, dtype=dtype) for shape in 2 * [(heads, width)] + [(HV * width,)])
    pieces = fused_oracle.whole_rows(B, T) if segments is None else fused_oracle.pieces_of_ids(segments)
    options = dict(heads=heads, width=width, normalize=normalize)
    zeros = np.zeros((B, D, short_conv.WIDTH - 1))
    expected = fused_oracle.short_conv(x, weight, cotangents=(*cotangents, zeros), pieces=pieces, **options)
    return (x, weight, None if segments is None else jnp.asarray(segments)), cotangents, options, expected


@pytest.mark.parametrize("name", harness.tiers(CONVOLUTIONS, ("segments",)))
def test_short_conv(name):
    sizes, config, dtype = CONVOLUTIONS[name]
    (x, weight, segments), cotangents, options, expected = convolution(dtype, **sizes)
    assert short_conv.check_supported(x, weight, options["heads"], options["width"]) is None
    fresh = None
    if segments is not None:
        fresh = jnp.diff(segments, axis=1, prepend=-1).astype(jnp.int32)
    run = dict(config=config, interpret=INTERPRET)
    for n, got in zip("qkv", short_conv.short_conv(x, weight, fresh, **options, **run), strict=True):
        assert got.dtype == x.dtype
        close(getattr(expected, n), got, n)
    dx, dweight = short_conv.short_conv_backward(
        x, weight, fresh, *cotangents, normalize=options["normalize"], **run
    )
    assert (dx.dtype, dweight.dtype) == (x.dtype, jnp.float32)
    close(expected.dx, dx, "dx")
    close(expected.dweight, dweight, "dweight")


@pytest.mark.parametrize(
    ("T", "walks"), [(8192, 48), (2048, 192), (32768, 12), (8192, 192), (8192, 24), (1000, 42), (2048, 768)]
)
def test_strips_of_the_convolution_fill_the_gpu(T, walks):
    at_once = 4 * 132
    strip = short_conv.even_strip(T, walks, at_once, 2)
    assert strip % 2 == 0 and short_conv.LEAST_STRIP <= strip <= T
    ctas = walks * -(-T // strip)
    assert 0.95 * at_once * -(-ctas // at_once) <= ctas <= short_conv.MOST_WAVES * at_once


def test_short_rows_of_the_convolution_have_strips_that_are_worth_their_sums():
    assert short_conv.even_strip(2048, 6, 4 * 132, 2) == short_conv.even_strip(8, 3, 4 * 132, 2) == 32
    assert (
        short_conv.even_strip(64, 10_000, 4 * 132, 2) == 64
    )  # more rows than run at once in any number of waves


@pytest.mark.parametrize(
    ("T", "V", "D", "lead"),
    [
        (136, 320, 64, 2),
        pytest.param(264, 512, 64, 1, marks=pytest.mark.slow),
        pytest.param(264, 512, 256, 1, marks=pytest.mark.slow),
    ],
    ids=["ends in tiles", "short tiles have no lead", "lead"],
)
def test_cross_entropy(T, V, D, lead):
    """Words that end inside a tile; equal largest logits in one tile and in two; a target that there is not."""
    draw, rng = draws(V), np.random.default_rng(0)
    x, weight, targets = draw(T, D, dtype="bfloat16"), draw(V, D, scale=3.2 * D**-0.5), rng.integers(0, V, T)
    # Largest, and for every row: words 5 and 9 are equal, and 260 to both.
    x, weight = (
        x.at[:, 0].set(1.0),
        weight.at[:, 0].set(0.0).at[jnp.array([5, 9, 260])].set(jnp.eye(D)[0] * 20),
    )
    weight = weight.astype(jnp.bfloat16)
    targets[:4] = 5, 9, 260, -1
    config = tiles.Config(lead=lead, clusters=1, down=True)
    got = cross_entropy.cross_entropy(x, weight, jnp.asarray(targets), config=config, interpret=INTERPRET)
    logits = fused_oracle.wide(x) @ fused_oracle.wide(weight).T
    padded = np.pad(logits, ((0, 0), (0, -V % tiles.COLUMNS)), constant_values=-np.inf)
    of_tiles = padded.reshape(T, -1, tiles.COLUMNS).swapaxes(0, 1)
    m = of_tiles.max(2)
    exps = np.exp(of_tiles - m[..., None])
    close(m, got.m, "m")
    close(exps.sum(2), got.s, "s")
    close(exps.swapaxes(0, 1).reshape(T, -1)[:, :V], got.u, "u")
    firsts = tiles.COLUMNS * np.arange(len(m))[:, None]
    np.testing.assert_array_equal(got.best, of_tiles.argmax(2) + firsts)
    here = (firsts <= targets) & (targets < firsts + tiles.COLUMNS)
    close(np.where(here, logits[np.arange(T), targets], 0), got.of_target, "of_target")


@pytest.fixture
def interpreted(monkeypatch):
    """gdn_jax.fused takes the kernels, interpreted; the fixture's value counts the calls of each."""
    calls = collections.Counter()
    monkeypatch.setattr(launch, "device_reason", lambda: None)
    for module, name in (
        (norm, "add_norm"),
        (gated_norm, "gated_norm"),
        (swiglu, "swiglu"),
        (swiglu_product, "swiglu_product"),
        (swiglu_cotangents, "swiglu_cotangents"),
        (weight_gradient, "weight_gradient"),
        (short_conv, "short_conv"),
        (embedding, "embedding_gradient"),
        (cross_entropy, "cross_entropy"),
        (logit_cotangents, "logit_cotangents"),
    ):
        for kernel in (name, f"{name}_backward"):
            if hasattr(module, kernel):
                function = functools.partial(getattr(module, kernel), interpret=INTERPRET)

                def call(*arguments, function=function, kernel=kernel, **options):
                    calls[kernel] += 1
                    return function(*arguments, **options)

                monkeypatch.setattr(module, kernel, call)
    return calls


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_seam_of_add_norm(interpreted, dtype):
    """Rows with two leading axes. The backward pass has the stream rounded to bfloat16, which every number of dweight
    is proportional to; dx depends on it through the mean square and a projection alone."""
    draw = draws(1)
    y, dn = (draw(2, 8, 256, dtype="bfloat16") for _ in range(2))
    x, ds = (draw(2, 8, 256, dtype=dtype) for _ in range(2))
    weight = draw(256)

    def f(x, y, weight):
        return fused_norms.add_norm(x, y, weight, dtype="bfloat16")

    (s, n), back = jax.vjp(f, x, y, weight)
    dx, dy, dweight = back((ds, dn))
    assert interpreted == {"add_norm": 1, "add_norm_backward": 1}
    expected = fused_oracle.add_norm(x, y, weight)
    close(expected[0], s, "s")
    close(expected[1], n, "n")
    expected_dx, expected_dweight = fused_oracle.add_norm_gradients(expected[0], weight, ds, dn)
    close(expected_dx, dx, "dx", 2, dtype="bfloat16")
    np.testing.assert_array_equal(dx.astype(dy.dtype), dy)
    close(expected_dweight, dweight, "dweight", dtype="bfloat16")


@pytest.mark.parametrize("with_y", [True, False])
def test_seam_of_add_norm_without_a_weight(interpreted, with_y):
    draw = draws(1)
    y, dn = (draw(2, 8, 256, dtype="bfloat16") for _ in range(2))
    x, ds = (draw(2, 8, 256, dtype="float32") for _ in range(2))
    args = (x, y) if with_y else (x,)

    def f(x, y=None):
        return fused_norms.add_norm(x, y, None, dtype="bfloat16")

    (s, n), back = jax.vjp(f, *args)
    dx, *dy = back((ds, dn))
    assert interpreted == {"add_norm": 1, "add_norm_backward": 1}
    expected = fused_oracle.add_norm(x, y if with_y else None, np.ones(256))
    close(expected[0], s, "s")
    close(expected[1], n, "n")
    close(
        fused_oracle.add_norm_gradients(expected[0], np.ones(256), ds, dn)[0], dx, "dx", 2, dtype="bfloat16"
    )
    for other in dy:
        np.testing.assert_array_equal(dx.astype(other.dtype), other)


def test_seam_of_gated_norm(interpreted):
    draw = draws(2)
    o, gate, dy = (draw(2, 4, 4, 128, dtype="float16") for _ in range(3))
    weight = draw(128)
    y, back = jax.vjp(lambda *x: fused_norms.gated_norm(*x, eps=1e-5), o, gate, weight)
    close(fused_oracle.gated_norm(o, gate, weight), y, "y")
    expected = fused_oracle.gated_norm_gradients(o, gate, weight, dy)
    for name, a, b in zip(("do", "dgate", "dweight"), expected, back(dy), strict=True):
        close(a, b, name)
    assert interpreted == {"gated_norm": 1, "gated_norm_backward": 1}


def test_seam_of_gated_norm_with_its_projection(interpreted):
    """What is projected is rounded, or its cotangent, and then the result."""
    draw = draws(6)
    o, gate = (draw(2, 4, 4, 128, dtype="bfloat16") for _ in range(2))
    weight, kernel = draw(128), draw(512, 24, dtype="bfloat16").astype(jnp.float32)
    dresult = draw(2, 4, 24, dtype="bfloat16")
    result, back = jax.vjp(fused_norms.gated_norm, o, gate, weight, kernel)
    close(fused_oracle.gated_projection(o, gate, weight, kernel), result, "result", 2)
    expected = fused_oracle.gated_projection_gradients(o, gate, weight, kernel, dresult)
    for name, a, b in zip(("do", "dgate", "dweight", "dkernel"), expected, back(dresult), strict=True):
        close(a, b, name, 2, dtype="bfloat16")
    assert interpreted == {"gated_norm": 1, "gated_norm_backward": 1}


def test_seam_of_swiglu(interpreted):
    draw = draws(3)
    x, dy = draw(512, 8, dtype="bfloat16"), draw(512, 24, dtype="bfloat16")
    shapes = (8, 48), (8, 48), (48, 24)
    weights = [draw(*shape, dtype="bfloat16", scale=shape[0] ** -0.5).astype(jnp.float32) for shape in shapes]
    y, back = jax.vjp(fused_swiglu.swiglu, x, *weights)
    expected = fused_oracle.swiglu(x, *weights, dy)
    for name, a, b in zip(SWIGLU_NAMES, expected, (y, *back(dy)), strict=True):
        close(a, b, name, SWIGLU_ROUNDINGS, dtype="bfloat16")
    assert interpreted == {"swiglu": 1, "swiglu_backward": 1}


def test_seam_of_swiglu_in_its_products(interpreted, monkeypatch):
    """Two rows of tokens, and columns that are filled up to whole groups."""
    monkeypatch.setattr(fused_swiglu, "MANY_ROWS", 16)
    monkeypatch.setattr(weight_gradient, "num_parts", lambda T, M, N: 1)
    draw = draws(4)
    x, dy = draw(2, 8, 64, dtype="bfloat16"), draw(2, 8, 64, dtype="bfloat16")
    shapes = (64, 48), (64, 48), (48, 64)
    weights = [draw(*shape, dtype="bfloat16", scale=shape[0] ** -0.5).astype(jnp.float32) for shape in shapes]
    y, back = jax.vjp(fused_swiglu.swiglu, x, *weights)
    expected = fused_oracle.swiglu(x, *weights, dy)
    for name, a, b in zip(SWIGLU_NAMES, expected, (y, *back(dy)), strict=True):
        close(a, b, name, SWIGLU_ROUNDINGS, dtype="bfloat16")
    assert interpreted == {"swiglu_product": 1, "swiglu_cotangents": 1, "weight_gradient": 2}


@pytest.mark.parametrize(
    ("shape", "E", "products"),
    [((2, 2048, 64), 64, True), ((4, 1023, 64), 64, False), ((4096, 32), 64, False), ((4096, 64), 96, False)],
)
def test_which_kernels_a_swiglu_takes(shape, E, products):
    """Those that multiply need many rows, whole eights of tokens, and widths of whole steps."""
    reason = fused_swiglu._check_products(jax.ShapeDtypeStruct(shape, jnp.bfloat16), 48, E)
    assert (reason is None) == products


@pytest.mark.parametrize(("rows", "F"), [(256, 48), (512, 24)])
def test_swiglu_without_the_kernels(rows, F, interpreted):
    """Of few rows, and of widths that the kernel does not take."""
    draw = draws(5)
    x = draw(rows, 8, dtype="bfloat16")
    weights = [draw(*shape, dtype="bfloat16") for shape in ((8, F), (8, F), (F, 24))]
    fused_swiglu.swiglu(x, *weights)
    assert not interpreted


def test_seam_of_the_loss(interpreted):
    """As in plain JAX, but for numbers of the cotangent of the logits that are rounded otherwise, and once more."""
    draw, rng = draws(6), np.random.default_rng(0)
    x, weight = draw(24, 64, dtype="bfloat16"), draw(384, 64, scale=0.4)
    targets = jnp.asarray(rng.integers(0, 384, 24)).at[3].set(384)
    label_weights = jnp.ones(24).at[3].set(0.0)

    def value_and_gradients(implementation):
        def loss(x, weight, label_weights):
            options = dict(z_loss=0.01, tile=32, implementation=implementation)
            sums = linear_softmax_cross_entropy(x, weight, targets, label_weights=label_weights, **options)
            return sums.loss, sums

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weight, label_weights)

    ((_, expected), gradients), ((_, got), kernels) = map(value_and_gradients, ("chunked", None))
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    for name, a, b in zip(("dx", "dweight", "dlabel_weights"), gradients, kernels, strict=True):
        close(np.asarray(a, np.float64), b, name, 3, dtype="bfloat16")
    assert interpreted == {"cross_entropy": 1, "logit_cotangents": 1}


@pytest.mark.parametrize("tokens", [[[1, 1, -1, 0], [7, -8, 2**30, 1]], [[-7, 6, 6, 6]]])
def test_seam_of_embed(tokens, interpreted):
    """-1 is the last row; tokens outside the table name none, and give none a gradient."""
    draw, tokens = draws(4), jnp.asarray(tokens)
    table, dx = draw(7, 128), draw(*tokens.shape, 128)
    x, back = jax.vjp(lambda table: fused_embedding.embed(table, tokens), table)
    np.testing.assert_array_equal(x, jnp.take(table, tokens, axis=0, mode="fill"))
    close(fused_oracle.embedding_gradient(tokens, dx, 7), back(dx)[0], "gradient")
    assert interpreted == {"embedding_gradient": 1}


def test_seam_of_short_conv(interpreted):
    """Segments by their ids, and a final state through which gradients flow."""
    sizes = dict(B=1, T=8, HV=4, borders=(1, 2, 4))
    (x, weight, segments), cotangents, options, _ = convolution("bfloat16", **sizes)
    dfinal = draws(5)(1, x.shape[2], short_conv.WIDTH - 1, dtype="bfloat16")
    (*parts, final), back = jax.vjp(
        lambda x, weight: fused_short_conv(x, weight, **options, segment_ids=segments), x, weight
    )
    dx, dweight = back((*cotangents, dfinal))
    expected = fused_oracle.short_conv(
        x,
        weight,
        cotangents=(*cotangents, dfinal),
        pieces=fused_oracle.pieces_of_ids(np.asarray(segments)),
        **options,
    )
    for name, got in zip("qkv", parts, strict=True):
        close(getattr(expected, name), got, name)
    np.testing.assert_array_equal(final, causal_conv1d(x, weight, segment_ids=segments)[1])
    close(expected.dx, dx, "dx", 2)  # of the kernel and of its sum with what comes through the state
    close(expected.dweight, dweight, "dweight")
    assert interpreted == {"short_conv": 1, "short_conv_backward": 1}


def test_what_the_convolution_leaves_to_the_plain_form(interpreted):
    """A bias, an initial state and packed sequences."""
    (x, weight, _), _, options, _ = convolution("bfloat16", B=1, T=8, HV=4)
    for extra in (
        dict(bias=jnp.zeros(x.shape[2])),
        dict(initial_state=jnp.zeros((1, x.shape[2], 3))),
        dict(cu_seqlens=jnp.array([0, 3, 8])),
        dict(implementation="chunked"),
    ):
        jax.eval_shape(functools.partial(fused_short_conv, **options, **extra), x, weight)
    assert not interpreted
    jax.eval_shape(functools.partial(fused_short_conv, **options), x, weight)
    assert interpreted == {"short_conv": 1}


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


CONV = (shape(1, 64, 3 * 4 * 32), shape(3 * 4 * 32, 4, dtype="float32"), 4, 32)


@pytest.mark.parametrize(
    ("check", "arguments", "reason"),
    [
        (norm, (shape(8, 128, dtype="float64"),), "x is float64"),
        (norm, (shape(8, 100),), "rows of 100; the kernel takes multiples of 32 up"),
        (norm, (shape(8, 1056),), "rows of 1056; the kernel takes multiples of 128 up"),
        (norm, (shape(8, 8320),), "rows of 8320"),
        (norm, (shape(3, 2, 64),), "rows of 64; the kernel takes multiples of 128"),
        (norm, (shape(0, 64),), "0 rows"),
        (norm, (shape(3, 4096, dtype="float32"),), None),
        (norm, (shape(2, 2, 8192, dtype="float16"),), None),
        (gated_norm, (shape(1, 64, 4, 128, dtype="float32"),), "o is float32"),
        (gated_norm, (shape(1, 64, 4, 96),), "V = 96"),
        (gated_norm, (shape(1, 3, 1, 128),), "a multiple of 1024 numbers"),
        (gated_norm, (shape(0, 8, 128),), "a multiple of 1024 numbers"),
        (gated_norm, (shape(1, 16, 1, 64, dtype="float16"),), None),
        (swiglu, (shape(64, 64, dtype="float32"),), "x is float32"),
        (swiglu, (shape(3, 1024),), "a multiple of 2048 numbers"),
        (swiglu, (shape(0, 2048),), "a multiple of 2048 numbers"),
        (swiglu, (shape(2, 1024, dtype="float16"),), None),
        (swiglu_product, (shape(64, 64, dtype="float32"), 32), "x: float32"),
        (swiglu_product, (shape(12, 64), 32), "x: 12 rows; the kernel takes a multiple of 8"),
        (swiglu_product, (shape(16, 96), 32), "x: rows of 96; the kernel takes a multiple of 64"),
        (swiglu_product, (shape(16, 64), 48), "48 columns; the kernel takes a multiple of 32"),
        (swiglu_cotangents, (shape(0, 64), 32), "dy: 0 rows"),
        (swiglu_cotangents, (shape(2, 8, 64, dtype="float16"), 64), None),
        (weight_gradient, (shape(64, 64, dtype="float32"), 64), "x is float32"),
        (weight_gradient, (shape(12, 64), 64), "x has 12 rows; the kernel takes a multiple of 8"),
        (weight_gradient, (shape(8, 64), 96), "weights [64, 96]; the kernel takes multiples of 64"),
        (weight_gradient, (shape(8, 64, dtype="float16"), 64), None),
        (cross_entropy, (shape(64, 64, dtype="float16"), 64), "x is float16"),
        (cross_entropy, (shape(12, 64), 64), "x: 12 rows"),
        (cross_entropy, (shape(8, 64), 96), "96 words; the kernel takes a multiple of 64"),
        (cross_entropy, (shape(8, 64), 64), None),
        (logit_cotangents, (shape(8, 128, dtype="float32"),), "x is float32"),
        (
            logit_cotangents,
            (shape(8, 320),),
            "8 rows of 320 words; the kernel takes multiples of 8 and of 128",
        ),
        (logit_cotangents, (shape(4, 256),), "4 rows"),
        (logit_cotangents, (shape(8, 384),), None),
        (embedding, (shape(8, 128, dtype="float64"),), "the stream is float64"),
        (embedding, (shape(8, 192),), "rows of 192; the kernel takes multiples of 128"),
        (embedding, (shape(0, 128),), "rows of 128"),
        (embedding, (shape(8, 640, dtype="float32"),), None),
        (short_conv, (shape(1, 64, 384, dtype="float32"), *CONV[1:]), "x is float32"),
        (short_conv, (CONV[0], shape(384, 3, dtype="float32"), 4, 32), "W = 3"),
        (short_conv, (shape(1, 65, 384), *CONV[1:]), "T = 65; the kernel takes multiples of 8"),
        (short_conv, (shape(1, 0, 384), *CONV[1:]), "T = 0"),
        (short_conv, (*CONV[:2], 3, 32), "384 channels with 3 heads of 32"),
        (short_conv, (*CONV[:2], 4, 16), "384 channels with 4 heads of 16"),
        (short_conv, (shape(1, 64, 416), shape(416, 4), 4, 32), "416 channels with 4 heads of 32"),
        (short_conv, CONV, None),
    ],
)
def test_refusals_say_why(check, arguments, reason):
    got = check.check_supported(*arguments)
    assert got is None if reason is None else reason in str(got)


def kernels_of(module, arguments, monkeypatch):
    """How many kernels of each name the program of a module's gradient has, lowered for an NVIDIA GPU. Calls of equal
    shapes share one."""
    monkeypatch.setattr(launch, "device_reason", lambda: None)
    graphdef, params = nnx.split(module)

    def loss(params, *arguments):
        return nnx.merge(graphdef, params)(*arguments)[0].astype(jnp.float32).sum()

    lowered = jax.jit(jax.value_and_grad(loss)).trace(params, *arguments).lower(lowering_platforms=("cuda",))
    names = re.findall(r"\b00(\w+?)_mosaic_gpu\b", lowered.as_text())
    around = ("short_conv", "gated_norm", "add_norm", "swiglu", "embedding")
    return {name: n for name, n in collections.Counter(names).items() if name.startswith(around)}


@pytest.mark.parametrize("implementation", [None, pytest.param("chunked", marks=pytest.mark.slow)])
def test_layer_uses_the_kernels(implementation, monkeypatch):
    """One convolution for q, k and v, and one norm with the gate, forward and backward."""
    options = dict(num_heads=4, head_dim=32, expand_v=1.0, dtype=jnp.bfloat16)
    layer = nnx.eval_shape(
        lambda: GatedDeltaNet(64, **options, implementation=implementation, rngs=nnx.Rngs(0))
    )
    got = kernels_of(layer, (shape(1, 128, 64),), monkeypatch)
    names = ("short_conv", "short_conv_backward", "gated_norm", "gated_norm_backward")
    assert got == (dict.fromkeys(names, 1) if implementation is None else {})


@functools.cache
def joining_layer(implementation=None, **options):
    """A small layer that can have all products of its input in one array: its gated norm takes four heads at once."""
    sizes = dict(num_heads=4, head_dim=256, expand_v=1.0, dtype=jnp.bfloat16)
    return GatedDeltaNet(32, **sizes | options, implementation=implementation, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_one_product_of_the_input(monkeypatch):
    """All channels are one product forward and two backward, and no sum of their cotangents is in the program, in
    which the convolution's kernel changes the array that the gated norm made."""
    monkeypatch.setattr(launch, "device_reason", lambda: None)
    graphdef, params = nnx.split(joining_layer())

    def loss(params, x):
        return nnx.merge(graphdef, params)(x)[0].astype(jnp.float32).sum()

    args = params, shape(1, 512, 32)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    text = gradient.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    wide = [line for line in text.splitlines() if "x4352x" in line and "dot_general" in line]
    assert len(wide) == 3
    updates = [line for line in text.splitlines() if "mosaic_gpu" in line and "output_operand_alias" in line]
    assert len(updates) == 1 and "tensor<1x512x17x256xbf16>" in updates[0]
    assert not any("stablehlo.add" in line and "4352" in line for line in text.splitlines())


def test_one_product_is_all_products(monkeypatch):
    """With the plain form of the convolution in the kernel's place, what a layer makes of its input in one product,
    and the gradients, are those of its products."""

    def plain(joined, weight, segment_ids, *, behind, **options):
        D = weight.shape[0]
        *parts, final = fused_short_conv(joined[..., :D], weight, **options, segment_ids=segment_ids)
        return *parts, final, joined[..., D : D + behind], joined

    monkeypatch.setattr(fused_joined, "short_conv", plain)
    sizes = dict(num_heads=2, num_v_heads=4, head_dim=16, expand_v=2.0, allow_neg_eigval=True)
    graphdef, params = nnx.split(GatedDeltaNet(24, **sizes, rngs=nnx.Rngs(0)))
    draw, segments = draws(0), jnp.arange(9)[None] // 4

    def together(params, x, o):
        layer = nnx.merge(graphdef, params)
        inputs, conv, gate = layer._joined_inputs(x, segments, None)
        return inputs, conv, layer.rule_output(o, x, gate)

    def apart(params, x, o):
        layer = nnx.merge(graphdef, params)
        return *layer.rule_inputs(x, segment_ids=segments), layer.rule_output(o, x)

    args = params, draw(1, 9, 24), draw(1, 9, 4, 32)
    cotangents = jax.tree.map(lambda y: draw(*y.shape), jax.eval_shape(apart, *args))
    expected, got = (fused_harness.compiled_vjp(f)(cotangents, *args) for f in (apart, together))
    for (path, like), y in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        close(like, y, jax.tree_util.keystr(path))


@pytest.mark.slow
def test_seam_of_joined_channels(interpreted):
    """Both kernels with their channels in one array, whose cotangent is NaN where nobody writes it."""
    sizes = dict(B=1, T=8, HV=4, borders=(1, 2, 4), heads=4, width=256)
    (x, weight, segments), cotangents, options, expected = convolution("bfloat16", **sizes)
    draw = draws(3)
    gates, dgates = (draw(1, 8, 256, dtype="bfloat16") for _ in range(2))
    gate, o, dy = (draw(1, 8, 4, 256, dtype="bfloat16") for _ in range(3))
    norm_weight = draw(256)

    def run(joined, weight, o, norm_weight):
        *parts, final, gates, joined = fused_joined.short_conv(
            joined, weight, segments, **options, behind=256
        )
        y = fused_norms.gated_norm(o, joined.reshape(1, 8, -1, 256), norm_weight, joined=True)
        return (*parts, final), gates, y

    args = jnp.concatenate([x, gates, gate.reshape(1, 8, -1)], axis=-1), weight, o, norm_weight
    (parts, got_gates, y), back = jax.vjp(run, *args)
    djoined, dweight, do, dnorm = back(((*cotangents, jnp.zeros_like(parts[-1])), dgates, dy))
    for name, got in zip("qkv", parts, strict=False):
        close(getattr(expected, name), got, name)
    np.testing.assert_array_equal(got_gates, gates)
    close(fused_oracle.gated_norm(o, gate, norm_weight), y, "y")
    dx, after, dgate = jnp.split(djoined, (x.shape[-1], x.shape[-1] + 256), axis=-1)
    close(expected.dx, dx, "dx")
    close(expected.dweight, dweight, "dweight")
    np.testing.assert_array_equal(after, dgates)
    names = "do", "dgate", "dnorm"
    gradients = fused_oracle.gated_norm_gradients(o, gate, norm_weight, dy)
    for name, a, b in zip(names, gradients, (do, dgate.reshape(gate.shape), dnorm), strict=True):
        close(a, b, name)
    assert interpreted == dict.fromkeys(
        ("short_conv", "short_conv_backward", "gated_norm", "gated_norm_backward"), 1
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(conv_bias=True),
        dict(use_short_conv=False),
        dict(use_gate=False),
        dict(head_dim=128),
        dict(head_dim=80),
        dict(dtype=jnp.float32),
    ],
)
def test_layers_whose_products_are_apart(options, monkeypatch):
    """Also few tokens, and tokens with a mask or a past."""
    monkeypatch.setattr(launch, "device_reason", lambda: None)
    x = jnp.zeros((1, 512, 32), jnp.bfloat16)
    assert joining_layer().takes_factor(x)
    assert not joining_layer().takes_factor(x[:, :256])
    assert not joining_layer("chunked").takes_factor(x)
    assert not joining_layer(**options).takes_factor(x)


@pytest.mark.slow
def test_factor_of_a_layers_input(interpreted):
    """As if its input were multiplied by it: here by powers of two, of which nothing is rounded."""
    draw = draws(9)
    x, factor = draw(1, 520, 32, dtype="bfloat16"), 2.0 ** (jnp.arange(32) % 5 - 2)
    layer = joining_layer()
    (rule, conv, channels), again = (
        layer._joined_inputs(x, None, factor),
        layer._joined_inputs((x * factor).astype(x.dtype), None, None),
    )
    assert interpreted["short_conv"]
    for a, b in zip(jax.tree.leaves((rule, conv, channels)), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(
        ValueError, match="factor: expected None for a call that `takes_factor` does not allow"
    ):
        layer(x[:, :256], factor=factor)


@pytest.mark.slow
def test_model_uses_the_kernels(monkeypatch):
    """Three blocks share every kernel. Norms before a SwiGLU have no weight; those before these small mixers, which
    do not take it, and the last have one. The first norm has nothing to add, and its derivative no y; the last one's
    derivative has no cotangent of the sum."""
    sizes = dict(vocab_size=64, hidden_size=128, num_layers=3, num_heads=4, head_dim=32, expand_v=1.0)
    config = ModelConfig(**sizes, intermediate_size=384, dtype="bfloat16")
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    got = kernels_of(model, (shape(1, 512, dtype="int32"),), monkeypatch)
    one = ("short_conv", "gated_norm", "swiglu")
    expected = dict.fromkeys((*one, *(f"{name}_backward" for name in one), "embedding_gradient"), 1)
    assert got == expected | {"add_norm": 3, "add_norm_backward": 4}
