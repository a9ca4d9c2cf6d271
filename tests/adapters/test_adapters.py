"""Calls of other libraries by this one: their signatures, and their results against the oracles in float64.

Names and defaults were read in fla-core 0.6.0, maxtext 0.2.5, tokamax 0.0.17, skyrl 0.4.0, keras-hub 0.32.0 and
tpu-inference b8692ff. What needs the libraries themselves is `tests/neighbours/run.py`.
"""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_calls import call, close, normal, softplus, states_close
from fused_oracle import sigmoid
from jax.sharding import PartitionSpec as P

from gdn_jax.adapters import fla, keras_hub, maxtext, skyrl, tokamax
from gdn_jax.checks import oracle
from pallas_kernels.device import launch

B, T, H, HV, K, V = 2, 11, 1, 2, 4, 3


def compiled(function, *arguments, **options):
    """`call` in one program, with NumPy's arrays as its arguments and as its results."""
    given = {name: y for name, y in options.items() if isinstance(y, np.ndarray)}
    static = {name: y for name, y in options.items() if name not in given}
    return jax.device_get(jax.jit(lambda args, given: function(*args, **given, **static))(arguments, given))


def packed(x):
    """Rows behind one another."""
    return x.reshape(1, -1, *x.shape[2:])


Q, KEYS, VALUES = normal(B, T, H, K), normal(B, T, H, K) / 2, normal(B, T, HV, V)
A, RAW_BETA = normal(B, T, HV), normal(B, T, HV)
A_LOG, DT_BIAS, STATES = normal(HV) / 4, normal(HV), normal(B, HV, K, V)
G, BETA = -np.exp(A_LOG) * softplus(A + DT_BIAS), sigmoid(RAW_BETA)
DO, DH = normal(B, T, HV, V), normal(B, HV, K, V)


# --- Signatures ---------------------------------------------------------------------------------------------------

