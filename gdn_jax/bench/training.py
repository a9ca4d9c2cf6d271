"""A compiled training step on random tokens, as `gdn train` makes it, for the benchmarks that time one."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.training import steps
from gdn_jax.training.options import ScheduleOptions
from gdn_jax.training.placement import Placement
from gdn_jax.training.tasks.batch import Batch


class TrainingStep(NamedTuple):
    """A compiled step, the function that runs it from where the last one ended, and the seconds before."""

    program: Any
    once: Callable[[], steps.StepMetrics]
    loss: float
    grad_norm: float
    init_s: float
    first_step_s: float


@contextlib.contextmanager
def training_step(
    config: ModelConfig, rows: int, length: int, placement: Placement, seed: int, **compiler_options: Any
) -> Iterator[TrainingStep]:
    """A training step on random tokens, which runs inside the block; the first step is done."""
    started = time.perf_counter()
    model = LanguageModel(config, rngs=nnx.Rngs(seed))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    del model
    optimizer = steps.make_optimizer(ScheduleOptions(), 1000, 1e-3)
    with placement.active():
        state, shardings = placement.state(params, optimizer)
        del params
        jax.block_until_ready(state)
        init_s = time.perf_counter() - started
        rng = np.random.default_rng(seed)
        text = rng.integers(0, config.vocab_size, (rows, length + 1)).astype(np.int32)
        batch = Batch(text[:, :-1], text[:, 1:], np.ones((rows, length), np.float32))
        batch = jax.device_put(placement.batch(batch))
        train: Any = steps.make_functions(graphdef, optimizer, 1, shardings=shardings).train
        started = time.perf_counter()
        program = train.lower(rest, state, batch).compile(compiler_options)
        state, metrics = jax.block_until_ready(program(rest, state, batch))
        first_step_s = time.perf_counter() - started

        def once() -> steps.StepMetrics:
            nonlocal state
            state, metrics = program(rest, state, batch)
            return metrics

        yield TrainingStep(program, once, float(metrics.loss), float(metrics.grad_norm), init_s, first_step_s)
