"""What `gdn sweep` refuses: options, configuration files, words."""

import json
import os
import re

import pytest
from tiny_sweeps import CONFIG, start

from gdn_jax.commands import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.sweeps import grid, summary


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "--config: expected JSON in"),
        ('{"a":' + "[" * 100_000, "config.json, got objects or lists are nested too deep"),
        ("[]", '--config: expected an object with "task" and "options"'),
        (
            CONFIG | {"task": "sweep copy"},
            "--config: expected a file of the task sweep bytes, got sweep copy",
        ),
        (CONFIG | {"options": {"size": "huge"}}, "--config: expected the size small or full, got huge"),
        (CONFIG | {"options": {"stepss": 3}}, "got a difference in stepss"),
        (CONFIG | {"options": {"steps": "3"}}, "expected steps of type int, got '3'"),
        (None, "--config: cannot read"),
    ],
)
def test_config_files_that_cannot_be(tmp_path, capsys, content, message):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    assert cli.main(["sweep", "bytes", "--config", str(file), "--out", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_a_config_file_that_is_a_pipe(tmp_path, capsys):
    os.mkfifo(file := tmp_path / "config.json")
    assert cli.main(["sweep", "bytes", "--config", str(file), "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == f"gdn: --config: cannot read {file}: not a regular file\n"


def test_every_kind_of_rows_is_validated(tmp_path, capsys):
    words = "--cases 8:1 16:2 24:4 --vocab-size 16 --batch-size 4 --val-sequences 8 --lrs 0.01 --seeds 1"
    assert cli.main(["sweep", "recall", *words.split(), "--out", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert error == "gdn: --val-sequences: expected at least 9, a batch of each of --cases, got 8\n"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--seeds 1000000000",
            "--seeds: expected a grid of at most 100000 runs, got 1000000000 of 4000000000 runs together",
        ),
        ("--lr-seeds 3", "--lr-seeds: expected at most --seeds = 2, got 3"),
        ("--seeds 0", "--seeds: expected a number above 0, got 0"),
        ("--lrs 0.1 0.1", "--lrs: expected different values, at least one, got 0.1 0.1"),
        ("--lrs nan", "--lrs: expected a finite number, got nan"),
        ("--mixers mamba2 mamba2", "--mixers: expected different values, at least one, got mamba2 mamba2"),
        ("--write-starts 0.5 1", "--write-starts: expected a number between 0 and 1, got 1"),
        ("--write-starts 0.5 0.1 --together 3", "a divisor of the runs of a mixer at a scale, 8, got 3"),
        ("--together 3", "--together: expected a divisor of the runs of a mixer at a scale, 4, got 3"),
        ("--data-seed -1", "--data-seed: expected 0 or more and less than 2**32, got -1"),
        ("--conv-size 5", "--conv-size: expected 2 to 4, got 5"),
        ("--test-lengths 0", "--test-lengths: expected a number above 0, got 0"),
        ("--implementation mosaic_gpu", "mosaic_gpu"),
        ("--resume", "expected a run folder, got"),
        (
            "--mlp-ratio 0.01",
            "--mlp-ratio: expected a positive number that gives hidden_size = 8 an inner",
        ),
        ("--hidden-size 2000000", "expected a run that fits into the "),
        ("--val-sequences 2000000000", "--val-sequences: expected sets that fit into the "),
        (
            "--test-lengths 6 2000000000",
            "16 sequences for validation and for each test, of up to 2000000000 tokens",
        ),
    ],
)
def test_error_is_one_line(tmp_path, capsys, words, message):
    assert start(tmp_path / "run", *words.split()) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("gdn: ") and message in error


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "sweep words",
            "gdn sweep: expected a task bytes, recall, needle, sentence, parity, permutation, copy, palindrome, "
            "stack, scope or eviction, got words",
        ),
        ("sweep", "gdn sweep: expected a task"),
        ("sweep parity --mixers rnn", "rnn"),
        ("sweep parity --lr 0.1", "--lr"),
        ("sweep parity --size medium", "medium"),
    ],
)
def test_misuse_is_one_line(capsys, words, message):
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def edited(change, record):
    """The record with some values in the place of others."""
    return {name: value for name, value in (record | change).items() if value != "gone"}


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"mixer": "rnn"}, "a mixer of this version for mixer"),
        ({"lr": "0.01"}, "a number for lr"),
        ({"seed": 0.5}, "a whole number for seed"),
        ({"scale": True}, "a whole number for scale"),
        ({"write_start": []}, "a number or null for write_start"),
        ({"val_loss": float("nan")}, "a number or null for val_loss"),
        ({"val_loss": 10**400}, "a number or null for val_loss"),
        ({"test_accuracy": [1.0]}, "scores by size for test_accuracy"),
        ({"test_accuracy": {"six": 1.0}}, "scores by size for test_accuracy"),
        ({"test_accuracy_by": {"place": [0.5]}}, "scores of slices by size for test_accuracy_by"),
        ({"test_accuracy_by": {"place": {"6": 0.5}}}, "scores of slices by size for test_accuracy_by"),
        ({"wall": 3}, "seconds for wall"),
        ({"curve": {"steps": [1], "loss": {}, "accuracy": {"9": [0.5]}}}, "a learning curve for curve"),
        (
            {"curve": {"steps": [1], "loss": {"9": []}, "accuracy": {"9": [0.5]}}},
            "a learning curve for curve",
        ),
        ({"val_accuracy": "gone"}, "a JSON object with mixer, lr, seed, scale, val_loss, val_accuracy, "),
    ],
)
def test_lines_of_runs_that_cannot_be(tmp_path, change, expected):
    run = {"mixer": "mamba2", "lr": 0.01, "seed": 0, "scale": 1, "val_loss": None, "val_accuracy": 0.5}
    run |= {"test_accuracy": {"6": 0.5, "9": None}, "parameters": 9, "wall": {"seconds": 1.5}}
    curve = {"steps": [2, 4], "loss": {"6": [1.0, None]}, "accuracy": {"6": [0.5, 0.5]}}
    by = {"place": {"6": [1.0, None]}, "order": {"6": [0.5, 0.5]}}
    whole = [run, run | {"curve": curve, "write_start": 0.1, "test_accuracy_by": by}]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in whole))
    assert grid.lines(tmp_path, "accuracy").records() == whole
    file.write_text("".join(json.dumps(record) + "\n" for record in (*whole, edited(change, run))))
    with pytest.raises(RunError, match=f"^{re.escape(f'{file}: expected {expected}')}.*in line 3, got "):
        grid.lines(tmp_path, "accuracy").records()


@pytest.mark.parametrize(
    "change",
    [{"label": "gone"}, {"label": ""}, {"more": 1}, {"metric": 3}, {"baselines": {"a": "b"}}, {"answers": 0}],
)
def test_facts_about_a_task_that_cannot_be(change):
    about = {
        "metric": "accuracy",
        "label": "accuracy",
        "axis": "bits",
        "summary": "parity",
        "baselines": {"a": 0.5},
    }
    assert summary.About.stored({"about": about}) == summary.About(**about)
    assert summary.About.stored({"about": about | {"label": "\x1b[2J"}}).label == r"\x1b[2J"
    with pytest.raises(RunError, match=f"^config.json: expected about to hold .*, got {next(iter(change))} "):
        summary.About.stored({"about": edited(change, about)})