NO, REQUIRED = None, inspect.Parameter.empty
RULE = dict.fromkeys(("query", "key", "value", "g", "beta"), REQUIRED)
SIGNATURES = {
    fla.chunk_gated_delta_rule: dict.fromkeys(("q", "k", "v", "g", "beta"), REQUIRED)
    | {"scale": NO, "initial_state": NO, "output_final_state": False, "use_qk_l2norm_in_kernel": False}
    | {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False, "state_v_first": False}
    | {"cu_seqlens": NO, "cu_seqlens_cpu": NO, "chunk_indices": NO, "cp_context": NO}
    | {"use_gate_in_kernel": False, "A_log": NO, "dt_bias": NO, "chunk_size": 64},
    fla.fused_recurrent_gated_delta_rule: dict.fromkeys("qkv", REQUIRED)
    | {"g": NO, "gk": NO, "gv": NO, "beta": NO, "scale": NO, "initial_state": NO}
    | {"output_final_state": False, "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False}
    | {"A_log": NO, "dt_bias": NO, "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False}
    | {"state_v_first": False, "cu_seqlens": NO},
    maxtext.jax_chunk_gated_delta_rule: RULE
    | {"chunk_size": 64, "initial_state": NO, "use_qk_norm_in_gdn": False, "cp_axis": NO}
    | {"compute_dtype": jnp.bfloat16},
    maxtext.jax_ar_gated_delta_rule: RULE
    | {"initial_state": REQUIRED, "use_qk_norm_in_gdn": False, "compute_dtype": jnp.bfloat16},
    skyrl.chunk_gated_delta_rule: RULE
    | {"chunk_size": 64, "initial_state": NO, "attention_mask": NO, "segment_ids": NO},
    skyrl.recurrent_gated_delta_rule: RULE | {"initial_state": NO},
    keras_hub.chunk_gated_delta_rule: RULE
    | {"chunk_size": 64, "initial_state": NO, "output_final_state": False, "padding_mask": NO},
    keras_hub.recurrent_gated_delta_rule: RULE
    | {"initial_state": NO, "output_final_state": False, "padding_mask": NO},
    tokamax.kimi_delta_attention: dict.fromkeys(("query", "key", "value", "gate", "beta"), REQUIRED)
    | {"a_log": NO, "delta_time_bias": NO, "scale": NO, "initial_state": NO, "output_final_state": False}
    | {"use_qk_l2norm": False, "use_gate_in_kernel": False, "segment_ids": NO, "lower_bound": NO}
    | {"context_parallel_metadata": NO, "max_num_segments": NO, "implementation": NO},
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__[17:]}-{f.__name__}")
def test_signatures(function):
    """Names, order and defaults are the library's."""
    found = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    assert [*found.items()] == [*SIGNATURES[function].items()]


# --- fla ----------------------------------------------------------------------------------------------------------


def test_fla_chunks():
    """Every option at once, with the gates' raw inputs; the results of a plain call are o and None."""
    plain = partial(call, fla.chunk_gated_delta_rule, Q, KEYS, VALUES, G, BETA)
    o, nothing = jax.eval_shape(plain)
    assert (o.shape, o.dtype, nothing) == (VALUES.shape, jnp.float32, None)

    lengths = np.array([0, 5, 5, 2 * T - 1], np.int32)
    states = np.swapaxes(normal(3, HV, K, V), -1, -2)
    options = dict(scale=0.3, initial_state=states, cu_seqlens=lengths)
    tokens = tuple(packed(x) for x in (Q, KEYS, VALUES))
    expected = oracle.forward(
        *tokens, packed(G), packed(2 * BETA), **options, use_qk_l2norm=True, state_layout="vk"
    )
    o, final = compiled(
        partial(fla.chunk_gated_delta_rule, cu_seqlens=jax.device_put(lengths), cu_seqlens_cpu=lengths),
        *(*tokens, packed(A), packed(RAW_BETA)),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        state_v_first=True,
        use_gate_in_kernel=True,
        A_log=A_LOG,
        dt_bias=DT_BIAS,
        chunk_size=16,
        scale=0.3,
        initial_state=states,
    )
    close("o", expected[0], o)
    states_close(expected[1], final)


def test_fla_token_by_token():
    """A decay of each key channel, fifth among the arguments, on top of the head's; with the derivative fla lacks."""
    gk = -np.abs(normal(B, T, HV, K))
    expected = oracle.evaluate(Q, KEYS, VALUES, gk + G[..., None], BETA, initial_state=STATES, do=DO, dh_T=DH)

    def rule(q, raw_beta):
        options = dict(initial_state=STATES, output_final_state=True, use_beta_sigmoid_in_kernel=True)
        return call(fla.fused_recurrent_gated_delta_rule, q, KEYS, VALUES, G, gk, beta=raw_beta, **options)

    def with_gradients(q, raw_beta, cotangents):
        results, vjp = jax.vjp(rule, q, raw_beta)
        return results, vjp(cotangents)

    (o, final), (dq, draw) = compiled(with_gradients, Q, RAW_BETA, (DO, DH))
    close("o", expected["o"], o)
    states_close(expected["final_state"], final)
    close("dq", expected["dq"], dq)
    close("dbeta", expected["dbeta"] * BETA * (1 - BETA), draw)
    o, nothing = compiled(fla.fused_recurrent_gated_delta_rule, Q, KEYS, VALUES)
    close("o", oracle.forward(Q, KEYS, VALUES)[0], o)
    assert nothing is None


# --- MaxText and SkyRL --------------------------------------------------------------------------------------------


def test_maxtext():
    rule = partial(
        call, maxtext.jax_chunk_gated_delta_rule, Q, KEYS, VALUES, G, BETA, use_qk_norm_in_gdn=True
    )
    expected = oracle.forward(Q, KEYS, VALUES, G, BETA, use_qk_l2norm=True, initial_state=STATES)
    o, final = compiled(
        maxtext.jax_chunk_gated_delta_rule, Q, KEYS, VALUES, G, BETA, initial_state=STATES,
        use_qk_norm_in_gdn=True, chunk_size=16, compute_dtype=jnp.float32,
    )  # fmt: skip
    close("o", expected[0], o)
    states_close(expected[1], final)
    o, nothing = jax.eval_shape(rule)
    assert (o.dtype, nothing) == (jnp.float32, None)
    o, final = jax.eval_shape(partial(rule, initial_state=STATES.astype(jnp.bfloat16)))
    assert (o.dtype, final.dtype) == (jnp.float32, jnp.bfloat16)

    token = [x[:, :1] for x in (Q, KEYS, VALUES, G, BETA)]
    o, state = compiled(maxtext.jax_ar_gated_delta_rule, *token, STATES, compute_dtype=jnp.float32)
    expected = oracle.forward(*token, initial_state=STATES)
    close("o", expected[0], o)
    states_close(expected[1], state)
    narrow = jax.eval_shape(maxtext.jax_ar_gated_delta_rule, *token, STATES.astype(jnp.bfloat16))[1]
    assert narrow.dtype == jnp.float32


def test_maxtext_over_a_mesh_axis():
    """Tokens that are split over two devices, with the tuple of names that its layer passes."""
    tokens = [x[:, :8] for x in (Q, KEYS, VALUES, G, BETA)]
    rule = partial(maxtext.jax_chunk_gated_delta_rule, compute_dtype=jnp.float32, chunk_size=16)
    split = jax.shard_map(
        lambda *x: rule(*x[:5], initial_state=x[5], cp_axis=("context",)),
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:2]), ("context",)),
        in_specs=(*(P(None, "context"),) * 5, P()),
        out_specs=(P(None, "context"), P()),
        check_vma=False,
    )
    o, final = call(jax.jit(split), *tokens, STATES)
    expected = oracle.forward(*tokens, initial_state=STATES)
    close("o", expected[0], o)
    states_close(expected[1], final)


