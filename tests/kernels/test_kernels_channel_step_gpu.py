"""The decode kernel with a decay of each channel on a GPU of compute capability 9.0, through the public call: values,
the bits of all other slots, pools past 2^31 entries, repeats."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels_channel_step import TREE, assert_drafts_are_right, drafts
from tolerances import assert_close

from gdn_jax import serving
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import BOUNDS
from gdn_jax.gates import channel_log_decay

pytestmark = pytest.mark.gpu

HEADS, D = (16, 16, 32), 128


def draw(N: int, heads=HEADS):
    """Tokens, states [N, HV, K, V] and the parameters of the gates, which are weak in some channels."""
    Hq, Hk, HV = heads
    keys = iter(jax.random.split(jax.random.key(3), 9))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    token = normal(N, Hq, D), normal(N, Hk, D), normal(N, HV, D), 4 * normal(N, HV, D), normal(N, HV)
    gates = dict(A_log=normal(HV, dtype=jnp.float32), dt_bias=normal(HV, D, dtype=jnp.float32))
    return token, normal(N, HV, D, D, dtype=jnp.float32), gates


def truth(token, states, gates, layout, w=None):
    """Outputs [N, HV, V] and states in float64; w: raw input of what is written, where b is that of erase alone."""
    q, k, v, _, b = (np.asarray(y, np.float64)[:, None] for y in token)
    g = np.asarray(
        channel_log_decay(token[3][:, None], gates["A_log"], gates["dt_bias"], gates["lower_bound"])
    )
    strengths: dict = dict(beta=1 / (1 + np.exp(-b)))
    if w is not None:
        strengths = dict(erase=strengths["beta"], write=1 / (1 + np.exp(-np.asarray(w, np.float64)[:, None])))
    o, final = oracle.forward(
        q, k, v, g=g.astype(np.float64), **strengths, use_qk_l2norm=True, state_layout=layout,
        initial_state=np.asarray(states, np.float64),
    )  # fmt: skip
    return o[:, 0], final


@pytest.mark.parametrize("N", [1, 5, 128])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode(dtype, layout, lower_bound, N):
    """Outputs, written slots, all others and repeats; one of several requests is padding."""
    token, states, gates = draw(N)
    gates |= dict(lower_bound=lower_bound)
    pool = jnp.full((N + 2, *states.shape[1:]), jnp.nan, dtype)
    slots = np.random.default_rng(0).permutation(N + 2)[:N].astype(np.int32)
    pool = pool.at[slots].set(states.astype(dtype))
    read = np.where(np.arange(N) == 1, -1, slots)
    real = np.flatnonzero(read >= 0)
    call = partial(serving.decode, **gates, state_layout=layout, implementation="mosaic_gpu")
    run = jax.jit(lambda token, pool: call(*token, pool, read_slots=jnp.asarray(read)))
    o, after = run(token, pool)
    some = [y[real] for y in token]
    want, last = truth(some, pool[slots[real]].astype(jnp.float32), gates, layout)
    assert_close(want, np.asarray(o, np.float64)[real], BOUNDS["bfloat16"][0]["o"], "o", 1)
    assert not np.delete(np.asarray(o, np.float64), real, 0).any()
    written = np.asarray(after[slots[real]].astype(jnp.float32), np.float64)
    assert_close(last, written, BOUNDS[dtype][0]["final_state"], "pool", 1)
    others = np.setdiff1d(np.arange(N + 2), slots[real])
    before, kept = (np.asarray(y[others]).view(np.uint8) for y in (pool, after))
    np.testing.assert_array_equal(kept, before)
    same = jax.jit(lambda a, b: jnp.array_equal(a[0], b[0]) & jnp.array_equal(a[1], b[1], equal_nan=True))
    assert all(bool(same((o, after), run(token, pool))) for _ in range(20))


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strengths_apart(dtype, layout):
    """Erase and write of each channel: outputs, states and repeats."""
    (*token, b), states, gates = draw(5)
    rng = np.random.default_rng(0)
    b, w = (jnp.asarray(rng.standard_normal((*b.shape, D)), jnp.bfloat16) for _ in range(2))
    gates |= dict(lower_bound=-5.0)
    pool, slots = states.astype(dtype), np.arange(5, dtype=np.int32)
    call = partial(serving.decode, **gates, w=w, state_layout=layout, implementation="mosaic_gpu")
    run = jax.jit(lambda pool: call(*token, b, pool, read_slots=slots))
    o, after = run(pool)
    want, last = truth((*token, b), pool.astype(jnp.float32), gates, layout, w)
    assert_close(want, np.asarray(o, np.float64), BOUNDS["bfloat16"][0]["o"], "o", 1)
    assert_close(last, np.asarray(after, np.float64), BOUNDS[dtype][0]["final_state"], "pool", 1)
    same = jax.jit(lambda a, b: jnp.array_equal(a[0], b[0]) & jnp.array_equal(a[1], b[1]))
    assert all(bool(same((o, after), run(pool))) for _ in range(20))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_past_two_to_the_31(dtype):
    """States of which the last begin past 2^31 entries."""
    slots, heads = 4200, (32, 32, 32)
    token, states, gates = draw(4, heads)
    read = np.array([0, slots - 1, slots - 7, 2500], np.int32)
    gates |= dict(lower_bound=None)
    zeros = jnp.zeros((slots, 32, D, D), dtype)
    pool = jax.jit(lambda pool, x: pool.at[read].set(x.astype(dtype)), donate_argnums=0)(zeros, states)
    o, pool = serving.decode(*token, pool, **gates, read_slots=read, implementation="mosaic_gpu")
    want, last = truth(token, states.astype(dtype).astype(jnp.float32), gates, "kv")
    assert_close(want, np.asarray(o, np.float64), BOUNDS["bfloat16"][0]["o"], "o", 1)
    written = np.asarray(pool[read].astype(jnp.float32), np.float64)
    assert_close(last, written, BOUNDS[dtype][0]["final_state"], "pool", 1)
    assert not bool(jax.jit(lambda pool: pool.at[read].set(0).any(), donate_argnums=0)(pool))


def test_packed_channels_of_a_convolution():
    """The kernel reads q, k and v where they lie: the bits of separate arrays."""
    (q, k, v, a, b), states, gates = draw(8)
    slots = np.arange(8, dtype=np.int32)
    options = dict(**gates, read_slots=slots, implementation="mosaic_gpu")
    qkv = jnp.concatenate([y.reshape(8, -1) for y in (q, k, v)], -1)
    one = serving.decode(q, k, v, a, b, jnp.array(states), **options)
    other = serving.decode_packed(qkv, a, b, jnp.array(states), **options)
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("apart", [False, True], ids=["beta", "apart"])
def test_verify(apart):
    """Trees of drafts by the public call."""
    options = dict(apart=apart, public=True, sizes=(16, 16, 32, 128, 128), N=24)
    assert_drafts_are_right("float32", *drafts("float32", True, TREE, **options))


@pytest.mark.parametrize("apart", [False, True], ids=["beta", "apart"])
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kv_layout", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts(dtype, kv_layout, parents, apart):
    """Four tokens of each request: outputs and states of plain JAX."""
    sizes = (16, 16, 32, 128, 128)
    assert_drafts_are_right(dtype, *drafts(dtype, kv_layout, parents, apart=apart, sizes=sizes, N=24))
