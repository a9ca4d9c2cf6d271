"""`gdn train`: the step, what it learns, its errors. A run and its resume: test_runs.py; data: test_*tasks.py."""

import dataclasses
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
import types
import unittest.mock
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from tiny_runs import TINY, metrics, train

import gdn_command
import gdn_jax
from gdn_jax.commands import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.commands.interrupts import listen
from gdn_jax.layers.blocks import weight_decay_mask
from gdn_jax.sweeps import settings
from gdn_jax.training import memory, steps, trainer
from gdn_jax.training import options as options_lib
from gdn_jax.training.progress import Reporter
from gdn_jax.training.runs import RunFolder
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.next_byte import TextOptions

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


def made(options):
    """A fresh model as its structure, its parameters and the rest, drawn by one program."""
    graphdef = None

    @jax.jit
    def draw():
        nonlocal graphdef
        graphdef, *state = nnx.split(steps.make_model(options.model, 256, 0), nnx.Param, ...)
        return state

    state = draw()
    return graphdef, *state


@pytest.mark.slow
def test_accumulated_gradient_is_that_of_the_batch():
    o = tiny_options()
    graphdef, params, rest = made(o)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (4, 17)).astype(np.int32)
    weights = rng.integers(0, 2, (4, 16)).astype(np.float32)  # pieces of unequal weight
    batch = Batch(tokens[:, :-1], tokens[:, 1:], weights)
    optimizer = steps.make_optimizer(o.optimizer, 10, o.optimizer.lr)
    start = jax.jit(lambda params: (jax.tree.map(jnp.copy, params), optimizer.init(params)))
    got = []
    for accumulate in (1, 2):
        functions = steps.make_functions(graphdef, optimizer, accumulate)
        state = steps.TrainState(*start(params))
        got.append(functions.train(rest, state, batch))
    (one, first), (two, second) = got
    np.testing.assert_allclose(first, second, rtol=1e-5)
    # the second moments are the squared gradients, Adam's update is not divided into them
    for a, b in zip(jax.tree.leaves(one.opt_state), jax.tree.leaves(two.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7)


def test_decay_spares_gates_and_norms():
    o = tiny_options(weight_decay=10.0, lr=0.1)
    _, params, _ = made(o)
    optimizer = steps.make_optimizer(o.optimizer, 10, o.optimizer.lr)

    @jax.jit
    def updates_of_no_gradient(params):
        return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]

    updates = updates_of_no_gradient(params)
    spared, decayed = set(), set()
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path)
        (decayed if np.any(np.asarray(update)) else spared).add(name)
    assert any("A_log" in n for n in spared) and any("dt_bias" in n for n in spared)
    assert any("norm" in n for n in spared)
    assert not any(word in n for n in decayed for word in ("A_log", "dt_bias", "norm"))
    assert any("embed" in n for n in decayed)
    # Vectors that nobody has marked, such as biases.
    assert weight_decay_mask({"bias": np.ones(3), "kernel": np.ones((2, 2))}) == {
        "bias": False,
        "kernel": True,
    }


def test_schedule_rises_and_falls():
    o = options_lib.ScheduleOptions(end_lr=0.1, warmup=0.1)

    def rates(number, at):
        return np.asarray(jax.jit(jax.vmap(steps.make_schedule(o, number, 1.0)))(np.asarray(at)))

    lr = rates(100, range(101))
    assert 0 < lr[0] < lr[5] < lr[10] == 1.0 and (np.diff(lr[10:]) < 0).all()
    assert lr[100] == pytest.approx(0.1)
    assert all(np.isfinite(rates(n, [n])) for n in (1, 2, 3))
    o = dataclasses.replace(o, warmup=0.0)  # the first step is half as long all the same
    np.testing.assert_allclose(rates(100, [0, 1]), [0.5, 1.0])


# --- runs


@pytest.mark.slow
def test_loss_falls_below_the_unigram(folder, tmp_path):
    rarely = "--log-every 40 --eval-every 80 --save-every 80"
    assert train(folder, tmp_path / "run", *f"--steps 80 --lr 0.02 {rarely}".split()) == 0
    assert metrics(tmp_path / "run")[-1]["val_bpb"] < 3.0


