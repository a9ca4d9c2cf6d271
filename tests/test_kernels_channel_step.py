"""The decode kernel with a decay for each key channel: near the family's oracle when interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import assert_close

from gdn_jax.checks import family_oracle
from gdn_jax.checks.accuracy import BOUNDS
from gdn_jax.family.gates import channel_log_decay
from pallas_kernels.decode.channel_step import channel_step, log_decays

READ, WRITE, NULL = [3, -1, 1, 6, 0], [3, 5, 4, 2, -1], 6
SIZES = {"Hq": 1, "Hk": 2, "HV": 2, "K": 64, "V": 32}


def draw(pool_dtype, kv_layout):
    """Tokens and a pool; gates are weak in some channels, strong in others."""
    Hq, Hk, HV, K, V = SIZES.values()
    keys = iter(jax.random.split(jax.random.key(3), 9))
    shapes = {"q": (Hq, K), "k": (Hk, K), "v": (HV, V)}
    x = {n: jax.random.normal(next(keys), (len(READ), 1, *s)).astype(jnp.bfloat16) for n, s in shapes.items()}
    x["a"] = (4 * jax.random.normal(next(keys), (len(READ), 1, HV, K))).astype(jnp.bfloat16)
    x["b"] = jax.random.normal(next(keys), (len(READ), 1, HV)).astype(jnp.bfloat16)
    state = (K, V) if kv_layout else (V, K)
    x["pool"] = jax.random.normal(next(keys), (8, HV, *state)).astype(pool_dtype)
    return x, jax.random.normal(next(keys), (HV,)), jax.random.normal(next(keys), (HV, K))


@pytest.mark.parametrize(
    ("pool_dtype", "kv_layout", "lower_bound", "use_A_log"),
    [
        ("float32", True, None, True),
        ("bfloat16", True, -5.0, False),
        ("float32", False, -5.0, True),
        ("bfloat16", False, None, True),
    ],
)
def test_step(pool_dtype, kv_layout, lower_bound, use_A_log):
    """Outputs and written slots near the oracle; padding gives 0, and the other slots keep their bits."""
    x, A_log, dt_bias = draw(pool_dtype, kv_layout)
    A_log = A_log if use_A_log else None
    flat = [x[n].reshape(len(READ), 1, -1) for n in "qkv"]
    o, pool = channel_step(
        *flat, x["a"], x["b"], x["pool"], A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        heads=(SIZES["Hq"], SIZES["Hk"], SIZES["HV"]), scale=0.3, kv_layout=kv_layout, null_slot=NULL,
        read_slots=jnp.array(READ, jnp.int32), write_slots=jnp.array(WRITE, jnp.int32)[:, None],
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    real = [i for i, s in enumerate(READ) if s not in (-1, NULL)]
    arrays = {n: np.asarray(x[n], np.float64)[real] for n in "qkv"}
    g = channel_log_decay(x["a"], A_log, dt_bias, lower_bound)
    initial = np.asarray(x["pool"], np.float64)[[READ[i] for i in real]]
    beta = 1 / (1 + np.exp(-np.asarray(x["b"], np.float64)[real]))
    truth = family_oracle.evaluate(
        **arrays, g=np.asarray(g, np.float64)[real], beta=beta, scale=0.3, use_qk_l2norm=True,
        initial_state=initial, state_layout="kv" if kv_layout else "vk",
        do=np.zeros((len(real), 1, SIZES["HV"], SIZES["V"])), dh_T=np.zeros_like(initial),
    )  # fmt: skip
    o = np.asarray(o, np.float64)
    assert_close(truth["o"], o[real], BOUNDS["bfloat16"][0]["o"], "o")
    assert not np.delete(o, real, 0).any()
    written = {WRITE[i]: n for n, i in enumerate(real) if WRITE[i] != -1}
    found = np.asarray(pool, np.float64)
    want = truth["final_state"][list(written.values())]
    assert_close(want, found[list(written)], BOUNDS[pool_dtype][0]["final_state"], "pool")
    untouched = [s for s in range(8) if s not in written]
    np.testing.assert_array_equal(found[untouched], np.asarray(x["pool"], np.float64)[untouched])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates(lower_bound):
    """The kernel's gates are finite and those of the family for any parameter."""
    x = jnp.array([-120.0, -81, -20, -1e-3, 0, 1e-3, 5, 120], jnp.float32)
    for A_log in (-80.0, 0.0, 3.0, 90.0):
        A = jnp.float32(A_log)
        want = channel_log_decay(x[None, None], A[None], jnp.zeros((1, 8)), lower_bound)[0, 0]
        found = log_decays(x, A, lower_bound)
        assert np.isfinite(found).all()
        # exp(g) holds g's error, five roundings of 2^-24, times |g|: up to 69 where exp(g) passes 1e-30.
        np.testing.assert_allclose(jnp.exp(found), jnp.exp(want), rtol=2e-5, atol=1e-30)
