"""The chunked form against the oracle and against the recurrence."""

import dataclasses
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
from gdn_jax.rule import chunked
from gdn_jax.rule.chunks import rows


@pytest.mark.parametrize(
    "case, dtype", [*harness.table(("float32", "bfloat16")), *harness.channels("chunked")]
)
def test_table(case, dtype):
    x = cases.inputs(case, dtype)
    harness.check(case, x, dtype, harness.evaluate("chunked", case.options, x))


@pytest.mark.parametrize(
    "C",
    [
        *(pytest.param(C, marks=pytest.mark.slow) for C in (16, 128)),
        *(pytest.param(C, marks=pytest.mark.crossed) for C in (32, 64)),
    ],
)
def test_chunk_size_has_no_effect(C):
    """The same inputs in chunks of any size."""
    for name in ("mixed-decay", "reset-at-some-tokens", "beta-up-to-2"):
        case = dataclasses.replace(cases.CASES[name], chunk_size=C)
        x = cases.inputs(case)
        harness.check(case, x, "float32", harness.evaluate("chunked", case.options, x))


def test_the_state_between_chunks_is_not_rounded():
    """For bfloat16 inputs either: the final state is that of float32 inputs of equal value."""
    case = cases.Case("long", T=1024, B=1, heads=(1, 1, 1), K=32, V=16, chunk_size=16)
    x = cases.inputs(case, "bfloat16")
    q, k, v = (jnp.asarray(y, jnp.bfloat16) for y in (x.q, x.k, x.v))
    rule = jax.jit(lambda *x: gdn_jax.gated_delta_rule(*x, chunk_size=16, implementation="chunked")[1])
    gates = jnp.asarray(x.g, jnp.float32), jnp.asarray(x.beta, jnp.float32)
    rounded = rule(q, k, v, *gates)
    want = rule(*(y.astype(jnp.float32) for y in (q, k, v)), *gates)
    np.testing.assert_allclose(rounded, want, atol=1e-5 * float(jnp.max(jnp.abs(want))))


@pytest.mark.slow
def test_many_chunks():
    """Errors do not grow with the number of chunks (33 here)."""
    case = cases.Case("many", T=2050, B=1, heads=(1, 1, 1), V=16)
    x = cases.inputs(case)
    harness.check(case, x, "float32", harness.evaluate("chunked", case.options, x))


@pytest.mark.slow
@pytest.mark.parametrize("T", [270, pytest.param(64, marks=pytest.mark.crossed)])
def test_lanes(T, monkeypatch):
    """Long rows on a GPU are walked in lanes that are joined afterwards; here the same on any device."""
    monkeypatch.setattr(rows, "num_lanes", lambda *_, **__: 4)
    monkeypatch.setattr(chunked, "stretch_of", lambda T, chunk_size, _: (T, chunk_size))
    case = cases.Case("lanes", T=T, chunk_size=16, V=16)  # 17 chunks do not fill 4 lanes, 4 do
    x = cases.inputs(case)
    call = jax.jit(harness.value_and_gradients("chunked", case.options))
    harness.check(case, x, "float32", harness.named(call(x[:6], (x.do, x.dh_T), None, None)))


STRETCHES = {
    "state": cases.Case("stretches", T=150, heads=(2, 1, 4)),
    "no-state-segments": cases.Case(
        "stretches-segments", T=150, segments=((40, 60, 50), (149, 1)), initial_state=False
    ),
    "strong-decay-then-slow": cases.Case("stretches-late-slow", T=150, g="late-slow", K=24),
}


@pytest.mark.parametrize("name", harness.tiers(STRETCHES, (), ("strong-decay-then-slow",)))
def test_stretches(name, monkeypatch):
    """Long rows on a CPU are computed in stretches, each from the state of the last; here the same on any device."""
    monkeypatch.setattr(chunked, "stretch_of", lambda T, chunk_size, _: (64, 32))  # 64, 64 and 22 tokens
    case = STRETCHES[name]
    x = cases.inputs(case)
    call = jax.jit(harness.value_and_gradients("chunked", case.options))
    harness.check(case, x, "float32", harness.named(call(x[:6], (x.do, x.dh_T), None, x.segment_ids)))


