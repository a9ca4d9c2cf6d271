"""`gdn train`: from options to a finished run folder.

A run folder has one owner at a time. What goes wrong on the way, a full disk too, leaves it as its last checkpoint
and its lines of metrics describe it: the run can be resumed.
"""

import contextlib
import shlex
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdn_jax.commands.errors import RunError, harmless, one_line, os_line, out_of_memory, printable
from gdn_jax.commands.files import write_text
from gdn_jax.commands.interrupts import INTERRUPTED, listen
from gdn_jax.commands.locks import owned
from gdn_jax.commands.versions import versions
from gdn_jax.parallel import lifeline, processes
from gdn_jax.training import curves, kernels, mixers, steps
from gdn_jax.training import options as options_lib
from gdn_jax.training.checkpoints import Checkpoints
from gdn_jax.training.compiled import keep_compiled
from gdn_jax.training.load import check_size, load_run
from gdn_jax.training.options import TrainOptions
from gdn_jax.training.placement import Placement
from gdn_jax.training.progress import Reporter
from gdn_jax.training.runs import RunFolder, check_free
from gdn_jax.training.tasks.table import check_same_data, make_task
from gdn_jax.training.tasks.task import Task
from gdn_jax.training.trainer import Diverged, Trainer


def train(options: TrainOptions, console: Console) -> int:
    """Runs `gdn train`; returns the exit status.

    Args:
      options: that `options.check` has passed.
      console: where progress is shown.

    Raises:
      RunError: something asked for cannot be done; nothing was overwritten.
    """
    host, mesh = None, options.run.mesh
    if mesh is not None:
        try:
            host = processes.join()
        except ValueError as error:
            raise RunError(str(error)) from error
    compiled = keep_compiled(options.run.compilation_cache)
    if compiled is not None:
        text = f"compiled programs are kept in {compiled}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    # None on a CPU, where XLA writes a program that it has read from JAX's folder without some of its functions.
    kept = None if compiled is None or jax.default_backend() == "cpu" else compiled / "steps"
    placement = Placement.on(mesh)
    again = shlex.join(["gdn", "train", options.task.task, "--out", str(options.run.out), "--resume"])
    try:
        with lifeline.held(host, partial(_lost, again)) as problem:
            if problem is not None:
                _say(f"no connection to the first process ({problem}): the death of one is noticed later")
            first = mesh is None or processes.is_first()
            with (_opened if first else _followed)(options, placement, kept) as (trainer, run, then):
                return _work(trainer, run, then, console if first else Console(quiet=True))
    except Exception as error:
        if jax.process_count() == 1:
            raise
        # The ordinary end would wait for the others, which may be gone or wait for this one.
        _ending.acquire()
        _tell(error, again)
        processes.leave(1)


_ending = threading.Lock()
"""Is taken by the thread that ends this process of several, and that alone says why."""


def _say(text: str) -> None:
    """Prints a line of this process of several."""
    print(f"gdn: process {jax.process_index()}: {printable(text)}", file=sys.stderr, flush=True)


def _lost(again: str, index: int) -> NoReturn:
    """Ends this process because another one has died, before JAX does."""
    _ending.acquire()
    _say(f"process {index} of the run is gone; what was saved is kept; continue with: {again}")
    processes.leave(1)


def _tell(error: Exception, again: str) -> None:
    """Prints why this process of several ends."""
    reason = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and not out_of_memory(error):
        reason = f"another process of the run is gone ({one_line(error)}); what was saved is kept"
        reason += f"; continue with: {again}"
    elif not isinstance(error, RunError):
        traceback.print_exception(error)
    _say(reason)


_Opened = tuple[Trainer, RunFolder, dict[str, str]]
"""A trainer, the folder of its run, and the versions at the start of the run."""


