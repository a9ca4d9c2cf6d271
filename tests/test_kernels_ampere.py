"""The rule by mma.sync without a GPU: values in the interpreter, registers as PTX names them, generated code."""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu.mma import MMALayouts
from jax.experimental.pallas import mosaic_gpu as plgpu
from tolerances import assert_close, tolerance

from gdn_jax import gates
from gdn_jax.checks import cases, oracle
from gdn_jax.shapes import Dims, RuleArrays
from pallas_kernels.ampere import prepare, rule, states, walk
from pallas_kernels.device import mma
from pallas_kernels.device.memory import REDUCTION_BYTES, smem_bytes
from pallas_kernels.tools.calls import CALLS
from pallas_kernels.tools.compiling import lowering_for
from pallas_kernels.work import tables

ROOT = pathlib.Path(__file__).parent.parent
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
SMALL_MEMORY = 101_376
"""Bytes of shared memory of a CTA on compute capability 8.6, 8.9 and 12.0."""


def arrays_of(case: cases.Case, x: cases.Inputs) -> RuleArrays:
    """The arguments of a case as the kernels take them. What lies behind the last packed sequence is no number."""
    q, k, v, g, beta, h_0 = (None if y is None else np.array(y) for y in x[:6])
    if x.cu_seqlens is not None:
        for y in (q, k, v, g, beta):
            y[:, x.cu_seqlens[-1] :] = np.nan
    arrays = [None if y is None else jnp.asarray(y) for y in (q, k, v, g, beta, h_0)]
    if case.use_qk_l2norm:
        arrays[:2] = map(gates.l2norm, arrays[:2])
    return RuleArrays(*arrays, x.cu_seqlens, None if x.segment_ids is None else jnp.asarray(x.segment_ids))


CASES = [
    (
        cases.Case(
            "packed with resets, values grouped, float16",
            T=100,
            B=1,
            heads=(1, 1, 2),
            K=64,
            V=60,
            g="some -inf",
            beta="some 0",
            lengths=(0, 65, 0, 1, 30),
        ),
        "float16",
        None,
    ),
    (
        cases.Case("pairs", T=70, B=2, heads=(1, 1, 1), K=100, V=128, use_qk_l2norm=True, keys="any"),
        "bfloat16",
        walk.Config(2),
    ),
    pytest.param(
        cases.Case("groupings that do not nest", T=40, B=1, heads=(2, 3, 6), K=8, V=8, state_layout="vk"),
        "bfloat16",
        None,
        marks=pytest.mark.slow,
    ),
    pytest.param(
        cases.Case("two slots, segments", T=130, B=1, heads=(1, 1, 1), K=64, V=64, segments=((70, 1, 59),)),
        "bfloat16",
        walk.Config(1, 2),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("case", "dtype", "config"), CASES, ids=lambda x: getattr(x, "name", ""))
def test_forward_in_the_interpreter(case, dtype, config):
    x = cases.inputs(case, dtype)
    o, final = oracle.forward(**x.arguments, **case.rule_options)
    got_o, got_final, _ = rule.forward(
        arrays_of(case, x),
        scale=case.K**-0.5,
        state_layout=case.state_layout,
        config=config,
        interpret=INTERPRET,
    )
    assert got_o.dtype == x.q.dtype and got_final.dtype == jnp.float32
    assert_close(o, np.asarray(got_o), tolerance("o", dtype), "o", 2)
    assert_close(final, np.asarray(got_final), tolerance("final_state", dtype), "final state", 1)


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


def test_only_the_device_differs_between_generations():
    """What ends the process, hangs or is no instruction below 9.0 is not called by these kernels nor by what they
    share."""
    later = (
        r"plgpu\.(commit_smem|copy_|barrier_|wait_|wgmma|ACC|set_max_registers|Barrier)|dev\.(issue|release)"
    )
    shared = [ROOT / "pallas_kernels" / name for name in ("chunks/merging.py", "work/tables.py")]
    for path in (*(ROOT / "pallas_kernels" / "ampere").glob("*.py"), *shared):
        assert not re.search(later, path.read_text()), path


@pytest.mark.parametrize("K", [64, 128])
def test_shared_memory_of_small_gpus(K):
    bf16 = jnp.bfloat16
    assert smem_bytes(prepare._memory(K, bf16), REDUCTION_BYTES) <= SMALL_MEMORY // 2
    for warpgroups in (1, 2):
        config = walk.Config(warpgroups)
        memory = walk.memory(config, K, bf16, states.OUTPUT_TILES, states.KEYS)
        assert smem_bytes(memory) <= SMALL_MEMORY


def test_lowers_as_for_8_0():
    with lowering_for("8.0"):
        text = CALLS["mma, kv, float16, packed"].lower().as_text()
    kernels = re.findall(r"\\00(mma_\w+)_mosaic_gpu\\00", text)
    assert kernels == ["mma_prepare", "mma_outputs"]


@pytest.mark.slow
def test_no_registers_are_spilled():
    """Compiled for every generation. Needs what `pallas_kernels.tools.compiling` needs."""
    command = [
        sys.executable,
        "-m",
        "pallas_kernels.tools.ptxas_report",
        "--only",
        "mma, pairs",
        "--capability",
    ]
    generations = ["8.0", "8.6", "8.9", "12.0"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run([*command, *generations], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode and re.search("pip|ptxas|gcc", done.stderr):
        pytest.skip("the compiler of JAX's CUDA plugin is not here and cannot be fetched")
    assert done.returncode == 0, done.stderr
    lines = [re.fullmatch(r"(\S+) .*: (\w+) +(\d+) +(\d+) +(\d+) *", x) for x in done.stdout.splitlines()[1:]]
    assert all(lines), done.stdout
    seen = [(x[1], x[2]) for x in lines if x]
    assert seen == [(name, kernel) for name in generations for kernel in ("mma_prepare", "mma_outputs")]
    assert all(x[4] == x[5] == "0" for x in lines if x), done.stdout


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=jnp.float32), "float32"),
        (dict(chunk_size=32), "64"),
        (dict(T=0), "no tokens"),
        (dict(K=129), "up to 128"),
        (dict(T=2**24), "more numbers"),
    ],
)
def test_refusals_say_why(change, reason):
    sizes = dict(B=1, T=64, N=1, Hq=1, Hk=1, HV=1, HO=1, K=128, V=128)
    call = dict(dtype=jnp.bfloat16) | {name: value for name, value in change.items() if name not in sizes}
    changed = sizes | {name: value for name, value in change.items() if name in sizes}
    assert reason in str(rule.check_supported(Dims(**changed), **call))
    assert rule.check_supported(Dims(**sizes), jnp.bfloat16) is None
