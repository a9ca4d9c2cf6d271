"""Finished runs in a folder of results: what a claim compares, and the scores of its seeds."""

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gdn_jax.sweeps import summary
from gdn_jax.sweeps.summary import About, Row, Start


class Arm(NamedTuple):
    """One side of a comparison: runs that differ in their seed alone.

    Fields:
      sweep: folder of the runs under the results; with a * several, whose runs are taken together.
      mixer, scale: as in runs.jsonl.
      lr: learning rate; None: that of the lowest mean validation loss.
      start: write strength or time step at the start; None where the sweep does not vary it.
      at: size of the test, in the place of that of the comparison.
    """

    sweep: str
    mixer: str
    scale: int = 1
    lr: float | None = None
    start: float | None = None
    at: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Arm":
        """Reads an arm from its JSON object."""
        return cls(**values)


class Results:
    """The runs under a folder of results, each file read once."""

    def __init__(self, root: Path):
        self.root = root
        self.names = sorted(str(path.parent.relative_to(root)) for path in root.rglob("runs.jsonl"))
        self._read: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}

    def folder(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The config.json and the lines of runs.jsonl of a folder."""
        if name not in self._read:
            lines = (self.root / name / "runs.jsonl").read_text().splitlines()
            config = json.loads((self.root / name / "config.json").read_text())
            self._read[name] = config, [json.loads(line) for line in lines]
        return self._read[name]

    def commits(self, name: str) -> list[str]:
        """The commits that the runs of a folder name; those made outside a checkout name none."""
        found = {line.get("commit") for line in self.folder(name)[1]}
        return sorted({commit[:7] for commit in found if commit is not None})

    def matching(self, sweep: str) -> list[str]:
        """Folders that a sweep's name means."""
        return fnmatch.filter(self.names, sweep)

    def about(self, sweep: str) -> About:
        """The facts that the table of a sweep tells of its task."""
        return About(**self.folder(self.matching(sweep)[0])[0]["about"])

    def records(self, arm: Arm) -> dict[int, dict[str, Any]]:
        """Lines of runs.jsonl by seed, none where nothing was run."""
        lines = [line for name in self.matching(arm.sweep) for line in self.folder(name)[1]]
        which = {"mixer": arm.mixer, "scale": arm.scale}
        lines = [x for x in lines if which.items() <= x.items() and begins(x) == arm.start]
        if not lines:
            return {}
        lr = arm.lr
        if lr is None:
            starts = [Start.of(lines[0])]
            lr = summary.rows(lines, [arm.mixer], [arm.scale], self.about(arm.sweep).metric, starts)[0].lr
        return {x["seed"]: x for x in sorted(lines, key=lambda x: x["seed"]) if x["lr"] == lr}

    def row(self, arm: Arm) -> Row:
        """The row of an arm's runs, at their learning rate."""
        lines = [*self.records(arm).values()]
        metric, starts = self.about(arm.sweep).metric, [Start.of(lines[0])]
        return summary.rows(lines, [arm.mixer], [arm.scale], metric, starts)[0]

    def scores(self, arm: Arm, at: str) -> dict[int, float]:
        """Scores by seed, in % or in bits per byte, at a size of the test or at "validation"."""
        records = self.records(arm)
        metric = self.about(arm.sweep).metric if records else ""
        factor = 100 if metric == "accuracy" else 1

        def score(line: dict[str, Any]) -> float:
            value = line[f"val_{metric}"] if at == "validation" else line[f"test_{metric}"][at]
            return float("inf") if value is None else factor * value

        return {seed: score(line) for seed, line in records.items()}

    def learned(self, arm: Arm) -> dict[int, bool]:
        """Whether each seed has learned something; of a text all have."""
        records = self.records(arm)
        answers = self.about(arm.sweep).answers if records else None
        return {
            seed: answers is None or summary.has_learned(line["val_loss"], answers)
            for seed, line in records.items()
        }


def begins(line: Mapping[str, Any]) -> float | None:
    """The write strength or the time step that a run starts with, where its sweep varies it."""
    return next((x for x in Start.of(dict(line)) if x is not None), None)
