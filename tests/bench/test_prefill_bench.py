"""`gdn bench prefill`: what it times is right."""

import json

import pytest

from gdn_jax.bench import prefill as prefill_bench
from gdn_jax.commands import cli

TINY = "--heads 1 2 --width 16 --tokens 70 --requests 2 --pools float32 --dtype float32 --repeats 2".split()


def run(*words):
    return cli.main(["bench", "prefill", *TINY, *words])


@pytest.mark.slow
@pytest.mark.usefixtures("ticking_clock")
def test_prompts_are_timed_beside_the_rule_alone(tmp_path, capsys):
    path = tmp_path / "prefill.json"
    assert run("--json", str(path)) == 0
    assert "rule ms" in capsys.readouterr().out
    (r,) = json.loads(path.read_text())["results"]
    assert "failure" not in r and 0 < r["errors"]["rule"] < 1e-5 and r["errors"]["difference"] < 1e-5
    assert (r["ms"], r["rule ms"], r["more"]) == (1000, 1000, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rule", "difference"])
def test_wrong_outputs_are_not_timed(name, monkeypatch, capsys):
    """Outputs of the rule are compared with float64, or of prompts over a pool against the rule."""
    right = prefill_bench.worst_ratio
    calls = iter([1, 0] if name == "rule" else [0, 1])
    monkeypatch.setattr(prefill_bench, "worst_ratio", lambda *x: right(*x) + next(calls))
    assert run() == 1
    assert f"wrong: {name} 1.0e+00 > " in " ".join(capsys.readouterr().out.split())
