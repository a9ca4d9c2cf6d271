"""The numbers of the page on performance, by one command: parts of the other benchmarks, one after the other.

Each part has the few sizes that people ask for, and checks its results as its own benchmark does. Other libraries
that are installed are timed next to the rule. A run takes about five minutes on one H200,
most of it compiling. After each part --json keeps its date, versions and results. --resume goes on with such a file
and does not run again what it has. `python docs/times.py` makes docs/performance.md of the files in docs/times.
"""

import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import jax

from gdn_jax.bench.benchmark import Benchmark, Case, Result
from gdn_jax.bench.decode import DecodeBenchmark
from gdn_jax.bench.generate import GenerateBenchmark
from gdn_jax.bench.rows import Row
from gdn_jax.bench.rule import RuleBenchmark
from gdn_jax.bench.serve import ServeBenchmark
from gdn_jax.bench.step import StepBenchmark
from gdn_jax.commands.errors import RunError, fail, one_line
from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.commands.files import check_writable, parse_json, write_text
from gdn_jax.commands.versions import commit


@dataclasses.dataclass(frozen=True)
class NamedRows(RuleBenchmark):
    """The rule on rows whose whole names are `rows`."""

    def plan(self) -> tuple[list[tuple[Row, str]], str, tuple[str, ...]]:
        """See `RuleBenchmark.plan`."""
        rows, dtype, implementations = super().plan()
        named = [(row, what) for row, what in rows if row.name in self.rows or not self.rows]
        return named, dtype, implementations


class Plan(NamedTuple):
    """The benchmarks of the parts, in the order in which they run."""

    forward: Benchmark
    backward: Benchmark
    channels: Benchmark
    step: Benchmark
    generate: Benchmark
    decode: Benchmark
    serve: Benchmark
    larger: Benchmark


LIBRARIES = ("flash-qla", "flash-linear-attention", "flashinfer-python", "jax-linear-attention", "torch")
"""Packages whose versions are kept, where they are installed: the libraries that are timed."""

_SMALL: dict[str, Any] = {"heads": (1, 2), "lengths": (128,), "width": 16, "implementations": ("chunked",)}
PLANS = {
    "full": Plan(
        NamedRows(
            passes=("forward",), rows=("16,32 1x32768", "16,32 1x8192", "16,32 4096x8", "16,32 1024x8")
        ),
        NamedRows(passes=("backward",), rows=("16,32 1x32768", "16,32 1x8192")),
        NamedRows(
            passes=("forward", "training"), gates=("uniform",), rows=("16,16 1x8192 uniform channels",)
        ),
        StepBenchmark(model="0.4b", lengths=(8192,)),
        GenerateBenchmark(model="0.4b", batches=(1, 32)),
        DecodeBenchmark(batches=(1, 128), tokens=(1,), deferred=(1,)),
        ServeBenchmark(model="0.4b", requests=(32,)),
        GenerateBenchmark(model="qwen3.5-4b", batches=(1,), prefill=0),
    ),
    "small": Plan(
        NamedRows(passes=("forward",), **_SMALL),
        NamedRows(passes=("backward",), **_SMALL),
        NamedRows(passes=("forward",), gates=("uniform",), **_SMALL),
        StepBenchmark(model="tiny", lengths=(128,), tokens=256),
        GenerateBenchmark(model="tiny", batches=(1,), tokens=8, prefill=128),
        DecodeBenchmark(batches=(1,), tokens=(1,), deferred=(1,), pools=("float32",), heads=(1, 2), width=16),
        ServeBenchmark(**ServeBenchmark.on_cpu | {"requests": (2,), "repeats": 20}),
        GenerateBenchmark(model="tiny", batches=(2,), tokens=8, prefill=0),
    ),
}
"""Sizes for an NVIDIA GPU of 80 GB, and sizes that a CPU computes in two minutes."""

if TYPE_CHECKING:
    Named = str
else:
    Named = Literal[Plan._fields]  # for the command line


