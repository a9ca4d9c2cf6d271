"""Lara's checkpoints: sliding windows, a ring of keys and values, and experts whose shared one has no gate."""

import dataclasses
import json
from pathlib import Path

import hf_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from flax import nnx

from gdn_jax.commands import cli
from gdn_jax.hf import load_hf, save_hf
from gdn_jax.hf.checkpoint import read_tensors
from gdn_jax.hf.families import describe
from gdn_jax.models import AttentionConfig, ModelConfig, costs
from gdn_jax.models.attention import WindowCache
from gdn_jax.models.window import WindowAttention
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.parallel.sharding import check

FOLDER = Path(__file__).parents[1] / "data" / "lara_mini"


@pytest.fixture(scope="module")
def expected():
    """Transformers' results, of whole rows their first 64 tokens: nothing after a token changes it."""
    return hf_checkpoints.expected_of(FOLDER)


@pytest.fixture(scope="module")
def model():
    return load_hf(FOLDER, implementation="recurrent")


def test_logits_are_those_of_transformers(model, expected):
    """Whole rows, and rows with padding on the left, longer than three windows."""
    call = nnx.jit(lambda model, tokens, mask: model(tokens, mask=mask)[0])
    ids = np.concatenate([expected["input_ids"], expected["left_padded_ids"]])
    mask = np.concatenate([np.ones_like(expected["input_ids"]), expected["left_padded_mask"]]).astype(bool)
    short = np.zeros((1, ids.shape[1]), ids.dtype)
    short[:, -3:] = expected["short_ids"]
    got = np.asarray(
        call(model, np.concatenate([ids, short]), np.concatenate([mask, np.arange(64)[None] >= 61]))
    )
    want = np.concatenate([expected["logits"], expected["left_padded_logits"]])
    hf_checkpoints.assert_same_logits(got[:4][mask], want[mask])
    hf_checkpoints.assert_same_logits(got[4:, -3:], expected["short_logits"])


@pytest.mark.slow
def test_greedy_continuation_past_the_window(model, expected):
    """Bare, and with padding on the left, from a prompt of 21 tokens through a ring of 20."""
    tokens = expected["generated"]
    hf_checkpoints.assert_continued(model, tokens[:, :21], tokens[:, 21:])


def test_a_saved_checkpoint_is_the_one_that_was_loaded(model, tmp_path):
    save_hf(model, tmp_path / "saved")
    before, after = (read_tensors(folder) for folder in (FOLDER, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name].read(), tensor.read())
    again = load_hf(tmp_path / "saved")
    pairs = zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, again)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (FOLDER, tmp_path / "saved")]
    assert configs[0] == configs[1]


@pytest.mark.slow
def test_a_model_of_our_own_is_written(model, tmp_path):
    own = small_models.made(model.config, 1)
    save_hf(own, tmp_path / "own")
    again = load_hf(tmp_path / "own", implementation="recurrent")
    assert again.config == model.config
    pairs = zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (own, again)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


WINDOW = AttentionConfig(2, 1, 8, rotary_dim=8, window=5)


