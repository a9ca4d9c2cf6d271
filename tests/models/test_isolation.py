"""A NaN or an infinity of one packed sequence or segment stays in it: the others keep every bit, in both directions.

In its own sequence it is seen: nothing replaces it by a number.
"""

import functools
from collections import Counter

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pool_prompts
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from programs import eqns
from serving_cases import assert_same_bits
from small_layers import drawn

from gdn_jax import (
    chunk_states,
    delta_chunk_states,
    delta_rule,
    gated_delta_product,
    gated_delta_rule,
    serving,
)
from gdn_jax.checks import cases
from gdn_jax.layers import GatedDeltaNet
from gdn_jax.rule import chunked
from gdn_jax.rules import linear
from gdn_jax.shapes import RuleArrays
from pallas_kernels.backward import gradients as gradients_kernel
from pallas_kernels.backward import rule as backward_rule
from pallas_kernels.chunks import inverse
from pallas_kernels.forward import rule as forward_rule

TOKENS, OF_SEQUENCES = ("q", "k", "v", "g", "beta", "do"), ("initial_state", "dh_T")
BAD = (np.nan, np.inf)
bad_numbers = pytest.mark.parametrize("bad", BAD)
INTERPRET = plgpu.InterpretGPUParams()


def owners(cu: np.ndarray, T: int) -> np.ndarray:
    """Sequence of each token, -1 for padding."""
    sequence = np.searchsorted(cu, np.arange(T), side="right") - 1
    return np.where(sequence < len(cu) - 1, sequence, -1)


def spoilt(x, victim: int, bad: float):
    """Name and inputs for one bad number at a time: in each array, at the first, a middle and the last token."""
    mine = np.flatnonzero(owners(x.cu_seqlens, x.q.shape[1]) == victim)
    for name in (name for name in TOKENS if getattr(x, name, None) is not None):
        for token in sorted({mine[0], mine[len(mine) // 2], mine[-1]}):
            y = getattr(x, name).copy()
            y[0, token, -1] = bad
            yield f"{name} of token {token}", x._replace(**{name: y})
    for name in OF_SEQUENCES:
        y = getattr(x, name).copy()
        y[victim, 0] = bad
        yield name, x._replace(**{name: y})


def assert_isolated(x, victims, clean: dict, got: dict, what: str) -> None:
    """Every result of the other sequences is as it was, and some result of the victims is no number."""
    owner, seen = owners(x.cu_seqlens, x.q.shape[1]), False
    for name, y in clean.items():
        of_sequences = name in ("final_state", "dh_0")
        mine = np.isin(np.arange(len(y)) if of_sequences else owner, victims)
        a, b = (z if of_sequences else np.moveaxis(np.asarray(z), 1, 0) for z in (y, got[name]))
        np.testing.assert_array_equal(a[~mine], b[~mine], f"{name}, {what}")
        seen |= not np.isfinite(np.asarray(b[mine]).astype(np.float32)).all()
    assert seen, f"{what}: not seen"


@bad_numbers
@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_plain_forms(implementation, bad):
    case = cases.CASES["packed"]
    x = cases.inputs(case)
    clean = harness.evaluate(implementation, case.options, x)
    for victim in (2, 4):
        for what, y in spoilt(x, victim, bad):
            got = harness.evaluate(implementation, case.options, y)
            assert_isolated(x, [victim], clean, got, what)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.crossed)])
