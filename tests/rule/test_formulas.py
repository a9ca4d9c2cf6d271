"""Errors of the source documents: the formula as written misses the oracle, the package meets it; tests state both.

Numbers in the names of tests are those of the documents: 000 FlashInfer's trace, 001 and 004 blog posts, 002 notes on
vLLM, 003 Modular's documentation. Those of the family have the name of a rule; docs/formulas.md says where each was
found.
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
EXACT = tolerance("final_state", "float64")
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


class Family:
    """One head with a decay of each channel, in float64: tokens, strengths, a state, and the truth about them."""

    def __init__(self, T: int = 8, steps: int = 1, g=None, beta=(0.3, 0.9)):
        rng, (K, V) = np.random.default_rng(T * steps), (6, 5)
        self.q, self.k = rng.standard_normal((T, K)), rng.standard_normal((T, steps, K))
        self.k /= np.linalg.norm(self.k, axis=-1, keepdims=True)
        self.v, self.beta = rng.standard_normal((T, steps, V)), rng.uniform(*beta, (T, steps))
        self.g = -rng.exponential(0.3, (T, K)) if g is None else np.full((T, K), g)
        self.S, self.alpha = rng.standard_normal((K, V)), np.exp(self.g)
        self.householder = (
            np.eye(K) - self.beta[..., None, None] * self.k[..., :, None] * self.k[..., None, :]
        )
        if steps == 1:
            self.k, self.v, self.beta = self.k[:, 0], self.v[:, 0], self.beta[:, 0]

    def truth(self, **strengths) -> np.ndarray:
        """The final state of the oracle, which `delta_rule` meets in both forms."""
        tokens = dict(q=self.q, k=self.k, v=self.v, g=self.g) | (strengths or {"beta": self.beta})
        x = {name: y[None, :, None] for name, y in tokens.items()} | dict(initial_state=self.S[None, None])
        _, truth = oracle.forward(**x)
        x = {name: jnp.asarray(y, jnp.float32) for name, y in x.items()}
        for form in ("recurrent", "chunked"):
            assert_close(truth, gdn_jax.delta_rule(**x, implementation=form)[1], STATE)
        return truth[0, 0]


def test_kda_order_of_the_product():
    """(I - beta_1 k_1 k_1^T) Diag(alpha_1) ... from left to right is wrong. Right: the last factor is leftmost."""
    x = Family()
    x.v[:] = 0  # what is left of the first state
    factors = x.householder[:, 0] * x.alpha[:, None]
    truth = x.truth()
    assert rms_ratio(truth, np.linalg.multi_dot(factors) @ x.S) > WRONG
    assert_close(truth, np.linalg.multi_dot(factors[::-1]) @ x.S, EXACT)


def test_kda_decay_since_a_write():
    """gamma^(i to r) = alpha_i ... alpha_r decays a write by its own token's gate. Right: alpha_{i+1} ... alpha_r."""
    x = Family()
    T, (k, v, beta) = len(x.k), (x.k, x.v, x.beta)

    def final(first: int) -> np.ndarray:
        """The report's representation with decays that begin so many tokens behind a write."""

        def since(i, r):
            return x.alpha[i + first : r + 1].prod(0)

        w, u = [], []
        for r in range(T):
            seen = [k[i] * since(i, r) @ k[r] for i in range(r)]
            start = x.alpha[: r + 1].prod(0) * k[r]
            w.append(beta[r] * (start - sum((s * y for s, y in zip(seen, w, strict=True)), np.zeros(6))))
            u.append(beta[r] * (v[r] - sum((s * y for s, y in zip(seen, u, strict=True)), np.zeros(5))))
        writes = [since(i, T - 1) * k[i] for i in range(T)]
        P = np.diag(x.alpha.prod(0)) - np.stack(writes, 1) @ np.stack(w)
        return P @ x.S + np.stack(writes, 1) @ np.stack(u)

    truth = x.truth()
    assert rms_ratio(truth, final(0)) > WRONG
    assert_close(truth, final(1), EXACT)


def test_kda_quotient_of_decays():
    """(Gamma * K) (K / Gamma)^T is right in exact arithmetic, and no number in float32 at the released bound."""
    x = Family(64, g=-5.0)
    k, G = x.k.astype(np.float32), np.cumsum(x.g.astype(np.float32), 0)
    with np.errstate(all="ignore"):
        as_written = np.tril((np.exp(G) * k) @ (k / np.exp(G)).T, -1)
    assert not np.isfinite(as_written).all()
    assert np.isfinite(x.truth()).all()


def test_kda_error_read_by_the_query():
    """S + beta (v - S q) k^T subtracts what the query finds. Right: what the key finds."""
    x = Family(g=0.0)

    def final(reads) -> np.ndarray:
        S = x.S
        for t in range(len(x.k)):
            S = S + np.outer(x.k[t], x.beta[t] * (x.v[t] - reads[t] @ S))
        return S

    truth = x.truth()
    assert rms_ratio(truth, final(x.q / np.linalg.norm(x.q, axis=1, keepdims=True))) > WRONG
    assert_close(truth, final(x.k), EXACT)


