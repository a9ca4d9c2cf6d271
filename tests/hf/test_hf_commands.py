"""`gdn generate` and `gdn info` on checkpoints and runs, and the costs that they tell."""

import dataclasses
import json
import re
import time
import types

import hf_checkpoints
import jax
import numpy as np
import pytest
import small_models
from flax import nnx

from gdn_jax.commands import cli
from gdn_jax.hf import load_hf, save_hf
from gdn_jax.hf.fields import Fields
from gdn_jax.hf.save import own_family
from gdn_jax.hf.text import Tokenizer, stop_tokens
from gdn_jax.layers.erase_then_delta import EraseDelta
from gdn_jax.models import AttentionConfig, ExpertsConfig, LanguageModel, ModelConfig, costs, generate
from gdn_jax.models.presets import PRESETS
from gdn_jax.models.served import slot_bytes
from gdn_jax.training.load import load_run

WORDS = [f"word{i}" for i in range(64)]


def with_tokenizer(name, to, words=64):
    """A copy of a checkpoint whose token i is the word i."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    folder = hf_checkpoints.copy(name, to)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"word{i}": i for i in range(words)}, unk_token="word0")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def run(capsys, *argv):
    status = cli.main([str(word) for word in argv])
    return status, *capsys.readouterr()


@pytest.mark.slow
def test_generate_writes_what_the_model_does(tmp_path, capsys):
    folder = with_tokenizer("qwen3_5_released", tmp_path)
    want = hf_checkpoints.expected("qwen3_5_released")
    prompt = " ".join(WORDS[i] for i in want["ids"][0, :9])
    greedy = [WORDS[i] for i in want["generated"][0]]
    argv = ("generate", folder, "--prompt", prompt, "--temperature", 0, "--tokens", 16)
    argv += ("--implementation", "recurrent")
    status, out, err = run(capsys, *argv)
    assert (status, err) == (0, "")
    assert out == prompt + " ".join(greedy) + "\n"
    # A token that ends the text is neither shown nor passed.
    stop = want["generated"][0, 4]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [63, int(stop)]}))
    _, out, _ = run(capsys, *argv)
    assert out == prompt + " ".join(greedy[: greedy.index(WORDS[stop])]) + "\n"

    status, _, err = run(capsys, "generate", folder, "--prompt", "word1 word60")
    assert status == 1 and "prompt: token 60 is image_token_id: images are not supported" in err
    status, _, err = run(capsys, "generate", folder)
    assert status == 1 and "--prompt: expected a text of one token or more, got none" in err
    (folder / "tokenizer.json").write_text("{}")
    status, _, err = run(capsys, "generate", folder, "--prompt", "x")
    assert status == 1 and "tokenizer.json: expected a tokenizer, got a damaged file" in err


@pytest.mark.slow
def test_generate_drafts(tmp_path, capsys):
    """The text that the model writes without drafts; a model without a head is refused."""
    words, want = 199, hf_checkpoints.expected_of(hf_checkpoints.FOLDER.parent / "qwen3_5_mtp")
    folder = with_tokenizer("qwen3_5_mtp", tmp_path, words)
    prompt, text = want["generated"][0, :21], want["generated"][0, 21:]
    argv = (
        "generate",
        folder,
        "--prompt",
        " ".join(f"word{i}" for i in prompt),
        "--implementation",
        "recurrent",
    )
    argv += ("--temperature", 0, "--tokens", len(text))
    drafts = "--drafts", "mtp"
    for options in ((), drafts, (*drafts, "--num-drafts", 1), (*drafts, "--draft-vocab", 70)):
        status, out, err = run(capsys, *argv, *options)
        assert (status, err) == (0, "") and out == argv[3] + " ".join(f"word{i}" for i in text) + "\n"
    status, _, err = run(capsys, *argv, "--drafts", "mtp", "--num-drafts", 33)
    assert status == 1 and "--num-drafts: expected 1 to 32, got 33" in err
    status, _, err = run(capsys, *argv, *drafts, "--draft-vocab", 10**6)
    assert status == 1 and "--draft-vocab: expected at most" in err
    folder = with_tokenizer("qwen3_5_released", tmp_path)
    status, _, err = run(capsys, "generate", folder, "--prompt", "word1", "--drafts", "mtp")
    assert status == 1 and "--drafts: expected none for a model without a head" in err


def test_generate_refuses(tmp_path, capsys):
    status, _, err = run(capsys, "generate", hf_checkpoints.FOLDER / "qwen3_5", "--prompt", "x")
    assert status == 1 and "expected tokenizer.json for a vocabulary of 64, got none" in err
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    hf_checkpoints.change_config(folder, model_type="llama")
    status, _, err = run(capsys, "generate", folder, "--prompt", "x")
    assert status == 1 and "model_type 'llama': only hybrid models" in err
    status, _, err = run(capsys, "generate", folder, "--top-p", 2, "--prompt", "x")
    assert status == 1
    status, _, err = run(capsys, "generate", tmp_path / "nothing")
    assert status == 1 and "expected a run folder or a folder with a Hugging Face checkpoint, got" in err


def test_info_of_a_checkpoint(capsys, tmp_path):
    folder = hf_checkpoints.FOLDER / "qwen3_5_moe_released"
    status, out, _ = run(capsys, "info", folder, "--context", 100, "--batch", 3)
    assert status == 0
    config = load_hf(folder).config
    counts = costs.parameters(config)
    assert re.search(rf"all +│ {sum(counts.values()):,} │ 100.0%", out) and "parameters, " in out
    assert f"{sum(counts.values()):,}" in out and f"{counts['experts']:,}" in out
    assert "4 layers of width 32: 1 x (3 x GatedDeltaNet, 1 x attention)" in out
    assert "model.visual." in out and "cache of 3 x 100 tokens" in out
    status, _, err = run(capsys, "info", folder, "--context", 0)
    assert status == 1 and "--context: expected a number above 0, got 0" in err


@pytest.mark.slow
def test_info_of_a_preset_says_how_long_fresh_weights_remember(capsys):
    """Keys of 128 and strengths of 0.5 erase half in 128 ln 2 / 0.5 tokens, a decay of 8 * 0.01 in ln 2 / 0.08."""
    status, out, _ = run(capsys, "info", "qwen3-next-80b-a3b")
    assert "qwen3-next-80b-a3b: a preset, weights float32" in out
    assert (
        status == 0 and "8.26 tokens, 8.66 by the decay of a middle head alone, 177 by erasing alone" in out
    )


@pytest.mark.slow
def test_info_of_a_mesh(capsys):
    """On 8 devices an eighth of every matrix; what does not divide is refused."""
    status, out, _ = run(capsys, "info", "qwen3.5-small", "--mesh", "data=8,sharded")
    numbers = sum(costs.parameters(PRESETS["qwen3.5-small"]).values())
    kept = float(re.search(r"all, without activations +│ +([0-9.]+) MiB", out)[1])
    assert status == 0 and "a device of data=8,sharded, float32" in out
    assert 16 * numbers / 8 <= kept * 2**20 < 16 * numbers / 8 * 1.02  # vectors are whole on each
    _, out, _ = run(capsys, "info", "qwen3.5-small", "--mesh", "data=8")
    assert f"{16 * numbers / 2**20:.4g} MiB" in out
    for mesh, message in (("head=3", "head: expected a divisor"), ("data=8,heads=3", "got 'heads=3'")):
        status, _, err = run(capsys, "info", "qwen3.5-small", "--mesh", mesh)
        assert status == 1 and "--mesh: " in err and message in err


def test_costs_of_thousands_of_layers_take_no_time():
    """One layer of each kind is traced, and counted as often as it is there."""
    config = dataclasses.replace(MODELS[1], num_layers=4, dense_layers=())
    begin = time.process_time()
    deep = ModelConfig(num_layers=2_000)
    one = costs.parameters(ModelConfig(num_layers=1))
    many = costs.parameters(deep)
    assert many["SwiGLU"] == 2_000 * one["SwiGLU"] and many["embedding"] == one["embedding"]
    assert slot_bytes(deep) == 2_000 * slot_bytes(ModelConfig(num_layers=1))
    assert time.process_time() - begin < 3
    state = nnx.state(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))), nnx.Param)
    want, got = (
        jax.tree.leaves_with_path(nnx.to_pure_dict(state)),
        jax.tree.leaves_with_path(costs.shapes(config)),
    )
    assert [(k, x.shape, x.dtype) for k, x in want] == [(k, x.shape, x.dtype) for k, x in got]


def test_stop_tokens(tmp_path):
    for name, content, want in [
        ("config.json", {"text_config": {"eos_token_id": 5}}, (5,)),
        ("generation_config.json", {"eos_token_id": None}, (5,)),
        ("generation_config.json", {"eos_token_id": [7, 8]}, (7, 8)),
    ]:
        (tmp_path / name).write_text(json.dumps(content))
        assert stop_tokens(tmp_path, 9) == want
    for name, wrong in (("generation_config.json", [7, 9]), ("config.json", -1)):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": wrong}))
        got = wrong if name == "config.json" else 9
        with pytest.raises(
            ValueError, match=rf"{name}: expected eos_token_id to be tokens from 0 to 8, got {got}"
        ):
            stop_tokens(tmp_path, 9)
        (tmp_path / name).unlink()
    for wrong in (True, 2.0, "2", 2**31, 10**30, [[1]]):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(
            ValueError, match=r"config.json: expected eos_token_id to be tokens from 0 to 8, got"
        ):
            stop_tokens(tmp_path, 9)


def test_a_tokenizer(tmp_path):
    """Truncation and padding are switched off, as in transformers; a token is one of the model's."""
    file = with_tokenizer("qwen3_5", tmp_path) / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padded = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    padded |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "word0"}
    for options in ({}, {"truncation": cut}, {"padding": padded}, {"truncation": cut, "padding": padded}):
        file.write_text(json.dumps(json.loads(file.read_text()) | options))
        tokenizer = Tokenizer(file, 64)
        assert tokenizer.encode("word3 word17 word4") == [3, 17, 4]
        assert tokenizer.decode([3, 17]) == "word3 word17"
    with pytest.raises(
        ValueError, match=r"tokenizer.json: expected tokens below the vocabulary's size 17, got 17"
    ):
        Tokenizer(file, 17).encode("word3 word17")


