"""`gdn bench`: times from a profile, the rows and their floor, the table, custom rows on this machine, errors."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from rich.console import Console

import gdn_jax
from gdn_jax import cli
from gdn_jax.bench import (
    device_time,
    passes,
    peers,
)
from gdn_jax.bench import (
    kernels as kernel_bench,
)
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench import (
    rule as bench,
)
from gdn_jax.bench import (
    table as bench_table,
)
from gdn_jax.bench.device_time import Timing
from gdn_jax.bench.rows import Row
from gdn_jax.bench.rule import BenchOptions
from gdn_jax.bench.table import Result
from gdn_jax.checks.accuracy import NAMES
from gdn_jax.commands.errors import RunError

TINY = (
    "--heads",
    "1",
    "2",
    "--width",
    "8",
    "--repeats",
    "2",
    "--calls",
    "2",
    "--implementations",
    "recurrent",
)


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


def test_a_profile_gives_spans_and_kernels():
    """From the first kernel's start to the last one's end: 10 + 1 + 30, 12 + 1 + 30 and 17 + 1 + 30 us."""
    timing = device_time.device_timing(profile({"Stream #13(Compute)": kernels()}), 3)
    np.testing.assert_allclose(timing[:3], (0.043, 0.041, 0.048))
    assert [name for name, _ in timing.kernels] == ["gates", "walk"]
    np.testing.assert_allclose([ms for _, ms in timing.kernels], (0.012, 0.030))


def test_a_profile_by_kernel_of_one_device():
    """Sums over the calls, by time; with the time between kernels, where one that runs at the same time is none."""
    streams = {"Stream #1": [("a", 0, 10), ("b", 12, 4), ("a", 20, 12)], "Stream #2": [("nccl", 11, 10)]}
    found = device_time.kernels(profile(streams), 0)
    assert not device_time.kernels(profile(streams), 1)
    times = [(name, launches, round(ms, 6)) for name, launches, ms in device_time.by_kernel(found, 2)]
    assert times == [("a", 1, 0.011), ("nccl", 0.5, 0.005), ("b", 0.5, 0.002), ("between kernels", 0, 0.0005)]


def test_a_profile_counts_every_kernel_once():
    """Other lines and planes show the same work again; a second stream may end last."""
    lines = {
        "Stream #13(Compute)": kernels(),
        "Stream #14(MemcpyD2D)": [("copy", start + 5, 100) for start, _ in CALLS],
        "XLA Modules": [("jit_step", start - 1, 60) for start, _ in CALLS[1:]],
    }
    timing = device_time.device_timing(profile(lines), 3)
    np.testing.assert_allclose(timing[:3], (0.105, 0.105, 0.105))
    with pytest.raises(ValueError, match="got 0 in all"):
        device_time.device_timing(profile({"Stream #1": kernels()}, plane="/host:CPU"), 3)


def test_a_profile_of_unequal_calls_is_refused():
    with pytest.raises(ValueError, match="expected as many kernels in each, got 5 in all"):
        device_time.device_timing(profile({"Stream #13": kernels()[:-1]}), 3)
    odd = [*kernels()[:-1], ("other", 2018, 30)]
    with pytest.raises(ValueError, match="expected the same kernels in each"):
        device_time.device_timing(profile({"Stream #13": odd}), 3)


def test_graph_options_exist():
    """XLA refuses names it does not know, so that a renamed option cannot silently bring the gaps back."""
    x = jnp.ones(2)
    compiled = jax.jit(lambda x: x + 1).lower(x).compile(compiler_options=device_time.GRAPH_OPTIONS)
    assert compiled(x).tolist() == [2, 2]
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(lambda x: x + 1).lower(x).compile(compiler_options={"xla_gpu_no_such_option": 1})


def test_chained_calls_use_the_state_of_the_last():
    """The program's own results are those of one call; the time is that of one of several calls."""

    def step(state, x):
        return (state + x,), state * 2

    state, x = jnp.full(3, 2.0), jnp.ones(3)
    program = device_time.compile_step(step, state, x)
    assert program.results[0][0].tolist() == [3, 3, 3] and program.results[1].tolist() == [4, 4, 4]
    assert program.first_s > 0
    timing = device_time.measure(program, state, x, calls=3, repeats=4)
    assert 0 < timing.fastest_ms <= timing.median_ms <= timing.slowest_ms


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
    for table in (bench_rows.FORWARD, bench_rows.BACKWARD):
        assert len({row.name for row in table}) == len(table)
        assert all(sum(row.lengths) in (2048, 8192, 32768) for row in table)
        assert all(row.HV % row.Hk == 0 and row.HV >= 4 for row in table)
    rows = {row.name: row for row in bench_rows.FORWARD}
    assert rows["2,8 4096x8"].times == {"FlashQLA": 0.200, "fla": 0.480, "FlashInfer": 0.297}
    assert rows["16,64 16384x2"].lengths == (16384, 16384)
    assert rows["16,32 1x32768 no decay"].times == {}
    assert {row.name: row for row in bench_rows.BACKWARD}["16,32 4096x8"].times == {
        "FlashQLA": 1.926,
        "fla": 6.293,
    }
    assert tuple(peer.name for peer in peers.PEERS) == bench_rows.PEERS


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
    """What is compared: the rule on few heads gives the same there as on all heads, gradients included."""
    row = Row(3, 6, (9, 4), width=4)
    x = bench_rows.inputs(row, "float32")
    few = passes.reference(row, "training", x)
    step, args = passes.call("training", "recurrent", x, None, jnp.asarray(row.cu_seqlens))
    part = passes.Part.of(row, "training")
    full = {name: part(name, y) for name, y in passes.named("training", jax.jit(step)(*args)).items()}
    assert few.keys() == full.keys() == set(NAMES)
    assert max(passes.errors(few, full).values()) < 1e-5
    assert part.key.tolist() == [0, 2] and part.value.tolist() == [0, 1, 4, 5]
    assert passes.Part.of(row, "forward").value.tolist() == [0, 5]


