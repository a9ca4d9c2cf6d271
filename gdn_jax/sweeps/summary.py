"""What the runs of a sweep say: the best learning rate of each mixer, its scores over the seeds, a table."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gdn_jax.sweeps.options import state_size
from gdn_jax.tasks.table import SweptTask
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.options import SizeOptions


class Row(NamedTuple):
    """A mixer at a scale, at its best learning rate.

    Fields:
      mixer: its name.
      lr: the learning rate with the lowest mean validation loss over the seeds that tried all of them.
      scores: of every seed, by size of the test; infinite where a run has diverged.
      scale: factor of the model's size.
    """

    mixer: str
    lr: float
    scores: dict[int, list[float]]
    scale: int = 1

    def mean(self, size: int) -> float:
        """Mean score over the seeds."""
        return statistics.fmean(self.scores[size])

    def error(self, size: int) -> float:
        """Standard error of the mean over the seeds, at least two: their standard deviation / sqrt(seeds)."""
        return statistics.stdev(self.scores[size]) / math.sqrt(len(self.scores[size]))


class About(NamedTuple):
    """What a table says of a sweep's task; see `Task`."""

    metric: str
    label: str
    axis: str
    summary: str
    baselines: dict[str, float]

    @classmethod
    def of(cls, task: SweptTask) -> "About":
        """Of a task, whose text it may take a while to count."""
        return cls(task.metric, task.label, task.axis, task.summary(), task.baselines())


def rows(
    records: list[dict[str, Any]],
    mixers: Sequence[str],
    scales: Sequence[int] = (1,),
    metric: str = "accuracy",
) -> list[Row]:
    """One row a mixer and scale, in the order of both.

    A row's learning rate is the one with the lowest mean validation loss, over the seeds that all of them have tried.
    A run that diverged counts as an infinite loss.

    Args:
      records: lines of runs.jsonl; each mixer and scale has at least one.
      mixers, scales: of the rows.
      metric: name of the scores, as in the records' `test_...`.
    """
    out = []
    for mixer in mixers:
        for scale in scales:
            by_lr: dict[float, dict[int, dict[str, Any]]] = {}
            for record in records:
                if (record["mixer"], record["scale"]) == (mixer, scale):
                    by_lr.setdefault(record["lr"], {})[record["seed"]] = record
            tried = set.intersection(*map(set, by_lr.values()))  # seeds

            def loss(lr: float, by_lr=by_lr, tried=tried) -> float:
                return statistics.fmean(_number(by_lr[lr][seed]["val_loss"]) for seed in sorted(tried))

            lr = min(by_lr, key=lambda lr: (loss(lr), lr))
            tests = [by_lr[lr][seed][f"test_{metric}"] for seed in sorted(by_lr[lr])]
            scores = {int(n): [_number(test[n]) for test in tests] for n in tests[0]}
            out.append(Row(mixer, lr, scores, scale))
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
    factor, digits = (100, 1) if percent else (1, 3)
    chance = ", ".join(f"{name} {factor * value:.{digits}f}" for name, value in about.baselines.items())
    o = config["options"]
    several, scaled = o["seeds"] > 1, len(sizes) > 1
    over = f"mean ± standard error over {o['seeds']} seeds" if several else "of one seed"
    unit = " in %" if percent else ""
    lines = [
        f"# {config['task']}: {about.summary}",
        "",
        f"{about.label[0].upper() + about.label[1:]}{unit}, {over}, at the learning rate of {o['lrs']} "
        f"with the lowest {'mean ' if several else ''}validation loss ({chance}).",
        "",
        f"| mixer |{' width | layers | state |' if scaled else ''} learning rate | "
        + " | ".join(f"{size} {about.axis}" for size in tests)
        + " |",
        "|---|---|" + "---|" * (len(tests) + 3 * scaled),
    ]
    for row in rows:
        cells = [
            f"{factor * row.mean(n):.{digits}f}"
            + (f" ± {factor * row.error(n):.{digits}f}" if several else "")
            for n in tests
        ]
        size = sizes[row.scale]
        which = [str(size.hidden_size), str(size.num_layers), str(state_size(size))] if scaled else []
        lines.append(f"| {' | '.join([MIXERS[row.mixer].label, *which, f'{row.lr:g}', *cells])} |")
    seconds = sum(record["wall"]["seconds"] for record in records)
    lines += [
        "",
        f"{_parameters(records)}{_state(rows, sizes)}; {o['steps']} steps of {o['batch_size']} sequences.",
        "",
        f"`{config['command']}` on {config['versions']['device']}, jax {config['versions']['jax']}: "
        f"{len(records)} runs, whose seconds add up to {seconds:.0f}.",
    ]
    return "\n".join(lines) + "\n"


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