def test_lanes(bad):
    """Chunks walked in four lanes, as on a GPU: sequences begin and end in any of them, as the oracle has them."""
    case = cases.Case("packed-lanes", T=190, B=1, lengths=(5, 0, 64, 33, 1, 80), K=8, V=8, chunk_size=16)
    x = cases.inputs(case)

    def call(*primals):
        packing = dict(cu_seqlens=jnp.asarray(x.cu_seqlens), chunk_size=case.chunk_size, lanes=4)
        return chunked.chunked_rule(*primals, scale=case.K**-0.5, **packing)

    @jax.jit
    def value_and_gradients(primals, cotangents):
        outputs, vjp = jax.vjp(call, *primals)
        return outputs, vjp(cotangents)

    clean = harness.named(value_and_gradients(x[:6], (x.do, x.dh_T)))
    harness.check(case, x, "float32", clean)
    for victim in (0, 2, 3):
        for what, y in spoilt(x, victim, bad):
            got = harness.named(value_and_gradients(y[:6], (y.do, y.dh_T)))
            assert_isolated(x, [victim], clean, got, what)


@pytest.mark.slow
@bad_numbers
def test_chunk_states_and_products(bad):
    """The states inside sequences, and several steps a token."""
    rng = np.random.default_rng(0)
    T, cu = 40, np.array([0, 5, 6, 30])
    k, v = (rng.standard_normal((1, T, 2, D)).astype(np.float32) / 2 for D in (4, 3))
    states = jax.jit(functools.partial(chunk_states, chunk_size=16))
    clean = np.asarray(states(k, v, cu_seqlens=cu))
    spoilt_v = v.copy()
    spoilt_v[0, 5] = bad  # a sequence of one token: no state inside
    np.testing.assert_array_equal(clean, states(k, spoilt_v, cu_seqlens=cu))
    spoilt_v[0, 7] = bad  # in the first chunk of the third, whose second chunk is the last of all
    got = np.asarray(states(k, spoilt_v, cu_seqlens=cu))
    np.testing.assert_array_equal(clean[:, :3], got[:, :3])
    assert not np.isfinite(got[0, 3]).all()

    steps = jax.jit(gated_delta_product)
    two = [rng.standard_normal((1, T, 2, 2, D)).astype(np.float32) / 2 for D in (4, 3)]
    clean = jax.device_get(steps(k, *two, cu_seqlens=cu))
    two[0][0, 5, 1] = bad
    got = jax.device_get(steps(k, *two, cu_seqlens=cu))
    others = np.arange(T) != 5
    np.testing.assert_array_equal(clean[0][:, others], got[0][:, others])
    np.testing.assert_array_equal(clean[1][::2], got[1][::2])
    assert not np.isfinite(got[1][1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, pytest.param(True, marks=pytest.mark.crossed)])
