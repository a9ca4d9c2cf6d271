"""The family's rule against its oracle: decays of each channel, erase and write apart, several steps a token."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_harness import CASES, PRIMALS, QUICK, evaluate, options_of
from harness import tiers
from tolerances import FINITE_DIFFERENCES, assert_close, bound, differences, head_axis

import gdn_jax
from gdn_jax import (
    delta_chunk_states,
    delta_rule,
    delta_step,
    gated_delta_product,
    gated_delta_rule,
    gated_delta_step,
)
from gdn_jax.checks import family_cases, family_oracle, oracle

BOUND_OF = {"derase": "dbeta", "dwrite": "dbeta"}
IN_ONE_DTYPE = (
    "one-token",
    "seven-tokens",
    "K60-V100-chunk-less-one",
    "K100-V60-chunk-128",
    "K64-chunk-16",
)
"""Cases for lengths, sizes and chunks alone, on which no rounding and no conversion hangs."""
NARROW = [case for case in family_cases.TABLE if case.name not in IN_ONE_DTYPE]


def check(case, dtype: str, implementation: str) -> None:
    """Every output and gradient within the bounds of the gated delta rule's own tests."""
    x = family_cases.inputs(case, dtype)
    expected = family_oracle.evaluate(**x.arguments, **options_of(case), do=x.do, dh_T=x.dh_T)
    got = evaluate(case, x, implementation)
    # Two wide bounds for bfloat16: keys alike or channels that never decay, as for the gated delta rule.
    cancels = x.g is None or bool((x.g == 0).all((0, 1)).any()) or case.call.keys == "correlated"
    misses = []
    for name, reference in expected.items():
        if reference is None:
            assert name not in got
            continue
        allowed = bound(BOUND_OF.get(name, name), dtype, cancelling=cancels)
        try:
            assert_close(reference, np.asarray(got[name]), allowed, name, head_axis(name))
        except AssertionError as error:
            misses.append(str(error).splitlines()[0])
    assert not misses, f"{case.name} {dtype} {implementation}: " + "; ".join(misses)


NAMES = {case.name for case in family_cases.TABLE}
CROSSED = {
    "K64-chunk-16", "K256", "K60-V100-chunk-less-one", "K100-V60-chunk-128", "groupings-that-do-not-nest",
    "seven-tokens",
}  # fmt: skip
"""A length of chunks that most cases have here, and widths, lengths and groupings of which others have their like, or
the rule of one gate a head has."""
CROSSED_IN_FLOAT32 = CROSSED | {"packed", "K128-l2norm"}
"""Of a program that another case has: packed rows of another layout, and the L2 norm in bfloat16."""
CROSSED_IN_BFLOAT16 = CROSSED | {
    "packed", "segments", "no-state-no-strengths", "gate-of-a-head-erase-a-channel", "erase-2",
    "packed-vk-erase-a-channel",
}  # fmt: skip
"""Left are all values of the gates, erase and write apart, and the L2 norm."""


OF_THE_DEFINITION = {name for name in NAMES if name.startswith("channels-")} | {
    "erase-2", "gate-of-a-head-erase-a-channel", "seven-tokens", "no-state-no-strengths", "packed-vk-erase-a-channel",
    "segments",
}  # fmt: skip
"""All values, and every option once: the definition is one step, which has no lengths or sizes of its own."""


@pytest.mark.parametrize("case", tiers(family_cases.TABLE, {*QUICK} - {"packed"}, NAMES - CROSSED_IN_FLOAT32))
def test_chunked_form(case):
    check(case, "float32", "chunked")


@pytest.mark.parametrize(
    "case",
    tiers(
        NARROW,
        [],
        [case.name for case in NARROW if case.name not in CROSSED_IN_BFLOAT16],
    ),
)
def test_chunked_form_in_bfloat16(case):
    check(case, "bfloat16", "chunked")


@pytest.mark.parametrize("case", tiers(family_cases.TABLE, ("channels-of-every-kind",), OF_THE_DEFINITION))
def test_definition(case):
    check(case, "float32", "recurrent")


