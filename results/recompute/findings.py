"""The tables of README.md that no claim has."""

import math
import re
import statistics
from collections.abc import Callable

from results.recompute import places
from results.recompute.printed import Checks, tables
from results.recompute.stored import LINES, NAMES, ROOT, chosen, learned, runs_of, score
from results.recompute.student import half_width

ERASURES = {
    "recall, 32 pairs": ("recall/erasure/once", "32"),
    "recall, 32 pairs, seeds 10 to 17": ("recall/erasure/once_more", "32"),
    "recall, 32 pairs, seeds 18 to 33": ("recall/erasure/sixteen", "32"),
    "scope, 384 tokens": ("recall/erasure/scope", "384"),
    "eviction, 256 tokens": ("recall/erasure/eviction", "256"),
    "text, validation": ("text/30m/erasure", "validation"),
}


def of_erasures(head: list[str], row: list[str]) -> Checks:
    """A row of the table of finding 4."""
    sweep, at = ERASURES[row[0]]
    for rule, cell in zip(head[1:], row[1:], strict=True):
        if cell == "not run":
            assert not [run for run in LINES[sweep] if run["mixer"] == NAMES[rule]], cell
            continue
        scores = [score(run, at) for run in chosen(runs_of(sweep, NAMES[rule]))]
        mean, width = cell.split(" ± ")
        yield f"README.md, finding 4, {row[0]}, {rule}", mean, statistics.fmean(scores)
        yield f"README.md, finding 4, {row[0]}, {rule}, interval", width, half_width(scores)


def of_halves(half: str, where: str, *cells: str) -> Checks:
    """A row of the table of what each half of a weak write gains."""
    other = float(where.split(" from ")[1])
    name = {0.06: "06", 0.5: "50"}
    arms = [("erase_06", other), ("erase_50", other)]
    if half == "writing":
        arms = [(f"erase_{name[other]}", 0.06), (f"erase_{name[other]}", 0.5)]
    columns = [
        (sweep, at) for sweep in ("recall/apart", "recall/apart_high") for at in ("16", "steps to half")
    ]
    for (sweep, at), cell in zip(columns, cells, strict=True):
        one, two = ({run["seed"]: run for run in runs_of(sweep, mixer, 1, start)} for mixer, start in arms)
        sign, seeds = 1, [*one]
        if at == "steps to half":
            sign, seeds = -1, [seed for seed in one if learned(one[seed]) and learned(two[seed])]
            seeds = [seed for seed in seeds if max(score(one[seed], at), score(two[seed], at)) < math.inf]
        gains = [sign * (score(one[seed], at) - score(two[seed], at)) for seed in seeds]
        found = re.fullmatch(r"\**([+-][\d.]+) ± ([\d.]+)\** \(n=(\d+)\)", cell)
        assert found, cell
        said = f"README.md, finding 2, {half} at {where}, {sweep}, {at}"
        yield said, found[1], statistics.fmean(gains)
        yield f"{said}, interval", found[2], half_width(gains)
        yield f"{said}, seeds", found[3], len(gains)


def of_leads(head: list[str], row: list[str]) -> Checks:
    """A row of the table of finding 3."""
    for title, cell in zip(head[1:], row[1:], strict=True):
        gains = leads({"30M": "text/30m/first", "100M": "text/100m"}[title], row[0])
        yield f"README.md, finding 3, {row[0]}, {title}", cell, statistics.fmean(gains)


def leads(sweep: str, at: str) -> list[float]:
    """Bits that Gated DeltaNet needs less than DeltaNet, seed by seed."""
    one, other = (
        {run["seed"]: run for run in chosen(runs_of(sweep, mixer))}
        for mixer in ("gated_delta_net", "delta_net")
    )
    return [score(other[seed], at) - score(one[seed], at) for seed in one]


READERS: dict[tuple[int, str], Callable[[list[str], list[str]], Checks]] = {
    (1, "recalled of 64"): places.of_ledger,
    (0, "mixers"): lambda _, row: places.of_places(*row),
    (1, "loss, nats"): lambda _, row: places.of_first_mixer(*row),
    (0, "trained up to"): places.of_further,
    (1, "order of questions"): lambda _, row: places.of_orders(*row),
    (0, "change"): places.of_kept,
    (0, "in front"): places.of_kept,
    (0, "from 0.06, not 0.5"): lambda _, row: of_halves(*row),
    (1, "30M"): of_leads,
    (0, "task"): of_erasures,
}
"""What computes a row of a table, by a column of its head and what this says."""


def of_findings() -> Checks:
    """The tables of README.md, but those of verdicts, which claims have, and of words."""
    for head, rows, _ in tables(ROOT / "README.md"):
        if "verdict" in head or head[1:] == ["papers", "here"]:
            continue
        [reader] = [read for (column, says), read in READERS.items() if head[column] == says]
        for row in rows:
            yield from reader(head, row)
