"""The rules that are compared: each against a float64 recurrence in NumPy; one layer, equal parameters and states."""

import dataclasses
import functools
import warnings

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_layers import drawn, empty_cache
from tolerances import assert_close, tolerance

from gdn_jax import rules
from gdn_jax.layers import GatedDeltaNet
from gdn_jax.models import ModelConfig
from gdn_jax.parallel import sharding
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.parts import attention as parts_attention
from gdn_jax.parts.attention import same_segment

RECURRENT = ("linear_attention", "mamba2", "delta", "gated_delta")
F32 = tolerance("o", "float32")


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def recurrence(q, k, v, g, beta, S, *, corrects, starts=None):
    """o [B, T, H, V] and the last state, token by token in float64; starts: where a row forgets everything before."""
    q, k, v, g, beta, S = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, S))
    HO = g.shape[2]
    q, k, v = (np.repeat(x, HO // x.shape[2], axis=2) for x in (q, k, v))
    o = np.zeros((*g.shape, v.shape[3]))
    for t in range(g.shape[1]):
        S = np.exp(g[:, t])[..., None, None] * S
        if starts is not None:
            S = np.where(starts[:, t, None, None, None], 0, S)
        read = np.einsum("bhk,bhkv->bhv", k[:, t], S) if corrects else 0
        S = S + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - read))
        o[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], S) / np.sqrt(q.shape[-1])
    return o, S