def test_table():
    """Ratios go to the fastest other library, published or measured; empty columns are left out; misses are told."""
    row = Row(16, 32, (4096,) * 8, (0.637, 1.964, 0.432))
    result = Result(row, "forward", "mosaic_gpu", "known", Timing(0.216, 0.21, 0.23), 2.5, 10.0, {"o": 4e-3})
    assert result.best == ("FlashInfer", 0.432) and result.ratio == 0.5
    here = result._replace(peers={"fla": Timing(0.4, 0.4, 0.5)}, floor_ms=0.108)
    assert here.best == ("fla (here)", 0.4) and here.ratio == pytest.approx(0.54)
    failed = result._replace(
        lengths="traced", timing=None, failure="wrong: o 1.0e-01 > 8.0e-03", errors={"o": 0.1}
    )
    columns, lines = bench_table.grid([here, failed])
    assert dict(zip(columns, lines[0], strict=True)) == {
        "row": "16,32 4096x8",
        "pass": "forward",
        "implementation": "mosaic_gpu",
        "lengths": "known",
        "median ms": "0.2160",
        "spread ms": "0.2100 to 0.2300",
        "best peer": "fla (here)",
        "its ms": "0.400",
        "ratio": "0.540",
        "floor ms": "0.108",
        "% of floor": "50",
        "first call s": "2.5",
        "temporary MiB": "10.0",
        "error": "4.0e-03",
        "fla here": "0.400",
    }
    second = dict(zip(columns, lines[1], strict=True))
    assert second["error"] == "FAILED 1.0e-01" and second["median ms"] == second["ratio"] == ""
    columns, _ = bench_table.grid([result._replace(row=Row(1, 1, (8,)), lengths="")])
    assert not {"best peer", "ratio", "floor ms", "lengths", "fla here"} & set(columns)
    text = bench_table.markdown(["row", "median ms"], [["a", "1.0"], ["b", ""]])
    assert text == "| row | median ms |\n| --- | ---: |\n| a | 1.0 |\n| b |  |"


