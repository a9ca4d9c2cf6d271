"""Deferred writes: decode, verify, flush and snapshot on a ring, against plain decoding and against the oracle."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from serving_cases import HK, K, V, assert_same_bits, compiled, draw, draw_pool, expected, one
from tolerances import assert_close

from gdn_jax import serving

BF16 = ml_dtypes.bfloat16
STATE_F32 = 1e-5  # as in test_serving.py
SLOTS = np.array([3, 0, 4])


def make(pool, length, dtype=np.float32, state_layout="kv", num_key_heads=HK):
    return serving.make_ring_pool(
        jnp.array(pool), num_key_heads=num_key_heads, length=length, dtype=dtype, state_layout=state_layout
    )


def littered(ring):
    """The ring with NaN in every entry that holds no token: what an earlier request left there is never read."""
    return ring._replace(k=ring.k * np.nan, u=ring.u * np.nan, g=ring.g * np.nan)


@pytest.mark.parametrize("state_layout", ["kv", "vk"])
@pytest.mark.parametrize("length", [1, 3, 16])
def test_decode(length, state_layout):
    """Token for token the oracle's outputs; states are written when the ring is full, and only then."""
    T = 37
    x, pool = draw(3, T), draw_pool(6, state_layout=state_layout)
    ring = littered(make(pool, length, state_layout=state_layout))
    call = compiled(serving.decode, state_layout=state_layout)
    want_o, want = expected(x, pool[SLOTS], state_layout=state_layout)
    for t in range(T):
        before = ring
        o, ring = call(*one(x, t), ring, **x.gates, read_slots=SLOTS)
        assert_close(want_o[:, t], o, STATE_F32, f"o of token {t}", 1)
        if (t + 1) % length:
            assert_same_bits(before.state, ring.state)
        np.testing.assert_array_equal(np.asarray(ring.count)[SLOTS], (t + 1) % length)
    present = compiled(serving.snapshot, state_layout=state_layout)(ring, SLOTS)
    assert_close(want, present, STATE_F32, "states", 1)
    flushed = compiled(serving.flush, state_layout=state_layout)(ring, SLOTS)
    assert_same_bits(present, np.asarray(flushed.state)[SLOTS])
    assert not np.asarray(flushed.count).any()
    others = [1, 2, 5]
    for new in (ring, flushed):
        assert_same_bits(pool[others], np.asarray(new.state)[others])


@pytest.mark.parametrize("optimised", [False, True])
@pytest.mark.parametrize("pool_dtype", [np.float32, BF16])
def test_a_ring_of_one_token_is_plain_decoding(pool_dtype, optimised, request):
    """Bit for bit, outputs and states, whatever the dtype of the ring."""
    if optimised:
        request.getfixturevalue("compile_as_users_do")
    x, pool = (
        draw(3, 20, heads=(1, 2), widths=(32, 16)),
        draw_pool(5, HV=2, widths=(32, 16), dtype=pool_dtype),
    )
    plain, ring = jnp.array(pool), make(pool, 1, BF16, num_key_heads=1)
    for t in range(20):
        # Not compiled(): each call is a program of its own, as users call it.
        o, plain = serving.decode(*one(x, t), plain, **x.gates, read_slots=SLOTS)
        same, ring = serving.decode(*one(x, t), ring, **x.gates, read_slots=SLOTS)
        assert_same_bits(o, same, f"o of token {t}")
        assert_same_bits(plain, ring.state, f"states after token {t}")


def test_rings_of_different_age():
    """Every slot has a cursor of its own; padding touches none; a slot that is read may stay as it is."""
    T, L = 24, 5
    x, pool = draw(4, T, seed=2), draw_pool(6)
    ring = littered(make(pool, L))
    states, age = pool[:4].astype(np.float64), np.zeros(4, int)
    rng = np.random.default_rng(0)
    call = compiled(serving.decode)
    for t in range(T):
        active = rng.random(4) < 0.6
        slots = np.where(active, np.arange(4), -1)
        o, ring = call(*one(x, t), ring, **x.gates, read_slots=jnp.asarray(slots))
        want, after = expected(x.at(slice(None), slice(t, t + 1)), states)
        states[active] = after[active]
        age = np.where(active, (age + 1) % L, age)
        np.testing.assert_array_equal(np.asarray(ring.count)[:4], age)
        if active.any():
            assert_close(want[active, 0], np.asarray(o)[active], STATE_F32, f"o of token {t}")
        assert not np.asarray(o)[~active].any()
    assert_close(states, compiled(serving.snapshot)(ring, np.arange(4)), STATE_F32)
    # Reading slot 1 and writing slot 5: the whole state goes there, and slot 1 keeps its state and its ring.
    o, new = call(
        *one(x, 0),
        ring,
        **x.gates,
        read_slots=np.array([1, -1, -1, -1]),
        write_slots=np.array([5, -1, -1, -1]),
    )
    want, after = expected(x.at(slice(1), slice(1)), states[[1]])
    row = x.at(slice(1), slice(1))
    want, after = expected(row, states[[1]])
    assert_close(want[0, 0], o[0], STATE_F32)
    assert_close(after[0], new.state[5], STATE_F32)
    assert int(new.count[5]) == 0
    for a, b in zip(ring, new, strict=True):
        assert_same_bits(a[:5], b[:5])


