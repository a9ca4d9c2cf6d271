"""Verification of drafts with a state after each token: chains, trees, uneven numbers of tokens, the walk-through."""

import ml_dtypes
import numpy as np
import pytest
from device_arrays import put
from serving_cases import (
    K,
    V,
    assert_same_bits,
    compiled,
    draw,
    draw_pool,
    every_state,
    expected,
    fresh,
    one,
    slow,
)
from tolerances import assert_close

from gdn_jax import serving

BF16 = ml_dtypes.bfloat16
STATE_F32 = 1e-5  # as in test_serving.py
O_BF16, STATE_BF16 = 1e-2, 5e-3


def tokens(x):
    return tuple(map(put, x.tokens))


def test_walk_through_with_three_drafts():
    """The example of vLLM's documentation, gamma = 3, step after step against plain decoding of what was accepted.

    A step takes the last sampled token and three drafts; its states go to four slots. Two drafts are accepted, that
    is three tokens: the next step starts from the third slot.
    """
    x = draw(1, 12, seed=3)
    slots = np.array([[4, 1, 6, 2]])
    pool = draw_pool(8)
    call = compiled(serving.verify)
    plain_state, at, accepted = pool[[4]], 0, 1  # after a prompt the state lies in the first slot
    for then_accepted in (3, 1, 4, 2):
        before = pool
        span = x.at(slice(None), slice(at, at + 4))
        o, pool = call(
            *span.tokens, pool, **x.gates, state_slots=slots, num_accepted_tokens=np.array([accepted])
        )
        pool = np.asarray(pool)
        for t in range(then_accepted):
            want, plain_state = expected(x.at(slice(None), slice(at + t, at + t + 1)), plain_state)
            assert_close(want[:, 0], o[:, t], STATE_F32, f"o of token {at + t}", 1)
            assert_close(plain_state, pool[slots[0, t]][None], STATE_F32, f"state after token {at + t}", 1)
        assert_same_bits(before[[0, 3, 5, 7]], pool[[0, 3, 5, 7]])
        at, accepted = at + then_accepted, then_accepted


CASES = [
    (2, (1, 2), np.float32, "vk"),
    (4, (1, 2), np.float32, "kv", "KDA"),
    (4, (1, 2), BF16, "kv"),
    (8, (1, 2), BF16, "vk"),
    (2, (2, 8), BF16, "vk"),
    (4, (2, 8), np.float32, "kv"),
    (8, (2, 8), np.float32, "vk"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verify(case, widths=(K, V)):
    """bfloat16 tokens of five requests, one of them padding, each accepted another number of tokens before."""
    T, heads, pool_dtype, state_layout, *gates = case
    rng = np.random.default_rng(T)
    x = draw(5, T, heads=heads, widths=widths, dtype=BF16, gates=(*gates, "heads")[0])
    slots = rng.permutation(5 * T + 3)[: 5 * T].reshape(5, T).astype(np.int32)
    slots[2] = -1
    accepted = rng.integers(1, T + 1, 5)
    pool = draw_pool(5 * T + 3, HV=heads[1], widths=widths, dtype=pool_dtype, state_layout=state_layout)
    spans = dict(state_slots=put(slots), num_accepted_tokens=put(accepted))
    o, new = x.call(serving.verify, pool, state_layout=state_layout, **spans)
    start = pool[slots[np.arange(5), accepted - 1]]
    want_o, want = every_state(x, start, state_layout=state_layout)
    real = np.array([0, 1, 3, 4])
    o, new = np.asarray(o), np.asarray(new)
    assert o.dtype == BF16 and new.dtype == pool_dtype
    assert_close(want_o[real], o[real], O_BF16, "o", 2)
    bound = STATE_F32 if pool_dtype == np.float32 else STATE_BF16
    assert_close(want[real], new[slots[real]], bound, "states", 2)
    assert not o[2].any()
    others = np.setdiff1d(np.arange(len(pool)), slots)
    assert_same_bits(pool[others], new[others])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "heads"),
    [
        (8, (16, 32)),
        *(
            pytest.param(T, heads, marks=pytest.mark.crossed)
            for T, heads in ((2, (16, 32)), (2, (16, 64)), (4, (16, 32)), (4, (16, 64)), (8, (16, 64)))
        ),
    ],
)
def test_heads_of_models(T, heads):
    """The heads of FlashInfer's tests, with K = V = 128 and a bfloat16 pool."""
    test_verify((T, heads, BF16, "vk"), widths=(128, 128))


