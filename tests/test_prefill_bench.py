"""`gdn bench --what prefill`: what it times is right, and wrong options are one line."""

import json

import pytest

from gdn_jax import cli
from gdn_jax.bench import prefill as prefill_bench

TINY = "--heads 1 2 --width 16 --tokens 70 --requests 2 --pools float32 --dtype float32 --repeats 2".split()


def run(*words):
    return cli.main(["bench", "--what", "prefill", *TINY, *words])


def test_prompts_are_timed_beside_the_rule_alone(tmp_path, capsys):
    path = tmp_path / "prefill.json"
    assert run("--json", str(path)) == 0
    assert "us the rule alone: " in " ".join(capsys.readouterr().out.split())
    (r,) = json.loads(path.read_text())["results"]
    assert r["failure"] is None and 0 < r["error"] < 1e-5 and r["difference"] < 1e-5
    assert r["more"] == pytest.approx(r["prefill_us"] / r["rule_us"] - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["error", "difference"])
def test_wrong_outputs_are_not_timed(name, monkeypatch, capsys):
    """Of the rule against float64, or of prompts over a pool against the rule."""
    right = prefill_bench.worst_ratio
    calls = iter([1 if name == "error" else 0, 1])
    monkeypatch.setattr(prefill_bench, "worst_ratio", lambda *x: right(*x) + next(calls))
    assert run() == 1
    assert f"wrong: {name} 1.0e+00, allowed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tokens 0", "--tokens: expected numbers of at least 1, got 0"),
        ("--requests 71", "--requests: expected no more than there are tokens, got 71"),
        ("--heads 2 3", "--heads: expected a number of value heads that the key heads divide, got 2 3"),
        ("--width 300", "--width: expected 1 to 256, got 300"),
        ("--repeats 0", "--repeats: expected at least 1, got 0"),
    ],
)
def test_wrong_options_are_one_line(options, message, capsys):
    assert run(*options.split()) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