def test_summary():
    """Rows with a single sequence count in both lines, packed ones in that of their lengths."""

    def result(name, published, lengths, ms):
        return Result(Row(1, name, (8,), (published,)), "forward", "mosaic_gpu", lengths, Timing(ms, ms, ms))

    group = [result(1, 1.0, "", 0.5), result(2, 1.0, "known", 0.5), result(2, 1.0, "traced", 2.0)]
    known, traced = bench_table.summary([*group, group[0]._replace(row=Row(1, 3, (8,)))])
    assert known.startswith("forward, mosaic_gpu, packed lengths known: ") and "over 2 rows" in known
    assert "geometric mean 0.500, worst 0.500" in known
    assert "geometric mean 1.000, worst 2.000 (1,2 1x8 D" not in traced
    assert "geometric mean 1.000, worst 2.000 (1,2 1x8)" in traced
    assert bench_table.summary([group[0]._replace(row=Row(1, 1, (8,)))]) == []


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
    monkeypatch.setattr(
        bench,
        "supported_implementations",
        lambda *_, **__: dict.fromkeys(("mosaic_gpu", "chunked", "recurrent")),
    )
    monkeypatch.setattr(device_time, "measure", lambda *_, **__: Timing(1.0, 0.9, 1.2))
    rows = [Row(1, 2, (6,), (4.0,), width=8), Row(1, 2, (5, 3), (2.0, 8.0), width=8)]
    monkeypatch.setattr(bench_rows, "FORWARD", rows)
    monkeypatch.setattr(bench_rows, "BACKWARD", [row._replace(decay=False) for row in rows])
    return seen


def test_table_is_the_default_where_the_kernels_run(kernels_everywhere, tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert bench.main(["--what", "forward", "--json", str(out), "--markdown"]) == 0
    text = capsys.readouterr().out
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ]
    table = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    assert [(line["row"], line["lengths"], line["ratio"]) for line in table] == [
        ("1,2 1x6 D=8", "", "0.250"),
        ("1,2 5+3 D=8", "known", "0.500"),
        ("1,2 5+3 D=8", "traced", "0.500"),
    ]
    assert "over 2 rows: geometric mean 0.354, worst 0.500 (1,2 5+3 D=8)" in text
    assert set(kernels_everywhere) >= {("mosaic_gpu", kind) for kind in (None, "known", "traced")}
    for peer in peers.PEERS:
        assert f"{peer.name}: not installed" in text
    stored = json.loads(out.read_text())
    assert [r["ratio"] for r in stored["results"]] == [0.25, 0.5, 0.5]
    assert stored["results"][1]["timing"]["median_ms"] == 1 and stored["results"][1]["published"]["fla"] == 8
    assert set(stored["results"][0]["errors"]) == {"o", "final_state"}
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_passes_have_their_rows(kernels_everywhere):
    """Published times of the backward say nothing about forward and backward together."""
    for what, published, decay in (
        ("forward", (4.0,), True),
        ("backward", (4.0,), False),
        ("training", (), False),
    ):
        row, kind = bench.plan(BenchOptions(what=what)).rows[0]
        assert (row.published, row.decay, kind) == (published, decay, what)
    assert [what for _, what in bench.plan(BenchOptions(rows=("1x6",))).rows] == ["forward", "training"]


def test_wrong_results_are_not_timed(kernels_everywhere, monkeypatch, capsys):
    right = passes.gated_delta_rule

    def wrong(*args, implementation, **options):
        o, state = right(*args, implementation=implementation, **options)
        return (o if implementation == "recurrent" else 2 * o), state

    monkeypatch.setattr(passes, "gated_delta_rule", wrong)
    assert bench.main(["--what", "forward", "--rows", "1x6"]) == 1
    text = capsys.readouterr().out
    assert "1,2 1x6 D=8 forward mosaic_gpu: wrong: o 1.0e+00 > 5.0e-03" in text
    assert "FAILED 1.0e+00" in text and "1.0000" not in text and "5+3" not in text