@dataclasses.dataclass(frozen=True)
class AllBenchmark(Benchmark):
    """The parts of the page on performance, in one run."""

    on_cpu: ClassVar[dict[str, Any]] = {"plan": "small", "repeats": 3}

    repeats: Annotated[int, Positive] = 9
    """Measurements of each number; a server has a number of steps of its own."""
    json: Path | None = None
    """New file for the numbers of all parts, rewritten after every part."""
    parts: Annotated[tuple[Named, ...], Distinct] = Plan._fields
    """The parts to run: both passes of the rule, a decay of each channel, a training step, generation, single tokens
    of many requests, a server, and generation by a larger model."""
    plan: Literal["full", "small"] = "full"
    """Sizes for a GPU of 80 GB, or sizes that a CPU computes in two minutes."""
    resume: bool = False
    """Goes on with the file of --json, if it is there: parts that it has without a failure are kept."""

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        if self.resume and self.json is None:
            fail("json", "the file that --resume goes on with", "none")
        self.kept()
        if self.json is not None and not self.resume:
            check_writable("json", self.json)

    def kept(self) -> dict[str, Any]:
        """The parts of the file that the run goes on with, by name.

        Raises:
          RunError: it is no file of this command, or of another kind of device.
        """
        if not self.resume or self.json is None or not self.json.exists():
            return {}
        try:
            content = parse_json(self.json.read_bytes())
            parts, device = {**content["parts"]}, content["device"]
        except (ValueError, KeyError, TypeError):
            fail("json", "a file of gdn bench all", self.json)
        if device != _device():
            fail("json", f"a file of this kind of device, {_device()}", device)
        return parts

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for each part that is still to be run."""
        kept = self.kept()
        for name in self.parts:
            if name in kept and not any("failure" in result for result in kept[name]["results"]):
                note(f"{name}: kept, of {kept[name]['date']}")
                continue
            yield Case({"part": name}, partial(self.run_part, name, note))

    def run_part(self, name: str, note: Callable[[str], None]) -> Iterator[Result]:
        """The results of a part. A case that raises does not end the others."""
        benchmark, began = getattr(PLANS[self.plan], name), time.perf_counter()
        changes: dict[str, Any] = {"seed": self.seed}
        if not isinstance(benchmark, ServeBenchmark):
            changes["repeats"] = self.repeats
        for case in dataclasses.replace(benchmark, **changes).cases(note):
            try:
                for result in case.run():
                    yield result._replace(about={"part": name} | result.about)
            except RunError:
                raise
            except (
                Exception
            ) as error:  # one case may need more memory than the GPU has; it must not end the others
                yield Result({"part": name} | case.about, failure=f"raised {one_line(error)}")
        note(f"{name}: {time.perf_counter() - began:.0f} s")

    def report(self, results: list[Result], width: int | None) -> str:
        """A table for each part."""
        plan, tables = PLANS[self.plan], []
        for name in self.parts:
            some = [result for result in results if result.about["part"] == name]
            tables += [getattr(plan, name).report(some, width)] if some else []
        return "\n\n".join(tables)

    def save(self, content: dict[str, Any], results: list[Result]) -> None:
        """Writes the parts that have ended next to those that the file already had."""
        if self.json is None:
            return
        parts = self.kept()
        about = {"date": f"{datetime.date.today()}", "commit": commit(), "versions": content["versions"]}
        about |= {"libraries": {name: found for name in LIBRARIES if (found := _version(name)) is not None}}
        for name in dict.fromkeys(result.about["part"] for result in results):
            own = [result.values() for result in results if result.about["part"] == name]
            model = getattr(getattr(PLANS[self.plan], name), "model", None)
            parts[name] = about | ({"model": model} if model else {}) | {"results": own}
        whole = {"device": _device(), "parts": {name: parts[name] for name in Plan._fields if name in parts}}
        whole["notes"] = content["notes"]
        write_text(self.json, json.dumps(whole, indent=1, default=str) + "\n")


def _version(package: str) -> str | None:
    """The version of a package that is installed, else None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device() -> str:
    """The kind of the device, such as NVIDIA H100 80GB HBM3."""
    return jax.devices()[0].device_kind
