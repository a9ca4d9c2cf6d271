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
from pallas_kernels.device.memory import Barriers, Buffer
from pallas_kernels.device.operations import Device

HEADS = 8
"""Heads of a tile: 32 bytes, one sector of memory."""


MEMORY = {
    "g": Buffer((2 * CHUNK, HEADS)),  # zeros in the first half: what lies before the chunk
    "beta": Buffer((CHUNK, HEADS)),
    "g_t": Buffer((HEADS, CHUNK)),
    "beta_t": Buffer((HEADS, CHUNK)),
    "loaded": Barriers(arrivals=2),
}
"""Shared memory of a CTA."""


def _body(gmem: Any, smem: Any, *, num_heads: int, num_chunks: int, num_head_tiles: int):
    tile = lax.rem(grid_index(), num_head_tiles)
    chunk = lax.rem(lax.div(grid_index(), num_head_tiles), num_chunks)
    b = lax.div(grid_index(), num_head_tiles * num_chunks)
    tokens, heads = pl.ds(chunk * CHUNK, CHUNK), pl.ds(tile * HEADS, HEADS)
    g_values = smem.g.at[pl.ds(CHUNK, CHUNK)]

    plgpu.copy_gmem_to_smem(gmem.g.at[b, tokens, heads], g_values, smem.loaded)
    plgpu.copy_gmem_to_smem(gmem.beta.at[b, tokens, heads], smem.beta, smem.loaded)
    smem.g[0:CHUNK] = zeros((CHUNK, HEADS), jnp.float32)
    plgpu.barrier_wait(smem.loaded)

    x = jnp.maximum(plgpu.load(g_values, layout=WGMMA) * LOG2_E, RESET_G2)
    age: Any = None
    if gmem.first is not None:
        first = along_rows(plgpu.load(gmem.first.at[tokens], layout=ROW, optimized=False), HEADS)
        age = iota((CHUNK, HEADS), 0) - first
    for shift in (1, 2, 4, 8, 16, 32):
        smem.g[CHUNK : 2 * CHUNK] = x
        earlier = plgpu.load(smem.g.at[pl.ds(CHUNK - shift, CHUNK)], layout=WGMMA)
        x = x + (earlier if age is None else jnp.where(age >= shift, earlier, 0.0))
    smem.g[CHUNK : 2 * CHUNK] = x
    for i in range(HEADS):
        smem.g_t[i] = plgpu.load(smem.g.at[pl.ds(CHUNK, CHUNK), i], layout=ROW, optimized=False)
        smem.beta_t[i] = plgpu.load(smem.beta.at[:, i], layout=ROW, optimized=False)
    plgpu.commit_smem()
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
    sizes = dict(num_heads=HO, num_chunks=num_chunks, num_head_tiles=num_head_tiles)
    results = launch(
        "chunk_gates",
        functools.partial(_body, **sizes),
        inputs={"g": g, "beta": beta, "first": first},
        outputs={"g2_cum": out, "beta_t": out},
        memory=MEMORY,
        ctas=B * num_chunks * num_head_tiles,
        interpret=interpret,
    )
    return results["g2_cum"], results["beta_t"]


def gamma_of(dev: Device, gates: Any, log2_factor: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """G in layout ROW, and factor Gamma [C, C]: 2^(G_i - G_j) for i >= j, 0 above. For kernels.

    Args:
      gates: reference to G = g2_cum [C] in shared memory.
      log2_factor: log2 of the factor.
    """
    g_rows, g_columns = plgpu.load(gates, layout=ROW), plgpu.load(gates, layout=COL)
    difference = along_rows(g_rows + log2_factor, CHUNK) - along_columns(g_columns, CHUNK)
    return g_rows, jnp.where(dev.row_minus_column() >= 0, jnp.exp2(difference), 0.0)