def test_inverse_of_a_shared_chunk(normalize):
    """Six sequences in one chunk, borders inside blocks of every size; every second one has NaN or huge keys."""
    rng, cu = np.random.default_rng(0), (0, 5, 6, 20, 23, 50, 64)
    first = np.repeat(cu[:-1], np.diff(cu)).astype(np.int32)
    k = rng.normal(size=(1, 64, 1, 64)).astype(np.float32) / 8
    beta = rng.uniform(size=(1, 1, 64)).astype(np.float32)
    g2_cum = -np.cumsum(rng.uniform(size=(1, 1, 64)), 2).astype(np.float32) / 8

    def t(*arrays):
        k, beta, g2_cum = map(jnp.asarray, (arrays[0].astype(jnp.bfloat16), *arrays[1:]))
        options = dict(normalize=normalize, config=inverse.Config(1, 1, 1), interpret=INTERPRET)
        result = inverse.gated_inverse(k, beta, g2_cum, jnp.asarray(first), **options)
        return np.asarray(result.t)[0, 0].astype(np.float32)

    clean = t(k, beta, g2_cum)
    for bad, victims in ((np.nan, (0, 6, 23)), (1e30, (5, 20, 50))):
        mine = np.isin(first, victims)
        spoilt = k.copy(), beta.copy(), g2_cum.copy()
        spoilt[0][:, mine] = bad
        if np.isnan(bad):
            spoilt[1][..., mine] = spoilt[2][..., mine] = bad
        got = t(*spoilt)
        np.testing.assert_array_equal(clean[~mine], got[~mine])  # columns of the victims, too: they are zero
        assert not np.isfinite(got[mine]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "segment_chunks"), [("bfloat16", 0), pytest.param("float16", 1, marks=pytest.mark.crossed)]
)
def test_kernels(dtype, segment_chunks, monkeypatch):
    """Forward and backward, with two sequences full of NaN and NaN in the padding, in chunks that others share. Of
    two heads that have the same numbers elsewhere the second one has the NaN."""
    for module in (forward_rule, backward_rule):
        monkeypatch.setattr(module, "known_lengths", lambda cu_seqlens: None)
    case = cases.Case("isolation", T=128, B=1, heads=(1, 1, 1), K=64, V=64, lengths=(20, 1, 60, 0, 40))
    x = cases.inputs(case, dtype)
    mine = np.isin(owners(x.cu_seqlens, case.T), (1, 4, -1))
    arrays = {}
    for name in (*TOKENS, *OF_SEQUENCES):
        axis = 1 if name in OF_SEQUENCES else 2
        bad = getattr(x, name).copy()
        if name in TOKENS:
            bad[:, mine] = np.nan
        else:
            bad[[1, 4]] = np.nan
        arrays[name] = np.concatenate([getattr(x, name), bad], axis)
    y = x._replace(**arrays)

    call = RuleArrays(*map(jnp.asarray, y[:6]), x.cu_seqlens, None)
    config = forward_rule.Config(segment_chunks=segment_chunks, inverse=inverse.Config(1, 1, 2))
    options = dict(scale=case.K**-0.5, interpret=INTERPRET)
    o, final, residuals = forward_rule.forward(call, config=config, **options)
    cotangents = backward_rule.OutputCotangents(jax.device_put(y.do), jax.device_put(y.dh_T))
    gradients = gradients_kernel.Config(ctas=2)
    config = backward_rule.Config(segments=bool(segment_chunks), gradients=gradients)
    back = backward_rule.backward(call, residuals, cotangents, config=config, **options)

    results = {"o": o, "final_state": final, **back._asdict()}
    axes = {name: 1 if name in ("final_state", "dh_0") else 2 for name in results}
    clean, got = ({name: np.take(r, [head], axes[name]) for name, r in results.items()} for head in (0, 1))
    assert_isolated(x, [1, 4, -1], clean, got, "all of two sequences")
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not got[name][:, x.cu_seqlens[-1] :].any(), f"{name} of the padding"


