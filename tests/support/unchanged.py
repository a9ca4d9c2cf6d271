"""Tests of kernels that need not run again: nothing that they executed has changed since they passed.

Interpreted and lowered kernels are a third of the gate, and most changes touch no kernel. With `--changed`, a test in
that folder is skipped where a record says that it passed and what its file executed is the same today.
A record holds the tests of a file that passed, and a hash of

- every file of this project whose functions ran while the file's tests did, children of pytest included where they
  run in the same process; a file that starts other processes gets no record,
- the files which those import, because a constant is read without a function being called,
- files of this project that were opened,
- Python, the packages that a kernel's code goes through, and settings that change what is compiled.

What JAX and `functools.cache` remember is forgotten before a file's first test, so that another file's calls hide
none of this one's. Without a record, a test runs. Records lie next to the compiled programs; every run that has
`--changed` or `--record` writes them.
"""

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from collections.abc import Iterator

import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = ROOT / "tests" / "kernels"
TOOL = 4
"""Number by which Python's `sys.monitoring` knows this plugin; debuggers and coverage have others."""


def records() -> pathlib.Path:
    """Folder of the records, a file for each test file."""
    return pathlib.Path(jax.config.jax_compilation_cache_dir).parent / "passed"


def environment() -> str:
    """What is the same for all tests, and not of this project."""
    packages = ("jax", "jaxlib", "numpy", "flax", "jaxtyping", "pytest")
    versions = {name: importlib.metadata.version(name) for name in packages}
    settings = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_"))}
    settings = {name: value for name, value in settings.items() if "COMPILATION_CACHE" not in name}
    settings.pop("JAX_PLATFORMS", None)  # what it leaves are the devices
    devices = [str(device.device_kind) for device in jax.devices()]
    return json.dumps([platform.python_version(), versions, settings, devices], sort_keys=True)


@functools.cache
def sha(path: pathlib.Path) -> str | None:
    """Hash of a file's content; None where there is no such file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def file_of(module: str) -> pathlib.Path | None:
    """The file of a module of this project or of its tests."""
    parts = module.split(".")
    for base in (ROOT, ROOT / "tests", ROOT / "tests" / "support", KERNELS):
        for file in (base.joinpath(*parts).with_suffix(".py"), base.joinpath(*parts, "__init__.py")):
            if file.is_file():
                return file
    return None


@functools.cache
def imported(path: pathlib.Path) -> frozenset[pathlib.Path]:
    """Files of this project that a file imports, and where names come from that it takes from an __init__.py."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {file_of(node.module)} | {origin(node.module, alias.name) for alias in node.names}
    return frozenset(found - {None})


def origin(module: str, name: str) -> pathlib.Path | None:
    """The file that a name comes from, where it is a module or an __init__.py imports it from elsewhere."""
    file = file_of(f"{module}.{name}")
    package = file_of(module)
    if file or package is None or package.name != "__init__.py":
        return file
    for node in ast.parse(package.read_text()).body:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and name in {alias.asname or alias.name for alias in node.names}
        ):
            return origin(node.module, name) or file_of(node.module)
    return None


def forget() -> None:
    """Empties caches whose entries would hide what a test executes."""
    jax.clear_caches()
    for name, module in list(sys.modules.items()):
        if name.startswith(("gdn_jax", "pallas_kernels")):
            for thing in vars(module).values():
                if isinstance(thing, functools._lru_cache_wrapper):
                    thing.cache_clear()


