"""What every command does with files: whole ones, lines, and locks that survive their owners."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gdn_jax.commands import files, locks
from gdn_jax.commands.errors import RunError, os_line
from gdn_jax.commands.files import JsonLines, check_writable, read_file, write_text
from gdn_jax.commands.locks import Taken, alone, owned


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_file_is_old_or_new(tmp_path, monkeypatch, moment):
    """An error before the rename leaves the old content, and nothing beside it."""
    path = tmp_path / "file"
    write_text(path, "old")

    def stop(*arguments):
        assert path.read_text() == "old"
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, moment, stop)
        with pytest.raises(OSError, match="the disk is full"):
            write_text(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    write_text(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    lines = JsonLines(tmp_path / "lines")
    for name, write in (
        ("file", lambda: write_text(tmp_path / "file", "x")),
        ("lines", lambda: lines.append({})),
    ):
        with pytest.raises(OSError) as found:
            write()
        assert os_line(found.value) == f"{tmp_path / name}: No space left on device"
    with pytest.raises(OSError) as found, owned(tmp_path):
        pass
    assert os_line(found.value) == f"{tmp_path / 'lock'}: No space left on device"


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    (tmp_path / "file").write_text("text")
    assert read_file(tmp_path / "file", 4) == b"text"
    with pytest.raises(OSError, match="larger than 3 bytes"):
        read_file(tmp_path / "file", 3)
    os.mkfifo(tmp_path / "pipe")
    for name, error in (
        ("pipe", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (".", "directory"),
    ):
        with pytest.raises(OSError, match=error):
            read_file(tmp_path / name)


def test_a_pipe_among_the_files_is_no_wait(tmp_path):
    """Of lines, of a lock, and in the place of a temporary file, which a link does not lead elsewhere."""
    for name in ("lines", "lock", "file.tmp"):
        os.mkfifo(tmp_path / name)
    for ask in (
        lambda: JsonLines(tmp_path / "lines").records(),
        lambda: JsonLines(tmp_path / "lines").mend(),
    ):
        with pytest.raises(OSError, match="not a regular file"):
            ask()
    with pytest.raises(OSError, match="not a regular file"), owned(tmp_path):
        pass
    write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    (tmp_path / "file.tmp").symlink_to(tmp_path / "elsewhere")
    write_text(tmp_path / "file", "newer")
    assert (tmp_path / "file").read_text() == "newer" and not (tmp_path / "elsewhere").exists()


def test_lines(tmp_path):
    lines = JsonLines(tmp_path / "lines", ("a",))
    assert lines.records() == []
    lines.append({"a": 1})
    lines.append({"a": 2, "b": 3})
    with open(lines.path, "a") as file:
        file.write('{"a": ')
    assert lines.records() == [{"a": 1}, {"a": 2, "b": 3}]
    lines.mend()
    lines.append({"b": 3})
    with pytest.raises(RunError, match=r"expected a JSON object with a in line 3, got '{\"b\": 3}'"):
        lines.records()


def test_ordinary_files_are_read(tmp_path):
    """Pipes and devices are refused at once, and so is a file larger than its reader takes."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert read_file(path) == read_file(path, 7) == b"content"
    with pytest.raises(OSError, match="larger than 6 bytes") as raised:
        read_file(path, 6)
    assert raised.value.filename == str(path)
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_file(odd)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_file(Path("/proc/self/status"), 10)  # it tells no size
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "missing")


def test_files_that_cannot_be_written_are_told_before_the_work(tmp_path):
    check_writable("json", tmp_path / "file")
    with pytest.raises(RunError, match="--json: expected a file in a folder that exists, got"):
        check_writable("json", tmp_path / "missing" / "file")
    with pytest.raises(RunError, match="--json: expected a file that can be written, got"):
        check_writable("json", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(RunError, match=f"--json: expected a file that does not exist, got {special}"):
            check_writable("json", special)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(RunError, match="--json: expected a file that does not exist, got"):
        check_writable("json", tmp_path / "file")


# --- locks


def test_lock_names_its_owner_and_goes_away(tmp_path):
    with owned(tmp_path):
        owner = json.loads((tmp_path / "lock").read_text())
        assert owner["process"] == os.getpid() and owner["host"] == socket.gethostname()
        who = f"process {os.getpid()} on {socket.gethostname()} since {owner['since'][:10]}"
        with pytest.raises(RunError, match=f"{tmp_path}: .* owned by {who}"), owned(tmp_path):
            pass
        assert os.listdir(tmp_path) == ["lock"], "a refused process changed something"
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyError), owned(tmp_path):
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_a_lock_that_is_somebody_elses_by_now_stays(tmp_path):
    """Whoever takes a deleted lock for free has made another one."""
    with owned(tmp_path):
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").write_text("the next owner")
    assert (tmp_path / "lock").read_text() == "the next owner"


