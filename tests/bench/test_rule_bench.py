"""`gdn bench rule` and `kernels`: rows, inputs, what is compared, variants, other libraries."""

import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_tables import cells, run

import gdn_jax
from gdn_jax.bench import kernels as kernel_bench
from gdn_jax.bench import measure, passes, peers
from gdn_jax.bench import rows as bench_rows
from gdn_jax.bench import rule as rule_bench
from gdn_jax.bench.benchmark import Result
from gdn_jax.bench.kernels import KernelBenchmark
from gdn_jax.bench.measure import Timing
from gdn_jax.bench.passes import Problem
from gdn_jax.bench.rows import Row
from gdn_jax.bench.rule import RuleBenchmark
from gdn_jax.checks.accuracy import NAMES
from gdn_jax.commands import cli
from gdn_jax.commands.errors import RunError


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """Programs here run for microseconds and compile for seconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


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
    arrays = [np.ravel(a)[:100] for a in x if a is not None]
    assert all(a.any() for a in arrays)
    assert not any(np.array_equal(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    other = bench_rows.inputs(row, "float32", seed=4)
    assert not np.array_equal(x.v, other.v)


@pytest.mark.slow
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
    supported = dict.fromkeys(("mosaic_gpu", "mosaic_mma", "chunked", "recurrent"))
    monkeypatch.setattr(passes, "supported_implementations", lambda *_: supported)
    monkeypatch.setattr(rule_bench, "rule_implementation", lambda: "mosaic_gpu")
    for module in (rule_bench, kernel_bench):
        monkeypatch.setattr(module, "device_reason", lambda *_: None)
    monkeypatch.setattr(measure, "measure", lambda *_: Timing(1.0, 0.9, 1.2))
    rows = [Row(1, 2, (6,), (4.0,), width=8), Row(1, 2, (5, 3), (2.0, 8.0), width=8)]
    monkeypatch.setattr(bench_rows, "FORWARD", rows)
    monkeypatch.setattr(bench_rows, "BACKWARD", [row._replace(decay=False) for row in rows])
    return seen


@pytest.mark.slow
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
    monkeypatch.setattr(passes, "device_reason", lambda *_: None)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, name, packed",
    [
        ("forward", "half", False),
        pytest.param("forward", "full, segments of 8", True, marks=pytest.mark.crossed),
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
    assert dtype == "float32" and implementations == ("mosaic_gpu", "mosaic_mma", "chunked", "recurrent")


def test_unknown_part_of_a_row(kernels_everywhere):
    with pytest.raises(RunError, match="--rows: expected parts of names such as 1,2 1x6 D=8, got 7"):
        RuleBenchmark(rows=("7",)).plan()


def test_peers_that_are_there_need_a_gpu(monkeypatch):
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: None if name == "tilelang" else object()
    )
    reasons = {peer.name: peers.reason(peer) for peer in peers.PEERS}
    assert reasons["FlashQLA"] == "not installed (tilelang not found)"
    assert reasons["fla"] == "needs a GPU, JAX's default device is a cpu"


@pytest.mark.slow
def test_a_decay_of_each_channel():
    """All kinds of gates, by the clock; the kernels' reason is told."""
    bench = RuleBenchmark(
        gates=("uniform", "mixed", "erase"),
        heads=(2, 2),
        width=8,
        lengths=(5, 3),
        passes=("training",),
        repeats=2,
        calls=1,
    )
    status, text, _ = run(dataclasses.replace(bench, implementations=("chunked", "mosaic_gpu")))
    assert status == 0
    assert [line["row"] for line in cells(text)] == [
        f"2,2 5+3 D=8 {kind}" for kind in ("uniform channels", "mixed channels", "channels, erase")
    ]
    assert "mosaic_gpu cannot run: the default device is a cpu" in " ".join(text.split())