class Watch:
    """Files of this project whose functions run, or that are opened, between `begin` and `end`."""

    def __init__(self):
        self.files: set[str] = set()
        self.active = self.starts_processes = False
        sys.monitoring.use_tool_id(TOOL, "gdn-jax-tests")
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.PY_START, self._function)
        sys.addaudithook(self._event)

    def _function(self, code, offset):
        self.files.add(code.co_filename)
        return sys.monitoring.DISABLE  # once for each function

    def _event(self, event: str, arguments) -> None:
        if self.active and event == "open" and isinstance(arguments[0], str):
            self.files.add(os.path.abspath(arguments[0]))
        elif self.active and event in ("subprocess.Popen", "os.posix_spawn", "os.fork"):
            self.starts_processes = True

    def begin(self) -> None:
        self.files.clear()
        self.active, self.starts_processes = True, False
        sys.monitoring.restart_events()
        sys.monitoring.set_events(TOOL, sys.monitoring.events.PY_START)

    def end(self) -> set[pathlib.Path]:
        sys.monitoring.set_events(TOOL, 0)
        self.active = False
        paths = {pathlib.Path(file) for file in self.files if file.startswith(f"{ROOT}{os.sep}")}
        hidden = {".venv", "__pycache__", ".git", ".pytest_cache"}
        paths = {path for path in paths if not hidden.intersection(path.parts)}
        sources = {path for path in paths if path.suffix == ".py" and path.is_file()}
        return paths.union(*map(imported, sources)) if sources else paths


@functools.cache
def the_watch() -> Watch:
    return Watch()


class Record:
    """Of one test file: its tests that have passed, and the hashes under which they did."""

    def __init__(self, path: pathlib.Path):
        self.file = records() / f"{path.name}.json"
        try:
            stored = json.loads(self.file.read_text())
            self.passed, self.files = set(stored["passed"]), dict(stored["files"])
            valid = stored["environment"] == environment()
        except (OSError, ValueError, KeyError, TypeError):
            self.passed, self.files, valid = set(), {}, False
        self.holds = valid and all(sha(ROOT / name) == value for name, value in self.files.items())

    def write(self, passed: set[str], paths: set[pathlib.Path]) -> None:
        """Adds tests to a record that still holds, or takes the place of one that does not."""
        files = {str(path.relative_to(ROOT)): sha(path) for path in paths}
        if self.holds:
            passed, files = passed | self.passed, files | self.files
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"environment": environment(), "passed": sorted(passed), "files": files}, indent=0)
        temporary = self.file.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(self.file)


def is_kernel_test(path: pathlib.Path) -> bool:
    """Whether a record may stand for the tests of a file."""
    return path.parent == KERNELS


passed_now: dict[str, set[str]] = {}
not_run = 0


def pytest_addoption(parser):
    group = parser.getgroup("gdn-jax")
    group.addoption(
        "--changed",
        action="store_true",
        help="skip tests of kernels whose code is unchanged since they passed",
    )
    group.addoption(
        "--record", action="store_true", help="record what tests of kernels execute, and run them all"
    )
    group.addoption("--no-record", action="store_true", help="with --changed: read records, but write none")


@pytest.fixture(scope="module", autouse=True)
def record(request) -> Iterator[Record | None]:
    """Watches a file of kernel tests, and keeps which of its tests passed."""
    options = request.config.option
    if not is_kernel_test(request.path) or not (options.changed or options.record):
        yield None
        return
    kept = Record(request.path)
    if options.no_record:
        yield kept
        return
    forget()
    watch = the_watch()
    watch.begin()
    yield kept
    paths = watch.end() | {request.path, *imported(request.path)}
    if (passed := passed_now.get(request.path.name)) and not watch.starts_processes:
        kept.write(passed, paths)


@pytest.fixture(autouse=True)
def unless_unchanged(request, record):
    """Skips a test of which a record says that it would do what it did."""
    if (
        record is not None
        and request.config.option.changed
        and record.holds
        and request.node.nodeid in record.passed
    ):
        pytest.skip("unchanged since it passed")


def pytest_runtest_logreport(report):
    global not_run
    if report.when == "call" and report.passed:
        passed_now.setdefault(pathlib.Path(report.fspath).name, set()).add(report.nodeid)
    if (
        report.skipped
        and isinstance(report.longrepr, tuple)
        and report.longrepr[2].endswith("unchanged since it passed")
    ):
        not_run += 1


def pytest_terminal_summary(terminalreporter):
    if not_run:
        terminalreporter.write_line(
            f"tests of kernels: {not_run} did not run, because nothing that they execute has changed"
        )