def test_verify():
    """Four tokens a step, a random number of which is accepted: outputs and states are plain decoding's of those, and
    no state is written but when the ring has no room for a step."""
    L, T, steps = 9, 4, 30
    x, pool = draw(2, T * steps, seed=4), draw_pool(3)
    ring = littered(make(pool, L))
    states = pool[[2, 0]].astype(np.float64)
    rng = np.random.default_rng(1)
    accepted = np.array([1, 1])
    call = compiled(serving.verify)
    flushes = 0
    for i in range(steps):
        before = ring
        span = x.at(slice(None), slice(T * i, T * i + T))
        o, ring = call(
            *span.tokens, ring, **x.gates, state_slots=np.array([2, 0]), num_accepted_tokens=accepted
        )
        kept = np.minimum(np.asarray(before.before)[[2, 0]] + accepted, np.asarray(before.count)[[2, 0]])
        for row, slot in enumerate((2, 0)):
            if kept[row] + T <= L:
                assert_same_bits(before.state[slot], ring.state[slot])
            else:
                flushes += 1
        accepted = rng.integers(1, T + 1, 2)
        for row in range(2):
            want, after = expected(span.at(slice(row, row + 1), slice(accepted[row])), states[[row]])
            assert_close(want[0], np.asarray(o)[row, : accepted[row]], STATE_F32, f"o of step {i}", 1)
            states[row] = after[0]
    assert 10 < flushes < 2 * steps
    assert_same_bits(pool[1], ring.state[1])
    # A step of plain decoding after the last drafts were rejected.
    ring = compiled(serving.accept)(ring, np.array([2, 0]), accepted)
    assert_close(states, compiled(serving.snapshot)(ring, np.array([2, 0])), STATE_F32)
    some = draw(2, 1, seed=9)
    o, ring = compiled(serving.decode)(*one(some), ring, **x.gates, read_slots=np.array([2, 0]))
    want, _ = expected(some._replace(A_log=x.A_log, dt_bias=x.dt_bias), states)
    assert_close(want[:, 0], o, STATE_F32)


def test_verify_after_decode_and_uneven_numbers_of_tokens():
    """After decode one token counts as accepted, whether it was flushed or not; a request may have no tokens."""
    x, pool = draw(3, 9, seed=8), draw_pool(3)
    ring, states = make(pool, 6), pool.astype(np.float64)
    all_slots, ones = np.arange(3), np.ones(3, int)
    for t, lengths in enumerate(([1, 1, 1], [3, 1, 0], [2, 3, 3])):
        span = x.at(slice(None), slice(3 * t, 3 * t + 3))
        if t == 0:
            o, ring = compiled(serving.decode)(*one(span), ring, **x.gates, read_slots=all_slots)
            o, accepted = o[:, None], ones
        else:
            o, ring = compiled(serving.verify)(
                *span.tokens,
                ring,
                **x.gates,
                state_slots=all_slots,
                num_accepted_tokens=accepted,
                num_tokens=np.array(lengths),
            )
            accepted = np.maximum(lengths, 1)
        for n, length in enumerate(lengths):
            if length:
                want, after = expected(span.at(slice(n, n + 1), slice(length)), states[[n]])
                assert_close(want[0], np.asarray(o)[n, :length], STATE_F32, f"step {t}, request {n}")
                states[n] = after[0]
            assert not np.asarray(o)[n, length:].any()
    assert_close(states, compiled(serving.snapshot)(ring, all_slots), STATE_F32)


