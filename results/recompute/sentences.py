"""Numbers in the sentences that findings rest on, and in what the protocol says of all tests."""

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence

from results.recompute.claims import of_claims
from results.recompute.findings import leads
from results.recompute.printed import Checks
from results.recompute.stored import CONFIGS, LINES, ROOT, learned, runs_of, score
from results.recompute.student import half_width, tail

Values = Sequence[float]
DELTA_RULES = ("delta_net", "gated_delta_net")
NO_DECAY = ("linear_attention", *DELTA_RULES)
ALL_RULES = ("mamba2", *NO_DECAY)
N = r"([\d.]+)"


def of_place(sweep: str, mixers: Sequence[str], scale: int = 2, lr: float | None = None) -> list[dict]:
    """Runs of some rules in sweeps of recall/place."""
    found = [run for mixer in mixers for run in runs_of(f"recall/place/{sweep}", mixer, scale)]
    return [run for run in found if lr in (None, run["lr"])]


def eighths(run: dict) -> list[float]:
    return [100 * x for x in run["test_accuracy_by"]["place"]["256"]]


def pairs(run: dict, size: str = "256") -> float:
    return int(size) * run["test_accuracy"][size]


def span(values: Sequence[float]) -> Values:
    return min(values), max(values)


def same_number() -> Values:
    runs = [run for name in LINES if name.startswith("recall/start_wide/") for run in LINES[name]]
    return sum(abs(pairs(run, "128") - pairs(run)) <= 3 for run in runs), len(runs)


def two_mixers() -> Values:
    runs = [eighths(run) for run in of_place("two*", NO_DECAY)]
    linear = [eighths(run) for run in of_place("two*", ["linear_attention"], lr=0.0032)]
    return min(x[0] for x in runs), max(y for x in runs for y in x[4:]), max(y for x in linear for y in x[4:])


def stops(mixers: str) -> Values:
    """Delta rules with keys of 128: runs that have less than a quarter of their first quarter in the last half."""
    runs = [eighths(run) for run in of_place(f"sizes_{mixers}*", DELTA_RULES, 4)]
    return sum(sum(x[4:]) / 4 < 0.25 * sum(x[:2]) / 2 for x in runs), len(runs)


def nearly_flat() -> Values:
    """One mixer with keys of 128: all runs but the one whose eighths differ most, and that one's ends."""
    runs = [eighths(run) for run in of_place("sizes_one*", ALL_RULES, 4)]
    *flat, sloped = sorted(runs, key=lambda x: max(x) - min(x))
    return len(flat), len(runs), *span([max(x) - min(x) for x in flat]), sloped[0], sloped[-1]


def lead(sweep: str) -> Values:
    gains = leads(sweep, "validation")
    return statistics.fmean(gains), half_width(gains)


def erasure(sweep: str, mixer: str) -> tuple[float, float, int, int, float]:
    """What EDA recalls more of 32 pairs at 0.003: mean, interval, seeds ahead, seeds, p-value."""
    one, other = (
        {run["seed"]: score(run, "32") for run in runs_of(sweep, rule) if run["lr"] == 0.003}
        for rule in ("eda", mixer)
    )
    gains = [one[seed] - other[seed] for seed in one]
    t = abs(statistics.fmean(gains)) * math.sqrt(len(gains)) / statistics.stdev(gains)
    ahead = sum(x > 0 for x in gains)
    return statistics.fmean(gains), half_width(gains), ahead, len(gains), tail(t, len(gains) - 1)


def gain(sweep: str, at: str, of: tuple[str, float], than: tuple[str, float]) -> list[float]:
    """Gains at the rate of 0.001, seed by seed, of a rule from a start over another one: points, or steps fewer."""
    one, other = (
        {run["seed"]: score(run, at) for run in runs_of(sweep, mixer, 1, start) if run["lr"] == 0.001}
        for mixer, start in (of, than)
    )
    sign = -1 if at == "steps to half" else 1
    return [sign * (one[seed] - other[seed]) for seed in one if max(one[seed], other[seed]) < math.inf]


def mean_and_width(gains: list[float]) -> list[float]:
    return [statistics.fmean(gains), half_width(gains)]


def weak(sweep: str, mixer: str, at: str) -> list[float]:
    """What a weak start gains."""
    return gain(sweep, at, (mixer, 0.06), (mixer, 0.5))


def first_half(start: float) -> float:
    """The median step at which DeltaNet has half of 4 pairs, of those at which curves were taken."""
    runs = [run for run in runs_of("recall/start/ten", "delta_net", 1, start) if run["lr"] == 0.001]
    curves = [(run["curve"]["steps"], run["curve"]["accuracy"]["4"]) for run in runs]
    return statistics.median(
        next((step for step, x in zip(*curve, strict=True) if x >= 0.5), math.inf) for curve in curves
    )


def linear_start() -> Values:
    points, steps = (
        weak("recall/start/linear_again", "linear_attention", at) for at in ("16", "steps to half")
    )
    (gained, width), (fewer, around) = map(mean_and_width, (points, steps))
    return gained, width, -fewer, around, gained + width, fewer + around


def changed_writes() -> Values:
    """Small models that recall more with the first mixer's writes halved, and fewer with them doubled."""
    runs = json.loads((ROOT / "recall/first_mixer/runs.json").read_text())["runs"]
    half, usual, double = ([sum(run["place"][factor]) for run in runs] for factor in ("0.5", "1", "2"))
    more, fewer = (sum(a > b for a, b in zip(*x, strict=True)) for x in ((half, usual), (usual, double)))
    return more, len(runs), fewer, len(runs)


