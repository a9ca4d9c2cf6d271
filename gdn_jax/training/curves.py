"""curves.png of a run: its metric over the steps."""

from pathlib import Path
from typing import Any

from matplotlib import patheffects
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gdn_jax.commands.files import replacing
from gdn_jax.styles import BLUE, SKY, VERMILION

_TRAIN, _VAL, _BASELINE = SKY, BLUE, VERMILION


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
    axes.set_title(title, fontsize=11, parse_math=False)  # a name of a folder may have dollars
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center" if lower_is_better else "lower right")
    with replacing(path) as file:
        figure.savefig(file, format="png")
