"""The convolution over a pool of its states, against the plain operations, which are tested against float64."""

import ml_dtypes
import numpy as np
import pytest
from device_arrays import put
from serving_cases import assert_same_bits, compiled

from gdn_jax import serving
from gdn_jax.parts import conv

BF16 = ml_dtypes.bfloat16
D, W = 5, 4
RNG = np.random.default_rng(0)
WEIGHT, BIAS = (RNG.standard_normal(shape).astype(np.float32) / 2 for shape in ((D, W), (D,)))
F32 = dict(rtol=1e-6, atol=1e-6)  # as in test_conv.py


def draw(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("pool_dtype", [np.float32, BF16])
def test_prompts(pool_dtype):
    """New and continued requests, padding, an empty sequence and ones shorter than the filter."""
    cu = np.array([0, 2, 2, 9, 10, 15])
    x, pool = draw(1, 17, D), draw(8, D, W - 1, dtype=pool_dtype)
    read, write = np.array([6, 2, 0, -1, 3]), np.array([6, 5, 1, 7, -1])
    starts = np.array([True, True, False, True, True])
    y, new = compiled(serving.causal_conv1d)(
        x, put(cu), pool, WEIGHT, BIAS, read_slots=read, write_slots=write, has_initial_state=starts
    )
    state = np.where(starts[:, None, None], pool[read], 0)
    want, final = compiled(conv.causal_conv1d)(x, WEIGHT, BIAS, initial_state=state, cu_seqlens=cu)
    real = np.r_[:9, 10:15]
    np.testing.assert_allclose(want[:, real], y[:, real], **F32)
    assert not np.asarray(y)[:, [9, 15, 16]].any()
    assert_same_bits(np.asarray(final)[:3], np.asarray(new)[[6, 5, 1]])
    others = [0, 2, 3, 4, 7]
    assert_same_bits(pool[others], np.asarray(new)[others])


def test_one_token():
    x, pool = draw(4, D, dtype=BF16), draw(6, D, W - 1)
    read, write = np.array([5, -1, 2, 0]), np.array([5, 3, 1, 4])
    y, new = compiled(serving.causal_conv1d_update, null_slot=0)(
        x, pool, WEIGHT, read_slots=read, write_slots=write
    )
    want, state = conv.causal_conv1d_update(put(x), put(pool[read]), put(WEIGHT))
    assert y.dtype == BF16
    np.testing.assert_array_equal(np.asarray(want)[[0, 2]], np.asarray(y)[[0, 2]])
    assert not np.asarray(y)[[1, 3]].any()
    assert_same_bits(np.asarray(state)[[0, 2]], np.asarray(new)[[5, 1]])
    others = [0, 2, 3, 4]
    assert_same_bits(pool[others], np.asarray(new)[others])


def test_rejected_drafts_are_rolled_back():
    """The walk-through of test_serving_drafts.py for the convolution: what was not accepted leaves no trace."""
    x, pool, slots = draw(1, 12, D), draw(6, D, W - 1), np.array([[4, 1, 5, 2]])
    state, at, accepted = pool[[4]], 0, 1
    for then_accepted in (3, 1, 4, 2):
        y, new = compiled(serving.causal_conv1d_verify)(
            x[:, at : at + 4],
            pool,
            WEIGHT,
            BIAS,
            state_slots=slots,
            num_accepted_tokens=np.array([accepted]),
        )
        assert_same_bits(pool[[0, 3]], np.asarray(new)[[0, 3]])
        pool = np.asarray(new)
        for t in range(then_accepted):
            want, state = compiled(conv.causal_conv1d_update)(x[:, at + t], state, WEIGHT, BIAS)
            np.testing.assert_allclose(want, y[:, t], **F32)
            assert_same_bits(state[0], pool[slots[0, t]])
        at, accepted = at + then_accepted, then_accepted


def test_trees_and_uneven_numbers_of_tokens():
    """A token sees the inputs of its own path."""
    parents = np.array([[-1, 0, 0, 2, 1, 3], [-1, 0, 1, 2, 3, 4]])
    x, pool, slots = draw(2, 6, D), draw(12, D, W - 1), np.arange(12).reshape(2, 6)
    y, new = compiled(serving.causal_conv1d_verify)(
        x,
        pool,
        WEIGHT,
        BIAS,
        state_slots=slots,
        num_accepted_tokens=np.array([6, 1]),
        num_tokens=np.array([6, 2]),
        parents=parents,
    )
    for n, tokens in ((0, 6), (1, 2)):
        start = pool[slots[n, (5, 0)[n]]]
        after = {-1: start}
        for t in range(tokens):
            state = after[parents[n, t]][None]
            want, state = compiled(conv.causal_conv1d_update)(x[n, t][None], state, WEIGHT, BIAS)
            np.testing.assert_allclose(want[0], y[n, t], **F32)
            assert_same_bits(state[0], new[slots[n, t]])
            after[t] = np.asarray(state[0])
    assert not np.asarray(y)[1, 2:].any()
    assert_same_bits(pool[slots[1, 2:]], np.asarray(new)[slots[1, 2:]])


def test_a_pool_of_several_layers():
    x, pools = draw(2, D), draw(4, 3, D, W - 1)
    y, new = compiled(serving.causal_conv1d_update)(x, pools, WEIGHT, read_slots=np.array([3, 1]), layer=2)
    want, alone = compiled(serving.causal_conv1d_update)(x, pools[:, 2], WEIGHT, read_slots=np.array([3, 1]))
    np.testing.assert_allclose(want, y, **F32)
    assert_same_bits(alone, np.asarray(new)[:, 2])
    assert_same_bits(pools[:, :2], np.asarray(new)[:, :2])
