"""`gdn sweep`: the same small model with several token mixers, seeds and learning rates, and what comes of it.

The folder of a sweep:

    config.json    options, model size, versions; written once
    runs.jsonl     one JSON object for each finished run, with the commit that made it; all but `wall` is the same
                   after a resume
    table.md       the task's metric by mixer, scale and size of the test, at the learning rate with the lowest
                   validation loss: how many seeds have learned, and the mean of those with its 95 % interval
    weights/       with --keep-weights those of every run, see `weights`
    figure.png     the same; or the learning curves, where the grid varies what runs start with

A run is a function of its mixer, scale, learning rate, start and seed: it is lost when interrupted and made again.
Runs of a mixer at a scale share one compiled program, in which seed, learning rate and start are arguments and
`together` of them advance side by side.

Of recall a line has the accuracy of slices of each test, too: `test_accuracy_by.place` by the place of the pair among
those written, `test_accuracy_by.order` by the order of the questions; see `recall.slices`.

With --curve-every a line of runs.jsonl has the run's learning curve: `curve.steps`, and `curve.loss` and
`curve.accuracy` of the validation sequences of each kind, such as those of 4 pairs.

Several processes may work on a sweep, on as many GPUs: the first makes the folder, the others come with `--resume`.
Each takes a mixer at a scale that no other one has, and the last one to finish writes table and figure.
"""

import contextlib
import itertools
import math
import shlex
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from rich.console import Console
from rich.markdown import Markdown

from gdn_jax.commands.errors import RunError, os_line
from gdn_jax.commands.files import JsonLines
from gdn_jax.commands.interrupts import INTERRUPTED, listen
from gdn_jax.commands.locks import Taken, alone, owned
from gdn_jax.commands.versions import commit, versions
from gdn_jax.sweeps import grid, report, summary, weights
from gdn_jax.sweeps.grid import Run, as_run, wanted
from gdn_jax.sweeps.options import SweepOptions, scaled_model
from gdn_jax.sweeps.program import Program, Runs, make_start
from gdn_jax.sweeps.progress import SweepReporter
from gdn_jax.sweeps.scoring import shared
from gdn_jax.training import memory
from gdn_jax.training import options as options_lib
from gdn_jax.training.runs import RunFolder, check_free
from gdn_jax.training.slices import Slice, split, table
from gdn_jax.training.tasks.table import check_same_data, make_task
from gdn_jax.training.tasks.task import Task

# Tokens scored at a time, at most: without cuDNN softmax attention keeps a score for every two tokens of a row.
_SCORED = 2**16
# Times that sets are made longer at most: beyond that another compilation is less work.
_PADDED = 4
# Runs that will be too late are given up between these parts of their steps: before, it cannot be told.
_TOLD, _WORTH_FINISHING = 0.05, 0.5
# Seconds of work handed to the device at a time: how long a Ctrl-C waits, and how often the bar moves.
_SLICE = 1.0