def test_what_raises_is_in_the_table(kernels_everywhere, monkeypatch, capsys):
    monkeypatch.setattr(device_time, "measure", lambda *_, **__: 1 / 0)
    assert bench.main(["--what", "forward", "--rows", "1x6", "--no-peers"]) == 1
    assert "raised ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_time_limit_names_what_is_missing(kernels_everywhere, capsys):
    assert bench.main(["--what", "forward", "--max-minutes", "-1"]) == 0
    assert "not timed, --max-minutes: 1,2 1x6 D=8 forward, 1,2 5+3 D=8 forward" in capsys.readouterr().out


@pytest.mark.parametrize(
    "what, name, packed",
    [
        ("forward", "half", False),
        pytest.param("forward", "full, segments of 8", True, marks=pytest.mark.slow),
        pytest.param("backward", "full", True, marks=pytest.mark.slow),
    ],
)
def test_variants_are_calls_of_the_kernels(what, name, packed):
    """What is timed lowers for an NVIDIA GPU, with the results that are compared."""
    row = Row(8, 8, (1500, 548) if packed else (2048,))
    x, config = bench_rows.inputs(row), kernel_bench.VARIANTS[what][name]

    def run(x, cu):
        step, args = kernel_bench.call(what, config, x, None, cu)
        return passes.named(what, step(*args))

    cu = None if row.cu_seqlens is None else jnp.asarray(row.cu_seqlens)
    traced = jax.jit(run).trace(x, cu)
    like = {"o": x.v, "final_state": x.initial_state, "dh_0": x.initial_state}
    for result, y in traced.out_info.items():
        primal = like.get(result)
        primal = getattr(x, result[1:]) if primal is None else primal
        assert (y.shape, y.dtype) == (primal.shape, primal.dtype), result
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
def test_variants_are_timed_kernel_by_kernel(kernels_everywhere, tmp_path, monkeypatch, capsys):
    """Every variant on every row of both passes, compared first; the kernels' own times stand beside the sum."""
    timing = Timing(1.0, 0.9, 1.2, (("gates", 0.01), ("walk", 0.9)))
    monkeypatch.setattr(device_time, "measure", lambda *_, **__: timing)
    configs = []

    def call(what, config, x, known, cu):
        configs.append(config)
        if config == kernel_bench.FORWARD["half"]:
            raise ValueError("does not fit")
        return passes.call(what, "recurrent", x, known, cu)

    monkeypatch.setattr(kernel_bench, "call", call)
    out = tmp_path / "bench.json"
    assert bench.main(["--variants", "auto;half", "--json", str(out)]) == 1
    text = capsys.readouterr().out
    assert "10.0 900.0" in text and "not installed" not in text
    assert "1,2 1x6 D=8 forward mosaic_gpu half: raised ValueError: does not fit" in text
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
    found = [(r["what"], r["row"].removesuffix(" no decay"), r["variant"], r["lengths"]) for r in results]
    assert found == expected
    assert set(results[-1]["errors"]) == {"dq", "dk", "dv", "dg", "dbeta", "dh_0"}
    assert configs[-1] == kernel_bench.BACKWARD["half"]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(variants="auto", width=8),
            "--variants: expected no --heads, --lengths, --width, --dtype or --implementations with it, got auto",
        ),
        (
            dict(variants="auto", what="training"),
            "--what: expected forward, backward or both with --variants, got training",
        ),
        (
            dict(variants="auto;fast", what="backward"),
            "--variants: expected names out of auto; full; half for the backward, got fast",
        ),
    ],
    ids=("size", "training", "name"),
)
def test_variants_that_cannot_be(kernels_everywhere, options, message):
    with pytest.raises(RunError) as error:
        bench.plan(BenchOptions(**options))
    assert str(error.value) == message