@pytest.fixture
def writes(monkeypatch):
    """`generate` draws the tokens 3, 4, 5, whatever the model is."""

    def draw(model, prompt, num_tokens, *, on_token, **options):
        for token in (3, 4, 5):
            on_token(np.array([token]))

    monkeypatch.setattr("gdn_jax.inspect.generate.models.generate", draw)


def test_a_terminal_obeys_no_token(writes, tmp_path, capsys):
    """Control characters are shown as escapes. Other ones, lines and tabs stay, and so does the library's text."""
    folder = with_tokenizer("qwen3_5", tmp_path)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    odd = ["\x1b]0;pwned\x07", "\x9b2J\x7f\r", "a\u200dü\n\t"]
    for i, word in enumerate(odd, 3):
        del content["model"]["vocab"][f"word{i}"]
        content["model"]["vocab"][word] = i
    file.write_text(json.dumps(content))
    status, out, _ = run(capsys, "generate", folder, "--prompt", "word1\x1b[2J \udcff")
    assert (status, out) == (
        0,
        "word1\\x1b[2J \ufffd" + "\\x1b]0;pwned\\x07 \\x9b2J\\x7f\\r a\u200dü\n\t\n",
    )
    assert Tokenizer(file, 64).decode([3, 4, 5]) == " ".join(odd)


