"""The rule by mma.sync without a GPU: values in the interpreter, registers as PTX names them, generated code."""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import put
from generated_code import ptxas_report
from jax import export
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu.mma import MMALayouts
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import assert_close, head_axis, tolerance

from gdn_jax.checks import cases, oracle
from gdn_jax.checks.accuracy import NAMES
from gdn_jax.shapes import Dims, RuleArrays
from pallas_kernels.ampere import (
    adjoints,
    backward,
    channel_gradients,
    channel_prepare,
    decays,
    gradients,
    prepare,
    rule,
    segments,
    walk,
)
from pallas_kernels.ampere.rows import Packed, Rows
from pallas_kernels.backward.rule import OutputCotangents
from pallas_kernels.device import mma
from pallas_kernels.device.launch import NUM_SMS, SMALL_MEMORY
from pallas_kernels.device.memory import REDUCTION_BYTES, smem_bytes
from pallas_kernels.work import tables

ROOT = pathlib.Path(__file__).parents[2]
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def arrays_of(x: cases.Inputs) -> RuleArrays:
    """The arguments of a case as the kernels take them. What lies behind the last packed sequence is no number."""
    q, k, v, g, beta, h_0 = (None if y is None else np.array(y) for y in x[:6])
    if x.cu_seqlens is not None:
        for y in (q, k, v, g, beta):
            y[:, x.cu_seqlens[-1] :] = np.nan
    return RuleArrays(*(None if y is None else put(y) for y in (q, k, v, g, beta, h_0)), x.cu_seqlens, None)


