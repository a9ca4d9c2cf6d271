"""Files that no reader sees half written."""

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gdn_jax.commands.errors import RunError, fail

LARGEST = 2**30
"""Bytes of a file that is read whole, at most."""


def regular(name: str, flags: int) -> int:
    """Opens a regular file, as the `opener` of `open`: a pipe would wait for its other end, a device has no end.

    Raises:
      OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(name, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(name))
        raise OSError(errno.EINVAL, "not a regular file", str(name))
    return descriptor


def read_file(path: Path, most: int = LARGEST) -> bytes:
    """Returns the content of a regular file.

    Raises:
      OSError: it cannot be read, is no regular file, or has more than `most` bytes.
    """
    content = (
        bytearray()
    )  # piece by piece: one of /proc tells no size, and `read` would reserve all of `most`
    with open(path, "rb", opener=regular) as file:
        fits = os.fstat(file.fileno()).st_size <= most
        while fits and len(content) <= most and (piece := file.read(2**16)):
            content += piece
    if not fits or len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
    return bytes(content)


def is_finite(number: int | float) -> bool:
    """Says whether a number of a JSON file is a finite one, also as a float: whole ones may have any size."""
    return abs(number) <= sys.float_info.max


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
def naming(path: Path) -> Iterator[None]:
    """Names a file in the errors of the block: a full disk does not say which file has no room."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # else it has a text of its own
            error.filename = str(path)
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file under a temporary name, which takes the place of `path` once it is whole and on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed, or a link or a pipe of somebody else
    try:
        with naming(path), open(temporary, "xb") as file:
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
    # A pipe or a device is there too: the file would take its place.
    if path.is_symlink() or (path.exists() and not path.is_dir()):
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
      expected: says what an object that has these keys should hold and does not; None: it is as it should be.
    """

    def __init__(
        self,
        path: Path,
        keys: tuple[str, ...] = (),
        expected: Callable[[dict[str, Any]], str | None] = lambda record: None,
    ):
        self.path, self.keys, self.expected = path, keys, expected

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line and sees it to the disk."""
        with naming(self.path), open(self.path, "a", encoding="utf-8", opener=regular) as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[dict[str, Any]]:
        """Returns the objects of all complete lines.

        Raises:
          RunError: a line is not such an object; names the line.
          OSError: there is something that is no file of lines.
        """
        if not self.path.exists():
            return []
        lines = read_file(self.path).split(b"\n")[:-1]  # what follows the last newline is torn
        return [self._record(number, line) for number, line in enumerate(lines, 1)]

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = parse_json(line)
        except ValueError:  # also of bytes that are no text
            record = None
        if not isinstance(record, dict) or not record.keys() >= set(self.keys):
            keys = f" with {', '.join(self.keys)}" if self.keys else ""
            raise self.wrong(f"a JSON object{keys}", number, line[:60].decode(errors="replace"))
        if expected := self.expected(record):
            raise self.wrong(expected, number, line[:60].decode(errors="replace"))
        return record

    def wrong(self, expected: str, number: int, got: str) -> RunError:
        """Makes the error of a line."""
        return RunError(
            f"{self.path}: expected {expected} in line {number}, got {got!r}; delete the line to go on without it"
        )

    def write(self, records: list[dict[str, Any]]) -> None:
        """Replaces all lines."""
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in records))

    def mend(self) -> None:
        """Drops a torn last line, so that another can follow."""
        if self.path.exists() and not read_file(self.path).endswith(b"\n"):
            self.write(self.records())
