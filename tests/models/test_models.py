"""The language model and its generation: with the cache and without, padded prompts and bare, packed and separate."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_layers import drawn, empty_cache
from small_models import BF16, F32, SIZES, Shift, call, continued, made, make, operations, tokens
from tolerances import assert_close

from gdn_jax.commands.fields import marked
from gdn_jax.layers import GatedDeltaNet, RecurrentMixer
from gdn_jax.models import Block, LanguageModel, ModelConfig, generate, weight_decay_mask
from gdn_jax.models.generate import _generate
from gdn_jax.training import options as options_lib


@pytest.fixture(scope="module")
def model():
    return make()


ROW = 16
"""Length of the rows of whole passes, so that few of them are compiled: what follows a token is not seen."""


def uncached(model, prompt, num_tokens):
    """Greedy continuation by a whole pass per token."""
    T = prompt.shape[1]
    row = np.zeros((len(prompt), ROW), np.int32)
    row[:, :T] = prompt
    for t in range(T, T + num_tokens):
        row[:, t] = call(model, row)[0][:, t - 1].argmax(-1)
    return row[:, T : T + num_tokens]


@pytest.mark.slow
def test_generation_equals_the_uncached_loop(model):
    prompt = tokens(3, 7)
    want = uncached(model, prompt, 9)
    got = continued(model, prompt, 9)
    assert got.shape == (3, 9) and got.dtype == prompt.dtype
    np.testing.assert_array_equal(got, want)
    assert len(np.unique(want)) > 3  # not the same token again and again
    inside = jax.jit(lambda prompt: generate(model, prompt, 9))(prompt)
    np.testing.assert_array_equal(inside, want)
    np.testing.assert_array_equal(continued(model, prompt, 1), want[:, :1])


def test_generation_from_padded_prompts(model):
    prompts = [tokens(7), tokens(4, seed=1), tokens(1, seed=2)]
    want = np.concatenate([uncached(model, p[None], 5) for p in prompts])
    left, right = np.zeros((2, 3, 7), np.int32)
    mask = np.zeros((2, 3, 7), bool)
    for row, p in enumerate(prompts):
        left[row, 7 - len(p) :], right[row, : len(p)] = p, p
        mask[0, row, 7 - len(p) :], mask[1, row, : len(p)] = True, True
    np.testing.assert_array_equal(continued(model, left, 5, mask=mask[0]), want)
    np.testing.assert_array_equal(continued(model, right, 5, mask=mask[1]), want)


@pytest.mark.slow
def test_drawing(model):
    """The first token is drawn from softmax(logits / temperature) among the best five, by the key."""
    prompt, key = tokens(1, 5), jax.random.key(1)
    rows = np.repeat(prompt, 4000, axis=0)
    options = {"temperature": 1.5, "top_k": 5}
    drawn = continued(model, rows, 1, rng=key, **options)
    np.testing.assert_array_equal(continued(model, rows, 1, rng=key, **options), drawn)
    assert not np.array_equal(continued(model, rows, 1, rng=jax.random.key(2), **options), drawn)
    logits = call(model, prompt)[0][0, -1].astype(np.float64) / 1.5
    assert np.all(continued(model, rows, 1, rng=key, temperature=1.5, top_k=1) == logits.argmax())
    logits[np.argsort(logits)[:-5]] = -np.inf
    p = np.exp(logits - logits.max())
    p /= p.sum()
    share = np.bincount(drawn[:, 0], minlength=len(p)) / 4000
    np.testing.assert_allclose(share, p, atol=5 * 0.5 / 4000**0.5)  # five standard deviations of a share


def test_every_token_is_drawn_anew(model):
    """Nearly uniform draws: two tokens of a row agree by chance, once in 31 times."""
    drawn = continued(model, tokens(64, 5), 4, rng=jax.random.key(3), temperature=1e3)
    for i in range(4):
        for j in range(i):
            assert np.mean(drawn[:, i] == drawn[:, j]) < 0.2, (i, j)  # six standard deviations above 1 / 31


@pytest.mark.slow
def test_prompts_of_similar_length_share_a_compilation(model):
    before = _generate._cache_size()
    for length in (3, 9, 15):
        continued(model, tokens(1, length), 2)
    assert _generate._cache_size() == before + 1
    continued(model, tokens(1, 17), 2)
    assert _generate._cache_size() == before + 2


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [pytest.param("recurrent", marks=pytest.mark.crossed), "chunked"])
def test_padding_on_the_right_leaves_no_trace(implementation):
    """Logits and cache do not depend on what padding holds, and are those of the bare row but for the rounding of
    products of another shape."""
    model, row = make(implementation=implementation), tokens(2, 21)
    want = call(model, row, return_cache=True)
    all_tokens = call(model, row, mask=np.ones((2, 21), bool), return_cache=True)
    jax.tree.map(np.testing.assert_array_equal, want, all_tokens)
    mask = np.broadcast_to(np.arange(32) < 21, (2, 32))
    padded = []
    for filler in (0, 7):
        rows = np.pad(row, ((0, 0), (0, 11)), constant_values=filler)
        logits, cache = call(model, rows, mask=mask, return_cache=True)
        padded.append((logits[:, :21], cache))
        jax.tree.map(lambda a, b: assert_close(a, b, F32), want, padded[-1])
    jax.tree.map(np.testing.assert_array_equal, *padded)


def test_packed_rows_equal_separate_rows(model):
    row = tokens(1, 11)
    ids = np.array([[1] * 4 + [2] * 7], np.int32)
    packed, cache = call(model, row, segment_ids=ids)
    assert cache is None and packed.dtype == np.float32
    for part in (slice(0, 4), slice(4, 11)):
        alone = row[:, part]
        length = alone.shape[1]
        separate = call(model, np.pad(alone, ((0, 0), (0, ROW - length))))[0]
        assert_close(separate[:, :length], packed[:, part], F32)


def test_cache_continues(model):
    row = tokens(2, 12)  # both halves are one program
    want, cache = call(model, row, return_cache=True)
    got, carried = call(model, row[:, :6], cache=empty_cache(model, 2))
    more, carried = call(model, row[:, 6:], cache=carried)
    assert_close(want, np.concatenate([got, more], axis=1), F32)
    jax.tree.map(lambda a, b: assert_close(a, b, F32), cache, carried)
    assert len(cache) == 2


@pytest.mark.slow
def test_bfloat16_and_tied_embedding():
    narrow, wide = make(dtype="bfloat16", tie_embeddings=True), make(tie_embeddings=True)
    row = tokens(2, 9)
    want, got = call(wide, row)[0], call(narrow, row)[0]
    assert got.dtype == np.float32
    assert_close(want, got, BF16)
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(nnx.state(narrow, nnx.Param)))


def test_training_step_moves_everything_and_decays_only_what_it_may():
    model = make(num_layers=1)
    row = jax.device_put(tokens(2, 9))

    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(row[:, :-1])[0], row[:, 1:]).mean()

    value, grads = nnx.jit(nnx.value_and_grad(loss))(model)
    np.testing.assert_allclose(value, np.log(31), atol=1.0)  # an untrained model knows nothing: near uniform
    for path, g in jax.tree_util.tree_flatten_with_path(grads)[0]:
        assert np.isfinite(g).all() and np.abs(g).max() > 0, jax.tree_util.keystr(path)

    decayed = make(num_layers=1)
    before = jax.device_get(nnx.to_pure_dict(nnx.state(decayed, nnx.Param)))

    @nnx.jit
    def update_without_gradient(model):
        decay = optax.adamw(0.1, weight_decay=0.5, mask=weight_decay_mask)
        optimizer = nnx.Optimizer(model, decay, wrt=nnx.Param)
        optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))

    update_without_gradient(decayed)
    after = jax.device_get(nnx.to_pure_dict(nnx.state(decayed, nnx.Param)))
    for path, ratio in jax.tree_util.tree_flatten_with_path(jax.tree.map(lambda a, b: b / a, before, after))[
        0
    ]:
        name = jax.tree_util.keystr(path)
        free = any(word in name for word in ("A_log", "dt_bias", "norm"))
        np.testing.assert_allclose(ratio, 1.0 if free else 0.95, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_what_is_written_to_the_stream_shrinks_with_depth():
    model = make(hidden_size=64, num_layers=3)
    for block in model.blocks:
        for kernel in (block.mixer.o_proj.kernel[...], block.mlp.down_proj.kernel[...]):
            variance = np.var(np.asarray(kernel)) * kernel.shape[0] * 2 * 3
            assert 0.8 < variance < 1.25, kernel.shape


def test_initialisers():
    """Inner projections, projections to the residual stream, and embeddings, each by its own."""
    constants = {"kernel_init": 1.0, "out_kernel_init": 2.0, "embedding_init": 3.0}
    inits = {name: nnx.initializers.constant(value) for name, value in constants.items()}
    model = drawn(lambda rngs: LanguageModel(ModelConfig(**SIZES), **inits, rngs=rngs))
    block = model.blocks[0]
    for value, params in {
        1.0: (block.mixer.q_proj.kernel, block.mixer.g_proj.kernel, block.mlp.gate_proj.kernel),
        2.0: (block.mixer.o_proj.kernel, block.mlp.down_proj.kernel),
        3.0: (model.embedding, model.head),
    }.items():
        assert all(np.all(np.asarray(p[...]) == value) for p in params), value


@pytest.mark.slow
def test_weights_of_a_block_depend_on_the_seed_and_its_place_alone():
    """A deeper model begins with the weights of a shallow one; blocks differ; the seed may be traced, or known."""

    def params(seed, num_layers):
        init = nnx.initializers.normal(1.0)  # the default divides by the depth
        config = ModelConfig(**{**SIZES, "num_layers": num_layers})
        model = LanguageModel(config, out_kernel_init=init, rngs=nnx.Rngs(jax.random.key(seed)))
        return nnx.to_pure_dict(nnx.state(model))

    shallow, deep = jax.device_get(jax.jit(lambda: (params(0, 2), params(0, 3)))())
    deep["blocks"].pop(2)
    jax.tree.map(np.testing.assert_array_equal, shallow, deep)
    traced = jax.device_get(jax.jit(lambda seed: params(seed, 2))(0))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), shallow, traced)
    known = jax.device_get(params(0, 2))  # by a program of a block, which all blocks share
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), shallow, known)
    first, second = shallow["blocks"][0], shallow["blocks"][1]
    for path, same in jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda a, b: np.mean(a == b), first, second)
    ):
        norm = "norm" in jax.tree_util.keystr(path)
        assert same == 1 if norm else same < 0.1, (path, same)


def test_initialising_a_deeper_model_compiles_no_more_draws():
    """Draws are what XLA compiles slowly: as many operations of random bits with six blocks as with two."""

    def draws(num_layers):
        config = ModelConfig(**{**SIZES, "num_layers": num_layers})

        def init(seed):
            return nnx.state(LanguageModel(config, rngs=nnx.Rngs(jax.random.key(seed))))

        return operations(init, 0)["random_bits"]

    assert (
        draws(2) == draws(6) == 15
    )  # q k v a b g o, convolution, A_log, dt_bias, gate, up, down; embedding, head


@pytest.mark.slow
def test_a_block_takes_any_mixer():
    model = make()
    model.blocks[1] = drawn(lambda rngs: Block(model.config, Shift(), rngs=rngs), seed=1)
    row = tokens(2, 8)
    want, _ = call(model, row)
    got, cache = call(model, row[:, :5], cache=empty_cache(model, 2))
    more, cache = call(model, row[:, 5:], cache=cache)
    assert_close(want, np.concatenate([got, more], axis=1), F32)
    assert continued(model, row, 3).shape == (2, 3)


def test_around_stands_in_the_place_of_every_mixer(model):
    row = tokens(2, 8)
    seen = []

    def watch(i, mixer, x, **options):
        seen.append((i, mixer, x.shape))
        return mixer(x, **options)

    def nothing(i, mixer, x, **_):
        return jnp.zeros_like(x), None

    want, watched, without = jax.device_get(
        jax.jit(lambda row: (model(row)[0], model(row, around=watch)[0], model(row, around=nothing)[0]))(row)
    )
    np.testing.assert_array_equal(want, watched)
    assert seen == [(i, block.mixer, (2, 8, 24)) for i, block in enumerate(model.blocks)]
    # Without mixers a token sees itself alone.
    alone = jax.jit(lambda row: model(row, around=nothing)[0])(row[:, 3:4])
    assert_close(without[:, 3:4], alone, F32)
    assert np.abs(want - without).max() > 0.1


def test_a_token_outside_the_vocabulary_is_loud(model):
    row = tokens(1, 5)
    row[0, 2] = 31
    logits = call(model, row)[0]
    assert np.isfinite(logits[:, :2]).all() and np.isnan(logits[:, 2]).all()


def test_mlp_size():
    assert ModelConfig(hidden_size=128, mlp_ratio=2.0).mlp_size == 256
    assert ModelConfig(hidden_size=128).mlp_size == 344  # 8/3 * 128 = 341.3
    assert ModelConfig(intermediate_size=100).mlp_size == 100


@pytest.mark.slow
def test_every_option_reaches_the_layer():
    options = {
        "hidden_size": 24,
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim": 8,
        "expand_v": 1.5,
        "conv_size": 3,
        "allow_neg_eigval": True,
        "rule": "delta",
        "write_start": 0.06,
        "norm_eps": 1e-3,
        "dtype": "bfloat16",
        "implementation": "recurrent",
    }
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    taken = [inspect.signature(layer.__init__).parameters for layer in (RecurrentMixer, GatedDeltaNet)]
    assert set(options) == fields & set().union(*taken), "test it here"
    defaults = ModelConfig()
    assert not [name for name in set(options) - {"num_heads"} if options[name] == getattr(defaults, name)]
    mixer = made(ModelConfig(**options)).blocks[0].mixer
    assert mixer.head_v_dim == options.pop("head_dim") * options.pop("expand_v")
    assert mixer.o_norm.eps == options.pop("norm_eps")
    assert mixer.rule.name == options.pop("rule")
    beta = 1 / (1 + np.exp(-np.asarray(mixer.b_proj.bias[...], np.float64)))
    np.testing.assert_allclose(beta, options.pop("write_start"), rtol=1e-6)
    assert {name: getattr(mixer, name) for name in options} == options


NOT_OPTIONS = {
    *("vocab_size", "num_v_heads", "intermediate_size", "norm_eps", "scan_layers"),
    *(
        "layer_types",
        "attention",
        "window_attention",
        "experts",
        "dense_layers",
        "mixer_norm_eps",
        "zero_centred_norms",
    ),
    *("scale_embedding", "weight_dtype", "weights"),
}
"""Fields of a ModelConfig that are no options: the task sets vocab_size, the others keep their defaults."""


def test_every_field_is_an_option_or_fixed():
    """A field that is added to ModelConfig is offered on the command line, or left out of it on purpose."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    options = {field.name for field in dataclasses.fields(options_lib.ModelOptions)}
    options -= marked(options_lib.ModelOptions, options_lib.NotInConfig)
    assert not options & NOT_OPTIONS and options | NOT_OPTIONS == fields
    config = ModelConfig(**options_lib.ModelOptions().config_values())  # with "auto" in two places
    assert config.dtype == "float32" and config.implementation is None


