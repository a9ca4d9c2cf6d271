"""`gdn sweep`: the same small model with several token mixers, seeds and learning rates, and what comes of it.

The folder of a sweep:

    config.json    options, model size, versions; written once
    runs.jsonl     one JSON object for each finished run; all but `wall` is the same after a resume
    table.md       accuracy by mixer and size, at the learning rate with the lowest validation loss
    figure.png     the same with error bars

A run is a function of its mixer, learning rate and seed: it is lost when interrupted and made again. Runs of a mixer
share one compiled program, in which seed and learning rate are arguments and `together` of them advance side by side.
"""

import dataclasses
import math
import shlex
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree, UInt32
from rich.console import Console
from rich.markdown import Markdown

from gdn_jax.commands.errors import RunError, os_line
from gdn_jax.commands.files import JsonLines, write_text
from gdn_jax.commands.interrupts import INTERRUPTED, listen
from gdn_jax.commands.locks import owned
from gdn_jax.commands.versions import versions
from gdn_jax.experiments import memory, steps
from gdn_jax.experiments import options as options_lib
from gdn_jax.experiments.mixers import MIXERS
from gdn_jax.experiments.options import ModelOptions, OptimizerOptions, RunOptions, TrainOptions
from gdn_jax.experiments.runs import RunFolder, check_free
from gdn_jax.experiments.steps import Sums, TrainState
from gdn_jax.experiments.sweeps import figure, summary
from gdn_jax.experiments.sweeps.options import SweepOptions
from gdn_jax.experiments.sweeps.progress import SweepReporter
from gdn_jax.experiments.tasks.batch import Batch
from gdn_jax.experiments.tasks.generated import GeneratedTask
from gdn_jax.experiments.tasks.table import check_same_data, make_task
from gdn_jax.models import LanguageModel

# Seconds of work handed to the device at a time: how long a Ctrl-C waits, and how often the bar moves.
_SLICE = 1.0


class Run(NamedTuple):
    """One point of the grid."""

    mixer: str
    lr: float
    seed: int


_SCORES = ("val_loss", "val_accuracy", "test_accuracy", "parameters", "wall")
"""What a line of runs.jsonl holds beside its run."""


class Runs(NamedTuple):
    """Runs side by side; every leaf has one entry a run."""

    seed: UInt32[Array, " R"]
    lr: Float[Array, " R"]
    state: TrainState


class Program:
    """The compiled functions of a mixer, for `together` runs at a time."""

    def __init__(self, options: SweepOptions, task: GeneratedTask, mixer: str):
        grid = options.sweep
        # Shapes alone: the weights come from `make_start`, and there is no other state.
        model = nnx.eval_shape(lambda: make_model(options, task, mixer, 0))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        assert not jax.tree.leaves(rest)
        self.parameters: int = sum(x.size for x in jax.tree.leaves(params))

        def advance(seed, lr, state, first, last):
            """Steps first + 1 to last."""
            optimizer = steps.make_optimizer(options.optimizer, grid.steps, lr)
            step = partial(steps.train_step, graphdef, rest, optimizer, 1)
            return jax.lax.fori_loop(
                first, last, lambda i, s: step(s, task.seeded_batch(seed, i + 1))[0], state
            )

        def score(params, batch):
            return steps.loss_sum(graphdef, rest, params, batch)[1]

        jit = partial(jax.jit, compiler_options=steps.compiler_flags(grid.deterministic))
        many = partial(_side_by_side, grid.together)
        self._advance = jit(many(advance, 3), donate_argnums=2)
        self._score = jit(many(score, 1))

    def advance(self, runs: Runs, first: int, last: int) -> Runs:
        """The steps first + 1 to last; waits for the device."""
        state = self._advance(runs.seed, runs.lr, runs.state, first, last)
        return runs._replace(state=jax.block_until_ready(state))

    def score(self, runs: Runs, batches: list[Batch]) -> list[tuple[float, float]]:
        """Mean loss and accuracy of every run."""
        sums = [jax.device_get(self._score(runs.state.params, batch)) for batch in batches]
        return [steps.mean([Sums(*(x[r] for x in s)) for s in sums]) for r in range(len(runs.seed))]


