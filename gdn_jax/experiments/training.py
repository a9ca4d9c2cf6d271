"""The training loop, from options to a finished run folder.

Everything that enters a number is a function of the options and the step: batches, learning rate, the points
at which a line is written. A checkpoint carries parameters, optimiser state, the step and the sums of the
line in progress, so a resumed run writes the same metrics, bit for bit on the same machine.
"""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdn_jax.commands.errors import RunError
from gdn_jax.commands.files import write_text
from gdn_jax.commands.versions import versions
from gdn_jax.experiments import curves, mixers, steps
from gdn_jax.experiments import options as options_lib
from gdn_jax.experiments.checkpoints import Checkpoints
from gdn_jax.experiments.compiled import keep_compiled
from gdn_jax.experiments.options import TrainOptions
from gdn_jax.experiments.progress import Reporter
from gdn_jax.experiments.runs import RunFolder, check_free
from gdn_jax.experiments.steps import Functions, StepMetrics, TrainState
from gdn_jax.experiments.tasks.table import Task, check_same_data, make_task

INTERRUPTED = 130  # exit status of a program stopped by Ctrl-C


class Diverged(Exception):
    """A loss or gradient that is not finite."""


@dataclasses.dataclass
class Tally:
    """Sums of the metrics since the last line, part of a checkpoint."""

    loss: float = 0.0
    accuracy: float = 0.0
    grad_norm: float = 0.0
    count: int = 0

    def add(self, step: int, metrics: StepMetrics) -> None:
        """Adds a step; waits for the device.

        Raises:
          Diverged: the step is not finite.
        """
        loss, accuracy, grad_norm = (float(x) for x in metrics)
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                raise Diverged(f"{name} is {value} at step {step}")
        self.loss += loss
        self.accuracy += accuracy
        self.grad_norm += grad_norm
        self.count += 1


