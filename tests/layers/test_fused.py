"""The plain forms of what stands around the rule against float64 formulas: values, and gradients by `jax.vjp`."""

import warnings

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_harness import SWIGLU_NAMES, SWIGLU_ROUNDINGS, close, draws, value_and_vjp

from gdn_jax.parts import embedding, kernels, norms, swiglu
from gdn_jax.parts.conv import causal_conv1d, last_inputs
from gdn_jax.parts.short_conv import short_conv, split_normalized

DTYPES = ("float32", "bfloat16")

HEADS, WIDTH, VALUES, W = 3, 8, 12, 4
CHANNELS = 2 * HEADS * WIDTH + VALUES

IDS = np.array(
    [[5, 5, 1, 5, 5, 5, 5, 5, 5, 2, 2, 2], [0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7], [3] * 12], np.int32
)
"""An id may come back after another, a last segment be as long as the filter or shorter, a row be one segment."""

LENGTHS = (3, 0, 1, 5, 2)

PACKINGS = {
    "rows": (3, 12, fused_oracle.whole_rows(3, 12), {}),
    "segments": (3, 12, fused_oracle.pieces_of_ids(IDS), {"segment_ids": IDS}),
    "packed": (
        1,
        14,  # the last three tokens are padding
        fused_oracle.pieces_of_lengths(LENGTHS),
        {"cu_seqlens": np.cumsum((0, *LENGTHS)).astype(np.int32)},
    ),
}


@pytest.mark.parametrize(
    ("packing", "dtype", "with_state", "normalize"),
    [
        ("rows", "float32", False, True),
        ("rows", "bfloat16", False, True),
        ("segments", "float32", False, True),
        ("segments", "bfloat16", True, True),
        ("packed", "float32", True, True),
        ("packed", "float32", False, False),
    ],
)
def test_short_conv(packing, dtype, with_state, normalize):
    """q, k, v, the final state and every gradient, also through the final state, a bias and an initial state."""
    B, T, pieces, options = PACKINGS[packing]
    N, draw = 1 + max(p.sequence for p in pieces), draws(len(packing))
    x, weight = draw(B, T, CHANNELS, dtype=dtype), draw(CHANNELS, W, scale=0.5)
    bias = draw(CHANNELS) if with_state else None
    state = draw(N, CHANNELS, W - 1, dtype=dtype) if with_state else None
    shapes = (*2 * [(B, T, HEADS, WIDTH)], (B, T, VALUES), (N, CHANNELS, W - 1))
    cotangents = tuple(draw(*shape, dtype=dtype) for shape in shapes)
    heads = dict(heads=HEADS, width=WIDTH, normalize=normalize)

    def f(x, weight, bias, state):
        packed = {name: jnp.asarray(array) for name, array in options.items()}
        return short_conv(x, weight, bias, **heads, initial_state=state, **packed)

    values, gradients = value_and_vjp(f, cotangents, x, weight, bias, state)
    expected = fused_oracle.short_conv(x, weight, bias, state, cotangents, pieces=pieces, **heads)
    # The convolution is rounded, and q and k again once they have unit length: a vector that is off by a part of its
    # length in any direction is off by at most that part of 1 when its length is made 1.
    for name, value in zip("qkv", values, strict=False):
        close(getattr(expected, name), value, name, 1 if name == "v" else 2)
    np.testing.assert_array_equal(values[3], expected.final_state.astype(values[3].dtype))
    # Into dz go the convolution's own rounding, in the length and the direction of q and k (3 times: the factor, and
    # y on both sides of its projection), and that of its cotangent. Each of the taps' parts of dx is then rounded,
    # and so are their sums, whose parts are independent draws and so smaller than the whole.
    roundings = {"dx": 4 + 2 * W, "dweight": 4, "dbias": 4, "dstate": 4 + 2 * W}
    for (name, n), gradient in zip(roundings.items(), gradients, strict=True):
        if gradient is not None:
            close(getattr(expected, name), gradient, name, n, dtype=dtype)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("T", [3, 12])