def test_parts_have_owners_of_their_own(tmp_path):
    with owned(tmp_path, "a"), owned(tmp_path, "b"):
        assert sorted(os.listdir(tmp_path)) == ["lock.a", "lock.b"]
        with pytest.raises(Taken), owned(tmp_path, "a"):
            pass


def test_alone_waits(tmp_path):
    seen = []

    def enter(name):
        with alone(tmp_path):
            seen.append(name)

    with alone(tmp_path):
        other = threading.Thread(target=enter, args=("second",))
        other.start()
        other.join(0.2)
        seen.append("first")
    other.join()
    assert seen == ["first", "second"] and os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from gdn_jax.commands.locks import owned

with owned(Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_lock_of_another_process(tmp_path):
    """Respected while the process lives, taken over after kill -9."""
    child = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdin=-1, stdout=-1, text=True)
    assert child.stdout.readline() == "mine\n"
    with pytest.raises(RunError, match=f"owned by process {child.pid} on"), owned(tmp_path):
        pass
    child.communicate("\n")
    assert (tmp_path / "lock").exists()
    with owned(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["process"] == os.getpid()
    assert os.listdir(tmp_path) == []


NO_LOCKS = ["", b"\xff\xfe", "[" * 100_000]


@pytest.mark.parametrize(
    "content", ['{"host": "far-away", "process": 7, "since": "2026-11-22"}\n', *NO_LOCKS], ids=range(4)
)
def test_lock_of_another_host(tmp_path, content):
    """Nobody here can tell whether its process lives: refused, with the way out."""
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "lock").write_bytes(content)
    who = "process 7 on far-away since 2026-11-22" if b"far" in content else "process . on an unknown host"
    with pytest.raises(RunError, match=f"{who}.*if it does not, delete {tmp_path / 'lock'}"), owned(tmp_path):
        pass
    assert (tmp_path / "lock").read_bytes() == content
    (tmp_path / "lock").unlink()
    with owned(tmp_path):
        pass


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """A file there belongs to whoever made it; that its process is dead cannot be told."""

    def acquire(lock):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.FileLock, "acquire", acquire)
    who = f"owned by process {os.getpid()} on {socket.gethostname()}"
    with owned(tmp_path), pytest.raises(Taken, match=who), owned(tmp_path):
        pass
    assert os.listdir(tmp_path) == []
    (tmp_path / "lock").write_text(
        json.dumps({"host": socket.gethostname(), "process": 1, "since": "long ago"})
    )
    with pytest.raises(Taken, match="owned by process 1 on"), owned(tmp_path):
        pass


# Without `alone` several may ask at once.
@pytest.mark.parametrize("stale, waits", [(False, True), (True, True), (False, False)])
def test_one_of_many_gets_it(tmp_path, monkeypatch, stale, waits):
    """Threads that ask at the same time, also for the lock of a dead process; a free one without `alone` too."""
    if not waits:
        monkeypatch.setattr(locks, "alone", lambda folder: contextlib.nullcontext())
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if stale:
            owner = {"host": socket.gethostname(), "process": 1, "since": "long ago"}
            (folder / "lock").write_text(json.dumps(owner))
        barrier, won, lost, done = threading.Barrier(6), [], [], threading.Barrier(6)

        def ask(folder=folder, barrier=barrier, won=won, lost=lost, done=done):
            barrier.wait()
            try:
                with owned(folder):
                    won.append(1)
                    done.wait()
                return
            except RunError as error:
                lost.append(error)
            done.wait()

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and len(lost) == 5
        assert os.listdir(folder) == []