MODELS = [
    ModelConfig(num_layers=3, num_heads=2, num_v_heads=4, head_dim=8, expand_v=1.5),
    ModelConfig(
        num_layers=4,
        attention=AttentionConfig(4, 2, 16, "head", output_gate=True),
        experts=ExpertsConfig(5, 2, 8, 12),
        dense_layers=(0,),
        tie_embeddings=True,
        dtype="bfloat16",
    ),
]


@pytest.mark.parametrize("config", MODELS, ids=["pure", "hybrid"])
def test_costs_are_those_of_the_model(config):
    """Parameters and the cache, counted on the model itself."""
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert sum(costs.parameters(config).values()) == count
    L = 37
    cache = jax.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)).init_cache(1, L))
    kept = sum(x.size * x.dtype.itemsize for c in cache for x in c[:2])
    assert costs.model_costs(config, L).cache_bytes == kept
    if config.experts is None:
        assert costs.active_parameters(config) == count
    else:
        idle = 3 * (5 - 2) * 3 * 8 * config.hidden_size  # layers, experts, projections
        assert costs.active_parameters(config) == count - idle


@pytest.mark.parametrize(
    "name, total, active",
    [
        ("qwen3.5-0.8b", 0.752e9, 0.752e9),
        ("qwen3.5-35b-a3b", 34.66e9, 3.455e9),
        pytest.param("qwen3-next-80b-a3b", 79.67e9, 3.875e9, marks=pytest.mark.slow),
        ("olmo-hybrid-7b", 7.431e9, 7.431e9),
        ("kimi-linear-48b-a3b", 49.12e9, 3.484e9),
        ("ling-3.0-tiny", 7.893e9, 1.382e9),
    ],
)
def test_published_sizes(name, total, active):
    """Parameters without images and the prediction of several tokens; the experts' numbers are in the names."""
    config = PRESETS[name]
    assert sum(costs.parameters(config).values()) == pytest.approx(total, rel=1e-3)
    assert costs.active_parameters(config) == pytest.approx(active, rel=1e-3)


HYBRIDS = [
    name
    for name, config in PRESETS.items()
    if config.attention is not None and not isinstance(config.mixer, EraseDelta)
]
"""Hybrid presets, but those of Erase-then-Delta Attention, of which no checkpoints have been released."""


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_family_has_every_hybrid(name):
    """`save_hf` can write it: its configuration is that of a family, and comes back."""
    family, fields, _ = own_family(PRESETS[name])
    config = family.config(Fields(fields, family.defaults, name))
    told = {"num_v_heads": config.num_v_heads, "layer_types": config.layer_types}
    assert config == dataclasses.replace(PRESETS[name], intermediate_size=config.intermediate_size, **told)