def test_stretch_sizes(monkeypatch):
    """Stretches hold whole chunks and cover the row, with less than a chunk each to spare; short rows are not cut."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    for T, chunk_size, width in itertools.product((1, 500, 2048, 2050, 5000), (16, 64), (1, 4, 12, 300)):
        tokens, C = rows.stretch_of(T, chunk_size, width)
        if T * width <= 2048:
            assert (tokens, C) == (T, chunk_size)
            continue
        assert C == min(chunk_size, 32) and tokens % C == 0
        assert tokens * width <= 2048 or tokens == C
        stretches = -(-T // tokens)
        assert stretches * tokens - T < stretches * C
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert rows.stretch_of(5000, 64, 4) == (5000, 64)
    on_gpu = functools.partial(rows.stretch_of, on_cpu=None)
    assert on_gpu(5000, 64, 4, on_gpu=20000) == (5000, 64)
    assert on_gpu(8192, 64, 96, on_gpu=2**16) == (512, 64)  # 10 chunks have room, 8 fill the row
    assert on_gpu(64 * 11, 64, 4, on_gpu=64 * 4 * 4) == (64 * 4, 64)  # nothing fills it: 3 of 4 chunks
    assert on_gpu(100, 64, 4000, on_gpu=2**16) == (64, 64)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert on_gpu(8192, 64, 96, on_gpu=2**16) == (8192, 64)


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="stretches are for CPUs")
def test_temporary_memory_of_a_long_row():
    """Forward, four times the tokens need no more temporary memory: it is that of one stretch."""

    def temporary(T):
        per_token = (1, 32), (1, 32), (4, 32), (4,), (4,)  # q, k, v, g, beta
        primals = [jax.ShapeDtypeStruct((1, T, *shape), jnp.float32) for shape in per_token]
        call = jax.jit(lambda *p: gdn_jax.gated_delta_rule(*p, implementation="chunked"))
        return call.lower(*primals).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8192) <= 1.1 * temporary(2048)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_split_in_two(implementation, at=50):
    """Handing the state over changes nothing. (At other tokens: test_packing.test_split_anywhere.)"""
    x = cases.inputs(cases.CASES["slow-decay"])

    @jax.jit
    def halves(q, k, v, g, beta, state):
        outputs = []
        for part in (slice(0, at), slice(at, None)):
            o, state = gdn_jax.gated_delta_rule(
                *(y[:, part] for y in (q, k, v, g, beta)), initial_state=state, implementation=implementation
            )
            outputs.append(o)
        return *outputs, state

    first, second, state = halves(*x[:6])
    expected, final = oracle.forward(**x.arguments)
    assert_close(expected[:, :at], first, tolerance("o", "float32"), "first part", 2)
    assert_close(expected[:, at:], second, tolerance("o", "float32"), "second part", 2)
    assert_close(final, state, tolerance("final_state", "float32"), "state", 1)


@pytest.mark.parametrize("implementation", harness.CHUNKED_FIRST)
def test_permuting_rows_and_heads(implementation):
    """Rows and heads do not know of each other: permuting the inputs permutes every result."""
    case = cases.CASES["slow-decay"]
    x = cases.inputs(case)
    plain = harness.evaluate(implementation, case.options, x)
    by_row = x._replace(**{name: getattr(x, name)[::-1] for name in (*harness.PRIMALS, "do", "dh_T")})
    swap = {name: getattr(x, name)[:, :, ::-1] for name in ("v", "g", "beta", "do")}
    swap |= {name: getattr(x, name)[:, ::-1] for name in ("initial_state", "dh_T")}
    rows = harness.evaluate(implementation, case.options, by_row)
    heads = harness.evaluate(implementation, case.options, x._replace(**swap))
    for name, y in plain.items():
        bound = tolerance(name, "float32")
        assert_close(y[::-1], rows[name], bound, f"{name} by row", head_axis(name))
        axis = head_axis(name)
        assert_close(np.flip(y, axis), heads[name], bound, f"{name} by head", axis)  # q and k have one head


@pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)
def test_corners(implementation):
    """Limits of the rule that have a name, each against its own formula."""
    case = cases.CASES["slow-decay"]
    bound, state_bound = tolerance("o", "float32"), tolerance("final_state", "float32")

    def run(**change):
        return harness.evaluate(implementation, case.options, x._replace(**change))

    x = cases.inputs(case)
    B, T, HO, K = case.B, case.T, case.HO, case.K
    zeros, ones = np.zeros((B, T, HO), np.float32), np.ones((B, T, HO), np.float32)
    q, k, v = (np.repeat(y.astype(np.float64), HO // y.shape[2], 2) for y in (x.q, x.k, x.v))
    h_0 = x.initial_state.astype(np.float64)

    # g = 0: DeltaNet, S_t = (I - beta k k^T) S_{t-1} + beta k v^T.
    S = h_0
    for t in range(T):
        kt, bt = k[:, t], x.beta[:, t].astype(np.float64)[..., None, None]
        householder = np.eye(K) - bt * kt[..., :, None] * kt[..., None, :]
        S = householder @ S + bt * kt[..., None] * v[:, t][..., None, :]
    assert_close(S, run(g=zeros)["final_state"], state_bound, "DeltaNet", 1)

    # beta = 0: pure decay, nothing is written. o_t = scale exp(g_1 + ... + g_t) q_t S_0.
    decay = np.exp(np.cumsum(x.g.astype(np.float64), 1))
    expected = K**-0.5 * decay[..., None] * np.einsum("bthk,bhkv->bthv", q, h_0)
    got = run(beta=zeros)
    assert_close(expected, got["o"], bound, "pure decay", 2)
    assert_close(decay[:, -1][..., None, None] * h_0, got["final_state"], state_bound, "pure decay, state", 1)

    # g = -inf: the state is only the last token, o_t = scale beta_t (q_t . k_t) v_t.
    got = run(g=np.full((B, T, HO), -np.inf, np.float32))
    expected = K**-0.5 * (x.beta * (q * k).sum(-1))[..., None] * v
    assert_close(expected, got["o"], bound, "reset", 2)
    last = x.beta[:, -1, :, None, None] * k[:, -1][..., None] * v[:, -1][..., None, :]
    assert_close(last, got["final_state"], state_bound, "reset, state", 1)

    # Orthonormal keys, g = 0, beta = 1: exact retrieval of every value, whatever the state was before.
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((K, K)))[0]
    keys = np.tile(basis, (-(-T // K), 1))[:T].astype(np.float32)
    keys = np.broadcast_to(keys[None, :, None], x.k.shape)
    got = run(k=keys, q=keys, g=zeros, beta=ones)
    assert_close(K**-0.5 * v, got["o"], bound, "retrieval of the value just written", 2)
    order = (np.arange(T - K, T)) % K
    recalled = np.einsum("ik,bhkv->bihv", basis[order], got["final_state"].astype(np.float64))
    assert_close(v[:, -K:], recalled, bound, "retrieval from the state", 2)

    # beta = 2, v = 0, one key: a reflection at every token, two of which are the identity (T is even).
    key = np.zeros(x.k.shape, np.float32)
    key[..., 1] = 1
    change = dict(k=key, q=key, v=np.zeros_like(x.v), g=zeros, beta=2 * ones)
    got = run(**change)
    alike = None if implementation == "recurrent" else cases.CASES["repeated-keys-beta-2"]
    bound, state_bound = (tolerance(name, "float32", alike) for name in ("o", "final_state"))
    sign = np.where(np.arange(T) % 2 == 0, -1.0, 1.0)[None, :, None, None]
    assert_close(K**-0.5 * sign * h_0[:, None, :, 1], got["o"], bound, "reflection", 2)
    assert_close(h_0, got["final_state"], state_bound, "two reflections", 1)


@pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)
def test_absent_gates_are_zeros_and_ones(implementation):
    """g=None is g = 0, beta=None is beta = 1, no initial state is zeros, the default scale is K ** -0.5."""
    full = cases.CASES["slow-decay"]
    x = cases.inputs(full)
    zeros, ones = np.zeros_like(x.g), np.ones_like(x.beta)
    x = x._replace(g=zeros, beta=ones, initial_state=np.zeros_like(x.initial_state))
    expected = harness.evaluate(implementation, full.options, x)
    got = harness.evaluate(implementation, full.options, x._replace(g=None, beta=None, initial_state=None))
    for name in ("o", "final_state", "dq", "dk", "dv"):
        assert_close(expected[name], got[name], tolerance(name, "float32"), name, head_axis(name))
    assert got["dg"] is None and got["dbeta"] is None and got["dh_0"] is None
