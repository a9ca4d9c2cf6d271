"""Kernels of one row, interpreted: the experts that it is multiplied by, how they are chosen, and its products."""

import functools
import re

import fused_oracle
import jax
import jax.numpy as jnp
import layer_kernels
import numpy as np
import pytest
import row_kernels
from device_arrays import put
from fused_harness import close, draws
from layer_kernels import INTERPRET

from gdn_jax.parts import delta_layer as fused_delta_layer
from gdn_jax.parts import dense_stream as dense
from gdn_jax.parts import few_product, kernels, latent_token
from gdn_jax.parts import routing as plain_routing
from gdn_jax.parts.delta_layer import Gates
from gdn_jax.parts.experts import SharedExpert
from gdn_jax.parts.row_product import heads_product, stream_product
from gdn_jax.shapes import Choice, Convolution
from pallas_kernels.rows import (
    attention_rows,
    dense_stream,
    latent_row,
    parts_norm,
    routed_stream,
    routing,
    row_choice,
    row_product,
)
from pallas_kernels.tools.calls import CALLS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "choice", "config"),
    [
        (dict(E=64, D=256, F=128, S=128, P=2), Choice(4, 4, 2, True, 2.5), (5, 2, 2, 2)),
        (
            dict(E=64, D=512, F=128, S=128, P=1, gate=True, router="bfloat16"),
            Choice(3, 1, 1, True, 1.0, "softmax"),
            (9, 2, 2, 2),
        ),
        pytest.param(
            dict(E=64, D=1024, F=128, S=256, P=3),  # two warpgroups make the row
            Choice(3, 1, 1, False, 1.5),
            (16, 3, 1, 3),
            marks=pytest.mark.crossed,
        ),
    ],
    ids=["of some groups", "of a softmax", "of all"],
)
def test_a_stream_chooses_its_experts(sizes, choice, config):
    """Norm, router, choice and experts in one kernel of three stages: rings wrap, and CTAs go on from one tile of
    columns to the next."""
    args, s, want = row_kernels.routed(**sizes, choice=choice)
    options = dict(choice=choice, eps=1e-6, config=routed_stream.Config(*config), interpret=INTERPRET)
    stream, z = routed_stream.routed_stream(*args, **options)
    close(s, stream, "s")
    close(want, jnp.sum(z, axis=0, keepdims=True), "z")


@pytest.mark.parametrize(
    ("D", "E", "F", "choice"),
    [
        (2048, 256, 512, Choice(8, 1, 1, True, 1.0, "softmax")),
        (2048, 512, 512, Choice(10, 1, 1, True, 1.0, "softmax")),
        (3072, 256, 1024, Choice(8, 1, 1, True, 1.0, "softmax")),
        (1536, 128, 512, Choice(8, 8, 4, True, 2.5)),
        (2304, 256, 1024, Choice(8, 1, 1, True, 2.446)),
    ],
    ids=[
        "qwen3.5-35b-a3b",
        "qwen3-next-80b-a3b",
        "qwen3.5-122b-a10b",
        "ling-3.0-tiny",
        "kimi-linear-48b-a3b",
    ],
)
def test_mixtures_of_every_published_size_are_one_kernel(D, E, F, choice):
    """Those of a row, on cards of all numbers of multiprocessors; others are refused by name."""

    def reason(n, D=D, E=E, choice=choice):
        x, gate_up = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1, D), (E, D, 2 * F)))
        return routed_stream.check_supported(x, gate_up, F, choice, n)

    assert [reason(n) for n in (108, 114, 132, 148)] == [None] * 4
    softmax = Choice(4, 1, 1, True, 1.0, "softmax")
    for said, refused in [
        ("rows up to 4096", dict(D=5120)),
        ("4 groups of a softmax", dict(choice=softmax._replace(groups=4, kept_groups=2))),
        ("96 experts", dict(E=96)),
    ]:
        assert said in reason(132, **refused)