def test_custom_rows(tmp_path, capsys):
    """Packed lengths, forward and backward, by the clock; a form that cannot run is told."""
    out = tmp_path / "bench.json"
    names = ("--implementations", "recurrent", "mosaic_gpu")
    options = ("--what", "backward", "--lengths", "5", "3", "--json", str(out), *TINY[:-2], *names)
    assert cli.main(["bench", *options]) == 0
    text = capsys.readouterr().out
    assert "1,2 5+3 D=8: mosaic_gpu cannot run: " in text
    (result,) = json.loads(out.read_text())["results"]
    assert result["what"] == "backward" and result["implementation"] == "recurrent"
    assert set(result["errors"]) == {"dq", "dk", "dv", "dg", "dbeta", "dh_0"}
    timing = result["timing"]
    assert 0 < timing["fastest_ms"] <= timing["median_ms"] <= timing["slowest_ms"] and result["first_s"] > 0
    assert result["floor_ms"] is None and result["ratio"] is None


def test_default_is_one_row_where_the_kernels_do_not_run():
    planned = bench.plan(BenchOptions())
    assert planned.rows == [(Row(4, 4, (2048,), width=64), what) for what in ("forward", "training")]
    assert planned.dtype == "float32" and planned.implementations == ("mosaic_gpu", "chunked", "recurrent")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(heads=(2, 3)), "--heads: expected value heads that are a multiple of the key heads, got 2 3"),
        (dict(lengths=(4, 0)), "--lengths: expected one or more lengths of at least 1, got 4 0"),
        (dict(lengths=()), "--lengths: expected one or more lengths of at least 1, got "),
        (dict(width=257), "--width: expected 1 to 256, got 257"),
        (dict(repeats=0), "--repeats: expected at least 1, got 0"),
        (dict(calls=0), "--calls: expected at least 1, got 0"),
        (
            dict(implementations=("fast",)),
            "--implementations: expected names out of mosaic_gpu, chunked, recurrent, got fast",
        ),
        (
            dict(rows=("1x",), width=8),
            "--rows: expected no --heads, --lengths, --width or --dtype with it, got 1x",
        ),
        (
            dict(rows=("1x",)),
            "--rows: expected a device for the kernels "
            "(the default device is a cpu; the kernels need an NVIDIA GPU), got 1x",
        ),
        (
            dict(variants="auto"),
            "--variants: expected a device for the kernels "
            "(the default device is a cpu; the kernels need an NVIDIA GPU), got auto",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_errors_name_the_option(options, message):
    with pytest.raises(RunError) as error:
        bench.plan(BenchOptions(**options))
    assert str(error.value) == message


def test_errors_are_one_line(capsys):
    assert cli.main(["bench", "--heads", "2", "3"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines() == [
        "gdn: --heads: expected value heads that are a multiple of the key heads, got 2 3"
    ]


def test_json_that_cannot_be_written_is_told_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "time_row", lambda *arguments: pytest.fail("something was timed"))
    path = tmp_path / "missing" / "bench.json"
    assert cli.main(["bench", "--json", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"gdn: --json: expected a file in a folder that exists, got {path}\n"
    assert captured.out == ""


def test_unknown_part_of_a_row(kernels_everywhere):
    with pytest.raises(RunError, match="--rows: expected parts of names such as 1,2 1x6 D=8, got 7"):
        bench.plan(BenchOptions(rows=("7",)))


def test_json_has_no_nan():
    result = Result(Row(1, 1, (8,)), "forward", "chunked", failure="raised ValueError: x")
    assert "NaN" not in json.dumps(result.to_json()) and math.isnan(result.first_s)


def test_peers_that_are_there_need_a_gpu(monkeypatch):
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: None if name == "tilelang" else object()
    )
    reasons = {peer.name: peers.missing(peer) for peer in peers.PEERS}
    assert reasons["FlashQLA"] == "not installed (tilelang not found)"
    assert reasons["fla"] == "needs a GPU, JAX's default device is a cpu"


def test_console_width_does_not_cut_the_table(kernels_everywhere, capsys):
    bench.run(BenchOptions(what="forward", rows=("1x6",)), Console(width=240))
    assert "0.9000 to 1.2000" in capsys.readouterr().out
