"""The kernels around the rule on a GPU of compute capability 9.0, through the public functions: values and gradients
against float64 formulas, and the same bits in every call."""

import functools

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_kernels
from flax import nnx
from fused_harness import SUMS, SUMS_ON_A_GPU, SWIGLU_NAMES, SWIGLU_ROUNDINGS, close, compiled_vjp, draws
from layer_kernels import check_one_operation, dense_gradients

from gdn_jax import losses
from gdn_jax.layers import GatedDeltaNet, GatedDeltaNetCache, KimiDeltaAttention
from gdn_jax.models import LanguageModel, ModelConfig, generate
from gdn_jax.models.inference.recurrent import ChannelRows, HeadRows
from gdn_jax.parts import channel_gates, embedding, experts, norms, routing, swiglu
from gdn_jax.parts.short_conv import short_conv
from gdn_jax.shapes import Choice
from pallas_kernels.layer.weight_gradient import weight_gradient

pytestmark = pytest.mark.gpu

REPEATS = 50

close = functools.partial(close, sums=SUMS_ON_A_GPU)


def evaluate(f, cotangents, *primals):
    """Results and gradients of f, whose program has a kernel and which has the same bits in every call."""
    run = compiled_vjp(f)
    assert "mosaic_gpu" in run.lower(cotangents, *primals).as_text(), "no kernel in the program"
    first = run(cotangents, *primals)
    same = jax.jit(lambda a, b: jnp.stack(jax.tree.leaves(jax.tree.map(_same_bits, a, b))).all())
    assert all([bool(same(first, run(cotangents, *primals))) for _ in range(REPEATS)]), (
        "other bits in a repeat"
    )
    for primal, gradient in zip(primals, first[1], strict=True):
        assert primal is None or gradient.dtype == primal.dtype, "a gradient has not the dtype of its primal"
    return jax.device_get(first)


def _same_bits(a, b):
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    return jnp.array_equal(*(jax.lax.bitcast_convert_type(x, unsigned) for x in (a, b)))


@pytest.mark.parametrize(
    ("D", "dtype", "y_dtype"),
    [(1024, "float32", "bfloat16"), (2048, "bfloat16", "bfloat16"), (1024, "float16", None)],
)
def test_add_norm(D, dtype, y_dtype):
    draw = draws(D)
    tokens = (2, 2048)
    x, weight = draw(*tokens, D, dtype=dtype), draw(D)
    y = None if y_dtype is None else draw(*tokens, D, dtype=y_dtype)
    ds, dn = draw(*tokens, D, dtype=dtype), draw(*tokens, D, dtype=y_dtype or dtype)

    def f(x, y, weight):
        return norms.add_norm(x, y, weight, dtype=y_dtype)

    (s, n), (dx, dy, dweight) = evaluate(f, (ds, dn), x, y, weight)
    expected_s, expected_n = fused_oracle.add_norm(x, y, weight)
    close(expected_s, s, "s")
    close(expected_n, n, "n")
    # The backward pass has the stream that was rounded to the narrower dtype: every number of dweight is proportional
    # to it, dx depends on it through the mean square and a projection.
    expected_dx, expected_dweight = fused_oracle.add_norm_gradients(expected_s, weight, ds, dn)
    narrow = y_dtype or dtype
    close(expected_dx, dx, "dx", 2, dtype=narrow)
    close(expected_dweight, dweight, "dweight", dtype=narrow)
    if y is not None:
        close(expected_dx, dy, "dy", 2)


@pytest.mark.parametrize(
    ("V", "dtype", "activation"),
    [
        (64, "bfloat16", "silu"),
        (128, "float16", "silu"),
        (128, "bfloat16", "sigmoid"),
        (256, "bfloat16", "silu"),
    ],
)
def test_gated_norm(V, dtype, activation):
    draw = draws(V)
    o, gate, dy = (draw(2, 2048, 4, V, dtype=dtype) for _ in range(3))
    weight = draw(V)
    y, gradients = evaluate(lambda *x: norms.gated_norm(*x, activation=activation), dy, o, gate, weight)
    close(fused_oracle.gated_norm(o, gate, weight, activation=activation), y, "y")
    expected = fused_oracle.gated_norm_gradients(o, gate, weight, dy, activation=activation)
    for name, a, b in zip(("do", "dgate", "dweight"), expected, gradients, strict=True):
        close(a, b, name)


