"""Results of a sweep: the best learning rate of each mixer, what was learned, scores, a table."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy.special import stdtrit

from gdn_jax.commands.errors import RunError, printable
from gdn_jax.commands.files import is_finite
from gdn_jax.sweeps.options import state_size
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.options import SizeOptions
from gdn_jax.training.tasks.task import Task

_LEARNED = 0.9
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
        self._scores: list[dict[str, list[tuple[float, float]]]] = []

    def add(self, step: int, scores: dict[str, list[tuple[float, float]]]) -> None:
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
    """

    mixer: str
    lr: float
    scores: dict[int, list[float]]
    scale: int = 1
    start: Start = Start()
    losses: tuple[float, ...] = ()
    curves: tuple[dict[str, Any], ...] = ()

    def mean(self, size: int) -> float:
        """Mean score over the seeds."""
        return statistics.fmean(self.scores[size])

    def error(self, size: int) -> float:
        """Standard error of the mean over the seeds, at least two: their standard deviation / sqrt(seeds)."""
        return statistics.stdev(self.scores[size]) / math.sqrt(len(self.scores[size]))

    def learned(self, answers: float | None) -> "Row":
        """The row of the seeds that have learned something; all, where it is not known what a guess costs."""
        if answers is None:
            return self
        kept = [i for i, loss in enumerate(self.losses) if has_learned(loss, answers)]

        def of(values):
            return [values[i] for i in kept]

        scores = {size: of(values) for size, values in self.scores.items()}
        return self._replace(
            scores=scores,
            losses=tuple(of(self.losses)),
            curves=tuple(of(self.curves or ())) if self.curves else (),
        )

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
    """Whether a run of this validation loss knows more than a guess among so many answers; None: it has diverged."""
    return loss is not None and loss < _LEARNED * math.log(answers)


def interval(values: Sequence[float]) -> float:
    """Half of the width of the 95 % interval of a mean: Student's t, of at least two values."""
    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


class About(NamedTuple):
    """Facts about a sweep's task that its table tells; see `Task`."""

    metric: str
    label: str
    axis: str
    summary: str
    baselines: dict[str, float]
    answers: float | None = None

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
        tried = set.intersection(*({*seeds} for seeds, _ in by_lr))

        def loss(pair, tried=tried) -> tuple[float, float]:
            seeds, row = pair
            losses = (loss for seed, loss in zip(seeds, row.losses, strict=True) if seed in tried)
            return statistics.fmean(losses), row.lr

        found.append(min(by_lr, key=loss)[1])
    return found


def rows_by_lr(
    records: list[dict[str, Any]],
    mixers: Sequence[str],
    scales: Sequence[int],
    metric: str,
    starts: Sequence[Start],
) -> list[list[tuple[list[int], Row]]]:
    """For each mixer, scale and start the seeds and the row of every learning rate; see `rows`."""
    out = []
    for mixer, scale, start in itertools.product(mixers, scales, starts):
        by_lr: dict[float, dict[int, dict[str, Any]]] = {}
        for record in records:
            if (record["mixer"], record["scale"], Start.of(record)) == (mixer, scale, start):
                by_lr.setdefault(record["lr"], {})[record["seed"]] = record
        part = []
        for lr, by_seed in by_lr.items():
            made = [by_seed[seed] for seed in sorted(by_seed)]
            tests = [record[f"test_{metric}"] for record in made]
            scores = {int(n): [_number(test[n]) for test in tests] for n in tests[0]}
            losses = tuple(_number(record["val_loss"]) for record in made)
            # Of fewer steps than those between two validations a run has a curve without a point.
            curves = tuple(record["curve"] for record in made if record.get("curve", {}).get("steps"))
            part.append((sorted(by_seed), Row(mixer, lr, scores, scale, start, losses, curves)))
        out.append(part)
    return out


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def markdown(
    rows: list[Row],
    records: list[dict[str, Any]],
    config: dict[str, Any],
    about: About,
    sizes: Mapping[int, SizeOptions],
) -> str:
    """The table as Markdown, with what it takes to make it again.

    Args:
      rows: of `rows`.
      records: lines of runs.jsonl.
      config: of the sweep's folder.
      about: the task.
      sizes: the model by scale.
    """
    tests = list(rows[0].scores)
    percent = about.metric == "accuracy"
    chance = ", ".join(f"{name} {_score(value, percent)}" for name, value in about.baselines.items())
    o = config["options"]
    several, scaled = o["seeds"] > 1, len(sizes) > 1
    started = [name.replace("_", " ") for name in Start._fields if getattr(rows[0].start, name) is not None]
    over = f"mean and 95 % t interval over {o['seeds']} seeds" if several else "of one seed"
    if several and about.answers is not None:
        over = f"mean and 95 % t interval over those of {o['seeds']} seeds that have learned something"
    unit = " in %" if percent else ""
    learns = [] if about.answers is None else ["learned"]
    halfway = ["steps to half"] if rows[0].curves else []
    which = ["width", "layers", "state"] if scaled else []
    heads = ["mixer", *which, *started, "learning rate", *learns, *halfway]
    lines = [
        f"# {config['task']}: {about.summary}",
        "",
        f"{about.label[0].upper() + about.label[1:]}{unit}, {over}, at the learning rate of {o['lrs']} "
        f"with the lowest {'mean ' if several else ''}validation loss ({chance}).",
    ]
    if about.answers is not None:
        lines[-1] += (
            f" A run has learned something where its validation loss is below {_LEARNED:g} ln {about.answers:g} = "
            f"{_LEARNED * math.log(about.answers):.3g} nats: a guess costs ln {about.answers:g}."
        )
    lines += ["", f"| {' | '.join([*heads, *(f'{size} {about.axis}' for size in tests)])} |"]
    lines.append("|---" * (len(heads) + len(tests)) + "|")
    for row in rows:
        size = sizes[row.scale]
        which = [str(size.hidden_size), str(size.num_layers), str(state_size(size))] if scaled else []
        lines.append(f"| {' | '.join([*_what(row, which), *_outcome(row, about, percent)])} |")
    seconds = sum(record["wall"]["seconds"] for record in records)
    lines += [
        "",
        f"{_parameters(records)}{_state(rows, sizes)}; {o['steps']} steps of {o['batch_size']} sequences.",
        "",
        f"`{config['command']}` on {config['versions']['device']}, jax {config['versions']['jax']}: "
        f"{len(records)} runs, whose seconds add up to {seconds:.0f}.",
    ]
    return "\n".join(lines) + "\n"