@pytest.mark.parametrize(
    "lengths, accepted", [([5, 3, 1], [3, 1, 5]), ([5, 1, 3, 2, 4], [1, 2, 3, 4, 5]), ([0, 2], [1, 1])]
)
def test_uneven_numbers_of_tokens(lengths, accepted):
    """tpu-inference's cases: some requests have fewer drafts than the step has room for, or none at all."""
    N, T = len(lengths), 5
    x, pool = draw(N, T, seed=7), draw_pool(N * T)
    x.k[0, lengths[0] :] = np.nan  # what padding holds does not matter
    slots = np.arange(N * T).reshape(N, T)
    o, new = compiled(serving.verify)(
        *x.tokens,
        pool,
        **x.gates,
        state_slots=slots,
        num_accepted_tokens=np.array(accepted),
        num_tokens=np.array(lengths),
    )
    o, new = np.asarray(o), np.asarray(new)
    for n, length in enumerate(lengths):
        if length:
            want_o, want = every_state(
                x.at(slice(n, n + 1), slice(length)), pool[[slots[n, accepted[n] - 1]]]
            )
            assert_close(want_o[0], o[n, :length], STATE_F32)
            assert_close(want[0], new[slots[n, :length]], STATE_F32)
        assert not o[n, length:].any()
        assert_same_bits(pool[slots[n, length:]], new[slots[n, length:]])


TREES = np.array(
    [
        [-1, 0, 0, 1, 1, 2, 3],  # two branches, one of which branches again
        [-1, 0, 1, 2, 3, 4, 5],  # a chain
        [-1, -1, -1, 0, 1, 2, 0],  # three first tokens
    ]
)


def path(parents, t):
    """Tokens from the first to t."""
    return [] if t < 0 else [*path(parents, parents[t]), t]


@pytest.mark.parametrize("gates", ["heads", slow("GDN-2")])
def test_trees(gates):
    """Every token of a tree has the output and the state of its own path alone; so does what follows a branch."""
    N, T = TREES.shape
    x, pool = draw(N, T, seed=5, gates=gates), draw_pool(N * T + 1)
    slots = np.arange(N * T)[::-1].reshape(N, T)
    spans = dict(state_slots=slots, num_accepted_tokens=np.array([1, 7, 3]))
    o, new = x.call(serving.verify, pool, parents=TREES, **spans)
    for n in range(N):
        start = pool[[slots[n, (1, 7, 3)[n] - 1]]]
        for t in range(T):
            want_o, want = expected(x.at(slice(n, n + 1), path(TREES[n], t)), start)
            assert_close(want_o[0, -1], o[n, t], STATE_F32, f"o of token {t} of tree {n}")
            assert_close(want[0], new[slots[n, t]], STATE_F32, f"state after token {t} of tree {n}")
    assert_same_bits(pool[-1], new[-1])
    # Token 4 of the first tree was the last accepted one: its number is 5.
    following = draw(1, 2, seed=6, gates=gates)._replace(A_log=x.A_log, dt_bias=x.dt_bias)
    spans = dict(state_slots=slots[:1, 3:5], num_accepted_tokens=np.array([2]))
    o, _ = following.call(serving.verify, new, **spans)
    want, _ = expected(following, np.asarray(new)[slots[:1, 4]])
    assert_close(want, o, STATE_F32)