def test_maxtext_by_kernels(monkeypatch):
    """In bfloat16 its call inside its `shard_map` is made of kernels for a Hopper GPU."""
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    shapes = (1, 128, 1, 64), (1, 128, 1), (1, 1, 64, 64)
    token, gate, state = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    split = jax.shard_map(
        lambda *x: maxtext.jax_chunk_gated_delta_rule(*x[:5], initial_state=x[5]),
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)),
        in_specs=(P("data"),) * 6,
        out_specs=P("data"),
        check_vma=False,
    )
    traced = jax.jit(split).trace(token, token, token, gate, gate, state)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_skyrl():
    """Padding on either side, which holds no numbers, is passed through; states go into a cache of query's dtype."""
    lengths = (7, 4)
    mask = np.zeros((B, T), np.int32)
    mask[0, : lengths[0]] = 1
    mask[1, -lengths[1] :] = 1
    tokens = [
        np.where(mask.reshape(B, T, *(1,) * (x.ndim - 2)), x, np.nan) for x in (Q, KEYS, VALUES, G, BETA)
    ]
    options = dict(chunk_size=16, initial_state=STATES, attention_mask=mask)
    o, final = compiled(skyrl.chunk_gated_delta_rule, *tokens, **options)
    expected_o, expected_final = np.zeros(o.shape), np.zeros(final.shape)
    for b in range(B):
        row = [x[b : b + 1, mask[b] == 1] for x in (Q, KEYS, VALUES, G, BETA)]
        expected_o[b, mask[b] == 1], expected_final[b] = (
            y[0] for y in oracle.forward(*row, use_qk_l2norm=True, initial_state=STATES[b : b + 1])
        )
    close("o", expected_o, o)
    states_close(expected_final, final)

    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (Q, KEYS, VALUES)]
    results = call(partial(jax.eval_shape, skyrl.recurrent_gated_delta_rule), *narrow, G, BETA)
    assert [x.dtype for x in results] == [jnp.bfloat16] * 2


# --- keras-hub ----------------------------------------------------------------------------------------------------