def test_kda_error_against_the_new_state():
    """S_t = alpha S_{t-1} + beta (v - S_t k) k^T, solved for S_t, writes 1 + beta times less."""
    x = Family()
    S, implicit = x.S, x.S
    for t in range(len(x.k)):
        S, implicit = (x.alpha[t][:, None] * y for y in (S, implicit))
        strength = x.beta[t] / (1 + x.beta[t])
        S = S + np.outer(x.k[t], x.beta[t] * (x.v[t] - x.k[t] @ S))
        before = implicit
        implicit = implicit + np.outer(x.k[t], strength * (x.v[t] - x.k[t] @ implicit))
        assert_close(before + np.outer(x.k[t], x.beta[t] * (x.v[t] - x.k[t] @ implicit)), implicit, EXACT)
    truth = x.truth()
    assert rms_ratio(truth, implicit) > WRONG
    assert_close(truth, S, EXACT)


def test_kda_gate_by_a_sigmoid():
    """alpha = sigmoid(W_up SiLU(W_down x)) has an activation too many, and neither rate nor bias."""
    rng = np.random.default_rng(0)
    x, down, up = (rng.standard_normal(shape) for shape in ((20, 8), (8, 4), (4, 6)))
    A_log, bias = np.array([0.7]), rng.standard_normal((1, 6))
    hidden = x @ down
    as_written = 1 / (1 + np.exp(-(hidden / (1 + np.exp(-hidden))) @ up))
    right = np.exp(-np.exp(A_log) * np.logaddexp(0, hidden @ up + bias))
    assert rms_ratio(right, as_written) > WRONG
    f, *parameters = (jnp.asarray(y, jnp.float32) for y in ((hidden @ up)[:, None], A_log, bias))
    assert_close(right[:, None], jnp.exp(gdn_jax.channel_log_decay(f, *parameters)), STATE)


def test_kda_bound_is_no_clamp():
    """max(lower bound, -exp(A_log) softplus(f)) is another gate. Right: lower bound times a sigmoid."""
    f, A_log, bias = np.linspace(-6, 6, 25).reshape(-1, 1, 1), np.array([0.7]), np.zeros((1, 1))
    as_written = np.maximum(-5, -np.exp(A_log) * np.logaddexp(0, f))
    right = -5 / (1 + np.exp(-np.exp(A_log) * f))
    assert rms_ratio(right, as_written) > WRONG
    assert_close(
        right, gdn_jax.channel_log_decay(*map(jnp.asarray, (f, A_log, bias)), lower_bound=-5.0), STATE
    )


def test_gdn2_one_strength():
    """With one beta for both, the rule is KDA. Right: a strength of what is erased, and one of what is written."""
    x = Family()
    rng = np.random.default_rng(1)
    erase, write = rng.random(x.k.shape), rng.random(x.v.shape)
    one, right = x.S, x.S
    for t in range(len(x.k)):
        one, right = (x.alpha[t][:, None] * y for y in (one, right))
        one = one + np.outer(erase[t].mean() * x.k[t], x.v[t] - x.k[t] @ one)
        right = right + np.outer(x.k[t], write[t] * x.v[t] - (erase[t] * x.k[t]) @ right)
    truth = x.truth(erase=erase, write=write)
    assert rms_ratio(truth, one) > WRONG
    assert_close(truth, right, EXACT)


def product(x: Family) -> np.ndarray:
    """The final state of `gated_delta_product`, which several steps of the rule for each token meet."""
    S = x.S
    for t, j in np.ndindex(x.beta.shape):
        S = x.householder[t, j] @ S + x.beta[t, j] * np.outer(x.k[t, j], x.v[t, j])
    arrays = (jnp.asarray(y[None, ..., None, :], jnp.float32) for y in (x.q, x.k, x.v))
    beta, h_0 = jnp.asarray(x.beta[None, ..., None], jnp.float32), jnp.asarray(x.S[None, None], jnp.float32)
    _, ours = gdn_jax.gated_delta_product(*arrays, None, beta, initial_state=h_0, implementation="recurrent")
    assert_close(S[None, None], ours, STATE)
    return S


def test_deltaproduct_order_of_the_steps():
    """A = (I - beta_1 k_1 k_1^T) ... from left to right is wrong. Right: the last step is leftmost."""
    x = Family(1, steps=3, g=0.0, beta=(1, 2))
    x.v[:] = 0
    truth = product(x)
    assert rms_ratio(truth, np.linalg.multi_dot(x.householder[0]) @ x.S) > WRONG
    assert_close(truth, np.linalg.multi_dot(x.householder[0, ::-1]) @ x.S, EXACT)


def test_deltaproduct_one_write():
    """S = H_n ... H_1 S + beta k v^T writes once. Right: every step writes, and the later ones reflect that, too."""
    x = Family(1, steps=3, g=0.0, beta=(1, 2))
    H, writes = x.householder[0], x.beta[0][:, None, None] * x.k[0][:, :, None] * x.v[0][:, None, :]
    kept = H[2] @ H[1] @ H[0] @ x.S
    truth = product(x)
    assert rms_ratio(truth, kept + writes[2]) > WRONG
    assert_close(truth, kept + H[2] @ H[1] @ writes[0] + H[2] @ writes[1] + writes[2], EXACT)


def test_deltanet_has_no_scalar_decay():
    """S = alpha S + beta k v^T is linear attention with a gate, and DeltaNet with no alpha."""
    x = Family(g=0.0)
    for_any_alpha, truth = [], x.truth()
    for alpha in np.linspace(0, 1, 21):
        S = x.S
        for t in range(len(x.k)):
            S = alpha * S + x.beta[t] * np.outer(x.k[t], x.v[t])
        for_any_alpha.append(rms_ratio(truth, S))
    assert min(for_any_alpha) > WRONG
    S = x.S
    for t in range(len(x.k)):
        S = x.householder[t, 0] @ S + x.beta[t] * np.outer(x.k[t], x.v[t])
    assert_close(truth, S, EXACT)
