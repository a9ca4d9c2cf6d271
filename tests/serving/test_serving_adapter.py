"""The serving call of tpu-inference and tokamax by this library, against the oracles in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_calls import arrays, call, close, normal, softplus, states_close
from device_arrays import put
from fused_oracle import sigmoid

from gdn_jax.adapters import tpu_inference
from gdn_jax.checks import oracle

HV, K = 2, 4
A_LOG, DT_BIAS = normal(HV) / 4, normal(HV)
SLOTS, W = 16, 4
SIZES = dict(n_kq=1, n_v=2, d_k=4, d_v=3, kernel_size=W)
D = 2 * 4 + 2 * 3
CONV, BIAS = normal(D, 1, W) / 2, normal(D) / 2
SERVED_DT_BIAS = {"GDN": DT_BIAS, "KDA": normal(2, 4)}


def served(mode, window, state, qkv, b, a):
    """One request in float64: outputs, and the windows and states after each of its tokens."""
    x = np.concatenate([window, qkv]).astype(np.float64)
    y = np.stack([(x[t : t + W] * CONV[:, 0].T).sum(0) + BIAS for t in range(len(qkv))])
    y = y * sigmoid(y)
    q, k, v = (
        part.reshape(1, len(qkv), -1, width)
        for part, width in zip(np.split(y, (4, 8), 1), (4, 4, 3), strict=True)
    )
    if mode == "GDN":
        g = -np.exp(A_LOG) * softplus(a + DT_BIAS)
    else:
        g = -5 * sigmoid(np.exp(A_LOG)[:, None] * (a.reshape(-1, 2, 4) + SERVED_DT_BIAS[mode]))
    tokens = [q, k, v, g[None], sigmoid(b)[None]]
    outputs, states = [], []
    for t in range(len(qkv)):
        one = [z[:, t : t + 1] for z in tokens]
        o, (state,) = oracle.forward(*one, use_qk_l2norm=True, initial_state=state[None])
        outputs.append(o[0, 0].ravel())
        states.append(state)
    return np.stack(outputs), [x[t + 1 : t + W] for t in range(len(qkv))], states


def serve(mode, lengths, slots, distribution, contexts, *, known=False, drafts=0, offsets=None, read=None):
    """A step of a server beside the oracle's; contexts are the tokens that each request has from before."""
    total = 19
    starts = np.cumsum((0, *lengths)).astype(np.int32)
    starts[distribution[2] + 1 :] = 0  # what lies behind the last request is not read
    qkv, b = normal(total, D), normal(total, 2)
    a = normal(total, 2 if mode == "GDN" else 8)
    windows, states = normal(SLOTS, W - 1, D), normal(SLOTS, 2, 4, 3)
    slots = np.array(slots, np.int32)
    seq_lens = np.array([n + m for n, m in zip(lengths, contexts, strict=True)], np.int32)
    expected_windows, expected_states, expected = (
        windows.astype(np.float64),
        states.astype(np.float64),
        np.zeros((total, 6)),
    )
    for n in range(distribution[2]):
        if slots[n] == 0 or lengths[n] == 0:
            continue
        source = slots[n] + (offsets[n] if drafts and n < distribution[0] else 0) if read is None else read[n]
        old = [np.zeros_like(pool[0]) if contexts[n] == 0 else pool[source] for pool in (windows, states)]
        at = slice(starts[n], starts[n] + lengths[n])
        expected[at], after_windows, after_states = served(mode, *old, qkv[at], b[at], a[at])
        if drafts and n < distribution[0]:
            for t in range(lengths[n]):
                expected_windows[slots[n] + t], expected_states[slots[n] + t] = (
                    after_windows[t],
                    after_states[t],
                )
        else:
            expected_windows[slots[n]], expected_states[slots[n]] = after_windows[-1], after_states[-1]
    options = SIZES | dict(num_spec_tokens=drafts, attention_mode=mode)
    if mode == "KDA":
        options["gate_lower_bound"] = -5.0
    indices = dict(read_offsets=offsets, read_state_indices=read)
    indices = {name: np.array(x, np.int32) for name, x in indices.items() if x is not None}
    distribution = np.array(distribution, np.int32)

    def fused(distribution, windows, states, indices):
        return tpu_inference.fused_conv1d_gdn(
            *arrays((qkv, b, a, windows, states, CONV, BIAS, A_LOG, SERVED_DT_BIAS[mode])),
            *(starts, slots, distribution, seq_lens),
            **indices,
            **options,
        )

    arguments = arrays((windows, states, indices))
    if known:
        (got_windows, got_states), out = jax.jit(partial(fused, distribution))(*arguments)
    else:
        (got_windows, got_states), out = jax.jit(fused)(put(distribution), *arguments)
    close("o", expected[None, :, None], np.asarray(out)[None, :, None])
    states_close(expected_states, got_states)
    np.testing.assert_allclose(got_windows, expected_windows, atol=1e-6)
    touched = np.unique(np.nonzero((expected_states != states).any((1, 2, 3)))[0])
    rest = np.setdiff1d(np.arange(SLOTS), touched)
    np.testing.assert_array_equal(np.asarray(got_states)[rest], states[rest])


