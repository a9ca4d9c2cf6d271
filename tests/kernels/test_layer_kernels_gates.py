"""The kernels of the gates of key channels in Pallas' interpreter, with race detection, against float64."""

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from fused_harness import close, draws
from layer_kernels import INTERPRET

from gdn_jax.gates import channel_log_decay
from gdn_jax.parts import channel_gates as seam
from pallas_kernels.device.gates import log_decay_slopes, log_decays
from pallas_kernels.layer import channel_gates as kernels

NAMES = "g", "df", "dA_log", "ddt_bias"


@pytest.mark.parametrize(
    ("shape", "dtype", "lower_bound"),
    [((48, 3, 64), "bfloat16", None), ((16, 2, 128), "float16", -5.0), ((64, 1, 32), "bfloat16", -5.0)],
)
def test_gates(shape, dtype, lower_bound):
    draw = draws(shape[0])
    f, dg, A_log, dt_bias = (
        draw(*shape, dtype=dtype, scale=3.0),
        draw(*shape),
        draw(shape[1]),
        draw(*shape[1:]),
    )
    assert kernels.check_supported(f[None]) is None
    options = dict(lower_bound=lower_bound, interpret=INTERPRET)
    got = (
        kernels.channel_gates(f, A_log, dt_bias, **options),
        *kernels.channel_gates_backward(f, A_log, dt_bias, dg, **options),
    )
    for name, a, b in zip(
        NAMES, fused_oracle.channel_gates(f, A_log, dt_bias, lower_bound, dg), got, strict=True
    ):
        close(a, b, name)
    assert [x.dtype.name for x in got] == ["float32", dtype, "float32", "float32"]


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_any_parameter(lower_bound):
    """Decays and slopes are finite, and those of the plain form, for any parameter."""
    x = put([-3e4, -120.0, -81, -20, -1e-3, 0, 1e-3, 5, 120, 3e4], jnp.float32)
    plain = jax.vmap(
        lambda x, A: channel_log_decay(x[None, None], A[None], jnp.zeros((1, 1)), lower_bound)[0, 0],
        (0, None),
    )
    for A_log in (-1e4, -80.0, 0.0, 3.0, 60.0):
        A = jnp.float32(A_log)
        of_x = jax.vmap(jax.grad(lambda x, A: plain(x[None], A)[0]), (0, None))(x, A)
        of_A_log = jax.vmap(jax.grad(lambda x, A: plain(x[None], A)[0], 1), (0, None))(x, A)
        found = log_decays(x, A, lower_bound), *log_decay_slopes(x, A, lower_bound)
        for name, a, b in zip(("g", "of x", "of A_log"), (plain(x, A), of_x, of_A_log), found, strict=True):
            assert np.isfinite(b).all(), (name, A_log)
            # The exponential of a sum of up to 88 has 88 roundings of 2^-24 of error; 2^-126 is the smallest number.
            np.testing.assert_allclose(b, a, rtol=88 * 2**-24 * 2, atol=2e-38, err_msg=f"{name} {A_log}")


def test_seam(interpreted):
    """The layers' call reaches the kernels, with its gradients; without a rate, too."""
    draw = draws(5)
    f, dg, A_log, dt_bias = draw(2, 8, 2, 128, dtype="bfloat16"), draw(2, 8, 2, 128), draw(2), draw(2, 128)
    for A in (A_log, None):
        g, back = jax.vjp(lambda f, b, A=A: seam.channel_gates(f, A, b, -5.0), f, dt_bias)
        want = fused_oracle.channel_gates(f, jnp.zeros(2) if A is None else A, dt_bias, -5.0, dg)
        for name, a, b in zip(("g", "df", "ddt_bias"), (*want[:2], want[3]), (g, *back(dg)), strict=True):
            close(a, b, name)
    assert set(interpreted) == {"channel_gates", "channel_gates_backward"}


def test_what_the_kernels_do_not_take():
    shape = jax.ShapeDtypeStruct((1, 12, 2, 128), jnp.bfloat16)
    assert kernels.check_supported(shape) == "12 tokens; the kernel takes a multiple of 8"
    assert "float32" in kernels.check_supported(shape.update(dtype=jnp.float32))
    assert "K = 96" in kernels.check_supported(shape.update(shape=(1, 8, 2, 96)))
