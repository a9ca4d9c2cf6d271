"""The Pallas kernels without a GPU: stages are right and free of races, interpreted; tables and the split of work."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import assert_close, tolerance

from gdn_jax.checks import cases, oracle
from gdn_jax.shapes import Dims, RuleArrays
from pallas_kernels.chunks import inverse
from pallas_kernels.chunks.gates import chunk_gates
from pallas_kernels.forward import rule as forward_rule
from pallas_kernels.work import split as work_split
from pallas_kernels.work import tables

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


SMALL = forward_rule.Config(inverse=inverse.Config(warpgroups=2, ctas=1))
"""The interpreter takes a thread for every warpgroup."""


STARTS = (0, 5, 70, 90, 129)
"""Starts of packed sequences in three chunks; the last is the padding."""


def first_rows(num_tokens: int) -> np.ndarray:
    """Row of its chunk at which each token's sequence starts."""
    token = np.arange(num_tokens)
    starts = np.array([max(s for s in STARTS if s <= t) for t in token])
    return np.maximum(starts - token // 64 * 64, 0).astype(np.int32)


def expected_first_rows(cu: np.ndarray, size: int) -> np.ndarray:
    """Row of its chunk at which each token's sequence starts; a token of the padding is a sequence of its own."""
    starts = [max([c for c in cu if c <= t]) if t < cu[-1] else t for t in range(size)]
    return np.array([max(start - t // 64 * 64, 0) for t, start in enumerate(starts)])


@pytest.mark.parametrize(
    "cu",
    [
        pytest.param([0, 100], marks=pytest.mark.slow),
        [0, 64, 64, 64, 191],
        pytest.param([0, *[200] * 90], marks=pytest.mark.slow),
        pytest.param([0, *range(5, 205)], marks=pytest.mark.slow),
        [0, 0],
    ],
)
def test_tables_of_packed_rows_found_by_the_kernel_of_the_gates(cu):
    """Few and many sequences, empty ones, padding."""
    x, cu = jnp.zeros((1, 205, 1)), np.array(cu, np.int32)
    _, _, first, order = chunk_gates(x, x, put(cu), ordered=True, interpret=INTERPRET)
    np.testing.assert_array_equal(first, expected_first_rows(cu, 256))
    begin, end = cu[:-1], cu[1:]
    expected = tables.longest_first(np.where(end > begin, -(-end // 64) - begin // 64, 0))
    np.testing.assert_array_equal(np.asarray(order)[: len(cu)], expected)


@pytest.mark.parametrize("packed", [False, True])
def test_chunk_gates(packed):
    rng = np.random.default_rng(0)
    g = -rng.uniform(size=(1, 130, 6)).astype(np.float32)
    g[:, 100] = -np.inf
    beta = rng.uniform(size=g.shape).astype(np.float32)
    cu = put([0, 0, 3, 70, 70, 127, 128, 130], jnp.int32) if packed else None
    g2_cum, beta_t, first, order = chunk_gates(put(g), put(beta), cu, ordered=packed, interpret=INTERPRET)
    if packed:
        np.testing.assert_array_equal(first, expected_first_rows(np.asarray(cu), 192))
        np.testing.assert_array_equal(order, [2, 1, 4, 5, 6, 0, 3, *[7] * 57])
    else:
        first = np.zeros(192, np.int32)
        assert order is None
    floored = np.maximum(g.astype(np.float64) / np.log(2), -150)
    for t in range(130):
        begin = t // 64 * 64 + first[t]
        expected = floored[0, begin : t + 1].sum(0)
        np.testing.assert_allclose(g2_cum[0, :, t], expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(beta_t[:, :, :130], beta.transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("packed", "cosine", "dtype"),
    [
        pytest.param(False, 0.9, jnp.float16, marks=pytest.mark.slow),
        pytest.param(False, 0.0, jnp.bfloat16, marks=pytest.mark.crossed),
        (True, 0.0, jnp.bfloat16),
    ],
)
def test_gated_inverse(packed, cosine, dtype):
    rng = np.random.default_rng(0)
    T, K, group = 136, 64, 2
    k = rng.normal(size=(1, T, 1, K)) / K**0.5 + (cosine / (1 - cosine)) ** 0.5 * rng.normal(size=K) / K**0.5
    k = put(k / np.linalg.norm(k, axis=-1, keepdims=True), dtype)
    beta_t = rng.uniform(size=(1, group, 192)).astype(np.float32)
    first = first_rows(192) if packed else np.zeros(192, np.int32)
    g2 = -rng.uniform(size=(group, 192)) * (np.arange(192) % 64 != first)
    g2_cum = np.stack([g2[:, t // 64 * 64 + first[t] : t + 1].sum(1) for t in range(192)], 1)[None]
    got = inverse.gated_inverse(
        k,
        put(beta_t),
        put(g2_cum.astype(np.float32)),
        put(first) if packed else None,
        config=SMALL.inverse,
        interpret=INTERPRET,
    )
    got = np.asarray(got.t).astype(np.float64)
    k64 = np.pad(np.asarray(k[0, :, 0]).astype(np.float64), ((0, 56), (0, 0)))
    for chunk in range(3):
        s = slice(64 * chunk, 64 * chunk + 64)
        same = np.arange(64) >= first[s, None]
        for head in range(group):
            beta = beta_t[0, head, s].astype(np.float64)
            L = np.tril(k64[s] @ k64[s].T * same * beta, -1)
            gamma = np.exp2(np.minimum(g2_cum[0, head, s, None] - g2_cum[0, head, s], 0.0))
            expected = np.linalg.inv(np.eye(64) + L) * gamma
            bound = 2e-3 if dtype == jnp.float16 else 3e-3  # bfloat16 rounds the result by 1.7e-3
            assert_close(expected, got[0, head, s], bound, f"T of chunk {chunk}")


CASES = (
    (cases.Case("two tiles", T=200, B=1, heads=(1, 1, 2), K=64, V=128), SMALL),
    (
        cases.Case("one tile, kv padded, grouped queries", T=66, heads=(2, 1, 1), K=60, V=40, B=1),
        SMALL,
    ),
    (cases.Case("wide keys", T=66, B=1, heads=(1, 1, 1), K=256, V=64, state_layout="vk"), SMALL),
    (
        cases.Case("segments", T=300, B=1, heads=(1, 1, 1), K=64, V=64),
        forward_rule.Config(segment_chunks=2, inverse=SMALL.inverse),
    ),
    (
        cases.Case("packed", T=190, B=1, heads=(1, 1, 1), K=64, V=64, lengths=(0, 1, 64, 0, 65, 37, 1, 0)),
        forward_rule.Config(segment_chunks=0, inverse=SMALL.inverse),
    ),
    (
        cases.Case("packed in segments", T=200, B=1, heads=(1, 1, 1), K=64, V=64, lengths=(0, 63, 130, 1)),
        forward_rule.Config(segment_chunks=2, inverse=SMALL.inverse),
    ),
    (
        cases.Case("normalised", T=130, B=1, heads=(1, 1, 2), K=64, V=64, use_qk_l2norm=True, keys="any"),
        SMALL,
    ),
    (
        cases.Case(
            "normalised, packed",
            T=140,
            B=1,
            heads=(1, 1, 1),
            K=64,
            V=64,
            lengths=(40, 97),
            use_qk_l2norm=True,
            keys="any",
        ),
        forward_rule.Config(segment_chunks=2, inverse=SMALL.inverse),
    ),
    (
        cases.Case("segment ids", T=100, B=1, heads=(1, 1, 1), K=64, V=64, segments=((70, 1, 29),)),
        SMALL,
    ),
)


def forward(case, config, x, cu_seqlens):
    """The kernels' forward on a case, interpreted."""
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    options["scale"] = case.K**-0.5
    *arrays, segment_ids = (None if y is None else put(y) for y in (*x[:6], x.segment_ids))
    call = RuleArrays(*arrays, cu_seqlens, segment_ids)
    return forward_rule.forward(call, **options, config=config, interpret=INTERPRET)


def check(case, config, dtype="bfloat16"):
    """Both outputs against the oracle."""
    x = cases.inputs(case, dtype)
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    o, final = oracle.forward(**x.arguments, **options)
    got_o, got_final, _ = forward(case, config, x, x.cu_seqlens)
    assert_close(o, np.asarray(got_o), tolerance("o", dtype), "o", 2)
    assert_close(final, np.asarray(got_final), tolerance("final_state", dtype), "final state", 1)


SLOW = ("segment ids", "packed in segments")


@pytest.mark.parametrize(
    ("case", "config"), harness.tiers(CASES, ("one tile, kv padded, grouped queries",), SLOW)
)
def test_forward_in_the_interpreter(case, config, monkeypatch):
    monkeypatch.setattr(
        forward_rule, "known_lengths", lambda cu_seqlens: None
    )  # as under jit, where the interpreter hangs
    check(case, config)


@pytest.mark.slow
@pytest.mark.parametrize("segment_chunks", [0, pytest.param(1, marks=pytest.mark.crossed)])
def test_tokens_of_no_strength_leave_the_state_alone(segment_chunks):
    """Bit for bit, whatever their values are, with neighbours that do write, and from segment to segment."""
    config = dataclasses.replace(SMALL, segment_chunks=segment_chunks)
    case = cases.Case("strengths", T=70, B=1, heads=(1, 1, 2), K=64, V=64, g="zero")
    x = cases.inputs(case, "bfloat16")
    beta, v = x.beta.copy(), x.v.copy()
    beta[:, :, 0], beta[:, 5:, 1] = 0.0, 0.0
    v[:, 5:] = 1e30
    x, end = x._replace(beta=beta, v=v), 5 + 64 * segment_chunks  # the same tokens write up to there
    _, final, _ = forward(case, config, x, None)
    _, after, _ = forward(case, config, cases.Inputs(*(y[:, :end] for y in x[:5]), *x[5:]), None)
    np.testing.assert_array_equal(final[:, 0], x.initial_state[:, 0])
    np.testing.assert_array_equal(final[:, 1], after[:, 1])


@pytest.mark.slow
def test_float16_in_the_interpreter():
    """Over three chunks."""
    check(cases.Case("float16", T=130, B=1, heads=(1, 1, 1), K=64, V=64), SMALL, "float16")


KNOWN = (
    cases.Case("uneven", T=200, B=1, heads=(1, 1, 1), K=64, V=64, lengths=(0, 63, 100, 1)),
    cases.Case("whole chunks", T=190, B=1, heads=(1, 1, 1), K=64, V=64, lengths=(64, 126)),
    cases.Case("equal", T=80, B=1, heads=(1, 1, 1), K=64, V=64, lengths=(40, 40)),
)


@pytest.mark.parametrize("case", harness.tiers(KNOWN, (), ("uneven",)))
def test_lengths_known_while_tracing(case):
    check(case, forward_rule.Config(segment_chunks=0, inverse=SMALL.inverse))


@pytest.mark.slow
def test_padding_where_lengths_are_known():
    """A sequence of whole chunks, and one that shares its last chunk with padding of NaN."""
    case = cases.Case("padding", T=128, B=1, heads=(1, 1, 1), K=64, V=64, lengths=(64, 36))
    config = forward_rule.Config(segment_chunks=0, inverse=SMALL.inverse)
    x = cases.inputs(case, "bfloat16")
    dirty = {name: getattr(x, name).copy() for name in ("q", "k", "v", "g", "beta")}
    for y in dirty.values():
        y[:, 100:] = np.nan
    o, final, _ = forward(case, config, x._replace(**dirty), x.cu_seqlens)
    expected_o, expected = oracle.forward(**x.arguments)
    assert_close(expected_o[:, :100], np.asarray(o)[:, :100], tolerance("o", "bfloat16"), "o", 2)
    assert_close(expected, np.asarray(final), tolerance("final_state", "bfloat16"), "final state", 1)
    assert not np.asarray(o)[:, 100:].any()


@pytest.mark.parametrize(
    ("chunks", "Hk", "group", "expected"),
    [(128, 2, 4, (2, 2)), (16, 16, 2, (2, 1)), (32, 16, 2, (1, 2)), (512, 16, 2, (1, 2)), (1, 1, 6, (6, 1))],
)
def test_output_heads_of_a_key_head_are_split_where_warpgroups_would_be_idle(chunks, Hk, group, expected):
    sizes = inverse._Sizes.of(1, chunks, Hk, group, 528)
    assert (sizes.parts, sizes.group) == expected


@pytest.mark.parametrize("segment_chunks", [None, 2, 3])
@pytest.mark.parametrize("N", [1, 5, 40, 300])
def test_tables_are_the_same_in_numpy_and_traced(N, segment_chunks):
    rng = np.random.default_rng(N)
    cu = np.concatenate([[0], np.sort(rng.integers(0, 2000, N))]).astype(np.int32)

    def build(cu):
        return tables.packed_items(cu, 2100, segment_chunks)

    traced, known = jax.tree.leaves(jax.jit(build)(cu)), jax.tree.leaves(build(cu))
    assert len(traced) == len(known)
    for a, b in zip(traced, known, strict=True):
        np.testing.assert_array_equal(a, b)
        assert isinstance(b, int) or b.dtype == np.int32


def test_longest_sequences_come_first():
    np.testing.assert_array_equal(tables.longest_first(np.array([3, 0, 7, 3, 9])), [4, 2, 0, 3, 1, 5])


@pytest.mark.slow
def test_sequences_in_another_order(monkeypatch):
    monkeypatch.setattr(forward_rule, "num_sms", lambda: 1)
    monkeypatch.setattr(forward_rule, "choose_split", lambda *_, **__: (1, None))
    case = cases.Case("order", T=200, B=1, heads=(1, 1, 1), K=64, V=64, lengths=(0, 63, 100, 1))
    check(case, SMALL)


def split(B, T, HO, lengths=None, *, known=True, **options):
    """choose_split for K = V = 128."""
    N = B if lengths is None else len(lengths)
    dims = Dims(B=B, T=T, N=N, Hq=HO, Hk=HO, HV=HO, HO=HO, K=128, V=128)
    cu = None if lengths is None or not known else np.cumsum((0, *lengths))
    return work_split.choose_split(
        dims, 128, 128, work_split.work_of(dims, lengths is not None, cu), **options
    )


def test_split_uses_the_whole_gpu():
    assert split(8, 4096, 32) == (2, None)  # 256 heads: full heads
    assert split(1, 32768, 64) == (1, None)  # 64 heads: two halves each
    n, chunks = split(1, 32768, 8)  # 8 heads: segments
    assert chunks is not None and 32768 // 64 // chunks * 8 * (3 - n) > 100
    assert split(1, 32768, 8, segment_chunks=0) == (1, None)


def test_split_of_rows_that_go_on_elsewhere():
    """Every segment counts, where else a row's last one does not. There is always a segment; sequences of unknown
    lengths that fill the GPU are not cut. Where heads are many, chains are whole, and segments short."""
    assert split(1, 131072, 32) == (2, 683) and split(1, 131072, 32, is_open=True) == (2, 128)
    dims = Dims(B=1, T=131072, N=1, Hq=32, Hk=32, HV=32, HO=32, K=128, V=128)
    work = work_split.work_of(dims, False, None)
    assert work_split.open_chains(dims, 128, 128, work, 128) == (False, 1)  # 128 halves, of two segments
    assert work_split.open_chains(dims, 128, 128, work, 64) == (False, 2)  # one wave of pairs, of four
    assert work_split.open_chains(dims._replace(V=64), 128, 64, work, 64) == (
        True,
        1,
    )  # whole chains: 64 CTAs
    assert work_split.open_chains(dims._replace(HO=8), 128, 128, work, 128) == (True, 2)
    assert split(8, 4096, 32)[1] is None and split(8, 4096, 32, is_open=True)[1] == 64
    assert split(1, 32768, 32, (2048,) * 16, known=False, is_open=True)[1] == 512


def test_segments_of_a_cut():
    """Their lengths, how many there are of each, and how many of them hand a state on: as counted one by one."""
    for chunks, length in ((np.array([12, 5, 1]), 4), (np.array([7]), 7), (np.array([9, 8]), 2)):
        counts = np.arange(2, 2 + len(chunks))
        sequences = np.repeat(chunks, counts)
        segments = [min(length, n - start) for n in sequences for start in range(0, n, length)]
        lengths, how_many, inner = work_split.cut(chunks, counts, length)
        got = np.repeat(lengths, how_many)
        np.testing.assert_array_equal(np.sort(got), np.sort(segments))
        assert inner == len(segments) - len(sequences)


def test_split_of_packed_rows():
    assert split(1, 32768, 8, (32768,), known=False) == split(1, 32768, 8)
    assert split(1, 32768, 8, (4096,) * 8, known=False) == (1, None)  # 128 halves fill the GPU
    assert split(1, 8192, 64, (1024, 7168)) == (1, None)  # the long one decides
    _, chunks = split(1, 40000, 2, (*((10,) * 1000), 30000))  # one long among many short ones is cut
    assert chunks is not None
    sequences = split(1, 65536, 1, (1,) * 65536, known=False)
    assert sequences == (2, None)
