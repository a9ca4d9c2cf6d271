"""`gdn bench decode`: what it times is right."""

import itertools
import json

import numpy as np
import pytest

from gdn_jax.bench import decode as decode_bench
from gdn_jax.commands import cli

TINY = "--heads 1 2 --width 16 --batches 1 3 --repeats 2 --deferred 1 4 --tokens 1 2".split()


def run(*words):
    return cli.main(["bench", "decode", *TINY, *words])


@pytest.mark.slow
@pytest.mark.usefixtures("ticking_clock")
def test_steps_are_timed(tmp_path, capsys):
    """A measurement is a period: a step, or as many as a ring of four takes."""
    path = tmp_path / "decode.json"
    assert run("--json", str(path), "--pools", "float32", "--dtype", "float32") == 0
    out = capsys.readouterr().out
    assert "tokens/s" in out
    results = json.loads(path.read_text())["results"]
    lines = list(itertools.product((1, 2), (1, 4), (1, 3)))
    assert [(r["tokens"], r["write"], r["batch"]) for r in results] == lines
    for r in results:
        assert "failure" not in r and 0 < r["error"] < 1e-5
        steps = r["write"] // r["tokens"] if r["write"] > 1 else 1
        assert r["fastest"] == r["ms"] == r["slowest"] == pytest.approx(1000 / steps)
        assert r["tokens/s"] == pytest.approx(r["batch"] * r["tokens"] * steps)
        writes = r["tokens"] if r["write"] == 1 else 1 / steps
        moved = r["batch"] * 2 * 16 * 16 * 4 * (1 + writes)
        assert r["TB/s"] == pytest.approx(moved * steps / 1e12)


@pytest.mark.slow
@pytest.mark.usefixtures("ticking_clock")
def test_trees_are_timed(tmp_path, capsys):
    """With a state after each token and on rings; of four tokens the three on the path to the last are counted."""
    path = tmp_path / "decode.json"
    words = "--pools float32 --dtype float32 --batches 3 --tokens 4 --deferred 1 16 --drafts tree"
    assert run(*words.split(), "--json", str(path)) == 0
    assert "tokens 4, pool float32, write 16, batch 3, drafts tree, gates head: " in capsys.readouterr().err
    at_once, ring = json.loads(path.read_text())[
        "results"
    ]  # in a second a step of three requests, or five of them
    assert at_once["tokens/s"] == pytest.approx(3 * 3) and ring["tokens/s"] == pytest.approx(5 * 3 * 3)


def test_periods_of_trees():
    line = decode_bench.Line(None, 4, "float32", 16, 1, "tree")
    assert line.accepted == [0, 1, 3] and line.steps == 5
    assert line._replace(drafts="chain").steps == 4 and line._replace(write=1).steps == 1


def test_a_wrong_step_is_not_timed(monkeypatch, capsys):
    """States of another layout: the numbers are wrong, and no time is shown."""
    right = decode_bench.oracle.forward
    monkeypatch.setattr(
        decode_bench.oracle, "forward", lambda *x, **options: right(*x, **options | {"state_layout": "vk"})
    )
    assert run("--pools", "float32", "--batches", "3", "--deferred", "1", "--tokens", "1") == 1
    out = capsys.readouterr().out
    assert "wrong: o" in out and "tokens/s" not in out


def test_what_the_kernels_cannot_take_is_a_line_of_its_own(capsys):
    """The other implementation is timed all the same."""
    lines = "--pools float32 --batches 1 --deferred 1 --tokens 1 --implementations mosaic_gpu xla"
    assert run(*lines.split()) == 1
    out = " ".join(capsys.readouterr().out.split())
    refused = (
        "FAILED by mosaic_gpu, tokens 1, pool float32, write 1, batch 1, drafts chain, gates head: raised "
    )
    assert (
        refused + "NotImplementedError: implementation 'mosaic_gpu': K = 16, V = 16; the kernel takes" in out
    )
    assert "| xla | 1 | float32 | 1 | 1 | chain | head |" in out


def test_states_in_eight_bits_are_for_rings(capsys):
    assert run("--pools", "int8", "--deferred", "1", "4", "--tokens", "1") == 1
    assert "--deferred: expected more than 1 for a pool of 8 bits" in " ".join(
        capsys.readouterr().err.split()
    )


def test_inputs_are_those_of_the_seed():
    options = decode_bench.DecodeBenchmark(heads=(1, 2), width=4)
    line = decode_bench.Line(None, 1, "bfloat16", 2, 3)
    first, same = (decode_bench.draw(options, line) for _ in range(2))
    for a, b in zip((*first.tokens, *first[1:]), (*same.tokens, *same[1:]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_decay_of_each_channel(capsys):
    """Its tokens are the family's, in a pool; wrong ones would not be timed."""
    assert run(*"--gates channel erase --pools float32 --batches 3 --deferred 1 --tokens 1".split()) == 0
    err = capsys.readouterr().err
    assert "drafts chain, gates channel: " in err and "drafts chain, gates erase: " in err
