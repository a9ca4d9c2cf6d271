"""The kernels of SwiGLU and of weight gradients, without a GPU: interpreted, their seams, and which of them run."""

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from fused_harness import SWIGLU_NAMES, SWIGLU_ROUNDINGS, close, draws
from layer_kernels import INTERPRET

from gdn_jax.parts import swiglu as fused_swiglu
from pallas_kernels.layer import swiglu, swiglu_cotangents, swiglu_product, tiles, weight_gradient


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
        pytest.param((264, 64, 160), 2, "bfloat16", marks=pytest.mark.slow),
        pytest.param((8, 192, 32), 2, "float16", marks=pytest.mark.crossed),
        pytest.param((136, 128, 32), 0, "bfloat16", marks=pytest.mark.crossed),
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
    args = (put(y, dtype) for y in (dy, down))
    dab = swiglu_cotangents.swiglu_cotangents(*args, ab, config=config, interpret=INTERPRET)
    gradients = fused_oracle.branches_gradients(a, b, dy @ down.T)
    for name, expected, got in zip(("da", "db"), gradients, branches(dab), strict=True):
        close(expected, got, name)


@pytest.mark.parametrize(
    ("sizes", "parts", "dtype"),
    [
        ((136, 192, 64), 2, "bfloat16"),
        pytest.param((328, 320, 320), 3, "float16", marks=pytest.mark.crossed),
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


@pytest.mark.slow
def test_seam_of_swiglu_in_its_products(interpreted, monkeypatch):
    """Two rows of tokens, and columns that are filled up to whole groups."""
    monkeypatch.setattr(fused_swiglu, "MANY_ROWS", 16)
    monkeypatch.setattr(fused_swiglu, "FEW_ROWS", 8)
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
    """Kernels that multiply need many rows, whole eights of tokens, and widths of whole steps."""
    reason = fused_swiglu._check_supported(True, jax.ShapeDtypeStruct(shape, jnp.bfloat16), 48, E)
    assert (reason is None) == products


@pytest.mark.parametrize(("rows", "F"), [(256, 48), (512, 24)])
def test_swiglu_without_the_kernels(rows, F, interpreted):
    """A SwiGLU of few rows, and of widths that the kernel does not take."""
    draw = draws(5)
    x = draw(rows, 8, dtype="bfloat16")
    weights = [draw(*shape, dtype="bfloat16") for shape in ((8, F), (8, F), (F, 24))]
    fused_swiglu.swiglu(x, *weights)
    assert not interpreted
