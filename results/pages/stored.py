"""Finished runs in a folder of results: what a claim compares, and the scores of its seeds.

A sweep lies in a folder as `gdn sweep` made it, or with other sweeps of its experiment in one folder:

    configs.json    their config.json by their names
    runs.jsonl      their lines, each with the name first, as `sweep`
    table.md        their tables, in the order of configs.json
    NAME.png        their figures

The name of a sweep is its path in the results: `recall/small` is a folder, `recall/start/delta` a sweep of the
experiment `recall/start`.
"""

import fnmatch
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gdn_jax.sweeps import report, summary
from gdn_jax.sweeps.summary import About, Row, Start
from results.pages import apart

HALF = "steps to half"
"""In the place of a size of the test: the steps after which a run has half of the first kind right."""


class Arm(NamedTuple):
    """One side of a comparison: runs that differ in their seed alone.

    Fields:
      sweep: folder of the runs under the results; with a * several, whose runs are taken together.
      mixer, scale: as in runs.jsonl.
      lr: learning rate; None: that of the lowest mean validation loss.
      start: write strength or time step at the start; None where the sweep does not vary it.
    """

    sweep: str
    mixer: str
    scale: int = 1
    lr: float | None = None
    start: float | None = None


class Place(NamedTuple):
    """Where a sweep lies.

    Fields:
      folder: path in the results.
      part: its name in the folder of an experiment, None in a folder of its own.
    """

    folder: str
    part: str | None

    @property
    def table(self) -> str:
        """Path of its table, with the heading in the table of an experiment."""
        return f"{self.folder}/table.md" + (f"#{self.part}" if self.part else "")

    @property
    def figure(self) -> str:
        """Path of its figure."""
        return f"{self.folder}/{self.part or 'figure'}.png"


class Results:
    """The runs under a folder of results, each file read once."""

    def __init__(self, root: Path):
        self.root = root
        self.places: dict[str, Place] = {}
        self._read: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
        self._records: dict[Arm, dict[int, dict[str, Any]]] = {}
        for path in sorted(root.rglob("runs.jsonl")):
            self._add(path.parent, path.read_text().splitlines())

    def _add(self, path: Path, texts: list[str]) -> None:
        """Reads the sweep or the sweeps of a folder."""
        folder, lines = str(path.relative_to(self.root)), [json.loads(text) for text in texts]
        if (path / "config.json").exists():
            self.places[folder] = Place(folder, None)
            self._read[folder] = json.loads((path / "config.json").read_text()), lines
            return
        configs = json.loads((path / "configs.json").read_text())
        parts: dict[str, list[dict[str, Any]]] = {name: [] for name in configs}
        for line in lines:
            parts[line.pop("sweep")].append(line)
        for name, config in configs.items():
            self.places[f"{folder}/{name}"] = Place(folder, name)
            self._read[f"{folder}/{name}"] = config, parts[name]

    @property
    def names(self) -> list[str]:
        """Names of all sweeps."""
        return [*self.places]

    def folder(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The config.json of a sweep and its lines of runs.jsonl."""
        return self._read[name]

    def tables(self) -> dict[str, str]:
        """The content of every table.md by its path in the results."""
        found: dict[str, str] = {}
        for name, place in self.places.items():
            config, lines = self.folder(name)
            table = (apart if apart.is_own(config) else report).make_table(config, lines)
            path = f"{place.folder}/table.md"
            if place.part is None:
                found[path] = table
                continue
            lower = re.sub(r"^#", "##", table, flags=re.MULTILINE)
            found[path] = found.get(path, f"# {place.folder}\n") + f"\n## {place.part}\n\n#{lower}"
        return found

    def commits(self, name: str) -> list[str]:
        """The commits that the runs of a folder name; those made outside a checkout name none."""
        found = {line.get("commit") for line in self.folder(name)[1]}
        return sorted({commit[:7] for commit in found if commit is not None})

    def matching(self, sweep: str) -> list[str]:
        """Folders that a sweep's name means."""
        return fnmatch.filter(self.names, sweep)

    def lines(self, sweep: str) -> list[dict[str, Any]]:
        """Lines of runs.jsonl of all folders that a sweep's name means."""
        return [line for name in self.matching(sweep) for line in self.folder(name)[1]]

    def about(self, sweep: str) -> About:
        """The facts that the table of a sweep tells of its task."""
        return About(**self.folder(self.matching(sweep)[0])[0]["about"])

    def _of(self, arm: Arm) -> list[dict[str, Any]]:
        """Lines of runs.jsonl of an arm at all its rates."""
        which = {"mixer": arm.mixer, "scale": arm.scale}
        return [x for x in self.lines(arm.sweep) if which.items() <= x.items() and begins(x) == arm.start]

    def rates(self, arm: Arm) -> list[float]:
        """Learning rates that an arm's runs have tried, the lowest first."""
        return sorted({line["lr"] for line in self._of(arm)})

    def records(self, arm: Arm) -> dict[int, dict[str, Any]]:
        """Lines of runs.jsonl by seed, none where nothing was run."""
        if arm not in self._records:
            self._records[arm] = self._at_its_rate(arm)
        return self._records[arm]

    def _at_its_rate(self, arm: Arm) -> dict[int, dict[str, Any]]:
        """Looks for `records`."""
        lines = self._of(arm)
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
        """Scores by seed, in % or in bits per byte, at a size of the test or at "validation"; at `HALF` steps."""
        records = self.records(arm)
        if at == HALF:
            return {seed: half_of(line["curve"]) for seed, line in records.items()}
        if not records:
            return {}
        metric, factor = self.about(arm.sweep).metric, self.about(arm.sweep).factor

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


def half_of(curve: Mapping[str, Any]) -> float:
    """The step at which a learning curve crosses half of the first kind right, on the line between its points."""
    steps, accuracy = curve["steps"], next(iter(curve["accuracy"].values()))
    step, score = 0, 0.0
    for next_step, next_score in zip(steps, accuracy, strict=True):
        if next_score is not None and next_score >= 0.5:
            return step + (0.5 - score) / (next_score - score) * (next_step - step)
        step, score = next_step, next_score or 0.0
    return math.inf


def begins(line: Mapping[str, Any]) -> float | None:
    """The write strength or the time step that a run starts with, where its sweep varies it."""
    return next((x for x in Start.of(dict(line)) if x is not None), None)
