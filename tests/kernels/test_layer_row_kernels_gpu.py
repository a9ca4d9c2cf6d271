"""The kernels of one row on a GPU of compute capability 9.0, through the public functions: near float64 formulas,
and the same bits in every call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_kernels
from device_arrays import put
from flax import nnx
from fused_harness import ROUNDING, SUMS_ON_A_GPU, close

from gdn_jax.models import ExpertsConfig, LanguageModel, ModelConfig, generate
from gdn_jax.models.config import LatentAttentionConfig, SigmoidRouting
from gdn_jax.models.experts import Experts
from gdn_jax.models.inference import program
from gdn_jax.models.inference.dense import BlockDenseRow, DenseRow
from gdn_jax.models.inference.experts import ExpertRow
from gdn_jax.models.presets import PRESETS
from gdn_jax.parts import (
    delta_layer,
    dense_stream,
    experts,
    latent_token,
    routing,
    row_product,
)
from gdn_jax.shapes import Choice
from pallas_kernels.device.grid_barrier import new_words
from pallas_kernels.rows.attention_rows import Parts
from pallas_kernels.rows.row_product import attended_product
from pallas_kernels.tools.compiling import lowering_for

pytestmark = pytest.mark.gpu

REPEATS = 50

close = functools.partial(close, sums=SUMS_ON_A_GPU)


@pytest.mark.parametrize(
    ("E", "D", "F", "choice", "gate"),
    [
        (128, 1536, 512, Choice(8, 8, 4, True, 2.5), {}),
        (256, 1536, 256, Choice(6, 1, 1, False, 1.5), {}),
        (256, 2048, 128, Choice(8, 1, 1, True, 1.0, "softmax"), dict(gate=True, router="bfloat16")),
        (512, 2048, 128, Choice(10, 1, 1, True, 1.0, "softmax"), dict(gate=True, router="bfloat16")),
        (256, 3072, 128, Choice(8, 1, 1, False, 1.0, "softmax"), dict(gate=True, router="bfloat16")),
        (64, 1024, 512, Choice(3, 1, 1, True, 2.0), dict(gate=True)),
    ],
    ids=["ling-3.0-tiny", "sigmoids", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "122b-a10b", "gated sigmoids"],
)
def test_a_stream_chooses_its_experts(E, D, F, choice, gate):
    """At the sizes of published models, but for inner columns, of which most have fewer."""
    call = jax.jit(functools.partial(routing.routed_stream, choice=choice, eps=1e-6))
    for seed in range(4):
        args, s, want = row_kernels.routed(E, D, F, 512, 1 + seed, choice, seed, **gate)
        args = *args[:-1], experts.SharedExpert(*args[-1])
        stream, z = call(*args)
        for _ in range(REPEATS):
            np.testing.assert_array_equal(call(*args)[1].sum(0), z.sum(0))
        close(s, stream, "s")
        close(want, z.sum(0), "z", 0)


@pytest.mark.parametrize(
    ("D", "F", "P"),
    [(1024, 2736, 1), (1024, 3584, 16), (2560, 9216, 3), (2048, 5632, 0), (5120, 17408, 1)],
)
def test_a_stream_and_its_swiglu(D, F, P):
    """At the widths of the 0.4B and 1.3B presets and of Qwen3.5 0.8B, 4B and 27B."""
    args, s, want = row_kernels.dense(D, F, P)
    assert dense_stream.takes(args[0], *args[-2:], None)
    call = jax.jit(functools.partial(dense_stream.dense_stream, eps=1e-6))
    stream, z = call(*args)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(*args)[1], z)
    close(s, stream, "s")
    close(want, z, "z", 0)


@pytest.mark.parametrize(("D", "F"), [(1024, 3584), (2560, 9216), (5120, 17408), (512, 1540)])
def test_codes_and_their_scales(D, F):
    """Weights in 8 bits at the widths of Qwen3.5 0.8B, 4B and 27B, and where the last slice begins earlier."""
    args, s, want = row_kernels.dense_codes(D, F, 2)
    assert dense_stream.takes(args[0], *args[3:5], None)
    call = jax.jit(functools.partial(dense_stream.dense_stream, eps=1e-6))
    stream, z = call(*args)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(*args)[1], z)
    close(s, stream, "s")
    close(want, z, "z", 0)


def test_independent_kernels_of_one_program_do_not_meet():
    """Kernels with barriers over all CTAs have words of their own to meet at: two calls of a compiled chain in one
    program are those alone."""
    choice = Choice(4, 1, 1, True, 1.0)

    def chain(args):
        x, y, *others, shared = args
        for _ in range(3):
            shared = experts.SharedExpert(*shared)
            x, y = routing.routed_stream(x, y, *others, shared, choice, eps=1e-6)
        return x, y.sum(0)

    chains = [row_kernels.routed(64, 1536, 512, 512, 1, choice, seed)[0] for seed in range(2)]
    alone = jax.jit(chain)
    want = [alone(args) for args in chains]
    together = jax.jit(lambda chains: [alone(args) for args in chains])
    for _ in range(REPEATS):
        for found, expected in zip(jax.tree.leaves(together(chains)), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(found, expected)


LAYERS = {
    "ling-3.0-tiny": dict(H=16, D=1536, parts=11),
    "0.4b": dict(H=8, D=1024, parts=8, decay=row_kernels.HEADS),
    "qwen3.5-0.8b": dict(H=16, D=1024, parts=16, decay=row_kernels.HEADS),
    "1.3b": dict(H=16, D=2048, parts=1, decay=row_kernels.HEADS),
    "qwen3.5-4b": dict(H=16, D=2560, parts=32, decay=row_kernels.HEADS, HV=32),
    "qwen3-next": dict(H=16, D=2048, parts=0, decay=row_kernels.HEADS, HV=32, bias=True, doubled=True),
    "qwen3.5-0.8b, codes": dict(H=16, D=1024, parts=1, decay=row_kernels.HEADS, codes=True),
    "qwen3.5-2b, codes": dict(H=16, D=2048, parts=1, decay=row_kernels.HEADS, codes=True, doubled=True),
    "qwen3.5-4b, codes": dict(H=16, D=2560, parts=32, decay=row_kernels.HEADS, HV=32, bias=True, codes=True),
    "9 heads": dict(H=9, D=1536, parts=11),
    "8 heads, of channels": dict(H=8, D=1024, parts=1, bias=True),
    "16 heads, of channels, wide": dict(H=16, D=2048, parts=1),
}
"""Name -> arguments of `row_kernels.delta_layer`."""


def layer_of(name: str, seed: int = 0):
    """Its results with heads of 128, for arguments that the kernel takes."""
    (x, y, layer, gates, options), want = row_kernels.delta_layer(K=128, seed=seed, **LAYERS[name])
    assert delta_layer.takes(x, layer, gates, None)
    return (x, y, layer), (gates, options), want


@pytest.mark.parametrize("name", ["9 heads", "ling-3.0-tiny", "0.4b"])
def test_layers_of_one_program_do_not_meet(name):
    """72 and 128 CTAs: some of a second kernel have room beside the first one. The same is worth a run with XLA_FLAGS
    "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT --xla_gpu_graph_min_graph_size=1", under a time limit."""
    drawn = [layer_of(name, seed) for seed in range(2)]
    static = drawn[0][1]

    def chain(args):
        (x, y, layer), words = args, new_words()
        for _ in range(6):
            x, y, _, state = delta_layer.delta_layer(x, y, layer, *static, words=words)
            layer = layer._replace(state=state)
        return x, y, layer.state

    chains = [args for args, *_ in drawn]
    alone = jax.jit(chain)
    want = [alone(args) for args in chains]
    together = jax.jit(lambda chains: [alone(args) for args in chains])
    for _ in range(4 * REPEATS):
        for found, expected in zip(jax.tree.leaves(together(chains)), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("F", "dtype"), [(10368, "bfloat16"), (128, "float32")])
def test_row_of_a_stream(F, dtype):
    args, *want = row_kernels.stream(1536, F, dtype)
    call = jax.jit(functools.partial(row_product.stream_product, eps=1e-6, dtype=jnp.float32))
    got = call(*args)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(*args)[1], got[1])
    for name, expected, result in zip(("s", "product"), want, got, strict=True):
        close(expected, result, name)


@pytest.mark.parametrize(("D", "F"), [(2560, 12288), (5120, 16384), (1024, 6144)])
def test_row_of_a_stream_by_codes(D, F):
    """Weights in 8 bits at the widths of recurrent layers of Qwen3.5 4B and 27B."""
    args, *want = row_kernels.stream_codes(D, F)
    assert row_product.takes(args[0], args[3], None, args[4])
    call = jax.jit(functools.partial(row_product.stream_product, eps=1e-6, dtype=jnp.float32))
    got = call(*args)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(*args)[1], got[1])
    for name, expected, result in zip(("s", "product"), want, got, strict=True):
        close(expected, result, name)


def test_row_of_heads():
    args, want = row_kernels.heads(16, 128, 8320, 1536, "sigmoid")
    call = jax.jit(functools.partial(row_product.heads_product, eps=1e-6, activation="sigmoid"))
    close(want, call(*args), "y")


@pytest.mark.parametrize(
    ("N", "G", "P", "F", "gated", "codes"),
    [
        (2, 4, 3, 1024, True, False),
        (4, 4, 1, 2560, True, False),
        (4, 6, 2, 5120, True, False),
        (8, 1, 2, 512, False, False),
        (4, 4, 1, 2560, True, True),
        (2, 4, 3, 1024, True, True),
    ],
)
def test_row_of_attended_heads(N, G, P, F, gated, codes):
    parts, z, weight, scales, want = row_kernels.attended(N, G, P, 256, F, gated, codes=codes)

    @jax.jit
    def call(parts, z, weight, length):
        return attended_product(Parts(*parts), length, z, weight, scales, group=G, dtype=jnp.bfloat16)

    length = put([7], jnp.int32)
    got, after = call(parts, z, weight, length)
    close(want, got, "y", dtype="bfloat16")
    assert after == 8
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(parts, z, weight, length)[0], got)


@pytest.mark.parametrize(("H", "F"), [(32, 2560), (48, 5120)])
def test_row_of_heads_by_codes(H, F):
    args, want = row_kernels.heads_codes(H, 128, 1024, F, "silu")
    call = jax.jit(functools.partial(row_product.heads_product, eps=1e-6, activation="silu"))
    close(want, call(*args), "y")


@pytest.fixture
def code_for_8_0():
    """Kernels are lowered for compute capability 8.0; what was traced before has bulk copies."""
    jax.clear_caches()
    with lowering_for("8.0"):
        yield
    jax.clear_caches()


@pytest.mark.usefixtures("code_for_8_0")
@pytest.mark.parametrize("what", ["stream", "stream in float32", "heads", "swiglu", "ragged swiglu"])
def test_code_for_8_0(what):
    """Without bulk copies: copies by threads, which each warpgroup counts."""
    if what == "heads":
        test_row_of_heads()
    elif "swiglu" in what:
        test_a_stream_and_its_swiglu(1024, *((2736, 1) if what == "ragged swiglu" else (3584, 16)))
    else:
        test_row_of_a_stream(*((10368, "bfloat16") if what == "stream" else (128, "float32")))


@pytest.mark.parametrize("name", LAYERS)
def test_layer_of_the_delta_rule(name):
    """At the sizes of released models: CTAs of a head wait for each other, and its states lie where they were."""
    for seed in range(4):
        args, static, want = layer_of(name, seed)
        call = jax.jit(lambda x, y, layer, static=static: delta_layer.delta_layer(x, y, layer, *static))
        s, parts, *states = got = call(*args)
        for _ in range(REPEATS):
            for again, first in zip(call(*args), got, strict=True):
                np.testing.assert_array_equal(again, first)
        results = s, jnp.sum(parts.astype(jnp.float32), axis=0), *states
        names = zip(("s", "y", "window", "state"), want, results, (0, 2, 1, 1), strict=True)
        for part, expected, result, roundings in names:
            close(expected, result, part, roundings, dtype="bfloat16")


@pytest.mark.parametrize("length", [0, 100, 190])
def test_latent_attention_of_a_row(length):
    """At the sizes of Ling-3.0-tiny, after no token, after some, and before the last slot."""
    (channels, q, norm, _, values, k, v, at), static, y, k_r, c = row_kernels.latent(
        16, 512, 128, 192, length
    )
    latents = latent_token.Latents(static["kv"], static["gate"], static["scale"], static["eps"], 1e4)
    assert latent_token.takes(latents, channels, q, values, k, v, None)
    call, token = (
        jax.jit(functools.partial(latent_token.latent_token, latents)),
        (channels, q, norm, values, k, v),
    )
    got, new_k, new_v, after = call(*token, at)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(call(*token, at)[0], got)
    close(y, got, "y")
    close(k_r, new_k[0, length, 0], "k")
    close(c, new_v[0, length, 0], "c")
    assert after == length + 1
    row_kernels.same_bits(new_v.at[0, length].set(0), v.at[0, length].set(0))


SMALL_LING = dataclasses.replace(
    PRESETS["ling-3.0-tiny"],
    **dict(vocab_size=256, hidden_size=512, num_layers=4, num_heads=4, head_dim=128, intermediate_size=512),
    layer_types=("kda", "kda", "attention", "kda"),
    attention=LatentAttentionConfig(4, 64, 64, 64, 256, q_rank=256, rope_theta=1e4, head_gate=True),
    experts=ExpertsConfig(64, 4, 128, 256, shared_gate=False, routing=SigmoidRouting(4, 2, 2.5)),
    **dict(dtype="bfloat16", weight_dtype="bfloat16"),
)
SMALL_QWEN = dataclasses.replace(
    PRESETS["qwen3.5-0.8b"],
    **dict(vocab_size=256, num_layers=4, dtype="bfloat16", weight_dtype="bfloat16"),
)

SMALL_BLOCKS = dataclasses.replace(SMALL_QWEN, weights="float8")
SMALL_KDA = dataclasses.replace(
    PRESETS["kda-0.4b"], vocab_size=256, num_layers=2, dtype="bfloat16", weight_dtype="bfloat16"
)


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (SMALL_LING, 1),
        (SMALL_QWEN, 1),
        (SMALL_BLOCKS, 1),
        (SMALL_KDA, 1),
        (SMALL_QWEN, 6),
        (SMALL_KDA, 6),
        (SMALL_QWEN, 8),
    ],
    ids=["ling", "qwen", "codes", "kda", "rows of qwen", "rows of kda", "eight rows of qwen"],
)
def test_a_token_of_a_model(config, rows):
    """Recurrent, latent and attention layers, dense and with experts, token by token in the copy that generation
    reads."""
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    plain = LanguageModel(dataclasses.replace(config, implementation="chunked"), rngs=nnx.Rngs(0))
    for block in (*model.blocks, *plain.blocks):  # two programs that round would choose others now and then
        if isinstance(block.mlp, Experts):
            block.mlp.router_bias[...] = 2.0 * (37 * jnp.arange(64) % 64)
    tokens = np.random.default_rng(0).integers(0, 256, (rows, 12))
    want = np.asarray(nnx.jit(lambda model: model(jnp.asarray(tokens))[0])(plain), np.float64)
    copy = nnx.jit(lambda model: program.for_decoding(program.for_inference(model), rows, in_parts=True))(
        model
    )
    step = nnx.jit(lambda model, token, cache: model(token, cache=cache))
    assert step.lower(copy, tokens[:, :1], model.init_cache(rows, 16)).as_text().count("@mosaic_gpu") > 1
    assert {type(block.mlp) for block in copy.blocks} <= {DenseRow, BlockDenseRow, ExpertRow} or rows > 1
    cache, got = model.init_cache(rows, 16), []
    for t in range(12):
        y, cache = step(copy, tokens[:, t : t + 1], cache)
        got.append(np.asarray(y))
    # Some twenty roundings one after the other, in either program.
    close(want, np.concatenate(got, axis=1), "logits", 20, dtype="bfloat16")


@pytest.mark.parametrize("heads_of_v", [8, 16])
def test_a_token_of_one_row_of_gated_delta_nets(heads_of_v):
    """Layers with a decay of each head and their SwiGLU, token by token in the copy that generation reads."""
    config = ModelConfig(
        **dict(
            vocab_size=256, hidden_size=512, num_layers=3, num_heads=8, num_v_heads=heads_of_v, head_dim=128
        ),
        **dict(expand_v=1.0, intermediate_size=1024, allow_neg_eigval=heads_of_v == 16),
        **dict(dtype="bfloat16", weight_dtype="bfloat16"),
    )
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    plain = LanguageModel(dataclasses.replace(config, implementation="chunked"), rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 256, (1, 12))
    want = np.asarray(nnx.jit(lambda model: model(jnp.asarray(tokens))[0])(plain), np.float64)
    copy = nnx.jit(lambda model: program.for_decoding(program.for_inference(model), 1))(model)
    step = nnx.jit(lambda model, token, cache: model(token, cache=cache))
    compiled = step.lower(copy, tokens[:, :1], model.init_cache(1, 16)).as_text()
    assert compiled.count("delta_layer") > 0
    cache, got = model.init_cache(1, 16), []
    for t in range(12):
        y, cache = step(copy, tokens[:, t : t + 1], cache)
        got.append(np.asarray(y))
    # Some twenty roundings one after the other, in either program.
    close(want, np.concatenate(got, axis=1), "logits", 20, dtype="bfloat16")
    new = np.asarray(nnx.jit(lambda model: generate(model, jnp.asarray(tokens), 24))(model))
    line = jnp.asarray(np.concatenate([tokens, new[:, :-1]], axis=1))
    logits = np.asarray(nnx.jit(lambda model: model(line)[0])(plain), np.float64)[0, -24:]
    short = logits.max(axis=1) - logits[np.arange(24), new[0]]
    # Every token is the likeliest one, or one that a program that rounds may take for it.
    assert short.max() <= 4 * 20 * ROUNDING["bfloat16"] * np.sqrt(np.mean(logits**2))
