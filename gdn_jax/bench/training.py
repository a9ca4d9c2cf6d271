"""A compiled training step on random tokens, as `gdn train` makes it, for the benchmarks that time one.

A step is lowered from shapes alone, so that several can be compiled at the same time before any of their arrays is
made.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.training import steps
from gdn_jax.training.options import ScheduleOptions
from gdn_jax.training.placement import Placement
from gdn_jax.training.tasks.batch import Batch


class TrainingStep(NamedTuple):
    """A compiled step, the function that runs it from where the last one ended, and the seconds before.

    first_step_s: of tracing, lowering, compiling and running the first step; run_s: of these the run.
    """

    program: Any
    once: Callable[[], steps.StepMetrics]
    loss: float
    grad_norm: float
    init_s: float
    first_step_s: float
    run_s: float


class StepProblem(NamedTuple):
    """A training step: its model, its rows, and where they lie."""

    config: ModelConfig
    rows: int
    length: int
    placement: Placement
    seed: int

    def model(self) -> LanguageModel:
        """The model with fresh weights."""
        return LanguageModel(self.config, rngs=nnx.Rngs(self.seed))


OPTIMIZER = steps.make_optimizer(ScheduleOptions(), 1000, 1e-3)


def lowered(problem: StepProblem) -> jax.stages.Lowered:
    """Traces and lowers a step; makes no array."""
    _, rows, length, placement, _ = problem
    graphdef, params, rest = nnx.split(nnx.eval_shape(problem.model), nnx.Param, ...)
    tokens, counted = (jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.float32))
    batch: Any = Batch(*cast(Any, (tokens, tokens, counted)))
    shapes, shardings = placement.shapes(rest, params, batch, OPTIMIZER)
    with placement.active():
        train: Any = steps.make_functions(graphdef, OPTIMIZER, 1, shardings=shardings).train
        return train.lower(*shapes)


def weights(problem: StepProblem) -> tuple[PyTree, PyTree]:
    """The fresh weights of a problem's model, and the rest of `nnx.split`."""
    _, params, rest = nnx.split(problem.model(), nnx.Param, ...)
    return params, rest


@contextlib.contextmanager
def running(
    problem: StepProblem, program: Any, given: tuple[PyTree, PyTree], before_s: float = 0.0
) -> Iterator[TrainingStep]:
    """A step on random tokens, which runs inside the block; the first step is done.

    Args:
      problem: what it computes.
      program: `lowered(problem)`, compiled.
      given: `weights(problem)`, or equal arrays of the host.
      before_s: seconds of tracing, lowering and compiling.
    """
    _, rows, length, placement, seed = problem
    started = time.perf_counter()
    params, rest = given
    with placement.active():
        params = jax.tree.map(jnp.asarray, params) if placement.mesh is None else params
        state, _ = placement.state(params, OPTIMIZER)
        del params, given
        jax.block_until_ready(state)
        init_s = time.perf_counter() - started
        rng = np.random.default_rng(seed)
        text = rng.integers(0, problem.config.vocab_size, (rows, length + 1)).astype(np.int32)
        batch = Batch(text[:, :-1], text[:, 1:], np.ones((rows, length), np.float32))
        batch = jax.device_put(placement.batch(batch))
        started = time.perf_counter()
        state, metrics = jax.block_until_ready(program(rest, state, batch))
        run_s = time.perf_counter() - started

        def once() -> steps.StepMetrics:
            nonlocal state
            state, metrics = program(rest, state, batch)
            return metrics

        loss, norm = float(metrics.loss), float(metrics.grad_norm)
        yield TrainingStep(program, once, loss, norm, init_s, before_s + run_s, run_s)


@contextlib.contextmanager
def training_step(problem: StepProblem, **compiler_options: Any) -> Iterator[TrainingStep]:
    """A step on random tokens, which runs inside the block; the first step is done."""
    started = time.perf_counter()
    given = weights(problem)
    weights_s = time.perf_counter() - started
    started = time.perf_counter()
    program = lowered(problem).compile(compiler_options)
    before_s = time.perf_counter() - started
    with running(problem, program, given, before_s) as step:
        del given
        yield step._replace(init_s=step.init_s + weights_s)
