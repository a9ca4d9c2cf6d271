"""`gdn reproduce`: runs a published setting through `gdn sweep` and prints the paper's numbers beside ours."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from gdn_jax.commands import fields
from gdn_jax.commands.errors import RunError, fail
from gdn_jax.commands.fields import Positive
from gdn_jax.commands.tables import print_whole
from gdn_jax.sweeps import grid, settings, summary, sweep
from gdn_jax.sweeps import options as sweep_options
from gdn_jax.sweeps.options import GridOptions, SweepOptions
from gdn_jax.sweeps.settings import ENTRIES, Entry
from gdn_jax.training import options as options_lib
from gdn_jax.training.runs import RunFolder


@dataclasses.dataclass(frozen=True)
class ReproduceOptions:
    """Which version of a published setting is run, and where."""

    small: bool = False
    """Run a small version, minutes on two CPU cores. It shows that the entry runs, and does not test the claim."""
    out: Path | None = None
    """Folder of the sweep. Without it, runs/reproduce-<entry>."""
    resume: bool = False
    """Continue the sweep in --out with its stored options. An option that differs from the entry is an error."""
    max_minutes: Annotated[float | None, Positive] = None
    """Do not start a run that would not finish within this many minutes. --resume continues."""


def entry_named(name: str) -> Entry:
    """Returns what a paper ran, by its name.

    Raises:
      RunError: there is none of that name.
    """
    if name not in ENTRIES:
        raise RunError(f"gdn reproduce: expected one of {', '.join(ENTRIES)}, got {name}")
    return ENTRIES[name]


def sweep_of(name: str, options: ReproduceOptions) -> SweepOptions:
    """Makes the options of an entry's sweep; of one that is continued, those that it has stored.

    What an entry leaves to the defaults may have changed since a sweep began, and is none of its setting.

    Raises:
      RunError: there is no such entry, or the sweep to continue is not one of it.
    """
    entry = entry_named(name)
    size, changes = ("small", entry.small) if options.small else ("full", entry.full)
    out = (
        options.out or Path("runs") / f"reproduce-{name.replace('/', '-')}{'-small' if options.small else ''}"
    )
    start = GridOptions(out=out, resume=options.resume, max_minutes=options.max_minutes)
    made = settings.made(entry.task, size, changes, start)
    if options.resume:
        _, config = RunFolder.open(out)
        if config.get("task") != f"sweep {entry.task}":
            fail("resume", f"a run of the task sweep {entry.task}", f"{config.get('task')} in {out}")
        made = settings.stored(entry.task, config["options"], start)
        stated = settings.stored(entry.task, config["options"] | changes | {"size": size}, start)
        options_lib.check_same(made, stated)
    sweep_options.check(made)
    return made


def show_entries(console: Console) -> int:
    """Prints all entries; returns the exit status."""
    table = Table("entry", "paper", "claim", "runs", "paper's numbers known", box=None)
    table.columns[0].no_wrap = True  # it is what one types
    for name, entry in ENTRIES.items():
        runs = sweep_of(name, ReproduceOptions()).sweep.runs()
        known = sum(x.value is not None for x in entry.published)
        where = f"{entry.paper}, {entry.where}"
        table.add_row(name, where, entry.claim, str(runs), f"{known} of {len(entry.published)}")
    print_whole(console, table)
    return 0


def reproduce(name: str, options: ReproduceOptions, console: Console, command: str) -> int:
    """Runs an entry and prints its numbers next to ours; returns the exit status.

    Args:
      name: of the entry.
      options: which version, and where.
      console: where it is shown.
      command: the command line, for the sweep's table.

    Raises:
      RunError: there is no such entry, or its sweep cannot be run.
    """
    fields.check(options)
    entry, made = entry_named(name), sweep_of(name, options)
    status = sweep.sweep(made, console, command)
    if status:
        return status
    _, config = RunFolder.open(made.sweep.out)
    lines = grid.lines(Path(str(made.sweep.out)), summary.About.stored(config).metric).records()
    if len({grid.as_run(line) for line in lines}) < made.sweep.runs():
        return status
    print_whole(console, compared(entry, config, lines, options.small))
    console.print(f"{entry.paper}: {entry.setting}.\nHere: {entry.differs}.", highlight=False)
    return 0


def beside(
    entry: Entry, config: dict[str, Any], records: list[dict[str, Any]], small: bool
) -> tuple[list[str], list[list[str]]]:
    """Makes the heads and rows of a table: an entry's numbers next to the numbers of finished runs.

    Beside a paper's best run stands ours, the best of all at the size that is asked; beside any other number the mean
    of the runs that have learned something, at the learning rate of the lowest validation loss. Both are shown, the
    best run then by validation loss, too.
    """
    about = summary.About.stored(config)
    factor, digits, unit = about.factor, about.digits, "%" if about.percent else about.label
    heads = ["rule", f"there, {entry.unit}", "asked there", "scale", f"best run here, {unit}"]
    heads += [f"mean here, {unit}", "learned", "asked here"]
    rows = []
    for published in entry.published:
        there = "not confirmed"
        if published.value is not None:
            there = f"{published.value:.{1 if entry.unit == '%' else 2}f}"
        cells, size = [published.rule, there, published.at], published.here[small]
        made = [x for x in records if x["mixer"] == published.mixer]
        if not made:
            rows.append([*cells, "", "no such mixer" if published.mixer is None else "not run", "", "", ""])
            continue
        for scale in sorted({x["scale"] for x in made}):
            runs = [x for x in made if x["scale"] == scale]
            scores = [x[f"test_{about.metric}"][str(size)] for x in runs]
            if entry.best_run:
                score = (max if about.percent else min)((x for x in scores if x is not None), default=None)
            else:
                losses = [math.inf if x["val_loss"] is None else x["val_loss"] for x in runs]
                score = scores[losses.index(min(losses))]
            [row] = summary.rows(runs, [runs[0]["mixer"]], [scale], about.metric)
            values = [factor * x for x in row.learned(about.answers).scores[size]]
            mean, count = summary.mean_of(values, digits), row.k_of_n(about.answers)
            shown = "diverged" if score is None else f"{factor * score:.{digits}f}"
            rows.append([*cells, str(scale), shown, mean, count, f"{size} {about.axis}"])
    return heads, rows


def compared(entry: Entry, config: dict[str, Any], records: list[dict[str, Any]], small: bool) -> Table:
    """The table of `beside` for a console; the number that the paper's own is like has a bold head."""
    heads, rows = beside(entry, config, records, small)
    bold = 4 if entry.best_run else 5
    table = Table(*(f"[bold]{head}" if i == bold else head for i, head in enumerate(heads)), box=None)
    for row in rows:
        table.add_row(*row)
    return table