def make_model(options: SweepOptions, task: GeneratedTask, mixer: str, seed: int | Array) -> LanguageModel:
    """Model of a mixer with fresh weights, which are the same for all mixers."""
    _, rule, neg = MIXERS[mixer]
    size = dataclasses.asdict(options.model)
    return steps.make_model(ModelOptions(**size, rule=rule, allow_neg_eigval=neg), task.vocab_size, seed)


def make_start(options: SweepOptions, task: GeneratedTask) -> Callable[[list[Run]], Runs]:
    """A compiled function from runs to their state before the first step, for any mixer."""

    def start(seed: Array, lr: Array) -> TrainState:
        params = nnx.state(make_model(options, task, options.sweep.mixers[0], seed), nnx.Param)
        return TrainState(
            params, steps.make_optimizer(options.optimizer, options.sweep.steps, lr).init(params)
        )

    flags = steps.compiler_flags(options.sweep.deterministic)
    many = jax.jit(_side_by_side(options.sweep.together, start, 2), compiler_options=flags)

    def start_runs(runs: list[Run]) -> Runs:
        seed = jnp.asarray([run.seed for run in runs], jnp.uint32)
        lr = jnp.asarray([run.lr for run in runs], jnp.float32)
        return Runs(seed, lr, many(seed, lr))

    return start_runs


def _side_by_side(count: int, f: Callable[..., PyTree], mapped: int) -> Callable[..., PyTree]:
    """f for `count` values of its first `mapped` arguments at once; a single one runs f as it is."""

    def many(*args):
        if count > 1:
            return jax.vmap(f, in_axes=(*(0,) * mapped, *(None,) * (len(args) - mapped)))(*args)
        first = jax.tree.map(lambda x: x[0], args[:mapped])
        return jax.tree.map(lambda x: x[None], f(*first, *args[mapped:]))

    return many


def grid(options: SweepOptions) -> list[Run]:
    """All runs of a sweep, mixer after mixer."""
    o = options.sweep
    return [Run(mixer, lr, seed) for mixer in o.mixers for lr in o.lrs for seed in range(o.seeds)]


def as_run(record: dict[str, Any]) -> Run:
    """The run that a line of runs.jsonl belongs to."""
    return Run(record["mixer"], record["lr"], record["seed"])


class Sweep:
    """A sweep at work: what is left of the grid, and where results go."""

    def __init__(self, options: SweepOptions, task: GeneratedTask, lines: JsonLines):
        self.options, self.task, self.lines = options, task, lines
        self.start = make_start(options, task)
        size = options.sweep.batch_size
        tests = task.test_batches(size)
        longest = max(batch.tokens.shape[1] for batches in tests.values() for batch in batches)
        # The validation set has the shape of the tests: one compilation for all of them.
        self.sets = {"val": [batch.pad(longest) for batch in task.val_batches(size)]}
        self.sets |= {str(n): batches for n, batches in tests.items()}

    def left(self) -> dict[str, list[Run]]:
        """Runs without a result, by mixer."""
        done = {as_run(record) for record in self.lines.records()}
        runs = [run for run in grid(self.options) if run not in done]
        return {mixer: [r for r in runs if r.mixer == mixer] for mixer in self.options.sweep.mixers}

    def run(self, reporter: SweepReporter, asked: threading.Event) -> bool:
        """Makes what is left; returns whether it came to the end.

        Raises:
          RunError: a mixer cannot be made with these options.
        """
        for mixer, runs in self.left().items():
            if not runs:
                continue
            program = Program(self.options, self.task, mixer)
            width = self.options.sweep.together
            for first in range(0, len(runs), width):
                # A last group that an interrupt has left too small is filled up with runs that are made again.
                group = runs[first : first + width]
                filled = group + [group[-1]] * (width - len(group))
                try:
                    finished = self._group(program, filled, len(group), reporter, asked)
                except NotImplementedError as error:
                    raise RunError(str(error)) from error
                if not finished:
                    return False
        return True

    def _group(
        self, program: Program, group: list[Run], count: int, reporter: SweepReporter, asked: threading.Event
    ) -> bool:
        begin = time.monotonic()
        total = self.options.sweep.steps
        reporter.group(group[:count])
        runs = self.start(group)
        step, stride = 0, 1  # the first step compiles
        while step < total:
            mark = time.monotonic()
            last = min(step + stride, total)
            runs = program.advance(runs, step, last)
            seconds = (time.monotonic() - mark) / (last - step)
            stride = 2 if step == 0 else max(1, min(4 * stride, int(_SLICE / seconds)))
            step = last
            reporter.step(step)
            if asked.is_set():
                return False
        scores = {name: program.score(runs, batches) for name, batches in self.sets.items()}
        seconds = time.monotonic() - begin
        for r, run in enumerate(group[:count]):
            loss, accuracy = scores["val"][r]
            tests = {name: score[r][1] for name, score in scores.items() if name != "val"}
            record = {
                **run._asdict(),
                "val_loss": loss if math.isfinite(loss) else None,
                "val_accuracy": accuracy,
                "test_accuracy": tests,
                "parameters": program.parameters,
                "wall": {"seconds": round(seconds / count, 3)},
            }
            self.lines.append(record)
            reporter.done(run, accuracy, tests)
        return True