@pytest.mark.parametrize(("K", "dtype", "lower_bound"), [(128, "bfloat16", None), (64, "float16", -5.0)])
def test_channel_gates(K, dtype, lower_bound):
    draw = draws(K)
    f, dg, A_log, dt_bias = (
        draw(2, 2048, 5, K, dtype=dtype, scale=3.0),
        draw(2, 2048, 5, K),
        draw(5),
        draw(5, K),
    )
    g, gradients = evaluate(lambda *x: channel_gates.channel_gates(*x, lower_bound), dg, f, A_log, dt_bias)
    expected = fused_oracle.channel_gates(f, A_log, dt_bias, lower_bound, dg)
    for name, a, b in zip(("g", "df", "dA_log", "ddt_bias"), expected, (g, *gradients), strict=True):
        close(a, b, name)


def test_gated_norm_with_its_projection():
    """The projected array is rounded, or its cotangent, and then the result."""
    draw = draws(2)
    o, gate = (draw(2, 2048, 8, 128, dtype="bfloat16") for _ in range(2))
    weight, kernel = draw(128), draw(1024, 512, dtype="bfloat16", scale=2.0**-5).astype(jnp.float32)
    dresult = draw(2, 2048, 512, dtype="bfloat16")
    result, gradients = evaluate(norms.gated_norm, dresult, o, gate, weight, kernel)
    close(fused_oracle.gated_projection(o, gate, weight, kernel), result, "result", 2)
    expected = fused_oracle.gated_projection_gradients(o, gate, weight, kernel, dresult)
    for name, a, b in zip(("do", "dgate", "dweight", "dkernel"), expected, gradients, strict=True):
        close(a, b, name, 2, dtype="bfloat16")


@pytest.mark.parametrize(("width", "heads"), [(128, 8), (256, 4)])
def test_one_operation(width, heads):
    """A layer's kernels with all their channels in one array."""
    check_one_operation(evaluate, close, B=2, T=2056, heads=heads, width=width)


@pytest.mark.parametrize(
    ("rows", "F", "dtype"),
    [
        (4096, 2736, "bfloat16"),
        (4104, 2816, "float16"),
        (12288, 5632, "bfloat16"),
        (2048, 2736, "bfloat16"),
        (2048, 2816, "float16"),
    ],
)
def test_swiglu(rows, F, dtype):
    """By the kernels that multiply and, of fewer rows, by those that do not. The projections have the size of fresh
    ones, so that no sum leaves float16."""
    draw = draws(1)
    x, dy = draw(rows, 1024, dtype=dtype), draw(rows, 1024, dtype=dtype)
    shapes = (1024, F), (1024, F), (F, 1024)
    weights = [draw(*shape, dtype=dtype, scale=shape[0] ** -0.5).astype(jnp.float32) for shape in shapes]
    y, gradients = evaluate(swiglu.swiglu, dy, x, *weights)
    expected = fused_oracle.swiglu(x, *weights, dy)
    for name, a, b in zip(SWIGLU_NAMES, expected, (y, *gradients), strict=True):
        close(a, b, name, SWIGLU_ROUNDINGS, dtype=dtype)