@pytest.mark.slow
def test_tpu_inference_mixed():
    """Running requests and prompts, a new one of each, one without a slot and one without tokens, and padding."""
    serve("GDN", (1, 1, 1, 5, 0, 7, 2), (3, 5, 0, 9, 7, 2, 11), (3, 3, 6), (4, 0, 3, 2, 6, 0, 0))


def test_tpu_inference_running_alone():
    """Only running requests, which read from other slots, but for a new one, that starts from zeros in its own, and
    one without a token."""
    serve("KDA", (1, 1, 0, 1), (3, 5, 7, 4), (3, 3, 3), (4, 0, 2, 3), known=True, read=(8, 6, 2, 1))


@pytest.mark.slow
def test_tpu_inference_drafts():
    """Windows of one to three tokens that go on from any of the states before, beside a prompt."""
    serve("GDN", (3, 1, 2, 6), (1, 4, 7, 12), (3, 3, 4), (9, 5, 4, 0), drafts=2, offsets=(1, 2, 0, 0))


def step(**change):
    pools = normal(SLOTS, W - 1, D), normal(SLOTS, 2, 4, 3)
    one = np.ones(1, np.int32)
    arguments = dict(
        qkv=normal(1, D), b=normal(1, 2), a=normal(1, 2), conv_state=pools[0], recurrent_state=pools[1],
        conv_weight=CONV, conv_bias=None, a_log=A_LOG, dt_bias=DT_BIAS, query_start_loc=np.array([0, 1], np.int32),
        state_indices=one, distribution=np.array([1, 1, 1], np.int32), seq_lens=2 * one,
    )  # fmt: skip
    return tpu_inference.fused_conv1d_gdn(**arguments | SIZES | change)


def test_arrays_of_numpy(no_type_checks):
    """Traced alone: none of the arguments has to be an array of JAX."""
    (windows, states), out = jax.eval_shape(step)
    assert windows.shape == (SLOTS, W - 1, D) and states.shape == (SLOTS, 2, 4, 3) and out.shape == (1, 6)


REFUSED = [
    ({"decode_tile_size": 4}, "decode_tile_size: expected None, for tiles"),
    ({"compute_precision": jnp.bfloat16}, "compute_precision: expected float32"),
    ({"attention_mode": "GLA"}, "attention_mode: expected one of 'GDN', 'KDA'"),
    ({"gate_lower_bound": -5.0}, "gate_lower_bound: expected None without KDA"),
    ({"num_spec_tokens": 1}, "read_offsets: expected an array"),
    ({"read_offsets": np.zeros(1, np.int32)}, "read_offsets: expected None, without num_spec_tokens"),
    (
        {"num_spec_tokens": 1, "read_state_indices": np.ones(1, np.int32)},
        "read_state_indices: expected None, for drafts",
    ),
    ({"seq_lens": np.ones(2, np.int32)}, "seq_lens: expected shape"),
    ({"conv_state": normal(SLOTS, D, W - 1)}, "conv_state: expected shape"),
    ({"conv_state": np.ones((SLOTS, W - 1, D), np.int32)}, "conv_state: expected dtype"),
    ({"a_log": A_LOG[:1]}, "a_log: expected shape [n_v] = [2], got [1]"),
    ({"conv_bias": BIAS[:1]}, "conv_bias: expected shape [D]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[x[1].split(":")[0] for x in REFUSED])
def test_refused(change, message, no_type_checks):
    with pytest.raises((ValueError, NotImplementedError)) as error:
        call(step, **change)
    assert str(error.value).startswith(message)
