"""Analysis: attention maps, half-lives, retrieval, spectra, gates of a model, Householder geometry."""

import dataclasses
import math

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_layers import drawn
from small_models import made
from tolerances import FLOAT32, assert_close, rms_ratio, tolerance

import gdn_jax
from gdn_jax.checks import cases, oracle
from gdn_jax.inspect import analysis
from gdn_jax.layers import GatedDeltaNet
from gdn_jax.models import AttentionConfig, ModelConfig

MAPPED = [
    "slow-decay",
    "strong-decay",
    "mixed-decay",
    "reset-at-some-tokens",
    "beta-up-to-2",
    "repeated-keys",
    "one-token",
    "seven-tokens-no-beta",
    "chunk-less-one-no-g-K60-V100",
    "one-chunk-one-key-head",
    "values-grouped-over-two-chunk-32",
    "queries-fewer-than-keys-chunk-16",
    "groupings-that-do-not-nest",
    "no-gates-no-initial-state",
    "scale-0",
]


compiled_map = jax.jit(analysis.effective_attention)


def array(x):
    return jax.device_put(x)


@pytest.mark.parametrize("g, beta", [(0.0, 0.5), (-0.02, 0.5), (-0.02, 0.0), (0.0, 1.9)])
def test_memory_horizon(g, beta):
    """A key is stored, others of random directions follow: the rule keeps half of it for so many tokens."""
    K, heads = 16, 4096
    rng = np.random.default_rng(0)
    stored = rng.standard_normal((1, heads, K))
    stored /= np.linalg.norm(stored, axis=-1, keepdims=True)
    horizon = float(jax.jit(lambda: analysis.memory_horizon(K, g, beta))())
    T = round(horizon)
    keys = rng.standard_normal((1, T, heads, K))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    gates = (np.full((1, T, heads), x) for x in (g, beta))
    q, v = np.broadcast_to(stored[:, None], keys.shape), np.zeros((1, T, heads, 1))
    o, _ = oracle.forward(q, keys, v, *gates, initial_state=stored[..., None], scale=1.0)
    assert abs(o[0, -1].mean() - 0.5 ** (T / horizon)) < 4 * o[0, -1].std() / heads**0.5 + 1e-6
    assert abs(o[0, T // 2].mean() - 0.5) > 0.1


def test_memory_horizon_by_hand():
    calls = [dict(width=16), dict(width=16, beta=0.06), dict(width=8, g=-np.log(2)), dict(width=1, beta=1.0)]
    default, written, decayed, alone = jax.jit(lambda: [analysis.memory_horizon(**call) for call in calls])()
    assert np.isinf(default)
    np.testing.assert_allclose(written, 16 * np.log(2) / 0.06, rtol=2e-3)
    np.testing.assert_allclose(decayed, 1, rtol=1e-6)
    assert float(alone) == 0  # the only direction is overwritten


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MAPPED)
def test_effective_attention_times_v_is_the_output(name, dtype):
    case = dataclasses.replace(cases.CASES[name], initial_state=False)
    case = dataclasses.replace(case, chunk_size=case.T)  # for the bound: one system of T tokens is solved
    x = cases.inputs(case, dtype)
    expected, _ = oracle.forward(**x.arguments, scale=case.scale)
    with jax.enable_x64(dtype == "float64"):
        gates = [None if y is None else array(y) for y in (x.g, x.beta)]
        M = np.asarray(compiled_map(array(x.q), array(x.k), *gates, scale=case.scale))
    heads = M.shape[1]
    v = np.repeat(x.v, case.HO // x.v.shape[2], axis=2).astype(np.float64)
    M = np.repeat(M, case.HO // heads, axis=1)
    o = np.einsum("bhij,bjhv->bihv", M.astype(np.float64), v)
    assert M.dtype == dtype
    assert not np.triu(M, 1).any(), "a token reads the future"
    assert_close(expected, o, tolerance("o", dtype, case), name, axis=2)


def test_effective_attention_of_orthonormal_keys_is_linear_attention():
    """Nothing is stored under another's key, so nothing is taken out: the corrections vanish."""
    k = np.eye(8, dtype=np.float32)[None, :, None]
    q = np.random.default_rng(0).standard_normal((1, 8, 1, 8)).astype(np.float32)
    g = np.full((1, 8, 1), -0.1, np.float32)
    M = np.asarray(compiled_map(q, k, g, scale=1.0))[0, 0]
    age = np.arange(8)[:, None] - np.arange(8)
    assert_close(np.tril(q[0, :, 0] * np.exp(-0.1 * age)), M, FLOAT32["o"])


def test_effective_attention_names_the_argument(no_type_checks):
    q = np.zeros((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match="g: expected shape"):
        analysis.effective_attention(q, q, np.zeros((1, 5, 2), np.float32), np.zeros((1, 4, 2), np.float32))


def test_half_life_is_where_the_decay_product_is_one_half():
    g = np.array([-math.log(2), -math.log(2) / 10, -1e-6, 0.0, -np.inf, np.nan], np.float32)
    n = np.asarray(jax.jit(analysis.half_life)(g))
    np.testing.assert_allclose(n[:2], [1, 10], rtol=1e-6)
    np.testing.assert_allclose(np.exp(np.asarray(g)[:3].astype(np.float64) * n[:3]), 0.5, rtol=1e-6)
    assert n[3] == np.inf and n[4] == 0
    assert np.isnan(n[5])


def test_write_half_life_follows_the_gates_that_come():
    rng = np.random.default_rng(0)
    g = -rng.exponential(0.2, (2, 40, 3)).astype(np.float32)
    g[0, 17, 1] = -np.inf
    g[0, :, 2] = 0
    g[1, 20:, 2] = 0
    got = np.asarray(jax.jit(analysis.write_half_life)(g))
    for b, t, h in np.ndindex(g.shape):
        left, n = 1.0, 0
        while left > 0.5 and t + n + 1 < g.shape[1]:
            n += 1
            left *= math.exp(float(g[b, t + n, h]))
        assert got[b, t, h] == (n if left <= 0.5 else np.inf), (b, t, h)
    half = np.full((1, 2, 1), -np.log(2, dtype=np.float32))
    power, lives = jax.device_get(jax.jit(lambda g: (jnp.exp(g), analysis.write_half_life(g)))(half))
    assert power[0, 0, 0] == 0.5
    assert lives[0, 0, 0] == 1


def test_layer_half_lives():
    g = np.zeros((2, 50, 3), np.float32)
    g[..., 0] = -np.linspace(0.01, 1, 100).reshape(2, 50)
    g[:, ::2, 1] = -np.inf
    mean_rate, p10, median, p90 = jax.device_get(jax.jit(analysis.layer_half_lives)(g))
    ln2 = math.log(2)
    np.testing.assert_allclose(mean_rate, [ln2 / 0.505, 0, np.inf], rtol=1e-5)
    np.testing.assert_allclose([p10[0], median[0], p90[0]], [ln2 / 0.90, ln2 / 0.505, ln2 / 0.11], rtol=0.02)
    assert p10[1] == 0 and p90[1] == np.inf and (p10[2], median[2], p90[2]) == (np.inf,) * 3


def test_retrieval_of_orthonormal_keys_is_exact_up_to_load_one():
    rng = np.random.default_rng(0)
    k = np.linalg.qr(rng.standard_normal((16, 16)))[0].astype(np.float32)[None, :, None]
    v = rng.standard_normal((1, 16, 1, 4)).astype(np.float32)
    errors = np.asarray(jax.jit(analysis.retrieval_by_load)(k, v))[0, 0]
    stored = np.tril(np.ones((16, 16), bool))
    assert np.isnan(errors[~stored]).all() and errors[stored].max() < 1e-5


def test_retrieval_by_load_reads_the_states_of_the_oracle():
    """GVA, decay, write strengths: after every token, every stored pair is read from the oracle's state."""
    case = cases.Case("retrieval", T=12, B=2, heads=(2, 2, 4), K=8, V=6, initial_state=False)
    x = cases.inputs(case)
    got = np.asarray(jax.jit(analysis.retrieval_by_load)(x.k, x.v, x.g, x.beta))
    retrieval_error = jax.jit(analysis.retrieval_error)
    assert got.shape == (2, 4, 12, 12)
    for t in range(case.T):
        part = {name: y[:, : t + 1] for name, y in x.arguments.items()}
        _, h = oracle.forward(**part)
        k = np.repeat(part["k"], 2, axis=2).transpose(0, 2, 1, 3)
        v = part["v"].transpose(0, 2, 1, 3)
        expected = np.linalg.norm(k @ h - v, axis=-1) / np.linalg.norm(v, axis=-1)
        assert_close(expected, got[:, :, t, : t + 1], FLOAT32["o"], f"token {t}")
        # Of one shape, so one program: pairs of zeros for the tokens to come, and their errors are left out.
        later = [(0, 0)] * 2 + [(0, case.T - 1 - t), (0, 0)]
        pairs = (np.pad(y, later).astype(np.float32) for y in (k, v))
        one = np.asarray(retrieval_error(h.astype(np.float32), *pairs))[..., : t + 1]
        assert_close(expected, one, FLOAT32["o"])


def test_the_delta_rule_remembers_the_last_pair_and_linear_attention_does_not():
    rng = np.random.default_rng(0)
    k = rng.standard_normal((1, 24, 1, 8)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((1, 24, 1, 8)).astype(np.float32)
    errors = np.asarray(jax.jit(analysis.retrieval_by_load)(k, v))[0, 0]
    assert np.diagonal(errors).max() < 1e-5  # beta = 1 writes exactly, at any load
    assert np.mean(errors[-1]) > 0.3  # and pays with the older pairs: 24 do not fit into 8 dimensions


def test_spectrum_and_effective_rank():
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((n, n)))[0] for n in (6, 9))
    sigma = np.array([4, 2, 1, 0.5, 0, 0])
    h = (left * sigma) @ right[:6]
    values = np.asarray(jax.jit(analysis.state_spectrum)(h.astype(np.float32)[None]))
    assert values.shape == (1, 6)
    np.testing.assert_allclose(values[0], sigma, atol=1e-5)
    p = sigma[:4] / sigma.sum()
    effective_rank = jax.jit(analysis.effective_rank)
    np.testing.assert_allclose(effective_rank(values), [math.exp(-(p * np.log(p)).sum())], rtol=1e-4)
    ranks = effective_rank(np.array([[1.0, 0, 0], [2, 2, 2], [0, 0, 0]], np.float32))
    np.testing.assert_allclose(ranks, [1, 3, 0], rtol=1e-6)


LAYERS = {
    "plain": dict(num_heads=2, head_dim=8, expand_v=2.0),
    "grouped, bias, negative eigenvalues": dict(
        num_heads=2, num_v_heads=4, head_dim=8, expand_v=1.0, conv_bias=True, allow_neg_eigval=True
    ),
    "no convolution": dict(num_heads=2, head_dim=8, use_short_conv=False, use_gate=False),
}


@pytest.mark.parametrize("name", harness.tiers(LAYERS, ("plain", "no convolution")))
def test_rule_inputs_are_what_the_layer_feeds_the_rule(name):
    layer = drawn(lambda rngs: GatedDeltaNet(32, **LAYERS[name], rngs=rngs))
    x = np.random.default_rng(1).standard_normal((2, 21, 32)).astype(np.float32)
    if layer.conv_bias is not None:
        layer.conv_bias[...] = array(np.linspace(-1, 1, layer.conv_dim, dtype=np.float32))

    @jax.jit
    def rebuilt(layer, x):
        inputs = analysis.rule_inputs(layer, x)
        o = layer.o_norm(gdn_jax.gated_delta_rule(*inputs)[0]).reshape(2, 21, -1)
        o = o if layer.g_proj is None else o * jax.nn.silu(layer.g_proj(x))
        return inputs, layer.o_proj(o), layer(x)[0]

    inputs, y, expected = jax.device_get(rebuilt(layer, x))
    assert_close(expected, y, FLOAT32["o"])
    assert_close(np.ones((2, 21, 2)), np.linalg.norm(inputs.k, axis=-1), 1e-4)
    assert bool((inputs.g <= 0).all()) and inputs.beta.max() > (1 if layer.allow_neg_eigval else 0)


def test_rule_inputs_refuses_another_layer():
    x = array(np.zeros((1, 2, 4), np.float32))
    with pytest.raises(ValueError, match="layer: expected a recurrent layer, got Linear"):
        analysis.rule_inputs(drawn(lambda rngs: nnx.Linear(4, 4, rngs=rngs)), x)
    layer = drawn(lambda rngs: GatedDeltaNet(8, num_heads=1, head_dim=4, rngs=rngs))
    with pytest.raises(ValueError, match="x: expected shape"):
        analysis.rule_inputs(layer, x)


MODELS = {
    "pure": {},
    "hybrid, grouped values": dict(
        num_layers=3,
        num_heads=1,
        num_v_heads=2,
        layer_types=("gated_delta_net", "attention", "gated_delta_net"),
        attention=AttentionConfig(num_heads=2, head_dim=8, rotary_dim=4),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("pure", marks=pytest.mark.crossed), "hybrid, grouped values"])
def test_gates_of_a_model_are_collected_and_changed(name):
    """Unchanged gates give the model's own logits; resets make what came before them invisible to the rule."""
    sizes = dict(vocab_size=20, hidden_size=24, num_layers=2, head_dim=8, allow_neg_eigval=True)
    model = made(ModelConfig(**{**sizes, **MODELS[name]}))
    tokens = np.random.default_rng(0).integers(0, 20, (2, 30))
    seen = []

    def collect(layer, g, beta):
        seen.append((layer, g, beta))
        return g, beta

    def reset(layer, g, beta):
        return g.at[:, 14:21].set(-jnp.inf), beta  # more than the three tokens that a convolution looks back

    @jax.jit
    def outputs(model, tokens):
        seen.clear()
        unchanged = analysis.logits_with_gates(model, tokens, collect)
        cut = analysis.logits_with_gates(model, tokens, reset)
        return model(tokens)[0], unchanged, cut, analysis.model_rule_inputs(model, tokens), list(seen)

    expected, unchanged, cut, inputs, changed = jax.device_get(outputs(model, tokens))
    assert_close(expected, unchanged, 10 * FLOAT32["o"])  # two layers, each with a solve and three norms
    kinds = ["gated_delta_net" if x is not None else "attention" for x in inputs]
    assert kinds == [*model.config.types]
    ruled = [i for i, x in enumerate(inputs) if x is not None]
    assert [int(layer) for layer, _, _ in changed] == ruled
    for i, (_, g, beta) in zip(ruled, changed, strict=True):
        assert g.shape[-1] == model.blocks[i].mixer.num_v_heads
        assert_close(inputs[i].g, g, 10 * FLOAT32["o"])
        assert_close(inputs[i].beta, beta, 10 * FLOAT32["o"])
    # Another past, out of sight of any convolution from the first reset on, but not of attention.
    other, _, other_cut, *_ = jax.device_get(outputs(model, np.where(np.arange(30) < 10, 0, tokens)))
    assert rms_ratio(expected[:, 20:], other[:, 20:]) > 1e-3
    if "attention" in kinds:
        assert rms_ratio(cut[:, 20:], other_cut[:, 20:]) > 1e-3
    else:
        assert_close(cut[:, 20:], other_cut[:, 20:], 10 * FLOAT32["o"])


def test_gates_of_a_model_without_a_rule():
    """A model of attention alone has no gates to look at or to change."""
    attention = AttentionConfig(num_heads=1, head_dim=8)
    config = ModelConfig(
        vocab_size=8, hidden_size=8, num_layers=1, layer_types=("attention",), attention=attention
    )
    model, tokens = made(config), array(np.zeros((1, 3), int))
    message = "model: expected a recurrent layer, got Attention alone"
    with pytest.raises(ValueError, match=message):
        analysis.model_rule_inputs(model, tokens)
    with pytest.raises(ValueError, match=message):
        analysis.logits_with_gates(model, tokens, lambda layer, g, beta: (g, beta))


def test_mean_by_kind():
    rng = np.random.default_rng(0)
    x, kind = rng.standard_normal((3, 10, 2)).astype(np.float32), rng.integers(-1, 3, (3, 10))
    assert {*kind.flat} == {-1, 0, 1, 2}  # -1 belongs to no kind
    got = np.asarray(jax.jit(lambda x, kind: analysis.mean_by_kind(x, kind, 4))(x, kind))
    for i in range(3):
        np.testing.assert_allclose(got[i], x[kind == i].mean(0), rtol=1e-5, atol=1e-6)
    assert np.isnan(got[3]).all()


def test_householder():
    k = np.random.default_rng(0).standard_normal((5, 7))
    k = (k / np.linalg.norm(k, axis=1, keepdims=True)).astype(np.float32)
    k[4] *= 1.5
    beta = np.array([0, 1, 2, 0.3, 1.7], np.float32)
    x = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)

    @jax.jit
    def run(k, beta, x):
        H, eigenvalues = analysis.householder(k, beta), analysis.householder_eigenvalues(k, beta)
        return H, eigenvalues, analysis.apply_householder(k, beta, x)

    H, eigenvalues, applied = jax.device_get(run(k, beta, x))
    np.testing.assert_array_equal(H[0], np.eye(7))
    np.testing.assert_allclose(H[1] @ H[1], H[1], atol=1e-6)  # projection
    np.testing.assert_allclose(H[1] @ k[1], 0, atol=1e-6)
    np.testing.assert_allclose(H[2] @ H[2], np.eye(7), atol=1e-6)  # reflection
    np.testing.assert_allclose(H[2] @ k[2], -k[2], atol=1e-6)
    np.testing.assert_allclose(np.sort(eigenvalues), np.linalg.eigvalsh(H.astype(np.float64)), atol=1e-5)
    np.testing.assert_allclose(np.einsum("nij,nj->ni", H, k), eigenvalues[:, :1] * k, atol=1e-5)
    np.testing.assert_allclose(applied, np.einsum("nij,nj->ni", H, x), atol=1e-5)


def test_the_rule_without_values_is_the_product_of_decayed_householder_transitions():
    case = cases.Case("transitions", T=9, B=1, heads=(1, 1, 1), K=6, V=6, beta="twice")
    x = cases.inputs(case)
    state = np.eye(6, dtype=np.float32)[None, None]

    @jax.jit
    def run(q, k, v, g, beta, state):
        _, final = gdn_jax.gated_delta_rule(q, k, v, g, beta, initial_state=state)
        return final, analysis.householder(k[0, :, 0], beta[0, :, 0])

    got, H = jax.device_get(run(x.q, x.k, np.zeros_like(x.v), x.g, x.beta, state))
    expected = np.exp(x.g.sum()) * np.linalg.multi_dot(H[::-1].astype(np.float64))
    assert_close(expected, got[0, 0], FLOAT32["final_state"])