@pytest.mark.parametrize(
    ("sizes", "parts", "dtype"),
    [
        ((65536, 2752, 1024), 3, "bfloat16"),
        ((49152, 320, 5504), 3, "bfloat16"),
        ((8008, 960, 832), 4, "float16"),
        ((40, 64, 320), 1, "bfloat16"),
    ],
)
def test_weight_gradient(sizes, parts, dtype):
    """Parts that fill the GPU; the last part shorter than the others, and rows and channels that end inside tiles."""
    (T, M, N), draw = sizes, draws(2)
    x, dy = draw(T, M, dtype=dtype), draw(T, N, dtype=dtype)
    run = functools.partial(weight_gradient, x, dy, parts=parts)
    first = run()
    assert all(bool(jnp.array_equal(first, run())) for _ in range(REPEATS)), "other bits in a repeat"
    # A tensor core adds 16 products at a time and cuts off what float32 does not hold, up to 2^-23 of the sum.
    sums = SUMS + T / parts / 16 * 2**-23
    close(fused_oracle.wide(x).T @ fused_oracle.wide(dy), first, "dw", sums=sums)


@pytest.mark.parametrize(
    ("heads", "width", "values", "dtype", "segments"),
    [
        (8, 64, 1024, "bfloat16", True),
        (4, 128, 512, "float16", False),
        (4, 128, 1024, "bfloat16", True),
        (4, 256, 1024, "bfloat16", False),
    ],
)
def test_short_conv(heads, width, values, dtype, segments):
    """Two rows that end inside a strip; segments of 1 to 300 tokens, or none."""
    B, T, D, W = 2, 2056, 2 * heads * width + values, 4
    draw, rng = draws(width), np.random.default_rng(width)
    x, weight = draw(B, T, D, dtype=dtype), draw(D, W, scale=0.5)
    shapes = ((heads, width), (heads, width), (values,))
    cotangents = (*(draw(B, T, *s, dtype=dtype) for s in shapes), draw(B, D, W - 1, dtype=dtype))
    pieces, ids = fused_oracle.whole_rows(B, T), None
    if segments:
        lengths = rng.choice([1, 2, 3, 5, 64, 127, 300], (B, T))
        ids = np.stack([np.repeat(np.arange(T), row)[:T] for row in lengths]).astype(np.int32)
        pieces = fused_oracle.pieces_of_ids(ids)
    options = dict(heads=heads, width=width)
    ids = None if ids is None else jnp.asarray(ids)
    (*parts, final), gradients = evaluate(
        lambda x, weight: short_conv(x, weight, **options, segment_ids=ids), cotangents, x, weight
    )
    expected = fused_oracle.short_conv(x, weight, cotangents=cotangents, pieces=pieces, **options)
    for name, got in zip("qkv", parts, strict=True):
        close(getattr(expected, name), got, name)
    np.testing.assert_array_equal(final, expected.final_state.astype(final.dtype))
    close(
        expected.dx, gradients[0], "dx", 2
    )  # of the kernel and of its sum with what comes through the state
    close(expected.dweight, gradients[1], "dweight")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embed(dtype):
    """Ids as in a text, where the n-th is n times rarer than the first: some thousand times, and never. Among them
    negative ones, and some that name no row."""
    V, D, shape = 8192, 1024, (4, 4096)
    draw, rng = draws(2), np.random.default_rng(2)
    odds = 1 / np.arange(1, V + 1)
    tokens = rng.choice(V, shape, p=odds / odds.sum()).astype(np.int32)
    tokens[0, :100] -= V
    tokens[1, :3] = V, -V - 1, 2**30
    table, dx = draw(V, D, dtype=dtype), draw(*shape, D, dtype=dtype)
    rows, (gradient,) = evaluate(lambda table: embedding.embed(table, jnp.asarray(tokens)), dx, table)
    named = (tokens >= -V) & (tokens < V)
    np.testing.assert_array_equal(rows[named], np.asarray(table)[tokens[named] % V])
    assert np.isnan(rows[~named].astype(np.float32)).all()
    expected = fused_oracle.embedding_gradient(tokens, dx, V)
    # A sum of n terms grows as their root, and each addition is off by 2^-24 of it: in squares n / 2^(1/2) of a term.
    most = np.bincount(tokens[named] % V, minlength=V)
    assert most.max() > 1000 and (most == 0).any()
    close(expected, gradient, "gradient", sums=2.0**-24 * most.max() ** 0.5)
    assert not gradient[most == 0].astype(np.float32).any()