def learning_rates(rows: list[list[tuple[list[int], Row]]], about: About) -> str:
    """A table with every learning rate, where what is learned is the question: of `rows_by_lr`."""
    first = rows[0][0][1]
    started = [name.replace("_", " ") for name in Start._fields if getattr(first.start, name) is not None]
    heads = ["mixer", *(["scale"] if len({part[0][1].scale for part in rows}) > 1 else []), *started]
    heads += ["learning rate", "learned", *(["steps to half"] if first.curves else [])]
    lines = [
        "## Every learning rate",
        "",
        f"| {' | '.join([*heads, *(f'{size} {about.axis}' for size in first.scores)])} |",
        "|---" * (len(heads) + len(first.scores)) + "|",
    ]
    for part in rows:
        for _, row in part:
            which = [str(row.scale)] if "scale" in heads else []
            lines.append(
                f"| {' | '.join([*_what(row, which), *_outcome(row, about, about.metric == 'accuracy')])} |"
            )
    return "\n".join(lines) + "\n"


def _what(row: Row, which: list[str]) -> list[str]:
    """Cells that say which runs a row is of."""
    started = [f"{x:g}" for x in row.start if x is not None]
    return [MIXERS[row.mixer].label, *which, *started, f"{row.lr:g}"]


def _outcome(row: Row, about: About, percent: bool) -> list[str]:
    """Cells with what became of a row's runs."""
    learned = row.learned(about.answers)
    cells = [] if about.answers is None else [f"{len(learned.losses)} of {len(row.losses)}"]
    if row.curves:
        cells.append(_middle(row.halfway()))
    for values in learned.scores.values():
        width = f" ± {_score(interval(values), percent)}" if len(values) > 1 else ""
        cells.append(_score(statistics.fmean(values), percent) + width if values else "-")
    return cells


def _middle(steps: list[int | None]) -> str:
    """The median of numbers of steps, and their range; "-" for those that never come."""
    values = sorted(math.inf if x is None else x for x in steps)
    middle, first, last = (
        f"{x:g}" if math.isfinite(x) else "-" for x in (values[len(values) // 2], values[0], values[-1])
    )
    return middle if first == last else f"{middle} ({first} to {last})"


def _score(value: float, percent: bool) -> str:
    return f"{100 * value:.1f}" if percent else f"{value:.3f}"


def _parameters(records: list[dict[str, Any]]) -> str:
    """Parameters of the models, scale by scale, and those of a mixer that has others."""
    usual, others = [], []
    for scale in sorted({record["scale"] for record in records}):
        counts: dict[int, set[str]] = {}
        for record in records:
            if record["scale"] == scale:
                counts.setdefault(record["parameters"], set()).add(MIXERS[record["mixer"]].label)
        most = max(counts, key=lambda count: len(counts[count]))
        usual.append(str(most))
        others += [f"{n} in {' and '.join(sorted(names))}" for n, names in counts.items() if n != most]
    return f"{' and '.join(usual)} parameters in every {'other ' if others else ''}model" + "".join(
        f", {x}" for x in others
    )


def _state(rows: list[Row], sizes: Mapping[int, SizeOptions]) -> str:
    """Size of the state where there is one size."""
    if len(sizes) > 1:
        return "; softmax attention has no state and keeps every token"
    [size] = sizes.values()
    return (
        f"; a state of {state_size(size) // size.num_layers} numbers in each of {size.num_layers} layers "
        f"(softmax attention keeps every token instead)"
    )