@pytest.mark.slow
def test_recall_learns_and_shows_its_answers(tmp_path):
    out = tmp_path / "run"
    options = (
        "--vocab-size 16 --num-pairs 2 --test-pairs 1 2 --length 8 --val-sequences 64 --steps 150 --lr 0.02 --seed 2 "
        "--log-every 50 --eval-every 150 --save-every 150"
    )
    argv = ["train", "recall", "--out", str(out), *TINY, "--batch-size", "32", *options.split()]
    assert cli.main(argv) == 0
    last = metrics(out)[-1]
    assert last["val_accuracy"] > 0.6  # a value of the sequence at random: 0.5
    assert len((out / "sample.txt").read_text().splitlines()) == 3
    result = json.loads((out / "result.json").read_text())
    tests, slices = result["test"], result["test_by"]
    assert tests.keys() == {"1", "2"} and tests["1"]["accuracy"] > 0.6
    for by in ("place", "order"):
        for size, found in slices[by].items():
            assert len(found) == int(size) and sum(found) / int(size) == pytest.approx(
                tests[size]["accuracy"], abs=1e-4
            )


# --- errors: one line, a status, nothing overwritten


@pytest.mark.parametrize(
    "words, message",
    [
        ("--steps 0", "--steps: expected a number above 0, got 0"),
        ("--batch-size -4", "--batch-size: expected a number above 0, got -4"),
        ("--lr nan", "--lr: expected a finite number, got nan"),
        ("--lr 0", "--lr: expected a number above 0, got 0.0"),
        ("--warmup 1", "--warmup: expected a fraction in [0, 1), got 1.0"),
        ("--seed -1", "--seed: expected 0 or more and less than 2**32, got -1"),
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
        ("--resume", "expected a run folder, got"),
        (
            "--mlp-ratio 0.0001",
            "--mlp-ratio: expected a positive number that gives hidden_size = 16 an inner width of at least 1",
        ),
        ("--mlp-ratio 1e308", "--mlp-ratio: expected a number that float32 holds"),
        ("--mlp-ratio 3e38", "expected a run that fits into the "),
        ("--expand-v 3e38", "--expand-v: expected head_dim * expand_v up to 256, got 24"),
        ("--steps 99999999999999999999999", "--steps: expected less than 2**31, got 99999999999999999999999"),
        ("--seed 4294967296", "--seed: expected 0 or more and less than 2**32, got 4294967296"),
        ("--batch-size 2000000000", "expected a run that fits into the "),
        ("--hidden-size 2000000000 --num-layers 10000", "expected a run that fits into the "),
        ("--model hybrid --num-layers 2000000000", "--num-layers: expected at most 10000, got 2000000000"),
        (
            "--rule mamba2 --implementation mosaic_gpu",
            "--implementation: expected auto with the rule mamba2, which has no kernels, got mosaic_gpu",
        ),
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
        (
            "train poems",
            "expected a task bytes, tokens, recall, needle, sentence, parity, permutation, copy, palindrome "
            "or stack, got poems",
        ),
        (
            "train",
            "gdn train: expected a task bytes, tokens, recall, needle, sentence, parity, permutation, copy, "
            "palindrome or stack, got none",
        ),
        ("fly", "expected a command train, generate, info, eval, sweep, reproduce, check or bench, got fly"),
    ],
)
def test_misuse_is_one_line(capsys, words, message):
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error and not error.startswith("gdn: gdn ")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gdn-jax {gdn_jax.__version__}\n"


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
    monkeypatch.chdir(tmp_path)
    made = [RunFolder.create(None, "bytes").path for _ in range(3)]
    assert made == [Path("runs", f"bytes-{i}") for i in (1, 2, 3)]
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    Path("runs").symlink_to("nowhere")
    with pytest.raises(RunError, match="--out: cannot create runs: File exists"):
        RunFolder.create(None, "bytes")


def test_missing_extra_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tyro" else object())
    assert cli.main(["train", "bytes"]) == 1
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1 and "tyro not found" in error and "pip install 'gdn-jax[experiments]'" in error
    )


INTERRUPTED = """
import signal, sys

module = sys.argv[1]

def press(event, arguments):
    if event == "import" and arguments[0] == module:
        signal.raise_signal(signal.SIGINT)

sys.addaudithook(press)
import gdn_command
sys.argv = ["gdn", "check"]
sys.exit(gdn_command.main())
"""


@pytest.mark.parametrize("module", ["jax._src.api", "gdn_jax.checks.oracle"])
def test_ctrl_c_during_an_import(module):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gdn: interrupted\n")