@contextlib.contextmanager
def _opened(options: TrainOptions, placement: Placement, kept: Path | None) -> Iterator[_Opened]:
    """Makes a run, or opens one to resume, and owns its folder: in the first process, or the only one."""
    if options.run.resume:
        run, config = RunFolder.open(options.run.out)
        with owned(run.path):
            task = make_task(options.task, options.run.batch_size, options.run.seed)
            check_same_data(config["data"], task)
            check_size(run, config, options)
            trainer = Trainer.make(options, task, placement, kept=kept)
            stored = config["options"] | options_lib.to_json(options)
            if stored != config["options"]:  # where the data lies, or how many checkpoints are kept
                config["options"] = stored
                run.write_json("config.json", config)
            processes.wait("the run is open")
            yield trainer, run, config["versions"]
            return
    check_free(options.run.out)
    if jax.process_count() > 1 and options.run.out is None:
        raise RunError("--out: expected a folder that all processes share, got none")
    task = make_task(options.task, options.run.batch_size, options.run.seed)
    trainer, source = _begin(options, task, placement, kept)
    config: dict[str, Any] = {
        "task": options.task.task,
        "options": options_lib.to_json(options),
        "data": task.describe(),
        "parameters": trainer.parameters,
        "compute_dtype": steps.compute_dtype(options.model),
        "baselines": task.baselines(),
        "versions": versions(),
        **source,
    }
    run = RunFolder.create(options.run.out, options.task.task)
    with owned(run.path):
        run.write_json("config.json", config)
        processes.wait("the run is open")
        yield trainer, run, config["versions"]


def _begin(
    options: TrainOptions, task: Task, placement: Placement, kept: Path | None
) -> tuple[Trainer, dict[str, Any]]:
    """Returns a trainer at step 0, and what config.json says of the run that its weights are from, if any."""
    path = options.run.init_from
    if path is None or options.run.resume:
        return Trainer.make(options, task, placement, kept=kept), {}
    first = load_run(path)
    weights = nnx.state(first.model, nnx.Param)
    trainer = Trainer.make(options, task, placement, weights, kept)
    return trainer, {"init_from": {"run": str(first.path.resolve()), "step": first.step}}


@contextlib.contextmanager
def _followed(options: TrainOptions, placement: Placement, kept: Path | None) -> Iterator[_Opened]:
    """Follows the run of the first process: the same steps and checkpoints, and nothing else in the run folder."""
    if options.run.out is None:
        raise RunError("--out: expected a folder that all processes share, got none")
    task = make_task(options.task, options.run.batch_size, options.run.seed)
    trainer, _ = _begin(options, task, placement, kept)
    processes.wait("the run is open")
    with tempfile.TemporaryDirectory() as scratch:
        yield trainer, RunFolder.follow(options.run.out, Path(scratch)), {}


def _work(trainer: Trainer, run: RunFolder, then: dict[str, str], console: Console) -> int:
    """Trains to the end or until stopped; returns the exit status.

    Args:
      trainer, run, console: of the run.
      then: versions at the start of the run.
    """
    o, name = trainer.options.run, trainer.options.task.task
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    again = shlex.join(["gdn", "train", name, "--out", str(run.path), "--resume"])
    now = versions()
    try:
        store = Checkpoints(run, o.keep)
        try:
            if o.resume:
                _restore(trainer, store, run, say)
                for key, before in then.items():
                    if before != now.get(key):
                        say(f"note: {key} was {before}, is {now.get(key)}: numbers may differ")
            elif o.init_from is not None:
                trainer.save(store)  # so that the run can be resumed when the other one is gone
                say(f"beginning with the weights of {o.init_from}")
            say(trainer.task.summary())
            dtype, used = steps.compute_dtype(trainer.options.model), len(trainer.placement.devices)
            where = f"{used} of {now['device']}" if used < jax.device_count() else now["device"]
            say(f"{trainer.parameters / 1e6:.2f}M parameters, {dtype} on {where}, run folder {run.path}")
            if line := kernels.note():
                say(line)
            with _drawing(trainer, run):
                reporter = Reporter(console, o.steps, trainer.step)
                with listen(lambda: f"{reporter.doing}, saving") as asked, reporter:
                    why = trainer.loop(run, store, reporter, asked)
                if why == "interrupted":
                    say(f"saved step {trainer.step}; continue with: {again}")
                    return INTERRUPTED
                _finish(trainer, run, console, why)
            if why is not None:
                say(f"{why} after step {trainer.step}; continue with: {again}")
            return 0
        except Diverged as error:
            kept = store.latest()
            advice = (
                "no checkpoint was written yet" if kept is None else f"the checkpoint of step {kept} is kept"
            )
            raise RunError(
                f"{error}; stopped, {advice} in {run.path}; try a lower --lr in a new run"
            ) from None
        finally:
            store.close()
    except OSError as error:
        raise RunError(
            f"{run.path}: {os_line(error)}; what was saved is kept; continue with: {again}"
        ) from error