@pytest.mark.parametrize("V", [32768, 50304])
def test_loss(V):
    """Several tiles, the last one not full, beside the loss in plain JAX in float32. The number of words is no
    multiple of the kernel's too."""
    draw, rng = draws(3), np.random.default_rng(3)
    T, D = 5000, 512
    x, weight = draw(T, D, dtype="bfloat16"), draw(V, D, scale=D**-0.5)
    weight = weight.astype(jnp.bfloat16).astype(jnp.float32)  # the numbers that both use
    targets = jnp.asarray(rng.integers(0, V, T), jnp.int32)

    def f(x, weight, label_weights, implementation=None):
        options = dict(label_weights=label_weights, tile=2048, implementation=implementation)
        sums = losses.linear_softmax_cross_entropy(x, weight, targets, **options)
        return sums.loss, sums.correct

    label_weights = jnp.asarray(rng.random(T), jnp.float32)
    cotangents = jnp.float32(1), jnp.float32(0)
    (loss, correct), gradients = evaluate(f, cotangents, x, weight, label_weights)
    plain = compiled_vjp(functools.partial(f, implementation="chunked"))
    (expected_loss, expected_correct), expected = plain(
        cotangents, x.astype(jnp.float32), weight, label_weights
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=SUMS)
    np.testing.assert_allclose(correct, expected_correct, rtol=SUMS)
    for name, a, b in zip(("dx", "dweight", "dlabel_weights"), expected, gradients, strict=True):
        # The exponentials, the cotangents of the logits and the result are rounded.
        close(np.asarray(a, np.float64), b, name, 3, dtype="bfloat16")


@pytest.mark.parametrize("rows", [1, 5])
def test_norm_of_a_few_rows(rows):
    """Rows that a warpgroup takes one after the other."""
    draw = draws(rows)
    x, y, weight = draw(rows, 1, 1024), draw(rows, 1, 1024, dtype="bfloat16"), draw(1024)
    call = jax.jit(functools.partial(norms.add_norm, dtype="bfloat16"))
    assert "mosaic_gpu" in call.lower(x, y, weight).as_text()
    expected_s, expected_n = fused_oracle.add_norm(x, y, weight)
    s, n = call(x, y, weight)
    close(expected_s, s, "s")
    close(expected_n, n, "n")


@pytest.mark.parametrize(("kind", "rows"), [(GatedDeltaNet, HeadRows), (KimiDeltaAttention, ChannelRows)])
@pytest.mark.parametrize("B", [1, 3, 64])
def test_tokens_of_a_layer(B, kind, rows):
    """Ten tokens in a loop, whose kernel changes states where they lie, and one whose caller keeps the cache: near
    the plain layer, and the same bits in every call."""
    sizes = dict(num_heads=2, num_v_heads=4, head_dim=128, expand_v=1.0)
    layers = [kind(256, **sizes, implementation=i, rngs=nnx.Rngs(0)) for i in (None, "recurrent")]
    layers[0] = rows(layers[0])
    draw = draws(B)
    cache = GatedDeltaNetCache(draw(B, 1024, 3), draw(B, 4, 128, 128))
    xs = draw(10, B, 1, 256)

    def run(layer):
        graphdef, params = nnx.split(layer)

        @jax.jit
        def loop(params, cache, xs):
            def step(cache, x):
                y, cache = nnx.merge(graphdef, params)(x, cache=cache)
                return cache, y

            one = step(cache, xs[0])
            return one, jax.lax.scan(step, cache, xs)

        with jax.default_matmul_precision("highest"):
            kernel = "decode_step" in loop.lower(params, cache, xs).as_text()
            return kernel, loop(params, cache, xs), loop(params, cache, xs)

    (kernel, got, again), (no_kernel, expected, _) = map(run, layers)
    assert kernel and not no_kernel
    for like, x, y in zip(*map(jax.tree.leaves, (expected, got, again)), strict=True):
        np.testing.assert_array_equal(x, y)
        close(np.asarray(like), x, "results", sums=1e-5)


