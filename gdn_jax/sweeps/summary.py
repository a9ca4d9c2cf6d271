"""Results of a sweep: scores by mixer and learning rate, the best rate of each mixer, what was learned."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy.special import stdtrit

from gdn_jax.commands.errors import RunError, printable
from gdn_jax.commands.files import is_finite
from gdn_jax.training.tasks.task import Task

LEARNED = 0.9
"""A run has learned something where its validation loss is below this part of that of a guess."""


class Start(NamedTuple):
    """Initial values that a grid varies, None where it does not; see `GridOptions`."""

    write_start: float | None = None
    time_step: float | None = None

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Start":
        """Reads the initial values from a line of runs.jsonl."""
        return cls(*(record.get(name) for name in cls._fields))

    def names(self) -> list[str]:
        """Returns what the grid varies, in words."""
        return [
            f"{name.replace('_', ' ')} {value:g}"
            for name, value in self._asdict().items()
            if value is not None
        ]


class Curve:
    """Losses and accuracies of runs side by side, in every kind of validation sequences, as they train."""

    def __init__(self):
        self._steps: list[int] = []
        self._scores: list[dict[Any, list[tuple[float, float]]]] = []

    def add(self, step: int, scores: dict[Any, list[tuple[float, float]]]) -> None:
        """Appends the loss and accuracy of every run in each set after a step."""
        self._steps.append(step)
        self._scores.append(scores)

    def of(self, run: int) -> dict[str, Any]:
        """The curve of one of the runs, as runs.jsonl has it; None for a number that is not finite."""

        def column(kind: str, i: int) -> list[float | None]:
            values = (scores[kind][run][i] for scores in self._scores)
            return [round(x, 4) if math.isfinite(x) else None for x in values]

        kinds = [*self._scores[0]] if self._scores else []
        columns = {
            name: {kind: column(kind, i) for kind in kinds} for i, name in enumerate(("loss", "accuracy"))
        }
        return {"steps": self._steps, **columns}


class Row(NamedTuple):
    """A mixer at a scale and a start, at a learning rate: usually its best.

    Fields:
      mixer: its name.
      lr: the learning rate, the one with the lowest mean validation loss over the seeds that tried all of them.
      scores: of every seed, by size of the test; infinite where a run has diverged.
      scale: factor of the model's size.
      start: what the runs start with.
      losses: validation losses of the seeds, infinite where a run has diverged.
      curves: of the seeds, as `Curve.of`; empty without curves.
      seeds: of the runs.
    """

    mixer: str
    lr: float
    scores: dict[int, list[float]]
    scale: int = 1
    start: Start = Start()
    losses: tuple[float, ...] = ()
    curves: tuple[dict[str, Any], ...] = ()
    seeds: tuple[int, ...] = ()

    def learned(self, answers: float | None) -> "Row":
        """The row of the seeds that have learned something; all, where it is not known what a guess costs."""
        if answers is None:
            return self
        kept = [has_learned(loss, answers) for loss in self.losses]
        scores = {size: [*itertools.compress(values, kept)] for size, values in self.scores.items()}
        return self._replace(
            scores=scores,
            losses=(*itertools.compress(self.losses, kept),),
            curves=(*itertools.compress(self.curves, kept),),
            seeds=(*itertools.compress(self.seeds, kept),),
        )

    def k_of_n(self, answers: float | None) -> str:
        """Says how many seeds have learned something."""
        return f"{len(self.learned(answers).losses)} of {len(self.losses)}"

    def halfway(self) -> list[int | None]:
        """For each seed with a curve, the first step after which it has half of the first kind right, or None."""
        found = []
        for curve in self.curves:
            accuracy = next(iter(curve["accuracy"].values()))
            at = (
                step for step, x in zip(curve["steps"], accuracy, strict=True) if x is not None and x >= 0.5
            )
            found.append(next(at, None))
        return found


def has_learned(loss: float | None, answers: float) -> bool:
    """Whether a run of this validation loss is better than guessing one of the answers; None: it has diverged."""
    return loss is not None and loss < LEARNED * math.log(answers)


def t_of(count: int) -> float:
    """Student's t: half the width of the 95 % interval of a mean of n values, in standard errors."""
    return float(stdtrit(count - 1, 0.975))


def interval(values: Sequence[float]) -> float:
    """Half of the width of the 95 % t interval of a mean, of at least two values."""
    return t_of(len(values)) * statistics.stdev(values) / math.sqrt(len(values))


