"""The run folder.

    config.json     options, data, model size, baselines, versions; written again only where the data has moved
    metrics.jsonl   one JSON object a line; all but `wall` is the same after a resume
    checkpoints/    see `checkpoints`
    result.json     metrics at the end
    curves.png      see `curves`
    sample.txt      what the model writes
    lock            who works on the run, see `gdn_jax.commands.locks`
    damaged/        checkpoints that could not be read when the run was resumed

Whole files are written under a temporary name and renamed. metrics.jsonl grows a line at a time; a torn last
line is dropped when the run is resumed.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from gdn_jax.commands.errors import RunError, printable
from gdn_jax.commands.files import JsonLines, is_finite, parse_json, read_file, write_text


class RunFolder:
    """Files of one run; see the module docstring."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints, self.damaged = path / "checkpoints", path / "damaged"
        self._metrics = JsonLines(path / "metrics.jsonl", ("step",))

    @classmethod
    def create(cls, path: Path | None, task: str) -> "RunFolder":
        """Creates a folder that did not exist; without a path, the first free runs/<task>-<number>.

        Raises:
          RunError: it exists, or cannot be created.
        """
        _check_name("--out", path or Path())
        try:
            if path is not None:
                path.mkdir(parents=True)
            else:
                number = 1
                while path is None:
                    candidate = Path("runs", f"{task.replace(' ', '-')}-{number}")
                    try:
                        candidate.mkdir(parents=True)
                        path = candidate
                    except FileExistsError:
                        if not (candidate.exists() or candidate.is_symlink()):  # `runs` is a link to nothing
                            raise
                    number += 1
        except OSError as error:
            check_free(path)
            raise RunError(f"--out: cannot create {path or 'runs'}: {error.strerror}") from None
        return cls(path)

    @classmethod
    def open(cls, path: Path | None, **more: type) -> tuple["RunFolder", dict[str, Any]]:
        """Opens the folder of an earlier run and reads its config.json, with escapes for what a terminal would obey.

        Args:
          path: the folder.
          more: what config.json holds beside the common entries, by name and type.

        Raises:
          RunError: there is no such run, or its config.json lacks something.
        """
        if path is None:
            raise RunError("--resume: expected --out with the folder to continue, got no --out")
        _check_name("the run folder", path)
        file = path / "config.json"
        try:
            config = parse_json(read_file(file))
        except OSError as error:
            raise RunError(f"expected a run folder, got {path}: {error.strerror} (config.json)") from None
        except ValueError as error:
            raise RunError(f"{file}: expected the configuration of a run, got no JSON: {error}") from None
        if not isinstance(config, dict):
            raise RunError(f"{file}: expected the configuration of a run, got {type(config).__name__}")
        wanted = {"task": str, "options": dict, "data": dict, "versions": dict} | more
        found = {name: config.get(name) for name in wanted}
        if isinstance(found["versions"], dict):
            found |= {f"versions: {name}": found["versions"].get(name) for name in ("device", "jax")}
        for name, value in found.items():
            if not isinstance(value, kind := wanted.get(name, str)):
                raise RunError(f"{file}: expected {name} of type {kind.__name__}, got {value}")
        config["versions"] = {name: printable(str(value)) for name, value in config["versions"].items()}
        if "command" in more:
            config["command"] = printable(config["command"])
        return cls(path), config

    @classmethod
    def follow(cls, path: Path, scratch: Path) -> "RunFolder":
        """Opens a run whose first process is another one: checkpoints are shared, all else goes to scratch."""
        run, lines = cls(scratch), path / "metrics.jsonl"
        run.checkpoints, run.damaged = path / "checkpoints", path / "damaged"
        if lines.exists():
            shutil.copy(lines, scratch)
        return run

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Writes a JSON file of the folder."""
        write_text(self.path / name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl and sees it to the disk."""
        self._metrics.append(record)

    def records(self) -> list[dict[str, Any]]:
        """Returns the complete lines of metrics.jsonl.

        Raises:
          RunError: a line is not one that a run writes: a JSON object of numbers with a step after those before.
        """
        records, before = self._metrics.records(), 0
        for number, record in enumerate(records, 1):
            for name, value in record.items():
                kinds = (int,) if name == "step" else (int, float)
                if name != "wall" and not (type(value) in kinds and is_finite(value)):
                    raise self._metrics.wrong(f"a number for {name}", number, str(value)[:60])
            if record["step"] <= before:
                raise self._metrics.wrong(f"a step after {before}", number, str(record["step"]))
            before = record["step"]
        return records

    def rewind(self, step: int | None) -> None:
        """Drops the lines after the step of a checkpoint, and a torn one.

        Raises:
          RunError: there are lines and no checkpoint (None): all lines would be gone.
        """
        if step is None and (last := max((record["step"] for record in self.records()), default=0)):
            raise RunError(
                f"{self.checkpoints}: expected a checkpoint, as metrics.jsonl goes to step {last}, got none; "
                f"bring the checkpoints back, or delete metrics.jsonl to begin again"
            )
        self._metrics.write([record for record in self.records() if record["step"] <= (step or 0)])


def _check_name(what: str, path: Path) -> None:
    """Raises RunError for a folder whose whole name is not UTF-8, which Orbax cannot write to."""
    try:
        os.fsencode(path.absolute()).decode()
    except UnicodeDecodeError:
        raise RunError(f"{what}: expected a name in UTF-8, got {str(path.absolute())!r}") from None


def check_free(path: Path | None) -> None:
    """Raises RunError when the folder of a new run exists."""
    if path is not None and (path.exists() or path.is_symlink()):
        raise RunError(
            f"--out: expected a folder that does not exist, got {path} (add --resume to continue a run)"
        )