def _restore(trainer: Trainer, store: Checkpoints, run: RunFolder, say: Callable[[str], None]) -> None:
    """Takes a run up where its last whole checkpoint left it; says what is not as it was."""
    damaged = trainer.restore(store)
    run.rewind(None if store.latest() is None else trainer.step)
    say(f"resuming {run.path} after step {trainer.step}")
    for step, reason in damaged.items():
        say(f"note: the checkpoint of step {step} is damaged, moved to {run.damaged / str(step)} ({reason})")
    missing = {*trainer.lines()} - {record["step"] for record in run.records()}
    if missing:
        say(
            f"note: metrics.jsonl lacks {len(missing)} lines from step {min(missing)} to step {max(missing)}, which "
            f"no resume brings back"
        )


def _label(options: TrainOptions) -> str:
    """Returns the name of a run's model in words."""
    start = options.task.pretrained()
    return mixers.label(options.model) if start is None else printable(str(start.from_ and start.from_.name))


@contextlib.contextmanager
def _drawing(trainer: Trainer, run: RunFolder) -> Iterator[None]:
    """Draws the curves of what there is, however the block ends."""
    task, label = trainer.task, _label(trainer.options)
    try:
        yield
    finally:
        if run.records():
            curves.draw_curves(
                run.path / "curves.png",
                run.records(),
                task.baselines(),
                metric=task.metric,
                label=task.label,
                title=f"{label}, {trainer.parameters / 1e6:.2f}M parameters, task {trainer.options.task.task}",
                lower_is_better=task.lower_is_better,
            )


def _finish(trainer: Trainer, run: RunFolder, console: Console, why: str | None) -> None:
    """Validates, tests, samples, and writes what came of the run."""
    task, metric = trainer.task, trainer.task.metric
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    baselines = task.baselines()
    last = (run.records() or [{}])[-1]
    validation = (
        {k: v for k, v in last.items() if k.startswith("val_")} if last.get("step") == trainer.step else {}
    )
    validation = validation or trainer.validate()
    value = validation["val_" + metric]
    table = Table(title=f"{task.label}, validation", title_justify="left")
    table.add_column("method")
    table.add_column(metric, justify="right")
    for name, baseline in baselines.items():
        table.add_row(name, f"{baseline:.3f}")
    model = Text(f"{_label(trainer.options)}, {trainer.step} steps")  # a name of a folder is no markup
    table.add_row(model, f"{value:.3f}", style="bold")
    console.print(table)
    tests = trainer.test()
    for size, metrics in tests.items():
        say(f"test, {size} {task.axis}: {metric} {metrics[metric]:.3f}")
    sample = task.sample(trainer.model())
    write_text(run.path / "sample.txt", sample)
    result = {
        "step": trainer.step,
        **validation,
        "test": tests,
        **({"test_by": by} if (by := trainer.test_slices()) else {}),
        "baselines": baselines,
        "finished": why is None,
    }
    run.write_json("result.json", result | {"wall": {"seconds": round(trainer.seconds, 3)}})
    console.rule("sample")
    console.print(Text(harmless(sample)), soft_wrap=True)
    console.rule()
    say(f"{trainer.seconds:.0f} s of training; results in {run.path}")