def test_experts_whose_tiles_just_do_not_fit():
    """Lowered for a GPU, that checks shared memory: with what is set aside for reductions one tile less fits."""
    D, E, F, S = 3072, 256, 128, 512
    choice = Choice(8, 1, 1, False, 1.0, "softmax")
    sizes = routed_stream.Sizes(D, F, 8, S, E, E + 1)
    fitting = routed_stream._fitting(sizes, routed_stream.Config(132), choice, jnp.bfloat16)
    assert fitting is not None and fitting.down_slots == 1

    def call(x, y, norm, router, gate_up, down, *shared):
        options: dict = dict(choice=choice, eps=1e-6)
        return routed_stream.routed_stream(x, y, norm, router, None, gate_up, down, shared, **options)

    shapes = (1, D), (2, D), (D,), (E + 1, D), (E, D, 2 * F), (E, F, D), (D, S), (D, S), (S, D)
    traced = jax.jit(call).trace(*(jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((512, 300, 2), (17, 8, 2)),  # the last slice and its last tiles begin with rows of those before
        pytest.param(
            (512, 88, 0), (17, 16, 4, 1), marks=pytest.mark.slow
        ),  # a slot each; CTAs without a slice
        ((512, 1083, 1), (9, 8, 2)),  # more numbers of h than threads, and of columns than a warp has
        pytest.param((1024, 700, 3), (34, 32), marks=pytest.mark.crossed),
        pytest.param((2560, 150, 1), (85, 16, 4, 2), marks=pytest.mark.crossed),  # two tiles to a row
    ],
)
def test_a_stream_and_its_swiglu(sizes, config):
    """Sum, norm, branches and projection down in one kernel of two stages."""
    args, s, want = row_kernels.dense(*sizes)
    options: dict = dict(eps=1e-6, config=dense_stream.Config(*config), interpret=INTERPRET)
    stream, z = dense_stream.dense_stream(*args, **options)
    close(s, stream, "s")
    close(want, z, "z", 0)


def test_what_a_dense_stream_takes():
    """Multiprocessors of several cards; widths and dtypes that it refuses, by name."""

    def reason(ctas, D=1024, F=3584, dtype="bfloat16"):
        shapes = (1, D), (2 * F, D), (F, D)
        return dense_stream.check_supported(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes), ctas)

    assert [reason(ctas) for ctas in (108, 114, 132, 144, 148)] == [None] * 5
    assert [reason(132, D, F) for D, F in ((2560, 9216), (4096, 12288), (5120, 17408))] == [None] * 3
    for said, arguments in [
        ("12 multiprocessors", (12,)),
        ("rows of 8192; the kernel takes multiples of 512 up to 6912", (108, 8192)),
        ("rows of 768", (132, 768)),
        ("an inner width of 128; the kernel takes 385 to 31744 on 132", (132, 1024, 128)),
        ("weights of float32", (132, 1024, 3584, "float32")),
    ]:
        assert reason(*arguments).startswith(said)


@pytest.mark.parametrize(
    ("E", "choice"),
    [
        (64, Choice(4, 4, 2, True, 2.446)),
        pytest.param(128, Choice(8, 8, 4, True, 2.5), marks=pytest.mark.slow),
        pytest.param(64, Choice(4, 1, 1, False, 1.0), marks=pytest.mark.slow),
        pytest.param(256, Choice(8, 4, 2, True, 2.446), marks=pytest.mark.slow),
    ],
)
def test_experts_are_chosen_as_by_sorting(E, choice):
    """Also among equal scores, the first first, and NaN before all numbers, in every form; with sums below 0."""
    x, bias = row_kernels.scores(5, E)
    scores = np.array(x)
    scores[3], scores[4, E - 5] = np.nan, np.nan
    x, bias = put(scores), bias - 2
    weights, chosen = routing.choose(x, bias, choice, interpret=INTERPRET)
    by_sorting, by_counting = (
        jax.jit(functools.partial(plain_routing.plain_choose, choice, counts=counts))(x, bias)
        for counts in (False, True)
    )
    of_a_row = jax.jit(lambda x: row_choice._choose(jax.nn.sigmoid(x), jax.nn.sigmoid(x) + bias, choice)[0])
    for places in (by_sorting[1], by_counting[1], [of_a_row(row) for row in x]):
        np.testing.assert_array_equal(chosen, places)
    assert all(len(set(row)) == choice.per_token for row in np.asarray(chosen).tolist())
    np.testing.assert_array_equal(chosen[3], np.arange(choice.per_token))
    assert chosen[4, 0] == E - 5
    np.testing.assert_array_equal(np.isnan(weights), np.isnan(by_sorting[0]))
    close(by_sorting[0][:3], weights[:3], "weights")


@pytest.mark.parametrize(
    ("rows", "dtype"), [(4, "bfloat16"), pytest.param(8, "float32", marks=pytest.mark.slow)]
)
def test_products_of_a_stream(rows, dtype):
    args, s, want = row_kernels.stream(512, 40, dtype)
    options = dict(config=row_product.Config(rows, 3), interpret=INTERPRET)
    got = row_product.stream_product(*args, eps=1e-6, dtype=jnp.float32, **options)
    for name, expected, result in zip(("s", "product"), (s, want), got, strict=True):
        close(expected, result, name)


