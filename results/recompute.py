"""Computes numbers of the pages again from the stored runs: `python results/recompute.py [--count 20] [--seed 0]`.

It shares no code with the pages, and needs the standard library alone. It reads the tables of README.md, claims/*.md
and tasks/*.md, draws numbers of them at random, computes each from the lines of runs.jsonl, and fails if one
differs.
"""

import argparse
import fnmatch
import json
import math
import random
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent
NAMES = {
    "linear attention with unit keys": "linear_attention",
    "linear attention": "linear_attention",
    "Mamba2's decay with unit keys": "mamba2",
    "Mamba2's decay": "mamba2",
    "DeltaNet": "delta_net",
    "Gated DeltaNet": "gated_delta_net",
    "Gated DeltaNet, beta to 2": "gated_delta_net_neg",
    "softmax attention without positions": "softmax_attention",
    "Gated DeltaNet and attention": "hybrid",
    "the hybrid without attention": "hybrid_control",
    "Transformer": "transformer",
    "DeltaProduct, 2 steps": "gated_delta_product",
    "DeltaProduct, 3 steps": "gated_delta_product_3",
    "DeltaProduct, 4 steps": "gated_delta_product_4",
    "KDA": "kda",
    "gated linear attention": "gla",
    "KDA, EDA's gate": "kda_exponential",
    "EDA": "eda",
}
ARM = re.compile(
    r"`([^`]+)` `([^`]+)`(?: scale (\d+))?(?: (?:write start|time step) ([\d.]+))?(?: rate ([^\s;]+))?"
)
SEEDS = re.compile(
    r"([\d.]+)(?: %| steps)? against ([\d.]+)(?: %| steps)?, gain \**([+-][\d.]+)(?: ± ([\d.]+))?\**; (\d+) "
    r"(?:added )?seeds(?: \(the first \d+: ([+-]\d+)\))?"
)
RATES = re.compile(
    r"best rate ([\d.]+)(?: %)?(?: against ([\d.]+)(?: %)?)?; all rates ([\d. ]+?)(?: against ([\d. ]+))?;"
)
Checks = Iterator[tuple[str, str, float]]
"""What a number is, as it is printed, and what the runs give."""


def read() -> tuple[dict[str, list[dict]], dict[str, dict]]:
    """The lines of runs.jsonl and the configuration of every sweep, by its name."""
    lines: dict[str, list[dict]] = {}
    configs = {}
    for path in sorted(ROOT.rglob("runs.jsonl")):
        folder = path.parent.relative_to(ROOT).as_posix()
        whole = path.parent / "config.json"
        parts = None if whole.exists() else json.loads((path.parent / "configs.json").read_text())
        for text in path.read_text().splitlines():
            line = json.loads(text)
            name = folder if parts is None else f"{folder}/{line['sweep']}"
            lines.setdefault(name, []).append(line)
            configs[name] = json.loads(whole.read_text()) if parts is None else parts[line["sweep"]]
    return lines, configs


LINES, CONFIGS = read()


def tail(t: float, freedom: int, parts: int = 20_000) -> float:
    """Two-sided p-value of Student's t: with t = sqrt(freedom) tan(x) the density is that of cos(x)^(freedom - 1)."""

    def integral(low: float) -> float:
        width = (math.pi / 2 - low) / parts
        values = [max(math.cos(low + i * width), 0.0) ** (freedom - 1) for i in range(parts + 1)]
        return width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))

    return integral(math.atan(t / math.sqrt(freedom))) / integral(0.0)


QUANTILES: dict[int, float] = {}


def half_width(values: list[float]) -> float:
    """Half of the 95 % interval of a mean."""
    freedom = len(values) - 1
    if freedom not in QUANTILES:
        low, high = 1.0, 20.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if tail(middle, freedom, 2000) > 0.05 else (low, middle)
        QUANTILES[freedom] = low
    return QUANTILES[freedom] * statistics.stdev(values) / math.sqrt(len(values))


def runs_of(sweep: str, mixer: str, scale: int = 1, start: float | None = None) -> list[dict]:
    """The lines of a mixer in all sweeps that a name means."""
    names = fnmatch.filter(LINES, sweep)
    assert names, sweep
    return [
        line | {"answers": CONFIGS[name]["about"].get("answers")}
        for name in names
        for line in LINES[name]
        if (line["mixer"], line["scale"], line.get("write_start", line.get("time_step")))
        == (mixer, scale, start)
    ]


def chosen(runs: list[dict]) -> list[dict]:
    """The runs at the rate of the lowest mean validation loss, over the seeds that tried all rates; by seed."""
    rates = {run["lr"] for run in runs}
    seeds = set.intersection(*({run["seed"] for run in runs if run["lr"] == lr} for lr in rates))

    def loss(lr: float) -> float:
        found = [run["val_loss"] for run in runs if run["lr"] == lr and run["seed"] in seeds]
        return statistics.fmean(math.inf if x is None else x for x in found)

    best = min(sorted(rates), key=loss)
    return sorted((run for run in runs if run["lr"] == best), key=lambda run: run["seed"])


