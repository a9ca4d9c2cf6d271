"""The decode kernel with a decay for each key channel: near the oracle when interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from fused_harness import draws
from jax.experimental.pallas import mosaic_gpu as plgpu
from serving_cases import assert_same_bits
from tolerances import assert_close

from gdn_jax import serving
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import BOUNDS
from gdn_jax.gates import channel_log_decay
from gdn_jax.serving.call import interpreted
from pallas_kernels.decode.apart_step import apart_step
from pallas_kernels.decode.channel_step import channel_step
from pallas_kernels.device.gates import log_decays

READ, WRITE, NULL = [3, -1, 1, 6, 0], [3, 5, 4, 2, -1], 6
SIZES = {"Hq": 1, "Hk": 2, "HV": 2, "K": 64, "V": 32}


def draw(pool_dtype, kv_layout, apart=False):
    """Tokens and a pool; gates are weak in some channels, strong in others. apart: strengths of every channel."""
    Hq, Hk, HV, K, V = SIZES.values()
    normal, rows, bf16 = draws(3), (len(READ), 1), dict(dtype="bfloat16")
    shapes = {"q": (Hq, K), "k": (Hk, K), "v": (HV, V)} | (
        dict(b=(HV, K), w=(HV, V)) if apart else dict(b=(HV,))
    )
    x = {name: normal(*rows, *shape, **bf16) for name, shape in shapes.items()}
    x["a"] = normal(*rows, HV, K, scale=4.0, **bf16)
    x["pool"] = normal(8, HV, *((K, V) if kv_layout else (V, K)), dtype=pool_dtype)
    return x, normal(HV), normal(HV, K)


@pytest.mark.parametrize(
    ("pool_dtype", "kv_layout", "lower_bound", "use_A_log", "apart"),
    [
        ("float32", True, None, True, False),
        ("bfloat16", True, -5.0, False, False),
        ("float32", False, -5.0, True, False),
        ("bfloat16", False, None, True, False),
        ("bfloat16", True, None, True, True),
        pytest.param("float32", False, -5.0, False, True, marks=pytest.mark.slow),
    ],
)
def test_step(pool_dtype, kv_layout, lower_bound, use_A_log, apart):
    """Outputs and written slots near the oracle; padding gives 0, and the other slots keep their bits."""
    x, A_log, dt_bias = draw(pool_dtype, kv_layout, apart)
    A_log = A_log if use_A_log else None
    flat = [put(np.asarray(x[n]).reshape(len(READ), 1, -1)) for n in "qkv"]
    strengths = [x[n] for n in "bw" if n in x]
    o, pool = (apart_step if apart else channel_step)(
        *flat, x["a"], *strengths, x["pool"], A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        heads=(SIZES["Hq"], SIZES["Hk"], SIZES["HV"]), scale=0.3, kv_layout=kv_layout, null_slot=NULL,
        read_slots=put(READ, jnp.int32), write_slots=put(np.array(WRITE)[:, None], jnp.int32),
        allow_neg_eigval=apart, interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    real = [i for i, s in enumerate(READ) if s not in (-1, NULL)]
    arrays = {n: np.asarray(x[n], np.float64)[real] for n in "qkv"}
    g = jax.jit(functools.partial(channel_log_decay, lower_bound=lower_bound))(x["a"], A_log, dt_bias)
    initial = np.asarray(x["pool"], np.float64)[[READ[i] for i in real]]
    beta, *write = (1 / (1 + np.exp(-np.asarray(y, np.float64)[real])) for y in strengths)
    written = dict(erase=2 * beta, write=write[0]) if apart else dict(beta=beta)
    true_o, true_states = oracle.forward(
        **arrays, **written, g=np.asarray(g, np.float64)[real], scale=0.3, use_qk_l2norm=True,
        initial_state=initial, state_layout="kv" if kv_layout else "vk",
    )  # fmt: skip
    o = np.asarray(o, np.float64)
    assert_close(true_o, o[real], BOUNDS["bfloat16"][0]["o"], "o")
    assert not np.delete(o, real, 0).any()
    written = {WRITE[i]: n for n, i in enumerate(real) if WRITE[i] != -1}
    found = np.asarray(pool, np.float64)
    want = true_states[list(written.values())]
    assert_close(want, found[list(written)], BOUNDS[pool_dtype][0]["final_state"], "pool")
    untouched = [s for s in range(8) if s not in written]
    np.testing.assert_array_equal(found[untouched], np.asarray(x["pool"], np.float64)[untouched])


TREE = [[-1, 0, 0, 1], [-1, -1, 1, 0], [-1, 0, 1, 2]]


def drafts(pool_dtype, kv_layout, parents, *, apart=False, public=False, sizes=None, N=3, interpret=None):
    """Four drafts of each request, of which the second has two: outputs and pools of the kernel and of plain JAX.

    public: calls the kernel through `serving.verify`.
    """
    Hq, Hk, HV, K, V = sizes or SIZES.values()
    T, draw = 4, draws(5)

    def normal(*shape, dtype="bfloat16", scale=1.0):
        return draw(*shape, dtype=dtype, scale=scale)

    tokens = (
        normal(N, T, Hq, K),
        normal(N, T, Hk, K),
        normal(N, T, HV, V),
        normal(N, T, HV, K, scale=4.0),
        normal(N, T, HV, *((K,) if apart else ())),
    )
    w = normal(N, T, HV, V) if apart else None
    gates = dict(
        A_log=normal(HV, dtype=jnp.float32), dt_bias=normal(HV, K, dtype=jnp.float32), lower_bound=None
    )
    state = (K, V) if kv_layout else (V, K)
    pool = normal(4 * N + 1, HV, *state, dtype=pool_dtype)
    slots = put(np.random.default_rng(0).permutation(4 * N).reshape(N, T).astype(np.int32))
    num_tokens = put(np.where(np.arange(N) == 1, 2, T).astype(np.int32))
    parents = None if parents is None else put(np.resize(parents, (N, T)), jnp.int32)
    rest = dict(num_tokens=num_tokens, parents=parents)
    spans = rest | dict(state_slots=slots, num_accepted_tokens=np.full(N, 3, np.int32))
    layout = "kv" if kv_layout else "vk"
    want = serving.verify(
        *tokens, put(pool), w=w, **gates, **spans, state_layout=layout, implementation="xla"
    )
    if public:
        options = dict(state_layout=layout, implementation="mosaic_gpu")
        return want, serving.verify(*tokens, put(pool), w=w, **gates, **spans, **options), pool, slots
    q, k, v = (x.reshape(N, T, -1) for x in tokens[:3])
    options = rest | dict(
        heads=(Hq, Hk, HV), scale=K**-0.5, kv_layout=kv_layout, null_slot=None, interpret=interpret
    )
    options |= dict(read_slots=put(np.asarray(slots)[:, 2]), write_slots=slots)
    run = functools.partial(apart_step if apart else channel_step, **gates, **options)
    got = (run if interpret else jax.jit(run))(q, k, v, *tokens[3:], *([w] if apart else []), pool)
    return want, got, pool, slots


@pytest.mark.parametrize(
    ("pool_dtype", "kv_layout", "parents", "apart", "sizes"),
    [
        pytest.param("bfloat16", True, TREE, False, {}, marks=pytest.mark.slow),
        pytest.param("float32", True, None, False, {}, marks=pytest.mark.slow),
        pytest.param("float32", False, TREE, False, {}, marks=pytest.mark.slow),
        pytest.param("float32", True, TREE, True, {}, marks=pytest.mark.slow),
        ("float32", True, TREE[:2], False, dict(N=2, sizes=(1, 1, 1, 32, 32))),
    ],
)
def test_drafts(pool_dtype, kv_layout, parents, apart, sizes):
    """Outputs and states of chains and trees are those of plain JAX."""
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    results = drafts(pool_dtype, kv_layout, parents, apart=apart, interpret=interpret, **sizes)
    assert_drafts_are_right(pool_dtype, *results)


def assert_drafts_are_right(pool_dtype, want, got, pool, slots):
    """Near plain JAX's; what nobody wrote keeps its bits."""
    (o, after), (o_, after_) = ([np.asarray(y, np.float64) for y in pair] for pair in (want, got))
    assert_close(o, o_, BOUNDS["bfloat16"][0]["o"], "o")
    written = np.delete(np.asarray(slots).ravel(), [6, 7])  # but the second request's padding
    assert_close(after[written], after_[written], BOUNDS[pool_dtype][0]["final_state"], "pool")
    others = np.setdiff1d(np.arange(len(pool)), written)
    np.testing.assert_array_equal(after_[others], np.asarray(pool, np.float64)[others])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates(lower_bound):
    """The kernel's gates are finite and those of the family for any parameter."""
    x = put([-120.0, -81, -20, -1e-3, 0, 1e-3, 5, 120], jnp.float32)
    of_family = jax.jit(
        lambda x, A: channel_log_decay(x[None, None], A[None], jnp.zeros((1, 8)), lower_bound)[0, 0]
    )
    of_kernel = jax.jit(functools.partial(log_decays, lower_bound=lower_bound))
    for A_log in (-80.0, 0.0, 3.0, 90.0):
        A = put(A_log, "float32")
        want, found = np.asarray(of_family(x, A)), np.asarray(of_kernel(x, A))
        assert np.isfinite(found).all()
        # exp(g) holds g's error, five roundings of 2^-24, times |g|: up to 69 where exp(g) passes 1e-30.
        np.testing.assert_allclose(np.exp(found), np.exp(want), rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize(
    ("bias", "strengths"),
    [
        ("channel", "beta"),
        pytest.param("head", "beta", marks=pytest.mark.slow),
        ("channel", "of channels"),
        pytest.param("head", "of heads", marks=pytest.mark.slow),
    ],
)
def test_a_token_by_the_kernel(bias, strengths):
    """Interpreted, from the packed channels of a convolution: outputs and pool of plain JAX, padding and all."""
    rng, heads, width = np.random.default_rng(0), 2, 32
    N, slots = 3, np.array([3, -1, 0], np.int32)

    def normal(*shape, dtype=jnp.float32):
        return put(rng.standard_normal(shape), dtype)

    channels = (width,) if bias == "channel" else ()
    token = (
        normal(N, 4 * width + heads * width, dtype=jnp.bfloat16),
        normal(N, heads, *channels),
        normal(N, heads, *((width,) if strengths == "of channels" else ())),
    )
    gates = dict(A_log=normal(heads), dt_bias=normal(heads, *channels), lower_bound=-5.0)
    gates |= {} if strengths == "beta" else dict(w=normal(*token[2].shape))
    pool = normal(5, heads, width, width)

    def decode(by):
        return serving.decode_packed(*token, put(pool), **gates, read_slots=slots, implementation=by)

    want = decode("xla")
    with interpreted(plgpu.InterpretGPUParams(detect_races=True)):
        got = decode("mosaic_gpu")
    assert_close(np.asarray(want[0], np.float64), np.asarray(got[0], np.float64), BOUNDS["bfloat16"][0]["o"])
    assert not np.asarray(got[0], np.float64)[1].any()
    assert_close(np.asarray(want[1])[slots[::2]], np.asarray(got[1])[slots[::2]], 1e-5)
    others = np.setdiff1d(np.arange(5), slots)
    assert_same_bits(np.asarray(pool)[others], np.asarray(got[1])[others])