def test_the_oracle_is_its_own_derivative():
    """The adjoint of the oracle against differences of its outputs, in a direction of every input."""
    case = CASES["erase-and-write-a-channel"]
    x = family_cases.inputs(case, "float64")
    rng = np.random.default_rng(0)
    directions = {
        name: rng.standard_normal(np.shape(y)) for name, y in x.arguments.items() if name in PRIMALS
    }

    def along(step: float) -> float:
        moved = {
            name: y + step * directions[name] if name in directions else y for name, y in x.arguments.items()
        }
        r = family_oracle.evaluate(**moved, do=x.do, dh_T=x.dh_T)
        return float((r["o"] * x.do).sum() + (r["final_state"] * x.dh_T).sum())

    gradients = family_oracle.evaluate(**x.arguments, do=x.do, dh_T=x.dh_T)
    sizes = {name: float((gradients["dh_0" if name == "initial_state" else f"d{name}"] * d).sum())
             for name, d in directions.items()}  # fmt: skip
    assert_close(np.array(sum(sizes.values())), np.array(differences(along)), 100 * FINITE_DIFFERENCES)


def test_equal_channels_are_the_gated_delta_rule():
    """The family's oracle against the other one, and the channels' form against the heads' form, to 1e-6."""
    case = CASES["gate-of-a-head-erase-a-channel"]
    x = family_cases.inputs(case)
    beta = 1 / (1 + np.exp(-(x.g * 10 + 1)))
    g = np.repeat(x.g[..., None], x.k.shape[-1], -1)
    common = dict(initial_state=x.initial_state)
    truth = oracle.evaluate(x.q, x.k, x.v, x.g, beta, **common, do=x.do, dh_T=x.dh_T)
    ours = family_oracle.evaluate(x.q, x.k, x.v, g, beta, **common, do=x.do, dh_T=x.dh_T)
    for name in ("o", "final_state", "dq", "dk", "dv", "dbeta", "dh_0"):
        assert_close(truth[name], ours[name], 1e-12, name)
    assert_close(truth["dg"], ours["dg"].sum(-1), 1e-12, "dg")
    heads = jax.jit(gated_delta_rule)(x.q, x.k, x.v, x.g, beta, initial_state=x.initial_state)
    x = x._replace(g=g, beta=beta, erase=None, write=None)
    channels = evaluate(CASES["channels-mild"], x, "chunked")  # whose program is of the same shapes
    for one, name in zip(heads, ("o", "final_state"), strict=True):
        assert_close(one, channels[name], 1e-6)


def test_a_gate_of_each_head_runs_the_gated_delta_rule():
    """The same bits, and the same program."""
    x = family_cases.inputs(CASES["gate-of-a-head-erase-a-channel"])
    arguments = *map(jnp.asarray, (x.q, x.k, x.v, x.g)), None
    ours = jax.jit(delta_rule).lower(*arguments).as_text()
    assert ours.replace("jit_delta_rule", "") == (
        jax.jit(gated_delta_rule).lower(*arguments).as_text().replace("jit_gated_delta_rule", "")
    )


def test_no_gate_reaches_back():
    """Changing gates after token t leaves every output up to t as it is, bit for bit, for every kind of gates."""
    call = family_cases.Case("causal", T=64, B=1, heads=(1, 1, 1), K=16, V=8)
    kinds = ("mild", "bound", "-5", "kinds", "some -inf")
    rows = [family_cases.inputs(family_cases.FamilyCase(call, kind)) for kind in kinds]
    q, k, v, g, beta = (np.concatenate([getattr(x, name) for x in rows]) for name in PRIMALS[:5])
    rule = jax.jit(functools.partial(delta_rule, chunk_size=64, implementation="chunked"))
    o = np.asarray(rule(q, k, v, g, beta)[0])
    for t in (0, 3, 7, 15, 16, 20, 31, 32, 45, 62):
        changed = g.copy()
        changed[:, t + 1 :] = 0.3 * np.where(np.isinf(g[:, t + 1 :]), -1.0, g[:, t + 1 :]) - 0.01
        again = np.asarray(rule(q, k, v, changed, beta)[0])
        np.testing.assert_array_equal(again[:, : t + 1], o[:, : t + 1], err_msg=f"token {t}")


