"""Options of `gdn sweep`. Their defaults, a small and a full set for each task, are files: see `settings`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Later, NotNegative, PerStart, Positive, Range, Seed
from gdn_jax.training import options as options_lib
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.options import ScheduleOptions, SizeOptions
from gdn_jax.training.tasks.options import TaskOptions

if TYPE_CHECKING:
    MixerName = str
else:
    MixerName = Literal[tuple(MIXERS)]


_MOST_RUNS = 100_000
"""Runs of a grid at most: they are listed, and each has a line of runs.jsonl, which is read after every group."""

_Share = Range("a number between 0 and 1", lambda x: 0 < x < 1)


@dataclasses.dataclass(frozen=True)
class GridOptions:
    """The grid of runs that are compared: mixers x scales x learning rates x seeds."""

    out: Annotated[Path | None, PerStart] = None
    """Folder to create. Without it, a new folder runs/sweep-<task>-<number>."""
    resume: Annotated[bool, PerStart] = False
    """Continue the sweep in --out: its stored options are used, and a different one is an error. Several
    processes may work on one sweep: each takes mixers that no other process has."""
    config: Annotated[Path | None, PerStart] = None
    """JSON file whose "options" take the place of the defaults, such as the config.json of a sweep."""
    size: Literal["small", "full"] = "small"
    """Defaults of all other options. small: minutes on two CPU cores; full: minutes on one H200."""
    mixers: Annotated[tuple[MixerName, ...], Distinct] = (
        "linear_attention",
        "mamba2",
        "delta_net",
        "gated_delta_net",
        "gated_delta_net_neg",
        "softmax_attention",
    )
    """Token mixers. The first six have the same parameters, and for a seed the same initial weights."""
    scales: Annotated[tuple[int, ...], Distinct, Positive] = (1,)
    """Factors of the model's size, each with learning rates and seeds of its own."""
    scaled: Literal["width", "depth", "state"] = "width"
    """Sizes that --scales multiply. width: --hidden-size and --num-heads, and so the state; depth: --num-layers;
    state: --head-dim, and so the state by the square."""
    lrs: Annotated[tuple[float, ...], Distinct, Positive] = (4e-3, 1.2e-2)
    """Peak learning rates to try. For each mixer the table has the rate with the lowest mean validation loss."""
    seeds: Annotated[int, Positive] = 3
    """Number of seeds, of initial weights and batches: --first-seed and the following ones."""
    first_seed: Annotated[int, Seed, Later] = 0
    """First seed. To confirm a result of earlier runs, take seeds that they did not have."""
    lr_seeds: Annotated[int | None, Positive] = None
    """Number of seeds that try every learning rate; the other seeds take the rate that was best. None: all seeds."""
    data_seed: Annotated[int, Seed] = 0
    """Seed of the validation and test sets, which all runs share."""
    steps: Annotated[int, Positive] = 500
    """Optimiser steps of a run."""
    batch_size: Annotated[int, Positive] = 32
    """Sequences of an optimiser step."""
    passed_steps: Annotated[int, NotNegative, Later] = 0
    """Optimiser steps at the end of a run whose rows begin with the states after the rows before, as all steps of
    `gdn train --start passed` do."""
    write_starts: Annotated[tuple[float, ...] | None, Distinct, _Share] = None
    """Initial write strengths to compare, instead of --write-start; each gets all learning rates and seeds. Every run
    has the bias that sets it, also one that starts at 0.5."""
    time_steps: Annotated[tuple[float, ...] | None, Distinct, Positive] = None
    """Factors on the gates' initial time steps (dt) to compare, instead of --time-step."""
    curve_every: Annotated[int | None, Positive] = None
    """Steps between two validations of every run, kept in runs.jsonl; None: no curves."""
    max_minutes: Annotated[float | None, PerStart, Positive] = None
    """Do not start a run that would not finish within this many minutes. --resume continues."""
    together: Annotated[int, Positive] = 1
    """Runs of a mixer that one program trains at once. More runs use a GPU better."""
    deterministic: bool = True
    """On a GPU, use only operations that give the same bits each time."""
    keep_weights: Annotated[bool, Later] = False
    """Keep the weights of every run in the folder `weights`; `gdn_jax.sweeps.weights.load` reads its model."""

    def runs(self) -> int:
        """Returns the number of runs, without listing them."""
        trying = self.seeds if self.lr_seeds is None else self.lr_seeds
        starts = len(self.write_starts or (None,)) * len(self.time_steps or (None,))
        rows = len(self.mixers) * len(self.scales) * starts
        return rows * (trying * len(self.lrs) + self.seeds - trying)


@dataclasses.dataclass(frozen=True)
class SweepOptions[T: TaskOptions]:
    """All options of a sweep."""

    task: T
    sweep: GridOptions = GridOptions()
    model: SizeOptions = dataclasses.field(default_factory=SizeOptions)
    optimizer: ScheduleOptions = dataclasses.field(default_factory=ScheduleOptions)


def scaled_model(options: SweepOptions, scale: int) -> SizeOptions:
    """The model at one of the sweep's scales."""
    model = options.model
    if options.sweep.scaled == "depth":
        return dataclasses.replace(model, num_layers=scale * model.num_layers)
    if options.sweep.scaled == "state":
        return dataclasses.replace(model, head_dim=scale * model.head_dim)
    return dataclasses.replace(
        model, hidden_size=scale * model.hidden_size, num_heads=scale * model.num_heads
    )


def state_size(model: SizeOptions) -> int:
    """Numbers in the states of all layers of a model without attention."""
    return model.num_layers * model.num_heads * model.head_dim * round(model.head_dim * model.expand_v)


def check(options: SweepOptions) -> None:
    """Raises RunError naming the first option whose value cannot be used."""
    options_lib.check_fields(options)
    grid = options.sweep
    if grid.lr_seeds is not None and grid.lr_seeds > grid.seeds:
        fail("lr_seeds", f"at most --seeds = {grid.seeds}", grid.lr_seeds)
    if (number := grid.runs()) > _MOST_RUNS:
        fail("seeds", f"a grid of at most {_MOST_RUNS} runs", f"{grid.seeds} of {number} runs together")
    if grid.passed_steps:
        if grid.passed_steps > grid.steps:
            fail("passed_steps", f"at most --steps = {grid.steps}", grid.passed_steps)
        if options.model.remat != "none" or options.model.matmul != "default" or grid.batch_size == 1:
            fail("passed_steps", "0 with --remat, --matmul or single rows", grid.passed_steps)
    for scale in grid.scales:
        model = scaled_model(options, scale)
        for mixer in grid.mixers:
            MIXERS[mixer].model(model).check()
    options.task.check()
    options.task.check_sweep(None if grid.resume else grid.batch_size)
    if grid.lr_seeds is None:
        runs = grid.seeds * len(grid.lrs) * len(grid.write_starts or (1,)) * len(grid.time_steps or (1,))
        if runs % grid.together:
            fail("together", f"a divisor of the runs of a mixer at a scale, {runs}", grid.together)
