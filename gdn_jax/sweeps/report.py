"""The table.md and figure.png of a sweep's folder, from its config.json and its finished runs."""

from pathlib import Path
from typing import Any

from gdn_jax.commands.files import write_text
from gdn_jax.sweeps import figure, settings, summary
from gdn_jax.sweeps.grid import starts
from gdn_jax.sweeps.options import GridOptions, SweepOptions, scaled_model, state_size
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.tasks.options import TaskOptions

Records = list[dict[str, Any]]


def stored_options(config: dict[str, Any]) -> SweepOptions:
    """Reads the options of a sweep from its config.json."""
    return settings.stored(config["task"].split()[1], config["options"], GridOptions())


def make_table(config: dict[str, Any], records: Records) -> str:
    """Makes table.md of the runs of a sweep.

    What the task is about is taken from `config`, where it is stored: a large text takes long to count.
    """
    options, about = stored_options(config), summary.About.stored(config)
    o = options.sweep
    mixers = [name for name in MIXERS if name in o.mixers]
    rows = summary.rows(records, mixers, o.scales, about.metric, starts(options))
    sizes = {scale: scaled_model(options, scale) for scale in o.scales}
    table = summary.markdown(rows, records, config, about, sizes)
    if about.answers is not None and len(o.lrs) > 1 and rows[0].curves:
        of_all = summary.rows_by_lr(records, mixers, o.scales, about.metric, starts(options))
        table += "\n" + summary.learning_rates(of_all, about)
    return table


def draw(path: Path, config: dict[str, Any], records: Records) -> None:
    """Draws figure.png of the runs of a sweep.

    These are learning curves where the grid varies what runs start with, and where there is one size of the test
    alone: then of every learning rate.
    """
    options, about = stored_options(config), summary.About.stored(config)
    o = options.sweep
    rows = summary.rows(records, o.mixers, o.scales, about.metric, starts(options))
    if rows[0].curves and (rows[0].start.names() or len(rows[0].scores) == 1):
        if not rows[0].start.names():
            by_lr = summary.rows_by_lr(records, o.mixers, o.scales, about.metric, starts(options))
            rows = [row for part in by_lr for _, row in part]
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
        percent=about.metric == "accuracy",
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
