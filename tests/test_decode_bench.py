"""`gdn bench --what decode`: what it times is right, and wrong options are one line."""

import itertools
import json
import re

import numpy as np
import pytest

from gdn_jax import cli
from gdn_jax.bench import decode as decode_bench

TINY = "--heads 1 2 --width 16 --batches 1 3 --repeats 2 --deferred 1 4 --tokens 1 2".split()


def run(*words):
    return cli.main(["bench", "--what", "decode", *TINY, *words])


@pytest.mark.slow
def test_steps_are_timed(tmp_path, capsys):
    path = tmp_path / "decode.json"
    assert run("--json", str(path), "--pools", "float32", "--dtype", "float32") == 0
    out = capsys.readouterr().out
    assert "tokens 2, batch 3, float32 pool, a write in 4:" in out and "tokens/s" in out
    results = json.loads(path.read_text())["results"]
    lines = list(itertools.product((1, 2), (1, 4), (1, 3)))
    assert [(r["tokens"], r["deferred"], r["batch"]) for r in results] == lines
    for r in results:
        assert r["failure"] is None and 0 < r["error"] < 1e-5
        assert r["fastest_us"] <= r["step_us"] <= r["slowest_us"]
        assert r["tokens_per_second"] == pytest.approx(r["batch"] * r["tokens"] / r["step_us"] * 1e6)
        writes = r["tokens"] if r["deferred"] == 1 else r["tokens"] / r["deferred"]
        moved = r["batch"] * 2 * 16 * 16 * 4 * (1 + writes)
        assert r["terabytes_per_second"] == pytest.approx(moved / r["step_us"] * 1e-6)


@pytest.mark.slow
def test_trees_are_timed(capsys):
    """With a state after each token and on rings; of four tokens three are on the path to the last."""
    words = "--pools float32 --dtype float32 --batches 3 --tokens 4 --deferred 1 16 --drafts tree"
    assert run(*words.split()) == 0
    out = capsys.readouterr().out
    assert "a tree, tokens 4, batch 3, float32 pool, a write in 16:" in out


def test_periods_of_trees():
    line = decode_bench.Line(None, 4, "float32", 16, 1, "tree")
    assert line.accepted == [0, 1, 3] and line.steps == 5
    assert line._replace(drafts="chain").steps == 4 and line._replace(deferred=1).steps == 1


def test_a_wrong_step_is_not_timed(monkeypatch, capsys):
    """States of another layout: the numbers are wrong, and no time is shown."""
    right = decode_bench.oracle.forward
    monkeypatch.setattr(
        decode_bench.oracle, "forward", lambda *x, **options: right(*x, **options | {"state_layout": "vk"})
    )
    assert run("--pools", "float32", "--batches", "3", "--deferred", "1", "--tokens", "1") == 1
    out = capsys.readouterr().out
    assert "wrong: error" in out and "0 tokens/s" not in out


def test_what_the_kernels_cannot_take_is_a_line_of_its_own(capsys):
    """The other implementation is timed all the same."""
    lines = "--pools float32 --batches 1 --deferred 1 --tokens 1 --implementations mosaic_gpu xla"
    assert run(*lines.split()) == 1
    out = " ".join(capsys.readouterr().out.split())
    refused = "mosaic_gpu, tokens 1, batch 1, float32 pool, a write in 1: NotImplementedError: "
    assert refused + "implementation 'mosaic_gpu': K = 16, V = 16; the kernel takes" in out
    assert re.search(r"xla, tokens 1, batch 1, float32 pool, a write in 1: [1-9]\d* tokens/s", out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batches 0", "--batches: expected numbers of at least 1, got 0"),
        ("--heads 2 3", "--heads: expected a number of value heads that the key heads divide, got 2 3"),
        ("--width 300", "--width: expected 1 to 256, got 300"),
        ("--repeats 0", "--repeats: expected at least 1, got 0"),
        ("--implementations triton", "triton"),
        ("--tokens 5", "--tokens: expected no more than a ring holds, got 5"),
        ("--json nowhere/decode.json", "--json: expected a file in a folder that exists"),
    ],
)
def test_wrong_options_are_one_line(options, message, capsys):
    assert run(*options.split()) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_inputs_are_those_of_the_seed():
    options = decode_bench.DecodeBenchOptions(heads=(1, 2), width=4)
    line = decode_bench.Line(None, 1, "bfloat16", 2, 3)
    first, same = (decode_bench._draw(options, line) for _ in range(2))
    for a, b in zip((*first.tokens, *first[1:]), (*same.tokens, *same[1:]), strict=True):
        np.testing.assert_array_equal(a, b)
