"""Deferred writes: decode, verify, flush and snapshot on a ring, against plain decoding and against the oracle."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from device_arrays import put
from serving_cases import HK, K, V, assert_same_bits, compiled, draw, draw_pool, expected, one, slow
from tolerances import assert_close, bound, rms_ratio

from gdn_jax import serving

BF16 = ml_dtypes.bfloat16
STATE_F32 = 1e-5  # as in test_serving.py
# One length, three requests and six slots in most tests: they share what is compiled.
LENGTH = 9
SLOTS = np.array([3, 0, 4])


def make(pool, length, dtype=np.float32, num_key_heads=HK, **options):
    return serving.make_ring_pool(
        put(pool), num_key_heads=num_key_heads, length=length, dtype=dtype, **options
    )


def littered(ring):
    """The ring with NaN in every entry that holds no token: what an earlier request left there is never read."""
    return ring._replace(k=ring.k * np.nan, u=ring.u * np.nan, g=ring.g * np.nan)


@pytest.mark.parametrize(
    "gates, length, state_layout",
    [
        slow("heads", 1, "kv"),
        pytest.param("heads", LENGTH, "kv", marks=pytest.mark.crossed),
        ("heads", LENGTH, "vk"),
        ("KDA bounded", LENGTH, "kv"),
        *(slow(name, LENGTH, "vk") for name in ("KDA", "GDN-2", "decay of a head")),
    ],
)
def test_decode(gates, length, state_layout):
    """Token for token the oracle's outputs, whatever other slots hold; states are written when the ring is full, and
    only then. A present state without tokens since has the bits of the state."""
    T = 37
    x, pool = draw(3, T, gates=gates), draw_pool(6, state_layout=state_layout)
    pool[SLOTS[0], 0, 0, 0], pool[1:3], pool[5] = -0.0, np.nan, 3e38
    ring = littered(make(pool, length, state_layout=state_layout, channels=x.by_channels))
    assert_same_bits(compiled(serving.snapshot, state_layout=state_layout)(ring, SLOTS), pool[SLOTS])
    want_o, want = expected(x, pool[SLOTS], state_layout=state_layout)
    for t in range(T):
        before = ring
        token = x.at(slice(None), t)
        o, ring = token.call(serving.decode, ring, read_slots=SLOTS, state_layout=state_layout)
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
    padding = dict(read_slots=np.array([SLOTS[0], -1, 5]), null_slot=5)
    o, new = token.call(serving.decode, ring, state_layout=state_layout, **padding)
    assert not np.asarray(o)[1:].any()
    for before, after in zip(*map(jax.tree.leaves, (ring, new)), strict=True):
        others = np.delete(np.arange(6), SLOTS[0])
        assert_same_bits(np.asarray(before)[others], np.asarray(after)[others])


@pytest.mark.parametrize(
    "pool_dtype, optimised",
    [(np.float32, True), (BF16, False), pytest.param(BF16, True, marks=pytest.mark.crossed)],
)
def test_a_ring_of_one_token_is_plain_decoding(pool_dtype, optimised, request):
    """Bit for bit, outputs and states, whatever the dtype of the ring."""
    widths = (32, 16)
    if optimised:
        request.getfixturevalue("compile_as_users_do")
        widths = (32, 24)  # so that it is compiled again
    x = draw(3, 20, heads=(1, 2), widths=widths)
    pool = draw_pool(5, HV=2, widths=widths, dtype=pool_dtype)
    plain, ring = put(pool), make(pool, 1, BF16, num_key_heads=1)
    for t in range(20):
        # Not compiled(): each call is a program of its own, as users call it.
        o, plain = serving.decode(*one(x, t), plain, **x.gates, read_slots=SLOTS)
        same, ring = serving.decode(*one(x, t), ring, **x.gates, read_slots=SLOTS)
        assert_same_bits(o, same, f"o of token {t}")
        assert_same_bits(plain, ring.state, f"states after token {t}")


@pytest.mark.slow
def test_rings_of_different_age():
    """Every slot has a cursor of its own; padding touches none; a slot that is read may stay as it is."""
    T = 40
    x, pool = draw(3, T, seed=2), draw_pool(6)
    ring = littered(make(pool, LENGTH))
    states, age = pool[SLOTS].astype(np.float64), np.zeros(3, int)
    rng = np.random.default_rng(0)
    call = compiled(serving.decode)
    for t in range(T):
        active = rng.random(3) < 0.6
        o, ring = call(*one(x, t), ring, **x.gates, read_slots=np.where(active, SLOTS, -1))
        want, after = expected(x.at(slice(None), slice(t, t + 1)), states)
        states[active] = after[active]
        age = np.where(active, (age + 1) % LENGTH, age)
        np.testing.assert_array_equal(np.asarray(ring.count)[SLOTS], age)
        if active.any():
            assert_close(want[active, 0], np.asarray(o)[active], STATE_F32, f"o of token {t}")
        assert not np.asarray(o)[~active].any()
    assert_close(states, compiled(serving.snapshot)(ring, SLOTS), STATE_F32)
    # Reading slot 0 and writing slot 5: it goes there with its ring, and slot 0 keeps its state and its ring.
    read, write = np.array([-1, 0, -1]), np.array([1, 5, 2])
    o, new = call(*one(x), ring, **x.gates, read_slots=read, write_slots=write)
    want, after = expected(x.at([1], slice(1)), states[[1]])
    assert_close(want[0, 0], o[1], STATE_F32)
    assert_close(after[0], compiled(serving.snapshot)(new, np.array([5]))[0], STATE_F32)
    assert int(new.count[5]) == (int(ring.count[0]) + 1) % LENGTH
    for before, after in zip(*map(jax.tree.leaves, (ring, new)), strict=True):
        assert_same_bits(before[:5], after[:5])


@pytest.mark.parametrize("gates", ["heads", "KDA"])
def test_verify(gates):
    """Four tokens a step, a random number of which is accepted: outputs and states are plain decoding's of those, and
    no state is written but when the ring has no room for a step. Some requests have fewer tokens, or none: what lies
    after them is not a number."""
    T, steps = 4, 30
    x, pool = draw(3, T * steps, seed=4, gates=gates), draw_pool(6)
    ring = littered(make(pool, LENGTH, channels=x.by_channels))
    states = pool[SLOTS].astype(np.float64)
    rng = np.random.default_rng(1)
    accepted, flushes = np.ones(3, int), 0
    for i in range(steps):
        before = ring
        span = x.at(slice(None), slice(T * i, T * i + T))
        lengths = rng.integers(0, T + 1, 3) if i % 5 == 4 else np.full(3, T)
        spans = dict(state_slots=SLOTS, num_accepted_tokens=accepted, num_tokens=lengths)
        o, ring = span.filled(lengths).call(serving.verify, ring, **spans)
        kept = np.minimum(np.asarray(before.before)[SLOTS] + accepted, np.asarray(before.count)[SLOTS])
        flushes += np.sum(kept + T > LENGTH)
        for row in np.flatnonzero(kept + T <= LENGTH):
            assert_same_bits(before.state[SLOTS[row]], ring.state[SLOTS[row]])
        accepted = np.minimum(rng.integers(1, T + 1, 3), np.maximum(lengths, 1))
        for row in range(3):
            taken = min(accepted[row], lengths[row])
            if taken:
                want, after = expected(span.at([row], slice(taken)), states[[row]])
                assert_close(want[0], np.asarray(o)[row, :taken], STATE_F32, f"o of step {i}", 1)
                states[row] = after[0]
            assert not np.asarray(o)[row, lengths[row] :].any()
    assert 10 < flushes < 3 * steps
    assert_same_bits(pool[[1, 2, 5]], np.asarray(ring.state)[[1, 2, 5]])
    # Plain decoding after the last drafts were rejected, then a step of drafts: one token counts as accepted.
    ring = compiled(serving.accept)(ring, SLOTS, accepted)
    assert_close(states, compiled(serving.snapshot)(ring, SLOTS), STATE_F32)
    for t in range(LENGTH + 1):
        o, ring = x.at(slice(None), t).call(serving.decode, ring, read_slots=SLOTS)
        want, states = expected(x.at(slice(None), slice(t, t + 1)), states)
        assert_close(want[:, 0], o, STATE_F32, f"token {t}")
        span = x.at(slice(None), slice(T))
        spans = dict(state_slots=SLOTS, num_accepted_tokens=np.ones(3, int), num_tokens=np.full(3, T))
        drafts, _ = span.call(serving.verify, ring, **spans)
        assert_close(expected(span, states)[0], drafts, STATE_F32, f"drafts after token {t}")


@pytest.mark.parametrize("then", [4, 2])
def test_drafts_after_what_was_accepted(then):
    """A step may have fewer tokens than were accepted of the one before, or follow an `accept` of them."""
    x, pool = draw(3, 4 + then, seed=5), draw_pool(6)
    first, second = x.at(slice(None), slice(4)), x.at(slice(None), slice(4, None))
    call = compiled(serving.verify)
    options = x.gates | dict(state_slots=SLOTS)
    accepted = np.array([1, 3, 4])
    _, ring = call(
        *first.tokens,
        make(pool, LENGTH),
        **options,
        num_accepted_tokens=np.ones(3, int),
        num_tokens=np.full(3, 4),
    )
    kept = compiled(serving.accept)(ring, SLOTS, accepted)
    o, _ = call(
        *second.tokens,
        kept,
        **options,
        num_accepted_tokens=np.ones(3, int),
        num_tokens=np.full(3, then),
    )
    same, _ = call(*second.tokens, ring, **options, num_accepted_tokens=accepted, num_tokens=np.full(3, then))
    assert_same_bits(o, same)
    for row, number in enumerate(accepted):
        _, state = expected(first.at([row], slice(number)), pool[SLOTS[[row]]].astype(np.float64))
        assert_close(expected(second.at([row]), state)[0][0], np.asarray(o)[row], STATE_F32)


@pytest.mark.parametrize("gates", [pytest.param("heads", marks=pytest.mark.slow), "KDA"])
def test_drafts_meet_one_another_as_the_ring_stores_them(gates):
    """In bfloat16 too: several tokens in one step are as many steps of one."""
    x, pool = draw(3, 4, seed=6, gates=gates), draw_pool(6)
    ring = make(pool, LENGTH, BF16, channels=x.by_channels)
    o, _ = x.call(serving.verify, ring, state_slots=SLOTS, num_accepted_tokens=np.ones(3, int))
    for t in range(4):
        want, ring = x.at(slice(None), t).call(serving.decode, ring, read_slots=SLOTS)
        assert_close(want, np.asarray(o)[:, t], STATE_F32, f"token {t}")


def test_a_wrong_number_of_accepted_tokens_is_padding():
    x, ring = draw(3, 4), make(draw_pool(6), LENGTH)
    o, new = compiled(serving.verify)(
        *x.tokens,
        ring,
        **x.gates,
        state_slots=SLOTS,
        num_accepted_tokens=put([0, LENGTH + 1, -1]),
        num_tokens=np.full(3, 4),
    )
    assert not np.asarray(o).any()
    for before, after in zip(*map(jax.tree.leaves, (ring, new)), strict=True):
        assert_same_bits(before, after)


def test_a_bfloat16_ring_is_no_less_accurate_than_a_bfloat16_pool():
    """States in bfloat16 are rounded a sixteenth as often beside a ring, which is in bfloat16 too."""
    T = 600
    x = draw(2, T, heads=(1, 2), widths=(32, 32))
    x = x._replace(A_log=np.full(2, np.log(0.05), np.float32))
    pool = draw_pool(2, HV=2, widths=(32, 32), dtype=BF16)

    @jax.jit
    def run(pool, tokens):
        def token(pool, x):
            o, pool = serving.decode(*x, pool, **x_gates, read_slots=jnp.arange(2))
            return pool, o

        return jnp.moveaxis(jax.lax.scan(token, pool, tokens)[1], 0, 1)

    x_gates = x.gates
    tokens = jax.tree.map(lambda y: np.moveaxis(y, 1, 0), x.tokens)
    want, _ = expected(x, pool)
    plain, deferred = (
        rms_ratio(want[:, 100:], run(p, tokens)[:, 100:])
        for p in (pool, make(pool, 16, BF16, num_key_heads=1))
    )
    assert deferred < plain < 2e-2


@pytest.mark.slow
def test_a_bfloat16_ring_with_a_decay_of_each_channel():
    """Within the bounds of the rule's own tests; its log decays are float32."""
    x, pool = draw(3, 6, seed=5, dtype=BF16, gates="KDA"), draw_pool(6, dtype=BF16)
    want, last = expected(x, pool[SLOTS])
    ring = littered(make(pool, 5, BF16, channels=True))
    for t in range(6):
        o, ring = x.at(slice(None), t).call(serving.decode, ring, read_slots=SLOTS)
        assert o.dtype == BF16
        assert_close(want[:, t], np.asarray(o, np.float64), bound("o", "bfloat16"), f"o of token {t}")
    assert ring.g.dtype == jnp.float32
    assert_close(last, compiled(serving.snapshot)(ring, SLOTS), bound("final_state", "bfloat16"))


