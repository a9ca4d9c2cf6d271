"""Run folders that were changed or damaged: what is passed over, and what is an error of one line."""

import json
import os
import shutil

import numpy as np
import pytest
from tiny_runs import error_line, final_state, metrics, resume, train, tree

from gdn_jax.commands import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.training import steps
from gdn_jax.training.load import load_run
from gdn_jax.training.runs import RunFolder


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """A run that was never interrupted."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train(folder, out) == 0
    return out


def test_broken_configuration(tmp_path, capsys):
    for content in ("{", "[]", '{"options": 3}', "\xff", '{"a":' + "[" * 100_000):
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
        assert resume(tmp_path) == 1
        assert f"gdn: {tmp_path}/config.json: expected " in error_line(capsys)


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run, to be harmed."""
    return shutil.copytree(finished, tmp_path / "copy")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c["options"].update(steps="many"), "config.json: expected steps of type int, got 'many'"),
        (lambda c: c["options"].update(lr=True), "config.json: expected lr of type float, got True"),
        (lambda c: c["options"].update(rule="attention"), "config.json: expected rule of type "),
        (lambda c: c["options"].update(data=["a"]), "config.json: expected data of type "),
        (lambda c: c["options"].pop("clip"), "got a difference in clip"),
        (
            lambda c: c["options"].update(hidden_size=24),
            "expected a checkpoint that can be read, got none of 12, 8, 4 (of step 12: ValueError: expected "
            "params.blocks.0.mixer.a_proj.kernel.value of shape (24, 1), got (16, 1))",
        ),
        (
            lambda c: c["options"].update(num_layers=10**4),
            "config.json: expected num_layers as in its checkpoints, 1, got 10000",
        ),
        (lambda c: c["versions"].pop("jax"), "expected versions: jax of type str, got None"),
        (lambda c: c.pop("data"), "expected data of type dict, got None"),
        (lambda c: c["data"].pop("fingerprint"), "--resume: expected the data of the run"),
        (lambda c: c.pop("task"), "expected task of type str, got None"),
        (lambda c: c["options"].update(data="a\0b"), "config.json: expected data of type "),
        (
            lambda c: c["options"].update(num_layers=10**6),
            "--num-layers: expected at most 10000, got 1000000",
        ),
    ],
)
def test_edited_configuration(copy, capsys, change, message):
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    before = tree(copy)
    assert resume(copy) == 1
    assert message in error_line(capsys)
    assert tree(copy) == before


def largest(step):
    """The file that holds the arrays of a checkpoint."""
    return max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over(copy, finished, capsys):
    """The newest whole one is taken; the others are set aside and said, and the run ends with the same numbers."""
    for step, damage in (("8", cut), ("12", change_a_bit)):
        damage(largest(copy / "checkpoints" / step))
    assert resume(copy) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and f"resuming {copy} after step 4\n" in captured.out
    for step in ("8", "12"):
        assert (
            f"note: the checkpoint of step {step} is damaged, moved to {copy / 'damaged' / step}"
            in captured.out
        )
    assert sorted(p.name for p in (copy / "damaged").iterdir()) == ["12", "8"]
    assert sorted(p.name for p in (copy / "checkpoints").iterdir()) == ["12", "4", "8"]
    assert metrics(copy) == metrics(finished)
    for a, b in zip(final_state(copy)[1], final_state(finished)[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_whole_checkpoint(copy, capsys):
    for step in ("4", "8", "12"):
        cut(largest(copy / "checkpoints" / step))
    before = tree(copy)
    assert resume(copy) == 1
    assert "expected a checkpoint that can be read, got none of 12, 8, 4 (of step 12: " in error_line(capsys)
    assert tree(copy) == before


def test_lines_that_are_no_lines(copy, capsys):
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for wrong in ("{oops\n", "3\n", '{"loss": 1}\n', "\xff\n"):
        path.write_text("".join([lines[0], wrong, *lines[1:]]), encoding="latin-1")
        assert resume(copy) == 1
        assert f"{path}: expected a JSON object with step in line 2, got " in error_line(capsys)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "a"},
        {"step": None},
        {"step": 1.5},
        {"bpb": "x"},
        {"loss": []},
        {"loss": float("nan")},
        {"loss": float("-inf")},
        {"grad_norm": 10**400},
    ],
)
def test_lines_that_are_no_numbers(copy, capsys, change):
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], json.dumps(json.loads(lines[1]) | change) + "\n", *lines[2:]]))
    assert resume(copy) == 1
    assert f"{path}: expected a number for {next(iter(change))} in line 2, got " in error_line(capsys)


