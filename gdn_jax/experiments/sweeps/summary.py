"""What the runs of a sweep say: the best learning rate of each mixer, its accuracy over the seeds, a table."""

import math
import statistics
from typing import Any, NamedTuple

from gdn_jax.experiments.mixers import MIXERS
from gdn_jax.experiments.tasks.generated import GeneratedTask


class Row(NamedTuple):
    """A mixer at its best learning rate.

    Fields:
      mixer: its name.
      lr: the learning rate with the lowest mean validation loss over the seeds.
      accuracy: of every seed, by size of the test.
    """

    mixer: str
    lr: float
    accuracy: dict[int, list[float]]

    def mean(self, size: int) -> float:
        """Mean accuracy over the seeds."""
        return statistics.fmean(self.accuracy[size])

    def spread(self, size: int) -> float:
        """Standard deviation over the seeds, at least two."""
        return statistics.stdev(self.accuracy[size])


def rows(records: list[dict[str, Any]], mixers: list[str]) -> list[Row]:
    """One row a mixer, in the order of `mixers`. A run that diverged counts as an infinite loss."""
    out = []
    for mixer in mixers:
        by_lr: dict[float, list[dict[str, Any]]] = {}
        for record in records:
            if record["mixer"] == mixer:
                by_lr.setdefault(record["lr"], []).append(record)
        lr = min(by_lr, key=lambda lr: (statistics.fmean(map(_loss, by_lr[lr])), lr))
        sizes = by_lr[lr][0]["test_accuracy"]
        accuracy = {int(n): [record["test_accuracy"][n] for record in by_lr[lr]] for n in sizes}
        out.append(Row(mixer, lr, accuracy))
    return out


def _loss(record: dict[str, Any]) -> float:
    return math.inf if record["val_loss"] is None else record["val_loss"]


def markdown(
    rows: list[Row], records: list[dict[str, Any]], config: dict[str, Any], task: GeneratedTask
) -> str:
    """The table as Markdown, with what it takes to make it again."""
    sizes = list(rows[0].accuracy)
    chance = ", ".join(f"{name} {100 * value:.1f}" for name, value in task.baselines().items())
    o = config["options"]
    several = o["seeds"] > 1
    over = f"mean ± standard deviation over {o['seeds']} seeds" if several else "of one seed"
    lines = [
        f"# {config['task']}: {task.summary()}",
        "",
        f"{task.label[0].upper() + task.label[1:]} in %, {over}, at the learning rate of {o['lrs']} with the lowest "
        f"{'mean ' if several else ''}validation loss ({chance}).",
        "",
        "| mixer | learning rate | " + " | ".join(f"{size} {task.axis}" for size in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for row in rows:
        cells = (
            f"{100 * row.mean(n):.1f}" + (f" ± {100 * row.spread(n):.1f}" if several else "") for n in sizes
        )
        lines.append(f"| {MIXERS[row.mixer].label} | {row.lr:g} | {' | '.join(cells)} |")
    state = o["num_heads"] * o["head_dim"] * round(o["head_dim"] * o["expand_v"])
    seconds = sum(record["wall"]["seconds"] for record in records)
    lines += [
        "",
        f"{records[0]['parameters']} parameters in every model; a state of {state} numbers in each of "
        f"{o['num_layers']} layers (softmax attention keeps every token instead); {o['steps']} steps of "
        f"{o['batch_size']} sequences.",
        "",
        f"`{config['command']}` on {config['versions']['device']}, jax {config['versions']['jax']}: "
        f"{len(records)} runs, whose seconds add up to {seconds:.0f}.",
    ]
    return "\n".join(lines) + "\n"