@pytest.mark.parametrize("gates", ["heads", slow("GDN-2")])
def test_a_pool_of_several_layers(gates):
    """One ring pool for a model, of which a call touches a layer."""
    x = draw(3, LENGTH + 2, gates=gates)
    pools = np.stack([draw_pool(6, seed) for seed in range(2)], 1)
    ring, alone = (make(y, LENGTH, channels=x.by_channels) for y in (pools, pools[:, 1]))
    for t in range(LENGTH + 2):
        token = x.at(slice(None), t)
        o, ring = token.call(serving.decode, ring, layer=1, read_slots=SLOTS)
        want, alone = token.call(serving.decode, alone, read_slots=SLOTS)
        np.testing.assert_allclose(want, o, rtol=1e-5, atol=1e-6)
    assert_same_bits(pools[:, 0], ring.state[:, 0])
    assert not np.asarray(ring.count[:, 0]).any()
    np.testing.assert_array_equal(alone.count, ring.count[:, 1])


def test_a_copied_slot_goes_on_by_itself():
    """copy_slots takes state, ring and cursor: two requests that share a prefix part ways."""
    x, pool = draw(3, 6), draw_pool(6)
    ring = make(pool, LENGTH)
    for t in range(3):
        _, ring = compiled(serving.decode)(*one(x, t), ring, **x.gates, read_slots=np.array([3, -1, -1]))
    ring = compiled(serving.copy_slots)(ring, np.array([3]), np.array([4]))
    _, prefix = expected(x.at([0], slice(3)), pool[[3]])
    want, _ = expected(x.at([0, 2], slice(3, 6)), np.repeat(prefix, 2, 0))
    for t in range(3):
        o, ring = compiled(serving.decode)(*one(x, 3 + t), ring, **x.gates, read_slots=np.array([3, -1, 4]))
        assert_close(want[:, t], np.asarray(o)[[0, 2]], STATE_F32)