def learned(run: dict) -> bool:
    """Whether a run has learned something."""
    if run["answers"] is None:
        return True
    return run["val_loss"] is not None and run["val_loss"] < 0.9 * math.log(run["answers"])


def score(run: dict, at: str) -> float:
    """A score in % or in bits per byte, or the steps to half."""
    if at == "steps to half":
        points = [
            (0, 0.0),
            *zip(run["curve"]["steps"], next(iter(run["curve"]["accuracy"].values())), strict=True),
        ]
        i = next((i for i, (_, accuracy) in enumerate(points) if accuracy >= 0.5), None)
        if i is None:
            return math.inf
        (step, below), (later, above) = points[i - 1], points[i]
        return step + (later - step) * (0.5 - below) / (above - below)
    if "test_bpb" in run:
        return run["val_bpb"] if at == "validation" else run["test_bpb"][at]
    return 100 * run["test_accuracy"][at]


def tables(path: Path) -> Iterator[tuple[list[str], list[list[str]], str]]:
    """Head and rows of every table of a page, and the text after it."""
    blocks = path.read_text().split("\n\n")
    for block, after in zip(blocks, [*blocks[1:], ""], strict=True):
        if block.startswith("|"):
            head, _, *rows = (
                [cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()
            )
            yield head, rows, after


def numbers(text: str) -> list[str]:
    return text.split()


def of_comparison(where: str, runs: str, text: str, each: str = "", p: str = "") -> Checks:
    """Numbers of the result of a comparison, and of its gains and p-value where they are given."""
    at = runs.split("; at ")[1].split(",")[0]
    arms = []
    for sweep, mixer, scale, start, rate in ARM.findall(runs):
        found = runs_of(sweep, mixer, int(scale or 1), float(start) if start else None)
        arms.append(found if not rate else [run for run in found if run["lr"] == float(rate)])
    if fails := RATES.search(text):
        by_rate = [{run["lr"]: score(run, at) for run in arm} for arm in arms]
        printed_best = [x for x in (fails[1], fails[2]) if x]
        for said, arm in zip(printed_best, by_rate, strict=True):
            yield f"{where}, best rate", said, max(arm.values())
        for said, arm in zip([x for x in (fails[3], fails[4]) if x], by_rate, strict=True):
            for lr, printed in zip(sorted(arm), numbers(said), strict=True):
                yield f"{where}, rate {lr:g}", printed, arm[lr]
        return
    one, other = ({run["seed"]: run for run in arm} for arm in arms)
    seeds = [seed for seed in sorted(one) if seed in other]
    if "seeds that learned in both" in runs:
        seeds = [seed for seed in seeds if learned(one[seed]) and learned(other[seed])]
    if at == "steps to half":
        seeds = [seed for seed in seeds if max(score(one[seed], at), score(other[seed], at)) < math.inf]
    first = re.search(r"the first (\d+) apart", runs)
    earlier = seeds[: int(first[1])] if first and len(seeds) - int(first[1]) >= 3 else []
    seeds = seeds[len(earlier) :]
    lower = at == "steps to half" or "test_bpb" in arms[0][0]

    def gain(seed: int) -> float:
        return (-1 if lower else 1) * (score(one[seed], at) - score(other[seed], at))

    gains = [gain(seed) for seed in seeds]
    found = SEEDS.search(text)
    assert found, text
    yield f"{where}, favoured rule", found[1], statistics.fmean(score(one[seed], at) for seed in seeds)
    yield f"{where}, other rule", found[2], statistics.fmean(score(other[seed], at) for seed in seeds)
    yield f"{where}, gain", found[3], statistics.fmean(gains)
    if found[4]:
        yield f"{where}, interval", found[4], half_width(gains)
    yield f"{where}, seeds", found[5], len(gains)
    if found[6]:
        yield f"{where}, gain of the first seeds", found[6], statistics.fmean(gain(seed) for seed in earlier)
    if each:
        printed = re.findall(r"[+-][\d.]+", each)
        for seed, said in zip([*earlier, *seeds], printed, strict=True):
            yield f"{where}, gain of seed {seed}", said, gain(seed)
    if p and p[0].isdigit():
        t = abs(statistics.fmean(gains)) * math.sqrt(len(gains)) / statistics.stdev(gains)
        yield f"{where}, p", p.split(",")[0], tail(t, len(gains) - 1)


def claims() -> dict[str, tuple[str, list[str]]]:
    """Page and row of each comparison of claims/*.md, by its name and its result."""
    found = {}
    for path in sorted((ROOT / "claims").glob("*.md")):
        for head, rows, _ in tables(path):
            if head[:3] == ["comparison", "runs", "result"]:
                found |= {f"{row[0]}: {row[2]}": (f"claims/{path.name}", row) for row in rows}
    return found


def of_claims() -> Checks:
    """Numbers of claims/*.md, and of the cells of README.md that show the same comparisons."""
    known = claims()
    for page, (name, runs, text, each, p, _) in known.values():
        yield from of_comparison(f"{page}, {name}", runs, text, each, p)
    for head, rows, _ in tables(ROOT / "README.md"):
        if "here" in head and "verdict" in head:
            for row in rows:
                for line in row[head.index("here")].split("<br>"):
                    cell = line.split("; rates: ")[0]
                    if cell.startswith("*"):
                        continue  # how to read a row
                    yield from of_comparison(f"README.md, {cell.split(':')[0]}", known[cell][1][1], cell)


def of_findings() -> Checks:
    """The tables of the findings that no claim has."""
    for head, rows, _ in tables(ROOT / "README.md"):
        if head[0] == "mixers":
            for row in rows:
                yield from of_places(*row)
        if head[1].startswith("loss"):
            for row in rows:
                yield from of_first_mixer(*row)
        if head[0] == "trained up to":
            for row in rows:
                yield from of_further(head, row)
        if head[1] == "order of questions":
            for row in rows:
                yield from of_orders(*row)
        if head[0] in ("change", "in front"):
            for row in rows:
                yield from of_kept(head, row)
        if head[0] == "task":
            for row in rows:
                yield from of_erasures(head, row)
        if head[0] == "from 0.06, not 0.5":
            for row in rows:
                yield from of_halves(*row)
        for row in rows if head[1] in ("recalled of 64", "30M") else ():
            for title, cell in zip(head[1:], row[1:], strict=True):
                if head[1] == "30M":
                    sweep = {"30M": "text/30m/first", "100M": "text/100m"}[title]
                    one, other = (
                        {run["seed"]: run for run in chosen(runs_of(sweep, mixer))}
                        for mixer in ("gated_delta_net", "delta_net")
                    )
                    gains = [score(other[seed], row[0]) - score(one[seed], row[0]) for seed in one]
                    yield f"README.md, finding 3, {row[0]}, {title}", cell, statistics.fmean(gains)
                    continue
                size = title.split()[-1]
                runs = sorted(runs_of("recall/zoology/ledger*", NAMES[row[0]], 2), key=lambda run: run["lr"])
                for run, printed in zip(runs, numbers(cell), strict=True):
                    where = f"README.md, finding 1, {row[0]}, {title}, rate {run['lr']:g}"
                    yield where, printed, int(size) * run["test_accuracy"][size]


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


def of_tasks() -> Checks:
    """The tables of sweeps in tasks/*.md."""
    for path in sorted((ROOT / "tasks").glob("*.md")):
        for head, rows, after in tables(path):
            link = re.match(r"All of it: \[([^\]]+)\]", after)
            if not link or "learning rate" not in head:
                continue
            sweep, at = link[1], head.index("learning rate")
            scales = sorted({line["scale"] for line in LINES[sweep]})
            seen: dict[str, list[tuple[str, ...]]] = {}
            for row in rows:
                mixer, rank = NAMES[row[0]], 0
                if "state" in head:
                    models = seen.setdefault(mixer, [])
                    models += [] if tuple(row[1:4]) in models else [tuple(row[1:4])]
                    rank = models.index(tuple(row[1:4]))
                begins = [x for x in ("write start", "time step") if x in head]
                start = float(row[head.index(begins[0])]) if begins else None
                runs = chosen(runs_of(sweep, mixer, scales[rank], start))
                where = f"tasks/{path.name}, {sweep}, {', '.join(row[:at])}"
                yield f"{where}, learning rate", row[at], runs[0]["lr"]
                kept = [run for run in runs if learned(run)]
                if "learned" in head:
                    k, n = row[head.index("learned")].split(" of ")
                    yield f"{where}, learned", k, len(kept)
                    yield f"{where}, runs", n, len(runs)
                for title, cell in zip(head, row, strict=True):
                    size = re.fullmatch(r"(\d+) \w+", title)
                    if not size or cell == "-":
                        continue
                    scores = [score(run, size[1]) for run in kept]
                    mean, *width = cell.split(" ± ")
                    yield f"{where}, {title}", mean, statistics.fmean(scores)
                    if width:
                        yield f"{where}, {title}, interval", width[0], half_width(scores)


def agrees(printed: str, value: float) -> bool:
    """Whether a number as it is printed is a value, rounded."""
    if "e" in printed:
        return f"{value:.2g}" == printed
    digits = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * 10**-digits + 1e-9


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="numbers that are drawn; 0: all of them")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the draw; without it another draw every time"
    )
    options = parser.parse_args(arguments)
    pool = [*of_claims(), *of_findings(), *of_tasks()]
    drawn = random.Random(options.seed).sample(pool, options.count) if options.count else pool
    wrong = 0
    for where, printed, value in drawn:
        right = agrees(printed, value)
        wrong += not right
        if options.count or not right:
            print(f"{'ok' if right else 'DIFFERS'}: {where}: {printed}, recomputed {value:.6g}")
    print(f"{len(drawn) - wrong} of {len(drawn)} numbers agree, of {len(pool)} in the tables")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
