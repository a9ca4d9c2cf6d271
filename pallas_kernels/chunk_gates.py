"""Cumulative gates inside chunks, and gates and write strengths turned head-major.

    g2_cum[i] = sum of max(LOG2_E g[j], RESET_G2) over the tokens j <= i of i's chunk and sequence

Inputs (GMEM): g, beta [B, T, HO] float32 as the caller holds them; first [NT C] int32, optional: the row inside its
chunk at which the sequence of each token starts (packed rows only, then B = 1).
Outputs (GMEM): g2_cum, beta_t [B, HO, NT C] float32, NT = ceil(T / C); rows past T hold the last sum and 0.
Grid: one CTA of one warpgroup for each (row of the batch, chunk, 8 heads).
Shared memory: (2 C + 2 C + 2 x 8) x 8 heads of float32, 8.7 KB.
Hardware: compute capability 9.0 (bulk copies). HO is padded to a multiple of 4 first (16-byte strides of a copy).
Stores never reach past HO. A bulk store whose box is one contiguous piece of memory (here: T64 = 64) is lowered to a
plain copy that is cut off at the end of the array only: surplus heads of a row would land in the next row.
Source: fla's `chunk_local_cumsum` with `reset`; the doubling scan is Hillis and Steele's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import (
    CHUNK,
    COMPILER_PARAMS,
    LOG2_E,
    RESET_G2,
    ROW,
    WGMMA,
    along_rows,
    grid_index,
    iota,
    launch,
    round_up,
    take,
    zeros,
)

HEADS = 8
"""Heads of a tile: 32 bytes, one sector of memory."""


def _body(
    g_gmem: Any,
    beta_gmem: Any,
    *rest: Any,
    ragged: bool,
    num_heads: int,
    num_chunks: int,
    num_head_tiles: int,
):
    refs = list(rest)
    first_gmem = take(refs, ragged)
    g_out, beta_out, g_smem, beta_smem, g_t_smem, beta_t_smem, loaded = refs
    tile = lax.rem(grid_index(), num_head_tiles)
    chunk = lax.rem(lax.div(grid_index(), num_head_tiles), num_chunks)
    b = lax.div(grid_index(), num_head_tiles * num_chunks)
    tokens, heads = pl.ds(chunk * CHUNK, CHUNK), pl.ds(tile * HEADS, HEADS)
    values = pl.ds(CHUNK, CHUNK)  # the rows before them are zeros: what lies before the chunk

    plgpu.copy_gmem_to_smem(g_gmem.at[b, tokens, heads], g_smem.at[values], loaded)
    plgpu.copy_gmem_to_smem(beta_gmem.at[b, tokens, heads], beta_smem, loaded)
    g_smem[0:CHUNK] = zeros((CHUNK, HEADS), jnp.float32)
    plgpu.barrier_wait(loaded)

    x = jnp.maximum(plgpu.load(g_smem.at[values], layout=WGMMA) * LOG2_E, RESET_G2)
    age: Any = None
    if ragged:
        first = along_rows(plgpu.load(first_gmem.at[tokens], layout=ROW, optimized=False), HEADS)
        age = iota((CHUNK, HEADS), 0) - first
    for shift in (1, 2, 4, 8, 16, 32):
        g_smem[CHUNK : 2 * CHUNK] = x
        earlier = plgpu.load(g_smem.at[pl.ds(CHUNK - shift, CHUNK)], layout=WGMMA)
        x = x + (jnp.where(age >= shift, earlier, 0.0) if ragged else earlier)
    g_smem[CHUNK : 2 * CHUNK] = x
    for i in range(HEADS):
        g_t_smem[i] = plgpu.load(g_smem.at[values, i], layout=ROW, optimized=False)
        beta_t_smem[i] = plgpu.load(beta_smem.at[:, i], layout=ROW, optimized=False)
    plgpu.commit_smem()
    pairs = ((g_t_smem, g_out), (beta_t_smem, beta_out))

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


def chunk_gates(
    g: Float[Array, "B T HO"],
    beta: Float[Array, "B T HO"],
    first: Int[Array, " T64"] | None = None,
    *,
    interpret=None,
) -> tuple[Float[Array, "B HO T64"], Float[Array, "B HO T64"]]:
    """g2_cum and beta_t, see the module docstring.

    Args:
      g, beta: [B, T, HO], float32.
      first: row of the chunk at which each token's sequence starts, 0 to C - 1, or None when every row of the
        batch is one sequence.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    B, T, HO = g.shape
    padded = round_up(HO, 4)
    if padded != HO:
        g, beta = (jnp.pad(x, ((0, 0), (0, 0), (0, padded - HO))) for x in (g, beta))
    num_chunks, num_head_tiles = -(-T // CHUNK), -(-padded // HEADS)
    out = jax.ShapeDtypeStruct((B, HO, num_chunks * CHUNK), jnp.float32)
    body = functools.partial(
        _body,
        ragged=first is not None,
        num_heads=HO,
        num_chunks=num_chunks,
        num_head_tiles=num_head_tiles,
    )
    vectors = plgpu.SMEM((HEADS, CHUNK), jnp.float32)
    return launch(
        body,
        g,
        beta,
        first,
        out_type=(out, out),
        scratch_types=(
            plgpu.SMEM((2 * CHUNK, HEADS), jnp.float32),
            plgpu.SMEM((CHUNK, HEADS), jnp.float32),
            vectors,
            vectors,
            plgpu.Barrier(num_arrivals=2),
        ),
        grid=(B * num_chunks * num_head_tiles,),
        grid_names=("cta",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(**COMPILER_PARAMS),
    )