def all_tests() -> Values:
    """Tests, those that pass the procedure of Benjamini and Hochberg at 5 %, and the largest p-value that does."""
    found = [
        value for where, _, value in of_claims() if where.startswith("claims/") and where.endswith(", p")
    ]
    ordered = sorted(found)
    passing = max(i for i, p in enumerate(ordered, 1) if p <= 0.05 * i / len(ordered))
    return len(ordered), passing, ordered[passing - 1]


MORE, LAST, GATE = "recall/erasure/once_more", "recall/erasure/sixteen", "kda_exponential"
SENTENCES: dict[tuple[str, str], Callable[[], Values]] = {
    (
        "README.md",
        rf"{N} of {N} runs recall the same number of 128 and of 256 pairs, within three",
    ): same_number,
    ("README.md", rf"trained on 256 pairs\]\([^)]*\) recall {N} to {N} of them"): lambda: span(
        [pairs(run) for run in of_place("far", ["gated_delta_net"])]
    ),
    (
        "README.md",
        rf"\(at least {N} %, each run\) and nearly none of the later ones: from the fifth eighth on no run has more "
        rf"than {N} %, and linear attention, whose state forgets and erases nothing, has at most {N} %",
    ): two_mixers,
    (
        "README.md",
        rf"within a run the best and the worst eighth differ by {N} to {N} points\. There",
    ): lambda: span([max(x) - min(x) for x in map(eighths, of_place("one*", ALL_RULES))]),
    ("README.md", rf"Linear attention recalls {N} to {N} pairs with one mixer"): lambda: span(
        [pairs(run) for run in of_place("one*", ["linear_attention"], lr=0.01)]
    ),
    ("README.md", rf"With two mixers {N} of the {N} runs of the delta rules have stopped"): lambda: stops(
        "two"
    ),
    ("README.md", rf"With one mixer {N} of {N} have, as expected"): lambda: stops("one"),
    ("README.md", rf"linear attention by far: it recalls {N} to {N}, with two mixers {N} to {N};"): lambda: (
        *span([pairs(run) for run in of_place("sizes_one*", ["linear_attention"], 4)]),
        *span([pairs(run) for run in of_place("sizes_two*", ["linear_attention"], 4)]),
    ),
    (
        "README.md",
        rf"In {N} of these {N} runs the best and the worst eighth differ by {N} to {N} points; in the other, a seed "
        rf"of Mamba2's decay, accuracy falls from {N} % of the first eighth to {N} % of the last",
    ): nearly_flat,
    ("README.md", rf"Mamba2's decay recalls {N} to {N} with one mixer: each run"): lambda: span(
        [pairs(run) for run in of_place("sizes_one*", ["mamba2"], 4)]
    ),
    (
        "README.md",
        rf"With halved writes {N} of {N} models recall more pairs than as trained, "
        rf"and with doubled writes {N} of {N}",
    ): changed_writes,
    (
        "README.md",
        rf"half of 4 pairs after {N} steps in the median of ten seeds, from 0\.5 after {N}",
    ): lambda: (
        first_half(0.06),
        first_half(0.5),
    ),
    (
        "README.md",
        rf"which damps nothing, the gain is {N} ± {N} steps, with the usual one {N} ± {N}",
    ): lambda: (
        mean_and_width(weak("recall/eps", "small_eps", "steps to half"))
        + mean_and_width(weak("recall/eps", "delta_net", "steps to half"))
    ),
    (
        "README.md",
        rf"linear attention gains {N} ± {N} points at 16 pairs, and needs {N} ± {N} steps more to half: "
        rf"the intervals exclude gains above {N} points and above {N} steps",
    ): linear_start,
    ("README.md", rf"because {N} of {N} runs have learned nothing"): lambda: (
        sum(not learned(run | CONFIGS["recall/apart_high"]["about"]) for run in LINES["recall/apart_high"]),
        len(LINES["recall/apart_high"]),
    ),
    ("README.md", rf"In validation the lead is {N} ± {N} bits with 30M"): lambda: lead("text/30m/first"),
    ("README.md", rf"bits with 30M parameters and {N} ± {N} with 100M"): lambda: lead("text/100m"),
    ("README.md", rf"([+-]\d+) ± {N} points for EDA, which is ahead in {N} of {N} seeds \(p {N}\)"): lambda: (
        erasure(LAST, GATE)
    ),
    ("README.md", rf"seeds 10 to 17 had shown \(([+-]\d+) ± {N} points, {N} of {N} seeds, p {N}\)"): lambda: (
        erasure(MORE, GATE)
    ),
    ("README.md", rf"stays behind EDA, by {N} ± {N} points in seeds 18 to 33"): lambda: erasure(LAST, "kda")[
        :2
    ],
    (
        "protocol.md",
        rf"The pages make {N} tests\. .* over all of them: {N} do, with p up to {N}\.",
    ): all_tests,
}
"""What computes the numbers of a sentence, by its page and a pattern that must be there."""


def of_sentences() -> Checks:
    """The numbers of `SENTENCES`."""
    for (page, pattern), values in SENTENCES.items():
        found = re.search(pattern, (ROOT / page).read_text())
        assert found, f"{page} has no sentence {pattern}"
        for printed, value in zip(found.groups(), values(), strict=True):
            yield f'{page}, "{found[0][:60]}.."', printed.rstrip("."), value
