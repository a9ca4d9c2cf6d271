"""Cumulative gates inside chunks, and gates and write strengths turned head-major.

    g2_cum[i] = sum of max(LOG2_E g[j], RESET_G2) over the tokens j <= i of i's chunk and sequence

For packed rows it also makes the tables that the next kernels need, so that nothing has to run before it:
`work.search` says how.

Inputs (GMEM): g, beta [B, T, HO] float32 as the caller holds them; cu_seqlens [N + 1] int32 (packed rows only, then
B = 1).
Outputs (GMEM): g2_cum, beta_t [B, HO, NT C] float32, NT = ceil(T / C); rows past T hold the last sum and 0. Of packed
rows first [NT C] int32, the row inside its chunk at which the sequence of each token starts, and, where it is asked
for, order int32: the sequences, those of most chunks first.
Grid: one CTA of one warpgroup for each (row of the batch, chunk, 8 heads), before them one for the order.
Shared memory: (2 C + 2 C + 2 x 8) x 8 heads of float32, 8.7 KB.
Hardware: compute capability 9.0 (bulk copies). HO is padded to a multiple of 4 first (16-byte strides of a copy).
Stores never reach past HO. A bulk store whose box is one contiguous piece of memory (here: T64 = 64) is lowered to a
plain copy that is cut off at the end of the array only: surplus heads of a row would land in the next row.
Source: fla's `chunk_local_cumsum` with `reset`; the doubling scan is Hillis and Steele's.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.layouts import (
    CHUNK,
    COL,
    LOG2_E,
    RESET_G2,
    ROW,
    WGMMA,
    along_columns,
    along_rows,
    iota,
    round_up,
    zeros,
)
from pallas_kernels.device.memory import Barriers, Buffer, Memory
from pallas_kernels.device.operations import Device
from pallas_kernels.work.search import first_rows, longest_first, ordered_size

HEADS = 8
"""Heads of a tile: 32 bytes, one sector of memory."""


def _memory(first: bool, order: int | None) -> Memory:
    """Shared memory of a CTA."""
    return {
        "g": Buffer((2 * CHUNK, HEADS)),  # zeros in the first half: what lies before the chunk
        "beta": Buffer((CHUNK, HEADS)),
        "g_t": Buffer((HEADS, CHUNK)),
        "beta_t": Buffer((HEADS, CHUNK)),
        "first": Buffer((CHUNK,), jnp.int32) if first else None,
        "places": None if order is None else Buffer((order,), jnp.int32),
        "loaded": Barriers(arrivals=2),
    }


class _Sizes(NamedTuple):
    """Static sizes of one kernel."""

    num_heads: int
    num_chunks: int
    num_head_tiles: int


def _body(gmem: Any, smem: Any, *, sizes: _Sizes):
    index = grid_index()
    if gmem.order is None:
        return _tile(index, gmem, smem, sizes)
    pl.when(index == 0)(lambda: longest_first(gmem, smem))
    pl.when(index > 0)(lambda: _tile(index - 1, gmem, smem, sizes))


def _tile(index, gmem: Any, smem: Any, sizes: _Sizes) -> None:
    """One chunk of 8 heads."""
    num_heads, num_chunks, num_head_tiles = sizes
    tile = lax.rem(index, num_head_tiles)
    chunk = lax.rem(lax.div(index, num_head_tiles), num_chunks)
    b = lax.div(index, num_head_tiles * num_chunks)
    tokens, heads = pl.ds(chunk * CHUNK, CHUNK), pl.ds(tile * HEADS, HEADS)
    g_values = smem.g.at[pl.ds(CHUNK, CHUNK)]

    plgpu.copy_gmem_to_smem(gmem.g.at[b, tokens, heads], g_values, smem.loaded)
    plgpu.copy_gmem_to_smem(gmem.beta.at[b, tokens, heads], smem.beta, smem.loaded)
    smem.g[0:CHUNK] = zeros((CHUNK, HEADS), jnp.float32)
    first: Any = None if gmem.cu_seqlens is None else first_rows(chunk, gmem)
    plgpu.barrier_wait(smem.loaded)

    x = jnp.maximum(plgpu.load(g_values, layout=WGMMA) * LOG2_E, RESET_G2)
    age: Any = None
    if first is not None:
        age = iota((CHUNK, HEADS), 0) - along_rows(first, HEADS)
        smem.first[...] = first
    for shift in (1, 2, 4, 8, 16, 32):
        smem.g[CHUNK : 2 * CHUNK] = x
        earlier = plgpu.load(smem.g.at[pl.ds(CHUNK - shift, CHUNK)], layout=WGMMA)
        x = x + (earlier if age is None else jnp.where(age >= shift, earlier, 0.0))
    smem.g[CHUNK : 2 * CHUNK] = x
    for i in range(HEADS):
        smem.g_t[i] = plgpu.load(smem.g.at[pl.ds(CHUNK, CHUNK), i], layout=ROW, optimized=False)
        smem.beta_t[i] = plgpu.load(smem.beta.at[:, i], layout=ROW, optimized=False)
    plgpu.commit_smem()
    if first is not None:
        pl.when(tile == 0)(lambda: plgpu.copy_smem_to_gmem(smem.first, gmem.first.at[tokens]))
    pairs = ((smem.g_t, gmem.g2_cum), (smem.beta_t, gmem.beta_t))

    def store_all():
        for source, destination in pairs:
            plgpu.copy_smem_to_gmem(source, destination.at[b, heads, tokens])

    def store_one(i):
        for source, destination in pairs:
            plgpu.copy_smem_to_gmem(source.at[i], destination.at[b, tile * HEADS + i, tokens])

    whole_tiles, surplus = divmod(num_heads, HEADS)
    if whole_tiles:
        pl.when(tile < whole_tiles)(store_all)
    for i in range(surplus):
        pl.when(tile == whole_tiles)(functools.partial(store_one, i))
    plgpu.wait_smem_to_gmem(0)


class Gates(NamedTuple):
    """Results of `chunk_gates`; see the module docstring."""

    g2_cum: Float[Array, "B HO T64"]
    beta_t: Float[Array, "B HO T64"]
    first: Int[Array, " T64"] | None
    """Row of its chunk at which each token's sequence starts, 0 to C - 1, of packed rows. A token of the padding past
    the last sequence counts as a sequence of its own."""
    order: Int[Array, " N64"] | None
    """Sequences of packed rows, those of most chunks first, then N for the padding, to a multiple of 64."""


def chunk_gates(
    g: Float[Array, "B T HO"],
    beta: Float[Array, "B T HO"],
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    ordered: bool = False,
    interpret=None,
) -> Gates:
    """Cumulative gates, head-major write strengths and tables of packed rows, see the module docstring.

    Args:
      g, beta: [B, T, HO], float32.
      cu_seqlens: of packed rows, int32, or None when every row of the batch is one sequence.
      ordered: whether the order of the sequences is asked for.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    B, T, HO = g.shape
    padded = round_up(HO, 4)
    if padded != HO:
        g, beta = (jnp.pad(x, ((0, 0), (0, 0), (0, padded - HO))) for x in (g, beta))
    sizes = _Sizes(HO, -(-T // CHUNK), -(-padded // HEADS))
    T64, packed = sizes.num_chunks * CHUNK, cu_seqlens is not None
    order = ordered_size(cu_seqlens.shape[0] - 1) if ordered and cu_seqlens is not None else None
    out = jax.ShapeDtypeStruct((B, HO, T64), jnp.float32)
    results = launch(
        "chunk_gates",
        functools.partial(_body, sizes=sizes),
        inputs={"g": g, "beta": beta, "cu_seqlens": cu_seqlens},
        outputs={
            "g2_cum": out,
            "beta_t": out,
            "first": jax.ShapeDtypeStruct((T64,), jnp.int32) if packed else None,
            "order": None if order is None else jax.ShapeDtypeStruct((order,), jnp.int32),
        },
        memory=_memory(packed, order),
        ctas=B * sizes.num_chunks * sizes.num_head_tiles + (order is not None),
        auto_barriers=True,
        interpret=interpret,
    )
    return Gates(results["g2_cum"], results["beta_t"], results.get("first"), results.get("order"))


def gamma_of(dev: Device, gates: Any, log2_factor: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """G in layout ROW, and factor Gamma [C, C]: 2^(G_i - G_j) for i >= j, 0 above. For kernels.

    Args:
      gates: reference to G = g2_cum [C] in shared memory.
      log2_factor: log2 of the factor.
    """
    g_rows, g_columns = plgpu.load(gates, layout=ROW), plgpu.load(gates, layout=COL)
    difference = along_rows(g_rows + log2_factor, CHUNK) - along_columns(g_columns, CHUNK)
    return g_rows, jnp.where(dev.row_minus_column() >= 0, jnp.exp2(difference), 0.0)
