"""`gdn bench`: times from a profile, the loop over cases, the table; the rule, its kernels and peers; errors."""

import dataclasses
import io
import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from rich.console import Console

import gdn_jax
from gdn_jax import cli
from gdn_jax.bench import benchmark, command, measure, passes, peers, profiles
from gdn_jax.bench import kernels as kernel_bench
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench import rule as rule_bench
from gdn_jax.bench.benchmark import Benchmark, Case, Result
from gdn_jax.bench.kernels import KernelBenchmark
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.passes import Problem
from gdn_jax.bench.rows import Row
from gdn_jax.bench.rule import RuleBenchmark
from gdn_jax.bench.table import table
from gdn_jax.checks.accuracy import NAMES
from gdn_jax.commands.errors import RunError


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """Programs here run for microseconds and compile for seconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def profile(lines: dict[str, list[tuple[str, int, int]]], plane: str = "/device:GPU:0") -> ProfileData:
    """A profile with one plane; line name -> (event name, start in us, duration in us)."""
    names = sorted({name for events in lines.values() for name, *_ in events})
    ids = {name: i + 1 for i, name in enumerate(names)}
    text = f'planes {{ name: "{plane}"'
    for number, (line, events) in enumerate(lines.items()):
        text += f' lines {{ id: {number + 1} name: "{line}"'
        for name, start, duration in events:
            times = f"offset_ps: {start * 10**6} duration_ps: {duration * 10**6}"
            text += f" events {{ metadata_id: {ids[name]} {times} }}"
        text += " }"
    for name, i in ids.items():
        text += f' event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
    return ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text + " }"))


CALLS = [(0, 10), (1000, 12), (2000, 17)]  # start and duration of the first kernel of each call, us


def kernels(names=("gates", "walk")):
    """Three calls of two kernels: the second lasts 30 us and starts 1 us after the first one's end."""
    first, second = names
    return [
        event
        for start, duration in CALLS
        for event in ((first, start, duration), (second, start + duration + 1, 30))
    ]


@pytest.fixture
def a_gpu(monkeypatch):
    """A machine whose profiles show the kernels that a test puts into the list."""
    lines: dict = {}
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr(profiles, "profile", lambda run, calls: profile(lines))
    return lines


def test_a_profile_gives_spans_and_kernels(a_gpu):
    """Spans from the first start to the last end: 10 + 1 + 30, 12 + 1 + 30 and 17 + 1 + 30 us."""
    a_gpu["Stream #13(Compute)"] = kernels()
    timing = measure.measure(lambda: None, 3)
    np.testing.assert_allclose(timing[:3], (0.043, 0.041, 0.048))
    assert [name for name, _ in timing.kernels] == ["gates", "walk"]
    np.testing.assert_allclose([ms for _, ms in timing.kernels], (0.012, 0.030))


def test_some_kernels_of_a_profile_are_summed(a_gpu):
    """Kernels whose names begin as asked are summed, call by call; a call with another number of them is refused."""
    runs = [("swiglu", 0, 2), ("nvjet", 2, 7), ("swiglu", 9, 1), ("swiglu", 20, 4), ("nvjet", 24, 1)]
    a_gpu["Stream #1"] = [*runs, ("swiglu", 25, 1)]
    timing = measure.by_device(lambda: None, 2, "swiglu")
    np.testing.assert_allclose(timing[:3], (0.004, 0.003, 0.005))
    assert [(name, round(ms, 6)) for name, ms in timing.kernels] == [("swiglu", 0.003), ("swiglu", 0.001)]
    assert measure.by_device(lambda: None, 2, "").slowest == pytest.approx(0.010)
    for names in ("cross_entropy", "swiglu"):
        a_gpu["Stream #1"].pop()
        with pytest.raises(ValueError, match="expected as many kernels in each"):
            measure.by_device(lambda: None, 2, names)


def test_a_profile_by_kernel_of_one_device():
    """Sums over the calls, by time; with the time between kernels, where one that runs at the same time is none."""
    streams = {"Stream #1": [("a", 0, 10), ("b", 12, 4), ("a", 20, 12)], "Stream #2": [("nccl", 11, 10)]}
    found = profiles.kernels(profile(streams), 0)
    assert not profiles.kernels(profile(streams), 1)
    times = [(name, launches, round(ms, 6)) for name, launches, ms in profiles.by_kernel(found, 2)]
    assert times == [("a", 1, 0.011), ("nccl", 0.5, 0.005), ("b", 0.5, 0.002), ("between kernels", 0, 0.0005)]


