"""The run folder.

    config.json     options, data, model size, baselines, versions; written once
    metrics.jsonl   one JSON object a line; all but `wall` is the same after a resume
    checkpoints/    see `checkpoints`
    result.json     metrics at the end
    curves.png      see `curves`
    sample.txt      what the model writes

Whole files are written under a temporary name and renamed. metrics.jsonl grows a line at a time; a torn last
line is dropped when the run is resumed.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from gdn_jax.commands.errors import RunError
from gdn_jax.commands.files import JsonLines, write_text


class RunFolder:
    """Files of one run; see the module docstring."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._metrics = JsonLines(path / "metrics.jsonl")

    @classmethod
    def create(cls, path: Path | None, task: str, config: dict[str, Any]) -> "RunFolder":
        """Creates a folder that did not exist; without a path, the first free runs/<task>-<number>.

        Raises:
          RunError: it exists, or cannot be created.
        """
        try:
            if path is not None:
                path.mkdir(parents=True)
            else:
                number = 1
                while path is None:
                    with contextlib.suppress(FileExistsError):
                        candidate = Path("runs", f"{task.replace(' ', '-')}-{number}")
                        candidate.mkdir(parents=True)
                        path = candidate
                    number += 1
        except OSError as error:
            check_free(path)
            raise RunError(f"--out: cannot create {path or 'runs'}: {error.strerror}") from None
        run = cls(path)
        run.write_json("config.json", config)
        return run

    @classmethod
    def open(cls, path: Path | None) -> tuple["RunFolder", dict[str, Any]]:
        """Opens the folder of an earlier run and reads its config.json.

        Raises:
          RunError: there is no such run.
        """
        if path is None:
            raise RunError("--resume: expected --out with the folder to continue, got no --out")
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            if not isinstance(config.get("options"), dict) or not isinstance(config.get("data"), dict):
                raise ValueError
        except OSError as error:
            raise RunError(
                f"--resume: expected a run folder, got {path}: {error.strerror} (config.json)"
            ) from None
        except (ValueError, AttributeError):
            raise RunError(
                f"--resume: cannot read {path / 'config.json'} as the configuration of a run"
            ) from None
        return cls(path), config

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Writes a JSON file of the folder."""
        write_text(self.path / name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl and sees it to the disk."""
        self._metrics.append(record)

    def records(self) -> list[dict[str, Any]]:
        """Complete lines of metrics.jsonl."""
        return self._metrics.records()

    def rewind(self, step: int) -> None:
        """Drops the lines after a step, and a torn one."""
        self._metrics.write([record for record in self.records() if record["step"] <= step])


def check_free(path: Path | None) -> None:
    """Raises RunError when the folder of a new run exists."""
    if path is not None and (path.exists() or path.is_symlink()):
        raise RunError(
            f"--out: expected a folder that does not exist, got {path} (add --resume to continue a run)"
        )
