"""Figures of where writes start: learning curves, and what each seed comes to."""

import statistics
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gdn_jax.commands.files import replacing
from gdn_jax.styles import BLUE, GREEN, GREY, VERMILION
from gdn_jax.sweeps.summary import Row
from gdn_jax.training.mixers import MIXERS
from results.erase_and_write import ERASE_STARTS
from results.pages import apart
from results.pages.numbers import Numbers
from results.pages.stored import Arm, half_of

ONE_SEED = "A line is one seed."
ERASING = {mixer: f"erasing from {start:g}" for mixer, start in ERASE_STARTS.items()}


def recall(r: Numbers, path: Path) -> None:
    """Learning curves of the delta rules by the write strength at the start."""
    strengths, rules = (0.5, 0.25, 0.12, 0.06, 0.02), {"delta": "delta_net", "gated": "gated_delta_net"}
    drawn = Figure(figsize=(9.6, 4.8), dpi=200, layout="constrained")
    grid = drawn.subplots(len(rules), len(strengths), sharex=True, sharey=True)
    for line, (name, mixer), color in zip(grid, rules.items(), (GREEN, BLUE), strict=True):
        for axes, strength in zip(line, strengths, strict=True):
            # Two of the starts have the five seeds that were added, too.
            sweep = f"recall/start/{'ten' if strength in (0.5, 0.06) else name}"
            row = r.row(Arm(sweep, mixer, lr=0.001, start=strength))
            _curves(axes, row, color, first=5)
            learned = row.k_of_n(r.about(sweep).answers)
            axes.set_title(f"from {strength:g}, {learned} learn", fontsize=9.5)
        line[0].set_ylabel(f"{MIXERS[mixer].label}:\nright answers, %")
    for axes in grid[-1]:
        axes.set_xticks([0, 4000, 8000])
        axes.set_xlabel("step (4 pairs)")
    drawn.suptitle(
        "From weak writes more models learn recall, and sooner; added seeds gain less", fontsize=11
    )
    drawn.supxlabel(
        "Trained on 4 to 64 pairs; keys of 16 numbers, 1024 numbers of state, learning rate 0.001.\nA thin line is one seed, "
        "dashed where it was added after a look at five, a thick line the median.",
        fontsize=8,
    )
    with replacing(path) as file:
        drawn.savefig(file, format="png")


def erase_and_write(r: Numbers, path: Path) -> None:
    """The four starts of erasing and writing at the lower learning rate."""
    title = "A weak start helps where it erases little, not where it writes little"
    _by_start(r, path, apart.SWEEP, ERASING, title, "DeltaNet with two gates")


def erase_and_write_high(r: Numbers, path: Path) -> None:
    """The same at the higher learning rate."""
    title = "At the higher learning rate most models have learned nothing in the end, from all starts"
    _by_start(r, path, apart.HIGH, ERASING, title, "DeltaNet with two gates")


def room(r: Numbers, path: Path) -> None:
    """The usual gate and one with more room, from two starts."""
    gates = {"delta_net": "usual gate", "more_room": "more room"}
    title = "A weak start helps; more room in the gate shows no gain"
    _by_start(r, path, "recall/room", gates, title, "DeltaNet")


def epsilon(r: Numbers, path: Path) -> None:
    """The usual epsilon of the norm and a small one, from two starts, with wide keys."""
    norms = {"delta_net": "usual epsilon", "small_eps": "epsilon 1e-12"}
    title = "With wide keys, too, all seeds learn sooner from weak writes, whatever the epsilon of the norm"
    _by_start(r, path, "recall/eps", norms, title, "DeltaNet", at_the_end=False)


def _by_start(
    r: Numbers, path: Path, sweep: str, names: dict[str, str], title: str, model: str, at_the_end: bool = True
) -> None:
    """Learning curves of two mixers from two starts of writing, and what each seed comes to.

    Args:
      names: the mixers in words.
      at_the_end: a seed comes to an accuracy at 16 pairs; else to half of 4 pairs after a number of steps.
    """
    config, lines = r.folder(sweep)
    [lr], seeds = config["options"]["lrs"], sorted({line["seed"] for line in lines})
    found = {(row.mixer, row.start.write_start): row for row in apart.rows(config, lines, lr)}
    starts = sorted(config["options"]["write_starts"])
    drawn = Figure(figsize=(9.6, 5.4), dpi=200, layout="constrained")
    grid = drawn.subplots(2, 3, sharey="col" if not at_the_end else True, width_ratios=[1, 1, 0.9])
    for line, (mixer, words), color in zip(grid, names.items(), (BLUE, VERMILION), strict=True):
        for axes, write in zip(line, starts, strict=False):
            _curves(axes, found[mixer, write], color)
            axes.set_title(f"{words}, writing from {write:g}", fontsize=9.5)
        line[0].set_ylabel("right answers, %")
        rows = {write: found[mixer, write] for write in starts}
        values = [
            [100 * x for x in row.scores[16]] if at_the_end else [half_of(x) for x in row.curves]
            for row in rows.values()
        ]
        _ends(line[2], [f"{start:g}" for start in rows], values, color)
        line[2].set_title(
            f"{'16 pairs at the end' if at_the_end else 'steps to half'}, {words}", fontsize=9.5
        )
        if at_the_end:
            plain(line[2])
        else:
            line[2].grid(alpha=0.25)
            line[2].spines[["top", "right"]].set_visible(False)
    for axes in grid[-1, :2]:
        axes.set_xlabel("step (4 pairs)")
    grid[-1, 2].set_xlabel("writing from")
    drawn.suptitle(title, fontsize=11)
    width = config["options"]["head_dim"]
    drawn.supxlabel(
        f"{model}, keys of {width} numbers, learning rate {lr:g}, seeds {seeds[0]} to {seeds[-1]}. A thin line "
        "or a dot is one seed, a thick line a median.",
        fontsize=8,
    )
    with replacing(path) as file:
        drawn.savefig(file, format="png")


def _curves(axes: Axes, row: Row, color: str, first: int | None = None) -> None:
    """A thin line for each seed, dashed after the first ones, and the median."""
    steps = row.curves[0]["steps"]
    seeds = [[100 * x for x in next(iter(curve["accuracy"].values()))] for curve in row.curves]
    middle = [statistics.median(at) for at in zip(*seeds, strict=True)]
    for i, seed in enumerate(seeds):
        added = first is not None and i >= first
        axes.plot(steps, seed, color=color, lw=0.8, alpha=0.45, ls="--" if added else "-")
    axes.plot(steps, middle, color=color, lw=2.2)
    axes.axhline(50, color=GREY, lw=0.8, ls=":")
    plain(axes)


def _ends(axes: Axes, names: list[str], values: list[list[float]], color: str) -> None:
    """A dot for each seed, a thin line between the two of a seed, and the medians."""
    for seed in zip(*values, strict=True):
        axes.plot([0, 1], seed, color=color, lw=0.7, marker="o", ms=3.5, alpha=0.45)
    for x, part in enumerate(values):
        axes.plot([x - 0.16, x + 0.16], 2 * [statistics.median(part)], color=color, lw=2.6)
    axes.set_xticks([0, 1], names)
    axes.set_xlim(-0.4, 1.4)


def plain(axes: Axes) -> None:
    """Percent, a faint grid, and no frame."""
    axes.set_ylim(-3, 103)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
