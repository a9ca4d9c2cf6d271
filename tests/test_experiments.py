"""`gdn train`: the step; a run, its resume and its errors. The data: test_tasks.py."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gdn_jax import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.experiments import options as options_lib
from gdn_jax.experiments import steps
from gdn_jax.experiments.checkpoints import Checkpoints
from gdn_jax.experiments.tasks import text
from gdn_jax.experiments.tasks.batch import Batch
from gdn_jax.experiments.tasks.next_byte import BytesTask
from gdn_jax.experiments.tasks.options import TextOptions
from gdn_jax.experiments.tasks.table import make_task
from gdn_jax.experiments.training import Trainer

TINY = (
    "--hidden-size 16 --num-layers 1 --num-heads 1 --head-dim 8 --dtype float32 --implementation recurrent "
    "--batch-size 4 --steps 12 --log-every 3 --eval-every 6 --save-every 4 --keep 3"
).split()
TINY_TEXT = [*TINY, *"--length 32 --val-bytes 256 --sample-bytes 8".split()]


pytestmark = pytest.mark.usefixtures("compile_once")


def train(folder, out, *more):
    return cli.main(["train", "bytes", "--data", str(folder), "--out", str(out), *TINY_TEXT, *more])


def metrics(out):
    """Lines of metrics.jsonl without the wall clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "wall"} for line in lines]


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


def final_state(out, folder):
    """Arrays of the last checkpoint."""
    options = options_lib.from_json(
        "bytes",
        json.loads((out / "config.json").read_text())["options"],
        options_lib.RunOptions(out=out, resume=True),
    )
    trainer = Trainer.make(options, make_task(options))
    store = Checkpoints(out / "checkpoints", 3)
    trainer.restore(store, store.latest())
    store.close()
    return trainer.step, jax.tree.leaves(trainer.state)


# --- the step


def tiny_options(**optimizer):
    return options_lib.TrainOptions(
        TextOptions(),
        run=options_lib.RunOptions(steps=10, batch_size=4),
        model=options_lib.ModelOptions(
            hidden_size=16,
            num_layers=1,
            num_heads=1,
            head_dim=8,
            dtype="float32",
            implementation="recurrent",
        ),
        optimizer=options_lib.OptimizerOptions(**optimizer),
    )


def test_accumulated_gradient_is_that_of_the_batch():
    o = tiny_options()
    model = steps.make_model(o.model, 256, 0)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (4, 17)).astype(np.int32)
    weights = rng.integers(0, 2, (4, 16)).astype(np.float32)  # pieces of unequal weight
    batch = Batch(tokens[:, :-1], tokens[:, 1:], weights)
    optimizer = steps.make_optimizer(o.optimizer, 10, o.optimizer.lr)
    got = []
    for accumulate in (1, 2):
        functions = steps.make_functions(graphdef, rest, optimizer, accumulate)
        state = steps.TrainState(jax.tree.map(jnp.copy, params), optimizer.init(params))
        got.append(functions.train(state, batch))
    (one, first), (two, second) = got
    np.testing.assert_allclose(first, second, rtol=1e-5)
    # the second moments are the squared gradients, Adam's update is not divided into them
    for a, b in zip(jax.tree.leaves(one.opt_state), jax.tree.leaves(two.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7)


def test_decay_spares_gates_and_norms():
    o = tiny_options(weight_decay=10.0, lr=0.1)
    model = steps.make_model(o.model, 256, 0)
    params = nnx.state(model, nnx.Param)
    optimizer = steps.make_optimizer(o.optimizer, 10, o.optimizer.lr)

    @jax.jit
    def updates_of_no_gradient(params):
        return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]

    updates = updates_of_no_gradient(params)
    spared, decayed = set(), set()
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path)
        (decayed if jnp.any(update != 0) else spared).add(name)
    assert any("A_log" in n for n in spared) and any("dt_bias" in n for n in spared)
    assert any("norm" in n for n in spared)
    assert not any(word in n for n in decayed for word in ("A_log", "dt_bias", "norm"))
    assert any("embed" in n for n in decayed)


def test_schedule_rises_and_falls():
    o = options_lib.ScheduleOptions(end_lr=0.1, warmup=0.1)
    lr = np.array([float(steps.make_schedule(o, 100, 1.0)(i)) for i in range(101)])
    assert 0 < lr[0] < lr[5] < lr[10] == 1.0 and (np.diff(lr[10:]) < 0).all()
    assert lr[100] == pytest.approx(0.1)
    assert all(np.isfinite(float(steps.make_schedule(o, n, 1.0)(n))) for n in (1, 2, 3))


