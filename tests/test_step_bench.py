"""`gdn bench step` on a tiny model."""

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
@pytest.mark.usefixtures("ticking_clock")
def test_a_step_is_timed(tmp_path, capsys):
    """A measurement has four steps, and so a step a quarter of its second."""
    path = tmp_path / "step.json"
    assert cli.main(["bench", "step", *TINY, "--lengths", "64", "--json", str(path)]) == 0
    assert "tokens/s" in capsys.readouterr().out
    (result,) = json.loads(path.read_text())["results"]
    assert result["length"] == 64 and result["fastest"] == result["ms"] == result["slowest"] == 250
    assert result["tokens/s"] == 512
    assert 5 < result["loss"] < 7  # a fresh model: about ln 256 = 5.5 and half the variance of its logits


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
