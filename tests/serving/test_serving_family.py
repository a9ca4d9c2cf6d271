"""Serving with gates of each channel and with erase and write apart: every way of taking tokens, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from device_arrays import put
from family_serving import (
    LENGTH,
    SLOTS,
    STATE_F32,
    N,
    Tokens,
    assert_others_stay,
    draw,
    littered,
    make_ring,
    rules,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from meshes import mesh_of, spec
from serving_cases import HK, HV, K, assert_same_bits, compiled, draw_pool, fresh
from tolerances import assert_close, bound

from gdn_jax import serving
from gdn_jax.serving.call import interpreted


@rules("KDA bounded")
def test_decode(rule):
    """Token for token the oracle's outputs and states, from a pool of states and from a ring; padding gives zeros."""
    T = 7
    x, pool = draw(rule, T), littered(draw_pool(6))
    pool[SLOTS[0], 0, 0, 0] = -0.0
    want, last = x.expected(pool[SLOTS])
    plain, ring = pool, make_ring(pool)
    assert_same_bits(compiled(serving.snapshot)(ring, SLOTS), pool[SLOTS])
    for t in range(T):
        token = x.at(slice(None), t)
        o, plain = token.call(serving.decode, plain, read_slots=SLOTS, null_slot=5)
        on_ring, ring = token.call(serving.decode, ring, read_slots=SLOTS, null_slot=5)
        assert_close(want[:, t], o, STATE_F32, f"o of token {t}", 1)
        assert_close(want[:, t], on_ring, STATE_F32, f"o of token {t} on a ring", 1)
    assert_close(last, np.asarray(plain)[SLOTS], STATE_F32, "states", 1)
    present = compiled(serving.snapshot)(ring, SLOTS)
    assert_close(last, present, STATE_F32, "present states", 1)
    flushed = compiled(serving.flush)(ring, SLOTS)
    assert_same_bits(present, np.asarray(flushed.state)[SLOTS])
    for new in (plain, ring.state, flushed.state):
        assert_others_stay(pool, new)
    np.testing.assert_array_equal(np.asarray(ring.count)[SLOTS], T % LENGTH)
    some = np.array([3, -1, 5])  # slot 5 is the one that is kept free
    for start in (plain, ring):
        o, new = x.at(slice(None), 0).call(serving.decode, start, read_slots=some, null_slot=5)
        assert not np.asarray(o)[1:].any()
        states = new if start is plain else new.state
        assert_others_stay(plain if start is plain else ring.state, states, [3])


def test_a_write_is_never_doubled():
    """Negative eigenvalues double what is erased, and a write of its own stays below 1; on a ring too."""
    x, pool = draw("GDN-2", 1, 2), draw_pool(6)
    assert x.options["allow_neg_eigval"]
    want, last = x.expected(pool[SLOTS])
    for start in (pool, make_ring(pool)):
        o, new = x.at(slice(None), 0).call(serving.decode, start, read_slots=SLOTS)
        assert_close(want[:, 0], o, STATE_F32, "o", 1)
        if start is pool:
            assert_close(last, np.asarray(new)[SLOTS], STATE_F32, "states", 1)


TREE = np.array([[-1, 0, 0, 1], [-1, -1, 1, 0], [-1, 0, 1, 2]])


@pytest.mark.parametrize(
    "rule, parents",
    [pytest.param("KDA", None, id="chain"), pytest.param("GDN-2", TREE, id="tree", marks=pytest.mark.slow)],
)
def test_verify(rule, parents):
    """Drafts of which some are accepted: a state after each in a pool of states, and the same from a ring."""
    T, steps = 4, 4
    x, start = draw(rule, T * steps, 1), littered(draw_pool(14), np.arange(12))
    of_tokens = np.arange(12).reshape(N, T)
    states, pool, ring = (
        start[of_tokens[:, 0]].astype(np.float64),
        start,
        make_ring(start, trees=parents is not None),
    )
    rng, accepted = np.random.default_rng(0), np.ones(N, int)
    rings = np.array(of_tokens[:, 0])
    for i in range(steps):
        span = x.at(slice(None), slice(T * i, T * i + T))
        spans = dict(num_accepted_tokens=accepted) | ({} if parents is None else dict(parents=parents))
        want, after = span.every_state(states, parents)
        o, pool = span.call(serving.verify, pool, state_slots=of_tokens, **spans)
        on_ring, ring = span.call(serving.verify, ring, state_slots=rings, **spans)
        assert_close(want, o, STATE_F32, f"o of step {i}", 1)
        assert_close(want, on_ring, STATE_F32, f"o of step {i} on a ring", 1)
        assert_close(after, np.asarray(pool)[of_tokens], STATE_F32, f"states of step {i}", 1)
        accepted = rng.integers(1, T + 1, N)
        states = after[np.arange(N), accepted - 1]
    ring = compiled(serving.accept)(ring, rings, accepted)
    assert_close(states, compiled(serving.snapshot)(ring, rings), STATE_F32, "accepted states", 1)
    assert_others_stay(start, pool, np.arange(12))


