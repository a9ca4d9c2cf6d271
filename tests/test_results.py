"""The page of findings: every number in it is computed again from the runs beside it.

A cell under a mixer is the mean and standard error of the sweep that its row links to, at the size "asked at". A
number of the text is an option or the chance of a sweep that its section links to, or a comment derives it:

    <!-- 34: spread("recall_rewrite_h200", "gated_delta_net", 32) -->

A bound is rounded so that it is one: where the text says "at least 99.2", the comment begins with `at least 99.2:`.
`seeds`, `mean` and `spread` take a folder, a mixer, the size of the test and the scale of the model, 1 without it;
scores are in %, or in bits per byte. The size "validation" is the validation set. A row of a sweep with several
scales has a column "scale". A cell under "A − B" is the mean and standard error of what the mixer A has more than B,
seed by seed, bold where that is more than three standard errors; `differences`, `growth` and `sigmas` say the same in
comments, `deeper` what a mixer has more at one scale than at another one, `gain` in one sweep than in another one,
and `in_errors` how many standard errors the mean of such numbers is;
`run`, `scores` and `config` give what the files have.

A row with a column "learning rate" is one of the linked table.md; its column "each seed at N" has the scores at N.
In comments `at` gives the scores of the seeds at a learning rate and a start, `learned` how many have learned
something, `halves` their steps until half of the first kind is right, `more` the difference of two `at`, seed by
seed, and `interval` half of the 95 % t interval of a mean.
"""

import functools
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from gdn_jax.analysis import memory_horizon
from gdn_jax.sweeps import grid, summary
from gdn_jax.sweeps import options as sweep_options
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.options import from_json

RESULTS = Path(__file__).parent.parent / "results"
FOLDERS = sorted(path.parent.name for path in RESULTS.glob("*/runs.jsonl"))
LABELS = {mixer.label: name for name, mixer in MIXERS.items()}
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)")
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)]*)\)")


@functools.cache
def folder(name):
    """config.json and the lines of runs.jsonl."""
    lines = (RESULTS / name / "runs.jsonl").read_text().splitlines()
    return json.loads((RESULTS / name / "config.json").read_text()), [json.loads(line) for line in lines]


@functools.cache
def scores(name):
    """{(mixer, scale): {size: scores of the seeds}} at the learning rate of the least mean validation loss."""
    config, lines = folder(name)
    o, metric = config["options"], next(key for key in lines[0] if key.startswith("test_"))
    trying = range(o["lr_seeds"] or o["seeds"])
    found = {}
    for mixer, scale in itertools.product(o["mixers"], o["scales"]):
        runs = {(x["lr"], x["seed"]): x for x in lines if (x["mixer"], x["scale"]) == (mixer, scale)}
        losses = {lr: np.mean([runs[lr, seed]["val_loss"] for seed in trying]) for lr in o["lrs"]}
        best = [runs[min(losses, key=losses.get), seed] for seed in range(o["seeds"])]
        best = [x[metric] | {"validation": x[metric.replace("test_", "val_")]} for x in best]
        factor = 100 if metric == "test_accuracy" else 1
        found[mixer, scale] = {size: [factor * seed[size] for seed in best] for size in best[0]}
    return found


def at(name, mixer, lr, start, size, scale=1):
    """Scores in % of the seeds at a learning rate and a start, a write strength or a time step; None for neither."""
    which = {"mixer": mixer, "lr": lr, "scale": scale}
    runs = [x for x in folder(name)[1] if which.items() <= x.items() and start == begins(x)]
    assert len(runs) == folder(name)[0]["options"]["seeds"]
    return [100 * x["test_accuracy"][str(size)] for x in sorted(runs, key=lambda x: x["seed"])]


def begins(line):
    """What a run starts with, or None."""
    return next((x for x in summary.Start.of(line) if x is not None), None)


def linked_row(name, row):
    """The row of a folder's table.md that a row of the page repeats, and its column of seeds."""
    names = {"mixer", "write start", "time step", "learning rate"}
    rows = [*tables((RESULTS / name / "table.md").read_text())]
    found = next(x for x in rows if all(x[key] == row[key] for key in names & {*x}))
    [start] = [float(found[key]) for key in ("write start", "time step") if key in found]
    for heading in row:
        if heading.startswith("each seed at "):
            values = at(name, LABELS[row["mixer"]], float(row["learning rate"]), start, heading.split()[3])
            found[heading] = " ".join(f"{x:.0f}" for x in values)
    return found