@pytest.mark.slow
def test_a_window_attends_as_its_definition_says_in_any_pieces():
    """Against float64 softmax over the last five tokens; pieces of 1, 7, 2 and 9 tokens, one row with padding."""
    layer = WindowAttention(16, WINDOW, rngs=nnx.Rngs(0))
    x = np.random.default_rng(1).standard_normal((2, 19, 16)).astype(np.float32)

    @nnx.jit
    def run(layer, x, cache=None, mask=None):
        return layer(x, cache=cache, mask=mask, return_cache=True)

    heads, weights = nnx.jit(lambda layer, x: (layer.heads(x), layer.weights(x)))(layer, x)
    q, k, v = (np.asarray(a, np.float64) for a in heads)
    i, j = np.ogrid[:19, :19]
    scores = np.where((j <= i) & (j > i - 5), np.einsum("bihd,bjd->bhij", q, k[:, :, 0]) / 8**0.5, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.einsum("bhij,bjd->bihd", p, v[:, :, 0]).reshape(2, 19, 16)
    want = o @ np.asarray(layer.o_proj.kernel[...], np.float64)
    whole, cache = run(layer, x)
    np.testing.assert_allclose(whole, want, atol=1e-5)
    np.testing.assert_allclose(weights, p, atol=1e-5)
    past, outputs, begin = layer.init_cache(2), [], 0
    for tokens in (1, 7, 2, 9):
        y, past = run(layer, x[:, begin : begin + tokens], past)
        outputs.append(y)
        begin += tokens
    np.testing.assert_allclose(np.concatenate(outputs, 1), want, atol=1e-5)
    for name in ("k", "v", "length"):  # where a token lies does not depend on the pieces
        np.testing.assert_allclose(getattr(past, name), getattr(cache, name), atol=1e-5)
    # A row of 12 tokens on the right of 19 places: the ring holds its tokens alone, and goes on.
    mask = np.arange(19)[None] >= np.array([[7], [0]])
    _, past = run(layer, np.concatenate([x[:, :7], x[:, :12]], 1), mask=mask)
    y, past = run(layer, x[:, 12:13], past)
    np.testing.assert_allclose(y[0], want[0, 12:13], atol=1e-5)
    np.testing.assert_array_equal(past.length, [13, 20])
    half = WindowAttention(16, WINDOW, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for cache in (half.init_cache(1), run(half, x[:1, :1])[1]):
        assert cache.k.dtype == cache.v.dtype == jnp.bfloat16


def test_a_window_refuses(model):
    layer = WindowAttention(16, WINDOW, rngs=nnx.Rngs(0))
    other = WindowAttention(16, dataclasses.replace(WINDOW, window=4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="cache: expected a WindowCache of 5 slots, got WindowCache of 4"):
        layer(jnp.zeros((1, 1, 16)), cache=other.init_cache(1))
    with pytest.raises(ValueError, match="window: expected"):
        dataclasses.replace(WINDOW, window=0)
    with pytest.raises(ValueError, match="window_attention: expected an AttentionConfig with a layer"):
        ModelConfig(layer_types=("window_attention",) * 4)
    with pytest.raises(ValueError, match="attention: expected no window"):
        ModelConfig(attention=WINDOW)
    with pytest.raises(NotImplementedError, match="context: layers of type window_attention"):
        check(model.config, MeshShape(context=2), batch=2, length=64)


def test_costs_and_the_ring_are_those_of_the_window(model, capsys):
    config = model.config
    cache = model.init_cache(1, capacity=50)[1]
    assert isinstance(cache, WindowCache)
    assert cache.k.nbytes + cache.v.nbytes == costs.layer_costs(config, "window_attention", 50).cache_bytes
    few, more = (costs.layer_costs(config, "window_attention", n) for n in (50, 51))
    assert few.decode_flops == 4 * 20 * 4 * 16 == more.prefill_flops - few.prefill_flops
    assert sum(costs.parameters(config).values()) == costs.count(
        nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    assert cli.main(["info", str(FOLDER)]) == 0
    assert "window_attention" in capsys.readouterr().out


def test_layers_of_a_file_that_does_not_say_them_are_those_of_transformers():
    config = json.loads((FOLDER / "config.json").read_text()) | {"layer_types": None, "num_hidden_layers": 7}
    described = describe(config, "config.json")
    period = ("gated_delta_net", "window_attention", "gated_delta_net", "attention", "window_attention")
    assert described.family.config(described.fields).types == period + period[:2]


def test_fields_that_are_missing_are_what_transformers_takes():
    """As transformers 5.24.0 reads them; the shapes of the tensors show the taps of the convolution alone."""
    config = json.loads((FOLDER / "config.json").read_text())
    gone = ("sliding_window", "rms_norm_eps", "num_experts_per_tok", "tie_word_embeddings", "norm_topk_prob")
    gone += ("rope_parameters", "linear_conv_kernel_dim", "attention_bias", "hidden_act")
    described = describe({name: x for name, x in config.items() if name not in gone}, "config.json")
    read = described.family.config(described.fields)
    window = read.window_attention
    assert (window.window, window.rope_theta, window.rotary_dim) == (512, 1e4, window.head_dim)
    assert read.experts.per_token == 4 and read.experts.normalise
    assert read.tie_embeddings and read.norm_eps == 1e-6 and read.conv_size == 4


def test_what_is_not_supported_is_refused(tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in FOLDER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    hf_checkpoints.change_config(folder, attention_bias=True)
    with pytest.raises(NotImplementedError, match="attention_bias = True: attention with biases"):
        load_hf(folder)