@pytest.mark.parametrize("batch_invariant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prompts(batch_invariant):
    """Prompts into a pool: NaN in one of them, and in one that has no slot."""
    case = pool_prompts.Case("isolation", (5, 3, 0, 9), K=8, V=4, dtype="float32", padding=(1,))
    x = pool_prompts.draw(case)
    options = dict(implementation="chunked", batch_invariant=batch_invariant, chunk_size=64)
    o, pool = pool_prompts.serve(case, x, **options)
    owner = owners(case.cu_seqlens, o.shape[1])
    mine = np.isin(owner, (1, 3))
    tokens = [y.copy() for y in x["tokens"]]
    for y in tokens:
        y[:, mine] = np.nan
    got_o, got_pool = pool_prompts.serve(case, x | {"tokens": tuple(tokens)}, **options)
    np.testing.assert_array_equal(np.asarray(o)[:, ~mine], np.asarray(got_o)[:, ~mine])
    others = np.arange(len(pool)) != x["read_slots"][3]
    assert_same_bits(np.asarray(pool)[others], np.asarray(got_pool)[others], "other slots")
    assert np.isnan(got_o)[:, owner == 3].any() and np.isnan(got_pool)[x["read_slots"][3]].any()


POOLS = {
    "states": lambda states: states,
    "states in bfloat16": lambda states: states.astype(jnp.bfloat16),
    "ring": lambda states: serving.make_ring_pool(states, num_key_heads=1, length=3),
    "ring of bytes": lambda states: serving.make_ring_pool(
        serving.make_byte_states(states), num_key_heads=1, length=3
    ),
    "ring of floats": lambda states: serving.make_ring_pool(
        serving.make_byte_states(states, dtype="float8_e4m3fn"), num_key_heads=1, length=3, trees=True
    ),
    "ring of channels": lambda states: serving.make_ring_pool(
        states, num_key_heads=1, length=3, channels=True
    ),
}


@pytest.mark.parametrize("kind", harness.tiers(POOLS, quick=("states", "ring of bytes")))
def test_a_slot_of_a_request_with_a_nan_is_used_again(kind):
    """The next request in that slot has the bits that it has in a new pool: a prompt, tokens that fill a ring,
    drafts and the short convolution. Another request of the batch keeps its bits all the time."""
    rng, by_channels = np.random.default_rng(0), kind == "ring of channels"
    q, k, v = (rng.standard_normal((1, 24, 1, 4)).astype(np.float32) for _ in range(3))
    gates = -np.abs(rng.standard_normal((1, 24, 1, 4) if by_channels else (1, 24, 1))).astype(np.float32)
    beta, x = np.full((1, 24, 1), 0.5, np.float32), rng.standard_normal((1, 24, 3)).astype(np.float32)
    cu, fresh = np.array([0, 5, 12]), np.zeros(2, bool)

    @jax.jit
    def serve(pool, windows, spoil):
        """Both requests, with NaN added to all tokens of the first one."""
        bad = jnp.where((jnp.arange(24) < 5) | (jnp.arange(24) % 2 == 0) & (jnp.arange(24) > 11), spoil, 0)

        def spoilt(y):
            return y + bad.reshape(1, 24, *(1,) * (y.ndim - 2))

        tokens, inputs = tuple(map(spoilt, (q, k, v, gates, beta))), spoilt(x)
        weight = jnp.ones((3, 4))
        at = dict(read_slots=np.array([4, 2]))
        prompt, results = dict(has_initial_state=fresh, **at), []
        o, pool = serving.prefill(*tokens, cu, pool, use_qk_l2norm=True, **prompt)
        y, windows = serving.causal_conv1d(inputs, cu, windows, weight, **prompt)
        results += [(o[0, :5], y[0, :5]), (o[0, 5:12], y[0, 5:12])]
        own = dict(A_log=jnp.zeros(1), dt_bias=jnp.zeros((1, 4) if by_channels else 1))
        for t in (12, 14, 16):
            of_token = (y[0, t : t + 2] for y in tokens)
            o, pool = serving.decode(*of_token, pool, **own, **at)
            y, windows = serving.causal_conv1d_update(inputs[0, t : t + 2], windows, weight, **at)
            results.append((o, y))
        drafts = (jnp.moveaxis(y[0, 18:22].reshape(2, 2, *y.shape[2:]), 0, 1) for y in tokens)
        slots = np.array([[4, 3], [2, 5]])
        accepted = dict(num_accepted_tokens=np.ones(2, np.int32))
        own_slots = slots if kind.startswith("states") else slots[:, 0]
        o, pool = serving.verify(*drafts, pool, state_slots=own_slots, **accepted, **own)
        both = jnp.moveaxis(inputs[0, 18:22].reshape(2, 2, 3), 0, 1)
        y, windows = serving.causal_conv1d_verify(both, windows, weight, state_slots=slots, **accepted)
        return [*results, (o, y)], pool, windows

    new = jax.jit(lambda: (POOLS[kind](jnp.zeros((6, 1, 4, 4))), jnp.zeros((6, 3, 3))))()
    want, spoilt = serve(*new, np.float32(0)), serve(*new, np.float32(np.nan))
    assert all(np.isnan(y).any() for y in spoilt[0][0]), "the request itself"
    for good, bad in zip(want[0][1:], spoilt[0][1:], strict=True):
        neighbour = slice(None) if good[0].shape[0] == 7 else 1
        for a, b in zip(good, bad, strict=True):
            assert_same_bits(np.asarray(a)[neighbour], np.asarray(b)[neighbour], "the neighbour")
    again = serve(*spoilt[1:], np.float32(0))
    for a, b in zip(jax.tree.leaves(want[0]), jax.tree.leaves(again[0]), strict=True):
        assert_same_bits(np.asarray(a), np.asarray(b), "the next request")


@pytest.mark.slow
@bad_numbers
@pytest.mark.parametrize("kind", ["states", "ring"])
def test_tokens_of_requests(kind, bad):
    """One token, then drafts, of three requests; the second one holds a bad number."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def arrays(*front):
        return [normal(*front, H, D) for H, D in ((1, 4), (1, 4), (2, 3))] + [normal(*front, 2) for _ in "ab"]

    states, rates, steps = normal(9, 2, 4, 3), normal(2), normal(2)
    slots = np.array([[0, 1], [2, 3], [4, 5]])
    one, drafts = arrays(3), arrays(3, 2)

    @jax.jit
    def served(one, drafts):
        ring = kind == "ring"
        pool, gates = jnp.array(states), dict(A_log=jnp.asarray(rates), dt_bias=jnp.asarray(steps))
        if ring:
            pool = serving.make_ring_pool(pool, num_key_heads=1, length=4, dtype=jnp.float32)
        o, pool = serving.decode(*one, pool, read_slots=slots[:, 0], **gates)
        named = slots[:, 0] if ring else slots
        accepted = np.ones(3, np.int32)
        o_drafts, pool = serving.verify(
            *drafts, pool, state_slots=named, num_accepted_tokens=accepted, **gates
        )
        pool = serving.flush(pool, slots[:, 0]).state if ring else pool
        return o, o_drafts, pool

    def evaluate(*arrays):
        return jax.device_get(served(*arrays))

    clean = evaluate(one, drafts)
    for n, where in [(n, where) for where in (0, 1) for n in range(5)]:
        spoilt = [[y.copy() for y in some] for some in (one, drafts)]
        spoilt[where][n][1, ..., -1] = bad
        got = evaluate(*spoilt)
        for a, b in zip(clean[:2], got[:2], strict=True):
            np.testing.assert_array_equal(a[[0, 2]], b[[0, 2]], f"array {n}")
        other = np.setdiff1d(np.arange(len(clean[2])), slots[1])
        np.testing.assert_array_equal(clean[2][other], got[2][other], f"array {n}")


def runs_of(ids: np.ndarray) -> np.ndarray:
    """Number of each token's segment, counted from 0 in every row."""
    return np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, 1)