@pytest.mark.parametrize("mixer", ["gated_delta_net", "kda"])
def test_generation_is_that_of_the_plain_model(mixer):
    """The likeliest tokens of float32 models with and without kernels, of one row and of several."""
    options = dict(
        mixer=mixer, vocab_size=64, hidden_size=256, num_layers=2, num_heads=2, head_dim=128, expand_v=1.0
    )
    models = [
        LanguageModel(ModelConfig(**options, dtype="float32", implementation=i), rngs=nnx.Rngs(0))
        for i in (None, "recurrent")
    ]
    prompt = np.random.default_rng(0).integers(0, 64, (3, 16)).astype(np.int32)
    with jax.default_matmul_precision("highest"):
        for rows in (prompt, prompt[:1]):
            got, expected = (np.asarray(generate(model, jnp.asarray(rows), 12)) for model in models)
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("N", [1, 100, 3000])
def test_experts(N):
    """A row, few and many; an expert of nobody; values and the derivative by kernels."""
    (D, F, E, k), draw, random = (256, 192, 16, 3), draws(N), np.random.default_rng(N)
    chosen = jnp.asarray(np.argsort(random.random((N, E - 1)), axis=1)[:, :k].astype(np.int32))
    rows, weights = draw(N, D, dtype="bfloat16"), jnp.abs(draw(N, k))
    gate_up, down = (draw(E, *s, dtype="bfloat16", scale=s[0] ** -0.5) for s in ((D, 2 * F), (F, D)))
    call = jax.jit(experts.mixture)
    assert "mosaic_gpu" in call.lower(rows, weights, chosen, gate_up, down).as_text()
    got = call(rows, weights, chosen, gate_up, down)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(rows, weights, chosen, gate_up, down), got)
    x, g, d = (fused_oracle.wide(y) for y in (rows, gate_up, down))
    want = np.zeros((N, D))
    for e in range(E):
        at, place = np.nonzero(np.asarray(chosen) == e)
        branches = x[at] @ g[e]
        y = fused_oracle.branches(branches[:, :F], branches[:, F:]) @ d[e]
        np.add.at(want, at, np.asarray(weights, np.float64)[at, place][:, None] * y)
    close(want, got, "y", 2, dtype="bfloat16")  # h is rounded, and what an expert makes of it
    dy = draw(N, D)

    @jax.jit
    def gradients(rows, weights, chosen, gate_up, down, dy):
        def mixture(rows, weights, gate_up, down):
            return experts.mixture(rows, weights, chosen, gate_up, down)

        return jax.vjp(mixture, rows, weights, gate_up, down)[1](dy)

    args = rows, weights, chosen, gate_up, down, dy
    assert gradients.lower(*args).as_text().count("expert_gradient") > 0
    got = gradients(*args)
    for _ in range(REPEATS):
        for x, y in zip(gradients(*args), got, strict=True):
            np.testing.assert_array_equal(x, y)
    # Of the cotangents, the branches, what comes back through the projection down, and what becomes of the branches.
    names = ("rows", "weights", "gate_up", "down")
    for name, x, y in zip(names, dense_gradients(*args), got, strict=True):
        close(x, y, name, 4, dtype="bfloat16")


@pytest.mark.parametrize(("N", "E", "groups", "kept"), [(1, 128, 8, 4), (100, 256, 1, 1)])
def test_routing(N, E, groups, kept):
    x, bias = row_kernels.scores(N, E)
    choice = Choice(8, groups, kept, True, 2.5)
    call = jax.jit(functools.partial(routing.choose, choice=choice))
    assert "mosaic_gpu" in call.lower(x, bias).as_text()
    weights, chosen = call(x, bias)
    want, places = routing.plain_choose(choice, x, bias)
    np.testing.assert_array_equal(chosen, places)
    close(want, weights, "weights", 0)
