"""figure.png of a sweep: accuracy over the size of the test, a line for each mixer."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gdn_jax.commands.files import replacing
from gdn_jax.experiments.mixers import MIXERS
from gdn_jax.experiments.sweeps.summary import Row

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
    seeds = len(rows[0].accuracy[sizes[0]])
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
        title="one seed" if seeds == 1 else "mean over the seeds, bars from the worst to the best",
        title_fontsize=8.5,
        frameon=False,
        fontsize=8.5,
        handlelength=4,
        loc="outside lower center",
        ncols=3,
    )
    with replacing(path) as file:
        figure.savefig(file, format="png")