@pytest.mark.slow
@bad_numbers
@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_segments(implementation, bad):
    """The first, an inner and the last segment of a row, with one bad number in each array in turn."""
    case = cases.CASES["segments"]
    x = cases.inputs(case)
    assert x.segment_ids is not None
    clean, runs = harness.evaluate(implementation, case.options, x), runs_of(x.segment_ids)
    for row, victim in ((0, 1), (0, 3), (1, 0)):
        mine = (np.arange(len(runs))[:, None] == row) & (runs == victim)
        is_first, is_last = victim == 0, bool(victim == runs[row, -1])
        names = (*TOKENS, *("initial_state",) * is_first, *("dh_T",) * is_last)
        for name in names:
            y = getattr(x, name).copy()
            part = y[row, np.flatnonzero(mine[row])[-1]] if name in TOKENS else y[row]
            part[..., -1] = bad
            got = harness.evaluate(implementation, case.options, x._replace(**{name: y}))
            for result, a in clean.items():
                touched = {"final_state": is_last, "dh_0": is_first}.get(result)
                others = ~mine if touched is None else (np.arange(len(runs)) != row) | (not touched)
                np.testing.assert_array_equal(a[others], got[result][others], f"{result}, {name}, {victim}")
            seen = got["dq" if name in ("do", "dh_T") else "o"]
            assert np.isnan(seen[mine]).all(), f"{name} of segment {victim}: not seen"