def test_dtype_by_name_or_by_type():
    for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), np.dtype("bfloat16")):
        assert ModelConfig(residual_dtype=dtype).residual_dtype == "bfloat16"
        config = ModelConfig(dtype=dtype)
        assert config.dtype == "bfloat16" and isinstance(config.dtype, str)
        assert config == ModelConfig(dtype="bfloat16")


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    "message, options",
    [
        ("vocab_size: expected a positive integer, got 0", {"vocab_size": 0}),
        ("num_layers: expected a positive integer, got 0", {"num_layers": 0}),
        ("num_v_heads: expected a multiple of num_heads = 2, got 3", {"num_v_heads": 3}),
        ("expand_v: expected head_dim", {"head_dim": 5, "expand_v": 1.5}),
        ("conv_size: expected 2 to 4, got 1", {"conv_size": 1}),
        ("intermediate_size: expected a positive integer, got 0", {"intermediate_size": 0}),
        ("mlp_ratio: expected a positive number", {"mlp_ratio": 0.0}),
        ("mlp_ratio: .* inner width of at least 1, got 0.0001", {"mlp_ratio": 1e-4}),
        ("head_dim: expected a width up to 256, got 300", {"head_dim": 300}),
        ("rule: expected one of", {"rule": "attention"}),
        ("norm_eps: expected a positive number", {"norm_eps": 0.0}),
        ("dtype: expected one of 'float32', 'bfloat16', got 'float16'", {"dtype": "float16"}),
        ("dtype: expected one of 'float32', 'bfloat16', got 'float16'", {"dtype": jnp.float16}),
        (
            "residual_dtype: expected one of 'float32', 'bfloat16', got 'float16'",
            {"residual_dtype": "float16"},
        ),
        ("remat: expected one of 'none', 'rule', 'full', got True", {"remat": True}),
        ("scan_layers: expected one of True, False, got 'auto'", {"scan_layers": "auto"}),
        ("implementation: expected one of", {"implementation": "fast"}),
    ],
)
def test_config_errors(message, options):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


