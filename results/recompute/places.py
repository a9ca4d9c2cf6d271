"""Tables of finding 1: accuracy by place, other training, other orders, and what the first mixer writes."""

import json
import re
import statistics

from results.recompute.printed import Checks, numbers
from results.recompute.stored import NAMES, ROOT, runs_of, score


def of_ledger(head: list[str], row: list[str]) -> Checks:
    """A row of the table of Zoology's training, at its four rates."""
    runs = sorted(runs_of("recall/zoology/ledger*", NAMES[row[0]], 2), key=lambda run: run["lr"])
    for title, cell in zip(head[1:], row[1:], strict=True):
        size = title.split()[-1]
        for run, printed in zip(runs, numbers(cell), strict=True):
            where = f"README.md, finding 1, {row[0]}, {title}, rate {run['lr']:g}"
            yield where, printed, int(size) * run["test_accuracy"][size]


PLACES = {
    "two": ("two*", 2),
    "one": ("one*", 2),
    "two, keys of 32": ("sizes_two*", 1),
    "one, keys of 32": ("sizes_one*", 1),
    "two, keys of 128": ("sizes_two*", 4),
    "one, keys of 128": ("sizes_one*", 4),
}
"""Sweeps of recall/place and their scale, by the first cell of a row."""


def of_places(mixers: str, rule: str, rate: str, trained: str, recalled: str, eighths: str) -> Checks:
    """A row of the table of accuracy by place."""
    where = f"README.md, finding 1, by place, {mixers}, {rule}, {rate}"
    sweep, scale = PLACES[mixers]
    runs = [run for run in runs_of(f"recall/place/{sweep}", NAMES[rule], scale) if run["lr"] == float(rate)]
    of_64 = sorted(score(run, "64") for run in runs)
    for said, value in zip(trained.split(" to "), (of_64[0], of_64[-1]), strict=True):
        yield f"{where}, 64 pairs", said, value
    pairs = sorted(256 * run["test_accuracy"]["256"] for run in runs)
    for said, value in zip(numbers(recalled), pairs, strict=True):
        yield f"{where}, recalled of 256", said, value
    places = zip(*(run["test_accuracy_by"]["place"]["256"] for run in runs), strict=True)
    for i, (said, part) in enumerate(zip(numbers(eighths), places, strict=True)):
        yield f"{where}, eighth {i + 1}", said, 100 * statistics.fmean(part)


def of_first_mixer(rule: str, losses: str, *recalled: str) -> Checks:
    """A row of the table of the first mixer's writes."""
    runs = json.loads((ROOT / "recall/first_mixer/runs.json").read_text())["runs"]
    runs = [run for run in runs if run["rule"] == NAMES[rule]]
    ordered = sorted(run["loss"] for run in runs)
    for said, value in zip(losses.split(" to "), (ordered[0], ordered[-1]), strict=True):
        yield f"README.md, finding 1, first mixer, {rule}, loss", said, value
    for factor, cell in zip(("0.5", "1", "2"), recalled, strict=True):
        for run, said in zip(runs, numbers(cell), strict=True):
            where = f"README.md, finding 1, first mixer, {rule}, writes times {factor}, seed {run['seed']}"
            yield where, said, 32 * sum(run["place"][factor]) / len(run["place"][factor])


def of_further(head: list[str], row: list[str]) -> Checks:
    """A row of a table of models that are trained on more pairs: of Zoology's size, or small ones."""
    if head[1] == "rule":
        yield from of_small_further(*row)
        return
    runs = of_two_mixers("two" if row[0] == "64 pairs" else "far")
    for title, cell in zip(head[1:], row[1:], strict=True):
        [size] = re.findall(r"\d+", title)
        where = f"README.md, finding 1, trained up to {row[0]}, {title}"
        if cell == "not asked":
            assert not any(size in run["test_accuracy"] for run in runs), where
            continue
        values = sorted(int(size) * run["test_accuracy"][size] for run in runs)
        if "eighth" in title:
            places = zip(*(run["test_accuracy_by"]["place"][size] for run in runs), strict=True)
            values = [100 * statistics.fmean(part) for part in places]
        for said, value in zip(numbers(cell), values, strict=True):
            yield where, said, value


