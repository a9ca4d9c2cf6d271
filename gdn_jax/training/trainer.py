"""A model in training: its state, its checkpoints, and the loop over the steps.

Everything that enters a number is a function of the options and the step: batches, learning rate, the points
at which a line is written. A checkpoint carries parameters, optimiser state, the step and the sums of the
line in progress, so a resumed run writes the same metrics, bit for bit on the same machine.
"""

import dataclasses
import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from gdn_jax.commands.errors import RunError, fail
from gdn_jax.models.costs import count, multiplied_parameters
from gdn_jax.parallel import processes
from gdn_jax.training import memory, slices, steps
from gdn_jax.training.checkpoints import Checkpoints
from gdn_jax.training.kept_step import KeptStep
from gdn_jax.training.options import TrainOptions, of_step
from gdn_jax.training.peak import share_of_peak
from gdn_jax.training.placement import Placement
from gdn_jax.training.progress import Reporter
from gdn_jax.training.runs import RunFolder
from gdn_jax.training.starts import STARTS
from gdn_jax.training.steps import Functions, StepMetrics, TrainState
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.task import Task


class Diverged(Exception):
    """A loss or gradient that is not finite."""


@dataclasses.dataclass
class Tally:
    """Sums of the metrics since the last line, part of a checkpoint."""

    loss: float = 0.0
    accuracy: float = 0.0
    grad_norm: float = 0.0
    saturated: float = 0.0
    count: int = 0

    def add(self, step: int, metrics: StepMetrics) -> None:
        """Adds a step; waits for the device.

        Raises:
          Diverged: the step is not finite.
        """
        loss, accuracy, grad_norm, saturated = (float(x) for x in metrics)
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                raise Diverged(f"{name} is {value} at step {step}")
        self.loss += loss
        self.accuracy += accuracy
        self.grad_norm += grad_norm
        self.saturated += saturated
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
    placement: Placement
    program: Future[jax.stages.Compiled]  # of functions.train
    multiplied: int | None = None  # values that a token is multiplied by, where all of them are trained
    step: int = 0
    tally: Tally = dataclasses.field(default_factory=Tally)
    seconds: float = 0.0  # spent in the loop, over all resumptions

    @classmethod
    def make(
        cls,
        options: TrainOptions,
        task: Task,
        placement: Placement | None = None,
        weights: PyTree | None = None,
        kept: Path | None = None,
    ) -> "Trainer":
        """Makes a trainer at step 0. Traces the step, so that an unusable configuration fails here, and begins to
        compile it, which takes a thread while this one makes the weights. A step that an earlier process has kept is
        only read.

        Args:
          options, task, placement: of the run.
          weights: to begin with, the parameters of such a model; None: new ones.
          kept: folder of kept steps, see `kept_step`; None: none is read or kept.

        Raises:
          RunError: the options do not make a model, or not one of these weights.
        """
        run, piece = options.run, options.run.batch_size // options.run.accumulate
        memory.check_run(options.task, options.model, task.vocab_size, run.batch_size, piece)
        start = partial(steps.start_model, options.task, options.model, task.vocab_size, run.seed)
        # What is fresh is made while its step compiles; what is read from files has its shapes from them.
        fresh, kind = options.task.pretrained() is None, steps.trained(options.task)
        model = nnx.eval_shape(start) if fresh else start()
        graphdef, params, rest = nnx.split(model, kind, ...)
        multiplied = multiplied_parameters(model.config) if kind is nnx.Param else None
        optimizer = steps.make_optimizer(options.optimizer, run.steps, options.optimizer.lr)
        placement = placement or Placement()
        batch, accumulate = task.train_batch(1), run.accumulate
        placement.check(model.config, batch.tokens.shape[0] // accumulate, batch.tokens.shape[1])
        with placement.active():
            shapes, shardings = placement.shapes(rest, params, batch, optimizer)
            functions = steps.make_functions(
                graphdef,
                optimizer,
                accumulate,
                run.deterministic,
                shardings,
                options.model.mtp_weight,
                STARTS[run.start],
            )
            result = shapes.state, StepMetrics._make([0.0] * 4)
            step = KeptStep.of(kept, placement, of_step(options), model.config, kind, shapes)
            try:
                compiling = step.compiling(functions.train, tuple(shapes), result)
            except (ValueError, NotImplementedError) as error:
                raise RunError(str(error)) from error
            thread = ThreadPoolExecutor(1)
            program = thread.submit(compiling)
            thread.shutdown(wait=False)  # it ends with the program
            if fresh:
                _, params, rest = nnx.split(start(), kind, ...)
            if weights is not None:
                params = _instead(params, weights)
            state, _ = placement.state(params, optimizer)
            rest = placement.frozen(rest)
        return cls(options, task, graphdef, rest, functions, state, placement, program, multiplied)

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return count(self.state.params)

    def model(self) -> Any:
        """Returns the model with the present parameters, on one device."""
        params, rest = self.placement.whole((self.state.params, self.rest))
        return nnx.merge(self.graphdef, params, rest)

    def restore(self, store: Checkpoints) -> dict[int, str]:
        """Takes over the latest checkpoint that is whole, if there is one; returns the damaged ones after it.

        Raises:
          RunError: there are checkpoints, and none can be read.
        """
        restored = store.restore(self.state)
        if restored is None:
            return {}
        self.step, self.state, facts, damaged = restored
        self.seconds, self.tally = facts["seconds"], Tally(**facts["tally"])
        return damaged

    def lines(self) -> list[int]:
        """Returns the steps up to the present one after which a line of metrics is written."""
        o = self.options.run
        at = {
            *range(o.log_every, self.step + 1, o.log_every),
            *range(o.eval_every, self.step + 1, o.eval_every),
        }
        return sorted(at | ({o.steps} if self.step == o.steps else set()))

    def save(self, store: Checkpoints) -> None:
        """Saves a checkpoint, but never a state that cannot take its next step.

        Raises:
          Diverged: the next step, tried on a copy, is not finite.
        """
        if store.latest() == self.step:
            return
        copy = jax.tree.map(jnp.copy, self.state)  # the step takes over the memory of its argument
        _, metrics = self._train(copy, self.step + 1)
        Tally().add(self.step + 1, metrics)
        facts = {"seconds": self.seconds, "tally": dataclasses.asdict(self.tally)}
        store.save(self.step, self.state, facts)

    def _train(self, state: TrainState, step: int) -> tuple[TrainState, StepMetrics]:
        with self.placement.active():
            batch = self.placement.batch(self.task.train_batch(step))
            return self.program.result()(self.rest, state, batch)

    def _validate(self, batches: list[Batch]) -> tuple[float, float]:
        with self.placement.active():
            moved = map(self.placement.batch, batches)
            return steps.validate(self.functions, self.rest, self.state.params, moved)

    def validate(self) -> dict[str, float]:
        """Returns the validation metrics, named val_*."""
        size = self.options.run.batch_size // self.options.run.accumulate
        loss, accuracy = self._validate(self.task.val_batches(size))
        if not math.isfinite(loss):
            raise Diverged(f"validation loss is {loss} after step {self.step}")
        return {"val_loss": loss} | {"val_" + k: v for k, v in self.task.metrics(loss, accuracy).items()}

    def test(self) -> dict[int, dict[str, float]]:
        """Returns the metrics of the tests by their size; none where the task has no tests."""
        size = self.options.run.batch_size // self.options.run.accumulate
        return {
            at: self.task.metrics(*self._validate(batches))
            for at, batches in self.task.test_batches(size).items()
        }

    def test_slices(self) -> slices.Table:
        """Returns the metric of slices of the tests, see `slices.table`; none where the task does not split them."""
        size, sums = self.options.run.batch_size // self.options.run.accumulate, {}
        for at, batches in self.task.test_batches(size).items():
            for batch in batches:
                parts = slices.split(self.task, at, batch)
                if not parts:
                    return {}
                with self.placement.active():
                    placed = [self.placement.batch(batch._replace(weights=x)) for x in parts.values()]
                    weights = [x.weights for x in placed]
                    got = self.functions.evaluate_each(self.rest, self.state.params, placed[0], weights)
                for i, name in enumerate(parts):
                    sums.setdefault(name, []).append(steps.Sums(*(x[i] for x in jax.device_get(got))))
        metric = self.task.metric
        return slices.table({name: self.task.metrics(*steps.mean(x))[metric] for name, x in sums.items()})

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
            self.state, metrics = self._train(self.state, self.step + 1)
            if pending is not None:
                self.tally.add(self.step, pending)
            self.step, pending = self.step + 1, metrics
            at = {
                name: self.step % getattr(o, name) == 0 for name in ("log_every", "eval_every", "save_every")
            }
            last = self.step == o.steps
            late, stop = time.monotonic() - begin > limit, asked.is_set()
            if jax.process_count() > 1:  # all stop at the same step
                late, stop = processes.any_process(late, stop) if at["log_every"] else (False, False)
            if self.step == first or last or late or stop or any(at.values()):
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
            if at["save_every"] or last or late or stop:
                pause = time.monotonic()
                self.save(store)
                mark += time.monotonic() - pause
            if stop and not last:
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
        saturated = t.saturated / t.count
        if self.options.model.matmul != "default":
            record["saturated"] = saturated
        run.append(record | validation | {"wall": wall})
        reporter.state(loss, speed or 0.0)
        if validation:
            metric = self.task.metric
            share = share_of_peak(self.multiplied, speed) if speed and self.multiplied else None
            reporter.line(
                f"step {self.step:6d}   {metric} {metrics[metric]:.3f}   "
                f"held out {validation['val_' + metric]:.3f}   {self.seconds:.0f} s"
                + (f"   {speed:,.0f} tokens/s" if speed else "")
                + (f"   {share:.0%} of peak" if share is not None else "")
                + (f"   {saturated:.3g} saturated" if saturated else "")
            )


def _instead(params: PyTree, weights: PyTree) -> PyTree:
    """Returns the weights in the structure of params.

    Raises:
      RunError: their names or shapes differ.
    """
    flat, structure = jax.tree.flatten_with_path(params)
    wanted, got = (
        {jax.tree_util.keystr(k, simple=True, separator=".").removesuffix(".value"): x for k, x in tree}
        for tree in (flat, jax.tree.flatten_with_path(weights)[0])
    )
    for name in {**wanted, **got}:
        shapes = [x[name].shape if name in x else "none" for x in (wanted, got)]
        if shapes[0] != shapes[1]:
            fail("init_from", f"weights of this model, with {name} of shape {shapes[0]}", shapes[1])
    return jax.tree.unflatten(structure, [got[name] for name in wanted])
