"""`gdn bench generate`: the loop that it times is that of `generate`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from flax import nnx

from gdn_jax.bench import generate as generate_bench
from gdn_jax.commands import cli
from gdn_jax.models import generate
from gdn_jax.models.attention import AttentionCache, reserve
from gdn_jax.models.costs import attention_costs, model_costs, multiplied_parameters, parameters
from gdn_jax.models.presets import PRESETS
from gdn_jax.training import peak

TINY = "--model tiny --dtype float32 --prefill 16 --batches 1 3 --contexts 8 --tokens 4 --repeats 2".split()
TINY += ["--options", "implementation=recurrent"]  # compiles fast
CONFIG = dataclasses.replace(
    PRESETS["qwen3.5-small"],
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    layer_types=("gated_delta_net", "attention"),
    implementation="recurrent",  # compiles fast
)


def run(*words):
    return cli.main(["bench", "generate", *TINY, *words])


@pytest.mark.parametrize("L", [0, 1, 7])
def test_a_token_more_costs_a_token(L):
    """Attention computes the same for L + 1 tokens at once as for L of them and for the one behind them."""
    more, less = attention_costs(CONFIG, L + 1), attention_costs(CONFIG, L)
    assert more.prefill_flops - less.prefill_flops == less.decode_flops


@pytest.mark.slow
@pytest.mark.usefixtures("ticking_clock")
def test_reading_and_writing_are_timed(tmp_path, capsys):
    """A measurement is a whole prompt, or four tokens of every row."""
    path, figure = tmp_path / "generate.json", tmp_path / "generate.png"
    assert run("--batches", "3", "--json", str(path), "--figure", str(figure)) == 0
    out = capsys.readouterr().out
    assert "| prompt | 16 " in out and "| token  | 8 " in out
    read, written = json.loads(path.read_text())["results"]
    assert (read["ms"], read["tokens/s"]) == (1000, 16)
    assert (written["ms"], written["tokens/s"]) == (250, 12)
    for r, context, batch in ((read, 16, 1), (written, 8, 3)):
        assert (r["context"], r["batch"]) == (context, batch)
        assert "ms of bytes" not in r  # of a CPU
        assert r["first s"] > 0
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(("acceptance", "least", "most"), [(1.0, 3, 3), (0.0, 1, 1), (0.5, 1.3, 2.2)])
def test_drafts_are_right_as_often_as_asked_for(acceptance, least, most):
    """Two of them in a pass: three tokens where all are right, one where none is."""
    options = dict(repeats=1, tokens=31, drafts=2, draft_vocab=7, acceptance=acceptance, model="tiny")
    benchmark = generate_bench.GenerateBenchmark(**options)
    model = small_models.made(dataclasses.replace(CONFIG, tie_embeddings=True))
    before = np.asarray(model.embedding[...])
    [result] = benchmark.time_drafts(model, {"what": "2 drafts", "context": 9, "batch": 1})
    assert least <= result.numbers["tokens a pass"] <= most
    np.testing.assert_array_equal(model.embedding[...], before)
    assert model.mtp is None


def test_a_cache_too_large_is_a_line_of_its_own(capsys):
    """Batch 1 is timed all the same."""
    assert run("--prefill", "0", "--largest-cache", "0.00001") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "prompt" not in out and "| token | 8 | 1 |" in out
    assert "context 8, batch 3: left out, its cache has 1.92e-05 GB, more than 1e-05" in out


@pytest.mark.slow
def test_the_timed_loop_is_that_of_generate():
    """From a prompt's cache the loop gives the tokens of `generate`; from a random one it ends where it should."""
    model = small_models.made(CONFIG)
    graphdef, params = nnx.split(model)
    prompt = np.arange(32).reshape(2, 16).astype(np.int32)
    want = np.asarray(generate(model, jnp.asarray(prompt), 6))

    @jax.jit
    def read(params):
        _, cache = nnx.merge(graphdef, params)(jnp.asarray(prompt), return_cache=True)
        assert cache is not None
        return tuple(reserve(c, 5) if isinstance(c, AttentionCache) else c for c in cache)

    tokens, _ = generate_bench._continue(
        graphdef, params, jnp.asarray(want[:, 0]), read(params), num_tokens=6
    )
    np.testing.assert_array_equal(tokens, want)
    cache = generate_bench._fill(model, 2, context=11, capacity=16)
    counted = 2 * model_costs(CONFIG, 16).cache_bytes + 2 * 4  # lengths beside it
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == counted
    _, cache = generate_bench._continue(graphdef, params, jnp.asarray(want[:, 0]), cache, num_tokens=6)
    np.testing.assert_array_equal(cache[1].length, [16, 16])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("name", ["qwen3.5-small", "olmo-hybrid-small", "qwen3.5-moe-small"])
def test_what_a_model_computes_and_moves(name, monkeypatch):
    """By hand: of attention 12 operations for every channel and pair of tokens, of which half are seen."""
    config, L = PRESETS[name], 64
    counts = parameters(config)
    used = sum(counts.values()) - (0 if config.tie_embeddings else counts["embedding"])
    if config.experts is not None:
        used -= config.num_layers * 3 * (config.experts.num_experts - config.experts.per_token) * 64 * 128
    assert multiplied_parameters(config) == used
    attends = config.types.count("attention") * 12 * 4 * 32 * (L + 1) / 2
    assert peak.attention_flops(config, L) == pytest.approx(attends)
    monkeypatch.setattr(generate_bench, "of_device", lambda _: 1e9)
    state = 2 * model_costs(config, 0).cache_bytes  # without a token attention layers keep nothing
    keys = config.types.count("attention") * attention_costs(config, L).cache_bytes
    if (e := config.experts) is not None:  # three rows leave so many experts out
        left = e.num_experts * (1 - e.per_token / e.num_experts) ** 3
        used += config.num_layers * 3 * (e.num_experts - left - e.per_token) * 64 * 128
    assert generate_bench.bytes_ms(config, 3, L) == pytest.approx((4 * used + 3 * (state + keys)) / 1e6)
