"""The copy of a model that generates: the same logits, and no weight is rounded or merged for every token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import eqns
from small_layers import drawn
from small_models import made

from gdn_jax.layers.blocks import RMSNorm, SwiGLU
from gdn_jax.models import LanguageModel, generate
from gdn_jax.models.attention import Attention
from gdn_jax.models.config import ExpertsConfig, LatentAttentionConfig
from gdn_jax.models.inference import program
from gdn_jax.models.inference.dense import DenseRows
from gdn_jax.models.inference.program import for_decoding, for_inference
from gdn_jax.models.inference.projections import BlockGroup, ProjectionGroup
from gdn_jax.models.inference.recurrent import HeadRows
from gdn_jax.models.lora import LoRAParam, add_lora
from gdn_jax.models.presets import PRESETS

ROW = np.arange(10).reshape(2, 5)
CONFIG = dataclasses.replace(
    PRESETS["qwen3.5-small"],
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    layer_types=("gated_delta_net", "attention"),
    dtype="bfloat16",
    implementation="recurrent",  # compiles fast
)
WITH_EXPERTS = dataclasses.replace(CONFIG, experts=ExpertsConfig(4, 2, 16, 16))


def make(config):
    """A model with low-rank changes that are not zero."""

    def changed(rngs):
        model = LanguageModel(config, rngs=rngs)
        add_lora(model, 3, projections=("q_proj", "o_proj"), rngs=nnx.Rngs(1))
        return model

    model = drawn(changed)
    for part in jax.tree.leaves(nnx.state(model, LoRAParam), is_leaf=lambda x: isinstance(x, nnx.Variable)):
        part.set_value(jax.device_put(np.asarray(part[...]) + np.float32(0.1)))
    return model


@nnx.jit
def logits(model, tokens):
    return model(tokens)[0]


def loops(jaxpr):
    """The jaxprs of the bodies of all while loops, however deep."""
    return [eqn.params["body_jaxpr"].jaxpr for eqn in eqns(jaxpr) if "body_jaxpr" in eqn.params]


def conversions(jaxpr):
    """Shapes that a jaxpr converts from float32 to bfloat16, however deep."""
    for eqn in eqns(jaxpr):
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == jnp.float32:
            if eqn.outvars[0].aval.dtype == jnp.bfloat16:
                yield eqn.invars[0].aval.shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(WITH_EXPERTS, marks=pytest.mark.slow)], ids=["swiglu", "experts"]
)
def test_logits_are_those_of_the_model(config):
    model = make(config)
    ready = for_inference(model)
    assert ready.embedding[...] is model.embedding[...]
    assert nnx.state(model, LoRAParam) and not nnx.state(ready, LoRAParam)
    kept = {"A_log", "dt_bias", "conv_weight", "weight", "embedding"}  # read in float32
    for path, value in nnx.to_flat_state(nnx.state(ready, nnx.Param)):
        assert (value.dtype == jnp.float32) == (path[-1] in kept), path
    np.testing.assert_array_equal(logits(model, ROW), logits(ready, ROW))


@pytest.mark.slow
def test_norms_of_a_16_bit_model_are_widened_once():
    """No step converts the weight of a norm, nor adds 1 to it; the logits are those of the model all the same."""
    model = made(dataclasses.replace(CONFIG, weight_dtype="bfloat16", zero_centred_norms=True))
    ready = for_inference(model)
    norms = {
        path: x.dtype for path, x in nnx.to_flat_state(nnx.state(ready, nnx.Param)) if path[-1] == "weight"
    }
    assert len(norms) == 2 * 2 + 1 + 1 + 2 and {*norms.values()} == {jnp.dtype("float32")}
    assert not any(part.zero_centred for _, part in nnx.iter_modules(ready) if isinstance(part, RMSNorm))
    np.testing.assert_array_equal(logits(model, ROW), logits(ready, ROW))


@pytest.mark.slow
def test_projections_of_one_input_are_one_product(monkeypatch):
    """A copy for single tokens; its logits are those of the model but for rounding, of one row and of more."""
    ready = for_inference(make(dataclasses.replace(CONFIG, dtype="float32")))
    assert for_decoding(ready, 1) is ready  # without a GPU
    monkeypatch.setattr(program, "usable", lambda *_: True)
    copy = for_decoding(ready, 1)
    groups = [part for _, part in nnx.iter_modules(copy) if isinstance(part, ProjectionGroup)]
    assert len(groups) == 2 * 4
    kernels = sum(
        part.kernel[...].size for _, part in nnx.iter_modules(ready) if isinstance(part, nnx.Linear)
    )
    # Zeros: a recurrent layer's outputs are whole heads, and an inner width is a multiple of 64.
    fill = 24 * 32 + 2 * 3 * (-CONFIG.mlp_size % 64) * 32
    assert sum(group.weight[...].size for group in groups) == kernels + fill
    assert not any(isinstance(part, nnx.Linear) for _, part in nnx.iter_modules(copy))
    for tokens in (ROW, ROW[:1, :1]):
        np.testing.assert_allclose(logits(copy, tokens), logits(ready, tokens), atol=1e-5)


def test_projections_in_8_bits_are_one_product(monkeypatch):
    """Codes of one input lie in one array, next to a product of the narrow projections, which are whole."""
    ready = for_inference(made(dataclasses.replace(CONFIG, dtype="float32", weights="float8")))
    monkeypatch.setattr(program, "usable", lambda *_: True)
    copy = for_decoding(ready, 1)
    kinds = [type(part) for _, part in nnx.iter_modules(copy)]
    assert (kinds.count(BlockGroup), kinds.count(ProjectionGroup)) == (4, 1)
    for tokens in (ROW, ROW[:1, :1]):
        np.testing.assert_allclose(logits(copy, tokens), logits(ready, tokens), atol=1e-5)


@pytest.mark.parametrize(
    "attention",
    [None, LatentAttentionConfig(2, 8, 4, 8, 8, q_rank=8, rope_theta=100.0, head_gate=True)],
    ids=["grouped queries and a window", "latents"],
)
def test_tokens_of_attention(attention, monkeypatch):
    """The copy for single tokens has another kind of attention, which gives what the model does for whole rows."""
    if attention is None:
        window = dataclasses.replace(CONFIG.attention, window=3)
        kinds: dict = dict(layer_types=("attention", "window_attention"), window_attention=window)
    else:
        kinds = dict(layer_types=("attention", "gated_delta_net"), attention=attention)
    model = made(dataclasses.replace(CONFIG, dtype="float32", **kinds))
    whole, cache = np.asarray(logits(model, ROW)), jax.jit(lambda: model.init_cache(len(ROW), 8))()
    monkeypatch.setattr(program, "usable", lambda *_: True)
    copy = nnx.jit(lambda model: for_decoding(for_inference(model), len(ROW)))(model)
    changed = [type(block.mixer).__name__ for block in copy.blocks]
    assert changed == (["AttentionRows", "WindowRows"] if attention is None else ["LatentRows", "HeadRows"])
    step = nnx.jit(lambda model, token, cache: model(token, cache=cache))
    for t in range(ROW.shape[1]):
        one, cache = step(copy, ROW[:, t : t + 1], cache)
        np.testing.assert_allclose(one[:, 0], whole[:, t], atol=1e-5)


def test_a_mesh_that_splits_heads(monkeypatch):
    """Its devices have their parts of projections, which stay as they are; the rule of a token has a kernel."""
    monkeypatch.setattr(program, "usable", lambda *_: True)
    monkeypatch.setattr(program, "splits_heads", lambda: True)
    copy = nnx.eval_shape(lambda: for_decoding(LanguageModel(CONFIG, rngs=nnx.Rngs(0)), 1))
    kinds = [(type(block.mixer), type(block.mlp)) for block in copy.blocks]
    assert kinds == [(HeadRows, SwiGLU), (Attention, SwiGLU)]
    assert type(copy.blocks[0].mixer.mixer.q_proj) is nnx.Linear and copy.blocks[0].mixer.ahead == ()


@pytest.mark.parametrize("config", [CONFIG, WITH_EXPERTS], ids=["swiglu", "experts"])
def test_no_step_of_generation_rounds_a_weight(config):
    model = make(config)
    weights = {value.shape for _, value in nnx.to_flat_state(nnx.state(model, nnx.Param)) if value.ndim > 1}

    def rounded(bodies):
        return {shape for body in bodies for shape in conversions(body)} & weights

    whole = jax.make_jaxpr(lambda tokens: generate(model, tokens, 3))(jax.device_put(ROW)).jaxpr
    assert rounded([whole]) and not rounded(loops(whole))


def test_products_in_parts():
    """Few rows: parts of a product add up to it, and the norm that follows adds them to the stream."""
    mlp = SwiGLU(32, 128, rngs=nnx.Rngs(0), implementation="chunked")
    norm = RMSNorm(32, implementation="chunked")

    @jax.jit
    def both(x, more):
        y, parts = (DenseRows(mlp, in_parts)(x) for in_parts in (False, True))
        return y, parts, norm.add(x, y), norm.add(x, parts), DenseRows(mlp, True)(more)

    x = np.random.default_rng(0).normal(size=(3, 1, 32)).astype(np.float32)
    y, parts, want, got, whole = both(x, np.repeat(x, 2, axis=1))
    assert parts.shape == (8 * 3, 1, 32)
    for expected, found in zip((y, *want), (parts.reshape(8, 3, 1, 32).sum(0), *got), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(whole, np.repeat(y, 2, axis=1), rtol=1e-5, atol=1e-6)