def test_rows_of_channels(kernels_everywhere):
    """The sizes that others have timed, with each kind of gates; half of the mixed channels hardly decay."""
    rows, dtype, _ = RuleBenchmark(
        gates=("uniform", "mixed"), passes=("forward",), rows=("16,16 1x4096",)
    ).plan()
    names = [row.name for row, _ in rows]
    assert names == ["16,16 1x4096 uniform channels", "16,16 1x4096 mixed channels"] and dtype == "bfloat16"
    uniform, mixed = (
        bench_rows.inputs(Row(1, 2, (6,), width=8, gates=kind)).g for kind in ("uniform", "mixed")
    )
    assert uniform.shape == mixed.shape == (1, 6, 2, 8)
    assert (uniform < 0).all() and (uniform >= np.log(0.5)).all()
    assert (mixed[..., ::2] < -1).all() and (mixed[..., 1::2] > -1e-3).all() and (mixed < 0).all()
    erase = bench_rows.inputs(Row(1, 2, (6,), width=8, gates="erase"))
    assert len(erase.tokens) == 7 and erase.erase_key.shape == (1, 6, 1, 8)
    np.testing.assert_array_equal(erase.g, uniform)
    forward = Row(64, 64, (8192,), gates="uniform")
    assert round(bench_rows.floor_ms(forward, "forward"), 3) == 0.190
    takes = [
        [peer.name for peer in peers.PEERS if peer.takes(row)]
        for row in (forward, forward._replace(gates="head"))
    ]
    assert takes == [["fla", "jax-linear-attention"], [*bench_rows.PEERS, "jax-linear-attention"]]


@pytest.mark.parametrize("what", ["forward", "training"])
def test_a_peer_in_jax(what, monkeypatch, ticking_clock):
    """jax-linear-attention takes rows of one length as a batch; a function of its signature stands for it."""
    asked = []

    def linear_attention(
        kind, q, k, v, *, impl="auto", g, beta, initial_state=None, output_final_state=False
    ):
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
    if what == "training":
        return
    options = dict(initial_state=None, cu_seqlens=None, segment_ids=None, implementation=None, layer=0)
    *qkv, g, beta = (x.reshape(2, 3, *x.shape[2:]) for x in problem.x.tokens)
    rule = peer.in_layers()
    o, state = rule(*qkv, g, beta, normalized=True, **options)
    expected, _ = gdn_jax.gated_delta_rule(*qkv, g, beta, implementation="recurrent")
    assert state is None and asked[-1] == ("gated_deltanet", "mosaic_gpu", False, (2, 3))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (o, expected)), rtol=2**-7, atol=2**-9)
    with pytest.raises(NotImplementedError, match="segment_ids: a step has whole rows alone"):
        rule(*qkv, g, beta, normalized=True, **options | {"segment_ids": jnp.zeros((2, 3), jnp.int32)})


def test_peers_that_are_wrong_or_raise_are_told(kernels_everywhere, monkeypatch):
    """The time of the one that is right stands beside ours."""
    right = Problem(bench_rows.FORWARD[0], "forward", "bfloat16", 0).expected

    def measured(peer, *_):
        if peer.name == "fla":
            raise OSError("no compiler")
        factor = 2 if peer.name == "FlashInfer" else 1
        return Timing(2.0, 2.0, 2.0), {name: factor * x for name, x in right.items()}

    monkeypatch.setattr(peers, "reason", lambda peer: None)
    for kind in (peers.Peer, peers.JaxPeer):
        monkeypatch.setattr(kind, "measure", measured)
    status, text, _ = run(RuleBenchmark(passes=("forward",), rows=("1x6",)))
    assert status == 0 and cells(text)[0]["best peer"] == "FlashQLA (here)"
    assert "1,2 1x6 D=8: fla raised OSError: no compiler" in text
    assert "1,2 1x6 D=8: FlashInfer is not counted, wrong: o 1.0e+00 > 2.0e-02" in text
