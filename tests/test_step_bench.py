"""`gdn bench --what step` on a tiny model."""

import dataclasses
import json

import jax
import pytest

from gdn_jax import cli
from gdn_jax.bench import step as step_bench
from gdn_jax.models.presets import PRESETS
from gdn_jax.training import peak

TINY = "--model tiny --tokens 128 --dtype float32 --repeats 1".split()


@pytest.mark.slow
def test_a_step_is_timed(tmp_path, capsys):
    path = tmp_path / "step.json"
    assert cli.main(["bench", "--what", "step", *TINY, "--lengths", "64", "--json", str(path)]) == 0
    assert "tokens/s" in capsys.readouterr().out
    (result,) = json.loads(path.read_text())["results"]
    assert result["length"] == 64 and result["fastest_ms"] <= result["step_ms"] <= result["slowest_ms"]
    assert result["tokens_per_second"] == pytest.approx(128 / result["step_ms"] * 1e3)
    assert 5 < result["loss"] < 7  # a fresh model: about ln 256 = 5.5 and half the variance of its logits


def test_presets_have_published_sizes_and_a_default_that_fits():
    """Of Qwen3.5-0.8B: 24 layers, every fourth attention, and a vocabulary that is the output projection too."""
    options = step_bench.StepBenchOptions(model="qwen3.5-0.8b", options=("remat=rule",))
    config = step_bench.config_of(options)
    assert config == dataclasses.replace(PRESETS["qwen3.5-0.8b"], dtype="bfloat16", remat="rule")
    assert config.weight_dtype == "float32" and config.vocab_size == 248320
    assert step_bench.tokens_of(options) == 32768 and not any(32768 % n for n in options.lengths)
    assert step_bench.tokens_of(step_bench.StepBenchOptions()) == 65536
    assert step_bench.tokens_of(step_bench.StepBenchOptions(tokens=128)) == 128


def test_share_of_peak(monkeypatch):
    """At 989 Tflop/s: 6 operations a value and token, and those of attention."""
    monkeypatch.setattr(peak, "of_device", lambda published: published["H200"])
    devices = jax.device_count()
    assert peak.share_of_peak(10**9, 1e4) == pytest.approx(6e13 / 989e12 / devices)
    assert peak.share_of_peak(10**9, 1e4, 2e9) == pytest.approx(8e13 / 989e12 / devices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lengths 60", "--lengths: expected divisors of --tokens 128, got 60"),
        ("--lengths 64 --model qwen9", "--model: expected one of tiny, 0.4b, 1.3b, qwen3.5-small"),
        ("--lengths 64 --tokens 0", "--tokens: expected at least 1, got 0"),
        ("--lengths 64 --options depth=3", "--options: expected fields of ModelConfig"),
        ("--lengths 64 --options remat=some", "--options: expected values that fit"),
        ("--lengths 64 --json nowhere/step.json", "--json: expected a file in a folder that exists"),
    ],
)
def test_wrong_options_are_one_line(options, message, capsys):
    assert cli.main(["bench", "--what", "step", *TINY, *options.split()]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
