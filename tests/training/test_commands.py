"""`gdn` as a command: errors of one line, help without JAX, Ctrl-C, what it prints."""

import io
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from rich.console import Console
from tiny_runs import train

import gdn_command
import gdn_jax
from gdn_jax.bench.command import BENCHMARKS
from gdn_jax.commands import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.commands.interrupts import listen
from gdn_jax.sweeps import settings
from gdn_jax.training import options as options_lib
from gdn_jax.training import steps
from gdn_jax.training.progress import Reporter
from gdn_jax.training.runs import RunFolder


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
            "expected a task bytes, tokens, recall, needle, sentence, parity, permutation, copy, palindrome, "
            "stack, scope or eviction, got poems",
        ),
        (
            "train",
            "gdn train: expected a task bytes, tokens, recall, needle, sentence, parity, permutation, copy, "
            "palindrome, stack, scope or eviction, got none",
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
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gdn: interrupted while importing\n")


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

with listen(lambda: "finishing the step, saving"):
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
        assert reporter.doing == "compiling and taking the first step"  # the answer to Ctrl-C
        for step in range(41, 100):
            reporter.step(step)
        assert reporter.doing == "finishing the step"
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
        ("bench --help", 0, "usage: gdn bench"),
        ("fly", 2, "gdn: expected a command train, generate, "),
        ("bench stpe", 2, "gdn bench: expected a benchmark rule, kernels, "),
        ("train bytes book.txt", 2, "gdn: Unrecognized options: book.txt (see gdn train bytes --help)"),
        ("sweep tokens", 2, "gdn sweep: expected a task bytes, recall, "),
        ("eval", 2, "gdn eval: expected a run folder, got none (see gdn eval --help)"),
        ("info --context 3", 2, "gdn info: expected the run folder before the options, got --context"),
        ("train bytes --stepz 3", 2, "gdn: Unrecognized options: --stepz 3 (see gdn train bytes --help)"),
        (
            "bench --no-friends -1",
            2,
            "gdn: Unrecognized options: --no-friends -1 (see gdn bench rule --help)",
        ),
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


@pytest.mark.parametrize("command", [*cli._COMMANDS])
def test_no_option_that_there_is_is_refused_without_jax(command, capsys):
    """`gdn_command` finds the names of options in the source files."""
    firsts = {"train": options_lib.TASKS, "sweep": settings.TASKS, "bench": BENCHMARKS}.get(command, [None])
    for first in firsts:
        words = [command] if first is None else [command, first]
        assert cli.main([*words, "--help"]) == 0
        options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
        assert options and gdn_command._unknown([f"{option}=1" for option in sorted(options)]) == ""


def test_commands_and_tasks_are_those_that_there_are():
    """`gdn_command` has their names without importing them."""
    words = gdn_command.FIRST_WORDS
    assert [*words] == [*cli._COMMANDS] and words["train"] == (*options_lib.TASKS,)
    assert {*words["sweep"]} == set(settings.TASKS) and words["bench"] == (*BENCHMARKS,)


def test_a_name_that_is_nearly_one(capsys):
    for words, told in (
        ("trian", "got trian; did you mean train?"),
        ("bench stpe", "got stpe; did you mean step?"),
    ):
        assert cli.main(words.split()) == 2 and told in capsys.readouterr().err


def test_a_terminal_obeys_no_word(capsys):
    assert cli.main(["fl\x1b[31my"]) == 2
    assert r"got fl\x1b[31my (see" in capsys.readouterr().err


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


def test_run_error_is_a_value_error():
    assert issubclass(RunError, ValueError)
