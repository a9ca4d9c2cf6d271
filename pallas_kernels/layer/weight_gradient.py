"""The gradient of a matrix of weights: the product of its inputs with the cotangents of its outputs.

    dW = sum_t x_t dy_t^T

The sum over many rows is cut into parts, so that its tiles fill all multiprocessors evenly to the end. The parts of
the result are added in float32, in their order.

Inputs (GMEM): x [T, M], dy [T, N], bfloat16 or float16. Output (GMEM): dW of each part [parts, M, N] float32.
Grid, roles of the warpgroups, barriers of the ring: `layer.tiles`, with A = x^T. A multiplying warpgroup hands `OUT`
columns of its tile at a time to bulk stores, which run beside what follows, also the products of its next tile.
Shared memory: `_memory`, 208 KB.
Numerics: float32 sums. The same bits in every call.
Hardware: compute capability 9.0. Limits: `check_supported`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.launch import Shaped, kernel
from pallas_kernels.device.memory import Buffer, Memory, transposed
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import tiles
from pallas_kernels.layer.operand_ring import store
from pallas_kernels.layer.tiles import COLUMNS, DEPTH, ROWS, TILE_ROWS, Config, Cta

NEEDS = Needs.TMA | Needs.WGMMA

OUT = 32
"""Columns that are stored at once: 128 bytes, over which rows are swizzled."""

CONFIG = Config()

MOST_PARTS = 4
"""Each part is written and read once in float32."""

ROWS_OF_PART = 16384
"""Rows of a part at least, or what is written and read takes more time than is gained."""

LEAST_FILL = 0.98
"""Share of the time in which all clusters have a tile, from which on this kernel is faster than cuBLAS. (H200,
2026-11-23, 65,536 rows: 1024 x 5504 in three parts, which fill it, 1.127 against 1.224 ms, in one and in six parts,
which do not, 1.385 and 1.178; 2752 x 1024 0.561 against 0.586. cuBLAS is faster, 0.813 against 0.958 ms, for 1024 x
4224, where its own tiles fill the GPU and no number of parts does.)"""


def num_parts(T: int, M: int, N: int) -> int | None:
    """The fewest parts of T rows that fill the GPU evenly; None where cuBLAS is expected to be faster."""
    clusters = tiles.most_clusters(CONFIG)
    for parts in range(1, min(MOST_PARTS, T // ROWS_OF_PART) + 1):
        count = tiles.num_tiles(M, N) * parts
        if count >= LEAST_FILL * clusters * pl.cdiv(count, clusters):
            return parts
    return None


def check_supported(x: Shaped, N: int) -> str | None:
    """Why the kernel cannot make the gradient of weights from inputs x [T, M] to N channels; None if it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {jnp.dtype(x.dtype).name}; the kernel takes bfloat16 and float16"
    if not x.shape[0] or x.shape[0] % 8:
        return f"x has {x.shape[0]} rows; the kernel takes a multiple of 8"
    if x.shape[1] % 64 or N % 64 or not x.shape[1] * N:
        return f"weights [{x.shape[1]}, {N}]; the kernel takes multiples of 64"
    return None


def _memory(config: Config, dtype: Any) -> Memory:
    return {
        "x": Buffer((config.stages, DEPTH, TILE_ROWS), dtype, swizzle=128),
        "dy": Buffer((config.stages, DEPTH, COLUMNS), dtype, swizzle=128),
        "out": Buffer((2, ROWS, OUT), jnp.float32, swizzle=128),
        **tiles.barriers(config, copies=2),
    }


def _load(cta: Cta, row, column, depth, slot) -> None:
    gmem, smem, tokens = cta.gmem, cta.smem, pl.ds(depth, DEPTH)
    barrier = smem.full.at[slot]
    plgpu.copy_gmem_to_smem(gmem.x.at[tokens, pl.ds(row, TILE_ROWS)], smem.x.at[slot], barrier)
    tiles.copy_shared(gmem.dy.at[tokens, pl.ds(column, COLUMNS)], smem.dy.at[slot], barrier)


def _store(cta: Cta, i, row, column, dw) -> None:
    """Writes a tile."""
    part = cta.gmem.dw.at[cta.part(i)]
    store(cta.smem.out.at[cta.wg], dw, lambda at: part.at[cta.own_rows(row), pl.ds(column + at, OUT)])


def _operands(cta: Cta, slot) -> tuple[Any, Any]:
    return transposed(cta.smem.x.at[slot, :, cta.own_rows(0)]), cta.smem.dy.at[slot]


@kernel("parts", "config")
def weight_gradient(
    x: Float[Array, "T M"],
    dy: Float[Array, "T N"],
    *,
    parts: int,
    config: Config = CONFIG,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """x^T dy in float32, where `check_supported` says so.

    Args:
      parts: of `num_parts`.
    """
    (T, M), N = x.shape, dy.shape[1]
    results = tiles.start(
        "weight_gradient",
        functools.partial(tiles.work, load=_load, operands=_operands, finish=_store),
        (M, N, T),
        inputs={"x": x, "dy": dy},
        outputs={"dw": jax.ShapeDtypeStruct((parts, M, N), jnp.float32)},
        memory=_memory(config, x.dtype),
        config=config,
        parts=parts,
        interpret=interpret,
    )
    return jnp.sum(results["dw"], axis=0)
