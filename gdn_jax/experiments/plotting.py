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


# Colour, marker, filling of the marker and line of each mixer: told apart in grey as well (Okabe and Ito's colours).
_STYLES = {
    "linear_attention": ("#777777", "v", "none", ":"),
    "mamba2": ("#e69f00", "s", "full", "--"),
    "delta_net": ("#009e73", "^", "full", "-."),
    "gated_delta_net": ("#0072b2", "o", "full", "-"),
    "gated_delta_net_neg": ("#d55e00", "D", "none", "-"),
    "softmax_attention": ("#000000", "x", "full", (0, (4, 1, 1, 1, 1, 1))),
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
      trained: largest size of the training sequences, marked.
      chance: accuracy of simple methods by name, as lines.
    """
    figure = Figure(figsize=(7, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = list(rows[0].accuracy)
    octaves = max(1.0, np.log2(max(sizes) / min(sizes)))
    for i, row in enumerate(rows):
        values = 100 * np.array(list(row.accuracy.values()))  # [sizes, seeds]
        mean = values.mean(1)
        colour, marker, filling, line = _STYLES[row.mixer]
        nudge = 2 ** (0.013 * octaves * (i - (len(rows) - 1) / 2))  # bars at the same size stay apart
        axes.errorbar(
            nudge * np.array(sizes),
            mean,
            [mean - values.min(1), values.max(1) - mean],
            color=colour,
            marker=marker,
            fillstyle=filling,
            ls=line,
            lw=1.6,
            elinewidth=1.2,
            ms=5.5,
            capsize=2.5,
            label=MIXERS[row.mixer].label,
        )
    for name, value in chance.items():
        axes.axhline(100 * value, color="#777777", lw=1, ls=(0, (1, 4)), label=name)
    axes.set_xscale("log", base=2)
    ticks = sorted({*sizes, trained}) if len(sizes) > 1 else sizes
    axes.set_xticks(ticks, [f"{n}\nlargest in training" if n == trained else str(n) for n in ticks])
    axes.minorticks_off()
    axes.set_ylim(-2, 104)
    axes.set_xlabel(f"{axis} of a test sequence")
    axes.set_ylabel(f"{label}, %")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()  # lines come before error bars: the mixers first
    order = [*range(len(chance), len(labels)), *range(len(chance))]
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        title="mean over the seeds, bars from the worst to the best",
        title_fontsize=8.5,
        frameon=False,
        fontsize=8.5,
        handlelength=4,
        loc="outside lower center",
        ncols=3,
    )
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
