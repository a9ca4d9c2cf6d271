"""One process at a time owns a folder, or a part of its work.

The owner keeps a file `lock` in the folder that says who it is: host, process, since when. One process at a time
looks for the file and makes it. As long as its owner lives, the kernel keeps a lock (flock) on it. So a process of
the same host can tell whether an owner is gone, however it ended, and takes over what a dead one left. The owner on
another host cannot be asked: its lock is respected.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from gdn_jax.commands.errors import RunError
from gdn_jax.commands.files import naming, parse_json, regular

NAME = "lock"
_MOST = 2**16  # characters that are read of a lock


class Taken(RunError):
    """Another process is the owner."""


@contextlib.contextmanager
def owned(folder: Path, part: str | None = None) -> Iterator[None]:
    """Owns a folder, or a part of the work in it, until the end of the block.

    Args:
      folder: that exists.
      part: name of a part; its owner is found in the file `lock.PART`.

    Raises:
      Taken: another process owns it, or a lock of another host is in the way; names the owner and the way out.
      OSError: the lock is no regular file, or cannot be made.
    """
    path = folder / (NAME if part is None else f"{NAME}.{part}")
    with alone(folder):
        file = _take(path)
    with file:
        try:
            yield
        finally:
            if _same(file, path):
                path.unlink()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits until no other process is in such a block with the same folder, and lets none in before its end.

    For moments. On a file system without such locks it does not wait.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _take(path: Path) -> TextIO:
    """Makes the lock, open and held: a free one, or one that a dead process of this host has left."""
    while True:
        with (
            contextlib.suppress(FileNotFoundError),
            open(path, "r+", encoding="utf-8", errors="replace", opener=regular) as theirs,
        ):
            owner = _owner(theirs.read(_MOST))
            here = owner["host"] == socket.gethostname()
            if not here or not _hold(theirs):
                raise Taken(_refusal(path, owner, here))
            path.unlink()
        # On a file system where `alone` does not wait, another process may be the first.
        with contextlib.suppress(FileExistsError), naming(path):
            return _write(path)


def _write(path: Path) -> TextIO:
    """Makes a file that says who this process is, open and held."""
    owner = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    file = open(path, "x", encoding="utf-8")
    _hold(file)
    file.write(json.dumps(owner) + "\n")
    file.flush()
    os.fsync(file.fileno())
    return file


def _hold(file: TextIO) -> bool:
    """Locks an open file for the life of this process; False if another one has it, or if none can tell."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without such locks
        return False
    return True


def _same(file: TextIO, path: Path) -> bool:
    """Says whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _owner(text: str) -> dict[str, Any]:
    try:
        owner = parse_json(text)
        return {name: owner[name] for name in ("host", "process", "since")}
    except (ValueError, KeyError, TypeError):
        return {"host": "an unknown host", "process": "?", "since": "?"}


def _refusal(path: Path, owner: dict[str, Any], here: bool) -> str:
    who = f"process {owner['process']} on {owner['host']} since {owner['since']}"
    advice = (
        "wait for it or stop it"
        if here
        else f"from {socket.gethostname()} it cannot be seen whether it still runs: if it does not, delete {path}"
    )
    return (
        f"{path.parent}: expected a folder that no other process works in, got one owned by {who}; {advice}"
    )