@pytest.mark.parametrize("step", [-5, 0, 3])
def test_steps_of_lines_rise(copy, capsys, step):
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert json.loads(lines[0])["step"] == 3
    path.write_text("".join([lines[0], json.dumps(json.loads(lines[1]) | {"step": step}) + "\n", *lines[2:]]))
    assert resume(copy) == 1
    assert f"{path}: expected a step after 3 in line 2, got '{step}'" in error_line(capsys)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "lock"])
def test_a_pipe_in_the_place_of_a_file(copy, capsys, name):
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    assert resume(copy) == 1
    error = error_line(capsys)
    assert "not a regular file" in error and name in error


def test_a_pipe_in_a_checkpoint(copy, capsys):
    """It is a damaged one, as Orbax would wait for it."""
    array = largest(copy / "checkpoints" / "12")
    array.unlink()
    os.mkfifo(array)
    assert load_run(copy).damaged == {
        12: f"ValueError: {array.relative_to(copy / 'checkpoints' / '12')} is no regular file"
    }


def test_a_lock_says_nothing_to_a_terminal(copy, capsys):
    (copy / "lock").write_text('{"host": "a\\u001b[31mb", "process": 7, "since": "\\u202e"}')
    assert resume(copy) == 1
    assert r"process 7 on a\x1b[31mb since \u202e; " in error_line(capsys)


def test_what_a_configuration_says_to_a_terminal(tmp_path):
    """Versions and the command are printed when a run or a sweep goes on."""
    odd = "\x1b[2Jx"
    versions = {"device": odd, "jax": "1", "driver": [odd]}
    config = {"task": "bytes", "options": {}, "data": {}, "versions": versions, "command": odd}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, config = RunFolder.open(tmp_path, command=str)
    assert config["command"] == config["versions"]["device"] == r"\x1b[2Jx"
    assert all(value.isprintable() for value in config["versions"].values())


def test_lines_without_checkpoints_are_not_emptied(copy, capsys):
    """Checkpoints that are not there, a folder that is not mounted, cost no line."""
    shutil.rmtree(copy / "checkpoints")
    before = {p: content for p, content in tree(copy).items() if p.is_file()}
    assert resume(copy) == 1
    assert "expected a checkpoint, as metrics.jsonl goes to step 12, got none" in error_line(capsys)
    assert {p: content for p, content in tree(copy).items() if p.is_file()} == before


def test_edited_configuration_without_checkpoints(copy, capsys, monkeypatch):
    """No model of thousands of layers is made."""
    shutil.rmtree(copy / "checkpoints")
    (copy / "metrics.jsonl").unlink()
    config = json.loads((copy / "config.json").read_text())
    parameters = config["parameters"]
    config["options"]["num_layers"] = 2000
    (copy / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(steps, "make_model", None)
    assert resume(copy) == 1
    assert f"config.json: expected options of a model of {parameters} parameters, as" in error_line(capsys)
    with pytest.raises(RunError, match=f"a model of {parameters} parameters, as it says, got one of "):
        load_run(copy)


def test_facts_nested_too_deep(copy, capsys):
    path = copy / "checkpoints" / "12" / "_CHECKPOINT_METADATA"
    path.write_text('{"a":' + "[" * 100_000)
    with pytest.raises(RunError, match="_CHECKPOINT_METADATA: expected facts about a checkpoint, got none"):
        load_run(copy)
    shutil.rmtree(path.parent)
    assert load_run(copy).step == 8


def test_pipes_have_no_end(copy, capsys):
    """A pipe in the place of a file of a run: an error of one line, or a checkpoint that is passed over."""
    path = copy / "checkpoints" / "12" / "_CHECKPOINT_METADATA"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(
        RunError, match=r"_CHECKPOINT_METADATA: expected facts .* got none: not a regular file"
    ):
        load_run(copy)
    path.unlink()
    arrays = copy / "checkpoints" / "12" / "state" / "manifest.ocdbt"
    arrays.unlink()
    os.mkfifo(arrays)
    run = load_run(copy)
    assert run.step == 8 and run.damaged == {12: "ValueError: state/manifest.ocdbt is no regular file"}
    (copy / "config.json").unlink()
    os.mkfifo(copy / "config.json")
    assert resume(copy) == 1
    message = f"gdn: expected a run folder, got {copy}: not a regular file (config.json)"
    assert message in error_line(capsys)
    for command in (["info", str(copy)], ["generate", str(copy), "--prompt", "x"]):
        assert cli.main(command) == 1
        assert message in error_line(capsys)


def test_missing_lines_are_said(copy, capsys):
    assert resume(copy) == 0
    assert "metrics.jsonl lacks" not in capsys.readouterr().out
    (copy / "metrics.jsonl").unlink()
    assert resume(copy) == 0
    assert "note: metrics.jsonl lacks 4 lines from step 3 to step 12" in capsys.readouterr().out