def test_products_of_a_stream_in_parts():
    """A stream that is added up from parts, by two warpgroups that share tiles; others know what is read next."""
    (x, _, norm, weight), *_ = row_kernels.stream(256, 160, "bfloat16")
    draw = draws(4)
    y, ahead = draw(3, 256), (weight, draw(3, 5), draw(128))  # a hint, of any shape
    options = dict(config=row_product.Config(8, 3, 2), ahead=ahead, interpret=INTERPRET)
    stream, got = row_product.stream_product(x, y, norm, weight, eps=1e-6, dtype=jnp.float32, **options)
    s, n = fused_oracle.add_norm(x, jnp.sum(y, axis=0), norm, 1e-6)
    close(s, stream, "s")
    close(n @ fused_oracle.wide(weight).T, got, "product", sums=row_kernels.IN_TURN)


@pytest.mark.parametrize(("B", "D", "P"), [(3, 1024, 8), pytest.param(2, 2560, 2, marks=pytest.mark.slow)])
def test_norms_of_parts(B, D, P):
    """One part to each of some warpgroups, and several to one."""
    draw = draws(2)
    x, y, norm = draw(B, D), draw(P, B, D), draw(D)
    s, n = fused_oracle.add_norm(x, np.sum(np.asarray(y, np.float64), axis=0), norm, 1e-6)
    got = parts_norm.parts_norm(x, y, norm, eps=1e-6, dtype=jnp.float32, interpret=INTERPRET)
    close(s, got[0], "s")
    close(n, got[1], "n")


@pytest.mark.parametrize(("N", "D", "F"), [(8, 128, 64), (24, 256, 192)])
def test_the_product_of_few_rows(N, D, F, monkeypatch):
    """A CTA of its own for each 64 columns; a ring that holds all of the sum."""
    calls, draw = layer_kernels.interpret(monkeypatch), draws(N)
    x, weight = draw(N, 1, D, dtype="bfloat16"), draw(F, D, dtype="bfloat16", scale=D**-0.5)
    with kernels.trusted():
        assert few_product.takes(x, weight) and not few_product.takes(x[1:], weight)
    y = few_product.few_product(x, weight)
    assert calls == {"few_product": 1}
    close(fused_oracle.wide(x) @ fused_oracle.wide(weight).T, y, "y", dtype="bfloat16")


def test_products_of_heads():
    (o, channels, *args), want = row_kernels.heads(4, 128, 256, 24, "sigmoid")
    options = dict(config=row_product.Config(4, 2), dtype=jnp.float32, interpret=INTERPRET)
    z = channels.reshape(-1, 128)
    close(want, row_product.heads_product(o, z, *args, eps=1e-6, activation="sigmoid", **options), "y")


@pytest.mark.parametrize(
    ("N", "G", "P", "gated"), [(2, 2, 3, True), pytest.param(3, 1, 1, False, marks=pytest.mark.slow)]
)
def test_products_of_attended_heads(N, G, P, gated):
    """Parts are added up; a part that saw no token has no weight."""
    parts, z, weight, _, want = row_kernels.attended(N, G, P, 256, 24, gated)
    options: dict = dict(group=G, config=row_product.Config(8, 3), interpret=INTERPRET)
    parts = attention_rows.Parts(*parts)
    got, length = row_product.attended_product(parts, put([7], jnp.int32), z, weight, **options)
    close(want, got, "y", dtype="bfloat16")
    assert length == 8


@pytest.mark.slow
@pytest.mark.parametrize(("H", "C"), [(8, 256), pytest.param(16, 512, marks=pytest.mark.crossed)])
def test_latent_attention_of_a_token(H, C):
    """By three CTAs, whose tokens go around their shared memory; with no token before it; and without a slot left."""
    _, static, *_ = row_kernels.latent(H, C, 16, 24, 0)
    places = latent_row.Places(static.pop("kv"), static.pop("gate"))
    call = functools.partial(
        latent_row.latent_row, places=places, config=latent_row.Config(3, 1), interpret=INTERPRET, **static
    )
    for length in (21, 0):
        args, _, y, k_r, c = row_kernels.latent(H, C, 16, 24, length)
        got, k, v, after = call(*args)
        assert after == length + 1
        close(y, got, "y")
        *_, old_k, old_v, _ = args
        for name, new, old, want in (("k", k, old_k, k_r), ("c", v, old_v, c)):
            close(want, new[0, length, 0], name)
            row_kernels.same_bits(new.at[0, length].set(0), old.at[0, length].set(0))
    assert jnp.isnan(call(*args[:-1], put([24], jnp.int32))[0]).all()