def attention(q, k, v, ids):
    """Softmax attention of every token in float64, one row of the matrix at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    HO = max(q.shape[2], v.shape[2])
    q, k, v = (np.repeat(x, HO // x.shape[2], axis=2) for x in (q, k, v))
    o = np.zeros((*q.shape[:3], v.shape[3]))
    for b in range(q.shape[0]):
        first = 0
        for t in range(q.shape[1]):
            first = t if t > 0 and ids[b, t] != ids[b, t - 1] else first
            scores = np.einsum("hk,jhk->hj", q[b, t], k[b, first : t + 1]) / np.sqrt(q.shape[3])
            p = np.exp(scores - scores.max(1, keepdims=True))
            o[b, t] = np.einsum("hj,jhv->hv", p / p.sum(1, keepdims=True), v[b, first : t + 1])
    return o


def inputs(T, *, B=2, heads=(1, 2), K=8, V=6, seed=0):
    """q, k, v, g, beta and a state; float32 arrays of NumPy."""
    rng = np.random.default_rng(seed)
    H, HV = heads
    q, k, v = (rng.normal(size=(B, T, h, d)) for h, d in ((H, K), (H, K), (HV, V)))
    g = -np.exp(rng.normal(-2, 2, size=(B, T, HV)))  # half-lives from a token to hundreds
    beta = rng.uniform(0, 1, (B, T, HV))
    state = rng.normal(size=(B, HV, K, V))
    return [x.astype(np.float32) for x in (q, k, v, g, beta, state)]


@pytest.mark.parametrize("T, chunk_size", [(1, 64), (5, 64), (64, 64), (70, 64), (70, 16)])
def test_gated_linear_attention(T, chunk_size):
    q, k, v, g, _, state = inputs(T)
    g[:, T // 2, 1] = -np.inf
    got = jax.jit(
        lambda q, k, v, g, S: rules.gated_linear_attention(q, k, v, g, initial_state=S, chunk_size=chunk_size)
    )(q, k, v, g, state)
    want = recurrence(q, k, v, g, np.ones_like(g), state, corrects=False)
    for name, axis, x, y in zip(("o", "state"), (2, 1), want, got, strict=True):
        assert_close(x, np.asarray(y), F32, name, axis)


def test_gated_linear_attention_defaults():
    """No decay, no state, a scale; q and k heads shared by pairs of value heads."""
    q, k, v, g, _, state = inputs(9, heads=(2, 4))

    @jax.jit
    def run(q, k, v):
        narrow = (x.astype(jnp.bfloat16) for x in (q, k, v))
        return rules.gated_linear_attention(q, k, v, scale=3.0), rules.gated_linear_attention(*narrow)

    (o, S), half = run(q, k, v)
    want = recurrence(q, k, v, 0 * g, np.ones_like(g), 0 * state, corrects=False)
    assert_close(want[0] * 3 * np.sqrt(8), np.asarray(o), F32, "o", 2)
    assert_close(want[1], np.asarray(S), F32, "state", 1)
    assert half[0].dtype == jnp.bfloat16 and half[1].dtype == jnp.float32


def test_gradients_of_gated_linear_attention():
    """In float64 against the derivative of a plain scan over tokens."""
    with jax.enable_x64(True):
        q, k, v, g, _, S = (a.astype(np.float64) for a in inputs(21, B=1, heads=(2, 2)))
        do, dS = (np.random.default_rng(i).standard_normal(a.shape) for i, a in enumerate((v, S)))

        def token(S, x):
            q, k, v, g = x
            S = jnp.exp(g)[..., None, None] * S + k[..., :, None] * v[..., None, :]
            return S, jnp.einsum("bhk,bhkv->bhv", q, S) / q.shape[-1] ** 0.5

        def plain(q, k, v, g, S):
            S, o = jax.lax.scan(token, S, [jnp.moveaxis(a, 1, 0) for a in (q, k, v, g)])
            return jnp.moveaxis(o, 0, 1), S

        def chunked(q, k, v, g, S):
            return rules.gated_linear_attention(q, k, v, g, initial_state=S, chunk_size=16)

        want, got = (
            jax.jit(lambda *x, f=f: jax.vjp(f, *x)[1]((do, dS)))(q, k, v, g, S) for f in (plain, chunked)
        )
        for name, a, b in zip(("dq", "dk", "dv", "dg", "dh_0"), want, got, strict=True):
            assert_close(np.asarray(a), np.asarray(b), tolerance(name, "float64"), name)


@pytest.mark.parametrize("rule", rules.RULES)
def test_rule_against_float64(rule):
    """q and k of any length, value heads that share keys, segments."""
    q, k, v, g, beta, state = inputs(11)
    ids = np.repeat([[4, 7, 4], [1, 1, 2]], [3, 5, 3], axis=1)
    starts = np.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    cached = rule != "softmax_attention"

    def run(q, k, v, g, beta, state, ids):
        first = {"initial_state": state} if cached else {}
        packed = rules.apply(rule, q, k, v, g, beta, segment_ids=ids, implementation=None, **first)
        return packed, None if cached else rules.apply(rule, q, k, v, g, beta)[0]

    (o, last), plain = jax.jit(run)(q, k, v, g, beta, state, ids)
    if not cached:
        assert last is None
        assert_close(attention(q, k, v, ids), np.asarray(o), F32, "o", 2)
        assert_close(attention(q, k, v, 0 * ids), np.asarray(plain), F32, "o", 2)
        return
    decays, corrects = rule in ("mamba2", "gated_delta"), rule in ("delta", "gated_delta")
    want = recurrence(
        unit(q), unit(k), v, g if decays else 0 * g, beta, state, corrects=corrects, starts=starts
    )
    assert_close(want[0], np.asarray(o), F32, "o", 2)
    assert_close(want[1], np.asarray(last), F32, "state", 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("K, V", [(16, 16), (96, 192), (12, 12)])
def test_softmax_attention_by_cudnn(dtype, segments, K, V):
    """Output and gradients beside plain XLA in float32, of the same rounded inputs; widths of 12 stay with XLA."""
    q, k, v = (jnp.asarray(x, dtype) for x in inputs(130, heads=(2, 4), K=K, V=V)[:3])
    ids = jnp.asarray(np.repeat([[4, 7, 4], [1, 1, 2]], [30, 60, 40], axis=1)) if segments else None
    shapes = (jnp.zeros((2, 130, 4, max(K, V)), dtype),) * 2
    assert parts_attention.takes(*shapes, same_segment(ids)) == (K != 12)
    weights = np.random.default_rng(1).normal(size=(2, 130, 4, V)).astype(np.float32)

    def run(q, k, v):
        def loss(*x):
            o = rules.softmax_attention(*x, ids)
            return jnp.sum(weights * o.astype(jnp.float32)), o

        gradients, o = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return o, *gradients

    got = jax.jit(run)(q, k, v)
    want = jax.jit(run)(*(x.astype(jnp.float32) for x in (q, k, v)))
    for name, x, y in zip(("o", "dq", "dk", "dv"), want, got, strict=True):
        assert y.dtype == dtype
        assert_close(np.asarray(x), np.asarray(y, np.float32), tolerance(name, dtype), name, 2)


@pytest.mark.parametrize("rule", [rule for rule in rules.RULES if rule != "softmax_attention"])
def test_value_heads_shared_by_query_heads(rule):
    """Output heads 0 and 1 write value head 0, heads 2 and 3 value head 1; each with gates of its own."""
    q, k, v, g, beta, state = inputs(7, heads=(4, 4))
    v = v[:, :, :2]
    o, last = jax.jit(lambda *x: rules.apply(rule, *x[:5], initial_state=x[5], implementation="recurrent"))(
        q, k, v, g, beta, state
    )
    decays, corrects = rule in ("mamba2", "gated_delta"), rule in ("delta", "gated_delta")
    want = recurrence(unit(q), unit(k), v, g if decays else 0 * g, beta, state, corrects=corrects)
    assert_close(want[0], np.asarray(o), F32, "o", 2)
    assert_close(want[1], np.asarray(last), F32, "state", 1)


def test_rules_differ():
    """Each switch matters on these inputs: a rule that ignored its own could not pass by chance."""

    @jax.jit
    def every_rule(*arrays):
        return [rules.apply(rule, *arrays, implementation="recurrent")[0] for rule in rules.RULES]

    outputs = [np.asarray(o) for o in every_rule(*inputs(11)[:5])]
    for i, a in enumerate(outputs):
        for b in outputs[:i]:
            assert np.linalg.norm(a - b) > 0.1 * np.linalg.norm(a)


def layer(rule, **options):
    sizes = dict(num_heads=1, num_v_heads=2, head_dim=6)
    return drawn(lambda rngs: GatedDeltaNet(16, **sizes, rule=rule, rngs=rngs, **options), seed=3)


def normal(*shape, seed=0):
    """NumPy arrays: slicing those compiles nothing."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@nnx.jit