def test_drafts_that_are_no_numbers():
    """Padding behind the tokens of a request may hold anything."""
    x, pool = draw("KDA", 4), draw_pool(6)
    lengths = np.array([2, 0, 4])
    junk = np.arange(4)[None] >= lengths[:, None]
    filled = Tokens(*(None if y is None else np.where(junk.reshape(N, 4, *(1,) * (y.ndim - 2)), np.nan, y)
                      for y in x[:6]), x.options)  # fmt: skip
    spans = dict(num_accepted_tokens=np.ones(N, int), num_tokens=lengths)
    o, ring = filled.call(serving.verify, make_ring(pool), state_slots=SLOTS, **spans)
    want, after = x.every_state(pool[SLOTS].astype(np.float64))
    assert_close(want[0, :2], o[0, :2], STATE_F32)
    assert_close(want[2], o[2], STATE_F32)
    assert not np.asarray(o)[junk].any()
    kept = compiled(serving.snapshot)(compiled(serving.accept)(ring, SLOTS, np.array([2, 1, 4])), SLOTS)
    assert_close(np.stack([after[0, 1], pool[0], after[2, 3]]), kept, STATE_F32)


@pytest.mark.slow
def test_bfloat16_pools_and_huge_neighbours():
    """bfloat16 tokens and states, float32 gates: within the bounds of the gated delta rule's own tests."""
    bf16 = ml_dtypes.bfloat16
    x, pool = draw("KDA", 6, 5, bf16), littered(draw_pool(6, dtype=bf16))
    want, last = x.expected(pool[SLOTS])
    states, ring = pool, make_ring(pool, dtype=bf16)
    for t in range(6):
        token = x.at(slice(None), t)
        o, states = token.call(serving.decode, states, read_slots=SLOTS)
        on_ring, ring = token.call(serving.decode, ring, read_slots=SLOTS)
        for got in (o, on_ring):
            assert got.dtype == bf16
            assert_close(want[:, t], np.asarray(got, np.float64), bound("o", "bfloat16"), f"o of token {t}")
    assert ring.g.dtype == jnp.float32
    assert_close(last, np.asarray(states)[SLOTS].astype(np.float64), bound("final_state", "bfloat16"))
    assert_close(last, compiled(serving.snapshot)(ring, SLOTS), bound("final_state", "bfloat16"))
    assert_others_stay(pool, states)
    assert_others_stay(pool, ring.state)


def test_equal_channels_are_one_decay_a_head():
    """With one number in all channels the family's call is the other one, to 1e-6."""
    x, pool = draw("decay of a head", 1), draw_pool(6)
    a, b = put(x.a[:, 0]), put(x.b[:, 0, :, 0])
    bias = put(x.options["dt_bias"])
    common = dict(A_log=put(x.options["A_log"]), read_slots=SLOTS)
    token = [put(y[:, 0]) for y in x[:3]]
    want = serving.decode(*token, a, b, fresh(pool), dt_bias=bias, **common)
    wide, bias = (jnp.repeat(y[..., None], K, -1) for y in (a, bias))
    got = serving.decode(*token, wide, b, fresh(pool), dt_bias=bias, **common)
    for one, other in zip(want, got, strict=True):
        assert_close(np.asarray(one), np.asarray(other), 1e-6)
    qkv = jnp.concatenate([y.reshape(N, -1) for y in token], -1)
    together = serving.decode_packed(qkv, wide, b, fresh(pool), dt_bias=bias, **common)
    for one, other in zip(got, together, strict=True):
        assert_same_bits(one, other)