@pytest.mark.slow
def test_derivative_of_the_weights_of_a_row(small):
    """That of sigmoids over their sum, where a kernel chooses."""
    (scores, bias), choice, dw = row_kernels.scores(2, 64), Choice(4, 1, 1, True, 1.5), draws(0)(2, 4)

    def formula(scores):
        sigmoids = jax.nn.sigmoid(scores)
        _, places = jax.lax.top_k(sigmoids + bias, choice.per_token)
        w = jnp.take_along_axis(sigmoids, places, axis=1)
        return jnp.sum(dw * choice.factor * w / jnp.sum(w, axis=1, keepdims=True))

    want = jax.jit(jax.grad(formula))(scores)
    got = jax.grad(lambda x: jnp.sum(dw * plain_routing.choose(x, bias, choice)[0]))(scores)
    assert small == {"choose": 1}
    close(fused_oracle.wide(want), got, "scores")


def latent_call(channels, q, norm, _, *arrays):
    return latent_token.latent_token(
        latent_token.Latents(0, None, 1.0, 1e-6, 1e4), channels, q, norm, *arrays
    )


CHOICE = Choice(2, 1, 1, True, 1.0)
OF_A_ROW = {
    "delta_layer": lambda: (fused_delta_layer.delta_layer, row_kernels.delta_layer(2, 8, 32, 3)[0]),
    "dense_stream": lambda: (
        functools.partial(dense.dense_stream, eps=1e-6),
        row_kernels.dense(128, 64, 2)[0],
    ),
    "routed_stream": lambda: (
        lambda *args: plain_routing.routed_stream(*args[:-1], SharedExpert(*args[-1]), CHOICE, eps=1e-6),
        row_kernels.routed(8, 128, 64, 64, 2, CHOICE)[0],
    ),
    "stream_product": lambda: (
        functools.partial(stream_product, eps=1e-6, dtype=jnp.float32),
        row_kernels.stream(256, 8, "float32")[0],
    ),
    "heads_product": lambda: (
        functools.partial(heads_product, eps=1e-6, activation="silu"),
        row_kernels.heads(4, 64, 64, 8, "silu")[0],
    ),
    "latent_token": lambda: (latent_call, row_kernels.latent(2, 16, 8, 8, 3)[0]),
}
"""Operations of a row, and their arguments."""


@pytest.mark.parametrize("name", OF_A_ROW)
def test_kernels_of_a_row_have_no_derivative(name):
    """Whoever asks for one is told what to differentiate."""
    call, (x, *args) = OF_A_ROW[name]()

    def loss(x):
        return sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(call(x, *args)))

    with pytest.raises(NotImplementedError, match=r"differentiate model\(...\) itself"):
        jax.eval_shape(jax.grad(loss), x)


def delta_layer_call(x, y, norm, weight, window, filters, *others):
    """A layer."""
    state, output_norm, output, A_log, dt_bias = others
    layer = fused_delta_layer.Layer(
        *(norm, weight, Convolution(window, filters, None), A_log, dt_bias, state), output_norm, output
    )
    options = Gates(16, 6144, 8192, lower_bound=-5.0), fused_delta_layer.Options(1e-6, 1e-6, "sigmoid")
    return fused_delta_layer.delta_layer(x, y, layer, *options)


def routed_stream_call(*args):
    """A mixture."""
    *args, gate, up, shared_down = args
    options = SharedExpert(gate, up, shared_down), Choice(8, 8, 4, True, 2.5)
    return plain_routing.routed_stream(*args, *options, eps=1e-6)


def dense_stream_call(*args):
    """A dense half."""
    return dense.dense_stream(*args, eps=1e-6)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (delta_layer_call, "layer of a token"),
        (routed_stream_call, "experts that a row chooses"),
        (dense_stream_call, "second half of a row"),
    ],
)
def test_no_two_kernels_share_a_barrier(call, name):
    """A compiled function that is called twice in a program, with nothing between the calls that orders them: the
    kernel is there once, and XLA knows that it changes its words, so that each call has an array of them."""
    compiled = jax.jit(call)
    traced = jax.jit(lambda *args: [compiled(*args) for _ in range(2)]).trace(*CALLS[name].positional)
    (kernel,) = re.findall(r"custom_call @mosaic_gpu.*", traced.lower(lowering_platforms=("cuda",)).as_text())
    operands = re.search(r": \((.*)\) -> ", kernel).group(1).split(", ")
    (words,) = (n for n, operand in enumerate(operands) if re.fullmatch(r"tensor<\d+x32xi32>", operand))
    assert f"operand_index = {words}," in kernel[kernel.index("output_operand_aliases") :]
