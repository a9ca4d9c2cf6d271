"""`gdn sweep`: its grid, its files, its resume after a kill or Ctrl-C, its configuration files, its errors."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import forked
import jax
import numpy as np
import pytest
from flax import nnx
from tiny_sweeps import CONFIG, TINY, options, start

from gdn_jax.commands import cli, versions
from gdn_jax.commands.files import JsonLines
from gdn_jax.commands.locks import owned
from gdn_jax.sweeps import grid, program, settings, sweep, weights
from gdn_jax.sweeps import options as sweep_options
from gdn_jax.training import steps
from gdn_jax.training.options import ModelOptions, OptimizerOptions, RunOptions, TrainOptions
from gdn_jax.training.tasks.table import make_task
from gdn_jax.training.trainer import Trainer


def records(out):
    """Lines of runs.jsonl without the wall clock, by run."""
    lines = JsonLines(out / "runs.jsonl").records()
    assert len({grid.as_run(line) for line in lines}) == len(lines), "a run was made twice"
    return {grid.as_run(line): {k: v for k, v in line.items() if k != "wall"} for line in lines}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep that was never interrupted."""
    out = tmp_path_factory.mktemp("sweeps") / "finished"
    assert start(out) == 0
    return out


@pytest.mark.slow
def test_folder(finished):
    assert sorted(p.name for p in finished.iterdir()) == [
        "config.json",
        "figure.png",
        "runs.jsonl",
        "table.md",
    ]
    done = records(finished)
    mixers = ("gated_delta_net", "mamba2")
    assert list(done) == [grid.Run(m, lr, seed) for m in mixers for lr in (0.01, 0.03) for seed in (0, 1)]
    for record in done.values():
        assert set(record["test_accuracy"]) == {"6", "9"} and 0 < record["val_loss"] < 2
        assert 0 <= record["val_accuracy"] <= 1
    assert len({record["parameters"] for record in done.values()}) == 1
    assert len({record["val_loss"] for record in done.values()}) == len(done), "runs are not different"
    image = (finished / "figure.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) < 150 * 1024
    table = (finished / "table.md").read_text()
    assert "| Gated DeltaNet |" in table and "gdn sweep parity --out" in table
    assert "95 % t interval over those of 2 seeds that have learned something" in table
    assert "mean validation loss" in table and "0.9 ln 2 = 0.624 nats" in table


@pytest.mark.slow
def test_weights_are_kept(finished, tmp_path):
    """The model that is read has the score of the run, which is the same run as without."""
    out = tmp_path / "run"
    assert start(out, "--mixers", "mamba2", "--keep-weights") == 0
    [*made] = records(out).items()
    assert len([*(out / "weights").iterdir()]) == len(made)
    task = make_task(options().task, 8)
    for run, record in made[:2]:
        assert record == records(finished)[run]
        graphdef, params, rest = nnx.split(weights.load(out, run), nnx.Param, ...)
        score = jax.jit(lambda *args, g=graphdef: steps.loss_sum(g, *args)[1])
        loss, _ = steps.mean([score(rest, params, batch) for batch in task.val_batches(8)])
        assert loss == pytest.approx(record["val_loss"], rel=1e-5)


@pytest.mark.slow
def test_curves(finished, tmp_path, monkeypatch):
    """Validation of every kind of sequences on the way, which changes nothing of the runs.

    The first one compiles, here for 250 seconds: that says nothing of how long the steps will take.
    """
    out, score, compiling = tmp_path / "run", program.Program.score, []

    def slow_at_first(self, *arguments):
        compiling.append(0 if compiling else 250)
        return score(self, *arguments)

    monkeypatch.setattr(program.Program, "score", slow_at_first)
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + sum(compiling))
    monkeypatch.setattr(sweep, "time", clock)
    assert start(out, "--curve-every", "2", "--mixers", "mamba2", "--max-minutes", "10") == 0
    plain = records(finished)
    for run, record in records(out).items():
        curve = record.pop("curve")
        assert record == plain[run]
        assert curve["steps"] == [2, 4] and curve.keys() == {"steps", "loss", "accuracy"}
        assert all(len(x) == 2 and 0 < x[1] < 2 for x in (curve["loss"]["all"], curve["accuracy"]["all"]))
    assert "| steps to half |" in (out / "table.md").read_text()


