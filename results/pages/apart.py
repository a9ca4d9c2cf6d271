"""Sweeps of `results.erase_and_write`, whose mixers are not those of the package: rows and table."""

from typing import Any

from gdn_jax.commands.tables import markdown
from gdn_jax.sweeps import summary
from gdn_jax.sweeps.summary import About, Row, Start
from results.erase_and_write import ERASE_STARTS

SWEEP = "recall/apart"


def is_own(config: dict[str, Any]) -> bool:
    """Whether a sweep has mixers of `results.erase_and_write`."""
    return not ERASE_STARTS.keys().isdisjoint(config["options"]["mixers"])


def rows(config: dict[str, Any], lines: list[dict[str, Any]]) -> list[Row]:
    """A row for each start of erasing and of writing."""
    starts = [Start(x) for x in config["options"]["write_starts"]]
    return summary.rows(lines, config["options"]["mixers"], (1,), About.stored(config).metric, starts)


def make_table(config: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """Makes table.md: means over all seeds, because whether a model learns is the question."""
    about, o, found = About.stored(config), config["options"], rows(config, lines)
    sizes = [*found[0].scores]
    cells = [
        [
            f"{ERASE_STARTS[row.mixer]:g}",
            f"{row.start.write_start:g}",
            row.k_of_n(about.answers),
            *(summary.mean_of([about.factor * x for x in row.scores[n]], about.digits) for n in sizes),
        ]
        for row in found
    ]
    heads = ["erasing starts at", "writing starts at", "learned", *(f"{n} {about.axis}" for n in sizes)]
    seconds = sum(line["wall"]["seconds"] for line in lines)
    blocks = [
        f"# {config['task']}, DeltaNet with a gate for erasing and one for writing: {about.summary}",
        f"{about.label[0].upper()}{about.label[1:]} in %, mean and 95 % t interval over all {o['seeds']} seeds, "
        f"{o['first_seed']} and the following, at the learning rate {o['lrs'][0]:g}.",
        markdown(heads, cells),
        f"{lines[0]['parameters']} parameters in every model; {o['steps']} steps of {o['batch_size']} sequences.",
        f"`{config['command']}` on {config['versions']['device']}, jax {config['versions']['jax']}: "
        f"{len(lines)} runs, whose seconds add up to {seconds:.0f}.",
    ]
    return "\n\n".join(blocks) + "\n"
