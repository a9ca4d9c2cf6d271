"""Packed sequences and segments: the same as each alone, and nothing crosses a boundary."""

import functools
import itertools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, head_axis, tolerance

import gdn_jax
from gdn_jax.checks import cases, oracle
from gdn_jax.rule import packing


def _ownership(case, x):
    """Sequence of each token, -1 for padding."""
    owner = np.full(case.T, -1)
    for n, (start, stop) in enumerate(zip(x.cu_seqlens[:-1], x.cu_seqlens[1:], strict=True)):
        owner[start:stop] = n
    return owner


def test_oracle_packs_as_it_separates():
    """The oracle's own handling of packing, against the oracle on each sequence alone."""
    case = cases.CASES["packed-reset"]
    x = cases.inputs(case)
    packed_o, packed_state = oracle.forward(**x.arguments)
    packed = oracle.gradients(**x.arguments, do=x.do, dh_T=x.dh_T)
    for n in range(case.N):
        s = slice(x.cu_seqlens[n], x.cu_seqlens[n + 1])
        alone = {name: getattr(x, name)[:, s] for name in ("q", "k", "v", "g", "beta")}
        alone["initial_state"] = x.initial_state[n : n + 1]
        o, state = oracle.forward(**alone)
        gradients = oracle.gradients(**alone, do=x.do[:, s], dh_T=x.dh_T[n : n + 1])
        np.testing.assert_array_equal(o, packed_o[:, s])
        np.testing.assert_array_equal(state[0], packed_state[n])
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            np.testing.assert_array_equal(getattr(gradients, name), getattr(packed, name)[:, s])
        np.testing.assert_array_equal(gradients.dh_0[0], packed.dh_0[n])