def test_a_profile_counts_every_kernel_once(a_gpu):
    """Other lines and planes show the same work again; a second stream may end last."""
    a_gpu |= {
        "Stream #13(Compute)": kernels(),
        "Stream #14(MemcpyD2D)": [("copy", start + 5, 100) for start, _ in CALLS],
        "XLA Modules": [("jit_step", start - 1, 60) for start, _ in CALLS[1:]],
    }
    np.testing.assert_allclose(measure.measure(lambda: None, 3)[:3], (0.105, 0.105, 0.105))
    assert not profiles.kernels(profile({"Stream #1": kernels()}, plane="/host:CPU"))


def test_a_profile_of_unequal_calls_is_refused(a_gpu):
    with pytest.raises(ValueError, match="got 0 in all"):
        measure.measure(lambda: None, 3)
    a_gpu["Stream #13"] = kernels()[:-1]
    with pytest.raises(ValueError, match="expected as many kernels in each, got 5 in all"):
        measure.measure(lambda: None, 3)
    a_gpu["Stream #13"].append(("other", 2018, 30))
    with pytest.raises(ValueError, match="expected the same kernels in each"):
        measure.measure(lambda: None, 3)


def test_graph_options_exist(a_gpu):
    """XLA refuses names it does not know, so that a renamed option cannot silently bring the gaps back."""
    assert measure.compiled(lambda x: x + 1, jnp.ones(2))(jnp.ones(2)).tolist() == [2, 2]
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options={"xla_gpu_no_such_option": 1})


def test_the_clock(monkeypatch):
    """Calls warm up, then each measurement is the mean of its calls, without what prepares it."""
    now, happened = [0.0], []

    def call():
        happened.append("call")
        now[0] += 0.001 * len(happened)

    def prepare():
        happened.append("prepare")
        now[0] += 1

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    timing = measure.by_clock(call, repeats=3, calls=2, prepare=prepare)
    assert happened == ["prepare", "call", "call"] * 5  # three calls warm up
    np.testing.assert_allclose(timing[:3], (11.5, 8.5, 14.5))
    assert timing.over(2)[:3] == (timing.ms / 2, timing.fastest / 2, timing.slowest / 2)
    happened.clear()
    assert measure.by_clock(call, repeats=2)[:3] == pytest.approx((4.5, 4, 5))