class Sweep:
    """A sweep at work: what is left of the grid, and where results go."""

    def __init__(self, options: SweepOptions, task: Task, lines: JsonLines):
        self.options, self.task, self.lines = options, task, lines
        self.commit = commit()
        limit = options.sweep.max_minutes
        self.end = math.inf if limit is None else time.monotonic() + 60 * limit
        self.longest = 0.0  # seconds that a group takes once it is compiled
        size = options.sweep.batch_size
        sets = {"val": task.val_batches(size)} | {str(n): x for n, x in task.test_batches(size).items()}
        lengths = [batch.tokens.shape[1] for batches in sets.values() for batch in batches]
        if max(lengths) <= _PADDED * min(lengths):
            # The validation set has the shape of the tests: one compilation for all of them.
            sets = {name: [batch.pad(max(lengths)) for batch in batches] for name, batches in sets.items()}
        rows = max(1, min(size, _SCORED // max(lengths)))
        self.sets = shared(
            {name: [x for batch in batches for x in batch.cut(rows)] for name, batches in sets.items()},
            lambda name, batch: {} if name == "val" else split(task, int(name), batch),
        )
        kinds: dict[str, list] = {}
        names = task.kind_names()
        for i, batch in enumerate(task.val_batches(size) if options.sweep.curve_every else ()):
            kinds.setdefault(names[i % len(names)], []).extend(batch.cut(rows))
        self.kinds = shared(kinds)
        sizes, scores = sets.keys() - {"val"}, f"test_{task.metric}"
        for number, record in enumerate(lines.records(), 1):
            if record[scores].keys() != sizes:
                raise lines.wrong(f"{scores} at {', '.join(sorted(sizes))}", number, str(record[scores])[:60])

    def done(self) -> int:
        """Number of runs with a result."""
        return len({as_run(record) for record in self.lines.records()})

    def left(self, mixer: str, scale: int) -> list[Run]:
        """Runs of a mixer at a scale that can be made now and have no result."""
        records = self.lines.records()
        done = {as_run(record) for record in records}
        runs = wanted(self.options, mixer, scale, records, self.task.metric)
        return [run for run in runs if run not in done]

    def run(self, reporter: SweepReporter, asked: threading.Event) -> bool:
        """Makes what is left and no other process is at; returns whether it came to the end, not stopped or late.

        Raises:
          RunError: a mixer cannot be made with these options.
        """
        o, folder = self.options.sweep, self.lines.path.parent
        for mixer, scale in itertools.product(o.mixers, o.scales):
            if not self.left(mixer, scale):
                continue
            with contextlib.ExitStack() as owns:
                try:
                    owns.enter_context(owned(folder, f"{mixer}-{scale}"))
                except Taken:
                    continue
                if not self._part(mixer, scale, reporter, asked):
                    return False
        return True

    def _part(self, mixer: str, scale: int, reporter: SweepReporter, asked: threading.Event) -> bool:
        """Makes what is left of a mixer at a scale; returns whether it came to the end."""
        width = self.options.sweep.together
        program = Program(self.options, self.task, mixer, scale)
        start = make_start(self.options, self.task, mixer, scale)
        while runs := self.left(mixer, scale):
            # A last group that an interrupt has left too small is filled up with runs that are made again.
            group = runs[:width]
            filled = group + [group[-1]] * (width - len(group))
            try:
                finished = self._group(program, start, filled, len(group), reporter, asked)
            except NotImplementedError as error:
                raise RunError(str(error)) from error
            if not finished:
                return False
        return True

    def _group(
        self,
        program: Program,
        start: Callable[[list[Run]], Runs],
        group: list[Run],
        count: int,
        reporter: SweepReporter,
        asked: threading.Event,
    ) -> bool:
        begin = time.monotonic()
        if begin + self.longest > self.end:
            return False
        total, every = self.options.sweep.steps, self.options.sweep.curve_every
        curve, stepping = summary.Curve(), 0.0  # seconds of all steps but the first, which compiles
        reporter.group(group[:count])
        runs = start(group)
        step, stride = 0, 1
        while step < total:
            mark = time.monotonic()
            last = min(step + stride, total, *([step + every - step % every] if every else []))
            runs = program.advance(runs, step, last)
            seconds = time.monotonic() - mark
            stepping += seconds if step else 0.0
            stride = 2 if step == 0 else max(1, min(4 * stride, int(_SLICE * (last - step) / seconds)))
            step = last
            reporter.step(step)
            if every and step % every == 0:
                scores = program.score(runs, self.kinds)
                curve.add(step, {str(kind): score for kind, score in scores.items()})
            late = step > 1 and time.monotonic() + (total - step) * stepping / (step - 1) > self.end
            if asked.is_set() or (late and _TOLD < step / total < _WORTH_FINISHING):
                return False
        scores = program.score(runs, self.sets)
        seconds, self.longest = time.monotonic() - begin, stepping
        for r, run in enumerate(group[:count]):
            if self.options.sweep.keep_weights:
                weights.save(
                    self.lines.path.parent, run, jax.tree.map(lambda x, r=r: x[r], runs.state.params)
                )
            metric = self.task.metric
            found = {name: self.task.metrics(*score[r])[metric] for name, score in scores.items()}
            by = table({name: value for name, value in found.items() if isinstance(name, Slice)})
            values = {name: value for name, value in found.items() if isinstance(name, str)}
            values = {name: value if math.isfinite(value) else None for name, value in values.items()}
            loss, validation = scores["val"][r][0], values.pop("val")
            record = {
                **run.record(),
                "val_loss": loss if math.isfinite(loss) else None,
                f"val_{metric}": validation,
                f"test_{metric}": values,
                "parameters": program.parameters,
                "commit": self.commit,
                **({f"test_{metric}_by": by} if by else {}),
                **({"curve": curve.of(r)} if every else {}),
                "wall": {"seconds": round(seconds / count, 3)},
            }
            with alone(self.lines.path.parent):
                self.lines.append(record)
            reporter.done(run, validation, values)
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
    task = make_task(options.task, o.batch_size, o.data_seed)
    largest = scaled_model(options, max(o.scales))
    memory.check_sets(options.task)
    memory.check(largest, task.vocab_size, o.batch_size, o.batch_size, _longest(task), o.together)
    if o.resume:
        folder, config = RunFolder.open(o.out, command=str, about=dict)
        check_same_data(config["data"], task)
        if (metric := summary.About.stored(config).metric) != task.metric:
            raise RunError(f"config.json: expected about to hold the metric {task.metric}, got {metric!r}")
        return _work(options, task, folder, config, console)
    config = {
        "task": f"sweep {name}",
        "command": command,
        "options": options_lib.to_json(options),
        "data": task.describe(),
        "about": summary.About.of(task)._asdict(),
        "versions": versions(),
    }
    folder = RunFolder.create(o.out, f"sweep {name}")
    folder.write_json("config.json", config)
    return _work(options, task, folder, config, console)


def _longest(task: Task) -> int:
    """Tokens of the longest training sequence."""
    kinds = {*task.turns}
    shapes = [jax.eval_shape(lambda kind=kind: task.seeded_batch(0, 0, kind).tokens) for kind in kinds]
    return max(shape.shape[1] for shape in shapes)


def _work(
    options: SweepOptions, task: Task, folder: RunFolder, config: dict[str, Any], console: Console
) -> int:
    """Makes what is left and the table; returns the exit status."""
    o, name = options.sweep, options.task.task
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    again = shlex.join(["gdn", "sweep", name, "--out", str(folder.path), "--resume"])
    lines = grid.lines(folder.path, task.metric)
    try:
        with alone(folder.path):
            lines.mend()
        work = Sweep(options, task, lines)
        total = o.runs()
        left = total - work.done()
        say(task.summary())
        say(
            f"{left} of {total} runs of {o.steps} steps to make on {config['versions']['device']}, "
            f"folder {folder.path}"
        )
        then = "ending the steps in progress; finished runs are kept"
        with listen(then) as asked, SweepReporter(console, total, total - left, o.steps) as reporter:
            finished = work.run(reporter, asked)
        if not finished and not asked.is_set():
            say(f"stopped by --max-minutes {o.max_minutes:g}; finished runs are kept; continue with: {again}")
            return 0
        if not finished:
            say(f"interrupted; finished runs are kept; continue with: {again}")
            return INTERRUPTED
        if others := total - work.done():
            say(
                f"{others} of {total} runs are left to the other processes that work in {folder.path}; "
                f"should one of them have ended early, continue with: {again}"
            )
            return 0
        with alone(folder.path):
            table = report.write(folder.path, config, lines.records())
        if console.is_terminal:
            console.print(Markdown(table))
        else:
            say(table)
    except OSError as error:
        raise RunError(
            f"{folder.path}: {os_line(error)}; finished runs are kept; continue with: {again}"
        ) from error
    say(f"results in {folder.path}")
    return 0
