"""Figures of sweeps: scores over the size of the test or of the model, and learning curves. A thin line is a seed.

A mean over seeds is not drawn: where some have learned and others not, no run is near it. Points stand on their
ticks. `gdn_jax.training.mixers.MIXERS` says how a rule looks, and in which order rules stand.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gdn_jax.commands.files import replacing
from gdn_jax.styles import GREY
from gdn_jax.sweeps.summary import Row
from gdn_jax.training.mixers import MIXERS

# Letters of a heading, and of the smaller ones below a figure, that fit into an inch.
_HEADING, _CAPTION = 12.0, 16.5
_MIXERS = [*MIXERS]


class Panel(NamedTuple):
    """One of the panels of a figure that share a vertical axis.

    Fields:
      title: above it.
      below: name of its horizontal axis.
      curves: mixer and the scores of its seeds by the value along the axis.
      marked: value along the axis that a word stands at, with the word; None: none.
      chance: score of simple methods by name.
      even: values stand at equal distances along the axis, not at those of their logarithms.
    """

    title: str
    below: str
    curves: Sequence[tuple[str, Mapping[Any, list[float]]]]
    marked: tuple[int, str] | None = None
    chance: Mapping[str, float] = MappingProxyType({})
    even: bool = False


def draw_sweep(
    path: Path,
    rows: list[Row],
    *,
    axis: str,
    label: str,
    trained: int,
    chance: dict[str, float],
    caption: str,
    percent: bool = True,
    along: tuple[str, dict[int, int]] | None = None,
    answers: float | None = None,
) -> None:
    """Draws scores, a thin line for each seed of each mixer.

    Args:
      path: PNG to write (under a temporary name, then renamed).
      rows: of `summary.rows`.
      axis, label, caption: unit of the sizes of the tests, what is measured, what the sweep is.
      trained: largest size of the training sequences, marked.
      chance: score of simple methods by name, as lines. Above losses that are all lower they stand in the caption
        alone: a line there would press the curves together.
      percent: scores are fractions, drawn in %.
      along: name and value by scale of what the models differ in: it is then along the axis, with a panel for each
        size of the test. None: the sizes of the tests are, with a panel for each start.
      answers: see `Row.learned`.
    """
    if along is None:
        below = f"{axis} of a test sequence" if percent else f"place in a test sequence, up to ({axis})"
        panels = []
        for start in dict.fromkeys(row.start for row in rows):
            curves = [(row.mixer, row.scores) for row in rows if row.start == start]
            title = ", ".join(start.names())
            panels.append(Panel(title, below, curves, (trained, "largest in training"), chance))
    else:
        name, values = along
        panels = [
            Panel(f"{n} {axis}", name, _over_scales(rows, values, n), chance=chance) for n in rows[0].scores
        ]
    learned = (
        {}
        if along is not None or answers is None or len(panels) > 1
        else {row.mixer: f"{row.k_of_n(answers)} learned" for row in rows}
    )
    draw_panels(path, panels, label=label, caption=caption, percent=percent, learned=learned)


def draw_panels(
    path: Path,
    panels: Sequence[Panel],
    *,
    label: str,
    caption: str = "",
    title: str = "",
    percent: bool = True,
    learned: dict[str, str] | None = None,
) -> None:
    """Draws panels side by side with one legend, at most four in a line.

    Args:
      path: PNG to write (under a temporary name, then renamed).
      panels: what is drawn.
      label, percent: as for `draw_sweep`.
      title: the finding, above the figure.
      caption: what was run, below it.
      learned: what stands after a mixer's name in the legend.
    """
    scores = [
        x for p in panels for _, s in p.curves for values in s.values() for x in values if np.isfinite(x)
    ]
    most = np.inf if percent else max(scores, default=np.inf)
    near = {name: x for panel in panels for name, x in panel.chance.items() if x <= most}
    above = {name: x for panel in panels for name, x in panel.chance.items() if x > most}
    lines = -(-len(panels) // 4)
    columns = -(-len(panels) // lines)
    wide = 2.4 if columns == 4 else 2.9  # so that the words of four can be read on a page
    size = (7.2 if len(panels) == 1 else 1.2 + wide * columns, 1.6 + 3.2 * lines)
    figure, grid = _figure(size, lines, columns)
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel, 100 if percent else 1)
        for name in panel.chance.keys() & near:
            axes.axhline((100 if percent else 1) * panel.chance[name], color=GREY, lw=1, ls=(0, (1, 4)))
        if percent:
            lowest = 100 * min([*scores, *near.values()])
            axes.set_ylim(lowest - 5 if lowest > 30 else -2, 104)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel(f"{label}, %" if percent else label)
    if above:
        caption += f" Above the figure: {', '.join(f'{name} {value:.3f}' for name, value in above.items())}."
    _legend(figure, panels, [*near], learned or {}, caption.strip(), 9.5 if columns > 2 else 8.0)
    _finish(path, figure, title)


def draw_curves(
    path: Path,
    rows: list[Row],
    *,
    axis: str,
    label: str,
    answers: float | None,
    title: str = "",
    caption: str = "",
) -> None:
    """Draws the learning curves of runs that start differently: a panel a row, a thin line a seed.

    Args:
      path: PNG to write, as `draw_sweep` does.
      rows: of `summary.rows`, with curves; a mixer's panels begin with its largest start.
      axis, label: unit of the sizes of the tests, what is measured.
      answers: see `Row.learned`.
      title, caption: as for `draw_panels`.
    """

    def place(row: Row) -> tuple[int | float, ...]:
        return _MIXERS.index(row.mixer), row.scale, *(-x for x in row.start if x is not None)

    rows = sorted(rows, key=place)
    parts = [
        [row for row in rows if row.mixer == mixer] for mixer in dict.fromkeys(row.mixer for row in rows)
    ]
    parts = [part[i : i + 5] for part in parts for i in range(0, len(part), 5)]  # a mixer begins a new line
    columns = max(map(len, parts))
    figure, grid = _figure((1.2 + 2.1 * columns, 1.0 + 2.6 * len(parts)), len(parts), columns)
    kind = next(iter(rows[0].curves[0]["accuracy"]))
    for i, part in enumerate(parts):
        line = grid[i * columns : (i + 1) * columns]
        line[0].set_ylabel(f"{label},\n{kind} {axis}, %", fontsize=9)
        for axes in line[len(part) :]:
            axes.set_visible(False)
        for axes, row in zip(line, part, strict=False):
            for curve in row.curves:
                accuracy = [np.nan if x is None else 100 * x for x in curve["accuracy"][kind]]
                axes.plot(curve["steps"], accuracy, color=MIXERS[row.mixer].style.color, lw=1)
            heading = [MIXERS[row.mixer].label, *row.start.names(), f"learning rate {row.lr:g}"]
            axes.set_title("\n".join([*heading, f"{row.k_of_n(answers)} learned"]), fontsize=9)
            axes.set_ylim(-2, 104)
            axes.tick_params(labelsize=8)
            axes.set_xlabel("steps", fontsize=8)
    _finish(path, figure, title, caption or "A line is one seed.")


def _figure(size: tuple[float, float], lines: int, columns: int) -> tuple[Figure, np.ndarray]:
    """A figure and its panels, one after the other."""
    figure = Figure(figsize=size, dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False).reshape(-1)
    for axes in grid:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def _finish(path: Path, figure: Figure, title: str, caption: str = "") -> None:
    """Writes a figure with what stands above and below it."""
    width = figure.get_figwidth()
    if title:
        figure.suptitle(_balanced(title, int(_HEADING * width)), fontsize=11)
    if caption:
        figure.supxlabel(_balanced(caption, int(_CAPTION * width)), fontsize=8)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _balanced(text: str, width: int) -> str:
    """Breaks a text into as few lines as a width allows, all about as long: no word stands alone in the last."""
    count = len(textwrap.wrap(text, width))
    longest = max((len(word) for word in text.split()), default=1)
    narrow = next((n for n in range(longest, width) if len(textwrap.wrap(text, n)) <= count), width)
    return textwrap.fill(text, narrow)


def _tick(value: int | float) -> str:
    """The label of a tick: 4096 is 4K, so that neighbours do not touch."""
    return f"{value / 1024:g}K" if value >= 1024 and value % 512 == 0 else f"{value}"


def _legend(
    figure: Figure,
    panels: Sequence[Panel],
    chance: list[str],
    learned: dict[str, str],
    caption: str,
    size: float = 8.0,
) -> None:
    """The caption, then the mixers in their order, then the simple methods; the size is that of the letters."""
    drawn = {mixer for panel in panels for mixer, _ in panel.curves}
    handles, names = [], []
    for mixer in (mixer for mixer in _MIXERS if mixer in drawn):
        style = MIXERS[mixer].style
        look: dict[str, Any] = dict(
            color=style.color, marker=style.marker, fillstyle=style.fill, ls=style.line
        )
        handles.append(Line2D([], [], lw=1.4, ms=5, **look))
        names.append(MIXERS[mixer].label + (f", {learned[mixer]}" if mixer in learned else ""))
    for name in chance:
        handles.append(Line2D([], [], color=GREY, lw=1, ls=(0, (1, 4))))
        names.append(name)
    width = figure.get_figwidth()
    legend = figure.legend(
        handles,
        names,
        ncols=3 if width > 7.5 else 2,
        title=_balanced(caption, int(8 / size * _CAPTION * width)),
        title_fontsize=size,
        frameon=False,
        fontsize=size,
        handlelength=3.5,
        loc="outside lower center",
    )
    legend.get_title().set_multialignment("center")


def _over_scales(
    rows: list[Row], values: dict[int, int], test: int
) -> list[tuple[str, dict[int, list[float]]]]:
    """Scores of every mixer at one test, by the value of its scale."""
    curves: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        curves.setdefault(row.mixer, {})[values[row.scale]] = row.scores[test]
    return [*curves.items()]


def _draw(axes: Axes, panel: Panel, factor: int) -> None:
    """A thin line for each seed, through points on the ticks."""
    for mixer, scores in sorted(panel.curves, key=lambda curve: _MIXERS.index(curve[0])):
        style = MIXERS[mixer].style
        look: dict[str, Any] = dict(
            color=style.color, marker=style.marker, fillstyle=style.fill, ls=style.line
        )
        for seed in zip(*scores.values(), strict=True):
            axes.plot([*scores], factor * np.array(seed), lw=1.1, ms=4, alpha=0.75, **look)
    sizes = {x for _, scores in panel.curves for x in scores}
    value, word = panel.marked or (None, "")
    ticks = sorted(sizes | ({value} if value is not None and len(sizes) > 1 else set()))
    if not panel.even:
        axes.set_xscale("log", base=2)
    below = "\n" if value in ticks else ""  # labels of as many lines stand at one height
    axes.set_xticks(ticks, [f"{_tick(n)}\n{word}" if n == value else f"{_tick(n)}{below}" for n in ticks])
    axes.minorticks_off()
    axes.set_xlabel(panel.below)
    if panel.title:
        axes.set_title(panel.title, fontsize=9.5)
