"""figure.png of a sweep: the score over the size of the test, or over that of the model, a line for each mixer.

Where the grid varies what runs start with, it is their learning curves.
"""

import textwrap
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gdn_jax.commands.files import replacing
from gdn_jax.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION
from gdn_jax.sweeps.summary import Row
from gdn_jax.training.mixers import MIXERS

# Letters of a heading that fit into an inch.
_LETTERS = 13.5

# Colour, marker, filling of the marker and line of each mixer: told apart in grey as well.
_KNOWN = {
    "linear_attention": (GREY, "v", "none", ":"),
    "mamba2": (ORANGE, "s", "full", "--"),
    "delta_net": (GREEN, "^", "full", "-."),
    "gated_delta_net": (BLUE, "o", "full", "-"),
    "gated_delta_net_neg": (VERMILION, "D", "none", "-"),
    "softmax_attention": (BLACK, "x", "full", (0, (4, 1, 1, 1, 1, 1))),
    "hybrid": (PURPLE, "P", "full", (0, (6, 2))),
}
_COLOURS, _MARKERS = (ORANGE, GREEN, VERMILION, PURPLE), "<>ph*8Xd1234"
_STYLES = _KNOWN | {
    mixer: (_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)], "full", (0, (3, 1)))
    for i, mixer in enumerate(name for name in MIXERS if name not in _KNOWN)
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
    percent: bool = True,
    along: tuple[str, dict[int, int]] | None = None,
) -> None:
    """Draws scores, a line a mixer: mean over the seeds with its standard error, and a dot for each seed.

    Args:
      path: PNG to write (under a temporary name, then renamed).
      rows: of `summary.rows`.
      axis, label, title: unit of the sizes of the tests, what is measured, heading.
      trained: largest size of the training sequences, marked.
      chance: score of simple methods by name, as lines. Above losses that are all lower they stand in the legend
        alone: a line there would press the curves together.
      percent: scores are fractions, drawn in %.
      along: name and value by scale of what the models differ in: it is then along the axis, with a panel for each
        size of the test. None: one panel, with the sizes of the tests along the axis.
    """
    tests = list(rows[0].scores)
    scores = [x for row in rows for values in row.scores.values() for x in values if np.isfinite(x)]
    near = {name: x for name, x in chance.items() if percent or x <= max(scores, default=np.inf)}
    if along is None:
        below = f"{axis} of a test sequence" if percent else f"place in a test sequence, up to so many {axis}"
        panels = [(below, [(row.mixer, row.scores) for row in rows])]
    else:
        name, values = along
        panels = [(f"{name}\n{n} {axis}", _over_scales(rows, values, n)) for n in tests]
    lines = -(-len(panels) // 4)
    columns = -(-len(panels) // lines)
    figure = Figure(
        figsize=(7 if len(panels) == 1 else 1.2 + 2.9 * columns, 1 + 3.6 * lines),
        dpi=160,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False).reshape(-1)
    for axes, (below, curves) in zip(grid, panels, strict=False):
        _draw(axes, curves, 100 if percent else 1)
        for name, value in near.items():
            axes.axhline((100 if percent else 1) * value, color=GREY, lw=1, ls=(0, (1, 4)), label=name)
        sizes = sorted({x for _, scores in curves for x in scores})
        ticks = sorted({*sizes, trained}) if along is None and len(sizes) > 1 else sizes
        axes.set_xscale("log", base=2)
        marked = trained if along is None else None
        axes.set_xticks(ticks, [f"{n}\nlargest in training" if n == marked else str(n) for n in ticks])
        axes.minorticks_off()
        if percent:
            axes.set_ylim(-2, 104)
        axes.set_xlabel(below)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel(f"{label}, %" if percent else label)
    heading = textwrap.fill(title, int(_LETTERS * figure.get_figwidth()))
    (grid[0].set_title if len(panels) == 1 else figure.suptitle)(heading, fontsize=10)
    handles, labels = grid[0].get_legend_handles_labels()  # lines come before error bars: the mixers first
    order = [*range(len(near), len(labels)), *range(len(near))]
    heading = "mean over the seeds, bars of a standard error, dots for the seeds"
    if len(rows[0].scores[tests[0]]) == 1:
        heading = "one seed"
    if above := ", ".join(f"{name} {value:.3f}" for name, value in chance.items() if name not in near):
        heading += f"\nabove the figure: {above}"
    legend = figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        title=heading,
        title_fontsize=8.5,
        frameon=False,
        fontsize=8.5,
        handlelength=4,
        loc="outside lower center",
        ncols=3,
    )
    legend.get_title().set_multialignment("center")
    with replacing(path) as file:
        figure.savefig(file, format="png")


def draw_curves(path: Path, rows: list[Row], *, axis: str, label: str, answers: float | None) -> None:
    """Draws the learning curves of runs that start differently: a panel a row, a thin line a seed.

    Args:
      path: PNG to write, as `draw_sweep` does.
      rows: of `summary.rows`, with curves; a mixer's panels begin with its largest start.
      axis, label: unit of the sizes of the tests, what is measured.
      answers: see `Row.learned`.
    """
    mixers = [row.mixer for row in rows]

    def place(row: Row) -> tuple[int | float, ...]:
        return mixers.index(row.mixer), row.scale, *(-x for x in row.start if x is not None)

    rows = sorted(rows, key=place)
    lines = -(-len(rows) // 5)
    columns = -(-len(rows) // lines)
    figure = Figure(figsize=(1.2 + 2.1 * columns, 0.8 + 2.6 * lines), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    kind = next(iter(rows[0].curves[0]["accuracy"]))
    for axes, row in zip(grid.flat, rows, strict=False):
        colour, _, _, _ = _STYLES[row.mixer]
        for curve in row.curves:
            accuracy = [np.nan if x is None else 100 * x for x in curve["accuracy"][kind]]
            axes.plot(curve["steps"], accuracy, color=colour, lw=1)
        learned = f"{len(row.learned(answers).losses)} of {len(row.losses)} learned"
        heading = [MIXERS[row.mixer].label, *row.start.names(), f"learning rate {row.lr:g}", learned]
        axes.set_title("\n".join(heading), fontsize=9)
        axes.set_ylim(-2, 104)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid.flat[len(rows) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"{label},\n{kind} {axis}, %", fontsize=9)
    figure.supxlabel("steps; a line is one seed", fontsize=9)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _over_scales(
    rows: list[Row], values: dict[int, int], test: int
) -> list[tuple[str, dict[int, list[float]]]]:
    """Scores of every mixer at one test, by the value of its scale."""
    curves: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        curves.setdefault(row.mixer, {})[values[row.scale]] = row.scores[test]
    return [*curves.items()]


def _draw(axes: Axes, curves: list[tuple[str, dict[int, list[float]]]], factor: int) -> None:
    """A line a mixer over the keys of its scores."""
    keys = {x for _, scores in curves for x in scores}
    octaves = max(1.0, np.log2(max(keys) / min(keys)))
    for i, (mixer, scores) in enumerate(curves):
        values = [factor * np.array(x) for x in scores.values()]
        means = np.array([x.mean() for x in values])
        errors = np.array([x.std(ddof=1) / np.sqrt(x.size) if x.size > 1 else 0.0 for x in values])
        colour, marker, filling, line = _STYLES[mixer]
        nudge = 2 ** (0.013 * octaves * (i - (len(curves) - 1) / 2))  # bars at the same size stay apart
        places = nudge * np.array([*scores])
        axes.errorbar(
            places,
            means,
            errors,
            color=colour,
            marker=marker,
            fillstyle=filling,
            ls=line,
            lw=1.6,
            elinewidth=1.2,
            ms=5.5,
            capsize=2.5,
            label=MIXERS[mixer].label,
        )
        for place, x in zip(places, values, strict=True):
            if x.size > 1:
                axes.plot(np.full(x.size, place), x, ".", color=colour, ms=3, alpha=0.6)