def call(mixer, x, **options):
    return mixer(x, **options)


@pytest.mark.parametrize(
    "rule", harness.tiers(RECURRENT[:3], ("mamba2",))
)  # gated_delta: tests/layers/test_layers.py
def test_prefill_then_steps(rule):
    x = normal(2, 9, 16)
    mixer = layer(rule, implementation="recurrent")
    empty = empty_cache(mixer, 2)
    want, last = call(mixer, x, cache=empty)
    y, cache = call(mixer, x[:, :7], cache=empty)
    ys = [y]
    for t in (7, 8):
        y, cache = call(mixer, x[:, t : t + 1], cache=cache)
        ys.append(y)
    assert_close(np.asarray(want), np.concatenate(ys, axis=1), F32, "y")
    assert_close(np.asarray(last.state), np.asarray(cache.state), F32, "state")


@pytest.mark.slow
def test_padding_changes_nothing():
    x = normal(1, 6, 16)
    padded = np.pad(x, ((0, 0), (2, 1), (0, 0)), constant_values=3.0)
    mask = np.pad(np.ones((1, 6), bool), ((0, 0), (2, 1)))
    for rule in ("linear_attention", "mamba2"):
        mixer = layer(rule)
        want, got = (np.asarray(y) for y, _ in (call(mixer, x), call(mixer, padded, mask=mask)))
        assert_close(want, got[:, 2:8], F32, rule)
        assert not np.any(got[:, [0, 1, 8]])


@pytest.mark.slow
def test_equal_parameters_and_states():
    """All rules have the same arrays with the same initial values; the recurrent ones the same state."""
    layers = {rule: layer(rule) for rule in rules.RULES}
    weights = {rule: nnx.to_pure_dict(nnx.state(x, nnx.Param)) for rule, x in layers.items()}
    count = sum(x.size for x in jax.tree.leaves(weights["gated_delta"]))
    for other in weights.values():
        jax.tree.map(np.testing.assert_array_equal, weights["gated_delta"], other)
    caches = [jax.eval_shape(lambda rule=rule: layers[rule].init_cache(3)) for rule in RECURRENT]
    assert all(cache == caches[0] for cache in caches)

    # What a rule does not read: only gates, and a small part.
    x = normal(2, 5, 16)
    gates = {"a_proj", "A_log", "dt_bias"}
    unread = {"linear_attention": gates, "delta": gates, "softmax_attention": gates | {"b_proj"}}
    for rule, mixer in layers.items():
        graphdef, params = nnx.split(mixer)

        def loss(params, graphdef=graphdef):
            return jnp.square(nnx.merge(graphdef, params)(jnp.asarray(x))[0]).sum()

        gradients = jax.tree_util.tree_flatten_with_path(jax.device_get(jax.jit(jax.grad(loss))(params)))[0]
        dead = {jax.tree_util.keystr(path): g.size for path, g in gradients if not np.any(g)}
        assert {path.split("'")[1] for path in dead} == unread.get(rule, set()), rule
        assert sum(dead.values()) < 0.1 * count  # a share of 1 / width of the layer


@pytest.mark.parametrize("rule", ["mamba2", "linear_attention", "softmax_attention"])
def test_named_kernels_that_a_rule_does_not_have(rule):
    """A warning says so where they are named, and nothing does where they are not."""
    x, gate = np.ones((1, 2, 1, 4), np.float32), np.zeros((1, 2, 1), np.float32)

    def run(implementation):
        call = functools.partial(rules.apply, rule, implementation=implementation)
        jax.eval_shape(call, x, x, x, gate, gate)

    with pytest.warns(
        UserWarning, match=f"the rule {rule} runs in plain JAX beside the kernels of 'mosaic_gpu'"
    ):
        run("mosaic_gpu")
    with warnings.catch_warnings(action="error"):
        run("recurrent")


