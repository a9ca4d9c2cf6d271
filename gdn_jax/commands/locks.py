"""One process at a time owns a folder, or a part of its work.

The owner holds a lock of the library `filelock` on a file `lock` in the folder, which says who it is: host, process,
since when. The kernel lets go of it however the owner ends, so a process of the same host takes over what a dead one
left. The owner on another host cannot be asked: its lock is respected.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gdn_jax.commands.errors import RunError
from gdn_jax.commands.files import naming, parse_json, read_file

NAME = "lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system without locks. A file there belongs to whoever made it, also when that process is gone."""
_UNKNOWN = {"host": "an unknown host", "process": "?", "since": "?"}


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
    lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    with alone(folder):
        try:
            path.touch(exist_ok=False)
            made, before = True, None
        except FileExistsError:
            made, before = False, _owner(path)
        here = before is None or before["host"] == socket.gethostname()
        try:
            if not here:
                raise Timeout(str(path))
            lock.acquire()
        except Timeout:
            raise Taken(_refusal(path, before or _owner(path) or _UNKNOWN, here)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if not made:
                raise Taken(_refusal(path, before or _UNKNOWN, here)) from None
        ours = _sign(path)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(ours, path.stat()):
                path.unlink()
        lock.release()


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


def _sign(path: Path) -> os.stat_result:
    """Writes into a lock who this process is; returns which file it is."""
    owner = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    with naming(path), open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(owner) + "\n")
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno())


def _owner(path: Path) -> dict[str, Any] | None:
    """Reads who the owner of a lock is; None without a lock."""
    try:
        owner = parse_json(read_file(path))
        return {name: owner[name] for name in _UNKNOWN}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return _UNKNOWN


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
