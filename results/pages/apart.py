"""Sweeps of `results.erase_and_write`, whose mixers are not those of the package: rows and table."""

from typing import Any

from gdn_jax.commands.tables import markdown
from gdn_jax.sweeps import summary
from gdn_jax.sweeps.summary import About, Row, Start
from gdn_jax.training import mixers
from results import erase_and_write

SWEEP, HIGH = "recall/apart", "recall/apart_high"
"""The starts of erasing and writing at the lower and at the higher learning rate."""


def is_own(config: dict[str, Any]) -> bool:
    """Whether a sweep has mixers of `results.erase_and_write`."""
    return not erase_and_write.MIXERS.keys().isdisjoint(config["options"]["mixers"])


def rows(config: dict[str, Any], lines: list[dict[str, Any]], lr: float) -> list[Row]:
    """A row for each mixer and each start of its writes, at a learning rate."""
    starts = [Start(x) for x in config["options"]["write_starts"]]
    at_rate = [line for line in lines if line["lr"] == lr]
    return summary.rows(at_rate, config["options"]["mixers"], (1,), About.stored(config).metric, starts)


def make_table(config: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """Makes table.md: means over all seeds, because whether a model learns is the question."""
    about, o = About.stored(config), config["options"]
    found = [(lr, row) for lr in o["lrs"] for row in rows(config, lines, lr)]
    sizes = [*found[0][1].scores]
    cells = [
        [
            _name(row.mixer),
            f"{row.start.write_start:g}",
            f"{lr:g}",
            row.k_of_n(about.answers),
            *(summary.mean_of([about.factor * x for x in row.scores[n]], about.digits) for n in sizes),
        ]
        for lr, row in found
    ]
    heads = ["mixer", "writing starts at", "learning rate", "learned", *(f"{n} {about.axis}" for n in sizes)]
    seconds = sum(line["wall"]["seconds"] for line in lines)
    blocks = [
        f"# {config['task']}, DeltaNet with a change: {about.summary}",
        f"{about.label[0].upper()}{about.label[1:]} in %, mean and 95 % t interval over all {o['seeds']} seeds, "
        f"{o['first_seed']} and the following.",
        markdown(heads, cells),
        f"Parameters: {', '.join(str(x) for x in sorted({line['parameters'] for line in lines}))}; "
        f"{o['steps']} steps of {o['batch_size']} sequences; keys of {o['head_dim']} numbers.",
        f"`{config['command']}` on {config['versions']['device']}, jax {config['versions']['jax']}: "
        f"{len(lines)} runs, whose seconds add up to {seconds:.0f}.",
    ]
    return "\n\n".join(blocks) + "\n"


def _name(mixer: str) -> str:
    """A mixer in words."""
    own = erase_and_write.MIXERS.get(mixer)
    style = None if own is None else own.style
    return mixers.MIXERS[mixer].label if style is None else style.label
