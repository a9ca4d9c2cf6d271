"""The backward kernels without a GPU: they lower, and every gradient is right and free of races, interpreted."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_segments import of_heads, segments_of
from tolerances import GRADIENTS, assert_close, head_axis, kernel_tolerance, tolerance

from gdn_jax.checks import cases, oracle
from gdn_jax.shapes import Dims, RuleArrays
from pallas_kernels.backward import gradients as gradients_kernel
from pallas_kernels.backward import reach
from pallas_kernels.backward import rule as backward
from pallas_kernels.backward.rule import OutputCotangents
from pallas_kernels.backward.strengths import mantissa
from pallas_kernels.device.launch import check_registers, release_registers
from pallas_kernels.forward import rule as forward_rule
from pallas_kernels.work import split as work_split
from pallas_kernels.work import tables as work_tables
from pallas_kernels.work.residuals import Residuals

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def residuals_of(case: cases.Case, x: cases.Inputs, segment_chunks: int | None = None) -> Residuals:
    """Residuals as the forward hands them over, in NumPy float64, rounded at the end."""
    B, T, HO, Hk = case.B, case.T, case.HO, case.heads[1]
    T64 = -(-T // 64) * 64
    cu = [0] if x.cu_seqlens is None else x.cu_seqlens
    first = np.array([max(0, max(s for s in cu if s <= t) - t // 64 * 64) for t in range(T64)])
    g = np.zeros((B, T, HO)) if x.g is None else x.g.astype(np.float64)
    beta = np.ones((B, T, HO)) if x.beta is None else x.beta.astype(np.float64)
    if x.segment_ids is not None:
        changes = np.diff(x.segment_ids, axis=1, prepend=x.segment_ids[:, :1]) != 0
        g = np.where(changes[..., None], -np.inf, g)
    g2 = np.maximum(g / np.log(2), -150)
    g2_cum, beta_t = np.zeros((2, B, HO, T64))
    beta_t[..., :T] = beta.swapaxes(1, 2)
    t_tiles = np.zeros((B, HO, T64, 64))
    k = np.zeros((B, T64, Hk, case.K))
    k[:, :T] = x.k
    for t in range(T64):
        start = t // 64 * 64 + first[t]
        g2_cum[..., t] = g2[:, start : t + 1].sum(1)
    for b in range(B):
        for i in range(HO):
            for start in range(0, T64, 64):
                s = slice(start, start + 64)
                kc = k[b, s, i // (HO // Hk)]
                same = np.arange(64) >= first[s, None]
                L = np.tril(kc @ kc.T * same * beta_t[b, i, s], -1)
                gamma = np.exp2(np.minimum(g2_cum[b, i, s, None] - g2_cum[b, i, s], 0.0))
                t_tiles[b, i, s] = np.linalg.inv(np.eye(64) + L) * gamma
    f32, t_tiles = np.float32, t_tiles.astype(x.k.dtype)
    if x.cu_seqlens is not None:  # anything may be in the padding
        beta_t[..., cu[-1] :] = np.where(np.arange(cu[-1], T64) % 2, np.nan, np.inf)
    segments = None
    if segment_chunks is not None:
        keys, values = (of_heads(y, HO, -(-y.shape[3] // 64) * 64) for y in (x.k, x.v))
        tokens = keys, keys, values, np.broadcast_to(np.exp(g)[..., None], keys.shape), beta
        h_0 = x.initial_state
        h_0 = h_0 if h_0 is None or case.state_layout == "kv" else h_0.swapaxes(2, 3)
        segments = segments_of(tokens, h_0, x.cu_seqlens, segment_chunks, x.k.dtype)
    return Residuals(
        *map(put, (g2_cum.astype(f32), beta_t.astype(f32), t_tiles)),
        jax.tree.map(put, segments),
    )


def run(
    case: cases.Case,
    dtype="bfloat16",
    config=None,
    segment_chunks=None,
    interpret=INTERPRET,
):
    """(gradients of the oracle, cotangents of the kernels)."""
    x = cases.inputs(case, dtype)
    options = {
        name: value for name, value in case.options.items() if name not in ("chunk_size", "use_qk_l2norm")
    }
    expected = oracle.gradients(**x.arguments, do=x.do, dh_T=x.dh_T, **options)
    options["scale"] = case.K**-0.5 if case.scale is None else case.scale
    got = backward.backward(
        RuleArrays(*(None if y is None else put(y) for y in x[:8])),
        residuals_of(case, x, segment_chunks),
        OutputCotangents(put(x.do), put(x.dh_T)),
        config=config,
        interpret=interpret,
        **options,
    )
    return expected, got


SMALL = backward.Config(gradients=gradients_kernel.Config(ctas=2))
"""The interpreter takes a thread for every warpgroup."""

C = cases.Case
CASES = (
    C("two tiles", T=200, B=1, heads=(1, 1, 2), K=128, V=128),
    C("padded, two rows", T=70, B=2, heads=(1, 1, 1), K=60, V=40),
    C("grouped queries", T=66, B=1, heads=(2, 1, 1), K=64, V=64, state_layout="vk"),
    C("more keys than queries", T=66, B=1, heads=(1, 2, 2), K=64, V=64),
    C("decay hundredfold, beta 0", T=66, B=1, heads=(1, 1, 2), K=16, V=24, g="hundredfold", beta="some 0"),
    C("strong decay", T=130, B=1, heads=(1, 1, 1), K=16, V=24, g="-20"),
    C("resets, no state", T=130, B=1, heads=(1, 1, 1), g="some -inf", initial_state=False),
    C("packed", T=190, B=1, heads=(1, 1, 1), lengths=(0, 1, 64, 0, 65, 37, 1, 0)),
    C(
        "packed, reset",
        T=150,
        B=1,
        heads=(1, 1, 1),
        g="some -inf",
        lengths=(63, 1, 2, 70),
        initial_state=False,
    ),
    C("packed, three tiles", T=70, B=1, heads=(1, 1, 1), K=64, V=192, lengths=(30, 34)),
    C("segments", T=100, B=1, heads=(1, 1, 1), segments=((1, 63, 2, 34),)),
)

SLOW = ("packed, three tiles",)

FLOAT16 = (
    (C("two tiles, wide keys", T=66, B=1, heads=(2, 1, 1), K=192, V=128, g="by-head"), None),
    (
        C(
            "packed in segments, strong decay, some beta 0, wide keys",
            T=70,
            B=1,
            heads=(1, 1, 1),
            K=160,
            V=64,
            g="-20",
            beta="some 0",
            lengths=(3, 65),
        ),
        1,
    ),
    (
        C(
            "repeated, slow decay",
            T=66,
            B=1,
            heads=(1, 1, 1),
            beta=".835",
            keys="repeated",
            ill_conditioned=True,
        ),
        None,
    ),
)


def check(case: cases.Case, config, segment_chunks=None, dtype="bfloat16"):
    """Every gradient against the oracle."""
    expected, got = run(case, dtype, config, segment_chunks)
    for name, e, x in zip(GRADIENTS, expected[: len(got)], got, strict=True):
        assert (e is None) == (x is None)
        if e is not None:
            bound = kernel_tolerance(name, dtype, case) if case.ill_conditioned else tolerance(name, dtype)
            assert_close(e, np.asarray(x), bound, name, head_axis(name))


@pytest.mark.parametrize("case", harness.tiers(CASES, ("padded, two rows",), SLOW))
def test_gradients_in_the_interpreter(case):
    check(case, SMALL)


@pytest.mark.crossed
def test_two_state_warpgroups_in_the_interpreter():
    case = C("packed, two tiles, grouped", T=100, B=1, heads=(1, 1, 2), K=128, V=128, lengths=(1, 0, 69, 20))
    check(case, dataclasses.replace(SMALL, state_warpgroups=2))


@pytest.mark.parametrize(("case", "chunks"), harness.tiers(FLOAT16, (), ("repeated, slow decay",)))
def test_float16_in_the_interpreter(case, chunks):
    config = backward.Config(segments=chunks is not None, gradients=gradients_kernel.Config(ctas=1))
    check(case, config, chunks, dtype="float16")


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("bfloat16", marks=pytest.mark.slow),
        pytest.param("float16", marks=pytest.mark.crossed),
    ],
)
def test_gradient_of_small_strengths_in_the_interpreter(dtype):
    """One head each with beta = 0, 1e-12, 1e-4 and 1: nothing divides by them, and none has a floor."""
    case = C("strengths", T=66, B=1, heads=(1, 1, 4), K=64, V=64, beta="by-head")
    expected, got = run(case, dtype, SMALL, interpret=plgpu.InterpretGPUParams())
    assert_close(expected[4], np.asarray(got.dbeta), tolerance("dbeta", dtype), "dbeta", head_axis("dbeta"))
    assert not np.any(np.asarray(got.dv)[:, :, 0])  # exactly: a token that writes nothing
    assert all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in got)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_join_of_the_ways_to_dbeta(dtype):
    """From parts that are exact, for every beta; where beta is 0 one part says nothing."""
    beta, truth = jnp.float32([-1.5, -1e-3, 0.0, 1e-12, 0.125, 2.0]), put(3.0, "float32")
    m = mantissa(beta, dtype)
    got = gradients_kernel.join_dbeta(beta * m * truth, m * truth, beta, m)
    np.testing.assert_allclose(got, truth, rtol=1e-6)


def test_what_keys_say_of_dbeta_counts_by_what_is_left_of_it():
    """Sums without cancellation, of one part, of parts that take each other away, and of nothing."""
    late, whole = (
        jnp.float32([1.0, 2.0, 0.0, -1.0, 2.0**-70, 0.0]),
        jnp.float32([3.0, 2.0, 5.0, 1e-3, 2.0**-70, 0.0]),
    )
    got = gradients_kernel.join_weight(late, whole) - gradients_kernel.JOIN
    # The fourth is (1e-3 / 1.001)^2, 0.2 % below; what is left of 2e-6 beside JOIN has an error of 2^-31 / 2e-6.
    np.testing.assert_allclose(got / gradients_kernel.KEPT, [1, 1, 1, 1e-6, 1, 0], rtol=1e-2, atol=1e-8)


SEGMENTED = (
    (C("four segments, no decay", T=200, B=1, heads=(1, 1, 1), K=64, V=64, g="zero"), 1),
    (C("two rows, vk", T=100, B=2, heads=(1, 1, 1), K=60, V=40, state_layout="vk"), 1),
    (C("two tiles, no state", T=150, B=1, heads=(1, 1, 2), K=128, V=128, initial_state=False), 2),
    (C("packed in segments", T=290, B=1, heads=(1, 1, 1), lengths=(0, 63, 200, 1)), 2),
)


@pytest.mark.parametrize(("case", "chunks"), harness.tiers(SEGMENTED, (), ("two rows, vk",)))
def test_segments_in_the_interpreter(case, chunks):
    check(case, dataclasses.replace(SMALL, segments=True), chunks)


@pytest.mark.slow
def test_open_adjoints_in_the_interpreter(monkeypatch):
    """The cotangent at every segment's start by itself, and at its end with all that follows. The two state
    warpgroups of a CTA have half of V = 128 each."""
    monkeypatch.setattr(reach, "open_chains", lambda *args: (True, 2))
    case = C("two segments", T=100, B=1, heads=(1, 1, 1), K=16, V=128)
    x = cases.inputs(case, "bfloat16")
    scale, cotangents = case.K**-0.5, OutputCotangents(put(x.do), put(x.dh_T))
    call = RuleArrays(*(put(y) for y in x[:6]), None, None)
    found = backward.open_adjoints(
        call,
        residuals_of(case, x, 1),
        cotangents,
        reach.Entry(None, put(True)),
        scale=scale,
        interpret=INTERPRET,
    )

    def at_start(part: slice, dh_T: np.ndarray) -> np.ndarray:
        """By the oracle, of some tokens."""
        tokens = (y[:, part] for y in x[:5])
        return oracle.gradients(
            *tokens, initial_state=x.initial_state, do=x.do[:, part], dh_T=dh_T, scale=scale
        )[5]

    first, last = slice(64), slice(64, None)
    behind = at_start(last, x.dh_T)
    starts, ends = (at_start(first, np.zeros_like(x.dh_T)), behind), (behind, x.dh_T)
    for name, got, expected in zip(("starts", "ends"), found[:2], (starts, ends), strict=True):
        got = np.swapaxes(np.asarray(got), 2, 3)[:, :, : case.K]
        assert_close(np.concatenate(expected), got, tolerance("dh_0", "bfloat16"), name, axis=1)


def pays(HO, T, length, lengths=None):
    """segments_pay for K = V = 128 and one row."""
    N = 1 if lengths is None else len(lengths)
    dims = Dims(B=1, T=T, N=N, Hq=HO, Hk=HO, HV=HO, HO=HO, K=128, V=128)
    cu = None if lengths is None else np.cumsum((0, *lengths))
    return work_split.segments_pay(dims, 128, work_split.work_of(dims, lengths is not None, cu), length)


def test_segments_are_used_where_heads_are_few():
    assert pays(4, 32768, 32)
    assert pays(16, 32768, 64)
    assert not pays(32, 32768, 171)  # 128 CTAs without segments
    assert not pays(4, 256, 2)
    assert pays(4, 32768, 32, (100, 32668))
    assert not pays(32, 32768, 32, (4096,) * 8)


@pytest.mark.parametrize(
    ("HO", "lengths", "segment", "expected"),
    [
        (32, (4096,) * 8, None, 2),
        (32, (32768,), None, 1),  # 64 CTAs of two
        (32, (16384,) * 2, None, 1),  # 128
        (4, (32768,), 32, 1),  # 128, in segments
        (8, (32768,), 32, 2),
        (32, (32000,) + (100,) * 7, None, 1),  # one sequence is nearly all of it
    ],
)
def test_state_warpgroups_of_the_chains(HO, lengths, segment, expected):
    dims = Dims(B=1, T=sum(lengths), N=len(lengths), Hq=HO, Hk=HO, HV=HO, HO=HO, K=128, V=128)
    work = work_split.work_of(dims, True, np.cumsum((0, *lengths)))
    assert work_split.chain_warpgroups(dims, 128, 128, work, segment) == expected
    assert work_split.chain_warpgroups(dims, 192, 128, work, segment) == 1
    assert work_split.chain_warpgroups(dims, 128, 192, work, segment) == 1


def shapes(heads, K, V, packed, dtype=jnp.bfloat16):
    """cu_seqlens and the arrays of a call, without the residuals."""
    Hq, Hk, HV = heads
    HO, B, T, f32 = max(Hq, HV), 1 if packed else 2, 200, jnp.float32
    N = 3 if packed else B
    S = jax.ShapeDtypeStruct
    x = lambda h, d: S((B, T, h, d), dtype)  # noqa: E731
    gate, state = S((B, T, HO), f32), S((N, HO, K, V), f32)
    inputs, cotangents = (x(Hq, K), x(Hk, K), x(HV, V), gate, gate, state), (x(HO, V), state)
    return S((N + 1,), jnp.int32) if packed else None, inputs, cotangents


def kernels_of(function, *arguments) -> int:
    """Kernels that a function of arguments contains, lowered for an NVIDIA GPU."""
    return (
        jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu")
    )


GROUPS, QUERIES, MIXED = (2, 2, 4), (4, 2, 2), (2, 3, 6)


@pytest.mark.parametrize(
    ("heads", "K", "V", "packed", "dtype"),
    [
        pytest.param(GROUPS, 100, 256, True, jnp.bfloat16, marks=pytest.mark.slow),
        (QUERIES, 64, 64, True, jnp.bfloat16),
        (MIXED, 96, 192, False, jnp.bfloat16),
        pytest.param(MIXED, 192, 128, True, jnp.bfloat16, marks=pytest.mark.crossed),
        pytest.param(QUERIES, 256, 64, False, jnp.float16, marks=pytest.mark.crossed),
    ],
)
def test_lowers_for_compute_capability_9(heads, K, V, packed, dtype):
    cu, inputs, cotangents = shapes(heads, K, V, packed, dtype)
    S, t64 = jax.ShapeDtypeStruct, (*inputs[3].shape[::2], 256)
    residuals = Residuals(S(t64, jnp.float32), S(t64, jnp.float32), S((*t64, 64), dtype), None)
    function = lambda *a: backward.backward(*a, scale=0.1)  # noqa: E731
    call, launches = RuleArrays(*inputs, cu, None), 2 + (K > 128)
    assert kernels_of(function, call, residuals, OutputCotangents(*cotangents)) >= launches


@pytest.mark.parametrize(
    ("K", "V", "packed", "dtype"),
    [
        (60, 192, False, jnp.bfloat16),
        pytest.param(256, 256, True, jnp.float16, marks=pytest.mark.crossed),
    ],
)
@pytest.mark.slow
def test_segments_lower_after_the_forward(K, V, packed, dtype):
    cu, inputs, cotangents = shapes((2, 2, 4), K, V, packed, dtype)

    def both(cu, inputs, cotangents):
        x, config = RuleArrays(*inputs, cu, None), forward_rule.Config(segment_chunks=2)
        residuals = forward_rule.forward(x, config=config, scale=0.1)[2]
        config = backward.Config(segments=True)
        return backward.backward(x, residuals, OutputCotangents(*cotangents), config=config, scale=0.1)

    assert kernels_of(both, cu, inputs, cotangents) >= 7


def test_one_known_sequence_is_cut_as_the_forward_cut_it():
    """The forward takes packed sequences of equal lengths as rows, a single one too."""
    _, inputs, cotangents = shapes((1, 1, 1), 64, 64, False)
    *tokens, state = (jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in inputs)
    do, dfinal = (jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in cotangents)

    def both(tokens, state, cotangents):
        x = RuleArrays(*tokens, state, np.array([0, 200]), None)
        residuals = forward_rule.forward(x, config=forward_rule.Config(segment_chunks=2), scale=0.1)[2]
        config = backward.Config(segments=True)
        return backward.backward(x, residuals, OutputCotangents(*cotangents), config=config, scale=0.1)

    out = jax.eval_shape(both, tokens, state, (do, dfinal))
    assert [y.shape for y in out] == [y.shape for y in (*tokens, state)]


def test_refusals_say_why():
    dims = Dims(B=1, T=64, N=1, Hq=1, Hk=1, HV=1, HO=1, K=256, V=256)
    assert forward_rule.check_supported(dims, jnp.bfloat16) is None
    assert "larger" in str(forward_rule.check_supported(dims._replace(T=2**32), jnp.bfloat16))


def test_registers_that_a_cta_does_not_have():
    """A kernel that asks for them waits for ever, one that releases up to more is illegal: on a GPU only."""
    check_registers(72, 216, 216)
    check_registers(208, 240)
    with pytest.raises(AssertionError, match="of 504"):
        gradients_kernel.Config(helper_registers=64, compute_registers=224)
    with pytest.raises(AssertionError, match="208 registers of 168"):
        release_registers(208, warpgroups=3)


@pytest.mark.parametrize("N", [1, 5, 40, 300])
def test_tables_are_the_same_in_numpy_and_traced(N):
    rng = np.random.default_rng(N)
    cu = np.concatenate([[0], np.sort(rng.integers(0, 2000, N))]).astype(np.int32)
    traced = jax.jit(lambda cu: work_tables.visit_tables(cu, 2104))(cu)
    known = work_tables.visit_tables(cu, 2104)
    for a, b in zip(traced, known, strict=True):
        np.testing.assert_array_equal(a, b)
    visits = [(n, c) for n in range(N + 1) for c in _chunks(*(*cu, 2104)[n : n + 2])]
    assert known.first_visit[-1] == len(visits) <= len(known.chunk)
    np.testing.assert_array_equal(known.chunk[: len(visits)], [c for _, c in visits])
    ends = (*cu, 2104)
    owned = [(max(ends[n] - 64 * c, 0), min(ends[n + 1] - 64 * c, 64)) for n, c in visits]
    rows = known.rows[: len(visits)]
    np.testing.assert_array_equal(np.stack([rows % 128, rows // 128], 1), owned)
    visit_of_token = jax.jit(lambda tables: work_tables.visit_of_token(2104, tables))
    for tables in (traced, known):
        visit, begin = visit_of_token(tables)
        of_token = [(max(n for n in range(N + 1) if cu[n] <= t), t // 64) for t in range(2104)]
        np.testing.assert_array_equal(visit, [visits.index(x) for x in of_token])
        np.testing.assert_array_equal(begin, [cu[n] for n, _ in of_token])


def _chunks(begin, end):
    return range(begin // 64, -(-end // 64)) if end > begin else ()
