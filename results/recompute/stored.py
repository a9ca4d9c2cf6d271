"""The stored runs: which of them a row is of, and the scores of a run."""

import fnmatch
import json
import math
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