@pytest.mark.usefixtures("no_type_checks")
def test_call_errors(model):
    prompt = np.zeros((2, 3), np.int32)
    calls = [
        ("tokens: expected shape", lambda: model(prompt[0])),
        ("tokens: expected an integer dtype", lambda: model(prompt.astype(np.float32))),
        ("cache: expected 2 entries", lambda: model(prompt, cache=empty_cache(model, 2)[:1])),
        ("prompt: expected shape", lambda: generate(model, prompt[0], 3)),
        ("prompt: expected at least one token", lambda: generate(model, prompt[:, :0], 3)),
        ("mask: expected shape", lambda: generate(model, prompt, 3, mask=np.ones((2, 4), bool))),
        ("num_tokens: expected 1 to 2147483647, got 0", lambda: generate(model, prompt, 0)),
        ("num_tokens: expected 1 to 2147483647, got 10000000000", lambda: generate(model, prompt, 10**10)),
        ("prompt: expected an integer dtype", lambda: generate(model, prompt.astype(np.float32), 3)),
        ("prompt: expected tokens from 0 to 30, got -1", lambda: generate(model, prompt - 1, 3)),
        ("prompt: expected tokens from 0 to 30, got 31", lambda: generate(model, prompt + 31, 3)),
        ("temperature: expected 0 or more, got -1", lambda: generate(model, prompt, 3, temperature=-1.0)),
        ("rng: expected a key with temperature = 1", lambda: generate(model, prompt, 3, temperature=1.0)),
        ("top_k: expected 1 to vocab_size = 31, got 32", lambda: generate(model, prompt, 3, top_k=32)),
    ]
    for message, run in calls:
        with pytest.raises(ValueError, match=message):
            run()
    # Drawn tokens have the prompt's dtype, in which a larger one would wrap.
    larger = made(ModelConfig(vocab_size=300, hidden_size=8, num_layers=1, num_heads=1, head_dim=4))
    with pytest.raises(ValueError, match="dtype for tokens below vocab_size = 300, got uint8"):
        generate(larger, prompt.astype(np.uint8), 3)


@pytest.mark.usefixtures("no_type_checks")
def test_numbers_under_padding_are_no_tokens(model):
    prompt, mask = np.array([[3, 4, 5, -1]]), np.array([[True, True, True, False]])
    padded = generate(model, prompt, 4, mask=mask)
    np.testing.assert_array_equal(padded, generate(model, prompt[:, :3], 4))
