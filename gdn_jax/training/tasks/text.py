"""Byte streams of files: which files are read, which of them are held out, and windows of the streams.

A stream is a zero byte, then each file followed by a zero byte: the zero marks where a file begins and ends,
so a model can be asked for a new file by giving it a zero.
"""

import dataclasses
import fnmatch
import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

from gdn_jax.commands.errors import RunError

HELD_OUT = 0.1
# Names that are not program text, are tables, belong to other packages or differ between machines.
_STDLIB_SKIP = ["site-packages", "dist-packages", "lib-dynload", "config-*", "_sysconfigdata*", "__phello__"]
_STDLIB_SKIP += ["test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings", "ensurepip"]
_ALWAYS_SKIP = [".*", "__pycache__"]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes of a text."""

    train: np.ndarray  # [n] uint8
    val: np.ndarray  # [m] uint8
    train_files: tuple[str, ...]
    val_files: tuple[str, ...]
    source: str

    @property
    def fingerprint(self) -> str:
        """A digest of both streams. It is the same for the same text, split the same way."""
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(b"held out")
        digest.update(self.val.tobytes())
        return digest.hexdigest()[:16]


def _walk(root: Path, pattern: str, skip: list[str]) -> list[Path]:
    """Returns the files below root in a fixed order, without skipped names. Links to folders are not followed."""
    found: list[Path] = []

    def fail(error: OSError) -> None:
        raise RunError(f"--data: cannot read {error.filename}: {error.strerror}")

    def kept(names: list[str]) -> list[str]:
        return [name for name in names if not any(fnmatch.fnmatchcase(name, s) for s in _ALWAYS_SKIP + skip)]

    for folder, names, files in os.walk(root, onerror=fail):
        names[:] = kept(names)
        paths = [Path(folder, name) for name in kept(files) if fnmatch.fnmatchcase(name, pattern)]
        # A broken link is an unreadable file, not no file; a pipe, a device or a link to one is no text.
        found += [path for path in paths if path.is_file() or not path.exists()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        advice = "; remove the link, or leave it out by --glob" if path.is_symlink() else ""
        raise RunError(f"--data: cannot read {path}: {error.strerror}{advice}") from None


def held_out(names: list[str]) -> list[bool]:
    """Chooses the files that are held out: one in ten by the hash of its relative path, at least one, never all.

    The hash keeps a file on its side of the split when others come or go.
    """
    score = [int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8]) / 2**64 for name in names]
    count = sum(s < HELD_OUT for s in score)
    count = min(max(count, 1), len(names) - 1)
    chosen = set(sorted(range(len(names)), key=lambda i: (score[i], names[i]))[:count])
    return [i in chosen for i in range(len(names))]


def held_out_packages(names: list[str]) -> list[bool]:
    """Chooses the files that are held out: all of one package in ten, see `held_out`.

    Raises:
      RunError: there is one package only.
    """
    package = [name.split("/")[0] for name in names]
    if len({*package}) < 2:
        raise RunError(f"--packages: expected at least two packages, got {', '.join({*package})}")
    different = sorted({*package})
    out = dict(zip(different, held_out(different), strict=True))
    return [out[name] for name in package]


def stream(texts: list[bytes]) -> np.ndarray:
    """Joins all texts in one stream."""
    return np.frombuffer(b"\0" + b"".join(text + b"\0" for text in texts), np.uint8)


def read(
    data: Path | None, glob: str = "*", *, packages: bool = False
) -> tuple[str, list[tuple[str, bytes]]]:
    """Reads the files of a text that are not empty.

    Args:
      data: a file, a folder, or None: the .py files of the running Python's standard library, or of its packages.
      glob: names of the files read below a folder.
      packages: the folder is one of packages; of files with the same content the first is read. None for data: the
        .py files of the folder that holds the packages of the running Python.

    Returns:
      where the text is from, and name and content of every file in a fixed order.

    Raises:
      RunError: a missing path, an unreadable file, no text.
    """
    if data is None and packages:
        root, pattern, skip = Path(sysconfig.get_path("purelib")), "*.py", []
        source = f"packages of Python {sysconfig.get_python_version()}"
    elif data is None:
        root, pattern, skip = Path(sysconfig.get_path("stdlib")), "*.py", _STDLIB_SKIP
        source = f"standard library of Python {sysconfig.get_python_version()}"
    else:
        root, pattern, skip = data, glob, []
        source = str(data)
    if not root.exists():
        raise RunError(f"--data: expected a file or a folder, got {root}, which does not exist")
    if root.is_file():
        texts = [(root.name, _read(root))]
    else:
        texts = [(p.relative_to(root).as_posix(), _read(p)) for p in _walk(root, pattern, skip)]
    texts = [(name, text) for name, text in texts if text]
    if packages:
        digests = [hashlib.sha256(text).digest() for _, text in texts]
        first = {digest: i for i, digest in reversed([*enumerate(digests)])}
        texts = [texts[i] for i in sorted(first.values())]
    if not texts:
        raise RunError(f"--data: expected text, got none in {root}")
    return source, texts


def load(data: Path | None, glob: str = "*", *, packages: bool = False, length: int = 1) -> Corpus:
    """Reads a text and splits it.

    Args:
      data: a file (its last tenth is held out), a folder (files are held out, see `held_out`), or None: the
        .py files of the running Python's standard library.
      glob: names of the files read below a folder.
      packages: as for `read`; not files are held out but whole packages: what has one name below the folder.
      length: bytes of a window; each side must hold one window.

    Raises:
      RunError: a missing path, an unreadable file, no file, too little text.
    """
    source, texts = read(data, glob, packages=packages)
    if len(texts) == 1:
        name, text = texts[0]
        cut = len(text) - int(len(text) * HELD_OUT)
        train, val = stream([text[:cut]]), stream([text[cut:]])
        train_files, val_files = (f"{name} (start)",), (f"{name} (last tenth)",)
    else:
        names = [name for name, _ in texts]
        out = held_out_packages(names) if packages else held_out(names)
        train = stream([text for (_, text), o in zip(texts, out, strict=True) if not o])
        val = stream([text for (_, text), o in zip(texts, out, strict=True) if o])
        train_files = tuple(n for n, o in zip(names, out, strict=True) if not o)
        val_files = tuple(n for n, o in zip(names, out, strict=True) if o)
    for side, part in (("training", train), ("held-out", val)):
        if part.size < length + 1:
            raise RunError(
                f"--data: expected at least --length + 1 = {length + 1} {side} bytes, got {part.size}: "
                f"give more text or a smaller --length"
            )
    return Corpus(train, val, train_files, val_files, source)


def window_starts(size: int, length: int, max_bytes: int) -> np.ndarray:
    """Returns starts of disjoint validation windows of at most max_bytes predicted bytes, spread evenly.

    A window starting at s predicts the bytes s + 1 .. s + length from those before them in the window.
    """
    available = (size - 1) // length
    count = max(1, min(available, max_bytes // length))
    return (np.arange(count) * available // count) * length


def windows(stream: np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets [len(starts), length], int32: the targets are the inputs one byte later."""
    rows = stream[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return rows[:, :-1], rows[:, 1:]