def error(values):
    """Standard error of the mean."""
    return np.std(values, ddof=1) / len(values) ** 0.5


def cell(values, digits):
    """Mean and standard error as the page writes them."""
    return f"{np.mean(values):.{digits}f} ± {error(values):.{digits}f}"


def differences(name, a, b, size, scale=1):
    """Scores of a mixer less those of another one, for every seed: the seeds of a sweep share their batches."""
    one, other = (scores(name)[mixer, scale][str(size)] for mixer in (a, b))
    return np.subtract(one, other)


@functools.cache
def facts(name):
    """Numbers that the text may say of a sweep without a derivation: its options and what a guess scores."""
    config, _ = folder(name)
    values = [
        x for value in config["options"].values() for x in (value if isinstance(value, list) else [value])
    ]
    said = {f"{x:g}" for x in values if isinstance(x, int | float)}
    return said | {f"{100 * x:.{digits}f}" for x in about(name).baselines.values() for digits in (0, 1)}


def about(name):
    """What the table says of a sweep's task."""
    return summary.About(**folder(name)[0]["about"])


def derived(text):
    """Numbers that comments of a text derive, with the word of a bound, and those that are not what is derived."""

    def seeds(name, mixer, size, scale=1):
        return scores(name)[mixer, scale][str(size)]

    def growth(name, a, b, first, last):
        """How much more a is above b at one size than at another one, or a above itself there, for every seed."""
        if b is None:
            return np.subtract(seeds(name, a, last), seeds(name, a, first))
        return differences(name, a, b, last) - differences(name, a, b, first)

    def deeper(name, mixer, size, first, last):
        """Scores at one scale less those at another one, for every seed."""
        return np.subtract(seeds(name, mixer, size, last), seeds(name, mixer, size, first))

    def gain(name, before, mixer, size, scale=1, other=None):
        """Scores in one sweep less those in another one, there perhaps of another mixer, for every seed."""
        return np.subtract(seeds(name, mixer, size, scale), seeds(before, other or mixer, size, scale))

    def in_errors(values):
        """The mean, in its standard errors."""
        return np.mean(values) / error(values)

    def sigmas(*which):
        """Standard errors between two mixers."""
        return in_errors(differences(*which))

    def run(name, mixer, lr, seed):
        [line] = [x for x in folder(name)[1] if (x["mixer"], x["lr"], x["seed"]) == (mixer, lr, seed)]
        return line

    def trained_bytes(name):
        o = folder(name)[0]["options"]
        return o["steps"] * o["batch_size"] * o["length"]

    def row(name, mixer, lr, start):
        lines = [x for x in folder(name)[1] if (x["mixer"], x["lr"], begins(x)) == (mixer, lr, start)]
        [found] = summary.rows(lines, [mixer], starts=[summary.Start.of(lines[0])])
        return found

    def runs_of_a_file(finding):
        """How many runs a file of options asks for."""
        path = RESULTS / "configs" / f"{finding}.full.json"
        task = json.loads(path.read_text())["task"].split()[1]
        return grid.count(sweep_options.from_file(task, path, sweep_options.GridOptions()))

    names = {
        "at": at,
        "learned": lambda *which: len(row(*which).learned(about(which[0]).answers).losses),
        "halves": lambda *which: [np.inf if x is None else x for x in row(*which).halfway()],
        "middle": np.median,
        "runs_of_a_file": runs_of_a_file,
        "runs": lambda name: folder(name)[1],
        "more": lambda one, other, size: np.subtract(at(*one, size), at(*other, size)),
        "interval": lambda values: summary.interval([*values]),
        "memory_horizon": lambda width, beta: float(memory_horizon(width, beta=beta)),
        "average": np.mean,
        "error": error,
        "in_errors": in_errors,
        "differences": differences,
        "growth": growth,
        "deeper": deeper,
        "gain": gain,
        "sigmas": sigmas,
        "scores": scores,
        "run": run,
        "trained_bytes": trained_bytes,
        "config": lambda name: folder(name)[0],
        "seeds": seeds,
        "mean": lambda *which: np.mean(seeds(*which)),
        "spread": lambda *which: np.ptp(seeds(*which)),
        "others": lambda name, *but: {mixer for mixer, _ in scores(name)} - {*but},
    }
    right, wrong = set(), []
    for bound, said, expression in re.findall(r"<!-- (at least |at most |)([\d.]+): (.*) -->", text):
        value = eval(expression, names)  # of a file of this project
        digits = len(said.partition(".")[2])
        rounded = {"at least ": np.floor, "at most ": np.ceil, "": np.round}[bound]
        got = f"{rounded(value * 10**digits) / 10**digits:.{digits}f}"
        if got == said:
            right.add(bound + said)
        else:
            wrong.append((bound + said, expression, got))
    return right, wrong