def test_last_inputs_are_the_final_state(segments, T):
    """Beside the kernels the state comes from `last_inputs`: bit for bit that of the convolution, for every width of
    filters, also in rows that are just as long as what the filter remembers."""
    draw, ids = draws(T), jax.device_put(IDS[:, -T:]) if segments else None
    x, weights = draw(3, T, CHANNELS), [draw(CHANNELS, width) for width in (2, 3, W)]
    both = jax.jit(
        lambda x, ids: [
            (last_inputs(x, ids, w.shape[1]), causal_conv1d(x, w, segment_ids=ids)[1]) for w in weights
        ]
    )
    for w, (got, expected) in zip(weights, both(x, ids), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.shape == (3, CHANNELS, w.shape[1] - 1)


def test_split_of_channels():
    """q, then k, then v, each head's channels together."""
    y = np.arange(2.0 * 5 * CHANNELS, dtype=np.float32).reshape(2, 5, CHANNELS)
    q, k, v = jax.device_get(jax.jit(lambda y: split_normalized(y, HEADS, WIDTH, False))(y))
    together = [x.reshape(2, 5, -1) for x in (q, k, v)]
    np.testing.assert_array_equal(np.concatenate(together, axis=-1), y)
    assert float(k[0, 0, 1, 0]) == (HEADS + 1) * WIDTH


@pytest.mark.parametrize("with_y", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(dtype, with_y):
    """The stream in one dtype, what is added in another, the norm in a third where it says so."""
    draw = draws(1)
    other = "bfloat16" if dtype == "float32" else "float32"
    x, weight = draw(5, 7, 48, dtype=dtype), draw(48)
    y = draw(5, 7, 48, dtype=other) if with_y else None
    ds, dn = draw(5, 7, 48, dtype=dtype), draw(5, 7, 48, dtype="bfloat16")

    def f(x, y, weight):
        return norms.add_norm(x, y, weight, dtype="bfloat16")

    (s, n), (dx, dy, dweight) = value_and_vjp(f, (ds, dn), x, y, weight)
    assert n.dtype == jnp.bfloat16
    expected_s, expected_n = fused_oracle.add_norm(x, y, weight)
    expected_dx, expected_dweight = fused_oracle.add_norm_gradients(expected_s, weight, ds, dn)
    if with_y:
        close(expected_s, s, "s")
        close(expected_dx, dy, "dy")
    else:
        np.testing.assert_array_equal(s, x)
    close(expected_n, n, "n")  # of the sum before it is rounded
    close(expected_dx, dx, "dx")
    close(expected_dweight, dweight, "dweight")


def test_the_norm_has_the_dtype_of_the_stream_and_its_eps():
    draw = draws(2)
    x, weight = draw(4, 16, scale=1e-3), draw(16)
    s, n = jax.jit(lambda x, weight: norms.add_norm(x, None, weight, eps=1e-6))(x, weight)
    assert n.dtype == s.dtype == jnp.float32
    close(fused_oracle.add_norm(x, None, weight, 1e-6)[1], n, "n")


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm(dtype, activation):
    draw = draws(3)
    o, gate, dy = (draw(2, 9, 3, 24, dtype=dtype) for _ in range(3))
    weight = draw(24)
    y, gradients = value_and_vjp(
        lambda *x: norms.gated_norm(*x, eps=1e-3, activation=activation), dy, o, gate, weight
    )
    close(fused_oracle.gated_norm(o, gate, weight, 1e-3, activation), y, "y")
    expected = fused_oracle.gated_norm_gradients(o, gate, weight, dy, 1e-3, activation)
    for name, a, b in zip(("do", "dgate", "dweight"), expected, gradients, strict=True):
        close(a, b, name)


def test_gates_among_other_channels():
    draw = draws(8)
    o, gate, weight, before = draw(2, 3, 8), draw(2, 4, 8), draw(8), draw(2, 5)
    with pytest.raises(ValueError, match=r"^gate: expected the shape of o, \(2, 3, 8\), got \(2, 4, 8\)$"):
        norms.gated_norm(o, gate, weight)

    @jax.jit
    def both(o, gate, weight, before):
        channels = jnp.concatenate([before, gate[:, 1:].reshape(2, 24)], 1)
        return norms.gated_norm_of_channels(o, channels, weight), norms.gated_norm(o, gate[:, 1:], weight)

    np.testing.assert_array_equal(*both(o, gate, weight, before))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm_with_its_projection(dtype):
    draw = draws(7)
    tokens = (2, 9) if dtype == "float32" else (18,)  # as for test_swiglu
    o, gate = (draw(*tokens, 3, 24, dtype=dtype) for _ in range(2))
    weight, kernel = draw(24), widened(draw(72, 10, dtype=dtype))
    dresult = draw(*tokens, 10, dtype=dtype)
    result, gradients = value_and_vjp(norms.gated_norm, dresult, o, gate, weight, kernel)
    close(fused_oracle.gated_projection(o, gate, weight, kernel), result, "result", 2)
    expected = fused_oracle.gated_projection_gradients(o, gate, weight, kernel, dresult)
    for name, a, b in zip(("do", "dgate", "dweight", "dkernel"), expected, gradients, strict=True):
        close(a, b, name, 2, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype):
    draw = draws(4)
    # One axis of tokens in bfloat16: a CPU rounds every addition of a product over two axes, as dkernel would be.
    tokens = (2, 9) if dtype == "float32" else (18,)
    x, dy = draw(*tokens, 12, dtype=dtype), draw(*tokens, 24, dtype=dtype)
    shapes = (12, 40), (12, 40), (40, 24)  # in float32 hold the numbers that the products use
    weights = [widened(draw(*shape, dtype=dtype, scale=shape[0] ** -0.5)) for shape in shapes]
    y, gradients = value_and_vjp(swiglu.swiglu, dy, x, *weights)
    expected = fused_oracle.swiglu(x, *weights, dy)
    for name, a, b in zip(SWIGLU_NAMES, expected, (y, *gradients), strict=True):
        close(a, b, name, SWIGLU_ROUNDINGS, dtype=dtype)


def test_the_product_of_the_branches_is_rounded_once():
    """From bfloat16 branches bit for bit what float32 gives, rounded at the end."""
    draw = draws(5)
    gate, up = (draw(50, 8, dtype="bfloat16") for _ in range(2))

    @jax.jit
    def expected(gate, up):
        return gate / (1 + jnp.exp(-gate)) * up

    wide = np.asarray(expected(widened(gate), widened(up)))
    np.testing.assert_array_equal(jax.jit(swiglu.gated)(gate, up), wide.astype(jnp.bfloat16))


def widened(x):
    """The same numbers in float32."""
    return jax.device_put(np.asarray(x).astype(np.float32))


SIZE = 9
TOKENS = np.array([[0, 3, 3, -1], [8, -9, 9, -10], [3, 8, 2**30, 1]], np.int32)
"""Tokens of an embedding of SIZE rows: -1 and 8 are the last, -9 and 0 the first; 9, -10 and 2^30 name none."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype):
    draw = draws(5)
    table, dx = draw(SIZE, 16, dtype=dtype), draw(3, 4, 16, dtype=dtype)
    rows, (gradient,) = value_and_vjp(lambda table: embedding.embed(table, jnp.asarray(TOKENS)), dx, table)
    named = (TOKENS >= -SIZE) & (TOKENS < SIZE)
    np.testing.assert_array_equal(rows[named], np.asarray(table)[TOKENS[named] % SIZE])
    assert np.isnan(rows[~named].astype(np.float32)).all()
    expected = fused_oracle.embedding_gradient(TOKENS, dx, SIZE)
    most = np.bincount(TOKENS[named] % SIZE).max()  # each addition to a row is rounded
    close(expected, gradient, "gradient", most)
    assert not gradient[[2, 4, 5, 6, 7]].astype(np.float32).any()


@pytest.mark.parametrize(
    ("implementation", "reason", "device", "expected"),
    [
        (None, None, None, True),
        ("mosaic_gpu", None, None, True),
        ("mosaic_gpu", "a reason", None, False),
        ("mosaic_gpu", None, "no device", False),
        ("chunked", None, None, False),
        ("recurrent", None, None, False),
        (None, "a reason", None, False),
        (None, None, "no device", False),
    ],
)
def test_when_kernels_are_used(implementation, reason, device, expected, monkeypatch):
    from pallas_kernels.device import launch

    monkeypatch.setattr(launch, "device_reason", lambda *_: device)
    told = device or "a reason"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert kernels.usable(implementation, part="a part", reason=reason) is expected
    text = f"a part runs in plain JAX beside the kernels of 'mosaic_gpu': {told}"
    assert [str(w.message) for w in seen] == [text] * (implementation == "mosaic_gpu" and not expected)


def test_a_named_kernel_that_cannot_run_is_told_of(monkeypatch):
    """By every part, with its reason, and not where the name is left out."""
    from pallas_kernels.device import launch

    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    ones = lambda *shape: jax.device_put(np.ones(shape, np.float32))  # noqa: E731
    x, weight, many = ones(1, 9, 24), ones(24), ones(300, 8)
    calls = {
        "the short convolution runs in plain JAX .*: x is float32": lambda **o: short_conv(
            x, ones(24, 4), heads=1, width=8, **o
        ),
        "the short convolution runs in plain JAX .*: a bias": lambda **o: short_conv(
            x, ones(24, 4), weight, heads=1, width=8, **o
        ),
        "the norm of the stream runs .*: rows of 24": lambda **o: norms.add_norm(x, None, weight, **o),
        "the gated norm runs .*: o is float32": lambda **o: norms.gated_norm(x, x, weight, **o),
        "the SwiGLU runs .*: x is float32": lambda **o: swiglu.swiglu(
            many, ones(8, 16), ones(8, 16), ones(16, 8), **o
        ),
        "the embedding's gradient runs .*: rows of 24": lambda **o: embedding.embed(
            ones(3, 24), jax.device_put(np.arange(3)), **o
        ),
    }
    for text, call in calls.items():
        with pytest.warns(UserWarning, match=text):
            jax.eval_shape(lambda call=call: call(implementation="mosaic_gpu"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.eval_shape(call)


@pytest.mark.filterwarnings("ignore:.*runs in plain JAX")
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "chunked", "recurrent"])
def test_the_implementation_of_the_rule_changes_nothing_without_a_gpu(implementation):
    """Every part takes the rule's names. On a CPU each runs the plain form under all of them."""
    if jax.default_backend() != "cpu":
        pytest.skip("means a machine without a GPU")
    draw = draws(6)
    x, weight, kernel = draw(2, 8, 32), draw(32), draw(32, 4)
    calls = (
        lambda **o: short_conv(x, kernel, heads=1, width=8, **o),
        lambda **o: norms.add_norm(x, x, weight, **o),
        lambda **o: norms.gated_norm(x, x, weight, **o),
        lambda **o: swiglu.swiglu(x, x[0].T, x[0].T, x[0], **o),
        lambda **o: embedding.embed(kernel, jnp.arange(3), **o),
    )
    got, expected = jax.jit(
        lambda: (
            [call(implementation=implementation) for call in calls],
            [call() for call in calls],
        )
    )()
    jax.tree.map(np.testing.assert_array_equal, got, expected)