# --- runs


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


def test_loss_falls_below_the_unigram(folder, tmp_path):
    assert train(folder, tmp_path / "run", *"--steps 80 --lr 0.02".split()) == 0
    assert metrics(tmp_path / "run")[-1]["val_bpb"] < 3.0


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
    assert cli.main(["train", "bytes", "--out", str(out), "--resume"]) == 0
    assert metrics(out) == metrics(finished[0])
    (step, ours), (_, theirs) = final_state(out, folder), final_state(finished[0], folder)
    assert step == 12
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (out / "sample.txt").read_text() == (finished[0] / "sample.txt").read_text()


KILLED = """
import os, signal, sys
from gdn_jax import cli

event, ending = sys.argv[1:3]

def kill(name, args):
    # the file system calls of Orbax are real; the power goes off in one of them
    if name == event and str(args[0]).endswith(ending):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
sys.exit(cli.main(sys.argv[3:]))
"""


def test_kill_in_the_middle_of_a_save(folder, finished, tmp_path, compile_once):
    out = tmp_path / "run"
    start = ["train", "bytes", "--data", str(folder), "--out", str(out), *TINY_TEXT]
    resume = ["train", "bytes", "--out", str(out), "--resume"]
    environment = os.environ | compile_once | {"JAX_PLATFORMS": "cpu"}
    moments = [
        (
            "os.mkdir",
            f"8.orbax-checkpoint-tmp{os.sep}state.orbax-checkpoint-tmp",
            start,
        ),  # nothing is written
        ("os.rename", "8.orbax-checkpoint-tmp", resume),  # all is written, nothing has its name
    ]
    for event, ending, argv in moments:
        done = subprocess.run(
            [sys.executable, "-c", KILLED, event, ending, *argv],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert (out / "checkpoints" / "8.orbax-checkpoint-tmp").exists()
        with open(out / "metrics.jsonl", "a") as file:
            file.write('{"step": 9, "lo')
    assert cli.main(resume) == 0
    assert metrics(out) == metrics(finished[0])
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["12", "4", "8"]
    assert final_state(out, folder)[0] == 12


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
    assert cli.main(["train", "bytes", "--out", str(out), "--resume"]) == 0
    assert metrics(out) == metrics(finished[0])


def test_a_state_that_cannot_go_on_is_not_saved(folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(folder, out, "--lr", "1e38", "--save-every", "1") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no checkpoint was written yet" in error
    assert not any(p.name.isdigit() for p in (out / "checkpoints").iterdir())


def test_max_minutes_saves_and_continues(folder, finished, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(folder, out, "--max-minutes", "1e-9") == 0
    assert "--resume" in capsys.readouterr().out
    assert json.loads((out / "result.json").read_text())["finished"] is False
    assert cli.main(["train", "bytes", "--out", str(out), "--resume", "--max-minutes", "9"]) == 0
    assert metrics(out) == metrics(finished[0])
    # a finished run resumes to nothing
    assert cli.main(["train", "bytes", "--out", str(out), "--resume"]) == 0
    assert metrics(out) == metrics(finished[0])


def test_recall_learns_and_shows_its_answers(tmp_path):
    out = tmp_path / "run"
    options = (
        "--vocab-size 16 --num-pairs 2 --test-pairs 1 2 --length 8 --val-sequences 64 --steps 150 --lr 0.02 "
        "--eval-every 150 --seed 2"
    )
    argv = ["train", "recall", "--out", str(out), *TINY, "--batch-size", "32", *options.split()]
    assert cli.main(argv) == 0
    last = metrics(out)[-1]
    assert last["val_accuracy"] > 0.6  # a value of the sequence at random: 0.5
    assert len((out / "sample.txt").read_text().splitlines()) == 3
    tests = json.loads((out / "result.json").read_text())["test"]
    assert tests.keys() == {"1", "2"} and tests["1"]["accuracy"] > 0.6


# --- errors: one line, a status, nothing overwritten


def tree(path):
    return {p: p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


@pytest.mark.parametrize(
    "words, message",
    [
        ("--steps 0", "--steps: expected a number above 0, got 0"),
        ("--batch-size -4", "--batch-size: expected a number above 0, got -4"),
        ("--lr nan", "--lr: expected a finite number, got nan"),
        ("--lr 0", "--lr: expected a number above 0, got 0.0"),
        ("--warmup 1", "--warmup: expected a fraction in [0, 1), got 1.0"),
        ("--seed -1", "--seed: expected 0 or more, got -1"),
        ("--accumulate 3", "--accumulate: expected a divisor of --batch-size 4, got 3"),
        ("--conv-size 9", "--conv-size: expected 2 to 4, got 9"),
        ("--expand-v 1.3", "--expand-v: expected head_dim * expand_v to be whole and positive, got 10.4"),
        ("--head-dim 1000", "--head-dim: expected a width up to 256, got 1000"),
        ("--rule softmax_attention", "--rule: expected a rule with a recurrent state"),
        ("--max-minutes 0", "--max-minutes: expected a number above 0, got 0.0"),
        ("--implementation mosaic_gpu", "mosaic_gpu"),
        (
            "--data /nowhere/at/all",
            "--data: expected a file or a folder, got /nowhere/at/all, which does not exist",
        ),
        ("--glob *.nothing", "--data: expected text, got none in"),
        ("--length 100000", "--data: expected at least --length + 1 = 100001 training bytes"),
        ("--resume", "--resume: expected a run folder, got"),
    ],
)
def test_error_is_one_line(folder, tmp_path, capsys, words, message):
    out = tmp_path / "run"
    assert train(folder, out, *words.split()) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("gdn: ") and message in captured.err
    assert "Traceback" not in captured.err and not out.exists()


@pytest.mark.parametrize(
    "words, message",
    [
        ("train bytes --steps many", "--steps"),
        ("train bytes --stepz 3", "--stepz"),
        ("train bytes --dtype float8", "float8"),
        ("train bytes --steps", "--steps"),
        ("train bytes --rule attention", "attention"),
        ("train poems", "expected a task bytes, recall, needle, parity, permutation or copy, got poems"),
        ("train", "expected a task bytes, recall, needle, parity, permutation or copy, got none"),
        ("fly", "expected a command train, sweep, check or bench, got fly"),
    ],
)
def test_misuse_is_one_line(capsys, words, message):
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_existing_folder_is_not_touched(folder, finished, tmp_path, capsys):
    for out in (finished[0], tmp_path):
        before = tree(out)
        assert train(folder, out) == 1
        assert "--out: expected a folder that does not exist" in capsys.readouterr().err
        assert tree(out) == before


def test_resume_with_other_options_or_data(folder, finished, tmp_path, capsys):
    out, before = finished[0], tree(finished[0])
    assert cli.main(["train", "bytes", "--out", str(out), "--resume", "--lr", "0.5"]) == 1
    assert "--lr: expected 0.003 as in the run to resume, got 0.5" in capsys.readouterr().err
    assert cli.main(["train", "recall", "--out", str(out), "--resume"]) == 1
    assert "expected a run of the task recall, got bytes" in capsys.readouterr().err
    name = text.load(folder).train_files[0]
    content = (folder / name).read_bytes()
    try:
        (folder / name).write_bytes(content + b"x")
        assert cli.main(["train", "bytes", "--out", str(out), "--resume"]) == 1
    finally:
        (folder / name).write_bytes(content)
    assert "--resume: expected the data of the run" in capsys.readouterr().err
    assert tree(out) == before


def test_broken_configuration(tmp_path, capsys):
    for content in ("{", "[]", '{"options": 3}'):
        (tmp_path / "config.json").write_text(content)
        assert cli.main(["train", "bytes", "--out", str(tmp_path), "--resume"]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_unreadable_file(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "good.txt").write_text("text " * 100)
    (tmp_path / "text" / "bad.txt").symlink_to(tmp_path / "nothing")
    assert train(tmp_path / "text", tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "bad.txt: No such file or directory" in error
    if os.geteuid() != 0:  # the superuser reads everything
        (tmp_path / "secret.txt").write_text("text " * 100)
        (tmp_path / "secret.txt").chmod(0)
        assert train(tmp_path / "secret.txt", tmp_path / "run") == 1
        assert "Permission denied" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_out_that_cannot_be_created(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train(folder, tmp_path / "file" / "run") == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_default_folders_are_numbered(tmp_path, monkeypatch):
    from gdn_jax.experiments.runs import RunFolder

    monkeypatch.chdir(tmp_path)
    made = [RunFolder.create(None, "bytes", {}).path for _ in range(3)]
    assert made == [Path("runs", f"bytes-{i}") for i in (1, 2, 3)]


def test_missing_extra_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tyro" else object())
    assert cli.main(["train", "bytes"]) == 1
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1 and 'tyro not found; install with: pip install "gdn-jax[experiments]"' in error
    )


def test_help_needs_nothing():
    code = "import sys; from gdn_jax import cli; cli.main(['--help']); print('optax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("usage: gdn") and done.stdout.endswith("False\n")


def test_run_error_is_a_value_error():
    assert issubclass(RunError, ValueError)
