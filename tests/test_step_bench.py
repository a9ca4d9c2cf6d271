"""`gdn bench --what step` on a tiny model."""

import json

import pytest

from gdn_jax import cli

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lengths 60", "--lengths: expected divisors of --tokens 128, got 60"),
        ("--lengths 64 --options depth=3", "--options: expected fields of ModelConfig"),
        ("--lengths 64 --options remat=some", "--options: expected values that fit"),
        ("--lengths 64 --json nowhere/step.json", "--json: expected a file in a folder that exists"),
    ],
)
def test_wrong_options_are_one_line(options, message, capsys):
    assert cli.main(["bench", "--what", "step", *TINY, *options.split()]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
