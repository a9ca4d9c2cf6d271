"""The branches of a SwiGLU and their product, made where the branches are multiplied.

    [a | b] = x W,   h = silu(a) b

The product is made of a tile of branches while that lies in registers: it costs no pass over the branches.

Inputs (GMEM): x [M, D], weight W [D, 2 F], bfloat16 or float16; the columns of W are `GROUP` of a, as many of b, and
so on. Outputs (GMEM), of x's dtype: ab = x W [M, 2 F]; h [M, F].
Grid, roles of the warpgroups, barriers of the ring: `layer.tiles`. A multiplying warpgroup hands `OUT` columns of its
tile at a time to bulk stores, which run beside what follows, also the products of its next tile.
Shared memory: `_memory`, 216 KB.
Numerics: sums and h in float32; h is made of the branches as they are rounded. The same bits in every call.
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
from pallas_kernels.device.layouts import WGMMA
from pallas_kernels.device.memory import Buffer, Memory
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer import tiles
from pallas_kernels.layer.tiles import COLUMNS, DEPTH, ROWS, TILE_ROWS, Config, Cta

NEEDS = Needs.TMA | Needs.WGMMA

GROUP = 32
"""Numbers of a, or of b, that lie together: as many of both are a swizzled row of 128 bytes."""

OUT = 2 * GROUP
"""Columns of branches that are stored at once."""

CONFIG = Config(lead=2)
"""Default: the fastest of those in docs/log/training.md (H200, 2026-11-23, 65,536 rows, D = 1024, F = 2752)."""


def check_supported(x: Shaped, F: int) -> str | None:
    """Why the kernel cannot make branches of F columns of x [.., D]; None if it can."""
    reason = tiles.check_supported(x)
    if reason is not None:
        return f"x: {reason}"
    return f"{F} columns; the kernel takes a multiple of {GROUP}" if F % GROUP or not F else None


def _memory(config: Config, dtype: Any) -> Memory:
    return {
        "x": Buffer((config.stages, TILE_ROWS, DEPTH), dtype, swizzle=128),
        "w": Buffer((config.stages, DEPTH, COLUMNS), dtype, swizzle=128),
        "ab": Buffer((2, ROWS, OUT), dtype, swizzle=128),
        "h": Buffer((2, ROWS, OUT // 2), dtype, swizzle=64),
        **tiles.barriers(config, copies=2),
    }


def silu_parts(dev: Device, ab: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """a, b and the sigmoid of a in float32, of rows [ROWS, 2 GROUP] in the WGMMA layout."""
    wide = dev.widen(ab)
    a, b = wide[:, :GROUP], wide[:, GROUP:]
    return a, b, dev.reciprocal(1.0 + jnp.exp(-a), WGMMA)


def _load(cta: Cta, row, column, depth, slot) -> None:
    gmem, smem, part = cta.gmem, cta.smem, pl.ds(depth, DEPTH)
    barrier = smem.full.at[slot]
    plgpu.copy_gmem_to_smem(gmem.x.at[pl.ds(row, TILE_ROWS), part], smem.x.at[slot], barrier)
    tiles.copy_shared(gmem.w.at[part, pl.ds(column, COLUMNS)], smem.w.at[slot], barrier)


def _store(cta: Cta, i, row, column, x) -> None:
    """Writes a tile and the product of its branches."""
    gmem, rows = cta.gmem, cta.own_rows(row)
    ab, h = cta.smem.ab.at[cta.wg], cta.smem.h.at[cta.wg]
    for first in range(0, COLUMNS, OUT):
        rounded = x[:, first : first + OUT].astype(gmem.ab.dtype)
        a, b, gate = silu_parts(cta.dev, rounded)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ab[...] = rounded
        h[...] = (a * gate * b).astype(gmem.h.dtype)
        plgpu.commit_smem()
        begin = column + first
        plgpu.copy_smem_to_gmem(ab, gmem.ab.at[rows, pl.ds(begin, OUT)], commit_group=False)
        plgpu.copy_smem_to_gmem(h, gmem.h.at[rows, pl.ds(begin // 2, OUT // 2)])


def _operands(cta: Cta, slot) -> tuple[Any, Any]:
    return cta.smem.x.at[slot, cta.own_rows(0)], cta.smem.w.at[slot]


@kernel("config")
def swiglu_product(
    x: Float[Array, "M D"],
    weight: Float[Array, "D F2"],
    *,
    config: Config = CONFIG,
    interpret: Any = None,
) -> tuple[Float[Array, "M F2"], Float[Array, "M F"]]:
    """ab = x W and h = silu(a) b, in x's dtype, where `check_supported` says so."""
    (M, D), N = x.shape, weight.shape[1]
    results = tiles.start(
        "swiglu_product",
        functools.partial(tiles.work, load=_load, operands=_operands, finish=_store),
        (M, N, D),
        inputs={"x": x, "w": weight},
        outputs={
            "ab": jax.ShapeDtypeStruct((M, N), x.dtype),
            "h": jax.ShapeDtypeStruct((M, N // 2), x.dtype),
        },
        memory=_memory(config, x.dtype),
        config=config,
        interpret=interpret,
    )
    return results["ab"], results["h"]