def test_keras_hub():
    """Padding on the right leaves the state alone; the state is float32, and None where it is not asked for."""
    lengths, floats = (7, 11), np.zeros((B, T), np.float32)
    for b, n in enumerate(lengths):
        floats[b, :n] = 1
    options = dict(chunk_size=16, initial_state=STATES, output_final_state=True, padding_mask=floats)
    o, final = compiled(keras_hub.chunk_gated_delta_rule, Q, KEYS, VALUES, G, BETA, **options)
    for b, n in enumerate(lengths):
        row = [x[b : b + 1, :n] for x in (Q, KEYS, VALUES, G, BETA)]
        expected = oracle.forward(*row, use_qk_l2norm=True, initial_state=STATES[b : b + 1])
        close("o", expected[0], o[b : b + 1, :n])
        states_close(expected[1], final[b : b + 1])
        assert not o[b, n:].any()

    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (Q, KEYS, VALUES)]
    token = partial(keras_hub.recurrent_gated_delta_rule, output_final_state=True)
    results = call(partial(jax.eval_shape, token), *narrow, G, BETA)
    assert [x.dtype for x in results] == [jnp.bfloat16, jnp.float32]
    plain = jax.eval_shape(keras_hub.chunk_gated_delta_rule, *narrow, G, BETA)
    assert plain[0].dtype == jnp.bfloat16 and plain[1] is None


# --- tokamax ------------------------------------------------------------------------------------------------------


def test_tokamax_sequences():
    """Tokens of three sequences a row in any order, padding among them, and the gate's raw input with a bound."""
    heads, N = 2, 3
    q, k, f = normal(heads, B, T, K), normal(heads, B, T, K), normal(heads, B, T, K)
    v, beta = normal(heads, B, T, V), sigmoid(normal(heads, B, T))
    a_log, bias, states = normal(heads) / 4, normal(heads * K), normal(B, N, heads, K, V)
    ids = np.array([[1, 1, 0, 2, 2, 1, 3, 3, 0, 2, 9], [3, 3, 3, 3, 1, 1, 1, 0, 0, -1, 0]], np.int32)
    for x in (q, k, v, f, beta):
        x[:, (ids < 1) | (ids > N)] = np.nan  # padding may hold anything
    o, final = compiled(
        tokamax.kimi_delta_attention,
        q,
        k,
        v,
        f,
        beta,
        a_log=a_log,
        delta_time_bias=bias,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm=True,
        use_gate_in_kernel=True,
        segment_ids=ids,
        lower_bound=-5.0,
        implementation="recurrent",
    )
    g = -5 * sigmoid(np.exp(a_log)[:, None, None, None] * (f + bias.reshape(heads, 1, 1, K)))
    expected_o, expected_final = np.zeros(o.shape), np.array(states, np.float64)
    for b in range(B):
        for n in range(N):
            at = ids[b] == n + 1
            if not at.any():
                continue
            tokens = (np.moveaxis(x[:, b : b + 1, at], 0, 2) for x in (q, k, v, g, beta))
            state = states[b : b + 1, n]
            y, (expected_final[b, n],) = oracle.forward(*tokens, use_qk_l2norm=True, initial_state=state)
            expected_o[:, b, at] = np.moveaxis(y[0], 0, 1)
    close("o", np.moveaxis(expected_o, 0, 2), np.moveaxis(np.asarray(o), 0, 2))
    states_close(expected_final.reshape(B * N, heads, K, V), final.reshape(B * N, heads, K, V))