def test_strong_gates_have_their_own_gradient():
    """dg at tokens of -20 is tiny, and right by its own size: sums that ought to cancel would drown it."""
    case = CASES["channels-mild"]
    x = family_cases.inputs(case)
    strong = np.arange(5, 130, 23)
    x.g[:, strong] = -20
    truth = family_oracle.evaluate(**x.arguments, do=x.do, dh_T=x.dh_T)["dg"]
    got = np.asarray(evaluate(case, x, "chunked")["dg"])
    assert_close(truth[:, strong], got[:, strong], bound("dg", "float32"))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates(lower_bound):
    """Both gates and all their derivatives against float64 formulas, finite for any rate."""
    A_log, f = (
        y.ravel()
        for y in np.meshgrid(
            np.array([-20, -5, 0, 1, 2.77, 10, 40, 80.0, 90.0]),
            np.array([-120, -20, -8, -1e-3, 0, 1e-3, 1, 8, 60, 100.0]),
        )
    )

    def gate(f, A_log):
        bias = jnp.zeros((len(f), 1), f.dtype)
        return gdn_jax.channel_log_decay(f[:, None], A_log, bias, lower_bound)[:, 0]

    @jax.jit
    def both(*given):
        g, vjp = jax.vjp(gate, *given)
        return g, *vjp(jnp.ones_like(g))

    got = jax.device_get(both(f.astype(np.float32), A_log.astype(np.float32)))
    assert all(np.isfinite(y).all() for y in got)
    with np.errstate(over="ignore"):
        softplus, sigmoid = np.logaddexp(0, f), np.exp(-np.logaddexp(0, -f))
        if lower_bound is None:
            expected = -np.exp(A_log) * softplus, -np.exp(A_log) * sigmoid, -np.exp(A_log) * softplus
        else:
            z = np.exp(A_log) * f
            both_sides = np.exp(-np.abs(z) - 2 * np.log1p(np.exp(-np.abs(z))))  # sigmoid(z) sigmoid(-z)
            s = np.exp(-np.logaddexp(0, -z))
            expected = (
                lower_bound * s,
                lower_bound * both_sides * np.exp(A_log),
                lower_bound * both_sides * z,
            )
    for name, want, y in zip(("g", "df", "dA_log"), expected, got, strict=True):
        representable = np.isfinite(want) & (np.abs(want) > 1e-30) & (np.abs(want) < 1e37)
        error = np.abs(y - want)[representable] / np.abs(want)[representable]
        assert error.max() < 1e-5, (name, error.max())


def test_gate_is_in_float32():
    """A bfloat16 input is widened before the sum with the bias."""
    f, bias = np.full((1, 1, 1), 1 / 3, jnp.bfloat16), np.full((1, 1), 1e-3, np.float32)
    g = np.asarray(jax.jit(gdn_jax.channel_log_decay)(f, np.zeros(1, np.float32), bias))
    assert g.dtype == np.float32
    assert_close(-np.logaddexp(0, np.float64(f[0, 0, 0]) + 1e-3), g[0, 0, 0], 1e-6)


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_product_of_several_steps(n):
    """DeltaProduct against the recurrence written out; with one step the bits of the gated delta rule."""
    rng = np.random.default_rng(n)
    B, T, H, K, V = 1, 37, 2, 8, 4
    q = rng.standard_normal((B, T, H, K)).astype(np.float32)
    k = rng.standard_normal((B, T, n, H, K)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((B, T, n, H, V)).astype(np.float32)
    g = -rng.random((B, T, H)).astype(np.float32)
    beta = 2 * rng.random((B, T, n, H)).astype(np.float32)
    o, state = jax.jit(gated_delta_product)(q, k, v, g, beta)
    S, expected = np.zeros((H, K, V)), []
    for t in range(T):
        S = np.exp(g[0, t].astype(np.float64))[:, None, None] * S
        for i in range(n):
            u = beta[0, t, i][:, None] * (v[0, t, i] - np.einsum("hk,hkv->hv", k[0, t, i], S))
            S = S + k[0, t, i][:, :, None] * u[:, None, :]
        expected.append(K**-0.5 * np.einsum("hk,hkv->hv", q[0, t], S))
    assert_close(np.array(expected)[None], np.asarray(o), bound("o", "float32"))
    assert_close(S[None], np.asarray(state), bound("final_state", "float32"))
    if n == 1:
        plain = jax.jit(gated_delta_rule)(q, k[:, :, 0], v[:, :, 0], g, beta[:, :, 0])
        np.testing.assert_array_equal(o, plain[0])
        np.testing.assert_array_equal(state, plain[1])


def test_packed_products_and_segments():
    """Borders count tokens, whatever the number of steps."""
    rng = np.random.default_rng(0)
    shape = (1, 20, 2, 1)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 20, 1, 4), (*shape, 4), (*shape, 3)))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    expected = np.zeros((1, 20, 1, 3))
    for t in range(20):
        if t in (0, 7):
            S = np.zeros((4, 3))
        for k_i, v_i in zip(k[0, t, :, 0].astype(np.float64), v[0, t, :, 0], strict=True):
            S = S + np.outer(k_i, v_i - k_i @ S)
        expected[0, t, 0] = q[0, t, 0] @ S / 2
    rule = jax.jit(functools.partial(gated_delta_product, implementation="recurrent"))
    packed, _ = rule(q, k, v, cu_seqlens=np.array([0, 7, 20]))
    segments, _ = rule(q, k, v, segment_ids=np.repeat([[0, 1]], [7, 13], 1))
    for got in (packed, segments):
        assert_close(expected, np.asarray(got), bound("o", "float32"))


