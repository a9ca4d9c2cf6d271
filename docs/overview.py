"""Draws docs/overview.svg: one token's step, and the times of the table "Speed" in README.md.

    python docs/overview.py

It needs the extra `experiments`. The times are read from the README, so that figure and table cannot differ.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import ConnectionPatch, Rectangle

DOCS = Path(__file__).parent
DARK, LIGHT = "#262626", "#dddddd"


class Time(NamedTuple):
    """A row of the table, in milliseconds."""

    passed: str
    sequences: str
    ours: float
    other: float


def times() -> list[Time]:
    """Rows of the table "Speed" of the README."""
    readme = (DOCS.parent / "README.md").read_text()
    rows = re.findall(r"^\| (forward|backward) \| (\S+) \| ([\d.]+) \| ([\d.]+) \|", readme, re.MULTILINE)
    return [Time(passed, sequences, float(ours), float(other)) for passed, sequences, ours, other in rows]


def states() -> list[np.ndarray]:
    """A state of three keys, and the three parts of a token's step on it: decay, erase, write."""
    state = np.array(
        [[0.7, 0.15, 0.5, 0.95, 0.28], [0.88, 0.38, 0.1, 0.22, 0.75], [0.18, 0.8, 0.45, 0.06, 0.58]]
    )
    decayed = state * np.array([[0.5], [0.5], [0.5]])
    erased = decayed * np.array([[1.0], [0.0], [1.0]])
    written = erased + np.outer([0.0, 1.0, 0.0], [0.05, 0.95, 0.18, 0.8, 0.12])
    return [state, decayed, erased, written]


def draw_state(axes: Axes, number: int, state: np.ndarray) -> None:
    """One of the four panels."""
    axes.imshow(state, cmap="Greys", vmin=0, vmax=1.15, aspect="auto")
    for x in range(1, state.shape[1]):
        axes.axvline(x - 0.5, color="white", lw=1.5)
    for y in range(1, state.shape[0]):
        axes.axhline(y - 0.5, color="white", lw=1.5)
    axes.set_xticks([])
    axes.set_yticks(range(3), ["key a", "key b", "key c"] if number == 0 else ["a", "b", "c"])
    axes.tick_params(length=0)
    name = ("state S", "decay", "erase", "write")[number]
    axes.set_title(f"{number + 1}  {name}", loc="left", weight="bold", fontsize=11)
    rules = ("one stored value per key", "S ← exp(g) S", "S ← S − β k (kᵀS)", "S ← S + β k vᵀ")
    axes.set_xlabel(rules[number], fontsize=10, labelpad=7)
    if number > 1:
        axes.add_patch(Rectangle((-0.5, 0.5), state.shape[1], 1, fill=False, lw=2.2, clip_on=False, zorder=3))
        axes.get_yticklabels()[1].set_weight("bold")


def draw_times(axes: Axes, rows: list[Time]) -> None:
    """The bars, forward on the left and backward on the right."""
    forward = sum(row.passed == "forward" for row in rows)
    places = [i + (0.7 if i >= forward else 0) for i in range(len(rows))]
    other = {"facecolor": LIGHT, "edgecolor": "#444444", "hatch": "////"}
    for shift, values, name, look in (
        (-0.21, [row.ours for row in rows], "gdn-jax", {"color": DARK}),
        (0.21, [row.other for row in rows], "best other library", other),
    ):
        bars = axes.bar([x + shift for x in places], values, 0.42, label=name, **look)
        weight = "bold" if name == "gdn-jax" else "normal"
        axes.bar_label(bars, [f"{value:.3f}" for value in values], fontsize=8, weight=weight, padding=1.5)
    axes.set_xticks(places, [row.sequences for row in rows])
    axes.tick_params(axis="x", length=0)
    axes.axvline(forward - 0.15, color="#999999", ls=":", lw=1)
    top = axes.get_ylim()[1] * 1.05
    axes.set_ylim(0, top)
    for x, name in ((forward - 0.3, "forward"), (places[-1] + 0.3, "backward")):
        axes.text(x, 0.93 * top, name, weight="bold", fontsize=11, ha="right", va="center")
    axes.legend(loc="upper left", frameon=False)
    axes.set_ylabel("milliseconds")
    axes.set_xlabel("1x32768 is one sequence of 32768 tokens, 4096x8 are eight packed sequences of 4096")
    axes.set_title(
        "Time of one call on an NVIDIA H200: 16 key heads, 32 value heads, K = V = 128, bfloat16", loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Writes the figure beside this file."""
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 10, "svg.hashsalt": "overview"})
    figure = plt.figure(figsize=(9.4, 5.9))
    grid = figure.add_gridspec(
        2, 4, left=0.115, right=0.985, top=0.875, bottom=0.105, hspace=0.5, wspace=0.42
    )
    text = (
        "One token with k = key b and β = 1: its value replaces what key b had stored; all else only decays."
    )
    figure.text(0.115, 0.96, text)
    panels = [figure.add_subplot(grid[0, i]) for i in range(4)]
    for number, (axes, state) in enumerate(zip(panels, states(), strict=True)):
        draw_state(axes, number, state)
    for left, right in itertools.pairwise(panels):
        ends = {
            "xyA": (1.07, 0.5),
            "xyB": (-0.19, 0.5),
            "coordsA": left.transAxes,
            "coordsB": right.transAxes,
        }
        figure.add_artist(
            ConnectionPatch(**ends, arrowstyle="-|>", mutation_scale=12, color="#333333", lw=1.3)
        )
    draw_times(figure.add_subplot(grid[1, :]), times())
    temporary = DOCS / "overview.svg.tmp"
    figure.savefig(temporary, format="svg", metadata={"Date": None})
    temporary.replace(DOCS / "overview.svg")


if __name__ == "__main__":
    main()
