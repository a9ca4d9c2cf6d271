"""The kernels of the sum with its norm and of the gated norm, without a GPU: interpreted, and behind their seams."""

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_harness import close, draws
from layer_kernels import INTERPRET

from gdn_jax.parts import norms as fused_norms
from pallas_kernels.layer import gated_norm, norm, rows

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
        monkeypatch.setattr(rows, "num_sms", lambda: 1)
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
        monkeypatch.setattr(rows, "num_sms", lambda: 1)
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
    ("N", "V", "dtype", "activation"),
    [(64, 32, "bfloat16", "silu"), (24, 128, "float16", "sigmoid"), (16, 256, "bfloat16", "silu")],
)
def test_gated_norm(N, V, dtype, activation):
    draw = draws(V)
    o, z, dy = (draw(N, V, dtype=dtype) for _ in range(3))
    weight, how = draw(V), dict(eps=1e-5, activation=activation)
    assert gated_norm.check_supported(o) is None
    y = gated_norm.gated_norm(o, z, weight, **how, interpret=INTERPRET)
    close(fused_oracle.gated_norm(o, z, weight, **how), y, "y")
    *got, again = gated_norm.gated_norm_backward(o, z, weight, dy, **how, again=True, interpret=INTERPRET)
    np.testing.assert_array_equal(again, y)
    expected = fused_oracle.gated_norm_gradients(o, z, weight, dy, **how)
    for name, a, b in zip(("do", "dz", "dweight"), expected, got, strict=True):
        close(a, b, name)
    assert [x.dtype.name for x in (y, *got)] == [dtype, dtype, dtype, "float32"]


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
    """The projected array is rounded, or its cotangent, and then the result."""
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