def test_length_of_the_chunk_table():
    """It is what the worst lengths of N sequences need and no more: all lengths are tried."""
    for T, N, C in itertools.product(range(1, 9), (1, 2, 3), (2, 3, 4)):
        lengths = [some for some in itertools.product(range(T + 1), repeat=N) if sum(some) <= T]
        needed = max(sum(-(-length // C) for length in some) for some in lengths)
        assert packing.max_packed_chunks(T, N, C) == needed


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
@pytest.mark.slow
def test_the_fullest_chunk_table(implementation):
    """One sequence that fills its row: every chunk of the table is used."""
    case = cases.Case("full", T=100, B=1, lengths=(100,))
    x = cases.inputs(case)
    harness.check(case, x, "float32", harness.evaluate(implementation, case.options, x), form=implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_packed_equals_separate(implementation):
    """A packed call is its sequences called one by one: outputs, states, all gradients."""
    lengths = (40, 40, 65, 40, 65)
    case = cases.Case("pack", T=sum(lengths), B=1, lengths=lengths)
    x = cases.inputs(case)
    packed = harness.evaluate(implementation, case.options, x)
    for n, length in enumerate(lengths):
        s = slice(x.cu_seqlens[n], x.cu_seqlens[n] + length)
        tokens = {name: getattr(x, name)[:, s] for name in ("q", "k", "v", "g", "beta", "do")}
        states = {name: getattr(x, name)[n : n + 1] for name in ("initial_state", "dh_T")}
        alone = harness.evaluate(
            implementation, case.options, x._replace(cu_seqlens=None, **tokens, **states)
        )
        for name, y in alone.items():
            expected = packed[name][n : n + 1] if name in ("final_state", "dh_0") else packed[name][:, s]
            assert_close(expected, y, tolerance(name, "float32"), f"{name} of sequence {n}", head_axis(name))


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_split_anywhere(implementation):
    """A sequence cut at any token, the state handed on, is the whole sequence: one compiled call serves every cut."""
    case = cases.CASES["packed"]
    x = cases.inputs(case)
    T, options = case.T, case.options
    whole_cu = np.array([0] + [T] * case.N, np.int32)
    whole = harness.evaluate(implementation, options, x._replace(cu_seqlens=whole_cu))
    for cut in (0, 1, 2, 31, 63, 64, 65, 100, 127, 128, 129, T - 1, T):
        first = harness.evaluate(implementation, options, x._replace(cu_seqlens=np.minimum(whole_cu, cut)))
        rolled = {name: np.roll(getattr(x, name), -cut, 1) for name in ("q", "k", "v", "g", "beta")}
        state = x.initial_state.copy()
        state[0] = first["final_state"][0]
        rolled |= dict(cu_seqlens=np.minimum(whole_cu, T - cut), initial_state=state)
        second = harness.evaluate(implementation, options, x._replace(**rolled))
        o = np.concatenate([first["o"][:, :cut], second["o"][:, : T - cut]], 1)
        assert_close(whole["o"], o, tolerance("o", "float32"), f"o, cut at {cut}", 2)
        final = second["final_state"][:1]
        assert_close(
            whole["final_state"][:1], final, tolerance("final_state", "float32"), f"state, cut at {cut}", 1
        )


@pytest.mark.parametrize("of", ["heads", "channels"])
def test_a_state_that_is_handed_on_is_not_rounded(of):
    """In bfloat16 too: a packed sequence leaves the state that a whole row leaves, and eight calls that of one."""
    case = cases.Case(
        "handed-on", T=512, B=1, heads=(1, 1, 2), K=16, V=8, g="-1e-3", initial_state=False, chunk_size=16
    )
    x = cases.inputs(case, "bfloat16")
    _, expected = oracle.forward(**x.arguments)
    g = x.g if of == "heads" else np.repeat(x.g[..., None], case.K, -1)
    rule = jax.jit(functools.partial(gdn_jax.delta_rule, chunk_size=16, implementation="chunked"))
    state, cu_seqlens = np.zeros(expected.shape, np.float32), np.array([0, 64], np.int32)
    for start in range(0, case.T, 64):
        tokens = [y[:, start : start + 64] for y in (x.q, x.k, x.v, g, x.beta)]
        if not start:
            _, of_row = rule(*tokens, initial_state=state)
        _, state = rule(*tokens, initial_state=state, cu_seqlens=cu_seqlens)
        if not start:
            assert_close(of_row, state, 1e-6, "as a row", 1)
    assert_close(expected, state, 5e-6, "in eight calls", 1)


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_empty_sequences_hand_their_state_through(implementation):
    """Bit for bit, forward and backward."""
    case = cases.CASES["packed"]
    x = cases.inputs(case)
    got = harness.evaluate(implementation, case.options, x)
    empty = np.flatnonzero(np.diff(x.cu_seqlens) == 0)
    assert len(empty) == 3
    np.testing.assert_array_equal(got["final_state"][empty], x.initial_state[empty])
    np.testing.assert_array_equal(got["dh_0"][empty], x.dh_T[empty])


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
@pytest.mark.parametrize("garbage", [1e30, np.inf, np.nan])
def test_padding_has_no_effect(implementation, garbage):
    """Tokens past cu[-1]: output 0 and gradient 0 whatever is there, and nothing of them reaches the sequences."""
    case = cases.CASES["packed"]
    x = cases.inputs(case)
    clean = harness.evaluate(implementation, case.options, x)
    end = x.cu_seqlens[-1]
    dirty = {}
    for name in ("q", "k", "v", "g", "beta", "do"):
        value = getattr(x, name).copy()
        value[:, end:] = garbage
        dirty[name] = value
    got = harness.evaluate(implementation, case.options, x._replace(**dirty))
    for name, y in clean.items():
        np.testing.assert_array_equal(y, got[name], name)
        if name not in ("final_state", "dh_0"):
            assert end < case.T and not got[name][:, end:].any(), name


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
@pytest.mark.parametrize("poison", [1e30, np.nan])
def test_sequences_do_not_see_each_other(implementation, poison):
    """One sequence full of huge values or NaN leaves every bit of the others alone, in both directions."""
    case = cases.CASES["packed"]
    x = cases.inputs(case)
    clean = harness.evaluate(implementation, case.options, x)
    owner = _ownership(case, x)
    for victim in (2, 4):
        names = ("v",) if np.isfinite(poison) else ("q", "k", "v", "g", "beta", "do")
        poisoned = {name: getattr(x, name).copy() for name in (*names, "initial_state", "dh_T")}
        for name in names:
            poisoned[name][:, owner == victim] = poison
        for name in ("initial_state", "dh_T"):
            poisoned[name][victim] = poison
        got = harness.evaluate(implementation, case.options, x._replace(**poisoned))
        others = np.arange(case.N) != victim
        for name, y in clean.items():
            if name in ("final_state", "dh_0"):
                np.testing.assert_array_equal(y[others], got[name][others], name)
            else:
                np.testing.assert_array_equal(y[:, owner != victim], got[name][:, owner != victim], name)


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_segments_do_not_see_each_other(implementation):
    """Huge values in one segment leave every bit of the other segments of the row, and of the other rows, alone."""
    case = cases.CASES["segments"]
    x = cases.inputs(case)
    clean = harness.evaluate(implementation, case.options, x)
    segment = np.concatenate([np.repeat(np.arange(len(row)), row)[None] for row in case.segments])
    for victim in range(len(case.segments[0])):
        here = np.zeros((case.B, case.T), bool)
        here[0] = segment[0] == victim
        v, do, h_0, dh_T = x.v.copy(), x.do.copy(), x.initial_state.copy(), x.dh_T.copy()
        v[here] = do[here] = 1e15
        last = victim == len(case.segments[0]) - 1
        if victim == 0:
            h_0[0] = 1e15
        if last:
            dh_T[0] = 1e15
        got = harness.evaluate(
            implementation, case.options, x._replace(v=v, do=do, initial_state=h_0, dh_T=dh_T)
        )
        for name, y in clean.items():
            if name == "final_state":
                same = np.array([not last, True])
            elif name == "dh_0":
                same = np.array([victim != 0, True])
            else:
                same = ~here
            np.testing.assert_array_equal(y[same], got[name][same], f"{name}, segment {victim}")


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_only_a_change_of_id_counts(implementation):
    """Ids are labels: any values, in any order, the same id again after another one included."""
    case = cases.CASES["segments"]
    x = cases.inputs(case)
    expected = harness.evaluate(implementation, case.options, x)
    labels = np.array([7, -1, 2**31 - 1], np.int32)
    got = harness.evaluate(implementation, case.options, x._replace(segment_ids=labels[x.segment_ids]))
    for name, y in expected.items():
        np.testing.assert_array_equal(y, got[name], name)


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_segments_equal_packed(implementation):
    """A row of segments is the packed call with zero states but the first."""
    case = cases.CASES["segments"]
    x = cases.inputs(case)
    got = harness.evaluate(implementation, case.options, x)
    row, lengths = 0, case.segments[0]
    one_row = {name: getattr(x, name)[row : row + 1] for name in ("q", "k", "v", "g", "beta")}
    states = np.zeros((len(lengths), *x.initial_state.shape[1:]), np.float32)
    states[0] = x.initial_state[row]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    o, final = oracle.forward(**one_row, initial_state=states, cu_seqlens=cu)
    assert_close(o[0], got["o"][row], tolerance("o", "float32"), "o", 1)
    assert_close(final[-1], got["final_state"][row], tolerance("final_state", "float32"), "state", 0)


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_order_of_sequences(implementation):
    """Packing the sequences in another order permutes the results."""
    case = cases.CASES["packed"]
    x = cases.inputs(case)
    got = harness.evaluate(implementation, case.options, x)
    order = np.array([6, 2, 0, 5, 4, 1, 7, 3])
    owner = _ownership(case, x)
    tokens = np.concatenate([np.flatnonzero(owner == n) for n in order] + [np.flatnonzero(owner < 0)])
    moved = {name: getattr(x, name)[:, tokens] for name in ("q", "k", "v", "g", "beta", "do")}
    moved |= {name: getattr(x, name)[order] for name in ("initial_state", "dh_T")}
    moved["cu_seqlens"] = np.concatenate([[0], np.cumsum(np.diff(x.cu_seqlens)[order])]).astype(np.int32)
    again = harness.evaluate(implementation, case.options, x._replace(**moved))
    for name, y in got.items():
        expected = y[order] if name in ("final_state", "dh_0") else y[:, tokens]
        assert_close(expected, again[name], tolerance(name, "float32"), name, head_axis(name))


def test_cu_seqlens_is_traced():
    """One compilation serves every set of lengths: cu_seqlens is data, not a static argument."""
    case = cases.CASES["packed"]
    x = cases.inputs(case)
    traces = []

    @jax.jit
    def call(cu):
        traces.append(1)
        arguments = (jnp.asarray(y) for y in x[:5])
        return gdn_jax.gated_delta_rule(*arguments, cu_seqlens=cu, implementation="chunked")[0]

    for cu in (x.cu_seqlens, np.zeros_like(x.cu_seqlens), np.array([0] + [case.T] * case.N, np.int32)):
        expected, _ = oracle.forward(*x[:5], cu_seqlens=cu)
        assert_close(expected, call(cu), tolerance("o", "float32"), "o", 2)
    assert len(traces) == 1


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_rows_of_no_tokens(implementation):
    x, state = jnp.zeros((1, 0, 2, 3)), jnp.ones((2, 2, 3, 3))
    packed = dict(initial_state=state, cu_seqlens=jnp.zeros(3, jnp.int32))
    o, final = gdn_jax.gated_delta_rule(x, x, x, implementation=implementation, **packed)
    assert o.shape == x.shape
    np.testing.assert_array_equal(final, state)
    assert gdn_jax.chunk_states(x, x, **packed).shape == (1, 1, 2, 3, 3)