@pytest.mark.parametrize(
    "row, what, floor",
    [
        (Row(16, 64, (32768,)), "forward", 0.370),  # products
        (Row(16, 64, (1024,) * 8), "forward", 0.095),  # states in and out
        (Row(16, 32, (1024,) * 8), "forward", 0.055),
        (Row(2, 8, (2048,)), "forward", 0.003),
        (Row(16, 32, (32768,)), "backward", 0.565),
        (Row(32, 32, (8,) * 64), "backward", 0.101),  # states, and both of their cotangents
        (Row(16, 32, (32768,)), "training", 0.761),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_floor(row, what, floor):
    assert round(bench_rows.floor_ms(row, what), 3) == floor


def test_rows():
    """Names are distinct; lengths that are said to sum to something do; every library's column has its place."""
    for rows in (bench_rows.FORWARD, bench_rows.BACKWARD):
        assert len({row.name for row in rows}) == len(rows)
        assert all(sum(row.lengths) in (2048, 8192, 32768) for row in rows)
        assert all(row.HV % row.Hk == 0 and row.HV >= 4 for row in rows)
    rows = {row.name: row for row in bench_rows.FORWARD}
    assert rows["2,8 4096x8"].times == {"FlashQLA": 0.200, "fla": 0.480, "FlashInfer": 0.297}
    assert rows["16,64 16384x2"].lengths == (16384, 16384)
    assert rows["16,32 1x32768 no decay"].times == {}
    assert {row.name: row for row in bench_rows.BACKWARD}["16,32 4096x8"].times == {
        "FlashQLA": 1.926,
        "fla": 6.293,
    }
    assert tuple(peer.name for peer in peers.PEERS)[:3] == bench_rows.PEERS


def test_inputs():
    """Unit keys, a quarter of the heads without decay, nothing zero or repeated, sequences packed."""
    row = Row(2, 8, (30, 20), width=16)
    x = bench_rows.inputs(row, "float32", seed=3)
    assert x.q.shape == (1, 50, 2, 16) and x.v.shape == x.do.shape == (1, 50, 8, 16)
    assert x.initial_state.shape == x.dh_T.shape == (2, 8, 16, 16)
    assert row.cu_seqlens is not None and row.cu_seqlens.tolist() == [0, 30, 50]
    np.testing.assert_allclose(jnp.linalg.norm(x.k, axis=-1), 1, rtol=1e-6)
    assert np.flatnonzero((x.g == 0).all(axis=(0, 1))).tolist() == [3, 7]
    assert (x.g <= 0).all() and 0 < x.beta.min() and x.beta.max() < 1
    arrays = [np.ravel(a)[:100] for a in x]
    assert all(a.any() for a in arrays)
    assert not any(np.array_equal(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    other = bench_rows.inputs(row, "float32", seed=4)
    assert not np.array_equal(x.v, other.v)


def test_part_is_the_rule_on_those_heads():
    """The rule on the few heads that are compared gives the same there as on all heads, gradients included."""
    problem = Problem(Row(3, 6, (9, 4), width=4), "training", "float32", 0)
    few = problem.expected
    step, args = passes.call("training", "recurrent", problem.x, None, problem.cu_seqlens)
    part = passes.Part.of(problem.row, "training")
    full = {name: part(name, y) for name, y in passes.named("training", jax.jit(step)(*args)).items()}
    assert few.keys() == full.keys() == set(NAMES)
    assert max(passes.errors(few, full).values()) < 1e-5
    assert part.key.tolist() == [0, 2] and part.value.tolist() == [0, 1, 4, 5]
    assert passes.Part.of(problem.row, "forward").value.tolist() == [0, 5]


def test_table():
    """Markdown: a column for each number, empty where a row has none; what is no text or number is left out."""
    rows = [
        {"name": "a", "ms": 0.25, "errors": {"o": 1}},
        {"name": "bc", "ms": 211700.4, "more": 1e-7, "n": 3},
    ]
    assert table(["name", "of"], rows).splitlines() == [
        "| name |     ms |    more |   n |",
        "| ---- | -----: | ------: | --: |",
        "| a    |   0.25 |         |     |",
        "| bc   | 211700 | 1.0e-07 |   3 |",
    ]


def test_table_on_a_terminal():
    """A column that does not fit follows below with the same keys; keys that do not differ are said once."""
    rows = [{"length": 2**i, "by": "x", **{f"number {j}": 1.0 * j for j in range(12)}} for i in (10, 15)]
    said, *blocks = table(["length", "by"], rows, 80).split("\n\n")
    assert said == "by x" and len(blocks) == 2
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80
    assert [line.split()[0] for block in blocks for line in block.splitlines()] == [
        "length",
        "1024",
        "32768",
    ] * 2
    cells = " ".join(block.splitlines()[2] for block in blocks).split()
    assert sorted(cells) == sorted(["32768"] * 2 + [str(j) for j in range(12)])
    assert "by" in table(["length", "by"], rows[:1], 80).splitlines()[0]
    assert max(map(len, table(["length"], [{"length": "y" * 90, "ms": 1.0}], 80).splitlines())) > 90


@dataclasses.dataclass(frozen=True)
class Three(Benchmark):
    """Three cases, of which the second runs out of memory and the third is wrong."""

    seen: list = dataclasses.field(default_factory=list)

    def cases(self, note):
        note("seen once")
        for i in range(3):
            yield Case({"case": i}, lambda i=i: self.time(i))

    def time(self, i):
        if i == 1:
            raise MemoryError("too large")
        errors = {"o": 0.1 * i}
        yield Result({"case": i, "half": 1}, Timing(1.0, 0.5, 2.0), {"no": None, "nan": math.nan}, errors)
        failure = benchmark.wrong(errors, {"o": 0.1})
        yield (
            Result({"case": i, "half": 2}, errors=errors, failure=failure) if failure else Result({"case": i})
        )

    def save(self, content, results):
        super().save(content, results)
        self.seen.append(len(json.loads(self.json.read_text())["results"]) if self.json else len(results))


def run(bench, **console):
    """Exit status, table and progress."""
    out, progress = (Console(file=io.StringIO(), **x) for x in (console, {}))
    return benchmark.run(bench, out, progress), out.file.getvalue(), progress.file.getvalue()


def test_the_loop_over_cases(tmp_path):
    """Results are written and told as they come. One that failed is not in the table and does not lose the others."""
    bench = Three(json=tmp_path / "three.json")
    status, out, progress = run(bench, width=80, force_terminal=True)
    assert status == 1 and bench.seen == [2, 3, 5, 5]
    assert "case 0, half 1: 1 ms (0.5 to 2)" in progress and progress.startswith("python ")
    assert out.splitlines()[-3:] == [
        "seen once",
        "FAILED case 1: raised MemoryError: too large",
        "FAILED case 2, half 2: wrong: o 2.0e-01 > 1.0e-01",
    ]
    assert [line.split() for line in out.splitlines()[:3]] == [
        ["case", "half", "ms", "fastest", "slowest", "error"],
        ["0", "1", "1", "0.5", "2", "0"],
        ["0"],
    ]
    content = json.loads((tmp_path / "three.json").read_text())
    assert content["results"][0] == {
        **{"case": 0, "half": 1, "ms": 1.0, "fastest": 0.5, "slowest": 2.0, "kernels": []},
        **{"error": 0.0, "errors": {"o": 0.0}},
    }
    assert content["results"][-1]["failure"].startswith("wrong: o") and content["notes"] == ["seen once"]
    assert content["options"]["repeats"] == "9" and "jax" in content["versions"]
    status, out, _ = run(Three(max_minutes=1e-9))
    assert status == 1 and "not timed, --max-minutes: case 2" in out


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """A machine whose kernels are the recurrence, with a clock that says 1 ms, and a table of two small rows."""
    seen = []

    def rule(*args, implementation, cu_seqlens=None, **options):
        traced = isinstance(cu_seqlens, jax.core.Tracer)
        seen.append((implementation, None if cu_seqlens is None else "traced" if traced else "known"))
        cu = None if cu_seqlens is None else jnp.asarray(cu_seqlens)
        return gdn_jax.gated_delta_rule(*args, implementation="recurrent", cu_seqlens=cu, **options)

    monkeypatch.setattr(passes, "gated_delta_rule", rule)
    supported = dict.fromkeys(("mosaic_gpu", "chunked", "recurrent"))
    monkeypatch.setattr(rule_bench, "supported_implementations", lambda *_, **__: supported)
    for module in (rule_bench, kernel_bench):
        monkeypatch.setattr(module, "no_kernels", lambda: None)
    monkeypatch.setattr(measure, "measure", lambda *_: Timing(1.0, 0.9, 1.2))
    rows = [Row(1, 2, (6,), (4.0,), width=8), Row(1, 2, (5, 3), (2.0, 8.0), width=8)]
    monkeypatch.setattr(bench_rows, "FORWARD", rows)
    monkeypatch.setattr(bench_rows, "BACKWARD", [row._replace(decay=False) for row in rows])
    return seen


def cells(text):
    """The rows of the Markdown table in a text."""
    lines = [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_table_is_the_default_where_the_kernels_run(kernels_everywhere, tmp_path):
    out = tmp_path / "bench.json"
    status, text, _ = run(RuleBenchmark(passes=("forward",), json=out))
    assert status == 0
    assert [(line["row"], line["lengths"], line["ratio"]) for line in cells(text)] == [
        ("1,2 1x6 D=8", "", "0.25"),
        ("1,2 5+3 D=8", "known", "0.5"),
        ("1,2 5+3 D=8", "traced", "0.5"),
    ]
    assert "over 2 rows: geometric mean 0.354, worst 0.500 (1,2 5+3 D=8)" in text
    assert set(kernels_everywhere) >= {("mosaic_gpu", kind) for kind in (None, "known", "traced")}
    for peer in peers.PEERS:
        assert f"{peer.name}: not installed" in text
    stored = json.loads(out.read_text())
    assert [r["ratio"] for r in stored["results"]] == [0.25, 0.5, 0.5]
    assert stored["results"][1]["ms"] == 1 and stored["results"][1]["published"]["fla"] == 8
    assert stored["results"][0]["errors"].keys() == {"o", "final_state"}
    assert len(stored["summary"]) == 2 and [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_ratios_go_to_the_fastest_other_library(monkeypatch):
    """Published or measured here; the floor is that of a GPU, in 16 bits."""
    problem = Problem(Row(16, 32, (4096,) * 8, (0.637, 1.964, 0.432)), "forward", "bfloat16", 0)
    result = Result({}, Timing(0.216, 0.21, 0.23), {"first s": 2.5}, {"o": 4e-3})
    known = problem.beside(result, {}).values()
    assert (known["best peer"], known["its ms"], known["ratio"]) == ("FlashInfer", 0.432, 0.5)
    assert known["first s"] == 2.5 and "floor ms" not in known
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    another = problem.beside(result, {"fla": Timing(0.4, 0.4, 0.5)}).values()  # a GPU without kernels of ours
    assert another["best peer"] == "fla (here)" and not another["published"] and "floor ms" not in another
    monkeypatch.setattr(passes, "no_kernels", lambda: None)
    here = problem.beside(result, {"fla": Timing(0.4, 0.4, 0.5)}).values()
    assert here["best peer"] == "fla (here)" and here["ratio"] == pytest.approx(0.54)
    assert here["peers"]["fla"]["slowest"] == 0.5 and here["x floor"] == 0.216 / here["floor ms"]
    alone = problem.beside(result._replace(timing=None), {}).values()
    assert "ratio" not in alone and alone["its ms"] == 0.432
    other = dataclasses.replace(problem, row=Row(1, 1, (8,)), dtype="float32").beside(result, {}).values()
    assert not {"best peer", "ratio", "floor ms"} & other.keys()


def test_summary():
    """Rows with a single sequence count in both lines, packed ones in that of their lengths."""

    def result(row, lengths, ratio):
        about = {"row": row, "pass": "forward", "by": "mosaic_gpu", "lengths": lengths}
        return Result(about, numbers={} if ratio is None else {"ratio": ratio})

    group = [
        result("a", "", 0.5),
        result("b", "known", 0.5),
        result("b", "traced", 2.0),
        result("c", "", None),
    ]
    known, traced = passes.summary(group)
    assert known.startswith("forward, mosaic_gpu, packed lengths known: ") and "over 2 rows" in known
    assert "geometric mean 0.500, worst 0.500" in known
    assert "geometric mean 1.000, worst 2.000 (b)" in traced
    assert passes.summary(group[-1:]) == []


def test_passes_have_their_rows(kernels_everywhere):
    """Published times of the backward say nothing about forward and backward together."""
    for what, published, decay in (
        ("forward", (4.0,), True),
        ("backward", (4.0,), False),
        ("training", (), False),
    ):
        row, kind = RuleBenchmark(passes=(what,)).plan()[0][0]
        assert (row.published, row.decay, kind) == (published, decay, what)
    assert [what for _, what in RuleBenchmark(rows=("1x6",)).plan()[0]] == ["forward", "training"]


def test_wrong_results_are_not_timed(kernels_everywhere, monkeypatch):
    right = passes.gated_delta_rule

    def wrong(*args, implementation, **options):
        o, state = right(*args, implementation=implementation, **options)
        return (o if implementation == "recurrent" else 2 * o), state

    monkeypatch.setattr(passes, "gated_delta_rule", wrong)
    status, text, _ = run(RuleBenchmark(passes=("forward",), rows=("1x6",)))
    assert status == 1 and "|" not in text
    assert "FAILED row 1,2 1x6 D=8, pass forward, by mosaic_gpu: wrong: o 1.0e+00 > 5.0e-03" in text


def test_what_raises_does_not_lose_the_others(kernels_everywhere, monkeypatch):
    times = iter([1 / 2, 0])
    monkeypatch.setattr(measure, "measure", lambda *_: Timing(1 / next(times), 1.0, 2.0))
    bench = RuleBenchmark(
        passes=("forward",), rows=("1x6",), implementations=("chunked", "recurrent"), peers=False
    )
    status, text, _ = run(bench)
    assert status == 1 and [line["by"] for line in cells(text)] == ["chunked"]
    assert "by recurrent: raised ZeroDivisionError: division by zero" in " ".join(text.split())


@pytest.mark.parametrize(
    "what, name, packed",
    [
        ("forward", "half", False),
        pytest.param("forward", "full, segments of 8", True, marks=pytest.mark.slow),
        pytest.param("backward", "full", True, marks=pytest.mark.slow),
    ],
)
def test_variants_are_calls_of_the_kernels(what, name, packed):
    """The timed call lowers for an NVIDIA GPU, with the results that are compared."""
    row = Row(8, 8, (1500, 548) if packed else (2048,))
    x, config = bench_rows.inputs(row), kernel_bench.VARIANTS[what][name]

    def step_of(x, cu):
        step, args = kernel_bench.call(what, config, x, None, cu)
        return passes.named(what, step(*args))

    cu = None if row.cu_seqlens is None else jnp.asarray(row.cu_seqlens)
    traced = jax.jit(step_of).trace(x, cu)
    like = {"o": x.v, "final_state": x.initial_state, "dh_0": x.initial_state}
    for result, y in traced.out_info.items():
        primal = like.get(result)
        primal = getattr(x, result[1:]) if primal is None else primal
        assert (y.shape, y.dtype) == (primal.shape, primal.dtype), result
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
def test_variants_are_timed_kernel_by_kernel(kernels_everywhere, tmp_path, monkeypatch):
    """Every variant on every row of both passes, compared first; the kernels' own times stand beside the sum."""
    timing = Timing(1.0, 0.9, 1.2, (("gates", 0.01), ("walk", 0.9)))
    monkeypatch.setattr(measure, "measure", lambda *_: timing)
    configs = []

    def call(what, config, x, known, cu):
        configs.append(config)
        if config == kernel_bench.FORWARD["half"]:
            raise ValueError("does not fit")
        return passes.call(what, "recurrent", x, known, cu)

    monkeypatch.setattr(kernel_bench, "call", call)
    out = tmp_path / "bench.json"
    status, text, _ = run(KernelBenchmark(variants=("auto", "half"), json=out))
    assert status == 1 and "10.0 900.0" in text
    assert "FAILED row 1,2 1x6 D=8, pass forward, by half: raised ValueError: does not fit" in text
    assert "backward, half, packed lengths known: ratio" in text
    results = json.loads(out.read_text())["results"]
    both = [("1,2 1x6 D=8", ""), ("1,2 5+3 D=8", "known"), ("1,2 5+3 D=8", "traced")]
    expected = [
        (what, row, variant, lengths)
        for what in ("forward", "backward")
        for name in ("1x6", "5+3")
        for variant in ("auto", "half")
        for row, lengths in both
        if name in row
    ]
    names = [(r["pass"], r["row"].removesuffix(" no decay"), r["by"], r.get("lengths", "")) for r in results]
    assert names == expected
    assert results[-1]["errors"].keys() == {"dq", "dk", "dv", "dg", "dbeta", "dh_0"}
    assert configs[-1] == kernel_bench.BACKWARD["half"]


def test_variants_that_are_none(kernels_everywhere):
    with pytest.raises(
        RunError, match="--variants: expected names out of auto; full; half for the backward, got fast"
    ):
        KernelBenchmark(variants=("auto", "fast"), passes=("backward",)).check()


def test_custom_rows(tmp_path):
    """Packed lengths, forward and backward, by the clock; a form that cannot run is told."""
    out = tmp_path / "bench.json"
    sizes = "--heads 1 2 --width 8 --lengths 5 3 --repeats 2 --calls 2 --implementations recurrent mosaic_gpu"
    assert cli.main(["bench", "rule", "--passes", "backward", *sizes.split(), "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    assert content["notes"][0].startswith("1,2 5+3 D=8: mosaic_gpu cannot run: ")
    (result,) = content["results"]
    assert result["pass"] == "backward" and result["by"] == "recurrent"
    assert result["errors"].keys() == {"dq", "dk", "dv", "dg", "dbeta", "dh_0"}
    assert 0 < result["fastest"] <= result["ms"] <= result["slowest"] and result["first s"] > 0
    assert not {"floor ms", "ratio"} & result.keys()


def test_calls_of_the_clock_go_on_from_the_last_state(monkeypatch):
    """The results that are compared are those of the first call."""
    states = []

    def make():
        return lambda state, x: ((state,), state + x), (jnp.zeros(3), jnp.ones(3))

    def times(call, repeats, calls):
        states.extend(float(call()[0][0][0]) for _ in range(3))
        return Timing(1.0, 1.0, 1.0)

    monkeypatch.setattr(measure, "measure", times)
    monkeypatch.setattr(passes, "named", lambda what, results: {})
    problem = Problem(Row(1, 1, (4,), width=8), "forward", "float32", 0)
    assert problem.timed({}, make, calls=2, repeats=2).failure is None
    assert states == [0, 1, 2]


def test_default_is_one_row_where_the_kernels_do_not_run():
    rows, dtype, implementations = RuleBenchmark().plan()
    assert rows == [(Row(4, 4, (2048,), width=64), what) for what in ("forward", "training")]
    assert dtype == "float32" and implementations == ("mosaic_gpu", "chunked", "recurrent")


NO_KERNELS = "(the default device is a cpu; the kernels need an NVIDIA GPU)"


@pytest.mark.parametrize(
    "words, message",
    [
        ("rule --heads 2 3", "--heads: expected value heads that are a multiple of the key heads, got 2 3"),
        ("rule --lengths 4 0", "--lengths: expected a number above 0, got 0"),
        ("rule --lengths", "--lengths: expected one value or more, got none"),
        ("rule --width 257", "--width: expected 1 to 256, got 257"),
        ("rule --repeats 0", "--repeats: expected a number above 0, got 0"),
        ("rule --calls 0", "--calls: expected a number above 0, got 0"),
        ("rule --passes", "--passes: expected different values, at least one, got none"),
        ("rule --implementations fast", "fast"),
        (
            "rule --rows 1x --width 8",
            "--rows: expected no --heads, --lengths, --width or --dtype with it, got 1x",
        ),
        ("rule --rows 1x", f"--rows: expected a GPU {NO_KERNELS}, got 1x"),
        ("kernels --variants auto", f"--variants: expected a device for the kernels {NO_KERNELS}, got auto"),
        ("rule --json nowhere/x.json", "--json: expected a file in a folder that exists, got nowhere/x.json"),
        ("decode --batches 0", "--batches: expected a number above 0, got 0"),
        (
            "decode --heads 2 3",
            "--heads: expected a number of value heads that the key heads divide, got 2 3",
        ),
        ("decode --width 300", "--width: expected 1 to 256, got 300"),
        ("decode --implementations triton", "triton"),
        ("decode --tokens 17", "--tokens: expected no more than a ring holds, got 17"),
        ("prefill --tokens 0", "--tokens: expected a number above 0, got 0"),
        ("prefill --tokens 70 --requests 71", "--requests: expected no more than there are tokens, got 71"),
        ("step --lengths 60", "--lengths: expected divisors of --tokens 32768, got 60"),
        ("step --model qwen9", "--model: expected one of tiny, 0.4b, 1.3b, qwen3.5-small"),
        ("step --tokens 0", "--tokens: expected a number above 0, got 0"),
        ("step --options depth=3", "--options: expected fields of ModelConfig"),
        ("step --options remat=some", "--options: expected values that fit"),
        ("generate --model qwen9", "--model: expected one of tiny, 0.4b, 1.3b, qwen3.5-small"),
        ("generate --contexts 8 -1", "--contexts: expected a number above 0, got -1"),
        ("generate --prefill -1", "--prefill: expected 0 or more, got -1"),
        ("generate --largest-cache 0", "--largest-cache: expected a number above 0, got 0"),
        ("generate --figure nowhere/x.png", "--figure: expected a file in a folder that exists"),
        ("parts --length 60", "--length: expected a divisor of --tokens 65536, got 60"),
        ("parts --only flight", "--only: expected parts of names such as residual sum and RMSNorm"),
        ("scale --mesh data=99", "--mesh: expected at most"),
        ("scale --length 60", "--length: expected a divisor of --step-tokens 32768, got 60"),
        ("scale --kernels", "--kernels: expected a GPU to profile, got cpu"),
        (
            "walk",
            "gdn bench: expected one of rule, kernels, parts, step, generate, decode, prefill, scale, got walk",
        ),
        ("--width 257", "--width: expected 1 to 256, got 257"),
    ],
)
def test_wrong_options_are_one_line(words, message, monkeypatch, capsys):
    """They are told before anything is timed."""
    monkeypatch.setattr(measure, "by_clock", lambda *_, **__: pytest.fail("something was timed"))
    assert cli.main(["bench", *words.split()]) != 0
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_sizes_on_a_cpu(monkeypatch):
    """They are smaller where none is named, and options that fit each other."""
    smaller = {name: cls for name, (cls, _) in command.BENCHMARKS.items() if cls.on_cpu}
    assert {*smaller} == {*command.BENCHMARKS} - {"rule", "kernels"}
    for cls in smaller.values():
        found, words = benchmark.sized(cls(), ["--repeats"] if "repeats" not in cls.on_cpu else [])
        found.check()
        assert dataclasses.asdict(found) == dataclasses.asdict(cls()) | cls.on_cpu
        assert all(f"--{name.replace('_', '-')} " in words for name in cls.on_cpu)
        for name in cls.on_cpu:  # typed, though it be the default
            assert benchmark.sized(cls(), [f"--{name.replace('_', '-')}"]) == (cls(), "")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert benchmark.sized(smaller["step"](), []) == (smaller["step"](), "")


def test_sizes_that_are_typed_stay(monkeypatch):
    """Also by "=", with "_", and where they are the defaults."""
    asked = []
    monkeypatch.setattr(command, "run", lambda bench, *_: asked.append((bench, _[2])) or 0)
    for words in (
        "step",
        "step --repeats 2",
        "step --tokens 32768",
        "step --tokens=32768",
        "step --model 0.4b",
    ):
        assert cli.main(["bench", *words.split()]) == 0
    tokens, notes = ([f(x) for x in asked] for f in (lambda x: x[0].tokens, lambda x: x[1]))
    assert tokens == [2048, 2048, 32768, 32768, 32768]
    assert [len(x) for x in notes] == [1, 1, 0, 0, 0] and "--tokens 2048" in notes[0][0]
    assert cli.main(["bench", "scale", "--step_tokens", "32768"]) == 0 and not asked[-1][1]


def test_help(capsys):
    """A line for each benchmark; one by itself says all, and its options."""
    assert cli.main(["bench", "--help"]) == 0
    every = capsys.readouterr().out
    assert "(default: rule)" in every and all(name in every for name in command.BENCHMARKS)
    assert "--lengths" not in every
    assert cli.main(["bench", "step", "--help"]) == 0
    assert {"--lengths", "--max-minutes", "AdamW"} <= {*capsys.readouterr().out.replace(",", "").split()}


def test_unknown_part_of_a_row(kernels_everywhere):
    with pytest.raises(RunError, match="--rows: expected parts of names such as 1,2 1x6 D=8, got 7"):
        RuleBenchmark(rows=("7",)).plan()


def test_peers_that_are_there_need_a_gpu(monkeypatch):
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: None if name == "tilelang" else object()
    )
    reasons = {peer.name: peers.missing(peer) for peer in peers.PEERS}
    assert reasons["FlashQLA"] == "not installed (tilelang not found)"
    assert reasons["fla"] == "needs a GPU, JAX's default device is a cpu"


@pytest.mark.parametrize("what", ["forward", "training"])
def test_a_peer_in_jax(what, monkeypatch, ticking_clock):
    """jax-linear-attention takes rows of one length as a batch; a function of its signature stands for it."""
    asked = []

    def linear_attention(kind, q, k, v, *, impl="auto", g, beta, initial_state, output_final_state):
        asked.append((kind, impl, output_final_state, q.shape[:2]))
        return gdn_jax.gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, implementation="recurrent"
        )

    monkeypatch.setitem(sys.modules, "jla", types.ModuleType("jla"))
    monkeypatch.setitem(sys.modules, "jla.ops", types.SimpleNamespace(linear_attention=linear_attention))
    peer, row = peers.PEERS[-1], Row(1, 2, (3, 3), width=8)
    problem = Problem(row, what, "bfloat16", 0)
    timing, results = peer.measure(problem, 2)
    assert timing.ms == 1000 and set(asked) == {("gated_deltanet", "mosaic_gpu", True, (2, 3))}
    assert results.keys() == problem.expected.keys()
    assert passes.miss(passes.errors(problem.expected, results), problem.x, "bfloat16") is None
    assert peer.takes(row) and not peer.takes(Row(1, 2, (3, 4)))


def test_peers_that_are_wrong_or_raise_are_told(kernels_everywhere, monkeypatch):
    """The time of the one that is right stands beside ours."""
    right = Problem(bench_rows.FORWARD[0], "forward", "bfloat16", 0).expected

    def measured(peer, *_):
        if peer.name == "fla":
            raise OSError("no compiler")
        factor = 2 if peer.name == "FlashInfer" else 1
        return Timing(2.0, 2.0, 2.0), {name: factor * x for name, x in right.items()}

    monkeypatch.setattr(peers, "missing", lambda peer: None)
    for kind in (peers.Peer, peers.JaxPeer):
        monkeypatch.setattr(kind, "measure", measured)
    status, text, _ = run(RuleBenchmark(passes=("forward",), rows=("1x6",)))
    assert status == 0 and cells(text)[0]["best peer"] == "FlashQLA (here)"
    assert "1,2 1x6 D=8: fla raised OSError: no compiler" in text
    assert "1,2 1x6 D=8: FlashInfer is not counted, wrong: o 1.0e+00 > 2.0e-02" in text
