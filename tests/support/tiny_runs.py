"""Runs of `gdn train bytes` that are over in seconds, and what is read off them."""

import json

import jax

from gdn_jax.commands import cli
from gdn_jax.training import options as options_lib
from gdn_jax.training.checkpoints import Checkpoints
from gdn_jax.training.runs import RunFolder
from gdn_jax.training.tasks.table import make_task
from gdn_jax.training.trainer import Trainer

TINY = (
    "--hidden-size 16 --num-layers 1 --num-heads 1 --head-dim 8 --dtype float32 --implementation recurrent "
    "--batch-size 4 --steps 12 --log-every 3 --eval-every 6 --save-every 4 --keep 3"
).split()
TINY_TEXT = [*TINY, *"--length 32 --val-bytes 256 --sample-bytes 8".split()]


def train(folder, out, *more):
    return cli.main(["train", "bytes", "--data", str(folder), "--out", str(out), *TINY_TEXT, *more])


def metrics(out):
    """Lines of metrics.jsonl without the wall clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "wall"} for line in lines]


def final_state(out):
    """Arrays of the last checkpoint."""
    stored = json.loads((out / "config.json").read_text())["options"]
    start = options_lib.RunOptions(out=out, resume=True)
    options = options_lib.from_json(options_lib.TASKS["bytes"], stored, start)
    trainer = Trainer.make(options, make_task(options.task, options.run.batch_size, options.run.seed))
    store = Checkpoints(RunFolder(out), None)
    trainer.restore(store)
    store.close()
    return trainer.step, jax.tree.leaves(trainer.state)


def resume(out, *more):
    return cli.main(["train", "bytes", "--out", str(out), "--resume", *more])


def tree(path):
    """Everything below a folder, with its content."""
    return {p: p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


def error_line(capsys):
    """The one line that was written to stderr."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("gdn: ") and "Traceback" not in error, error
    return error
