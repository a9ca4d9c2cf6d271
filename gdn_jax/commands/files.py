"""Files that no reader sees half written."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gdn_jax.commands.errors import RunError, fail

MOST_BYTES = 10**8
"""Size of a file that is read whole, at most, where the reader says nothing else."""


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Returns the content of an ordinary file. A pipe or a device, which have no end, is refused without waiting.

    Raises:
      OSError: there is none, it is of another kind, or it has more than `most` bytes; names the file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "No ordinary file", str(path))
        if status.st_size <= most:
            content = bytearray()  # the file may have grown since, and one of /proc tells no size
            while len(content) <= most and (chunk := os.read(descriptor, 2**16)):
                content += chunk
            if len(content) <= most:
                return bytes(content)
        raise OSError(errno.EFBIG, f"More than {most} bytes", str(path))
    finally:
        os.close(descriptor)


def parse_json(text: str | bytes) -> Any:
    """`json.loads` with one error for every damage.

    Raises:
      ValueError: the text is no JSON, no text at all, or nested too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("objects or lists are nested too deep") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file under a temporary name, which takes the place of `path` once it is whole and on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk it would take the room of others
        raise


def write_text(path: Path, content: str) -> None:
    """Writes a whole text file."""
    with replacing(path) as file:
        file.write(content.encode())


def check_writable(name: str, path: Path) -> None:
    """Raises RunError, before any work, unless the file that an option names is new and can be written."""
    folder = path.parent
    if path.is_file() or path.is_symlink():
        fail(name, "a file that does not exist", path)
    if not folder.is_dir():
        fail(name, "a file in a folder that exists", path)
    if path.is_dir() or not os.access(folder, os.W_OK):
        fail(name, "a file that can be written", path)


class JsonLines:
    """A file of JSON objects, one a line, that grows a line at a time.

    Args:
      path: of the file.
      keys: what every object holds.
    """

    def __init__(self, path: Path, keys: tuple[str, ...] = ()):
        self.path, self.keys = path, keys

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line and sees it to the disk."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[dict[str, Any]]:
        """Returns the objects of all complete lines.

        Raises:
          RunError: a line is not such an object; names the line.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn
        return [self._record(number, line) for number, line in enumerate(lines, 1)]

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = parse_json(line)
        except ValueError:  # also of bytes that are no text
            record = None
        if not isinstance(record, dict) or not record.keys() >= set(self.keys):
            keys = f" with {', '.join(self.keys)}" if self.keys else ""
            raise RunError(
                f"{self.path}: expected a JSON object{keys} in line {number}, got "
                f"{line[:60].decode(errors='replace')!r}; delete the line to go on without it"
            )
        return record

    def write(self, records: list[dict[str, Any]]) -> None:
        """Replaces all lines."""
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in records))

    def mend(self) -> None:
        """Drops a torn last line, so that another can follow."""
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self.write(self.records())