def test_tokamax_rows(no_type_checks):
    """Without sequences a row has state 0, and its other states stay as they are. NumPy's arrays do."""
    q, k, v = normal(1, B, T, K), normal(1, B, T, K) / 2, normal(1, B, T, V)
    g, beta, states = -np.abs(normal(1, B, T, K)), sigmoid(normal(1, B, T)), normal(B, 2, 1, K, V)
    rule = partial(tokamax.kimi_delta_attention, implementation="recurrent")
    o, final = compiled(rule, q, k, v, g, beta, initial_state=states, output_final_state=True)
    tokens = (np.moveaxis(x, 0, 2) for x in (q, k, v, g, beta))
    expected_o, expected_final = oracle.forward(*tokens, initial_state=states[:, 0])
    close("o", expected_o, np.moveaxis(np.asarray(o), 0, 2))
    states_close(expected_final, final[:, 0])
    np.testing.assert_array_equal(final[:, 1], states[:, 1])
    assert jax.eval_shape(lambda: rule(q, k, v, g, beta, initial_state=states))[1] is None


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_tokamax_ids_of_8_bits(dtype, no_type_checks):
    """More states than the ids' dtype has numbers."""
    ids, N = np.array([[1, 1, 2, 2, 1, 0, 3]], dtype), np.iinfo(dtype).max + 1
    tokens = normal(1, 1, 7, K), normal(1, 1, 7, K) / 2, normal(1, 1, 7, V), -np.abs(normal(1, 1, 7, K))
    options = dict(output_final_state=True, max_num_segments=N, implementation="recurrent")
    rule = jax.jit(partial(tokamax.kimi_delta_attention, **options))
    beta = sigmoid(normal(1, 1, 7))
    expected = rule(*tokens, beta, segment_ids=ids.astype(np.int32))
    assert np.asarray(expected[0]).any()
    jax.tree.map(np.testing.assert_array_equal, expected, rule(*tokens, beta, segment_ids=ids))


# --- What is refused ----------------------------------------------------------------------------------------------

RULE_ARGUMENTS = (Q, KEYS, VALUES, G, BETA)
HEAD_FIRST = tuple(
    np.moveaxis(x, 2, 0) for x in (Q, KEYS, VALUES[:, :, :1], np.repeat(G[..., :1, None], K, -1))
)
HEAD_FIRST = (*HEAD_FIRST, np.moveaxis(BETA[..., :1], 2, 0))