CASES = [
    (
        cases.Case(
            "packed pairs, fast and slow heads, queries grouped",
            T=40,
            B=1,
            heads=(2, 1, 1),
            K=64,
            V=100,
            g="by-head",
            beta="some 0",
            lengths=(20, 0, 17),
            state_layout="vk",
        ),
        "float16",
        dict(config=walk.Config(2)),
    ),
    pytest.param(
        cases.Case("packed", T=150, B=1, heads=(1, 1, 1), K=64, V=128, lengths=(70, 0, 1, 65)),
        "bfloat16",
        dict(config=walk.Config(2)),
        marks=pytest.mark.crossed,
    ),
    pytest.param(
        cases.Case("resets", T=70, B=1, heads=(1, 1, 1), K=100, V=128, g="some -inf"),
        "bfloat16",
        dict(config=walk.Config(1, 2), segment_chunks=0),
        marks=pytest.mark.crossed,
    ),
    pytest.param(
        cases.Case("three segments", T=130, B=2, heads=(1, 1, 1), K=60, V=64),
        "bfloat16",
        dict(segment_chunks=1),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype", "how"), CASES, ids=lambda x: getattr(x, "name", ""))
def test_both_passes_in_the_interpreter(case, dtype, how):
    x = cases.inputs(case, dtype)
    truth = oracle.evaluate(**x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
    arrays, static = arrays_of(x), dict(scale=case.K**-0.5, state_layout=case.state_layout)
    static |= dict(config=how.get("config"), interpret=INTERPRET)
    o, final, residuals = rule.forward(arrays, segment_chunks=how.get("segment_chunks"), **static)
    cotangents = OutputCotangents(put(x.do), put(x.dh_T))
    results = o, final, *backward.backward(arrays, residuals, cotangents, **static)
    for name, primal, got in zip(NAMES, (x.q, x.initial_state, *x[:6]), results, strict=True):
        assert got.dtype == primal.dtype
        assert_close(truth[name], np.asarray(got), tolerance(name, dtype), name, head_axis(name))


def test_states_between_segments():
    """Every state is the one before, changed by its segment; cotangents go back by the transposed maps."""
    rng = np.random.default_rng(0)
    shapes = (2, 3, 1, 2, 4), (2, 3, 1, 4, 4), (2, 1, 2, 4)
    e, m, first = (put(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    states, back = segments.joined(first, e, m), segments.joined_backwards(first, e, m)
    np.testing.assert_array_equal(states[:, 0], first)
    np.testing.assert_array_equal(back[:, 2], first)
    for s in (0, 1):
        np.testing.assert_allclose(states[:, s + 1], states[:, s] @ m[:, s] + e[:, s], rtol=1e-5, atol=1e-5)
        expected = back[:, s + 1] @ m[:, s + 1].swapaxes(-1, -2) + e[:, s + 1]
        np.testing.assert_allclose(back[:, s], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(segments.joined(None, e, m), segments.joined(0 * first, e, m))


def test_rows_are_cut_where_heads_are_few():
    """Into as many segments as fill the SMs once, all but the last of one length; packed rows are not."""

    def dims(**sizes):
        return Dims(**dict(B=1, T=32768, N=1, Hq=2, Hk=2, HV=8, HO=8, K=128, V=128) | sizes)

    assert segments.choose(dims(), packed=False, sms=132) == 64  # of 512 chunks
    assert (
        segments.choose(dims(HO=64), packed=False, sms=132) == 0
    )  # two of a length cost more than they save
    assert segments.choose(dims(T=256), packed=False, sms=132) == segments.choose(dims(), packed=True) == 0
    for chunks, length in ((10, 9), (9, 4), (16, 5), (7, 7)):
        even = segments.even(chunks, length)
        assert -(-chunks // even) == -(-chunks // length) and segments.even(chunks, even) == even
    np.testing.assert_array_equal(segments.first_chunks(Rows(2, 300, None), 2), [0, 2, 4, 5, 7, 9, 10])


@pytest.mark.parametrize("N", [1, 40])
def test_tables_of_chunks(N):
    """In NumPy and traced: every token has a place, in a chunk that no other sequence has."""
    T, rng = 500, np.random.default_rng(N)
    cu = np.concatenate([[0], np.sort(rng.integers(0, 480, N))]).astype(np.int32)
    known = tables.chunk_tables(cu, T)
    for a, b in zip(jax.jit(lambda cu: tables.chunk_tables(cu, T))(cu), known, strict=True):
        np.testing.assert_array_equal(a, b)
    token = np.full(len(known.token), T)
    for n, (begin, end) in enumerate(itertools.pairwise(cu)):
        assert known.first_chunk[n + 1] - known.first_chunk[n] == -(-(end - begin) // 64)
        place = known.first_chunk[n] * 64 + np.arange(end - begin)
        token[place] = np.arange(begin, end)
        np.testing.assert_array_equal(known.place[begin:end], place)
    np.testing.assert_array_equal(known.token, token)
    assert (known.place[cu[-1] :] == len(token)).all()
    # As tiles of the tokens: every chunk has the same ones, in 64 rows of them, and tokens find their places.
    tiled = Packed.of(known, T)
    for a, b in zip(*map(jax.tree.leaves, (jax.jit(lambda x: Packed.of(x, T))(known), tiled)), strict=True):
        np.testing.assert_array_equal(a, b)
    first, first_row, end_row = (x[:, None] for x in tiled.spans)
    row = np.arange(64)
    assert (first >= 0).all() and (first <= T - 64).all()
    is_token = (row >= first_row) & (row < end_row)
    np.testing.assert_array_equal(tiled.token.reshape(-1, 64), np.where(is_token, first + row, T))
    np.testing.assert_array_equal(np.sort(tiled.token), np.sort(token))
    np.testing.assert_array_equal(tiled.token[tiled.place[: cu[-1]]], np.arange(cu[-1]))


def held(layout: fragmented_array.TiledLayout, shape: tuple[int, int]) -> np.ndarray:
    """[registers, warps, lanes, 2] number of the entry of an array, row by row, that is at each place."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, rest, n = x.shape[: -len(tile)], x.shape[-len(tile) :], len(tile)
        x = x.reshape(
            *lead, *(m for size, part in zip(rest, tile, strict=True) for m in (size // part, part))
        )
        first = len(lead)
        x = x.transpose(*range(first), *range(first, x.ndim, 2), *range(first + 1, x.ndim, 2))
        assert x.ndim == first + 2 * n
    warps, lanes = (
        [x.ndim + d for d in dims if isinstance(d, int)] for dims in (layout.warp_dims, layout.lane_dims)
    )
    registers = [d for d in range(x.ndim - 1) if d not in (*warps, *lanes)]
    return x.transpose(*registers, *warps, *lanes, x.ndim - 1).reshape(-1, 4, 32, 2)


def test_a_rounded_accumulator_is_a_left_operand():
    """Register for register, and the left operand is the fragment A of mma.m16n8k16 in the PTX manual."""
    for columns in (16, 64, 128):
        accumulator = held(fragmented_array.WGMMA_LAYOUT, (64, columns))
        np.testing.assert_array_equal(held(MMALayouts(jnp.bfloat16).lhs, (64, columns)), accumulator)
    row, pair = np.arange(32)[:, None] // 4, 2 * (np.arange(32)[:, None] % 4) + np.arange(2)
    fragment = [(16 + row + 8 * (n % 2)) * 16 + pair + 8 * (n // 2) for n in range(4)]
    np.testing.assert_array_equal(held(MMALayouts(jnp.bfloat16).lhs, (64, 16))[:, 1], fragment)


@pytest.mark.parametrize("columns", [64, 128])
def test_transposed_registers(columns):
    """movmatrix gives lane l of a warp row l // 4 and columns 2 (l % 4) and the next of the transposed 8x8 block."""
    before = held(fragmented_array.WGMMA_LAYOUT, (64, columns))  # [columns / 8 x 2, warps, lanes, 2]
    blocks = before.reshape(-1, 4, 8, 8)  # a lane's pair lies in row l // 4
    after = blocks.swapaxes(2, 3).reshape(before.shape)
    layout = mma._tokens_layout()
    shape = layout.registers_shape((columns, 64))
    at = held(layout, (columns, 64))  # entries of the transposed array
    row, column = np.divmod(at, 64)
    np.testing.assert_array_equal(after.reshape(*shape, -1).reshape(at.shape), column * columns + row)


SHARED = "chunks/merging.py", "chunks/pair_levels.py", "device/rows.py", "work/tables.py"
SHARED += tuple(f"backward/channel_gradients_{part}.py" for part in ("levels", "step"))
"""Files with code that kernels by mma.sync and by wgmma have in common."""


def test_only_the_device_differs_between_generations():
    """What ends the process, hangs or is no instruction below 9.0 is not called by these kernels nor by what they
    share."""
    later = (
        r"plgpu\.(commit_smem|copy_|barrier_|wait_|wgmma|ACC|set_max_registers|Barrier)|dev\.(issue|release)"
    )
    shared = [ROOT / "pallas_kernels" / name for name in SHARED]
    for path in (*(ROOT / "pallas_kernels" / "ampere").glob("*.py"), *shared):
        assert not re.search(later, path.read_text()), path


@pytest.mark.parametrize("K", [64, 128])
def test_shared_memory_of_small_gpus(K):
    bf16 = jnp.bfloat16
    assert smem_bytes(prepare._memory(K, bf16), REDUCTION_BYTES) <= SMALL_MEMORY // 2
    assert smem_bytes(gradients._memory(K, bf16), REDUCTION_BYTES) <= SMALL_MEMORY
    assert smem_bytes(channel_prepare._memory(K, bf16, erases=True), REDUCTION_BYTES) <= SMALL_MEMORY
    assert smem_bytes(channel_gradients._memory(K, bf16)) <= SMALL_MEMORY
    for warpgroups in (1, 2):
        config = walk.Config(warpgroups)
        for of, back, vectors in (
            (decays.HEADS, adjoints.HEADS, (2, adjoints.VECTORS)),
            (decays.CHANNELS, adjoints.CHANNELS, (4, 4)),
        ):
            forwards = walk.memory(config, K, bf16, of.early_outputs, of.late, vectors=vectors[0])
            backwards = walk.memory(config, K, bf16, back.early, back.late, vectors=vectors[1])
            assert max(smem_bytes(forwards), smem_bytes(backwards)) <= SMALL_MEMORY


@pytest.mark.parametrize(
    ("walks", "memory", "expected"),
    [
        (NUM_SMS // 2, 232_448, walk.Config(1, 2)),
        (NUM_SMS // 2, SMALL_MEMORY, walk.Config(1)),
        (NUM_SMS // 2 + 1, 232_448, walk.Config(1)),
        (NUM_SMS, 232_448, walk.Config(2)),
    ],
)
def test_the_choice_of_a_walk(walks, memory, expected, monkeypatch):
    """By how many there are, and a second slot where the device has the memory."""
    monkeypatch.setattr(walk, "shared_memory", lambda: memory)
    assert walk.Config.default(128, walks, lambda _: 116_000) == expected


KERNELS = ["mma_prepare", "mma_outputs", "mma_states", "mma_adjoints", "mma_gradients"]


CUT_KERNELS = [
    "mma_prepare",
    "mma_ends",
    "mma_ends 2",
    "mma_outputs",
    "mma_adjoints",
    "mma_states",
    "mma_adjoints 2",
]
CUT_KERNELS += ["mma_gradients"]
"""Kernels of a row that is cut into segments."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "kernels", "capability", "also"),
    [
        pytest.param("mma, pairs", KERNELS, "8.0", ("8.6", "8.9"), marks=pytest.mark.crossed),
        pytest.param("mma, kv, float16, packed, K 64, V 64", KERNELS, "12.0", (), marks=pytest.mark.crossed),
        ("mma, segments", CUT_KERNELS, "8.6", ()),
    ],
    ids=["pairs", "packed", "segments"],
)
def test_no_registers_are_spilled(call, kernels, capability, also):
    """Compiled for every generation, where gcc and ptxas are."""
    text = ptxas_report("--only", call, "--capability", capability, *(["--also", *also] if also else []))
    found = [re.fullmatch(rf"{call}: (.*?) +(\d+) +(\d+) +(\d+) *", x) for x in text.splitlines()[1:]]
    names = [f"{kernel}{generation}" for kernel in kernels for generation in ("", *(f", {x}" for x in also))]
    assert [line[1] for line in found if line] == names, text
    assert all(line[3] == line[4] == "0" for line in found if line), text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=jnp.float32), "float32"),
        (dict(chunk_size=32), "64"),
        (dict(T=0), "no tokens"),
        (dict(K=129), "up to 128"),
        (dict(T=2**24), "more numbers"),
        (dict(B=export.symbolic_shape("b")[0]), "symbol"),
    ],
)
def test_refusals_say_why(change, reason):
    sizes = dict(B=1, T=64, N=1, Hq=1, Hk=1, HV=1, HO=1, K=128, V=128)
    call = dict(dtype=jnp.bfloat16) | {name: value for name, value in change.items() if name not in sizes}
    changed = sizes | {name: value for name, value in change.items() if name in sizes}
    assert reason in str(rule.check_supported(Dims(**changed), **call))
    assert rule.check_supported(Dims(**sizes), jnp.bfloat16) is None