@pytest.mark.parametrize("name", sorted({*PRESETS} - {*HYBRIDS}))
def test_other_models_are_of_no_family(name):
    """`save_hf` says so, with the reason of each family."""
    with pytest.raises(NotImplementedError, match="no family has such a model"):
        own_family(PRESETS[name])


def test_costs_grow_as_they_should():
    """Attention quadratically and its cache linearly; a GatedDeltaNet linearly and its cache not at all."""
    config = MODELS[1]
    short, long = (costs.attention_costs(config, L) for L in (10**4, 10**5))
    assert 99 < long.prefill_flops / short.prefill_flops < 101
    assert long.cache_bytes == 10 * short.cache_bytes and long.decode_flops > 9.9 * short.decode_flops
    short, long = (costs.layer_costs(config, "gated_delta_net", L) for L in (10**4, 10**5))
    assert long.prefill_flops == 10 * short.prefill_flops
    assert (long.cache_bytes, long.decode_flops) == (short.cache_bytes, short.decode_flops)
    wide = dataclasses.replace(config, head_dim=2 * config.head_dim)
    assert costs.layer_costs(wide, "gated_delta_net", 1).decode_flops == 4 * short.decode_flops


@pytest.mark.slow
def test_a_run_is_generated_from(tmp_path, capsys, monkeypatch):
    """The bytes of a run, as they come; the model is a stand-in."""
    from gdn_jax.inspect import generate as command

    config = ModelConfig(hidden_size=16, num_layers=1, head_dim=4, implementation="recurrent")
    model = small_models.made(config)

    stand_in = types.SimpleNamespace(model=model, text=command.next_byte.TEXT)
    monkeypatch.setattr(command, "load_text_run", lambda path, implementation: stand_in)
    status, out, err = run(capsys, "generate", tmp_path, "--prompt", "ab", "--temperature", 0, "--tokens", 6)
    tokens = np.asarray(generate(model, command.next_byte.encode("ab"), 6))[0]
    assert status == 0 and out == "ab" + command.next_byte.decode(jax.numpy.asarray(tokens)) + "\n"
    status, out, _ = run(capsys, "generate", tmp_path, "--prompt", "a\udcff", "--tokens", 1)
    assert status == 0 and out.startswith("a\ufffd"), "a byte that is no text"
    status, _, err = run(capsys, "generate", tmp_path, "--dtype", "float32")
    assert status == 1 and "--dtype: expected auto for a run" in err


HYBRID = (
    "--model",
    "hybrid",
    "--num-layers",
    "2",
    "--attention-every",
    "2",
    "--hidden-size",
    "16",
    "--head-dim",
    "8",
)


@pytest.mark.slow
def test_a_hybrid_is_trained_and_written_as_a_checkpoint(folder, tmp_path, capsys):
    """gdn train, gdn info, save_hf, and gdn generate on what was written."""
    from tiny_runs import metrics, train

    out = tmp_path / "run"
    assert train(folder, out, *HYBRID) == 0
    lines = metrics(out)
    assert lines[-1]["loss"] < lines[0]["loss"]
    model = load_run(out).model
    assert model.config.types == ("gated_delta_net", "attention")
    capsys.readouterr()
    status, text, _ = run(capsys, "info", out)
    assert status == 0 and "2 layers of width 16: 1 x (1 x GatedDeltaNet, 1 x attention)" in text
    save_hf(model, tmp_path / "saved")
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.to_pure_dict(nnx.state(model)),
        nnx.to_pure_dict(nnx.state(load_hf(tmp_path / "saved"))),
    )
    argv = ("--prompt", "def f", "--temperature", 0, "--tokens", 5)
    status, text, err = run(capsys, "generate", tmp_path / "saved", *argv)
    assert status == 0 and text.startswith("def f") and "its 256 tokens are taken as bytes" in err
    assert run(capsys, "generate", out, *argv)[:2] == (0, text)


@pytest.mark.parametrize(
    "message, options",
    [
        ("--attention-every: expected 2 to --num-layers 2, got 3", ("--attention-every", "3")),
        ("--attention-every: expected 2 to --num-layers 2, got 1", ("--attention-every", "1")),
        ("--rule: expected gated_delta in a hybrid, got delta", ("--rule", "delta")),
        ("--allow-neg-eigval: expected False in a hybrid, got True", ("--allow-neg-eigval",)),
    ],
)
def test_hybrids_that_cannot_be_had(message, options, capsys):
    status, _, err = run(capsys, "train", "bytes", *HYBRID, *options)
    assert status == 1 and message in err
