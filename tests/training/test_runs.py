"""The run folder of `gdn train`: what is in it, and a resume after whatever has happened to it."""

import json
import math
import os
import re
import shutil
import signal

import compiled_programs
import forked
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from tiny_runs import TINY_TEXT, error_line, final_state, metrics, resume, train, tree

from gdn_jax.commands import cli, files
from gdn_jax.parts import products
from gdn_jax.training import options as options_lib
from gdn_jax.training import steps
from gdn_jax.training.checkpoints import Checkpoints
from gdn_jax.training.load import load_run
from gdn_jax.training.runs import RunFolder
from gdn_jax.training.tasks import text
from gdn_jax.training.tasks.next_byte import BytesTask
from gdn_jax.training.tasks.table import make_task
from gdn_jax.training.trainer import Diverged, Trainer


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """A run that was never interrupted, and how often its functions were traced."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    traces = 0
    original = steps._sums

    def counted(*args):
        nonlocal traces
        traces += 1
        return original(*args)

    steps._sums = counted
    try:
        assert train(folder, out) == 0
    finally:
        steps._sums = original
    return out, traces


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run, to be harmed."""
    return shutil.copytree(finished[0], tmp_path / "copy")


def test_run_folder(finished):
    out, traces = finished
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["config.json", "metrics.jsonl", "result.json", "curves.png", "sample.txt", "checkpoints"]
    )
    lines = metrics(out)
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    assert [line["step"] for line in lines if "val_bpb" in line] == [6, 12]
    assert lines[-1]["loss"] < lines[0]["loss"] < 1.1 * math.log(256)
    assert lines[0]["bpb"] == pytest.approx(lines[0]["loss"] / math.log(2))
    config, result = (json.loads((out / name).read_text()) for name in ("config.json", "result.json"))
    assert result["finished"] and result["val_bpb"] == lines[-1]["val_bpb"]
    assert set(config["baselines"]) == {"bigram", "trigram"}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(int(p.name) for p in (out / "checkpoints").iterdir()) == [4, 8, 12]
    # one trace before the folder is created, one for the step, one for validation: none in the loop
    assert traces <= 3


@pytest.mark.slow
def test_a_run_in_eight_bits_counts_numbers_that_saturate(folder, tmp_path, finished, monkeypatch, capsys):
    """In every line of its metrics, and where it prints one; other runs have no such numbers."""
    monkeypatch.setattr(products, "SAMPLE", 4)  # as of many tokens
    monkeypatch.setattr(products, "ROOM", 0)
    assert (
        train(folder, tmp_path / "run", *"--matmul float8 --steps 4 --log-every 2 --eval-every 4".split())
        == 0
    )
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [2, 4] and all(line["saturated"] > 0 for line in lines)
    assert re.search(r"held out .* [1-9]\S* saturated", " ".join(capsys.readouterr().out.split()))
    assert "saturated" not in metrics(finished[0])[0]