def test_a_rule_that_is_not_in_the_table():
    """A layer and a configuration take the object; one of the table is known by its name."""
    doubled = dataclasses.replace(
        rules.RULES["gated_delta"],
        name="doubled",
        rows=lambda q, k, v, **_: (2 * v, None),
        options=(),
        step=None,
    )
    x = np.ones((1, 3, 16), np.float32)
    mixer = layer(doubled, use_gate=False)
    graphdef, state = nnx.split(mixer)
    assert hash(graphdef) is not None and mixer.rule is doubled and not mixer.can_be_served

    @jax.jit
    def run(x, state):
        mixer = nnx.merge(graphdef, state)
        inputs, _ = mixer.rule_inputs(x)
        o, _ = mixer.apply_rule(inputs)
        return o, inputs.v

    o, v = run(x, state)
    np.testing.assert_array_equal(o, 2 * np.asarray(v))
    config = ModelConfig(rule=doubled)
    assert config.rule is doubled and not config.mixer.splits_tokens(config)
    with pytest.raises(NotImplementedError, match="context: the rule doubled does not run over split tokens"):
        sharding.check(config, MeshShape.parse("context=2"), 2, 64)
    assert ModelConfig(rule=rules.RULES["mamba2"]) == ModelConfig(rule="mamba2")
    assert "doubled" not in rules.RULES and rules.find("delta") is rules.RULES["delta"]
    with pytest.raises(ValueError, match="rule: expected one of"):
        rules.wants_unit_length("doubled")


@pytest.mark.parametrize("name", ["initial_state", "cu_seqlens", "segment_ids"])
def test_what_a_rule_does_not_take_is_refused(name):
    """It would go on without what it was given, over the borders of packed sequences."""
    rule = rules.Rule("mine", lambda q, k, v, **_: (v, None), gates=("g",), options=())
    given = {
        "initial_state": np.zeros((1, 1, 4, 4), np.float32),
        "cu_seqlens": np.array([0, 3]),
        "segment_ids": np.zeros((1, 3), np.int32),
    }
    given = {name: jax.device_put(value) for name, value in given.items()}
    ones, zeros = np.ones((1, 3, 1, 4), np.float32), np.zeros((1, 3, 1), np.float32)
    x, gate = jax.device_put((ones, zeros))
    call = functools.partial(rules.apply, rule, x, x, x, gate, gate, normalized=True)
    assert jax.eval_shape(call)[0].shape == x.shape
    with pytest.raises(
        NotImplementedError, match=f"^{name}: expected None, for the rule mine does not take it"
    ):
        call(**{name: given[name]})


def test_a_rule_assigned_to_a_layer(no_type_checks):
    """A name becomes the rule that it names, as at construction, and what is no rule is refused at once."""
    x, mixer, other = np.ones((1, 3, 16), np.float32), layer("gated_delta"), layer("mamba2")
    nnx.update(mixer, nnx.state(other, nnx.Param))
    for rule in ("mamba2", rules.RULES["mamba2"]):
        mixer.rule = rule
        assert mixer.rule is rules.RULES["mamba2"]
        np.testing.assert_array_equal(call(mixer, x)[0], call(other, x)[0])
    assert nnx.split(mixer)[0] == nnx.split(other)[0]
    for wrong, message in {
        "delta_net": "expected one of .*, got 'delta_net'",
        None: "a rules.Rule or the name of one",
    }.items():
        with pytest.raises(ValueError, match=f"rule: .*{message}"):
            mixer.rule = wrong
    assert mixer.rule is rules.RULES["mamba2"]


def test_errors():
    x = jax.device_put(np.ones((1, 3, 16), np.float32))
    with pytest.raises(ValueError, match=r"rule: expected one of .*, got 'delta_net'"):
        layer("delta_net")
    with pytest.raises(ValueError, match="rule: expected one of"):
        ModelConfig(rule="attention")
    cu_seqlens = jax.device_put(np.array([0, 1, 3]))
    for rule in ("linear_attention", "mamba2"):
        with pytest.raises(NotImplementedError, match="cu_seqlens: expected the delta rules"):
            call(layer(rule), x, cu_seqlens=cu_seqlens)
    attention = layer("softmax_attention")
    for name, options in {
        "cache": {"cache": empty_cache(attention, 1)},
        "return_cache": {"return_cache": True},
        "mask": {"mask": jax.device_put(np.ones((1, 3), bool))},
        "cu_seqlens": {"cu_seqlens": cu_seqlens},
    }.items():
        with pytest.raises(NotImplementedError, match=f"{name}: softmax_attention keeps no state"):
            jax.eval_shape(lambda x, options=options: attention(x, **options), x)
    with pytest.raises(NotImplementedError, match="implementation 'mosaic_gpu'"):
        call(layer("delta", implementation="mosaic_gpu"), x)
