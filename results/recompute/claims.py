"""Comparisons of claims: the tables of claims/*.md, and the cells of README.md that show them."""

import math
import re
import statistics

from results.recompute.printed import Checks, numbers, tables
from results.recompute.stored import ROOT, learned, runs_of, score
from results.recompute.student import half_width, tail

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