def test_what_segments_cost():
    """The form runs once: both passes have the products, loops and exponentials of a call without segments."""
    x = cases.inputs(cases.CASES["segments"])

    def heavy(ids):
        def total(*primals):
            how = dict(segment_ids=ids, implementation="chunked")
            o, state = gated_delta_rule(*primals[:5], initial_state=primals[5], **how)
            return o.sum() + state.sum()

        jaxpr = jax.make_jaxpr(jax.value_and_grad(total, range(6)))(*x[:6]).jaxpr
        names = ("dot_general", "scan", "while", "exp")
        return Counter(eqn.primitive.name for eqn in eqns(jaxpr) if eqn.primitive.name in names)

    alone = heavy(None)
    assert alone["dot_general"] and alone["scan"] and alone == heavy(jax.device_put(x.segment_ids))


@pytest.mark.slow
def test_segments_of_other_operations():
    """States of chunks, gates of each channel and a rule without a correction; tangents too."""
    rng, ids = np.random.default_rng(0), np.repeat([[3, 1, 3]], [9, 12, 14], 1)
    q, k, v = (rng.standard_normal((1, 35, 2, D), np.float32) / 2 for D in (4, 4, 3))
    g, mine, spoilt = -rng.uniform(size=k.shape).astype(np.float32), runs_of(ids)[0] == 1, v.copy()
    spoilt[0, 10, 1, 1] = np.nan
    q, k, g, ids = map(jnp.asarray, (q, k, g, ids))
    chunks = dict(segment_ids=ids, chunk_size=16)

    def outputs(v):
        mean = g.mean(-1)
        by_rows = dict(initial_state=None, segment_ids=ids)
        return delta_rule(q, k, v, g, **chunks)[0], linear.rows(q, k, v, mean, mean, **by_rows)[0]

    def states(v):
        return chunk_states(k, v, g.mean(-1), **chunks), delta_chunk_states(k, v, g, **chunks)

    tangent = jax.jit(lambda v, t: jax.jvp(outputs, (v,), (t,))[1])
    for clean, got in jax.device_get(
        (
            *zip(jax.jit(outputs)(v), jax.jit(outputs)(spoilt), strict=True),
            *zip(tangent(v, v), tangent(v, spoilt), strict=True),
        )
    ):
        np.testing.assert_array_equal(clean[:, ~mine], got[:, ~mine])
        assert np.isnan(got[:, mine]).all()
    # The states before tokens 0, 16 and 32: the second one is of the segment with the NaN.
    both = (jax.device_get(jax.jit(states)(values)) for values in (v, spoilt))
    for clean, got in zip(*both, strict=True):
        np.testing.assert_array_equal(clean[:, ::2], got[:, ::2])
        assert np.isnan(got[:, 1]).all()


@pytest.mark.slow
def test_segments_of_a_layer():
    """Convolution, norms and rule together: a NaN in the input, and in the output's cotangent."""
    layer = drawn(lambda rngs: GatedDeltaNet(8, num_heads=2, head_dim=4, rngs=rngs))
    ids = np.repeat([[0, 1, 2]], [5, 9, 10], 1)
    x, dy = np.random.default_rng(0).standard_normal((2, 1, 24, 8)).astype(np.float32)

    @jax.jit
    def both(x, dy):
        y, vjp = jax.vjp(lambda x: layer(x, segment_ids=jnp.asarray(ids))[0], x)
        return y, vjp(dy)[0]

    clean, mine = jax.device_get(both(x, dy)), ids[0] == 1
    for which, token in ((0, 13), (1, 6)):
        spoilt = [x.copy(), dy.copy()]
        spoilt[which][0, token] = np.nan
        got = jax.device_get(both(*spoilt))
        for a, b in zip(clean, got, strict=True):
            np.testing.assert_array_equal(a[:, ~mine], b[:, ~mine])
        assert np.isnan(got[which][:, mine]).all()