@pytest.mark.slow
def test_ctrl_c_then_resume_is_bit_for_bit(folder, finished, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    original = BytesTask.train_batch
    interrupted = False

    def pressing(self, step):
        nonlocal interrupted
        if step == 7 and not interrupted:
            interrupted = True
            signal.raise_signal(signal.SIGINT)
        return original(self, step)

    monkeypatch.setattr(BytesTask, "train_batch", pressing)
    assert train(folder, out) == 130
    assert f"gdn train bytes --out {out} --resume" in capsys.readouterr().out.replace("\n", " ")
    assert [line["step"] for line in metrics(out)] == [3, 6], "saved in the middle of a line"
    assert resume(out) == 0
    assert metrics(out) == metrics(finished[0])
    (step, ours), (_, theirs) = final_state(out), final_state(finished[0])
    assert step == 12
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (out / "sample.txt").read_text() == (finished[0] / "sample.txt").read_text()


def test_a_run_that_goes_on_writes_the_same_lines(copy, finished):
    """From a checkpoint between two lines, whose first steps the next line counts."""
    shutil.rmtree(copy / "checkpoints" / "12")
    assert resume(copy) == 0
    assert metrics(copy) == metrics(finished[0])


@pytest.mark.slow
def test_a_resumed_step_is_the_program_of_a_first_one(finished):
    """In a folder of compiled programs it is found."""
    stored = json.loads((finished[0] / "config.json").read_text())["options"]
    start = options_lib.RunOptions(out=finished[0], resume=True)
    options = options_lib.from_json(options_lib.TASKS["bytes"], stored, start)
    trainer = Trainer.make(options, make_task(options.task, options.run.batch_size, options.run.seed))

    def program():
        batch = trainer.task.train_batch(1)
        return trainer.functions.train.lower(trainer.rest, trainer.state, batch).as_text()

    first = program()
    store = Checkpoints(RunFolder(finished[0]), None)
    trainer.restore(store)
    store.close()
    assert trainer.step == 12 and program() == first


KILLED = """
import os, signal, sys

def kill(name, arguments):
    # the file system calls of Orbax are real; the power goes off in one of them
    if name == {event!r} and str(arguments[0]).endswith({ending!r}):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
"""


@pytest.mark.slow
def test_kill_in_the_middle_of_a_save(folder, finished, tmp_path):
    """Twice: before anything is written, and when all is written and nothing has its name."""
    out, part = tmp_path / "run", "8.orbax-checkpoint-tmp"
    start = ["train", "bytes", "--data", str(folder), "--out", str(out), *TINY_TEXT]
    # JAX writes a compiled program in place: what dies then leaves half of one, which no other test may find.
    kept = {"JAX_COMPILATION_CACHE_DIR": str(compiled_programs.copy_to(tmp_path / "compiled"))}
    for event, ending, words in (
        ("os.mkdir", f"{part}{os.sep}state.orbax-checkpoint-tmp", start),
        ("os.rename", part, ["train", "bytes", "--out", str(out), "--resume"]),
    ):
        code = KILLED.format(event=event, ending=ending)
        codes, printed = forked.run(forked.Child(words, tmp_path / event, kept, code))
        assert codes == [-signal.SIGKILL], printed
        assert (out / "checkpoints" / part).exists()
        with open(out / "metrics.jsonl", "a") as file:
            file.write('{"step": 9, "lo')
    assert resume(out) == 0
    assert metrics(out) == metrics(finished[0])
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["12", "4", "8"]
    assert final_state(out)[0] == 12


def test_no_state_is_saved_that_cannot_take_its_next_step(finished, tmp_path, monkeypatch):
    stored = json.loads((finished[0] / "config.json").read_text())["options"]
    options = options_lib.from_json(options_lib.TASKS["bytes"], stored, options_lib.RunOptions())
    trainer = Trainer.make(options, make_task(options.task, options.run.batch_size, options.run.seed))
    batch = trainer.task.train_batch(1)
    poisoned = batch._replace(weights=batch.weights * np.float32("nan"))
    monkeypatch.setattr(trainer.task, "train_batch", lambda step: poisoned)
    store = Checkpoints(RunFolder(tmp_path), 1)
    with pytest.raises(Diverged, match="nan at step 1"):
        trainer.save(store)
    assert store.latest() is None
    store.close()


@pytest.mark.slow
def test_nan_stops_and_keeps_the_last_good_checkpoint(folder, finished, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    original = BytesTask.train_batch

    def poisoned(self, step):
        batch = original(self, step)
        return batch._replace(weights=batch.weights * np.float32("nan")) if step == 7 else batch

    with monkeypatch.context() as patch:
        patch.setattr(BytesTask, "train_batch", poisoned)
        assert train(folder, out) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nan at step 7" in error and "checkpoint of step 4 is kept" in error
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["4"]
    assert [line["step"] for line in metrics(out)] == [3, 6]
    assert resume(out) == 0
    assert metrics(out) == metrics(finished[0])


@pytest.mark.slow
def test_a_state_that_cannot_go_on_is_not_saved(folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(folder, out, "--lr", "1e38", "--save-every", "1") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no checkpoint was written yet" in error
    assert not any(p.name.isdigit() for p in (out / "checkpoints").iterdir())


@pytest.mark.slow
def test_max_minutes_saves_and_continues(folder, finished, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(folder, out, "--max-minutes", "1e-9") == 0
    assert "--resume" in capsys.readouterr().out
    assert json.loads((out / "result.json").read_text())["finished"] is False
    assert resume(out, "--max-minutes", "9") == 0
    assert metrics(out) == metrics(finished[0])
    # a finished run resumes to nothing
    assert resume(out) == 0
    assert metrics(out) == metrics(finished[0])


def test_existing_folder_is_not_touched(folder, finished, tmp_path, capsys):
    for out in (finished[0], tmp_path):
        before = tree(out)
        assert train(folder, out) == 1
        assert "--out: expected a folder that does not exist" in capsys.readouterr().err
        assert tree(out) == before


def test_resume_with_other_options_or_data(folder, finished, tmp_path, capsys):
    out, before = finished[0], tree(finished[0])
    assert resume(out, "--lr", "0.5") == 1
    error = capsys.readouterr().err
    assert "--lr: expected 0.003 as in the run to resume, got 0.5; a new run" in error
    assert f"gdn train bytes --init-from {out}" in error
    assert cli.main(["train", "recall", "--out", str(out), "--resume"]) == 1
    assert "expected a run of the task recall, got bytes" in capsys.readouterr().err
    name = text.load(folder).train_files[0]
    content = (folder / name).read_bytes()
    try:
        (folder / name).write_bytes(content + b"x")
        assert resume(out) == 1
    finally:
        (folder / name).write_bytes(content)
    assert "--resume: expected the data of the run" in capsys.readouterr().err
    assert tree(out) == before


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another(finished, tmp_path, capsys):
    """Its options are those of the other one, its batches are not; it resumes without the other one."""
    first, out = tmp_path / "first", tmp_path / "second"
    shutil.copytree(finished[0], first)
    more = ["train", "bytes", "--init-from", str(first), "--steps", "4", "--out"]
    assert cli.main([*more, str(out)]) == 0
    config, before = (json.loads((path / "config.json").read_text()) for path in (out, first))
    assert config["init_from"] == {"run": str(first.resolve()), "step": 12}
    assert config["options"] == before["options"] | {"steps": 4, "seed": 1}
    lines = metrics(out)
    assert lines[0]["loss"] < metrics(first)[0]["loss"]
    shutil.rmtree(out / "checkpoints" / "4")
    begun, weights = load_run(out), load_run(first)
    assert begun.step == 0
    for one, other in zip(*(jax.tree.leaves(nnx.state(run.model)) for run in (begun, weights)), strict=True):
        np.testing.assert_array_equal(one, other)
    shutil.rmtree(first)
    assert resume(out) == 0
    assert metrics(out) == lines
    capsys.readouterr()
    for words, message in (
        ([*more[:3], str(out), "--resume", "--out", str(out)], "--init-from: expected none with --resume"),
        (
            [*more[:3], str(out), "--hidden-size", "24", "--out", str(first)],
            "kernel of shape (24, 1), got (16, 1)",
        ),
        ([*more[:3], str(first), "--out", str(first)], "expected a run folder, got"),
    ):
        assert cli.main(words) == 1 and not first.exists()
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error, error


def test_second_process_is_refused(folder, finished, tmp_path, monkeypatch, capsys):
    """A run at work is resumed once more; the first one ends as if nothing had been."""
    out = tmp_path / "run"
    original, answers = BytesTask.train_batch, []

    def meanwhile(self, step):
        if step == 7 and not answers:
            answers.append(None)
            answers.append(resume(out))
        return original(self, step)

    monkeypatch.setattr(BytesTask, "train_batch", meanwhile)
    assert train(folder, out) == 0
    assert answers == [None, 1]
    assert f"got one owned by process {os.getpid()} on" in error_line(capsys)
    assert metrics(out) == metrics(finished[0])
    assert not (out / "lock").exists()


@pytest.mark.slow
def test_a_run_moves(folder, copy, finished, tmp_path, capsys):
    """Where the data lies does not matter as long as it is the same; config.json learns the new place."""
    moved = shutil.copytree(folder, tmp_path / "moved")
    config = json.loads((copy / "config.json").read_text())
    config["options"]["data"] = "/nowhere/at/all"
    (copy / "config.json").write_text(json.dumps(config))
    for step in ("8", "12"):
        shutil.rmtree(copy / "checkpoints" / step)
    assert resume(copy) == 1
    assert "--data: expected a file or a folder, got /nowhere/at/all, which does not exist" in error_line(
        capsys
    )
    name = text.load(moved).val_files[0]
    content = (moved / name).read_bytes()
    (moved / name).write_bytes(content[:-1])
    assert resume(copy, "--data", str(moved)) == 1
    assert "--resume: expected the data of the run (" in error_line(capsys)
    (moved / name).write_bytes(content)
    assert resume(copy, "--data", str(moved)) == 0
    assert metrics(copy) == metrics(finished[0])
    config["options"]["data"] = str(moved)
    assert json.loads((copy / "config.json").read_text()) == config
    assert resume(copy) == 0


@pytest.mark.slow
def test_a_prompt_of_any_bytes(folder, tmp_path, capsys):
    """A command line hands over bytes that are no UTF-8 as surrogates; other surrogates are refused at once."""
    out = tmp_path / "run"
    assert train(folder, out, "--steps", "1", "--prompt", b"caf\xe9 ".decode(errors="surrogateescape")) == 0
    assert (out / "sample.txt").read_text().startswith("caf\ufffd ")
    (out / "sample.txt").unlink()
    assert resume(out) == 0
    assert (out / "sample.txt").read_text().startswith("caf\ufffd ")
    capsys.readouterr()
    assert train(folder, tmp_path / "other", "--prompt", "\ud800") == 1
    assert "--prompt: expected text, or bytes of a command line, got '\\ud800'" in error_line(capsys)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_names_of_run_folders(folder, finished, tmp_path):
    """Checkpoints can be read wherever they lie: Orbax looks for their parts by a pattern."""
    out = tmp_path / "lr[1e-3]" / "a* b?\n\N{GREEK SMALL LETTER ALPHA}" / "run"
    assert train(folder, out) == 0
    assert (out / "checkpoints" / "12" / "state" / "manifest.ocdbt").exists()
    assert load_run(out).step == 12
    left = out / "checkpoints" / "16.orbax-checkpoint-tmp"
    left.mkdir()
    assert resume(out) == 0
    assert not left.exists()


def test_a_name_that_is_no_text_is_refused(folder, tmp_path, capsys):
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    assert train(folder, out) == 1
    assert "--out: expected a name in UTF-8, got '" in error_line(capsys)
    assert [*tmp_path.iterdir()] == []
    os.mkdir(out)
    assert resume(out) == 1
    assert "expected a name in UTF-8" in error_line(capsys)


@pytest.mark.slow
def test_a_checkpoint_that_lacks_its_list_is_no_save(folder, tmp_path, monkeypatch, capsys):
    """A save that Orbax calls done and that cannot be read is an error, and the checkpoint before it is kept."""
    out, original = tmp_path / "run", ocp.CheckpointManager.save

    def half(self, step, **more):
        original(self, step, **more)
        if step == 8:
            (out / "checkpoints" / "8" / "state" / "manifest.ocdbt").unlink()

    monkeypatch.setattr(ocp.CheckpointManager, "save", half)
    assert train(folder, out, "--keep", "1") == 1
    assert "cannot write the checkpoint of step 8: ValueError: its list of arrays is missing" in error_line(
        capsys
    )
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["4", "8"]
    assert load_run(out).step == 4


def full(*arguments, **more):
    raise OSError(28, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["line", "checkpoint"])
def test_full_disk(folder, finished, tmp_path, monkeypatch, capsys, where):
    """One line that says how to go on; the folder has a name that a shell would take apart."""
    out = tmp_path / "a run"
    original = BytesTask.train_batch

    def filling(self, step):
        if step == 7 and where == "line":
            patch.setattr(files.os, "fsync", full)
        if step == 7 and where == "checkpoint":
            patch.setattr("orbax.checkpoint.CheckpointManager.save", full)
        return original(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(BytesTask, "train_batch", filling)
        assert train(folder, out) == 1
    error = error_line(capsys)
    assert f"{out}: " in error and "No space left on device" in error
    assert f"continue with: gdn train bytes --out '{out}' --resume" in error
    assert not list(out.glob("*.tmp"))
    assert resume(out) == 0
    assert metrics(out) == metrics(finished[0])