def mean_of(values: Sequence[float], digits: int) -> str:
    """The mean of values with half of its 95 % t interval, in words."""
    if not values:
        return "-"
    width = f" ± {interval(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{width}"


class About(NamedTuple):
    """Facts about a sweep's task that its table tells; see `Task`."""

    metric: str
    label: str
    axis: str
    summary: str
    baselines: dict[str, float]
    answers: float | None = None

    @property
    def percent(self) -> bool:
        """Whether scores are fractions, which are shown in %."""
        return self.metric == "accuracy"

    @property
    def factor(self) -> int:
        """The number that a shown score is multiplied by."""
        return 100 if self.percent else 1

    @property
    def digits(self) -> int:
        """Digits of a shown score after the point."""
        return 1 if self.percent else 3

    @classmethod
    def of(cls, task: Task) -> "About":
        """Collects the facts of a task. A large text takes a while to count."""
        return cls(task.metric, task.label, task.axis, task.summary(), task.baselines(), task.answers())

    @classmethod
    def stored(cls, config: dict[str, Any]) -> "About":
        """Reads the facts from config.json.

        Raises:
          RunError: some are missing, or are of another kind.
        """
        about = {"answers": None} | config["about"]
        for name in {*cls._fields, *about}:
            value = about.get(name)
            if name == "baselines":
                fits = isinstance(value, dict) and all(type(x) in (int, float) for x in value.values())
            elif name == "answers":
                fits = value is None or (type(value) in (int, float) and is_finite(value) and value > 0)
            else:
                fits = name in cls._fields and isinstance(value, str) and value != ""
            if not fits:
                raise RunError(
                    f"config.json: expected about to hold {', '.join(cls._fields)}, got {name} {value!r}"
                )
        shown: dict[str, Any] = {
            name: printable(value) if isinstance(value, str) else value for name, value in about.items()
        }
        baselines = {printable(name): value for name, value in about["baselines"].items()}
        return cls(**shown | {"baselines": baselines})


def rows(
    records: list[dict[str, Any]],
    mixers: Sequence[str],
    scales: Sequence[int] = (1,),
    metric: str = "accuracy",
    starts: Sequence[Start] = (Start(),),
) -> list[Row]:
    """One row a mixer, scale and start, in the order of these, at its best learning rate.

    It is the one with the lowest mean validation loss, over the seeds that all of them have tried. A run that
    diverged counts as an infinite loss.

    Args:
      records: lines of runs.jsonl; each mixer, scale and start has at least one.
      mixers, scales, starts: of the rows.
      metric: name of the scores, as in the records' `test_...`.
    """
    found = []
    for by_lr in rows_by_lr(records, mixers, scales, metric, starts):
        tried = set.intersection(*({*row.seeds} for row in by_lr))

        def loss(row: Row, tried=tried) -> tuple[float, float]:
            losses = (loss for seed, loss in zip(row.seeds, row.losses, strict=True) if seed in tried)
            return statistics.fmean(losses), row.lr

        found.append(min(by_lr, key=loss))
    return found


def rows_by_lr(
    records: list[dict[str, Any]],
    mixers: Sequence[str],
    scales: Sequence[int],
    metric: str,
    starts: Sequence[Start],
) -> list[list[Row]]:
    """For each mixer, scale and start the row of every learning rate; see `rows`."""
    out = []
    for mixer, scale, start in itertools.product(mixers, scales, starts):
        by_lr: dict[float, dict[int, dict[str, Any]]] = {}
        for record in records:
            if (record["mixer"], record["scale"], Start.of(record)) == (mixer, scale, start):
                by_lr.setdefault(record["lr"], {})[record["seed"]] = record
        part = []
        for lr, by_seed in by_lr.items():
            seeds, made = zip(*sorted(by_seed.items()), strict=True)
            tests = [record[f"test_{metric}"] for record in made]
            scores = {int(n): [_number(test[n]) for test in tests] for n in tests[0]}
            losses = tuple(_number(record["val_loss"]) for record in made)
            # Of fewer steps than those between two validations a run has a curve without a point.
            curves = tuple(record["curve"] for record in made if record.get("curve", {}).get("steps"))
            part.append(Row(mixer, lr, scores, scale, start, losses, curves, seeds))
        out.append(part)
    return out


def _number(value: float | None) -> float:
    return math.inf if value is None else value
