"""Figures: curves.png of a run, its metric over the steps; figure.png of a sweep, accuracy over the test's size."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import patheffects
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gdn_jax.experiments.mixers import MIXERS
from gdn_jax.experiments.summary import Row

# Distinct in colour, in grey and for colour-blind readers (Okabe and Ito).
_TRAIN, _VAL, _BASELINE = "#7fb3d9", "#00527f", "#b34700"


def draw_curves(
    path: Path,
    records: list[dict[str, Any]],
    baselines: dict[str, float],
    *,
    metric: str,
    label: str,
    title: str,
    lower_is_better: bool,
) -> None:
    """Draws the curves of a run.

    Args:
      path: PNG to write (under a temporary name, then renamed).
      records: lines of metrics.jsonl with `step`, `metric` and, where validated, "val_" + metric.
      baselines: values of simple methods by name.
      metric, label, title, lower_is_better: what is drawn, its axis label with unit, heading and direction.
    """
    figure = Figure(figsize=(7, 4.3), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [r["step"] for r in records if metric in r]
    axes.plot(steps, [r[metric] for r in records if metric in r], color=_TRAIN, lw=1.4, label="training")
    val = [(r["step"], r["val_" + metric]) for r in records if "val_" + metric in r]
    if val:
        axes.plot(*zip(*val, strict=True), color=_VAL, lw=2, marker="o", ms=4, label="held out")
        step, value = val[-1]
        axes.annotate(
            f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}",
            (step, value),
            xytext=(0, -17 if lower_is_better else 8),
            textcoords="offset points",
            ha="right",
            color=_VAL,
            weight="bold",
            path_effects=[patheffects.withStroke(linewidth=3, foreground="white")],
        )
    last = max(steps, default=1)
    for name, value in baselines.items():
        axes.axhline(value, color=_BASELINE, lw=1.2, ls="--")
        axes.annotate(
            f"{name} {value:.2f}",
            (last, value),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=_BASELINE,
        )
    values = [v for _, v in val] + list(baselines.values())
    if lower_is_better and values:
        drawn = values + [r[metric] for r in records if metric in r]
        low, high = min(drawn), max(values)
        axes.set_ylim(low - 0.12 * (high - low) - 0.05, high + 0.35 * (high - low) + 0.1)
    elif not lower_is_better:
        axes.set_ylim(-0.02, 1.08)
    axes.set_xlim(0, last * 1.02)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center" if lower_is_better else "lower right")
    _save(figure, path)


# Colour, marker and line of each mixer: told apart in grey as well (Okabe and Ito's colours).
_STYLES = {
    "linear_attention": ("#999999", "v", ":"),
    "mamba2": ("#e69f00", "s", "--"),
    "delta_net": ("#009e73", "^", "-."),
    "gated_delta_net": ("#0072b2", "o", "-"),
    "gated_delta_net_neg": ("#d55e00", "D", "-"),
    "softmax_attention": ("#000000", "x", ":"),
}


def draw_sweep(
    path: Path,
    rows: list[Row],
    *,
    axis: str,
    label: str,
    trained: int,
    chance: dict[str, float],
    title: str,
) -> None:
    """Draws accuracy over the size of the test, a line a mixer: mean over the seeds, bars from the worst to the best.

    Args:
      path: PNG to write (under a temporary name, then renamed).
      rows: of `summary.rows`.
      axis, label, title: unit of the sizes, what is measured, heading.
      trained: size of the training sequences, marked.
      chance: accuracy of simple methods by name.
    """
    figure = Figure(figsize=(7, 4.3), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = list(rows[0].accuracy)
    for i, row in enumerate(rows):
        values = 100 * np.array(list(row.accuracy.values()))  # [sizes, seeds]
        mean = values.mean(1)
        colour, marker, line = _STYLES[row.mixer]
        nudge = 2 ** (0.03 * (i - (len(rows) - 1) / 2))  # bars at the same size stay apart
        axes.errorbar(
            [size * nudge for size in sizes],
            mean,
            [mean - values.min(1), values.max(1) - mean],
            color=colour,
            marker=marker,
            ls=line,
            lw=1.6,
            ms=5,
            capsize=2.5,
            label=MIXERS[row.mixer].label,
        )
    for name, value in chance.items():
        axes.axhline(100 * value, color="#777777", lw=1, ls=(0, (1, 3)))
        axes.annotate(
            name,
            (0.01, 100 * value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            fontsize=8,
            color="#555555",
        )
    if len(sizes) > 1:
        axes.axvline(trained, color="#777777", lw=0.8)
        axes.annotate(
            "trained at",
            (trained, 0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 4),
            textcoords="offset points",
            fontsize=8,
            color="#555555",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(-2, 104)
    axes.set_xlabel(axis)
    axes.set_ylabel(f"{label}, %")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=3)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