def sections(page):
    """Each section's text and the folders that it links to."""
    for text in re.split(r"(?m)^## ", page):
        yield text, {link.split("/")[0] for _, link in LINK.findall(text)} & {*FOLDERS}


def tables(text):
    """Rows of the tables of a text, as dicts from the heading to the cell."""
    for block in re.findall(r"(?m)(?:^\|.*\n)+", text + "\n"):
        heading, _, *rows = [
            [x.strip() for x in line.strip()[1:-1].split("|")] for line in block.splitlines()
        ]
        for row in rows:
            yield dict(zip(heading, row, strict=True))


def wrong_numbers(page):
    """What the page says and the runs do not."""
    wrong = []
    for text, folders in sections(page):
        checked = set()
        for row in tables(text):
            [linked] = {link.split("/")[0] for _, link in LINK.findall(row.get("sweep", "[](-)"))}
            if linked not in FOLDERS:
                continue
            config, lines = folder(linked)
            repeated = linked_row(linked, row) if "learning rate" in row else {}
            for heading, got in row.items():
                wanted, shown = repeated.get(heading), got.strip("*")
                digits = 1 if "test_accuracy" in lines[0] else 3
                if " − " in heading:
                    apart = differences(linked, *(LABELS[x] for x in heading.split(" − ")), row["asked at"])
                    wanted, shown = cell(apart, digits), got
                    if abs(np.mean(apart)) > 3 * error(apart):
                        wanted = f"**{wanted}**"
                elif heading in LABELS:
                    which = LABELS[heading], int(row.get("scale", "1"))
                    seeds = scores(linked).get(which, {}).get(row["asked at"])
                    wanted = "" if seeds is None else cell(seeds, digits)
                elif heading == "trained at":
                    wanted = str(config["options"]["length"])
                elif heading == "runs":
                    wanted = str(len(lines))
                elif heading == "seconds, added up":
                    wanted = f"{sum(line['wall']['seconds'] for line in lines):.0f}"
                if wanted is not None:
                    checked.add(got)
                    if shown != wanted:
                        wrong.append((linked, heading, got, wanted))
        for got in sorted(checked, key=len, reverse=True):
            text = text.replace(f"| {got} ", "| ") if got else text
        right, failed = derived(text)
        wrong += failed
        said = {words.split()[-1] for words in right}
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        bounds = re.findall(r"\b(at\s(?:least|most))\s(\d+(?:\.\d+)?)", text)
        wrong += [(*bound, "no bound") for bound in bounds if " ".join(" ".join(bound).split()) not in right]
        text = LINK.sub(lambda link: link[1] if link[2].split("/")[0] in FOLDERS else "", text)
        text = re.sub(r"`[^`]*`|95\s%\st\sinterval", "", text)
        said = said.union(*(facts(name) for name in folders))
        wrong += [(*sorted(folders), number) for number in NUMBER.findall(text) if number not in said]
    return wrong