@dataclasses.dataclass
class Trainer:
    """A model in training: everything the loop needs, and the loop."""

    options: TrainOptions
    task: Task
    graphdef: nnx.GraphDef
    rest: PyTree
    functions: Functions
    state: TrainState
    step: int = 0
    tally: Tally = dataclasses.field(default_factory=Tally)
    seconds: float = 0.0  # spent in the loop, over all resumptions

    @classmethod
    def make(cls, options: TrainOptions, task: Task) -> "Trainer":
        """A trainer at step 0. Traces the step, so that an unusable configuration fails here.

        Raises:
          RunError: the options do not make a model.
        """
        model = steps.make_model(options.model, task.vocab_size, options.run.seed)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        optimizer = steps.make_optimizer(options.optimizer, options.run.steps, options.optimizer.lr)
        functions = steps.make_functions(
            graphdef, rest, optimizer, options.run.accumulate, options.run.deterministic
        )
        state = TrainState(params, optimizer.init(params))
        try:
            jax.eval_shape(functions.train, state, task.train_batch(1))
        except (ValueError, NotImplementedError) as error:
            raise RunError(str(error)) from error
        return cls(options, task, graphdef, rest, functions, state)

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(x.size for x in jax.tree.leaves(self.state.params))

    def model(self) -> Any:
        """The model with the present parameters."""
        return nnx.merge(self.graphdef, self.state.params, self.rest)

    def restore(self, store: Checkpoints, step: int) -> None:
        """Takes over a checkpoint."""
        self.state, facts = store.restore(step, self.state)
        self.step, self.seconds, self.tally = step, facts["seconds"], Tally(**facts["tally"])

    def save(self, store: Checkpoints) -> None:
        """Saves a checkpoint, but never a state that cannot take its next step.

        Raises:
          Diverged: the next step, tried on a copy, is not finite.
        """
        if store.latest() == self.step:
            return
        copy = jax.tree.map(jnp.copy, self.state)  # the step takes over the memory of its argument
        _, metrics = self.functions.train(copy, self.task.train_batch(self.step + 1))
        Tally().add(self.step + 1, metrics)
        facts = {"seconds": self.seconds, "tally": dataclasses.asdict(self.tally)}
        store.save(self.step, self.state, facts)

    def validate(self) -> dict[str, float]:
        """Validation metrics, named val_*."""
        size = self.options.run.batch_size // self.options.run.accumulate
        loss, accuracy = steps.validate(self.functions, self.state.params, self.task.val_batches(size))
        if not math.isfinite(loss):
            raise Diverged(f"validation loss is {loss} after step {self.step}")
        return {"val_loss": loss} | {"val_" + k: v for k, v in self.task.metrics(loss, accuracy).items()}

    def test(self) -> dict[int, dict[str, float]]:
        """Metrics of the tests by their size; none where the task has no tests."""
        size = self.options.run.batch_size // self.options.run.accumulate
        return {
            at: self.task.metrics(*steps.validate(self.functions, self.state.params, batches))
            for at, batches in self.task.test_batches(size).items()
        }

    def loop(
        self, run: RunFolder, store: Checkpoints, reporter: Reporter, asked: threading.Event
    ) -> str | None:
        """Trains until the last step; returns why it stopped earlier, if it did.

        Raises:
          Diverged: a number is not finite; nothing was saved since.
        """
        o = self.options.run
        schedule = steps.make_schedule(self.options.optimizer, o.steps, self.options.optimizer.lr)
        limit = math.inf if o.max_minutes is None else 60 * o.max_minutes
        tokens = int(np.prod(self.task.train_batch(1).tokens.shape))
        before = self.seconds
        begin = mark = time.monotonic()  # mark: start of the interval whose speed is reported
        timed = 0
        pending: StepMetrics | None = None  # settled one step late, so that the device never waits for us
        first = self.step + 1
        while self.step < o.steps:
            batch = self.task.train_batch(self.step + 1)
            self.state, metrics = self.functions.train(self.state, batch)
            if pending is not None:
                self.tally.add(self.step, pending)
            self.step, pending = self.step + 1, metrics
            at = {
                name: self.step % getattr(o, name) == 0 for name in ("log_every", "eval_every", "save_every")
            }
            last = self.step == o.steps
            late = time.monotonic() - begin > limit
            if self.step == first or last or late or asked.is_set() or any(at.values()):
                self.tally.add(self.step, pending)
                pending = None
            self.seconds = before + time.monotonic() - begin
            if self.step == first:
                mark = time.monotonic()  # the first step compiles
            else:
                timed += tokens
            reporter.step(self.step)
            if at["log_every"] or at["eval_every"] or last:
                speed = timed / (time.monotonic() - mark) if timed else None
                validation = self.validate() if at["eval_every"] or last else {}
                self._record(run, reporter, float(jnp.asarray(schedule(self.step - 1))), validation, speed)
                mark, timed = time.monotonic(), 0
            if at["save_every"] or last or late or asked.is_set():
                pause = time.monotonic()
                self.save(store)
                mark += time.monotonic() - pause
            if asked.is_set() and not last:
                return "interrupted"
            if late and not last:
                return f"stopped by --max-minutes {o.max_minutes:g}"
        return None

    def _record(
        self, run: RunFolder, reporter: Reporter, lr: float, validation: dict[str, float], speed: float | None
    ) -> None:
        t, self.tally = self.tally, Tally()
        loss = t.loss / t.count
        metrics = {"loss": loss} | self.task.metrics(loss, t.accuracy / t.count)
        wall = {"seconds": round(self.seconds, 3), "tokens_per_second": speed and round(speed, 1)}
        record = {"step": self.step, **metrics, "grad_norm": t.grad_norm / t.count, "lr": lr}
        run.append(record | validation | {"wall": wall})
        reporter.state(loss, speed or 0.0)
        if validation:
            metric = self.task.metric
            reporter.line(
                f"step {self.step:6d}   {metric} {metrics[metric]:.3f}   "
                f"held out {validation['val_' + metric]:.3f}   {self.seconds:.0f} s"
                + (f"   {speed:,.0f} tokens/s" if speed else "")
            )


