"""`gdn train tokens --from`: a checkpoint is trained on in its own tokens, taken up, written with, and written."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_runs import metrics

from gdn_jax.commands import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.hf import load_hf, save_hf
from gdn_jax.training.load import load_run
from gdn_jax.training.options import ModelOptions
from gdn_jax.training.steps import loss_sum, start_model, trained
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.next_token import TokensOptions, TokensTask, Words

LING = Path(__file__).parents[1] / "data" / "bailing_hybrid_released"
WORDS = [f"word{i}" for i in range(199)]
END = 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Two layers of Ling, one of each kind, whose token i is the word i, of which one ends a text."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    folder = tmp_path_factory.mktemp("ling") / "ling"
    model = load_hf(LING)
    model.blocks = nnx.List([model.blocks[0], model.blocks[2]])
    layers = {"num_layers": 2, "layer_types": ("kda", "attention")}
    model.config, model.origin = dataclasses.replace(model.config, **layers), None
    save_hf(model, folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {END}}}')
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="word0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Three texts that count; one of them is held out."""
    folder = tmp_path_factory.mktemp("book")
    for n in range(3):
        (folder / f"{n}.txt").write_text(" ".join(WORDS[(n + i) % 50 + 20] for i in range(100)))
    return folder


def test_texts_are_tokens_with_the_end_between_them(checkpoint, book):
    task = TokensTask(TokensOptions(data=book, from_=checkpoint, length=16, val_tokens=40), 2, 0)
    assert task.vocab_size == 199 and task.data.size == 203 and task.val.size == 102
    assert [*np.flatnonzero(task.data == END)] == [0, 101, 202]
    inside = task.val[1:-1]
    assert [*np.unique(np.diff(inside))] == [-49, 1]
    batch = task.train_batch(1)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    rows = [r for b in task.val_batches(4) for r, w in zip(b.tokens, b.weights, strict=True) if w.any()]
    assert len(rows) == 2
    # A token of about seven bytes: its loss is shared by them.
    assert task.metrics(np.log(2) * task.bytes_per_token, 0.0)["bpb"] == pytest.approx(1)
    assert task.bytes_per_token == pytest.approx(7, rel=0.03)
    words = Words(checkpoint, 199)
    assert words.encode("").tolist() == [[END]] and words.encode("word3 word9").tolist() == [[3, 9]]
    assert words.decode(jax.numpy.array([3, END, 9])) == "word3"


def test_a_sample_that_cannot_begin_is_refused_before_training(checkpoint, book, tmp_path):
    """No prompt, and no token that ends a text."""
    folder = shutil.copytree(checkpoint, tmp_path / "endless")
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": None}))
    options = TokensOptions(data=book, from_=folder, length=16, val_tokens=40)
    with pytest.raises(RunError, match="--prompt: expected a text of one token or more, got none"):
        TokensTask(options, 2, 0)
    assert TokensTask(dataclasses.replace(options, prompt="word3"), 2, 0).vocab_size == 199


def test_a_sample_is_text(checkpoint, book, monkeypatch, no_type_checks):
    """Bytes of the prompt that are no UTF-8 are U+FFFD, with which the sample can be written and printed."""
    options = TokensOptions(data=book, from_=checkpoint, length=16, val_tokens=40, prompt="word3 \udcff ")
    task = TokensTask(options, 2, 0)
    monkeypatch.setattr(
        "gdn_jax.training.tasks.next_token.models.generate", lambda *_, **__: np.array([[3, 9, END, 4]])
    )
    sample = task.sample(None)
    assert sample == "word3 \ufffd word3 word9" and sample.encode()


def test_tokens_that_are_none_of_the_model_are_refused_before_training(checkpoint, book, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "odd")
    options = TokensOptions(data=book, from_=folder, length=16, val_tokens=40)
    for end in (-1, [END, 199], 2**31, 10**30):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        with pytest.raises(
            RunError, match=r"--from: .*generation_config.json: expected eos_token_id to be tokens"
        ):
            TokensTask(options, 2, 0)
    shutil.copyfile(checkpoint / "generation_config.json", folder / "generation_config.json")
    content = (folder / "tokenizer.json").read_text()
    odd = json.loads(content)
    odd["model"]["vocab"]["word20"] = 1000
    (folder / "tokenizer.json").write_text(json.dumps(odd))
    with pytest.raises(
        RunError, match=r"--from: .*tokenizer.json: expected tokens below .* size 199, got 1000"
    ):
        TokensTask(options, 2, 0)
    cut = {"direction": "Right", "max_length": 50, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(content) | {"truncation": cut}))
    assert TokensTask(options, 2, 0).data.size == 203


@pytest.mark.parametrize("rank", [None, 2])
def test_weights_that_are_trained_are_float32(checkpoint, rank):
    """Of a run in bfloat16 from a checkpoint: all weights, or the low-rank changes of weights in bfloat16."""
    task = TokensOptions(from_=checkpoint, lora_rank=rank)
    model = start_model(task, ModelOptions(dtype="bfloat16"), 199, 0)
    params, rest = nnx.state(model, trained(task)), nnx.state(model, nnx.Not(trained(task)))
    assert model.config.dtype == "bfloat16"
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    kept = {x.dtype.name for x in jax.tree.leaves(rest)}
    assert kept == (set() if rank is None else {"bfloat16", "float32"})  # A_log and dt_bias are float32


