"""The run folder.

    config.json     options, data, model size, baselines, versions; written once
    metrics.jsonl   one JSON object a line; all but `wall` is the same after a resume
    checkpoints/    see `checkpoints`
    result.json     metrics at the end
    curves.png      see `plotting`
    sample.txt      what the model writes

Whole files are written under a temporary name and renamed. metrics.jsonl grows a line at a time; a torn last
line is dropped when the run is resumed.
"""

import contextlib
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from gdn_jax.experiments.errors import RunError


def write_text(path: Path, content: str) -> None:
    """Writes a file under a temporary name, then renames it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class JsonLines:
    """A file of JSON objects, one a line, that grows a line at a time."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line and sees it to the disk."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[dict[str, Any]]:
        """Complete lines."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn
        return [json.loads(line) for line in lines]

    def write(self, records: list[dict[str, Any]]) -> None:
        """Replaces all lines."""
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in records))

    def mend(self) -> None:
        """Drops a torn last line, so that another can follow."""
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self.write(self.records())


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


def versions() -> dict[str, str]:
    """What a number may depend on beside the options: versions and the device."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
    }


def check_free(path: Path | None) -> None:
    """Raises RunError when the folder of a new run exists."""
    if path is not None and (path.exists() or path.is_symlink()):
        raise RunError(
            f"--out: expected a folder that does not exist, got {path} (add --resume to continue a run)"
        )