def sweep(options: SweepOptions, console: Console, command: str) -> int:
    """Runs `gdn sweep`; returns the exit status.

    Args:
      options: of the sweep.
      console: where progress is shown.
      command: the command line, for the table.

    Raises:
      RunError: something asked for cannot be done; nothing was overwritten.
    """
    o, name = options.sweep, options.task.task
    if not o.resume:
        check_free(o.out)
    run = RunOptions(seed=o.data_seed, batch_size=o.batch_size)
    task = make_task(TrainOptions(options.task, run, ModelOptions(), OptimizerOptions()))
    assert isinstance(task, GeneratedTask)
    memory.check(options.model, task.vocab_size, o.batch_size, o.batch_size, options.task.length, o.together)
    if o.resume:
        folder, config = RunFolder.open(o.out, command=str)
        with owned(folder.path):
            check_same_data(config["data"], task)
            return _work(options, task, folder, config, console)
    config = {
        "task": f"sweep {name}",
        "command": command,
        "options": options_lib.to_json(options),
        "data": task.describe(),
        "versions": versions(),
    }
    folder = RunFolder.create(o.out, f"sweep {name}")
    with owned(folder.path):
        folder.write_json("config.json", config)
        return _work(options, task, folder, config, console)


def _work(
    options: SweepOptions, task: GeneratedTask, folder: RunFolder, config: dict[str, Any], console: Console
) -> int:
    """Makes what is left and the table; returns the exit status."""
    o, name = options.sweep, options.task.task
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    again = shlex.join(["gdn", "sweep", name, "--out", str(folder.path), "--resume"])
    lines = JsonLines(folder.path / "runs.jsonl", (*Run._fields, *_SCORES))
    try:
        lines.mend()
        work = Sweep(options, task, lines)
        total, left = len(grid(options)), sum(map(len, work.left().values()))
        say(task.summary())
        say(
            f"{left} of {total} runs of {o.steps} steps to make on {config['versions']['device']}, "
            f"folder {folder.path}"
        )
        with listen() as asked, SweepReporter(console, total, total - left, o.steps) as reporter:
            finished = work.run(reporter, asked)
        if not finished:
            say(f"interrupted; finished runs are kept; continue with: {again}")
            return INTERRUPTED
        _finish(options, task, folder, config, lines, console)
    except OSError as error:
        raise RunError(
            f"{folder.path}: {os_line(error)}; finished runs are kept; continue with: {again}"
        ) from error
    say(f"results in {folder.path}")
    return 0


def _finish(
    options: SweepOptions,
    task: GeneratedTask,
    folder: RunFolder,
    config: dict[str, Any],
    lines: JsonLines,
    console: Console,
) -> None:
    """Writes table and figure."""
    records = lines.records()
    rows = summary.rows(records, list(options.sweep.mixers))
    table = summary.markdown(rows, records, config, task)
    write_text(folder.path / "table.md", table)
    figure.draw_sweep(
        folder.path / "figure.png",
        rows,
        axis=task.axis,
        label=task.label,
        trained=task.size,
        chance=task.baselines(),
        title=task.summary(),
    )
    console.print(Markdown(table))