def test_a_head_for_the_token_after_the_next_is_trained_if_asked_for(checkpoint):
    """Else no loss reaches it, and weight decay would. The loss counts pairs of tokens before one that counts."""
    task = TokensOptions(from_=Path(__file__).parents[1] / "data" / "qwen3_5_mtp")
    assert start_model(task, ModelOptions(), 199, 0).mtp is None
    with pytest.raises(RunError, match=r"--mtp-weight: expected 0 for a checkpoint without a head, got 0\.5"):
        start_model(TokensOptions(from_=checkpoint), ModelOptions(mtp_weight=0.5), 199, 0)
    options = ModelOptions(mtp_weight=0.5, implementation="recurrent", dtype="float32")
    model = start_model(task, options, 199, 0)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    random = np.random.default_rng(0)
    line = random.integers(0, 199, (2, 13)).astype(np.int32)
    weights = random.integers(0, 2, (2, 12)).astype(np.float32)
    batch = Batch(line[:, :-1], line[:, 1:], weights)

    @jax.jit
    def run(params):
        loss = partial(loss_sum, graphdef, rest, batch=batch, mtp_weight=0.5)
        (total, sums), gradient = jax.value_and_grad(lambda params: loss(params=params), has_aux=True)(params)
        return total, sums, gradient, nnx.merge(graphdef, params, rest).mtp_logits(jnp.asarray(line[:, :-1]))

    total, sums, gradient, logits = run(params)
    logits = np.asarray(logits, np.float64)
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, line[:, 2:, None], axis=2)[..., 0]
    # A difference of two float32 sums of about 20 losses of 5 nats, each of which is right to some 1e-7.
    np.testing.assert_allclose(total - sums.loss, 0.5 * (nll * weights[:, 1:]).sum(), rtol=1e-5)
    assert sums.weight == weights.sum()
    for path, g in nnx.to_flat_state(gradient):
        assert path[0] != "mtp" or np.abs(np.asarray(g[...])).max() > 0, path


TINY = "--length 16 --val-tokens 64 --batch-size 4 --sample-tokens 2 --implementation recurrent".split()
TINY += "--steps 4 --log-every 1 --eval-every 3 --save-every 4".split()


@pytest.mark.slow
def test_low_rank_changes_are_trained_taken_up_and_merged(checkpoint, book, tmp_path, capsys):
    """The other weights stay as they are; the merged ones are written beside the tokenizer. On a mesh that splits
    rows, tokens, heads and the frozen weights the run is the same."""
    out, saved, parts = tmp_path / "run", tmp_path / "saved", tmp_path / "parts"
    argv = ["train", "tokens", "--from", str(checkpoint), "--data", str(book), *TINY, "--lora-rank", "3"]
    assert cli.main([*argv, "--lr", "0.01", "--out", str(out)]) == 0
    mesh = f"data={jax.device_count() // 4},context=2,head=2,sharded"
    assert cli.main([*argv, "--lr", "0.01", "--out", str(parts), "--mesh", mesh]) == 0
    numbers = [
        [line[name] for line in metrics(run) for name in ("loss", "grad_norm")] for run in (out, parts)
    ]
    np.testing.assert_allclose(*numbers, rtol=1e-4)  # float32 sums of up to 199 terms, through both passes
    held_out = [line["val_bpb"] for line in metrics(out) if "val_bpb" in line]
    assert len(held_out) == 2 and held_out[1] < held_out[0]
    np.testing.assert_allclose(held_out, [m["val_bpb"] for m in metrics(parts) if "val_bpb" in m], rtol=1e-5)
    run, before = load_run(out), load_hf(checkpoint)
    changed = {
        path[-2].key
        for (path, a), (_, b) in zip(*map(leaves, (run.model, before)), strict=True)
        if not np.array_equal(a, b)
    }
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    save_hf(run.model, saved)
    assert (saved / "tokenizer.json").exists()
    for (_, a), (_, b) in zip(*map(leaves, (run.model, load_hf(saved))), strict=True):
        np.testing.assert_array_equal(a, b)
    capsys.readouterr()
    assert cli.main(["info", str(out)]) == 0
    assert f"a run of tokens from {checkpoint}" in capsys.readouterr().out
    assert cli.main(["eval", str(out), "--data", str(book)]) == 1
    assert "expected a run of the task bytes, got tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_names_and_prompts_that_are_odd_end_no_run(checkpoint, book, tmp_path, capsys):
    """A folder's name is no formula of the figure's title and no markup of the table; any bytes are a prompt."""
    folder, out = shutil.copytree(checkpoint, tmp_path / "a$^$[red]"), tmp_path / "run"
    argv = [
        "train",
        "tokens",
        "--from",
        str(folder),
        "--data",
        str(book),
        *TINY,
        "--prompt",
        "word3 \udcff\x1b[2J",
    ]
    assert cli.main([*argv, "--steps", "1", "--lora-rank", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "a$^$[red], 1 steps" in printed and "\x1b" not in printed
    assert (out / "sample.txt").read_text().startswith("word3 \ufffd\x1b[2J")
    assert (out / "result.json").is_file() and (out / "curves.png").is_file()


def leaves(model):
    return jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    "message, more",
    [
        ("--from: expected the folder of a checkpoint, got none", []),
        ("--from: /nothing: expected a folder with config.json, got none", ["--from", "/nothing"]),
        ("--hidden-size: expected 128, the value of the --from checkpoint, got 64", ["--hidden-size", "64"]),
        (f"--from: expected tokenizer.json in {LING}, got none", [f"--from={LING}"]),
    ],
)
def test_what_cannot_be_trained_on(message, more, capsys):
    assert cli.main(["train", "tokens", *more]) == 1
    assert message in capsys.readouterr().err