def test_every_number_of_the_page_is_in_the_runs():
    page = (RESULTS / "README.md").read_text()
    assert {name for _, folders in sections(page) for name in folders} == {*FOLDERS}
    assert wrong_numbers(page) == []


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("**99.1 ± 0.9**", "**99.1 ± 0.8**"),  # a standard error
        ("| 4.2 ± 0.5 |", "| 4.3 ± 0.5 |"),  # a mean
        ("| 128 | 50.1", "| 64 | 50.1"),  # where it was asked
        ("(Gated DeltaNet 66 to 99.6 %)", "(Gated DeltaNet 67 to 99.6 %)"),  # a seed
        ("loses only 2 points", "loses only 17 points"),  # a difference
        ("<!-- 2: mean(", "<!-- 3: mean("),  # its derivation
        ("| CPU | 36 | 355 |", "| CPU | 37 | 355 |"),
        ("**0.061 ± 0.019**", "**0.061 ± 0.018**"),  # the standard error of a difference
        ("| 0.061 ± 0.024 |", "| **0.061 ± 0.024** |"),  # a claim that the seeds do not allow
        ("| **0.058 ± 0.014** |", "| 0.058 ± 0.014 |"),
        ("(13.3 standard errors)", "(13.4 standard errors)"),  # of two seeds
        ("by 7.1 at 128", "by 7.2 at 128"),  # between two scales
        ("1.420 against", "1.421 against"),  # a single run
        ("least 3.2 standard errors", "least 3.3 standard errors"),
        ("least 99.2 % of 64 pairs", "least 99.3 % of 64 pairs"),  # rounded, but no bound
        ("recall 80 to 93 %", "recall at least 80 %"),  # a number, but of no bound
        ("(4.7 standard errors)", "(4.6 standard errors)"),  # at a scale
        ("(5.8 standard errors)", "(5.9 standard errors)"),  # between two sweeps
        ("| **45.0 ± 6.8** |", "| 45.0 ± 6.8 |"),  # a claim that the page does not make
        ("by 27 to 60 points", "by 28 to 60 points"),  # of the least of the seeds
        ("| 49 66 6 79 78 |", "| 49 66 7 79 78 |"),  # a seed in a table
        ("| 4 of 5 | 6250 (3750 to -) |", "| 5 of 5 | 6250 (3750 to -) |"),  # how many have learned
        ("| 7250 (4750 to -) |", "| 7250 (4500 to -) |"),  # when
        ("by 42 ± 29 points", "by 42 ± 28 points"),  # an interval
    ],
)
def test_a_wrong_number_is_noticed(right, wrong):
    page = (RESULTS / "README.md").read_text()
    assert page.count(right) == 1
    assert len(wrong_numbers(page.replace(right, wrong))) > 0


@pytest.mark.parametrize("path", sorted((RESULTS / "configs").iterdir()), ids=lambda path: path.stem)
def test_configs_fit(path):
    """Every file of options can be used, is of the size that its name says, and is named on the page."""
    options = sweep_options.from_file(
        json.loads(path.read_text())["task"].split()[1], path, sweep_options.GridOptions()
    )
    sweep_options.check(options)
    finding, size = path.stem.split(".")
    assert options.sweep.size == size
    assert f"configs/{finding}" in (RESULTS / "README.md").read_text()
    if finding not in ("text_100m", "text_30m", "text_30m_seeds"):
        assert options.sweep.seeds >= 3


@pytest.mark.parametrize("name", FOLDERS)
def test_tables_are_those_of_the_runs(name):
    """table.md is what the program makes of runs.jsonl today, and no run of the grid is left out."""
    config, lines = folder(name)
    default = sweep_options.PRESETS[config["task"].split()[1]]["small"]
    options = from_json(default, config["options"], sweep_options.GridOptions())
    o = options.sweep
    runs = {grid.as_run(x) for x in lines}
    parts = itertools.product(o.mixers, o.scales)
    assert runs == {x for part in parts for x in grid.wanted(options, *part, lines, about(name).metric)}
    assert len(lines) == len(runs) == grid.count(options)
    asked = lines, o.mixers, o.scales, about(name).metric, grid.starts(options)
    sizes = {scale: sweep_options.scaled_model(options, scale) for scale in o.scales}
    table = summary.markdown(summary.rows(*asked), lines, config, about(name), sizes)
    if o.curve_every and len(o.lrs) > 1:
        table += "\n" + summary.learning_rates(summary.rows_by_lr(*asked), about(name))
    assert (RESULTS / name / "table.md").read_text() == table
