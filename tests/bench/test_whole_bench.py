"""`gdn bench all`: parts of other benchmarks in one run and one file, and how it goes on."""

import dataclasses
import json

import pytest
from bench_tables import run

from gdn_jax.bench import command, whole
from gdn_jax.bench.benchmark import Benchmark, Case, Result
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.rule import RuleBenchmark
from gdn_jax.bench.whole import PLANS, AllBenchmark, NamedRows
from gdn_jax.commands.errors import RunError


@dataclasses.dataclass(frozen=True)
class Two(Benchmark):
    """Two cases, of which the second may raise."""

    model: str = "tiny"
    breaks: bool = False

    def cases(self, note):
        for i in range(2):
            yield Case({"case": i}, lambda i=i: self.time(i))

    def time(self, i):
        if i == 0 and self.breaks:
            raise ValueError("no memory")
        yield Result({"case": i}, Timing(1.0 + i, 0.9, 1.2))


@pytest.fixture
def plan(monkeypatch):
    """Sets which parts of the small plan break."""

    def put(*broken):
        parts = {name: Two(breaks=name in broken) for name in PLANS["small"]._fields}
        monkeypatch.setitem(PLANS, "small", whole.Plan(**parts))

    put()
    return put


def test_a_file_of_all_parts(plan, tmp_path):
    file = tmp_path / "all.json"
    status, text, _ = run(AllBenchmark(plan="small", json=file))
    content = json.loads(file.read_text())
    assert status == 0 and [*content["parts"]] == [*PLANS["small"]._fields]
    part = content["parts"]["step"]
    assert part["model"] == "tiny" and part["versions"]["jax"] and len(part["date"]) == 10
    assert [(x["case"], x["ms"]) for x in part["results"]] == [(0, 1.0), (1, 2.0)]
    assert text.count("| part ") == len(content["parts"])


def test_a_run_goes_on_where_it_was_cut(plan, tmp_path):
    """A part that failed, or was not reached, is run; a part that is whole is not."""
    file = tmp_path / "all.json"
    plan("backward")
    few = AllBenchmark(plan="small", json=file, parts=("forward", "backward"))
    status, text, _ = run(few)
    assert status == 1 and "FAILED part backward, case 0: raised ValueError: no memory" in text
    content = json.loads(file.read_text())
    assert [x.get("failure") for x in content["parts"]["backward"]["results"]] == [
        "raised ValueError: no memory",
        None,
    ]
    content["parts"]["forward"]["date"] = "2026-01-01"
    file.write_text(json.dumps(content))
    plan()
    status, text, _ = run(dataclasses.replace(few, parts=("forward", "backward", "step"), resume=True))
    parts = json.loads(file.read_text())["parts"]
    assert status == 0 and "forward: kept, of 2026-01-01" in text
    assert [*parts] == ["forward", "backward", "step"] and parts["forward"]["date"] == "2026-01-01"
    assert not any("failure" in x for part in parts.values() for x in part["results"])


def test_files_that_cannot_be_gone_on_with(plan, tmp_path):
    file = tmp_path / "all.json"
    with pytest.raises(RunError, match="--json: expected the file that --resume goes on with, got none"):
        AllBenchmark(resume=True).check()
    AllBenchmark(resume=True, json=file).check()  # it is made
    file.write_text("[]")
    with pytest.raises(RunError, match="--json: expected a file of gdn bench all"):
        AllBenchmark(resume=True, json=file).check()
    with pytest.raises(RunError, match="--json: expected a file that does not exist"):
        AllBenchmark(json=file).check()
    file.write_text('{"device": "abacus", "parts": {}}')
    with pytest.raises(RunError, match=r"--json: expected a file of this kind of device, .*, got abacus"):
        AllBenchmark(resume=True, json=file).check()


def test_the_plan_names_rows_of_the_tables(monkeypatch):
    """Whole names: "16,32 1x32768" is not the row without decay."""
    monkeypatch.setattr("gdn_jax.bench.rule.rule_implementation", lambda: "mosaic_gpu")
    for benchmark in PLANS["full"]:
        benchmark = dataclasses.replace(benchmark)
        if isinstance(benchmark, NamedRows):
            rows, dtype, _ = benchmark.plan()
            assert dtype == "bfloat16" and {row.name for row, _ in rows} == {*benchmark.rows}
            assert len(rows) == len(benchmark.rows) * len(benchmark.passes)
            assert len(RuleBenchmark.plan(benchmark)[0]) >= len(rows)
        else:
            benchmark.check()
    assert command.BENCHMARKS["all"][0] is AllBenchmark
