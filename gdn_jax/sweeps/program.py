"""The programs that a sweep compiles: steps and scores of a mixer's runs side by side, and their initial state."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree, UInt32

from gdn_jax.models import LanguageModel
from gdn_jax.models.costs import count
from gdn_jax.sweeps.grid import Run
from gdn_jax.sweeps.options import SweepOptions, scaled_model
from gdn_jax.sweeps.scoring import Scored
from gdn_jax.training import starts, steps
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.slices import Slice
from gdn_jax.training.steps import Sums, TrainState
from gdn_jax.training.tasks.task import Task

# With so many tokens the logits of all predictions are most of a small model's work: those that do not count are left
# out, where they are half of a row or more.
_LARGE_VOCABULARY = 1024


class Runs(NamedTuple):
    """Runs side by side; every leaf has one entry a run."""

    seed: UInt32[Array, " R"]
    lr: Float[Array, " R"]
    state: TrainState


class Program:
    """The compiled functions of a mixer at a scale, for `together` runs at a time.

    Learning rates and what a run starts with are arguments, so that all of a mixer's runs at a scale share them.
    """

    def __init__(self, options: SweepOptions, task: Task, mixer: str, scale: int = 1):
        grid = options.sweep
        # Shapes alone: the weights come from `make_start`, and there is no other state.
        model = nnx.eval_shape(lambda: make_model(options, task, mixer, 0, scale))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        assert not jax.tree.leaves(rest)
        self.parameters = count(params)
        self._data, self._vocab_size = jax.device_put(task.data), task.vocab_size

        def advance(seed, lr, state, first, last, data):
            """Steps first + 1 to last."""
            optimizer = steps.make_optimizer(options.optimizer, grid.steps, lr)
            step = partial(steps.train_step, graphdef, rest, optimizer, 1)
            bound, turns = task.bound(data), jnp.asarray(task.turns)
            alike = _alike(bound)
            groups = jnp.asarray([next(i for i, g in enumerate(alike) if kind in g) for kind in task.turns])

            def one(begin, i, state):
                # Kinds of batches may differ in their shapes: a step is compiled for each shape, and chosen.
                at, key = (i + 1) % len(turns), (seed, i + 1)

                def group(kinds: list[int], state):
                    draws = [partial(bound.seeded_batch, *key, kind) for kind in kinds]
                    batch = jax.lax.switch(jnp.searchsorted(jnp.asarray(kinds), turns[at]), draws)
                    most = max(task.asked(kind) or batch.tokens.shape[1] for kind in kinds)
                    few = task.vocab_size >= _LARGE_VOCABULARY and 2 * most <= batch.tokens.shape[1]
                    places = jax.lax.top_k(batch.weights, most)[1] if few else None
                    return step(state, batch, places, start=begin)[0]

                return jax.lax.switch(groups[at], [partial(group, kinds) for kinds in alike], state)

            if not grid.passed_steps:
                return jax.lax.fori_loop(first, last, partial(one, starts.empty), state)
            from_there = grid.steps - grid.passed_steps
            state = jax.lax.fori_loop(first, jnp.minimum(last, from_there), partial(one, starts.empty), state)
            return jax.lax.fori_loop(jnp.maximum(first, from_there), last, partial(one, starts.passed), state)

        def score(params, batch, weights, places):
            return steps.sums_by_weights(graphdef, rest, params, batch, weights, places)

        jit = partial(jax.jit, compiler_options=steps.compiler_flags(grid.deterministic))
        many = partial(_side_by_side, grid.together)
        self._advance = jit(many(advance, 3), donate_argnums=2)
        self._score = jit(many(score, 1))

    def advance(self, runs: Runs, first: int, last: int) -> Runs:
        """The steps first + 1 to last; waits for the device."""
        state = self._advance(runs.seed, runs.lr, runs.state, first, last, self._data)
        return runs._replace(state=jax.block_until_ready(state))

    def score(self, runs: Runs, sets: list[Scored]) -> dict[str | Slice, list[tuple[float, float]]]:
        """Mean loss and accuracy of every run in every set and slice; NaN where nothing counts."""
        sums: dict[str | Slice, list[Sums]] = {}
        for scored in sets:
            places = scored.places() if self._vocab_size >= _LARGE_VOCABULARY else None
            got = jax.device_get(self._score(runs.state.params, scored.batch, scored.weights, places))
            for i, name in enumerate(scored.names):
                sums.setdefault(name, []).append(Sums(*(x[:, i] for x in got)))
        return {
            name: [steps.mean([Sums(*(x[r] for x in part)) for part in parts]) for r in range(len(runs.seed))]
            for name, parts in sums.items()
        }


def make_model(
    options: SweepOptions, task: Task, mixer: str, seed: int | Array, scale: int = 1
) -> LanguageModel:
    """Model of a mixer with fresh weights, which are the same for all mixers of one form.

    What the grid varies of the start is that of no run: write strengths have the bias that `make_start` sets, and
    gates their usual time steps.
    """
    size = scaled_model(options, scale)
    if options.sweep.write_starts is not None:
        size = dataclasses.replace(size, write_start=0.5)
    if options.sweep.time_steps is not None:
        size = dataclasses.replace(size, time_step=1.0)
    return steps.make_model(MIXERS[mixer].model(size), task.vocab_size, seed)


def make_start(options: SweepOptions, task: Task, mixer: str, scale: int = 1) -> Callable[[list[Run]], Runs]:
    """A function from runs to their state before the first step.

    It is not compiled as a whole: arrays of one shape share the program that fills them, which many random arrays in
    one program do not.
    """

    def start(seed: Array, lr: Array, write_start: Array, time_step: Array) -> TrainState:
        model = make_model(options, task, mixer, seed, scale)
        if options.sweep.write_starts is not None:
            steps.set_write_start(model, write_start)
        if options.sweep.time_steps is not None:
            steps.scale_time_steps(model, time_step)
        params = nnx.state(model, nnx.Param)
        return TrainState(
            params, steps.make_optimizer(options.optimizer, options.sweep.steps, lr).init(params)
        )

    many = _side_by_side(options.sweep.together, start, 4)

    def start_runs(runs: list[Run]) -> Runs:
        seed = jnp.asarray([run.seed for run in runs], jnp.uint32)
        # A start that the grid does not vary is not read.
        rates = (
            [run.lr for run in runs],
            *([x or 0 for x in xs] for xs in zip(*(run.start for run in runs), strict=True)),
        )
        lr, *starts = (jnp.asarray(x, jnp.float32) for x in rates)
        return Runs(seed, lr, many(seed, lr, *starts))

    return start_runs


def _alike(task: Task) -> list[list[int]]:
    """The kinds of batches of a task, those of one shape together."""
    found: dict[tuple[int, ...], list[int]] = {}
    for kind in range(max(task.turns) + 1):
        shape = jax.eval_shape(lambda kind=kind: task.seeded_batch(0, 0, kind).tokens).shape
        found.setdefault(shape, []).append(kind)
    return [*found.values()]


def _side_by_side(count: int, f: Callable[..., PyTree], mapped: int) -> Callable[..., PyTree]:
    """f for `count` values of its first `mapped` arguments at once; a single one runs f as it is."""

    def many(*args):
        if count > 1:
            return jax.vmap(f, in_axes=(*(0,) * mapped, *(None,) * (len(args) - mapped)))(*args)
        first = jax.tree.map(lambda x: x[0], args[:mapped])
        return jax.tree.map(lambda x: x[None], f(*first, *args[mapped:]))

    return many