def test_max_minutes(tmp_path, capsys):
    """No run is begun that cannot be finished."""
    out = tmp_path / "run"
    assert start(out, "--max-minutes", "1e-9") == 0
    assert "stopped by --max-minutes 1e-09; finished runs are kept" in capsys.readouterr().out
    assert not JsonLines(out / "runs.jsonl").records() and not (out / "table.md").exists()
    assert "max_minutes" not in json.loads((out / "config.json").read_text())["options"]


def test_help_describes_every_group(capsys):
    assert cli.main(["sweep", "parity", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "noqa" not in text
    for group in (sweep_options.GridOptions, sweep_options.SizeOptions, sweep_options.ScheduleOptions):
        assert group.__doc__.split(".")[0][:60] in text


@pytest.mark.slow
def test_full_disk(finished, tmp_path, monkeypatch, capsys):
    out = tmp_path / "a sweep"
    original, lines = JsonLines.append, 0

    def fills(self, record):
        nonlocal lines
        lines += 1
        if lines == 3:
            raise OSError(28, "No space left on device")
        original(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "append", fills)
        assert start(out) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{out}: No space left on device; finished runs are kept" in error
    assert f"continue with: gdn sweep parity --out '{out}' --resume" in error
    assert cli.main(["sweep", "parity", "--out", str(out), "--resume"]) == 0
    assert records(out) == records(finished)


@pytest.mark.slow
def test_lines_are_whole(finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / "copy")
    with open(out / "runs.jsonl", "a") as file:
        file.write('{"mixer": "mamba2"}\n')
    assert cli.main(["sweep", "parity", "--out", str(out), "--resume"]) == 1
    assert "expected a JSON object with mixer, lr, seed, scale, val_loss" in capsys.readouterr().err


@pytest.mark.slow
def test_another_process_at_the_same_sweep(finished, tmp_path, capsys):
    """What it is at is left to it; whoever comes last writes the table."""
    out = shutil.copytree(finished, tmp_path / "copy")
    (out / "runs.jsonl").unlink()
    (out / "table.md").unlink()
    again = ["sweep", "parity", "--out", str(out), "--resume"]
    with owned(out, "gated_delta_net-1"):
        assert cli.main(again) == 0
        assert {run.mixer for run in records(out)} == {"mamba2"} and not (out / "table.md").exists()
        assert "4 of 8 runs are left to the other processes" in capsys.readouterr().out
    assert cli.main(again) == 0
    assert records(out) == records(finished)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in finished.iterdir())


@pytest.mark.crossed
def test_processes_at_once(finished, tmp_path):
    """Another process and this one make every run once; whoever comes last makes the table."""
    out = shutil.copytree(finished, tmp_path / "copy")
    (out / "runs.jsonl").unlink()
    (out / "table.md").unlink()
    again = ["sweep", "parity", "--out", str(out), "--resume"]
    command = [
        sys.executable,
        "-c",
        "import sys; from gdn_jax.commands import cli; sys.exit(cli.main(sys.argv[1:]))",
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    other = subprocess.Popen([*command, *again], env=env, stdout=subprocess.DEVNULL)
    while other.poll() is None and not [*out.glob("lock*")]:
        time.sleep(0.01)
    assert cli.main(again) == 0  # while the other one is at its first runs
    assert other.wait() == 0
    assert records(out) == records(finished)
    assert (out / "table.md").exists() and not [*out.glob("lock*")]


@pytest.mark.slow
def test_a_run_is_that_of_gdn_train(finished):
    """The same seed, learning rate and steps by the loop of `gdn train` end with the same parameters."""
    o = options()
    task = make_task(o.task, 8)
    seed, lr = 1, 0.03
    trained = TrainOptions(
        o.task,
        RunOptions(seed=seed, steps=5, batch_size=8),
        ModelOptions(**dataclasses.asdict(o.model), rule="mamba2"),
        OptimizerOptions(lr=lr),
    )
    trainer = Trainer.make(trained, make_task(trained.task, 8, seed))
    for step in range(1, 6):
        trainer.state, _ = trainer.functions.train(
            trainer.rest, trainer.state, trainer.task.train_batch(step)
        )
    loss, accuracy = steps.validate(
        trainer.functions, trainer.rest, trainer.state.params, task.val_batches(8)
    )
    record = records(finished)[grid.Run("mamba2", lr, seed)]
    # float32 sums in another order, over five steps of Adam
    assert record["val_loss"] == pytest.approx(loss, rel=1e-4)
    assert record["val_accuracy"] == pytest.approx(accuracy, abs=2 / (16 * 6))
    tests = {
        str(n): steps.validate(trainer.functions, trainer.rest, trainer.state.params, b)[1]
        for n, b in task.test_batches(8).items()
    }
    assert record["test_accuracy"] == pytest.approx(tests, abs=2 / (16 * 3))


@pytest.mark.slow
def test_side_by_side_is_one_by_one(finished, tmp_path, monkeypatch):
    """Runs in one program under vmap are those made one after the other; all runs of a mixer share one trace."""
    traces = []
    original = steps._sums
    monkeypatch.setattr(steps, "_sums", lambda *args: traces.append(1) or original(*args))
    assert start(tmp_path / "run", "--together", "1", "--mixers", "mamba2") == 0
    assert len(traces) == 2  # the training step and the score
    many, one = records(finished), records(tmp_path / "run")
    assert list(one) == [run for run in many if run.mixer == "mamba2"]
    for run, record in one.items():
        assert many[run]["val_loss"] == pytest.approx(record["val_loss"], rel=1e-4), run


KILLED = """
import os, signal
from gdn_jax.commands import files

count = 4
original = files.JsonLines.append

def append(self, record):
    global count
    count -= 1
    if count == 0:
        with open(self.path, "a") as file:
            file.write('{"mixer": "gated_de')  # the power goes off in the middle of a line
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, record)

files.JsonLines.append = append
"""


@pytest.mark.slow
def test_kill_then_resume(finished, tmp_path):
    out = tmp_path / "run"
    words = ["sweep", "parity", "--out", str(out), *TINY]
    codes, printed = forked.run(forked.Child(words, tmp_path / "printed", code=KILLED))
    assert codes == [-signal.SIGKILL], printed
    # in the middle of a group: one of its two runs is kept
    assert len(records(out)) == 3 and not (out / "runs.jsonl").read_bytes().endswith(b"\n")
    assert cli.main(["sweep", "parity", "--out", str(out), "--resume"]) == 0
    assert records(out) == records(finished)
    table = [(path / "table.md").read_text().splitlines()[:8] for path in (out, finished)]
    assert table[0] == table[1]


@pytest.mark.slow
def test_ctrl_c_then_resume(finished, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    original = program.Program.advance
    calls = 0

    def pressing(self, runs, first, last):
        nonlocal calls
        calls += 1
        if calls == 5:  # in the second group
            signal.raise_signal(signal.SIGINT)
        return original(self, runs, first, last)

    monkeypatch.setattr(program.Program, "advance", pressing)
    assert start(out) == 130
    assert f"gdn sweep parity --out {out} --resume" in capsys.readouterr().out.replace("\n", " ")
    assert 0 < len(records(out)) < 8 and not (out / "table.md").exists()
    assert cli.main(["sweep", "parity", "--out", str(out), "--resume"]) == 0
    assert records(out) == records(finished)
    # a finished sweep resumes to its table
    before = (out / "runs.jsonl").read_bytes()
    (out / "table.md").unlink()
    assert cli.main(["sweep", "parity", "--out", str(out), "--resume"]) == 0
    assert (out / "table.md").exists() and (out / "runs.jsonl").read_bytes() == before


@pytest.mark.slow
def test_divergence_is_recorded(tmp_path):
    out = tmp_path / "run"
    assert start(out, *"--lrs 1e30 0.01 --mixers mamba2".split()) == 0
    assert [record["val_loss"] is None for record in records(out).values()] == [True, True, False, False]
    assert "| Mamba2's decay with unit keys | 0.01 | 0 of 2 |" in (out / "table.md").read_text()
    assert (out / "figure.png").exists()


@pytest.mark.slow
def test_text_at_a_scale_from_a_file(folder, tmp_path, monkeypatch):
    """A file gives the defaults; one seed chooses the learning rate; bits per byte by the place in a row."""
    file, out = tmp_path / "config.json", tmp_path / "run"
    file.write_text(json.dumps(CONFIG))
    monkeypatch.setattr(sweep, "commit", lambda: "0123abcd")
    words = ["--config", str(file), "--data", str(folder), "--out", str(out), "--steps", "4"]
    assert cli.main(["sweep", "bytes", *words]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["options"] == config["options"] | CONFIG["options"] | {"steps": 4}
    assert "config" not in config["options"]
    assert config["about"]["metric"] == "bpb" and config["about"]["baselines"].keys() == {"bigram", "trigram"}
    lines = JsonLines(out / "runs.jsonl").records()
    assert len(lines) == 3 and {line["commit"] for line in lines} == {"0123abcd"}
    for line in lines:
        assert set(line["test_bpb"]) == {"8", "24"} and all(2 < x < 12 for x in line["test_bpb"].values())
        assert line["val_bpb"] == pytest.approx(line["val_loss"] / np.log(2))
    *first, last = lines
    assert [(line["lr"], line["seed"], line["scale"]) for line in first] == [(0.01, 0, 2), (0.03, 0, 2)]
    best = min(first, key=lambda line: line["val_loss"])
    assert (last["lr"], last["seed"]) == (best["lr"], 1)
    table = (out / "table.md").read_text()
    assert "Bits per byte, mean and 95 % t interval over 2 seeds" in table and "(bigram " in table
    assert "| mixer | learning rate | 8 bytes | 24 bytes |" in table and "a state of 32 numbers" in table


@pytest.mark.crossed
def test_hybrid_beside_another(folder, tmp_path):
    """Its initial weights are made for themselves, and its parameters are counted."""
    file, out = tmp_path / "config.json", tmp_path / "run"
    more = {"mixers": ["mamba2", "hybrid"], "num_layers": 2, "scales": [1], "lr_seeds": None, "lrs": [0.01]}
    file.write_text(json.dumps(CONFIG | {"options": CONFIG["options"] | more}))
    assert cli.main(["sweep", "bytes", "--config", str(file), "--data", str(folder), "--out", str(out)]) == 0
    lines = JsonLines(out / "runs.jsonl").records()
    assert [line["mixer"] for line in lines] == ["mamba2"] * 2 + ["hybrid"] * 2
    assert (
        lines[0]["parameters"] == lines[1]["parameters"] != lines[2]["parameters"] == lines[3]["parameters"]
    )
    assert "in Gated DeltaNet and attention" in (out / "table.md").read_text()


def test_commit(tmp_path, monkeypatch):
    """Of the repository that the package lies in, with a mark where a file has changed; GDN_COMMIT is above it."""
    package = tmp_path / "gdn_jax" / "commands"
    package.mkdir(parents=True)
    file = package / "versions.py"
    file.touch()
    monkeypatch.setattr(versions, "__file__", str(file))
    monkeypatch.delenv("GDN_COMMIT", raising=False)
    assert versions.commit() is None

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *who, "-C", str(tmp_path), *words], capture_output=True, text=True, check=True
        )

    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    head = git("rev-parse", "HEAD").stdout.strip()
    assert len(head) == 40 and versions.commit() == head
    file.write_text("changed")
    assert versions.commit() == head + "+"
    monkeypatch.setenv("GDN_COMMIT", "feed")
    assert versions.commit() == "feed"


@pytest.mark.parametrize("task", settings.TASKS)
@pytest.mark.parametrize("size", ["small", "full"])
def test_presets_fit(task, size):
    preset = settings.preset(task, size)
    sweep_options.check(preset)
    assert preset.sweep.size == size and preset.task.task == task


@pytest.mark.slow
def test_existing_and_other_folders(finished, capsys):
    before = {p: p.read_bytes() for p in finished.iterdir()}
    assert start(finished) == 1
    assert "--out: expected a folder that does not exist" in capsys.readouterr().err
    resume = ["--out", str(finished), "--resume"]
    assert cli.main(["sweep", "parity", *resume, "--steps", "9"]) == 1
    assert "--steps: expected 5 as in the run to resume, got 9" in capsys.readouterr().err
    assert cli.main(["sweep", "copy", *resume]) == 1
    assert "expected a run of the task sweep copy, got sweep parity" in capsys.readouterr().err
    assert cli.main(["train", "parity", *resume]) == 1
    assert "expected a run of the task parity, got sweep parity" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in finished.iterdir()} == before
    assert json.loads(before[finished / "config.json"])["task"] == "sweep parity"
