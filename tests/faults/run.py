"""Puts faults into copies of the project, one at a time in each, and runs the test that must notice each.

    python tests/faults/run.py [PART OF A NAME ...] [--jobs 2] [--report FILE]

Prints what became of every fault and exits with 1 if one survives, if its text is no longer found, or if its test
fails without it, for instance because a package is not installed. The working tree is not touched. The tests run on
the CPU, with this Python: it needs no environment of its own.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.fault import Fault
from faults.faults import FAULTS

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = (
    "gdn_jax/**/*.py",
    "pallas_kernels/**/*.py",
    "results/pages/*.py",
    "docs/accuracy.md",
    "notebooks/*.ipynb",
    "README.md",
)
"""Where faults are put."""
SECONDS, EACH = 900, 10
"""Seconds that a run of tests has, and more for each of them: a fault may make a kernel wait for ever."""

PASSED, FAILED = 0, 1
"""Exit codes of pytest; all others are errors of collection or of the call."""


CAUGHT, SURVIVED, NOT_JUDGED = "caught", "SURVIVED", "NOT JUDGED"


class Verdict(NamedTuple):
    """What became of a fault, and why."""

    word: str
    text: str


class Report:
    """Verdicts, printed as they come and appended to a file: a run that is cut leaves those that it has reached."""

    def __init__(self, file: Path | None):
        self.file, self.lock = file, threading.Lock()
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self.known = {name for line in lines for word, _, name in [line.partition("\t")] if word == CAUGHT}
        """Names of the faults that an earlier run with this file has caught."""

    def say(self, line: str, *more: str) -> None:
        text = "\n          ".join((line, *more))
        with self.lock:
            print(text.replace("\t", "  "), flush=True)
            if self.file is not None:
                with self.file.open("a") as file:
                    print(text, file=file)


def copy_of_the_project(folder: Path) -> Path:
    """What the tests read, without what is hidden, installed or written by runs."""
    copy = folder / "project"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info"))
    return copy


def place(copy: Path, fault: Fault) -> Path | str:
    """The file that holds a fault's text, or why there is not exactly one place."""
    files = [path for pattern in FILES for path in sorted(copy.glob(pattern))]
    counts = {path: path.read_text().count(fault.find) for path in files}
    found = [path for path, count in counts.items() if count]
    if sum(counts.values()) != 1:
        where = ", ".join(str(path.relative_to(copy)) for path in found)
        return f"text found {sum(counts.values())} times{where and f': {where}'}"
    return found[0]


def pytest(copy: Path, *tests: str) -> tuple[int | None, str]:
    """Exit code of the tests of the copy (None: they did not end), and the first failure or the last line."""
    seconds = SECONDS + EACH * len(tests)
    # The copy comes first on the path, before an installed project. No bytecode: it is taken for that of a file which
    # was changed within the same second and kept its size.
    environment = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": str(copy)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "160"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    command += ["--changed", "--no-record"]  # a test of a kernel that is not chosen notices no fault in it
    options = dict(cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        done = subprocess.run(command, text=True, errors="replace", timeout=seconds, **options)
    except subprocess.TimeoutExpired:
        return None, f"{' '.join(tests)} did not end in {seconds} s"
    lines = [line for line in done.stdout.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    missing = re.search(r"ModuleNotFoundError: No module named \S+", done.stdout)
    failures = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    failures += [line for line in lines if line.startswith("ERROR ")]
    text = failures[0] if failures else lines[-1]
    return done.returncode, f"{missing[0]}: {text}" if missing else text


def tests_that_fail(copy: Path, tests: list[str]) -> dict[str, str]:
    """Those that fail without a fault, and so show nothing, and how."""
    if pytest(copy, *tests)[0] == PASSED:
        return {}
    results = {test: pytest(copy, test) for test in tests}
    return {test: text for test, (code, text) in results.items() if code != PASSED}


def verdict(copy: Path, fault: Fault) -> Verdict:
    """Puts a fault in, runs its test, and takes it out again."""
    path = place(copy, fault)
    if isinstance(path, str):
        return Verdict(NOT_JUDGED, path)
    whole = path.read_text()
    path.write_text(whole.replace(fault.find, fault.put))
    try:
        code, text = pytest(copy, fault.test)
    finally:
        path.write_text(whole)
    if code == PASSED:
        return Verdict(SURVIVED, f"{fault.test} passes")
    return Verdict(CAUGHT if code == FAILED else NOT_JUDGED, text)


def main(parts: list[str], jobs: int, file: Path | None = None) -> int:
    begin, report = time.monotonic(), Report(file)
    named = [fault for fault in FAULTS if not parts or any(part in fault.name for part in parts)]
    if not named:
        print(f"expected parts of names of faults, got {' '.join(parts)}")
        return 1
    chosen = [fault for fault in named if fault.name not in report.known]
    tests = list(dict.fromkeys(fault.test for fault in chosen))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()  # those that nobody uses
        for job in range(jobs):
            copies.put(copy_of_the_project(Path(folder, str(job))))

        def in_a_copy(work: Callable[[Path], Any]) -> Any:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        shares = [share for job in range(jobs) if (share := tests[job::jobs])]
        alone = pool.map(lambda share: in_a_copy(lambda copy: tests_that_fail(copy, share)), shares)
        without = {test: text for found in alone for test, text in found.items()}

        minutes = (time.monotonic() - begin) / 60
        report.say(f"{len(tests)} tests without a fault: {minutes:.1f} min, {len(without)} fail")

        def judge(fault: Fault) -> tuple[str, str]:
            start = time.monotonic()
            if fault.test in without:
                word, text = NOT_JUDGED, f"without it: {without[fault.test]}"
            else:
                word, text = in_a_copy(lambda copy: verdict(copy, fault))
            report.say(f"{word}\t{fault.name}", f"{time.monotonic() - start:.0f} s: {text}")
            return word, fault.name

        judged = [*pool.map(judge, chosen)]

    others = [f"{word}\t{name}" for word, name in judged if word != CAUGHT]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report.say(
        f"{len(judged)} faults ({len(named) - len(judged)} caught before), {len(others)} not caught; "
        f"{(time.monotonic() - begin) / 60:.1f} min, {(used.ru_utime + used.ru_stime) / 60:.1f} min of the processor",
        *others,
    )
    return int(bool(others))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts of names of faults; without any: all of them")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in a copy of its own")
    parser.add_argument(
        "--report",
        type=Path,
        help="file that gets each verdict at once; faults that it has as caught are left out",
    )
    options = parser.parse_args()
    sys.exit(main(options.parts, options.jobs, options.report))
