"""GatedDeltaNet against a NumPy float64 layer, and: any cutting, packing or padding equals one pass."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_oracle import assert_row, call, layer_oracle, random_cache, row_of
from small_layers import F32, D, empty_cache, inputs, make
from tolerances import FLOAT32, assert_close

# Gradients likewise.
F32_GRAD = FLOAT32["dk"]


# bfloat16 against float32: about ten roundings of 2^-9 (projections, convolution, normalised q and k, o, the gated
# norm, y), which add in squares: 3.2 * 2e-3, with a factor of 3 for sums that cancel.
BF16 = 2e-2


@pytest.mark.parametrize(
    "options",
    [
        {"implementation": "chunked"},
        pytest.param(
            {
                "num_v_heads": None,
                "conv_bias": True,
                "conv_size": 2,
                "allow_neg_eigval": True,
                "write_start": 0.1,
            },
            marks=pytest.mark.slow,
        ),
        {"use_short_conv": False, "use_gate": False, "expand_v": 1.0},
    ],
    ids=["gva", "neg_eigval", "plain"],
)
def test_against_float64(options):
    layer = make(**{"implementation": "recurrent", **options})
    if layer.conv_bias is not None:
        layer.conv_bias[...] = jax.device_put(inputs(layer.conv_dim))
    layer.o_norm.weight[...] = jax.device_put(1 + 0.3 * inputs(layer.head_v_dim))
    x = inputs(2, 9, D)
    cache = random_cache(layer, 2)
    y, new = call(layer, x, cache=cache)
    assert y.shape == (2, 9, D) and new.state.dtype == jnp.float32
    for n in range(2):
        assert_row(layer, x[n], row_of(cache, n), y[n], row_of(new, n), f"row {n}")
    swapped, new_swapped = call(layer, x[::-1], cache=row_of(cache, slice(None, None, -1)))
    assert_close(y[::-1], swapped, F32, "batch in another order")
    assert_close(new.state[::-1], new_swapped.state, F32, "batch in another order")


@pytest.fixture(scope="module")
def layer():
    """Most tests of the layer take the form of the rule that compiles fast; those below with "chunked" the other."""
    return make(implementation="recurrent")


@pytest.mark.parametrize(
    "implementation, lengths",
    [
        ("chunked", (34, 34, 1, 1)),
        pytest.param("recurrent", (2, 65, 1, 1, 1), marks=pytest.mark.slow),
    ],  # a cut inside a chunk; shorter than the filter
)
def test_prefill_in_pieces_then_steps(implementation, lengths):
    layer = make(implementation=implementation, allow_neg_eigval=True)
    x = inputs(2, 70, D)
    whole = call(layer, x)
    empty = empty_cache(layer, 2)
    pieces, cache, start = [], empty, 0
    for length in lengths:
        y, cache = call(layer, x[:, start : start + length], cache=cache)
        pieces.append(y)
        start += length
    assert_close(whole[0], np.concatenate(pieces, axis=1), F32, "y")
    assert_close(whole[1].conv, cache.conv, F32, "conv")
    assert_close(whole[1].state, cache.state, F32, "state", axis=1)
    for row in range(2):
        assert_row(layer, x[row], row_of(empty, row), whole[0][row], row_of(whole[1], row))


def test_step_without_convolution():
    layer = make(use_short_conv=False, implementation="recurrent")
    x = inputs(2, 3, D)
    empty = empty_cache(layer, 2)
    cache, ys = empty, []
    for t in range(3):
        y, cache = call(layer, x[:, t : t + 1], cache=cache)
        ys.append(y)
    y = np.concatenate(ys, axis=1)
    for row in range(2):
        assert_row(layer, x[row], row_of(empty, row), y[row], row_of(cache, row))


# The tokens of each row: padding on the left, the right, both. With W - 1 = 3 there are rows shorter than the filter,
# some of one token and some of none.
RUNS = [
    (0, 9),
    (4, 9),
    (7, 9),
    (8, 9),
    (9, 9),
    (0, 5),
    (0, 2),
    (0, 1),
    (0, 0),
    (1, 9),
    (3, 8),
    (4, 6),
    (5, 6),
]


@pytest.mark.parametrize("cached, implementation", [(False, "recurrent"), (True, "chunked")])
def test_padding(cached, implementation):
    layer = make(implementation=implementation)
    N = len(RUNS)
    x = inputs(N, 9, D)
    mask = np.zeros((N, 9), bool)
    for row, (begin, end) in enumerate(RUNS):
        mask[row, begin:end] = True
    x[~mask] = np.nan  # padding may hold anything
    cache = random_cache(layer, N) if cached else empty_cache(layer, N)
    y, new = call(layer, x, mask=mask, cache=cache if cached else None)
    assert np.all(np.asarray(y)[~mask] == 0)
    for row, (begin, end) in enumerate(RUNS):
        got = row_of((y[:, begin:end], new), row)
        assert_row(layer, x[row, begin:end], row_of(cache, row), *got, f"row {row}")


def test_steps_after_right_padding(layer):
    """Prefill of unequal prompts, then steps with one row finished: all as if each row had run alone."""
    x, more = inputs(3, 6, D), inputs(3, 3, D, seed=5)
    lengths = [6, 4, 1]
    mask = np.arange(6) < np.array(lengths)[:, None]
    _, cache = call(layer, x, mask=mask)
    ys = []
    for t in range(3):
        live = np.array([[True], [t < 2], [True]])
        y, cache = call(layer, more[:, t : t + 1], cache=cache, mask=live)
        ys.append(y)
    y = np.concatenate(ys, axis=1)
    for row, n in enumerate(lengths):
        steps = 2 if row == 1 else 3
        alone = np.concatenate([x[row, :n], more[row, :steps]])
        want, conv, state = layer_oracle(layer, alone, row_of(empty_cache(layer, 3), row))
        assert_close(want[n:], y[row, :steps], F32, f"row {row} y")
        assert_close(conv, cache.conv[row], F32, f"row {row} conv")
        assert_close(state, cache.state[row], F32, f"row {row} state")
    assert np.all(np.asarray(y[1, 2]) == 0)


def test_cu_seqlens_equals_separate():
    layer = make(implementation="chunked")
    lengths = [5, 0, 1, 2, 70, 0]
    cu = np.cumsum([0, *lengths])
    x = inputs(1, cu[-1] + 2, D)
    x[:, cu[-1] :] = np.nan
    cache = random_cache(layer, len(lengths))
    y, new = call(layer, x, cu_seqlens=cu.astype(np.int32), cache=cache)
    assert np.all(np.asarray(y[:, cu[-1] :]) == 0)
    for n, length in enumerate(lengths):
        s = slice(cu[n], cu[n + 1])
        past, got = row_of(cache, n), row_of(new, n)
        if length == 0:
            np.testing.assert_array_equal(past.state, got.state)
            np.testing.assert_array_equal(past.conv, got.conv)
        assert_row(layer, x[0, s], past, y[0, s], got, f"sequence {n}")


@pytest.mark.parametrize("padded, implementation", [(False, "recurrent"), (True, "chunked")])
def test_segment_ids_equal_separate(padded, implementation):
    """With padding on both sides the first segment still takes the cache and the last one still leaves it."""
    layer = make(implementation=implementation)
    ids = np.array([[1, 1, 4, 4, 4, 4, 4, 1, 1, 2, 2, 2], [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 3]], np.int32)
    x = inputs(2, 12, D)
    cache = random_cache(layer, 2)
    begin, end = (1, 11) if padded else (0, 12)
    mask = np.broadcast_to((np.arange(12) >= begin) & (np.arange(12) < end), (2, 12))
    y, new = call(layer, x, segment_ids=ids, cache=cache, mask=mask if padded else None)
    for row in range(2):
        cuts = [begin, *(np.flatnonzero(np.diff(ids[row, begin:end])) + 1 + begin), end]
        past, zero = row_of(cache, row), row_of(empty_cache(layer, 2), row)
        for start, stop in itertools.pairwise(cuts):
            want, *last = layer_oracle(layer, x[row, start:stop], past)
            assert_close(want, y[row, start:stop], F32, f"row {row} from {start}")
            past = zero
        assert_close(last[0], new.conv[row], F32, "conv")
        assert_close(last[1], new.state[row], F32, "state")


@pytest.mark.slow
def test_gradients():
    """Every parameter gets one, padding gets none, and a cut in two pieces has the gradients of one pass."""
    layer = make(implementation="recurrent")  # the gradients of the rule are not the matter here
    x, dy, mask = inputs(2, 8, D), jax.device_put(inputs(2, 8, D, seed=3)), np.ones((2, 8), bool)
    x[0, :2], mask[0, :2] = np.nan, False
    mask = jax.device_put(mask)
    graphdef, params = nnx.split(layer)

    def loss(params, x, cut):
        layer, cache, total = nnx.merge(graphdef, params), None, 0.0
        for s in (slice(0, cut), slice(cut, 8)):
            y, cache = layer(x[:, s], cache=cache, mask=mask[:, s], return_cache=True)
            total = total + jnp.vdot(y, dy[:, s])
        return total

    def whole(params, x):
        y, _ = nnx.merge(graphdef, params)(x, mask=mask)
        return jnp.vdot(y, dy)

    pieces = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)(params, x, 3)
    once = jax.device_get(jax.jit(jax.grad(whole, argnums=(0, 1)))(params, x))
    paths = jax.tree_util.tree_flatten_with_path(once)[0]
    assert len(paths) == 7 + 4 + 1
    for (path, want), got in zip(paths, jax.tree.leaves(pieces), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(want).all() and np.abs(want).max() > 0, name
        assert_close(want, got, F32_GRAD, name)
    assert np.all(np.asarray(once[1][0, :2]) == 0)


@pytest.mark.slow
def test_bfloat16():
    layer = make(dtype=jnp.bfloat16, implementation="chunked")
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    x = inputs(1, 8, D)
    want = layer_oracle(layer, x[0], row_of(empty_cache(layer, 1), 0))
    y, cache = call(layer, x)
    assert y.dtype == cache.conv.dtype == jnp.bfloat16 and cache.state.dtype == jnp.float32
    assert_close(want[0], y[0].astype(np.float32), BF16, "y")
    assert_close(want[2], cache.state[0], BF16, "state")
    steps, ys = empty_cache(layer, 1), []
    assert steps.conv.dtype == cache.conv.dtype and steps.state.dtype == cache.state.dtype
    for t in range(8):
        token, steps = call(layer, x[:, t : t + 1], cache=steps)
        ys.append(token[0].astype(np.float32))
    assert_close(want[0], np.concatenate(ys), BF16, "y of steps")
    half = make(param_dtype=jnp.bfloat16)
    assert half.A_log.dtype == half.dt_bias.dtype == jnp.float32
    assert half.q_proj.kernel.dtype == half.conv_weight.dtype == jnp.bfloat16


def test_a_cache_of_another_type(layer):
    cache = tuple(empty_cache(layer, 1))
    with pytest.raises(ValueError, match="cache: expected a RecurrentCache, got tuple"):
        layer._check_call(jax.device_put(inputs(1, 1, layer.hidden_size)), cache, None, None, None, False)


def test_a_cache_keeps_its_dtype(layer):
    """A cache in bfloat16, the state too, comes back in bfloat16: a loop may carry it. A new one has what is asked of
    the convolution's part."""
    new = jax.eval_shape(lambda: layer.init_cache(2, jnp.bfloat16))
    assert (new.conv.dtype, new.state.dtype) == (jnp.bfloat16, jnp.float32)
    past = jax.tree.map(lambda c: jnp.asarray(c, jnp.bfloat16), random_cache(layer, 2))
    x = inputs(2, 3, D)
    for length in (1, 3):
        new = jax.eval_shape(lambda x, past: layer(x, cache=past)[1], x[:, :length], past)
        assert new.state.dtype == new.conv.dtype == jnp.bfloat16, length


def test_no_cache_unless_asked(layer):
    x = jax.device_put(inputs(1, 3, D))
    cache = empty_cache(layer, 1)
    for options, kept in (({}, False), ({"return_cache": True}, True), ({"cache": cache}, True)):
        new = jax.eval_shape(lambda x, options=options: layer(x, **options)[1], x)
        assert (new is not None) == kept
        if kept:  # and of the same shapes and dtypes as the empty one
            assert jax.eval_shape(lambda: cache) == new
