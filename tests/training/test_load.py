"""A trained run is used: loaded, sampled from, asked about other text, by functions and by commands."""

import dataclasses
import json
import math
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_runs import TINY, train

from gdn_jax.commands import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.commands.locks import owned
from gdn_jax.inspect.evaluate import bits_per_byte, trained_on
from gdn_jax.models import generate
from gdn_jax.training.load import load_run
from gdn_jax.training.tasks import text


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A run of a few steps, which knows where words end."""
    out = tmp_path_factory.mktemp("runs") / "trained"
    steps = "--steps 40 --lr 0.02 --eval-every 20 --save-every 20"
    assert train(folder, out, *steps.split(), "--temperature", "0") == 0
    return out


@pytest.fixture(scope="module")
def run(trained):
    return load_run(trained)


@pytest.mark.slow
def test_loaded_run(trained, run):
    assert run.path == trained and run.step == 40 and run.damaged == {}
    assert run.config == json.loads((trained / "config.json").read_text())
    assert run.options.model.hidden_size == 16 and run.options.task.length == 32
    count = sum(x.size for x in jax.tree.leaves(nnx.state(run.model, nnx.Param)))
    assert count == run.config["parameters"]
    # the weights are those that wrote the sample
    written = generate(run.model, run.encode(""), 8)
    assert run.decode(written[0]) == (trained / "sample.txt").read_text()


def test_text_to_tokens_and_back(run):
    prompt = "def café\t" + b"\xff".decode(errors="surrogateescape")
    tokens = run.encode(prompt)
    np.testing.assert_array_equal(tokens, [[0, *b"def caf\xc3\xa9\t\xff"]])
    assert run.decode(tokens[0, 1:]) == "def café\t\ufffd"
    assert run.decode(jnp.array([65, 0, 66])) == "A" and run.decode(jnp.array([7])) == "\ufffd"
    with pytest.raises(RunError, match="--prompt: expected text"):
        run.encode("\ud800")


def test_bits_per_byte(run):
    """Every window is scored from its own bytes, its first one included as context of the second."""
    texts = [b"def f(x):\n    return x\n" * 3, b"x = 1\n" * 9]
    bits, count = bits_per_byte(run, texts, 1 << 20)
    stream = np.frombuffer(b"\0" + b"".join(x + b"\0" for x in texts), np.uint8).astype(np.int32)
    windows = (len(stream) - 1) // 32
    assert count == 32 * windows
    rows = np.stack([stream[32 * i : 32 * i + 33] for i in range(windows)])
    logits = jax.jit(lambda tokens: run.model(tokens)[0])(rows[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()
    assert bits == pytest.approx(float(loss) / math.log(2), rel=1e-5)
    with pytest.raises(
        RunError, match="--data: expected at least 31 bytes of text, a window of the run, got 3"
    ):
        bits_per_byte(run, [b"abc"], 100)


def test_eval_of_the_held_out_text_is_the_validation(trained, folder, tmp_path, capsys):
    """The files held out, scored by themselves, give what the run measured (with all of its bytes)."""
    corpus = text.load(folder)
    for name in corpus.val_files:
        (tmp_path / "held out" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, tmp_path / "held out" / name)
    assert cli.main(["eval", str(trained), "--data", str(tmp_path / "held out"), "--val-bytes", "256"]) == 0
    line = capsys.readouterr().out
    expected = json.loads((trained / "result.json").read_text())["val_bpb"]
    assert line.startswith(f"{expected:.4f} bits per byte over 256 of ")
    said = f" bytes in {len(corpus.val_files)} files of {tmp_path / 'held out'}: 8 windows of 32 bytes, spread evenly"
    assert said in line


def test_eval_says_what_the_model_has_seen(trained, run, folder, tmp_path):
    """Files of the training part count; of a run of one file its beginning; and a text that is gone tells nothing."""
    texts = dict(text.read(folder)[1])
    corpus = text.load(folder)
    train, val = ([texts[name] for name in names] for names in (corpus.train_files, corpus.val_files))
    assert trained_on(run, train + val + [b"new"]) == sum(map(len, train))

    def of(file, **data):
        task = dataclasses.replace(run.options.task, data=file)
        options = dataclasses.replace(run.options, task=task)
        return dataclasses.replace(run, options=options, config=run.config | {"data": data})

    (tmp_path / "one.txt").write_bytes(whole := b"some words of text " * 20)
    alone = of(tmp_path / "one.txt", fingerprint=text.load(tmp_path / "one.txt").fingerprint)
    assert trained_on(alone, [whole]) == len(whole) - len(whole) // 10
    assert trained_on(alone, [whole[:50]]) == 50 and trained_on(alone, [b"new"]) == 0
    assert trained_on(of(tmp_path / "one.txt", fingerprint="another"), [whole]) is None
    assert trained_on(of(tmp_path / "gone.txt"), [whole]) is None


@pytest.mark.slow
def test_generate(trained, run, capsys):
    """The command writes the prompt and what `models.generate` does behind it, drawn with the same key."""

    def written(*words):
        assert cli.main(["generate", str(trained), "--tokens", "12", "--prompt", "def ", *words]) == 0
        return capsys.readouterr().out

    def expected(**options):
        return f"def {run.decode(generate(run.model, run.encode('def '), 12, **options)[0])}\n"

    greedy = expected()
    assert written("--temperature", "0") == greedy
    assert written("--top-k", "1") == greedy
    hot = [written("--temperature", "1.5", "--seed", seed) for seed in "112"]
    assert hot[0] == hot[1] != hot[2]
    assert written() == expected(rng=jax.random.key(0), temperature=0.7)


def test_a_run_is_read_while_it_is_at_work(trained, tmp_path, capsys):
    """Reading needs no lock and leaves everything, checkpoints that are being written too, as it is."""
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "checkpoints" / "44.orbax-checkpoint-tmp").mkdir()
    with owned(copy):
        before = sorted(copy.rglob("*"))
        assert load_run(str(copy)).step == 40
        assert sorted(copy.rglob("*")) == before


def test_a_damaged_checkpoint_is_passed_over_and_left(trained, tmp_path, capsys):
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "checkpoints" / "40" / "state" / "manifest.ocdbt").unlink()
    before = sorted(copy.rglob("*"))
    assert cli.main(["generate", str(copy), "--tokens", "1"]) == 0
    assert capsys.readouterr().err == "gdn: note: the checkpoint of step 40 is damaged, using step 20\n"
    assert sorted(copy.rglob("*")) == before


@pytest.mark.slow
def test_another_task(tmp_path, capsys):
    """The model of a task without text loads; what needs text says so."""
    out = tmp_path / "run"
    assert cli.main(["train", "parity", "--out", str(out), *TINY, "--steps", "1", "--length", "4"]) == 0
    run = load_run(out)
    logits = jax.jit(lambda tokens: run.model(tokens)[0])(np.zeros((1, 3), np.int32))
    assert run.model.config.vocab_size == 2 and logits.shape == (1, 3, 2)
    capsys.readouterr()
    assert cli.main(["generate", str(out)]) == 1
    assert capsys.readouterr().err == f"gdn: {out}: expected a run of the task bytes or tokens, got parity\n"
    with pytest.raises(RunError, match="expected a run of the task bytes or tokens, got parity"):
        run.decode(jnp.array([1]))


@pytest.mark.parametrize(
    "words, message",
    [
        ("generate {run} --tokens 0", "--tokens: expected a number above 0, got 0"),
        ("generate {run} --temperature -1", "--temperature: expected 0 or more, got -1.0"),
        ("generate {run} --temperature nan", "--temperature: expected a finite number, got nan"),
        ("generate {run} --top-k 300", "--top-k: expected at most 256, got 300"),
        ("generate {run} --seed -1", "--seed: expected 0 or more and less than 2**32, got -1"),
        ("generate {run} --implementation mosaic_gpu", "mosaic_gpu"),
        (
            "generate /nowhere",
            "expected a run folder or a folder with a Hugging Face checkpoint, got /nowhere, which does not exist",
        ),
        ("info nosuch", "expected a run folder, a folder with a Hugging Face checkpoint or a preset ("),
        ("eval {run}", "--data: expected a file or a folder, got none"),
        (
            "eval {run} --data /nowhere",
            "--data: expected a file or a folder, got /nowhere, which does not exist",
        ),
        ("eval /nowhere --data {run}", "expected a run folder, got /nowhere"),
    ],
)
def test_error_is_one_line(trained, capsys, words, message):
    assert cli.main(words.format(run=trained).split()) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("gdn: ") and message in captured.err


def test_runs_that_hold_no_model(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(RunError, match="expected a run with a checkpoint, got none"):
        load_run(copy)
    config = json.loads((copy / "config.json").read_text()) | {"task": "sweep parity"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="expected a run of gdn train, got one of the task sweep parity"):
        load_run(copy)


@pytest.mark.parametrize(
    "words, message",
    [
        ("generate", "gdn generate: expected a run folder, got none (see gdn generate --help)"),
        ("eval --data x", "gdn eval: expected the run folder before the options, got --data"),
        ("generate run --length 3", "--length"),
    ],
)
def test_misuse_is_one_line(capsys, words, message):
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    "command, path, option", [("generate", "PATH", "--top-k"), ("eval", "RUN", "--val-bytes")]
)
def test_help(capsys, command, path, option):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: gdn {command} {path} [-h]") and option in text


@pytest.mark.parametrize(
    "command, module", [("train", "gdn_jax.training.train"), ("sweep", "gdn_jax.sweeps.sweep")]
)
def test_help_imports_the_options_alone(capsys, monkeypatch, command, module):
    """The half of the seconds that checkpoints, tables and progress bars take to import."""
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main([command, "parity", "--help"]) == 0
    assert "--lr" in capsys.readouterr().out
    with pytest.raises(ImportError, match=module):
        cli.main([command, "parity"])