def test_products_of_narrow_offsets(no_type_checks):
    """Offsets times the steps of a token are no numbers of 8 bits."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((1, 100, 1, 3), *[(1, 100, 3, 1, 3)] * 2)
    )
    rule = functools.partial(gated_delta_product, use_qk_l2norm=True, implementation="recurrent")
    traced, offsets = jax.jit(rule), np.array([0, 40, 100])
    expected = traced(q, k, v, cu_seqlens=offsets.astype(np.int32))
    for found in (
        traced(q, k, v, cu_seqlens=offsets.astype(np.int8)),
        traced(q, k, v, cu_seqlens=offsets.astype(np.uint8)),
        jax.jit(lambda *x: rule(*x, cu_seqlens=offsets.astype(np.int8)))(q, k, v),
    ):
        jax.tree.map(np.testing.assert_array_equal, expected, found)


@pytest.mark.parametrize("given", ["g and beta", "nothing"])
def test_a_step_with_gates_of_heads_is_the_gated_step(given):
    """To the bit; without gates too, where several value heads share a query head."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 8)).astype(np.float32) for heads in (1, 1, 2))
    g, beta = -np.exp(rng.standard_normal((2, 2))).astype(np.float32), np.full((2, 2), 0.5, np.float32)
    gates = (g, beta) if given == "g and beta" else (None, None)
    state = rng.standard_normal((2, 2, 8, 8)).astype(np.float32)
    both = jax.jit(lambda *x: [step(*x) for step in (delta_step, gated_delta_step)])
    for one, other in zip(*both(q, k, v, *gates, state), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_steps_equal_the_row():
    """Token by token from a state, as the whole row; and the states at the start of the chunks lie between."""
    case = CASES["erase-and-write-a-channel"]
    x = family_cases.inputs(case)
    row = evaluate(case, x, "chunked")

    @jax.jit
    def steps(state, tokens):
        def token(S, y):
            q, k, v, g, erase, write = y
            o, S = delta_step(q, k, v, g, None, S, erase=erase, write=write)
            return S, (o, S)

        return jax.lax.scan(token, state, tokens)

    tokens = [np.moveaxis(y, 1, 0) for y in (x.q, x.k, x.v, x.g, x.erase, x.write)]
    S, (outputs, states) = steps(x.initial_state, tokens)
    assert_close(np.moveaxis(np.asarray(outputs), 0, 1), row["o"], bound("o", "float32"))
    assert_close(np.asarray(S), row["final_state"], bound("o", "float32"))
    strengths = dict(erase=x.erase, write=x.write, initial_state=x.initial_state)
    states_of = jax.jit(partial(delta_chunk_states, use_k_l2norm=True))
    h = np.asarray(states_of(3 * x.k, x.v, x.g, **strengths))  # the keys of the case have length 1
    for chunk in (1, 2):
        assert_close(np.asarray(states)[64 * chunk - 1], h[:, chunk], bound("o", "float32"))