@pytest.mark.slow
@pytest.mark.parametrize("gates", ["heads", "GDN-2"])
def test_trees_on_a_ring(gates):
    """Step after step of trees that differ, of which a random token is accepted: every token has the output of its
    own path alone, and what a request goes on from is the path to the accepted token. One step is of chains, some
    have fewer tokens, and after an `accept` a token is decoded."""
    T, steps, at = 7, 9, np.array([3, 0, 4])
    x, pool = draw(3, T * steps, seed=8, gates=gates), draw_pool(6)
    x.A_log[1] = 100  # this head forgets all at every token
    kind = dict(num_key_heads=2, length=16, dtype=np.float32, trees=True, channels=x.by_channels)
    ring = serving.make_ring_pool(put(pool), **kind)
    ring = ring._replace(k=ring.k * np.nan, u=ring.u * np.nan, g=ring.g * np.nan)
    states, accepted, rng = pool[at].astype(np.float64), np.ones(3, int), np.random.default_rng(0)
    flushes = 0
    for i in range(steps):
        span = x.at(slice(None), slice(T * i, T * i + T))
        parents = None if i == 4 else TREES[rng.permutation(3)]
        lengths = np.array([T, 5, T]) if i % 3 == 2 else np.full(3, T)
        before = np.asarray(ring.state)
        spans = dict(state_slots=at, num_accepted_tokens=accepted, num_tokens=lengths, parents=parents)
        o, ring = span.call(serving.verify, ring, **spans)
        flushes += (before[at] != np.asarray(ring.state)[at]).any(axis=(1, 2, 3)).sum()
        accepted = rng.integers(1, lengths + 1)
        for n in range(3):
            tree = TREES[1] if parents is None else parents[n]
            for t in range(lengths[n]):
                want, after = expected(span.at(slice(n, n + 1), path(tree, t)), states[[n]])
                assert_close(want[0, -1], o[n, t], STATE_F32, f"o of token {t} of request {n} in step {i}")
                if t == accepted[n] - 1:
                    state = after
            states[n] = state[0]
            assert not np.asarray(o)[n, lengths[n] :].any()
        if i % 3 == 1:
            ring = compiled(serving.accept)(ring, at, accepted)
            assert_close(states, compiled(serving.snapshot)(ring, at), STATE_F32, f"states after step {i}")
            again = compiled(serving.accept)(ring, at, accepted)
            assert_same_bits(ring.count, again.count)  # it may be said twice, as the next `verify` does
        if i == 7:
            o, ring = x.at(slice(None), 0).call(serving.decode, ring, read_slots=at)
            want, states = expected(x.at(slice(None), slice(1)), states)
            assert_close(want[:, 0], o, STATE_F32)
            accepted = np.ones(3, int)
    assert 3 < flushes < 3 * steps
    assert_same_bits(pool[[1, 2, 5]], np.asarray(ring.state)[[1, 2, 5]])


def test_a_chain_as_a_tree_is_the_same():
    x, pool = draw(2, 4), draw_pool(8)
    options = dict(**x.gates, state_slots=np.arange(8).reshape(2, 4), num_accepted_tokens=np.array([2, 4]))
    parents = np.tile(np.arange(-1, 3), (2, 1))
    chain, tree = (compiled(serving.verify)(*x.tokens, pool, **options, parents=p) for p in (None, parents))
    for a, b in zip(chain, tree, strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-5, atol=1e-6
        )  # one program loops over T states, the other over one


def test_a_wrong_number_of_accepted_tokens_is_padding():
    x, pool = draw(3, 2), draw_pool(6)
    o, new = compiled(serving.verify)(
        *x.tokens,
        pool,
        **x.gates,
        state_slots=np.arange(6).reshape(3, 2),
        num_accepted_tokens=put([0, 3, -1]),
    )
    assert not np.asarray(o).any()
    assert_same_bits(pool, new)


def test_one_token_is_decode():
    """gamma = 0, after which decode goes on from where verify stored."""
    x, pool = draw(3, 1), draw_pool(4)
    o, new = compiled(serving.decode)(*one(x), pool, **x.gates, read_slots=np.array([0, 2, 3]))
    same, also = compiled(serving.verify)(
        *x.tokens, pool, **x.gates, state_slots=np.array([[0], [2], [3]]), num_accepted_tokens=np.ones(3, int)
    )
    np.testing.assert_allclose(o, same[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new, also, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("gates", ["heads", "GDN-2"])
@pytest.mark.usefixtures("compile_as_users_do")
def test_batch_invariance(gates):
    x = draw(4, 3, heads=(2, 4), widths=(32, 48), gates=gates)
    pool, slots, accepted = (
        fresh(draw_pool(12, widths=(32, 48))),
        np.arange(12).reshape(4, 3),
        np.array([1, 3, 2, 2]),
    )

    def call(rows):
        spans = dict(state_slots=slots[rows], num_accepted_tokens=accepted[rows])
        return x.at(rows).call(serving.verify, pool, batch_invariant=True, **spans)

    o, new = call(np.arange(4))
    for rows in (np.array([2]), np.array([3, 0])):
        alone_o, alone = call(rows)
        assert_same_bits(o[rows], alone_o)
        assert_same_bits(np.asarray(new)[slots[rows]], np.asarray(alone)[slots[rows]])
