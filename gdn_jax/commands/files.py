"""Files that are never seen half written."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file under a temporary name, which takes the place of `path` once it is whole and on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_text(path: Path, content: str) -> None:
    """Writes a whole text file."""
    with replacing(path) as file:
        file.write(content.encode())


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
