"""Kernels around the rule without a GPU: right and free of races when interpreted, and used by the layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import assert_close

from gdn_jax.layers import GatedDeltaNet
from pallas_kernels.device import launch
from pallas_kernels.layer import short_conv

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def conv_gradients(x, weight, dy):
    """dx and dweight in float64, tap by tap."""
    x, weight, dy = (np.asarray(y).astype(np.float64) for y in (x, weight, dy))
    T, W = x.shape[1], weight.shape[1]
    past = np.pad(x, ((0, 0), (W - 1, 0), (0, 0)))
    taps = np.stack([past[:, j : j + T] for j in range(W)])
    z = np.einsum("jbtd,dj->btd", taps, weight)
    s = 1 / (1 + np.exp(-z))
    dz = dy * s * (1 + z * (1 - s))
    behind = np.pad(dz, ((0, 0), (0, W - 1), (0, 0)))
    dx = sum(weight[:, j] * behind[:, W - 1 - j : W - 1 - j + T] for j in range(W))
    return dx, np.einsum("jbtd,btd->dj", taps, dz)


def conv_inputs(shape, dtype):
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    return x, jnp.asarray(rng.normal(size=(shape[2], 4)) / 2, jnp.float32), dy


@pytest.mark.parametrize(("dtype", "tiles"), [("bfloat16", 2), ("float16", 1), ("bfloat16", 16)])
def test_short_conv_backward(dtype, tiles):
    """Five tiles in strips of one or two, of which the last is short, or all in one; two rows."""
    x, weight, dy = conv_inputs((2, 320, 64), dtype)
    config = short_conv.Config(tiles=tiles)
    dx, dweight = short_conv.short_conv_backward(x, weight, dy, config=config, interpret=INTERPRET)
    expected_dx, expected_dweight = conv_gradients(x, weight, dy)
    rounding = (
        2.0**-9 if dtype == "bfloat16" else 2.0**-12
    )  # half a unit of the last place, the rms of it is less
    assert_close(expected_dx, np.asarray(dx), rounding, "dx")
    assert_close(expected_dweight, np.asarray(dweight), 1e-6, "dweight")  # sums of 640 terms in float32


@pytest.mark.parametrize(
    ("shape", "dtype", "W", "reason"),
    [
        ((1, 64, 64), "float32", 4, "float32"),
        ((1, 64, 64), "bfloat16", 3, "W = 3"),
        ((1, 65, 64), "bfloat16", 4, "T = 65"),
        ((1, 64, 60), "bfloat16", 4, "D = 60"),
        ((1, 64, 64), "bfloat16", 4, None),
    ],
)
def test_refusals_say_why(shape, dtype, W, reason):
    S = jax.ShapeDtypeStruct
    got = short_conv.check_supported(S(shape, dtype), S((shape[2], W), jnp.float32))
    assert got is None if reason is None else reason in str(got)


@pytest.mark.parametrize(("implementation", "expected"), [(None, True), ("chunked", False)])
def test_layer_uses_the_kernel(implementation, expected, monkeypatch):
    """Once for all of q, k and v, whose shapes are equal: their calls share what is compiled."""
    monkeypatch.setattr(launch, "device_reason", lambda: None)
    options = dict(num_heads=2, head_dim=64, expand_v=1.0, dtype=jnp.bfloat16)
    layer = GatedDeltaNet(64, **options, implementation=implementation, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)

    def loss(params, x):
        return nnx.merge(graphdef, params)(x)[0].astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((1, 128, 64), jnp.bfloat16)
    text = jax.jit(jax.grad(loss)).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("00short_conv_backward_mosaic_gpu") == int(expected)
