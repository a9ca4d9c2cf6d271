"""The table.md and figure.png of a sweep's folder, from its config.json and its finished runs."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gdn_jax.commands.files import write_text
from gdn_jax.commands.tables import markdown
from gdn_jax.sweeps import figure, settings, summary
from gdn_jax.sweeps.grid import starts
from gdn_jax.sweeps.options import GridOptions, SweepOptions, scaled_model, state_size
from gdn_jax.sweeps.summary import About, Row, Start
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.options import SizeOptions
from gdn_jax.training.tasks.options import TaskOptions

Records = list[dict[str, Any]]


class Column(NamedTuple):
    """A column of a table with a line for each row of `summary.rows`."""

    head: str
    cell: Callable[[Row], str]


def stored_options(config: dict[str, Any]) -> SweepOptions:
    """Reads the options of a sweep from its config.json."""
    return settings.stored(config["task"].split()[1], config["options"], GridOptions())


def make_table(config: dict[str, Any], records: Records) -> str:
    """Makes table.md of the runs of a sweep.

    What the task is about is taken from `config`, where it is stored: a large text takes long to count.
    """
    options, about = stored_options(config), About.stored(config)
    o = options.sweep
    which = [name for name in MIXERS if name in o.mixers], o.scales, about.metric, starts(options)
    rows = summary.rows(records, *which)
    sizes = {scale: scaled_model(options, scale) for scale in o.scales}
    table = best_rates(rows, records, config, about, sizes)
    if about.answers is not None and len(o.lrs) > 1 and rows[0].curves:
        table += "\n" + every_rate(summary.rows_by_lr(records, *which), about)
    return table


def best_rates(
    rows: list[Row], records: Records, config: dict[str, Any], about: About, sizes: Mapping[int, SizeOptions]
) -> str:
    """The table of every mixer at its best learning rate, with what it takes to make it again.

    Args:
      rows: of `summary.rows`.
      records: lines of runs.jsonl.
      config: of the sweep's folder.
      about: the task.
      sizes: the model by scale.
    """
    o = config["options"]
    several = o["seeds"] > 1
    over = f"mean and 95 % t interval over {o['seeds']} seeds" if several else "of one seed"
    if several and about.answers is not None:
        over = f"mean and 95 % t interval over those of {o['seeds']} seeds that have learned something"
    chance = (f"{name} {about.factor * x:.{about.digits}f}" for name, x in about.baselines.items())
    legend = (
        f"{about.label[0].upper() + about.label[1:]}{' in %' if about.percent else ''}, {over}, at the learning rate "
        f"of {o['lrs']} with the lowest {'mean ' if several else ''}validation loss ({', '.join(chance)})."
    )
    if about.answers is not None:
        part, guess = summary.LEARNED, math.log(about.answers)
        legend += (
            f" A run has learned something where its validation loss is below {part:g} ln {about.answers:g} = "
            f"{part * guess:.3g} nats: a guess costs ln {about.answers:g}."
        )
    which = []
    if len(sizes) > 1:
        which = [
            Column("width", lambda row: str(sizes[row.scale].hidden_size)),
            Column("layers", lambda row: str(sizes[row.scale].num_layers)),
            Column("state", lambda row: str(state_size(sizes[row.scale]))),
        ]
    seconds = sum(record["wall"]["seconds"] for record in records)
    blocks = [
        f"# {config['task']}: {about.summary}",
        legend,
        _table(rows, about, which),
        f"{_parameters(records)}{_state(sizes)}; {o['steps']} steps of {o['batch_size']} sequences.",
        f"`{config['command']}` on {config['versions']['device']}, jax {config['versions']['jax']}: "
        f"{len(records)} runs, whose seconds add up to {seconds:.0f}.",
    ]
    return "\n\n".join(blocks) + "\n"


def every_rate(rows: list[list[Row]], about: About) -> str:
    """The table of every learning rate, where what is learned is the question: of `summary.rows_by_lr`."""
    scales = {part[0].scale for part in rows}
    which = [Column("scale", lambda row: str(row.scale))] if len(scales) > 1 else []
    return f"## Every learning rate\n\n{_table([row for part in rows for row in part], about, which)}\n"


def _table(rows: list[Row], about: About, which: list[Column]) -> str:
    """The rows with the columns `which` after the mixer, and what became of their runs."""
    columns = [Column("mixer", lambda row: MIXERS[row.mixer].label), *which]
    for name in Start._fields:
        if getattr(rows[0].start, name) is not None:
            columns.append(
                Column(name.replace("_", " "), lambda row, name=name: f"{getattr(row.start, name):g}")
            )
    columns.append(Column("learning rate", lambda row: f"{row.lr:g}"))
    if about.answers is not None:
        columns.append(Column("learned", lambda row: row.k_of_n(about.answers)))
    if rows[0].curves:
        columns.append(Column("steps to half", lambda row: _middle(row.halfway())))
    columns += [_scores(size, about) for size in rows[0].scores]
    return markdown([column.head for column in columns], [[x.cell(row) for x in columns] for row in rows])


def _scores(size: int, about: About) -> Column:
    """The mean score of the seeds that have learned something, at a size of the test."""

    def cell(row: Row) -> str:
        scores = row.learned(about.answers).scores[size]
        return summary.mean_of([about.factor * x for x in scores], about.digits)

    return Column(f"{size} {about.axis}", cell)


def _middle(steps: list[int | None]) -> str:
    """The median of numbers of steps, and their range; "-" for those that never come."""
    values = sorted(math.inf if x is None else x for x in steps)
    middle, first, last = (
        f"{x:g}" if math.isfinite(x) else "-" for x in (values[len(values) // 2], values[0], values[-1])
    )
    return middle if first == last else f"{middle} ({first} to {last})"


def _parameters(records: Records) -> str:
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


def _state(sizes: Mapping[int, SizeOptions]) -> str:
    """Size of the state where there is one size."""
    if len(sizes) > 1:
        return "; softmax attention has no state and keeps every token"
    [size] = sizes.values()
    return (
        f"; a state of {state_size(size) // size.num_layers} numbers in each of {size.num_layers} layers "
        f"(softmax attention keeps every token instead)"
    )


def draw(path: Path, config: dict[str, Any], records: Records) -> None:
    """Draws figure.png of the runs of a sweep.

    These are learning curves where the grid varies what runs start with, and where there is one size of the test
    alone: then of every learning rate.
    """
    options, about = stored_options(config), About.stored(config)
    o = options.sweep
    which = o.mixers, o.scales, about.metric, starts(options)
    rows = summary.rows(records, *which)
    if rows[0].curves and (rows[0].start.names() or len(rows[0].scores) == 1):
        if not rows[0].start.names():
            rows = [row for part in summary.rows_by_lr(records, *which) for row in part]
        figure.draw_curves(path, rows, axis=about.axis, label=about.label, answers=about.answers)
        return
    along, sizes = None, {scale: scaled_model(options, scale) for scale in o.scales}
    if len(o.scales) > 1:
        along = (
            ("layers", {scale: size.num_layers for scale, size in sizes.items()})
            if o.scaled == "depth"
            else ("numbers in the state", {scale: state_size(size) for scale, size in sizes.items()})
        )
    figure.draw_sweep(
        path,
        rows,
        axis=about.axis,
        label=about.label,
        trained=trained_size(options.task),
        chance=about.baselines,
        caption=f"{about.summary[0].upper()}{about.summary[1:]}. A line is one seed.",
        percent=about.percent,
        along=along,
        answers=about.answers,
    )


def trained_size(task: TaskOptions) -> int:
    """Returns the size of the largest training sequences, in the unit of a task's tests."""
    return task.trained_size()


def write(folder: Path, config: dict[str, Any], records: Records) -> str:
    """Writes table and figure of a sweep's folder; returns the table."""
    table = make_table(config, records)
    write_text(folder / "table.md", table)
    draw(folder / "figure.png", config, records)
    return table
