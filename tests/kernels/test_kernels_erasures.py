"""Tokens of Erase-then-Delta Attention by the kernels of drafts: interpreted as plain JAX, and lowered for a GPU."""

import functools

import jax
import numpy as np
import pytest
from device_arrays import put
from jax.experimental.pallas import mosaic_gpu as plgpu
from serving_cases import assert_same_bits
from tolerances import assert_close

from gdn_jax import serving
from gdn_jax.checks.accuracy import BOUNDS
from gdn_jax.serving.call import interpreted

N, HK, HV = 3, 1, 2


def draw(K=64, V=32):
    """Arguments of `erase_then_delta_decode`, and a pool of five slots."""
    rng = np.random.default_rng(4)
    shapes = dict(q=(HK, K), k=(HK, K), v=(HV, V), a=(HV, K), b=(HV,), erase_key=(HK, K), w=(HV,))
    x = {name: put(rng.standard_normal((N, *s)), "bfloat16") for name, s in shapes.items()}
    x |= dict(
        A_log=put(rng.standard_normal(HV), "float32"), dt_bias=put(rng.standard_normal((HV, K)), "float32")
    )
    return x | dict(pool=put(rng.standard_normal((5, HV, K, V)), "float32"), lower_bound=-5.0)


@pytest.mark.slow
def test_a_token():
    """One call reads a state and writes it once; slots without a request keep their bits."""
    x, slots = draw(), put(np.array([3, -1, 1]), "int32")
    bound = x.pop("lower_bound")
    plain = functools.partial(serving.erase_then_delta_decode, lower_bound=bound, implementation="xla")
    want, after = jax.jit(plain)(**x, read_slots=slots)
    x = draw()
    with interpreted(plgpu.InterpretGPUParams(detect_races=True)):
        o, pool = serving.erase_then_delta_decode(**x, read_slots=slots, implementation="mosaic_gpu")
    bounds = BOUNDS["bfloat16"][0]
    assert_close(np.asarray(want, np.float64), np.asarray(o), bounds["o"], "o")
    assert_close(np.asarray(after, np.float64), np.asarray(pool), 1e-5, "pool")
    assert_same_bits(np.asarray(after)[[0, 2, 4]], np.asarray(pool)[[0, 2, 4]])
    assert not np.asarray(o, np.float32)[1].any()


@pytest.mark.parametrize("ring", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_lowers(ring, monkeypatch):
    """The kernel of both halves is one of a token's program; drafts of a ring have theirs."""
    from pallas_kernels.device import launch

    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    x, slots = draw(128, 128), np.array([3, 0, 1], np.int32)
    lower_bound = x.pop("lower_bound")
    if ring:
        x["pool"] = serving.make_ring_pool(x["pool"], num_key_heads=HK, length=16, channels=True)
    call = functools.partial(
        serving.erase_then_delta_decode, lower_bound=lower_bound, implementation="mosaic_gpu"
    )
    text = jax.jit(call).trace(**x, read_slots=slots).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= 1
