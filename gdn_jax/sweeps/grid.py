"""The grid of a sweep: its runs, which of them can be made now, and to which of them a line of runs.jsonl belongs."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gdn_jax.commands.files import JsonLines, is_finite
from gdn_jax.sweeps import summary
from gdn_jax.sweeps.options import SweepOptions
from gdn_jax.sweeps.summary import Start
from gdn_jax.training.mixers import MIXERS


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


def lines(folder: Path, metric: str) -> JsonLines:
    """Returns the lines of runs.jsonl of a sweep's folder, which are checked when they are read.

    Args:
      folder: of the sweep.
      metric: name of the scores.
    """
    run, scores = Run._fields[:4], (f"val_{metric}", f"test_{metric}")
    return JsonLines(
        folder / "runs.jsonl",
        (*run, "val_loss", *scores, "parameters", "wall"),
        partial(_expected, f"val_{metric}", f"test_{metric}"),
    )


def _expected(validation: str, test: str, record: dict[str, Any]) -> str | None:
    """Says what a line of runs.jsonl should hold and does not, if anything."""
    found = {"curve": None, f"{test}_by": {}, **dict.fromkeys(Start._fields)} | record
    score = "a number or null"
    wanted = {
        "mixer": ("a mixer of this version", lambda x: isinstance(x, str) and x in MIXERS),
        "lr": ("a number", _is_number),
        **dict.fromkeys(("seed", "scale", "parameters"), ("a whole number", lambda x: type(x) is int)),
        **dict.fromkeys((*Start._fields, "val_loss", validation), (score, _is_score)),
        test: ("scores by size", _are_scores),
        f"{test}_by": ("scores of slices by size", _are_slices),
        "wall": ("seconds", lambda x: isinstance(x, dict) and _is_number(x.get("seconds"))),
        "curve": ("a learning curve", _is_curve),
    }
    wrong = (f"{kind} for {name}" for name, (kind, fits) in wanted.items() if not fits(found[name]))
    return next(wrong, None)


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and is_finite(x)


def _is_score(x: Any) -> bool:
    """Whether something is a number, or None in the place of one that is not finite."""
    return x is None or _is_number(x)


def _are_scores(x: Any) -> bool:
    return isinstance(x, dict) and bool(x) and all(n.isdecimal() and _is_score(x[n]) for n in x)


def _are_slices(x: Any) -> bool:
    """Whether something is as `slices.table` makes it; runs of earlier versions and other tasks have none."""
    return isinstance(x, dict) and all(
        isinstance(sizes, dict)
        and all(n.isdecimal() and isinstance(y, list) and all(map(_is_score, y)) for n, y in sizes.items())
        for sizes in x.values()
    )


def _is_curve(x: Any) -> bool:
    """Whether something is a curve as `summary.Curve.of` makes it, or none at all."""
    if x is None:
        return True
    steps = x.get("steps") if isinstance(x, dict) else None
    if not isinstance(steps, list):
        return False
    kinds = [columns for columns in (x.get("loss"), x.get("accuracy")) if isinstance(columns, dict)]
    if len(kinds) < 2 or kinds[0].keys() != kinds[1].keys():
        return False
    columns = [column for by_kind in kinds for column in by_kind.values()]
    return all(map(_is_number, steps)) and all(
        isinstance(column, list) and len(column) == len(steps) and all(map(_is_score, column))
        for column in columns
    )


def starts(options: SweepOptions) -> list[Start]:
    """Returns the starts of a sweep's runs: each write start with each time step."""
    o = options.sweep
    return [Start(*x) for x in itertools.product(o.write_starts or (None,), o.time_steps or (None,))]


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
    seeds = range(o.first_seed, o.first_seed + o.seeds)
    grid = itertools.product(o.lrs, starts(options), seeds[:trying])
    runs = [Run(mixer, lr, seed, scale, *start) for lr, start, seed in grid]
    if trying == o.seeds:
        return runs
    done = {as_run(record) for record in records}
    for start in starts(options):
        if done >= {run for run in runs if run.start == start}:
            [row] = summary.rows(records, [mixer], [scale], metric, [start])
            runs += [Run(mixer, row.lr, seed, scale, *start) for seed in seeds[trying:]]
    return runs