REFUSED = [
    (fla.chunk_gated_delta_rule, RULE_ARGUMENTS, {"chunk_indices": 1}, "chunk_indices: expected None, for chunks"),
    (fla.chunk_gated_delta_rule, RULE_ARGUMENTS, {"cp_context": 1}, "cp_context: expected None, use gdn_jax.par"),
    (fla.chunk_gated_delta_rule, RULE_ARGUMENTS, {"cu_seqlens_cpu": np.array([0, 1])}, "cu_seqlens_cpu: expected"),
    (fla.chunk_gated_delta_rule, RULE_ARGUMENTS, {"allow_neg_eigval": True}, "allow_neg_eigval: expected False"),
    (fla.chunk_gated_delta_rule, RULE_ARGUMENTS, {"use_gate_in_kernel": True}, "A_log: expected an array"),
    (fla.chunk_gated_delta_rule, RULE_ARGUMENTS, {"chunk_size": 48}, "chunk_size: expected one of 16"),
    (fla.fused_recurrent_gated_delta_rule, RULE_ARGUMENTS[:3], {"gv": VALUES}, "gv: expected None"),
    (fla.fused_recurrent_gated_delta_rule, RULE_ARGUMENTS[:3], {"beta": VALUES}, "beta: expected shape"),
    (
        fla.fused_recurrent_gated_delta_rule,
        RULE_ARGUMENTS[:3],
        {"use_beta_sigmoid_in_kernel": True},
        "beta: expected an array",
    ),
    (fla.chunk_gated_delta_rule, RULE_ARGUMENTS, {"use_qk_l2norm_in_kernel": 1}, "use_qk_l2norm_in_kernel: expected"),
    (
        fla.chunk_gated_delta_rule,
        (*RULE_ARGUMENTS[:3], G > 0, BETA),
        {"use_gate_in_kernel": True, "A_log": A_LOG},
        "g: expected dtype",
    ),
    (fla.fused_recurrent_gated_delta_rule, RULE_ARGUMENTS[:4], {"gk": G[:, :, :1, None]}, "gk: expected shape [B, T"),
    (maxtext.jax_ar_gated_delta_rule, (*RULE_ARGUMENTS, STATES), {}, "query: expected shape [B, 1, H, K]"),
    (
        skyrl.chunk_gated_delta_rule,
        (Q, KEYS, VALUES[:, :1], G, BETA),
        {"attention_mask": np.ones((B, T), bool)},
        "value: expected shape",
    ),
    (maxtext.jax_chunk_gated_delta_rule, RULE_ARGUMENTS, {"cp_axis": ("a", "b")}, "cp_axis: expected one mesh axis"),
    (maxtext.jax_chunk_gated_delta_rule, (Q, KEYS[:, 1:], *RULE_ARGUMENTS[2:]), {}, "key: expected shape"),
    (maxtext.jax_chunk_gated_delta_rule, (3.0, *RULE_ARGUMENTS[1:]), {}, "query: expected an array"),
    (maxtext.jax_chunk_gated_delta_rule, (Q + 1j, *RULE_ARGUMENTS[1:]), {}, "query: expected dtype float16"),
    (fla.fused_recurrent_gated_delta_rule, (Q, KEYS, 3.0, G), {}, "v: expected an array"),
    (
        fla.fused_recurrent_gated_delta_rule,
        RULE_ARGUMENTS[:4],
        {"gk": np.repeat(G[..., None] > 0, K, -1)},
        "gk: expected dtype",
    ),
    (skyrl.chunk_gated_delta_rule, (Q, KEYS, VALUES[:, 1:], G, BETA), {}, "value: expected shape"),
    (skyrl.chunk_gated_delta_rule, RULE_ARGUMENTS, {"attention_mask": np.ones((B, 1), bool)}, "attention_mask: exp"),
    (keras_hub.recurrent_gated_delta_rule, RULE_ARGUMENTS, {"padding_mask": np.ones((B, 1))}, "padding_mask: exp"),
    (tokamax.kimi_delta_attention, HEAD_FIRST, {"use_gate_in_kernel": True}, "a_log: expected an array"),
    (
        tokamax.kimi_delta_attention,
        HEAD_FIRST,
        {"use_gate_in_kernel": True, "a_log": np.ones(2)},
        "a_log: expected shape [H] = [1], got [2]",
    ),
    (
        tokamax.kimi_delta_attention,
        HEAD_FIRST,
        {"segment_ids": np.ones((B, T), np.int32)},
        "max_num_segments: expected a number with segment_ids",
    ),
    (
        tokamax.kimi_delta_attention,
        HEAD_FIRST,
        {"initial_state": normal(B, 2, 1, K, V), "max_num_segments": 3},
        "max_num_segments: expected initial_state's 2 or None, got 3",
    ),
    (
        tokamax.kimi_delta_attention,
        (HEAD_FIRST[0], HEAD_FIRST[1][..., :2], *HEAD_FIRST[2:]),
        {},
        "key: expected shape [H, B, T, K] = [1, 2, 11, 4], got [1, 2, 11, 2]",
    ),
    (tokamax.kimi_delta_attention, HEAD_FIRST, {"initial_state": [1.0]}, "initial_state: expected an array"),
    (
        tokamax.kimi_delta_attention,
        HEAD_FIRST,
        {"initial_state": 1j * normal(B, 2, 1, K, V)},
        "initial_state: expected dtype float16",
    ),
    (tokamax.register, (), {"implementation": "triton"}, "implementation: expected one of 'mosaic_gpu'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "change", "message"), REFUSED, ids=[x[3].split(":")[0] for x in REFUSED]
)
def test_refused(function, arguments, change, message, no_type_checks):
    with pytest.raises((ValueError, NotImplementedError)) as error:
        call(function, *arguments, **change)
    assert str(error.value).startswith(message)


def test_tokamax_context_parallel(no_type_checks):
    class Metadata:
        is_cp_enabled = True

    with pytest.raises(NotImplementedError, match="context_parallel_metadata: expected None or one"):
        call(tokamax.kimi_delta_attention, *HEAD_FIRST, context_parallel_metadata=Metadata())
