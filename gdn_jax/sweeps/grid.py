"""The grid of a sweep: its runs, which of them can be made now, and to which of them a line of runs.jsonl belongs."""

import itertools
from typing import Any, NamedTuple

from gdn_jax.sweeps import summary
from gdn_jax.sweeps.options import SweepOptions
from gdn_jax.sweeps.summary import Start


class Run(NamedTuple):
    """One point of the grid; the last two are None where the grid does not vary them."""

    mixer: str
    lr: float
    seed: int
    scale: int = 1
    write_start: float | None = None
    time_step: float | None = None

    @property
    def start(self) -> Start:
        """Initial values of the run."""
        return Start(self.write_start, self.time_step)

    def record(self) -> dict[str, Any]:
        """Returns the fields that a line of runs.jsonl has of it."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def as_run(record: dict[str, Any]) -> Run:
    """Returns the run that a line of runs.jsonl belongs to."""
    return Run(record["mixer"], record["lr"], record["seed"], record["scale"], *Start.of(record))


def starts(options: SweepOptions) -> list[Start]:
    """Everything that runs start with."""
    o = options.sweep
    return [Start(*x) for x in itertools.product(o.write_starts or (None,), o.time_steps or (None,))]


def count(options: SweepOptions) -> int:
    """Number of runs of a sweep."""
    o = options.sweep
    trying = o.seeds if o.lr_seeds is None else o.lr_seeds
    rows = len(o.mixers) * len(o.scales) * len(starts(options))
    return rows * (trying * len(o.lrs) + o.seeds - trying)


def wanted(
    options: SweepOptions, mixer: str, scale: int, records: list[dict[str, Any]], metric: str
) -> list[Run]:
    """Runs of a mixer at a scale: those that try learning rates and, once their records are there, the others.

    The first learning rate comes first, with everything that runs start with.

    Args:
      options: of the sweep.
      mixer, scale: whose runs.
      records: lines of runs.jsonl so far.
      metric: as for `summary.rows`.
    """
    o = options.sweep
    trying = o.seeds if o.lr_seeds is None else o.lr_seeds
    grid = itertools.product(o.lrs, starts(options), range(trying))
    runs = [Run(mixer, lr, seed, scale, *start) for lr, start, seed in grid]
    if trying == o.seeds:
        return runs
    done = {as_run(record) for record in records}
    for start in starts(options):
        if done >= {run for run in runs if run.start == start}:
            [row] = summary.rows(records, [mixer], [scale], metric, [start])
            runs += [Run(mixer, row.lr, seed, scale, *start) for seed in range(trying, o.seeds)]
    return runs