@contextlib.contextmanager
def listen() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C (or SIGTERM) sets; the second Ctrl-C interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def train(options: TrainOptions, console: Console) -> int:
    """Runs `gdn train`; returns the exit status.

    Raises:
      RunError: something asked for cannot be done; nothing was overwritten.
    """
    options_lib.check(options)
    compiled = keep_compiled(options.run.compilation_cache)
    name = options.task.task
    run: RunFolder | None = None
    config: dict[str, Any] = {}
    if options.run.resume:
        run, config = RunFolder.open(options.run.out)
    else:
        check_free(options.run.out)
    task = make_task(options)
    trainer = Trainer.make(options, task)
    present = versions()
    if run is None:
        config = {
            "task": name,
            "options": options_lib.to_json(options),
            "data": task.describe(),
            "parameters": trainer.parameters,
            "compute_dtype": steps.compute_dtype(options.model),
            "baselines": task.baselines(),
            "versions": present,
        }
        run = RunFolder.create(options.run.out, name, config)
    else:
        check_same_data(config["data"], task)
    store = Checkpoints(run.checkpoints, options.run.keep)
    again = f"gdn train {name} --out {run.path} --resume"
    try:
        if options.run.resume:
            if (latest := store.latest()) is not None:
                trainer.restore(store, latest)
            run.rewind(trainer.step)
            console.print(f"resuming {run.path} after step {trainer.step}", highlight=False, soft_wrap=True)
            for key, then in config["versions"].items():
                if then != (now := present.get(key)):
                    console.print(f"note: {key} was {then}, is {now}: numbers may differ", highlight=False)
        console.print(task.summary(), highlight=False, markup=False, soft_wrap=True)
        console.print(
            f"{trainer.parameters / 1e6:.2f}M parameters, {config['compute_dtype']} on "
            f"{present['device']}, run folder {run.path}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        if compiled is not None:
            console.print(f"compiled programs are kept in {compiled}", highlight=False, soft_wrap=True)
        with listen() as asked, Reporter(console, options.run.steps, trainer.step) as reporter:
            try:
                why = trainer.loop(run, store, reporter, asked)
            except Diverged as error:
                kept = store.latest()
                advice = (
                    f"the checkpoint of step {kept} is kept"
                    if kept is not None
                    else "no checkpoint was written yet"
                )
                raise RunError(
                    f"{error}; stopped, {advice} in {run.path}; try a lower --lr in a new run"
                ) from None
        if why == "interrupted":
            console.print(
                f"saved step {trainer.step}; continue with: {again}", highlight=False, soft_wrap=True
            )
            return INTERRUPTED
        _finish(trainer, run, config, console, why)
        if why is not None:
            console.print(
                f"{why} after step {trainer.step}; continue with: {again}", highlight=False, soft_wrap=True
            )
        return 0
    finally:
        store.close()
        if run.records():
            _draw(run, task, config, mixers.label(options.model))


def _draw(run: RunFolder, task: Task, config: dict[str, Any], label: str) -> None:
    curves.draw_curves(
        run.path / "curves.png",
        run.records(),
        config["baselines"],
        metric=task.metric,
        label=task.label,
        title=f"{label}, {config['parameters'] / 1e6:.2f}M parameters, task {config['task']}",
        lower_is_better=task.lower_is_better,
    )


def _finish(
    trainer: Trainer, run: RunFolder, config: dict[str, Any], console: Console, why: str | None
) -> None:
    task, metric = trainer.task, trainer.task.metric
    last = (run.records() or [{}])[-1]
    validation = (
        {k: v for k, v in last.items() if k.startswith("val_")} if last.get("step") == trainer.step else {}
    )
    validation = validation or trainer.validate()
    value = validation["val_" + metric]
    table = Table(title=f"{task.label}, validation", title_justify="left")
    table.add_column("method")
    table.add_column(metric, justify="right")
    for name, baseline in config["baselines"].items():
        table.add_row(name, f"{baseline:.3f}")
    table.add_row(
        f"{mixers.label(trainer.options.model)}, {trainer.step} steps", f"{value:.3f}", style="bold"
    )
    console.print(table)
    tests = trainer.test()
    for size, metrics in tests.items():
        console.print(f"test, {size} {task.axis}: {metric} {metrics[metric]:.3f}", highlight=False)
    sample = task.sample(trainer.model())
    write_text(run.path / "sample.txt", sample)
    result = {
        "step": trainer.step,
        **validation,
        "test": tests,
        "baselines": config["baselines"],
        "finished": why is None,
    }
    run.write_json("result.json", result | {"wall": {"seconds": round(trainer.seconds, 3)}})
    console.rule("sample")
    console.print(Text(sample), soft_wrap=True)
    console.rule()
    console.print(
        f"{trainer.seconds:.0f} s of training; results in {run.path}", highlight=False, soft_wrap=True
    )
