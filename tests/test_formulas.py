"""Errors of the source documents: the formula as written misses the oracle, the package meets it; tests state both.

Numbers in the names of tests are those of the documents: 000 FlashInfer's trace, 001 and 004 blog posts, 002 notes on
vLLM, 003 Modular's documentation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, rms_ratio, tolerance

import gdn_jax
from gdn_jax.checks import cases, oracle

STATE = tolerance("final_state", "float32")
OUTPUT = tolerance("o", "float32")
WRONG = 1e-2  # a wrong formula is off by percents, a thousand times the tolerance of a right one


def eight_steps(T=8, **change):
    """One head, and float64 copies without batch and head axes."""
    case = cases.Case("formula", T=T, B=1, heads=(1, 1, 1), K=16, V=16, **change)
    x = cases.inputs(case)
    q, k, v, g, beta = (y[0, :, 0].astype(np.float64) for y in x[:5])
    return x, q, k, v, g, beta, x.initial_state[0, 0].astype(np.float64)


@functools.cache
def _compiled(**options):
    return jax.jit(lambda arguments: gdn_jax.gated_delta_rule(**arguments, **options))


def ours(x, state_layout="kv", **change):
    """(o, final_state) of both forms, which agree."""
    arguments = x.arguments | change
    names = ("recurrent", "chunked")
    results = [_compiled(state_layout=state_layout, implementation=name)(arguments) for name in names]
    assert_close(results[0][0], results[1][0], OUTPUT)
    return tuple(np.asarray(y) for y in results[1])


def chunk_of(T=64):
    """A chunk with noticeable decay: its arrays, and gamma, Gamma, the gated and the ungated T."""
    x, q, k, v, _, beta, h = eight_steps(T)
    rng = np.random.default_rng(3)
    g = -rng.exponential(0.03, T).astype(np.float32)
    x = x._replace(g=g[None, :, None])
    G = np.cumsum(g.astype(np.float64))
    Gamma = np.tril(np.exp(np.minimum(G[:, None] - G[None], 0)))

    def system(decay):
        return np.linalg.inv(np.eye(T) + np.tril(beta[:, None] * (k @ k.T) * decay, -1)) * beta

    return x, q, k, v, beta, h, np.exp(G), Gamma, system(Gamma), system(np.ones((T, T)))


def through(W, U, gamma, k, h):
    """Final state of a chunk from its WY keys and values."""
    return gamma[-1] * h + (k * (gamma[-1] / gamma)[:, None]).T @ (U - W @ h)


def test_001_error_against_the_undecayed_state():
    """S = alpha S + beta (v - S k) k^T reads the error before the decay. Right: decay first."""
    x, _q, k, v, g, beta, S = eight_steps()
    for t in range(8):
        S = np.exp(g[t]) * S + np.outer(k[t], beta[t] * (v[t] - k[t] @ S))
    _, truth = oracle.forward(**x.arguments)
    assert rms_ratio(truth[0, 0], S) > WRONG
    assert_close(truth, ours(x)[1], STATE)


def test_001_second_formula_is_the_right_one():
    """alpha S (I - beta k k^T) + beta v k^T, which the text calls equivalent to the first, is the rule."""
    x, _q, k, v, g, beta, S = eight_steps()
    for t in range(8):
        S = np.exp(g[t]) * (np.eye(16) - beta[t] * np.outer(k[t], k[t])) @ S + beta[t] * np.outer(k[t], v[t])
    assert_close(oracle.forward(**x.arguments)[1][0, 0], S, tolerance("final_state", "float64"))


def test_002_place_of_gamma_in_w():
    """diag(gamma) T K with the gated T is wrong; T diag(gamma) K is right, as is diag(gamma) T K, T ungated."""
    x, _q, k, v, _beta, h, gamma, _, gated, ungated = chunk_of()
    _, truth = oracle.forward(**x.arguments)
    U = gated @ v
    as_written = gamma[:, None] * (gated @ k)
    right, also_right = gated @ (gamma[:, None] * k), gamma[:, None] * (ungated @ k)
    assert rms_ratio(truth[0, 0], through(as_written, U, gamma, k, h)) > WRONG
    exact = tolerance("final_state", "float64")
    assert_close(truth[0, 0], through(right, U, gamma, k, h), exact)
    assert_close(right, also_right, exact)

    @jax.jit
    def ours_in_a_chunk(k, v, g, beta):
        decay = gdn_jax.chunk_cumsum(g)
        return gdn_jax.wy(gdn_jax.solve_tril(gdn_jax.kkt(k, decay, beta)), k, v, decay, beta)

    w, u = ours_in_a_chunk(*(y[0, :, 0] for y in (x.k, x.v, x.g, x.beta)))
    assert_close(right, w, STATE)
    assert_close(U, u, STATE)
    assert_close(truth, ours(x)[1], STATE)


def test_002_one_mask_for_two_purposes():
    """The solve needs a mask strictly below the diagonal, the output an inclusive one."""
    x, q, k, v, beta, h, gamma, Gamma, gated, _ = chunk_of()
    truth, _ = oracle.forward(**x.arguments)

    def output(T, mask):
        v_new = T @ v - T @ (gamma[:, None] * k) @ h
        return 16**-0.5 * (gamma[:, None] * (q @ h) + (q @ k.T * Gamma * mask) @ v_new)

    inclusive, strict = np.tril(np.ones((64, 64))), np.tril(np.ones((64, 64)), -1)
    solved_inclusively = np.linalg.inv(np.eye(64) + beta[:, None] * (k @ k.T) * Gamma * inclusive) * beta
    assert rms_ratio(truth[0, :, 0], output(gated, strict)) > WRONG
    assert rms_ratio(truth[0, :, 0], output(solved_inclusively, inclusive)) > WRONG
    assert_close(truth[0, :, 0], output(gated, inclusive), tolerance("o", "float64"))
    assert_close(truth, ours(x)[0], OUTPUT)


def test_004_causal_mask_in_the_output():
    """The output needs the decaying mask Gamma; a plain causal mask M is off by half."""
    x, q, k, v, _, h, gamma, Gamma, gated, _ = chunk_of()
    truth, _ = oracle.forward(**x.arguments)
    v_new = gated @ v - gated @ (gamma[:, None] * k) @ h

    def output(mask):
        return 16**-0.5 * (gamma[:, None] * (q @ h) + (q @ k.T * mask) @ v_new)

    assert rms_ratio(truth[0, :, 0], output(np.tril(np.ones((64, 64))))) > 0.3
    assert_close(truth[0, :, 0], output(Gamma), tolerance("o", "float64"))
    assert_close(truth, ours(x)[0], OUTPUT)


def test_004_delta_rule_needs_no_limit_of_beta():
    """alpha = 1 alone gives DeltaNet with any beta; with beta = 1 as well it is another rule."""
    x, _q, k, v, _, beta, h = eight_steps(g="zero")

    def deltanet(beta):
        S = h
        for t in range(8):
            S = S + np.outer(k[t], beta[t] * (v[t] - k[t] @ S))
        return S

    truth = ours(x)[1][0, 0]
    assert_close(deltanet(beta), truth, STATE)
    assert rms_ratio(truth, deltanet(np.ones(8))) > WRONG


def test_000_alpha_called_g():
    """Its prefill wants linear alpha, default ones. Our g is the logarithm: ones would be growth; convert."""
    x, _q, _k, _v, g, _beta, _h = eight_steps()
    alpha = np.exp(g).astype(np.float32)[None, :, None]
    truth, _ = oracle.forward(**x.arguments)
    assert rms_ratio(truth, ours(x, g=jnp.asarray(alpha))[0]) > WRONG
    converted = ours(x, g=gdn_jax.log_decay_from_alpha(jnp.asarray(alpha)))[0]
    assert_close(truth, converted, 10 * OUTPUT)  # alpha near 1 has lost digits of g: 2^-24 / 0.05 of it
    ones = gdn_jax.log_decay_from_alpha(jnp.ones_like(jnp.asarray(alpha)))
    np.testing.assert_array_equal(ours(x, g=ones)[0], ours(x, g=None)[0])


@pytest.mark.parametrize("heads", [(1, 1, 2), (2, 1, 1), (2, 1, 2)])
def test_000_key_and_value_heads_need_not_be_equal(heads):
    """num_k_heads == num_v_heads holds for grouped queries only; with grouped values Hk = Hq < HV."""
    x = cases.inputs(cases.Case("heads", T=20, heads=heads))
    o, state = ours(x)
    expected, final = oracle.forward(**x.arguments)
    assert_close(expected, o, OUTPUT, axis=2)
    assert_close(final, state, STATE, axis=1)


def test_000_formulas_are_k_first():
    """k @ state on a k-last state contracts the wrong axis (unnoticed when K = V); both layouts are ours by name."""
    x, _q, k, v, g, beta, h = eight_steps()
    last = h.T
    for t in range(8):
        decayed = np.exp(g[t]) * last
        last = decayed + np.outer(beta[t] * (v[t] - k[t] @ decayed), k[t])
    k_last = x._replace(initial_state=x.initial_state.swapaxes(-1, -2))
    _, truth = oracle.forward(**k_last.arguments, state_layout="vk")
    assert rms_ratio(truth[0, 0], last) > WRONG
    assert_close(truth, ours(k_last, state_layout="vk")[1], STATE)
    assert_close(truth.swapaxes(-1, -2), ours(x)[1], STATE)


def test_003_decay_without_its_rate():
    """exp(-softplus(a + dt_bias)) leaves out the learned rate exp(A_log)."""
    a, A_log, dt_bias = np.array([[0.3, -1.0]]), np.log([2.0, 7.0]), np.array([-2.0, 0.5])
    softplus = np.logaddexp(0, a + dt_bias)
    g = gdn_jax.log_decay(*(jnp.asarray(y, jnp.float32) for y in (a, A_log, dt_bias)))
    alpha = gdn_jax.alpha_from_log_decay(g)
    assert_close(np.exp(-np.exp(A_log) * softplus), alpha, OUTPUT)
    assert rms_ratio(alpha, np.exp(-softplus)) > WRONG
