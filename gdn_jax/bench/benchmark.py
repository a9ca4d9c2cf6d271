"""The frame of every benchmark: an object with options and a few methods, its results, and the one loop that runs it.

A benchmark is a frozen dataclass in a file of its own. Its fields are the options of `gdn bench NAME`, its cases are
data, and what a case yields are results, each one line of the table and one object of the JSON.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
from rich.console import Console

from gdn_jax.bench.measure import Timing
from gdn_jax.bench.table import table
from gdn_jax.commands.errors import RunError, flag, one_line
from gdn_jax.commands.fields import Check, Positive, Range, Seed, check
from gdn_jax.commands.files import check_writable, write_text
from gdn_jax.commands.versions import versions


class Result(NamedTuple):
    """One line: the case, its time, the numbers next to it and the errors before it.

    failure: why there is no time.
    """

    about: dict[str, Any]
    timing: Timing | None = None
    numbers: dict[str, Any] = {}  # noqa: RUF012
    errors: dict[str, float] = {}  # noqa: RUF012
    failure: str | None = None

    def values(self) -> dict[str, Any]:
        """Returns the known values, keyed by their names in the table and the JSON."""
        values = self.about | (self.timing._asdict() if self.timing else {}) | self.numbers
        if self.errors:
            values["error"] = max(self.errors.values())
            values["errors"] = {name: e if math.isfinite(e) else str(e) for name, e in self.errors.items()}
        values["failure"] = self.failure
        return {name: x for name, x in values.items() if x not in (None, "", math.inf) and x == x}

    def told(self) -> str:
        """The line that is printed as soon as the result is there."""
        t = self.timing
        time = "" if t is None else f"{t.ms:.4g} ms ({t.fastest:.4g} to {t.slowest:.4g})"
        return f"{_name(self.about)}: {self.failure or time or 'ok'}"


def wrong(errors: dict[str, float], bounds: dict[str, float]) -> str | None:
    """The errors that are above their bounds, as the failure of a result; None if there are none."""
    misses = [f"{name} {e:.1e} > {bounds[name]:.1e}" for name, e in errors.items() if not e <= bounds[name]]
    return f"wrong: {', '.join(misses)}" if misses else None


Timed = Callable[[], tuple[Timing, dict[str, Any]]]
"""Times a case; returns the time and the numbers next to it."""


def checked(
    about: dict[str, Any], errors: dict[str, float], bounds: dict[str, float], timed: Timed
) -> Result:
    """The result of a case that is timed only if its errors are within their bounds."""
    failure = wrong(errors, bounds)
    timing, numbers = (None, {}) if failure else timed()
    return Result(about, timing, numbers, errors, failure)


class Case(NamedTuple):
    """A problem that is timed: what it is about, and the function that checks and times it."""

    about: dict[str, Any]
    run: Callable[[], Iterable[Result]]


class Writable(Check):
    """A new file that can be written."""

    def check(self, name: str, value: Path) -> None:
        """See `Check.check`."""
        check_writable(name, value)


Width = Range("1 to 256", lambda x: 1 <= x <= 256)
"""Width of a head."""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Options that all benchmarks share, and the methods that each has."""

    on_cpu: ClassVar[dict[str, Any]] = {}
    """Sizes in the place of the defaults, which are those of a large GPU; see `sized`."""

    repeats: Annotated[int, Positive] = 9
    """Measurements."""
    seed: Annotated[int, Seed] = 0
    """Seed of the inputs."""
    max_minutes: Annotated[float | None, Positive] = None
    """Starts no case after this time."""
    json: Annotated[Path | None, Writable()] = None
    """New file for all numbers, rewritten after every case."""

    def check(self) -> None:
        """Raises RunError, before any work, for the first option that cannot be used."""
        check(self)

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """The cases in the order in which they are timed; note takes remarks for the reader."""
        raise NotImplementedError

    def report(self, results: list[Result], width: int | None) -> str:
        """The table of the results that have times: text that fits a width, or Markdown where there is none."""
        timed = _timed(results)
        keys = [*dict.fromkeys(name for result in timed for name in result.about)]
        return table(keys, [result.values() for result in timed], width) if timed else ""

    def summary(self, results: list[Result]) -> list[str]:
        """Lines below the table of results that have times."""
        return []

    def save(self, content: dict[str, Any], results: list[Result]) -> None:
        """Writes the files that are asked for, after every case."""
        if self.json is not None:
            write_text(self.json, json.dumps(content, indent=1, default=str))


def run(benchmark: Benchmark, console: Console, progress: Console, first_notes: Iterable[str] = ()) -> int:
    """Times all cases and prints the table; 0 when everything was right and timed, else 1.

    Args:
      console: takes the table, as text that fits its width on a terminal, else as Markdown.
      progress: takes a line for each result and each note as soon as it is there.
      first_notes: lines after the table, before the notes of the cases.

    Raises:
      RunError: an option does not fit.
    """
    benchmark.check()
    results: list[Result] = []
    notes: dict[str, None] = dict.fromkeys(first_notes)  # a set in order
    about, started = versions(), time.monotonic()

    def note(text: str) -> None:
        if text not in notes:  # told at once too: a run that is cut short never comes to its end
            notes[text] = None
            _say(progress, text)

    def save() -> None:
        options = {name: str(x) for name, x in dataclasses.asdict(benchmark).items()}
        content: dict[str, Any] = {"versions": about, "options": options, "notes": [*notes]}
        content["results"] = [result.values() for result in results]
        benchmark.save(content | {"summary": benchmark.summary(_timed(results))}, results)

    _say(progress, ", ".join(f"{name} {value}" for name, value in about.items()))
    for case in benchmark.cases(note):
        if benchmark.max_minutes is not None and time.monotonic() - started > 60 * benchmark.max_minutes:
            note(f"not timed, --max-minutes: {_name(case.about)}")
            continue
        try:
            for result in case.run():
                results.append(result)
                _say(progress, result.told())
        except RunError:
            raise
        except Exception as error:  # out of memory, or nothing for the kernels: the other cases may fit
            results.append(Result(case.about, failure=f"raised {one_line(error)}"))
            _say(progress, results[-1].told())
        save()
    save()
    timed = _timed(results)
    if text := benchmark.report(results, console.width if console.is_terminal else None):
        _say(console, text)
    for line in (*benchmark.summary(timed), *notes):
        _say(console, line)
    for result in results:
        if result.failure:
            _say(console, f"FAILED {result.told()}")
    return int(not timed or len(timed) < len(results))


def sized(benchmark: Benchmark, typed: Collection[str]) -> tuple[Benchmark, str]:
    """Returns the benchmark in sizes that fit the device, and a note of the options that were changed for that.

    On a CPU its sizes of `on_cpu` take the place of the defaults, unless one of these options was typed.

    Args:
      benchmark: as it was read off the command line.
      typed: the options of that command line, such as "--tokens".
    """
    small = benchmark.on_cpu
    if jax.default_backend() != "cpu" or not small or any(flag(name) in typed for name in small):
        return benchmark, ""
    words = {name: " ".join(map(str, x)) if isinstance(x, tuple) else x for name, x in small.items()}
    changed = " ".join(f"{flag(name)} {words[name]}" for name in words)
    return dataclasses.replace(benchmark, **small), f"sizes for a CPU, as none was named: {changed}"


def _timed(results: list[Result]) -> list[Result]:
    return [result for result in results if result.failure is None]


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _name(about: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items() if value not in (None, ""))
