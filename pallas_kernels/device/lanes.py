"""Layouts of arrays over the threads of a warpgroup, whose warps lie below each other."""

import math
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

WARP = 32
"""Threads of a warp."""

WARPS = 4
"""Warps of a warpgroup."""


def lane_layout(lanes: int, width: int) -> Any:
    """Layout of [rows, columns] whose warps lie below each other.

    A thread has `width` neighbours of a row, `lanes` threads of a warp lie along the row, and the others in the rows
    below.
    """
    rows = WARP // lanes
    if rows == 1:
        tiling = plgpu.Tiling(((WARPS, WARP * width), (width,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((WARPS * rows, lanes * width), (rows, width)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)


def vector_layout(n: int) -> Any:
    """Layout of [n] that every warp has whole, so that sums need no other warp."""
    return lane_layout(WARP, math.gcd(n // WARP, 4)).reduce(0)


def spread(x: jax.Array, shape: tuple[int, ...], axes: int | tuple[int, ...], layout: Any) -> jax.Array:
    """An array along some axes of a larger one, repeated along the others."""
    axes = axes if isinstance(axes, tuple) else (axes,)
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), layout)


def load(ref: Any, layout: Any) -> jax.Array:
    """Loads from memory to registers."""
    return plgpu.load(ref, layout=layout, optimized=False)