@pytest.mark.slow
def test_heads_on_a_mesh():
    """Every device serves its own heads of a pool of states and of a ring."""
    x, pool = draw("GDN-2", 1), draw_pool(6)
    mesh, heads = mesh_of((2,), ("heads",)), spec(None, "heads")
    token = x.at(slice(None), 0)
    place = partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, heads))
    split = Tokens(*place(token[:6]), token.options)
    for start in (put(pool), make_ring(pool)):
        want, left = token.call(serving.decode, start, read_slots=SLOTS)
        o, new = split.call(serving.decode, place(start), read_slots=SLOTS)
        assert_close(np.asarray(want), np.asarray(o), 1e-6)
        for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(new), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_layers_and_lone_requests():
    """One layer of a pool of several, and a request whose bits do not depend on the others of its call."""
    x, pool = draw("GDN-2", 3), draw_pool(6)
    token, alone = x.at(slice(None), 0), x.at(slice(1, 2), 0)
    layers = jnp.stack([put(pool) + 1, put(pool)], 1)
    ring = serving.make_ring_pool(layers, num_key_heads=HK, length=LENGTH, channels=True)
    for start, whole in ((put(pool), layers), (make_ring(pool, dtype=jnp.bfloat16), ring)):
        want, left = token.call(serving.decode, start, read_slots=SLOTS, batch_invariant=True)
        o, new = token.call(serving.decode, whole, read_slots=SLOTS, batch_invariant=True, layer=1)
        assert_same_bits(want, o)
        states, one, before = (getattr(y, "state", y) for y in (new, left, whole))
        assert_same_bits(one, states[:, 1])
        assert_same_bits(before[:, 0], states[:, 0])
        lone, _ = alone.call(serving.decode, start, read_slots=SLOTS[1:2], batch_invariant=True)
        assert_same_bits(want[1:2], lone)
        spans = dict(num_accepted_tokens=np.ones(N, int), batch_invariant=True)
        slots = (
            SLOTS if hasattr(start, "state") else np.pad(SLOTS[:, None], ((0, 0), (0, 2)), constant_values=-1)
        )
        want, _ = x.call(serving.verify, start, state_slots=slots, **spans)
        spans["num_accepted_tokens"] = spans["num_accepted_tokens"][:1]
        lone, _ = x.at(slice(1, 2)).call(serving.verify, start, state_slots=slots[1:2], **spans)
        assert_same_bits(want[1:2], lone)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(a=np.zeros((N, HV, 3), np.float32)),
            r"a: expected shape \[B, HO, K\] = \[3, 4, 8\], got \[3, 4, 3\]",
        ),
        (dict(w=np.zeros((N, HV, K), np.float32)), r"w: expected shape \[B, HO, V\] = \[3, 4, 6\]"),
        (
            dict(b=np.zeros((N, HV, K), np.float32)),
            "w: expected an array, since b has a number for each key channel",
        ),
        (dict(dt_bias=np.zeros((HV, 3), np.float32)), r"dt_bias: expected shape \[HO, K\] = \[4, 8\]"),
        (dict(A_log=np.zeros(3, np.float32)), r"A_log: expected shape \[HO\] = \[4\]"),
        (dict(lower_bound=1.0), "lower_bound: expected a number below 0 or None, got 1.0"),
    ],
)
def test_errors(change, message, no_type_checks):
    x, pool = draw("KDA", 1), put(draw_pool(6))
    token = dict(q=x.q[:, 0], k=x.k[:, 0], v=x.v[:, 0], a=x.a[:, 0], b=x.b[:, 0])
    with pytest.raises(ValueError, match=message):
        serving.decode(**(token | x.options | change), pool=pool, read_slots=SLOTS)


def test_a_ring_is_made_for_its_gates(no_type_checks):
    x, pool = draw("KDA", 1), put(draw_pool(6))
    ring = serving.make_ring_pool(pool, num_key_heads=HK)
    with pytest.raises(
        ValueError, match=r"pool: expected a ring for gates of each channel.*got one for one gate a head"
    ):
        serving.decode(*(y[:, 0] for y in x[:5]), ring, **x.options, read_slots=SLOTS)
    ring = serving.make_ring_pool(pool, num_key_heads=HK, channels=True)
    with pytest.raises(
        ValueError, match=r"pool: expected a ring for one gate a head.*got one for gates of each channel"
    ):
        gates = dict(A_log=np.zeros(HV, np.float32), dt_bias=np.zeros(HV, np.float32))
        serving.decode(*(y[:, 0] for y in x[:3]), x.b[:, 0], x.b[:, 0], ring, **gates, read_slots=SLOTS)


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
    assert_close(np.asarray(want[0], np.float64), np.asarray(got[0], np.float64), bound("o", "bfloat16"))
    assert not np.asarray(got[0], np.float64)[1].any()
    assert_close(np.asarray(want[1])[slots[::2]], np.asarray(got[1])[slots[::2]], STATE_F32)
    assert_others_stay(pool, got[1], slots[::2])