@pytest.mark.slow
@pytest.mark.parametrize("gates", ["heads", "GDN-2"])
@pytest.mark.usefixtures("compile_as_users_do")
def test_batch_invariance(gates):
    """A request's bits do not depend on the others, nor on when they flush."""
    x, pool = draw(4, 7, widths=(32, 48), gates=gates), draw_pool(4, widths=(32, 48))
    together, alone = (make(pool, 3, channels=x.by_channels) for _ in range(2))
    for t in range(7):
        active, token = np.array([t != 2, t > 3, True, t % 2]), x.at(slice(None), t)
        read, options = np.where(active, np.arange(4), -1), dict(batch_invariant=True)
        o, together = token.call(serving.decode, together, read_slots=read, **options)
        same, alone = token.at([2]).call(serving.decode, alone, read_slots=np.array([2]), **options)
        assert_same_bits(o[2], same[0])
    for a, b in zip(*map(jax.tree.leaves, (together, alone)), strict=True):
        assert_same_bits(a[2], b[2])


@pytest.mark.parametrize(
    "Hq, Hk, HV",
    [pytest.param(4, 2, 2, marks=pytest.mark.crossed), pytest.param(2, 3, 6, marks=pytest.mark.slow)],
)
def test_any_grouping_of_heads_and_resets(Hq, Hk, HV):
    """More query heads than value heads; numbers of heads that do not divide one another. One head forgets all at
    every token: its log decay is -inf, also in the ring."""
    HO, T, L = max(Hq, HV), 5, 3
    x = draw(2, T, heads=(Hk, HO))
    rng = np.random.default_rng(0)
    q, v = (rng.standard_normal((2, T, *shape)).astype(np.float32) for shape in ((Hq, K), (HV, V)))
    x = x._replace(q=q, v=v)
    x.A_log[1] = 100
    pool = draw_pool(2, HV=HO)
    want, after = expected(x, pool)
    ring = make(pool, L, num_key_heads=Hk)
    outputs = []
    for t in range(T):
        o, ring = compiled(serving.decode)(*one(x, t), ring, **x.gates, read_slots=np.arange(2))
        outputs.append(o)
    assert_close(want, np.stack(outputs, 1), STATE_F32, "decode", 2)
    assert_close(after, compiled(serving.snapshot)(ring, np.arange(2)), STATE_F32, "states", 1)
    o, _ = compiled(serving.verify)(
        *x.tokens,
        make(pool, T, num_key_heads=Hk),
        **x.gates,
        state_slots=np.arange(2),
        num_accepted_tokens=np.ones(2, int),
    )
    assert_close(want, o, STATE_F32, "verify", 2)


def test_no_requests():
    """A batch of none is nothing to do."""
    x, pool = draw(0, 1), draw_pool(2)
    for start in (put(pool), make(pool, 3)):
        o, new = compiled(serving.decode)(*one(x), start, **x.gates, read_slots=np.zeros(0, int))
        assert o.shape == (0, 4, V)
        for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(new), strict=True):
            assert_same_bits(before, after)


def test_sizes():
    ring = make(draw_pool(3, state_layout="vk"), 4, BF16, state_layout="vk")
    assert ring.length == 4 and ring.k.shape == (3, 2, 4, K) and ring.u.shape == (3, 4, 4, V)
    assert ring.k.dtype == BF16 and ring.g.dtype == np.float32