def of_two_mixers(sweep: str, mixer: str = "gated_delta_net") -> list[dict]:
    """The runs of a rule of a sweep of recall/place, at its lower rate."""
    return [run for run in runs_of(f"recall/place/{sweep}", mixer, 2) if run["lr"] == 0.0032]


def of_orders(rule: str, order: str, seed: str, *cells: str) -> Checks:
    """A row of the table of models whose questions came in random order."""
    where = f"README.md, finding 1, {rule}, {order} order of questions, seed {seed}"
    shuffled = {"Gated DeltaNet": "shuffled_gated", "DeltaNet": "shuffled_delta"}[rule]
    sweep = shuffled if order == "random" else "two"
    [run] = [run for run in of_two_mixers(sweep, NAMES[rule]) if run["seed"] == int(seed)]
    for size, cell in zip(("64", "128", "256"), cells, strict=False):
        yield f"{where}, of {size}", cell, int(size) * run["test_accuracy"][size]
    for by, cell in zip(("place", "order"), cells[3:], strict=True):
        for i, (said, part) in enumerate(zip(numbers(cell), run["test_accuracy_by"][by]["256"], strict=True)):
            yield f"{where}, by {by}, eighth {i + 1}", said, 100 * part


def of_small_further(most: str, rule: str, losses: str, *cells: str) -> Checks:
    """A row of the table of small models that are trained on more pairs."""
    where = f"README.md, finding 1, {rule}, small, trained up to {most}"
    runs: list[dict] = []
    for name in ("further", "runs"):
        found = json.loads((ROOT / f"recall/first_mixer/{name}.json").read_text())["runs"]
        runs = runs if runs and most == "32 pairs" else [run for run in found if run["rule"] == NAMES[rule]]
    runs = runs[: len(numbers(losses))]
    for run, said in zip(runs, numbers(losses), strict=True):
        yield f"{where}, seed {run['seed']}, loss", said, run["loss"]
    for factor, cell in zip(("0.5", "1", "2"), cells, strict=False):
        for run, said in zip(runs, numbers(cell), strict=True):
            parts = run["place"][factor]
            yield f"{where}, writes times {factor}, seed {run['seed']}", said, 32 * sum(parts) / len(parts)
    for run, said in zip(runs, cells[3].split(", "), strict=True):
        for printed, value in zip(said.split(" to "), (min, max), strict=True):
            yield f"{where}, eighths of seed {run['seed']}", printed, 100 * value(run["place"]["1"])


CHANGES = {
    "writes halved": "writes times 0.5",
    "writes doubled": "writes times 2",
    "'s state kept from pair 65": " frozen after 64 pairs",
}


def of_kept(head: list[str], row: list[str]) -> Checks:
    """A row of the tables of the models whose weights were kept."""
    found = {}
    for run in json.loads((ROOT / "recall/first_mixer/kept.json").read_text())["runs"]:
        found[run["mixer"]] = run["places"]
    if head[0] == "in front":
        n, _, what = row[0].partition(" ")
        name = {"": "64 pairs", "pairs": f"64 pairs after {n} others"}.get(what, f"64 pairs after {n} {what}")
    else:
        name = row[0]
        for words, stored in CHANGES.items():
            name = name.replace(words, stored)
        name = "shuffled, as trained" if "random order" in name else f"gaps, {name}"
    for title, cell in zip(head[1:], row[1:], strict=True):
        rule, _, what = title.partition(": ")
        where, places = f"README.md, finding 1, {row[0]}, {title}", found[NAMES[rule]][name]
        if what.startswith("of "):
            yield where, cell, int(what.removeprefix("of ")) * statistics.fmean(places)
            continue
        for i, (said, part) in enumerate(zip(numbers(cell), places, strict=True)):
            yield f"{where}, eighth {i + 1}", said, 100 * part
