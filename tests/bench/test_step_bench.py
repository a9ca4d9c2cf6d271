"""`gdn bench step` on a tiny model."""

import dataclasses
import json

import jax
import pytest

import gdn_jax
from gdn_jax.bench import peers
from gdn_jax.bench import step as step_bench
from gdn_jax.commands import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.models.presets import PRESETS
from gdn_jax.training import peak


@pytest.fixture
def other_library(monkeypatch):
    """jax-linear-attention, whose two calls are the recurrence times a factor, which the fixture returns."""
    factor = [1.0]

    def rule(row, tokens, state):
        o, final = gdn_jax.gated_delta_rule(*tokens, initial_state=state, implementation="recurrent")
        return (factor[0] * o).astype(o.dtype), final

    def layer(q, k, v, *, g, beta):
        return gdn_jax.gated_delta_rule(q, k, v, g, beta, implementation="recurrent")[0]

    name = "jax-linear-attention"
    monkeypatch.setitem(peers.IN_LAYERS, name, peers.IN_LAYERS[name]._replace(rule=rule, layer=layer))
    monkeypatch.setattr(peers, "reason", lambda peer: None)
    return factor


@pytest.mark.slow
@pytest.mark.usefixtures("ticking_clock")
def test_a_step_with_another_librarys_rule_in_the_layers(other_library, tmp_path, capsys):
    """The same model and batch, so the same loss and gradient; a rule that is wrong is not timed. A measurement has
    four steps, and so a step a quarter of its second."""
    words = [
        *("bench step --model tiny --tokens 64 --lengths 64 --repeats 1".split()),
        *("--options", "num_layers=1", "--peers", "jax-linear-attention"),
    ]
    path = tmp_path / "step.json"
    assert cli.main([*words, "--json", str(path)]) == 0
    ours, theirs = json.loads(path.read_text())["results"]
    assert "tokens/s" in capsys.readouterr().out
    assert (ours["rule"], theirs["rule"]) == ("gdn-jax", "jax-linear-attention")
    for result in (ours, theirs):
        assert result["length"] == 64 and result["fastest"] == result["ms"] == result["slowest"] == 250
        assert result["tokens/s"] == 256
    assert 5 < ours["loss"] < 7  # a fresh model: about ln 256 = 5.5 and half the variance of its logits
    # Two forms of one rule in bfloat16, with outputs that are off by up to 5e-3 each, in random directions.
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-3)
    assert theirs["grad norm"] == pytest.approx(ours["grad norm"], rel=1e-2)
    other_library[0] = 2.0
    bench = step_bench.StepBenchmark(model="tiny", lengths=(64,), tokens=64, options=("num_layers=1",))
    peer = peers.IN_LAYERS["jax-linear-attention"]
    [wrong] = bench.time_peer(peer, bench.config(), {"length": 64})
    assert wrong.failure.startswith("wrong: o 1.0e+00")


def test_another_librarys_rule_needs_layers_that_can_have_it(other_library):
    bench = step_bench.StepBenchmark(model="tiny", lengths=(64,), tokens=64, peers=("jax-linear-attention",))
    bench.check()
    with pytest.raises(RunError, match="--peers: expected none but for layers with the gated delta rule"):
        dataclasses.replace(bench, options=("mixer=kda",)).check()
    with pytest.raises(RunError, match="--peers: expected none with --dtype float32"):
        dataclasses.replace(bench, dtype="float32").check()


def test_presets_have_published_sizes():
    """Qwen3.5-0.8B: 24 layers, every fourth attention, and a vocabulary that is the output projection too."""
    bench = step_bench.StepBenchmark(model="qwen3.5-0.8b", options=("remat=rule",))
    config = bench.config()
    assert config == dataclasses.replace(PRESETS["qwen3.5-0.8b"], dtype="bfloat16", remat="rule")
    assert config.weight_dtype == "float32" and config.vocab_size == 248320
    assert not any(bench.tokens % n for n in bench.lengths)


def test_share_of_peak(monkeypatch):
    """At 989 Tflop/s: 6 operations a value and token, and those of attention."""
    monkeypatch.setattr(peak, "of_device", lambda published: published["H200"])
    devices = jax.device_count()
    assert peak.share_of_peak(10**9, 1e4) == pytest.approx(6e13 / 989e12 / devices)
    assert peak.share_of_peak(10**9, 1e4, 2e9) == pytest.approx(8e13 / 989e12 / devices)