def test_ctrl_c_is_the_commands_own_after_the_imports(monkeypatch):
    """The handler of the imports is gone when a command begins, and is not installed twice."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["gdn", "check", "--seed", "-1"])
    found = []
    monkeypatch.setitem(
        cli._COMMANDS, "check", ("math", lambda argv: found.append(signal.getsignal(signal.SIGINT)) or 7)
    )
    assert gdn_command.main() == 7 and found == [before]


COMPUTING = """
import hashlib
from gdn_jax.commands.interrupts import listen

with listen("finishing the step, saving"):
    print("computing", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # for an hour, without a step of the interpreter
"""


def test_ctrl_c_is_answered_while_the_program_computes():
    """The first one is told what it waits for, the second one ends the process."""
    child = subprocess.Popen([sys.executable, "-c", COMPUTING], stdout=-1, stderr=-1, text=True)
    try:
        assert child.stdout.readline() == "computing\n"
        child.send_signal(signal.SIGINT)
        expected = "gdn: finishing the step, saving; Ctrl-C again to leave at once\n"
        assert child.stderr.readline() == expected
        child.send_signal(signal.SIGINT)
        assert (child.wait(60), child.stderr.read()) == (130, "gdn: interrupted\n")
    finally:
        child.kill()


def test_ctrl_c_of_a_program_that_ends_at_once_needs_no_answer(capsys):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with listen("ending") as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.wait(10)
    with pytest.raises(KeyboardInterrupt), listen("ending"):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == ""
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_file_is_told_of_the_first_steps():
    """Of a start, also one that goes on; a terminal has a bar."""
    console = Console(file=io.StringIO())
    with Reporter(console, steps=800, done=40) as reporter:
        for step in range(41, 100):
            reporter.step(step)
    lines = console.file.getvalue().splitlines()
    assert [re.sub(r" +\d+ s$", "", line) for line in lines] == [
        "compiling",
        *(f"step {step:6d}" for step in (41, 50, 60)),
    ]


def test_the_installed_command_is_that_one():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"gdn": "gdn_command:main"}
    assert project["tool"]["setuptools"]["py-modules"] == ["gdn_command"]


@pytest.mark.parametrize(
    "words, status, beginning",
    [
        ("--help", 0, "usage: gdn"),
        ("", 2, "usage: gdn"),
        ("--version", 0, "gdn-jax "),
        ("train --help", 0, "usage: gdn"),
        ("fly", 2, "gdn: expected a command train, generate, "),
        ("sweep tokens", 2, "gdn sweep: expected a task bytes, recall, "),
        ("eval", 2, "gdn eval: expected a run folder, got none (see gdn eval --help)"),
        ("info --context 3", 2, "gdn info: expected the run folder before the options, got --context"),
    ],
)
def test_what_is_answered_without_jax(words, status, beginning):
    """Help, and words that cannot be: JAX alone takes seconds to import. The package need not be installed."""
    code = (
        "import sys, gdn_command; print(gdn_command.main(), 'jax' in sys.modules, 'gdn_jax' in sys.modules)"
    )
    # Without site-packages, and so without what is installed.
    command = [sys.executable, "-S", "-c", code, *words.split()]
    path = os.environ | {"PYTHONPATH": str(Path(gdn_command.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=path)
    assert done.stdout.endswith(f"{status} False False\n")
    assert (done.stderr or done.stdout).startswith(beginning)


def test_commands_and_tasks_are_those_that_there_are():
    """`gdn_command` has their names without importing them."""
    words = gdn_command.FIRST_WORDS
    assert [*words] == [*cli._COMMANDS] and words["train"] == (*options_lib.TASKS,)
    assert {*words["sweep"]} == set(settings.TASKS)


def test_a_terminal_obeys_no_word(capsys):
    assert cli.main(["fl\x1b[31my"]) == 2
    assert r"got fl\x1b[31my (see" in capsys.readouterr().err


def test_least_memory_is_that_of_the_arrays():
    """The estimate counts real parameters and leaves out few of them: it never refuses what fits."""
    for o in (
        options_lib.ModelOptions(),
        options_lib.ModelOptions(
            hidden_size=64, num_layers=2, expand_v=1.0, mlp_ratio=3.0, tie_embeddings=True
        ),
        tiny_options().model,
    ):
        model = nnx.eval_shape(lambda o=o: steps.make_model(o, 256, 0))
        real = sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        assert 0.85 * real < memory.fewest_parameters(o, 256) <= real
    o = options_lib.ModelOptions(hidden_size=8, num_layers=3, num_heads=1, head_dim=4)
    weights = 16 * memory.fewest_parameters(o, 10)
    assert memory.least(o, 10, 6, 2, 5) == weights + 12 * 6 * 5 + 2 * 5 * 2 * 3 * 8


def test_out_of_memory_is_one_line(folder, tmp_path, monkeypatch, capsys):
    """Of the machine and of the device; any other error keeps its traceback."""
    for error in (
        MemoryError("a lot"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore"),
    ):

        def fails(*arguments, error=error):
            raise error

        monkeypatch.setattr(steps, "make_model", fails)
        assert train(folder, tmp_path / "run") == 1
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and message.startswith("gdn: out of memory, a smaller model")

    def breaks(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: a fault")

    monkeypatch.setattr(steps, "make_model", breaks)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        train(folder, tmp_path / "run")


def test_gradients_are_clipped():
    """Adam's first moment after one step is a tenth of the gradient that it was given."""
    o = options_lib.ScheduleOptions(clip=0.5)
    optimizer = steps.make_optimizer(o, 10, 0.1)
    params = {"w": np.zeros((2, 2), np.float32)}

    @jax.jit
    def state_after(gradient):
        return optimizer.update({"w": gradient}, optimizer.init(params), params)[1]

    for gradient, norm in (([[30.0, 0.0], [0.0, 40.0]], 0.5), ([[0.3, 0.0], [0.0, 0.0]], 0.3)):
        state = state_after(np.array(gradient, np.float32))
        [moment] = [
            x.mu["w"] for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu")
        ]
        np.testing.assert_allclose(
            moment, 0.1 * norm * np.asarray(gradient) / np.linalg.norm(gradient), rtol=1e-6
        )


def test_constants_of_the_optimizer():
    """Those of the recorded runs."""
    o = options_lib.ScheduleOptions()
    assert (o.weight_decay, o.warmup, o.end_lr, o.clip) == (0.1, 0.05, 0.02, 1.0)
    optimizer, params = steps.make_optimizer(o, 10, 0.1), {"w": np.zeros((2, 2), np.float32)}
    gradient = {"w": np.full((2, 2), 0.1, np.float32)}
    state = jax.jit(lambda gradient: optimizer.update(gradient, optimizer.init(params), params)[1])(gradient)
    [adam] = [x for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(x, "nu")]
    np.testing.assert_allclose(adam.nu["w"], 0.05 * 0.1**2, rtol=1e-5)


@pytest.mark.usefixtures("no_type_checks")
def test_saves_and_validations_take_no_time_of_training(monkeypatch):
    """By a false clock: a step takes 1 s, the first one 50 more, a validation 100, a save 1000."""
    now, tokens, lines = [0.0], 4 * 8, []

    def takes(seconds, result):
        now[0] += seconds
        return result

    class Clocked(trainer.Trainer):
        def _train(self, state, step):
            return takes(51 if step == 1 else 1, (state, steps.StepMetrics(*np.ones(3))))

        def validate(self):
            return takes(100, {})

        def save(self, store):
            takes(1000, None)

    monkeypatch.setattr(trainer, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    run = dict(steps=8, log_every=2, eval_every=4, save_every=3)
    options = dataclasses.replace(tiny_options(), run=options_lib.RunOptions(**run))
    task = types.SimpleNamespace(
        train_batch=lambda step: types.SimpleNamespace(tokens=np.zeros((4, 8))), metrics=lambda *x: {}
    )
    ignored, folder = unittest.mock.Mock(), types.SimpleNamespace(append=lines.append)
    loop = Clocked(options, task, None, None, None, None, None).loop
    assert loop(folder, None, ignored, threading.Event()) is None
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert [line["wall"]["tokens_per_second"] for line in lines] == [tokens] * 4
    # To step 2 only steps; a save after 3, a validation after 4, a save after 6.
    assert [line["wall"]["seconds"] for line in lines] == [52, 1054, 1156, 2158]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("step, lines", [(2, []), (7, [3, 4, 6]), (10, [3, 4, 6, 8, 9, 10])])
def test_steps_whose_lines_a_run_has(step, lines):
    """After every --log-every and --eval-every steps, and after the last one."""
    run = options_lib.RunOptions(steps=10, log_every=3, eval_every=4)
    options = dataclasses.replace(tiny_options(), run=run)
    assert trainer.Trainer(options, *[None] * 6, step=step).lines() == lines


def test_run_error_is_a_value_error():
    assert issubclass(RunError, ValueError)
