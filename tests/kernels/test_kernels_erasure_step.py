"""The kernel of a token that erases at a key of its own and writes: near the oracle when interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from fused_harness import draws
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import assert_close

from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import BOUNDS
from gdn_jax.gates import channel_log_decay
from pallas_kernels.decode.erasure_step import erasure_step
from pallas_kernels.device.gates import log_decays

READ, WRITE, NULL = [3, -1, 1, 6, 0], [3, 5, 4, 2, -1], 6
SIZES = {"Hq": 1, "Hk": 2, "HV": 2, "K": 64, "V": 32}


def draw(pool_dtype, kv_layout):
    """A token of each request and a pool; gates are weak in some channels, strong in others."""
    Hq, Hk, HV, K, V = SIZES.values()
    normal = draws(3)
    shapes = {"q": (Hq, K), "k": (Hk, K), "v": (HV, V), "b": (HV,), "erase_key": (Hk, K), "w": (HV,)}
    x = {name: normal(len(READ), 1, *shape, dtype="bfloat16") for name, shape in shapes.items()}
    x["a"] = normal(len(READ), 1, HV, K, scale=4.0, dtype="bfloat16")
    x["pool"] = normal(8, HV, *((K, V) if kv_layout else (V, K)), dtype=pool_dtype)
    return x, normal(HV), normal(HV, K)


@pytest.mark.parametrize(
    ("pool_dtype", "kv_layout", "gate"),
    [
        ("float32", True, (-5.0, "exponential")),
        ("bfloat16", True, (None, "sigmoid")),
        pytest.param("float32", False, (-5.0, "sigmoid"), marks=pytest.mark.slow),
        pytest.param("bfloat16", False, (-1.0, "exponential"), marks=pytest.mark.slow),
    ],
)
def test_step(pool_dtype, kv_layout, gate):
    """Outputs and written slots near the oracle; padding gives 0, and the other slots keep their bits."""
    x, A_log, dt_bias = draw(pool_dtype, kv_layout)
    lower_bound, bound = gate
    flat = [put(np.asarray(x[n]).reshape(len(READ), 1, -1)) for n in "qkv"]
    o, pool = erasure_step(
        *flat, *(x[n] for n in ("a", "b", "erase_key", "w", "pool")), A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, bound=bound, heads=(SIZES["Hq"], SIZES["Hk"], SIZES["HV"]), scale=0.3,
        kv_layout=kv_layout, null_slot=NULL, read_slots=put(READ, jnp.int32),
        write_slots=put(np.array(WRITE)[:, None], jnp.int32), interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    real = [i for i, s in enumerate(READ) if s not in (-1, NULL)]
    wide = {n: np.asarray(y, np.float64)[real] for n, y in x.items() if n != "pool"}
    log_decay = functools.partial(channel_log_decay, lower_bound=lower_bound, bound=bound)
    g = np.asarray(jax.jit(log_decay)(x["a"], A_log, dt_bias), np.float64)[real]
    gamma, beta = (1 / (1 + np.exp(-wide[n])) for n in "wb")
    pairs = (
        (wide["q"],) * 2,
        (wide["erase_key"], wide["k"]),
        (0 * wide["v"], wide["v"]),
        (g, 0 * g),
        (gamma, beta),
    )
    true_o, true_states = oracle.forward(
        *(np.concatenate(pair, 1) for pair in pairs), scale=0.3, use_qk_l2norm=True,
        initial_state=np.asarray(x["pool"], np.float64)[[READ[i] for i in real]],
        state_layout="kv" if kv_layout else "vk",
    )  # fmt: skip
    o = np.asarray(o, np.float64)
    assert_close(true_o[:, 1:], o[real], BOUNDS["bfloat16"][0]["o"], "o")
    assert not np.delete(o, real, 0).any()
    written = {WRITE[i]: n for n, i in enumerate(real) if WRITE[i] != -1}
    found = np.asarray(pool, np.float64)
    want = true_states[list(written.values())]
    assert_close(want, found[list(written)], BOUNDS[pool_dtype][0]["final_state"], "pool")
    untouched = [s for s in range(8) if s not in written]
    np.testing.assert_array_equal(found[untouched], np.asarray(x["pool"], np.float64)[untouched])


def test_the_saturating_gate():
    """The kernel's formula has float32's relative accuracy for weak and strong decays."""
    x = np.concatenate([np.linspace(-30, 30, 121), [-200.0, 200.0]]).astype(np.float32)
    rates = np.array([-20.0, -1.0, 0.0, 3.0, 80.0], np.float32)
    got = jax.jit(lambda x, A: log_decays(x, A, -5.0, "exponential"))(x, rates[:, None])
    w = np.exp(rates[:, None].astype(np.float64)) * np.logaddexp(x.astype(np.float64), 0) / 5
    np.testing.assert_allclose(np.asarray(got, np.float64), 5 * np.expm1(-w), rtol=2e-5, atol=1e-30)
