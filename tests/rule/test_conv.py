"""The causal convolution against a NumPy float64 loop over tokens, and its properties."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_oracle import conv_oracle

from gdn_jax.parts.conv import causal_conv1d, causal_conv1d_update

# float32: at most W + 1 = 5 additions, each off by 2^-24 of the sum of moduli, a few roundings of the SiLU,
# and outputs near 1: 1e-6 absolute on values of unit size leaves a factor of 3.
F32 = 1e-6
# bfloat16 outputs: one final rounding to 8 bits, half a unit in the last place.
BF16 = 2.0**-8


def make(rng, B, T, D, W, N=None):
    def f(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return f(B, T, D), f(D, W) / 2, f(D), f(N or B, D, W - 1)


def close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("T", [2, 7])
def test_whole_rows(W, T):
    """And their first token by itself, under every option."""
    rng = np.random.default_rng(W * 10 + T)
    x, weight, bias, state = make(rng, 2, T, 5, W)
    cases = list(itertools.product((bias, None), ("silu", None), (state, None)))

    @jax.jit
    def run(x, weight):
        results = []
        for b, activation, s in cases:
            b, s = (None if y is None else jnp.asarray(y) for y in (b, s))
            row = causal_conv1d(x, weight, b, activation=activation, initial_state=s)
            past = jnp.zeros(state.shape) if s is None else s
            results.append((*row, causal_conv1d_update(x[:, 0], past, weight, b, activation=activation)[0]))
        return results

    results = jax.device_get(run(x, weight))
    for (b, activation, s), (y, final, token) in zip(cases, results, strict=True):
        for n in range(2):
            want, want_final = conv_oracle(
                x[n], weight, b, activation, 0 * state[n] if s is None else state[n]
            )
            close(y[n], want, F32)
            close(token[n], want[0], F32)
            np.testing.assert_array_equal(final[n], want_final.astype(np.float32))


LENGTHS = [3, 0, 1, 8, 2, 0, 1]


@pytest.mark.parametrize("W", [2, 4])
@pytest.mark.parametrize("use_state", [False, True])
def test_cu_seqlens_equals_separate(W, use_state):
    rng = np.random.default_rng(W)
    cu = np.cumsum([0, *LENGTHS])
    N, T = len(LENGTHS), cu[-1] + 3
    x, weight, bias, state = make(rng, 1, T, 4, W, N)
    x[:, cu[-1] :] = np.nan  # padding may hold anything
    y, final = jax.device_get(
        jax.jit(causal_conv1d)(
            x, weight, bias, initial_state=state if use_state else None, cu_seqlens=cu.astype(np.int32)
        )
    )
    for n in range(N):
        want, want_final = conv_oracle(
            x[0, cu[n] : cu[n + 1]], weight, bias, "silu", state[n] if use_state else 0 * state[n]
        )
        close(y[0, cu[n] : cu[n + 1]], want, F32)
        np.testing.assert_array_equal(final[n], want_final.astype(np.float32))
    assert np.all(np.asarray(y[0, cu[-1] :]) == 0)


@pytest.mark.parametrize("W", [2, 4])
@pytest.mark.parametrize("use_state", [False, True])
def test_segment_ids_equals_separate(W, use_state):
    rng = np.random.default_rng(W)
    # An id may come back after another, a first segment be shorter than the filter, a row be one segment.
    ids = np.array(
        [[5, 5, 1, 5, 5, 5, 5, 5, 5, 2], [0, 0, 0, 0, 0, 0, 0, 7, 7, 7], [3] * 10, [1] + [2] * 9], np.int32
    )
    B, T = ids.shape
    x, weight, bias, state = make(rng, B, T, 3, W)
    y, final = jax.device_get(
        jax.jit(causal_conv1d)(x, weight, bias, initial_state=state if use_state else None, segment_ids=ids)
    )
    for n in range(B):
        cuts = [0, *(np.flatnonzero(np.diff(ids[n])) + 1), T]
        carried = state[n] if use_state else 0 * state[n]
        for start, stop in itertools.pairwise(cuts):
            want, want_final = conv_oracle(x[n, start:stop], weight, bias, "silu", carried)
            close(y[n, start:stop], want, F32)
            carried = 0 * state[n]
        np.testing.assert_array_equal(final[n], want_final.astype(np.float32))


def test_splitting_anywhere_and_token_by_token():
    rng = np.random.default_rng(0)

    @jax.jit
    def run(x, weight, bias, state):
        whole, halves, tokens = causal_conv1d(x, weight, bias, initial_state=state), [], []
        for cut in range(7):
            left, middle = causal_conv1d(x[:, :cut], weight, bias, initial_state=state)
            right, last = causal_conv1d(x[:, cut:], weight, bias, initial_state=middle)
            halves.append((jnp.concatenate([left, right], axis=1), last))
        for t in range(6):
            token, state = causal_conv1d_update(x[:, t], state, weight, bias)
            tokens.append(token)
        return whole, [*halves, (jnp.stack(tokens, axis=1), state)]

    (y, final), pieces = run(*make(rng, 2, 6, 3, 4))
    for got, last in pieces:
        close(got, y, F32)
        np.testing.assert_array_equal(last, final)


def test_dtypes():
    rng = np.random.default_rng(1)
    x, weight, _, state = make(rng, 2, 9, 4, 4)
    x16, weight16 = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    y, final = jax.jit(causal_conv1d)(x16, weight16)
    assert y.dtype == final.dtype == jnp.bfloat16
    want, _ = conv_oracle(x16[0], weight16, None, "silu", 0 * state[0])
    close(np.asarray(y)[0], want, BF16)
    y, final = jax.eval_shape(causal_conv1d, x16, weight16, initial_state=state)
    assert y.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    y, final = jax.eval_shape(causal_conv1d_update, x16[:, 0], state, weight16)
    assert y.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    with jax.enable_x64(True):
        y, final = jax.jit(causal_conv1d)(x.astype(np.float64), weight.astype(np.float64))
        assert y.dtype == final.dtype == jnp.float64
        close(np.asarray(y)[0], conv_oracle(x[0], weight, None, "silu", 0 * state[0])[0], 1e-14)


@pytest.mark.parametrize("packing", ["cu_seqlens", "segment_ids", None])
def test_a_float32_state_keeps_its_digits_beside_bfloat16(packing):
    """One token of bfloat16 at a time, as in generation: what the state held is neither rounded where it is read nor
    where it is handed on."""
    rng = np.random.default_rng(2)
    x, weight, _, state = make(rng, 1, 1, 4, 4)
    x = x.astype(jnp.bfloat16)
    packings = {"cu_seqlens": np.array([0, 1], np.int32), "segment_ids": np.zeros((1, 1), np.int32)}
    options = {packing: packings[packing]} if packing else {}
    y, final = jax.device_get(jax.jit(causal_conv1d)(x, weight, initial_state=state, **options))
    want, want_final = conv_oracle(x[0], weight, None, "silu", state[0])
    np.testing.assert_array_equal(final[0], want_final.astype(np.float32))
    close(y[0], want.astype(np.float32).astype(jnp.bfloat16), F32)  # rounded once, at the end
    token, after = jax.jit(causal_conv1d_update)(x[:, 0], state, weight)
    np.testing.assert_array_equal(after, final)
    np.testing.assert_array_equal(token, y[:, 0])


def _separate(x, weight, bias, state, cuts):
    """The packed result in plain slices and sums: an independent form to differentiate."""
    W = weight.shape[1]
    ys, finals = [], []
    for n, (start, stop) in enumerate(itertools.pairwise(cuts)):
        past = jnp.concatenate([state[n].T, x[0, start:stop]])
        windows = [past[t : t + W].T * weight for t in range(stop - start)]
        ys += [jax.nn.silu(w.sum(axis=1) + bias) for w in windows]
        finals.append(past[stop - start :].T)
    return jnp.stack(ys)[None], jnp.stack(finals)


@pytest.mark.parametrize("packing", ["cu_seqlens", "segment_ids", None])
def test_gradients(packing):
    rng = np.random.default_rng(2)
    cuts = [0, 2, 2, 7, 8] if packing == "cu_seqlens" else [0, 8]
    N = len(cuts) - 1
    arrays = make(rng, 1, 8, 3, 4, N)
    dy, dfinal = (rng.standard_normal(s).astype(np.float32) for s in ((1, 8, 3), (N, 3, 3)))
    options = {
        "cu_seqlens": {"cu_seqlens": jax.device_put(np.array(cuts))},
        "segment_ids": {"segment_ids": jax.device_put(np.zeros((1, 8), np.int32))},
        None: {},
    }[packing]

    def ours(x, weight, bias, state):
        y, final = causal_conv1d(x, weight, bias, initial_state=state, **options)
        return jnp.vdot(y, dy) + jnp.vdot(final, dfinal)

    def theirs(*args):
        y, final = _separate(*args, cuts)
        return jnp.vdot(y, dy) + jnp.vdot(final, dfinal)

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(*arrays) for f in (ours, theirs))
    for name, a, b in zip(("x", "weight", "bias", "initial_state"), got, want, strict=True):
        # Sums of 8 tokens x 4 taps of unit size: 1e-5.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_padding_of_nan_gives_finite_gradients():
    x, weight = np.ones((1, 6, 2), np.float32), np.ones((2, 3), np.float32)
    x[:, 4:] = np.nan

    def loss(x, weight):
        y, final = causal_conv1d(x, weight, cu_seqlens=jnp.array([0, 1, 4]))
        return y.sum() + final.sum()

    dx, dw = jax.device_get(jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weight))
    assert np.all(np.isfinite(dx)) and np.all(np.isfinite(dw)) and np.all(dx[:, 4:] == 0)


@pytest.mark.slow
def test_vmap_of_packed_rows():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((3, 1, 8, 2)).astype(np.float32)
    weight = rng.standard_normal((2, 4)).astype(np.float32)
    cu = np.array([[0, 3, 8], [0, 0, 5], [0, 8, 8]], np.int32)

    @jax.jit
    def run(x, cu):
        return causal_conv1d(x, jnp.asarray(weight), cu_seqlens=cu)

    y, final = jax.device_get(jax.jit(jax.vmap(run))(x, cu))
    for i in range(3):
        want = run(x[i], cu[i])
        close(y[i], want[0], F32)
        close(final[i], want[1], F32)


def test_thousands_of_sequences():
    rng = np.random.default_rng(4)
    lengths = rng.integers(0, 4, 3000)
    cu = np.cumsum([0, *lengths])
    x, weight, _, state = make(rng, 1, cu[-1], 2, 4, 3000)
    run = jax.jit(causal_conv1d)
    y, final = jax.device_get(run(x, weight, initial_state=state, cu_seqlens=cu.astype(np.int32)))
    for n in (0, 1, 1499, 2998, 2999):
        want, want_final = conv_oracle(x[0, cu[n] : cu[n + 1]], weight, None, "silu", state[n])
        close(y[0, cu[n] : cu[n + 1]], want, F32)
        np.testing.assert_array_equal(final[n], want_final.astype(np.float32))


def zeros(*shape, dtype=np.float32):
    """In NumPy: nothing is compiled where the tests are collected."""
    return np.zeros(shape, dtype)


X, WEIGHT, ROW = zeros(2, 5, 3), zeros(3, 4), zeros(1, 5, 3)


@pytest.mark.parametrize(
    "message, x, weight, options",
    [
        ("x: expected shape", X[0], WEIGHT, {}),
        ("x: expected dtype", X.astype(int), WEIGHT, {}),
        ("weight: expected shape", X, WEIGHT.T, {}),
        ("weight: expected width W = 2 to 4, got 5", X, zeros(3, 5), {}),
        ("weight: expected width W = 2 to 4, got 1", X, zeros(3, 1), {}),
        ("bias: expected shape", X, WEIGHT, {"bias": zeros(4)}),
        ("activation: expected one of 'silu', None, got 'relu'", X, WEIGHT, {"activation": "relu"}),
        ("initial_state: expected shape", X, WEIGHT, {"initial_state": zeros(2, 3, 4)}),
        ("initial_state: expected dtype", X, WEIGHT, {"initial_state": zeros(2, 3, 3, dtype=int)}),
        (
            "cu_seqlens: expected packed rows with B = 1, got B = 2",
            X,
            WEIGHT,
            {"cu_seqlens": np.array([0, 5])},
        ),
        ("cu_seqlens: expected an integer dtype", ROW, WEIGHT, {"cu_seqlens": np.array([0.0, 5.0])}),
        ("cu_seqlens: expected ascending values from 0", ROW, WEIGHT, {"cu_seqlens": np.array([0, 9, 3])}),
        ("cu_seqlens: expected ascending values from 0", ROW, WEIGHT, {"cu_seqlens": np.array([3, 5])}),
        ("cu_seqlens: expected at least two entries", ROW, WEIGHT, {"cu_seqlens": np.array([0])}),
        ("segment_ids: expected shape", X, WEIGHT, {"segment_ids": zeros(2, 4, dtype=int)}),
        ("segment_ids: expected an integer dtype", X, WEIGHT, {"segment_ids": zeros(2, 5)}),
        (
            "cu_seqlens: expected at most one of cu_seqlens and segment_ids",
            ROW,
            WEIGHT,
            {"cu_seqlens": np.array([0, 5]), "segment_ids": zeros(1, 5, dtype=int)},
        ),
        (
            "initial_state: expected shape",
            ROW,
            WEIGHT,
            {"cu_seqlens": np.array([0, 2, 5]), "initial_state": zeros(1, 3, 3)},
        ),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_errors(message, x, weight, options):
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_conv1d(x, weight, **options)


@pytest.mark.usefixtures("no_type_checks")
def test_offsets_of_a_narrow_dtype():
    x, cu = np.ones((1, 200, 3), np.float32), np.array([0, 100])
    want = jax.jit(causal_conv1d)(x, WEIGHT, cu_seqlens=cu)
    given = jax.jit(causal_conv1d)(x, WEIGHT, cu_seqlens=cu.astype(np.int8))
    known = jax.jit(lambda x: causal_conv1d(x, WEIGHT, cu_seqlens=cu.astype(np.int8)))(x)
    for got in (given, known):
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.usefixtures("no_type_checks")
def test_update_errors():
    with pytest.raises(ValueError, match="state: expected shape"):
        causal_conv1d_update(X[:, 0], zeros(2, 3, 4), WEIGHT)
    with pytest.raises(ValueError, match="x: expected shape"):
        causal_conv1d_update(X, zeros(2, 3, 3), WEIGHT)