def test_a_wrong_number_of_accepted_tokens_is_padding():
    x, pool = draw(2, 2), draw_pool(2)
    ring = make(pool, 4)
    o, new = compiled(serving.verify)(
        *x.tokens, ring, **x.gates, state_slots=np.arange(2), num_accepted_tokens=jnp.array([0, 3])
    )
    assert not np.asarray(o).any()
    for a, b in zip(ring, new, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("pool_dtype", [np.float32, BF16])
def test_a_bfloat16_ring_is_no_less_accurate_than_a_bfloat16_pool(pool_dtype):
    """Over 600 tokens with keys and values of the ring in bfloat16, states in bfloat16 are rounded a sixteenth as
    often; beside float32 states only the ring is rounded."""
    T = 600
    x = draw(2, T, heads=(1, 2), widths=(32, 32))
    x = x._replace(A_log=np.full(2, np.log(0.05), np.float32))
    pool = draw_pool(2, HV=2, widths=(32, 32)).astype(pool_dtype)
    plain, ring = jnp.array(pool.astype(BF16)), make(pool, 16, BF16, num_key_heads=1)
    want, _ = expected(x, pool)
    outputs = []
    for t in range(T):
        o, plain = compiled(serving.decode)(*one(x, t), plain, **x.gates, read_slots=np.arange(2))
        deferred, ring = compiled(serving.decode)(*one(x, t), ring, **x.gates, read_slots=np.arange(2))
        outputs.append((o, deferred))
    late = slice(100, None)
    errors = [
        np.sqrt(np.mean((np.stack(o, 1) - want)[:, late] ** 2) / np.mean(want[:, late] ** 2))
        for o in zip(*outputs, strict=True)
    ]
    assert errors[1] < errors[0] < 2e-2


def test_a_pool_of_several_layers():
    """One ring pool for a model, of which a call touches a layer."""
    x = draw(2, 5)
    pools = np.stack([draw_pool(3, seed) for seed in range(2)], 1)
    ring, alone = make(pools, 3), make(pools[:, 1], 3)
    options = dict(**x.gates, read_slots=np.array([2, 0]))
    for t in range(5):
        o, ring = compiled(serving.decode)(*one(x, t), ring, layer=1, **options)
        want, alone = compiled(serving.decode)(*one(x, t), alone, **options)
        np.testing.assert_allclose(want, o, rtol=1e-5, atol=1e-6)
    assert_same_bits(pools[:, 0], ring.state[:, 0])
    assert not np.asarray(ring.count[:, 0]).any()
    np.testing.assert_array_equal(alone.count, ring.count[:, 1])


def test_a_copied_slot_goes_on_by_itself():
    """copy_slots takes state, ring and cursor: two requests that share a prefix part ways."""
    x, pool = draw(1, 6), draw_pool(3)
    ring = make(pool, 4)
    for t in range(3):
        _, ring = compiled(serving.decode)(*one(x, t), ring, **x.gates, read_slots=np.array([0]))
    ring = compiled(serving.copy_slots)(ring, np.array([0]), np.array([2]))
    first = draw(2, 3, seed=12)._replace(A_log=x.A_log, dt_bias=x.dt_bias)
    want_o, _ = expected(first, np.repeat(expected(x.at(slice(None), slice(3)), pool[:1])[1], 2, 0))
    for t in range(3):
        o, ring = compiled(serving.decode)(*one(first, t), ring, **x.gates, read_slots=np.array([0, 2]))
        assert_close(want_o[:, t], o, STATE_F32)


@pytest.mark.usefixtures("compile_as_users_do")
def test_batch_invariance():
    """A request's bits do not depend on the others, nor on when they flush."""
    x, pool = draw(4, 7, widths=(32, 48)), draw_pool(4, widths=(32, 48))
    call = compiled(serving.decode, batch_invariant=True)
    together, alone = make(pool, 3), make(pool, 3)
    for t in range(7):
        active = np.array([t != 2, t > 3, True, t % 2])
        o, together = call(*one(x, t), together, **x.gates, read_slots=np.where(active, np.arange(4), -1))
        same, alone = call(*one(x.at([2]), t), alone, **x.gates, read_slots=np.array([2]))
        assert_same_bits(o[2], same[0])
    for a, b in zip(together, alone, strict=True):
        assert_same_bits(a[2], b[2])


def test_sizes():
    ring = make(draw_pool(3, state_layout="vk"), 4, BF16, state_layout="vk")
    assert ring.length == 4 and ring.k.shape == (3, 2, 4, K) and ring.u.shape == (3, 4, 4, V)
    assert ring.k.dtype == BF16 and ring.g.dtype == np.float32
