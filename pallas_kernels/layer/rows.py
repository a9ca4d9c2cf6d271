"""Rows in registers, for kernels that work along rows and need no shared memory.

A warpgroup holds a few rows at once, in one of two layouts: a row to each of its four warps, so that a sum along a
row stays inside a warp; or every row over all four, for rows that would not fit one. A thread has neighbouring
numbers of its rows, so that it reads and writes memory in wide pieces.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.launch import NUM_SMS, grid_index
from pallas_kernels.device.memory import store_any

WARPS = 4
"""Warps of a warpgroup."""

WARP_WIDTH = 1024
"""Widest row that one warp takes: 32 numbers a thread."""

WIDEST = 8192
"""Widest row that a warpgroup takes."""


def rows_at_once(width: int) -> int:
    """Rows that a warpgroup holds: a power of two, and as many numbers a thread as fit beside others."""
    fitting = max(1, WARPS * WARP_WIDTH // width)
    return WARPS if width <= WARP_WIDTH else 1 << fitting.bit_length() - 1


def width_reason(width: int) -> str | None:
    """Why rows of a width cannot be taken; None if they can."""
    lanes = 32 if width <= WARP_WIDTH else 32 * WARPS
    if width % lanes or not 0 < width <= WIDEST:
        return f"rows of {width}; the kernel takes multiples of {lanes} up to {WIDEST}"
    return None


def layout(width: int) -> Any:
    """Layout of rows of a width."""
    lanes = 32 if width <= WARP_WIDTH else 32 * WARPS
    piece = next(n for n in (4, 2, 1) if width % (lanes * n) == 0)
    tiles = ((WARPS, 32 * piece), (piece,))
    if width > WARP_WIDTH:
        tiles = ((1, WARPS * 32 * piece), (32 * piece,), (piece,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def load(ref, first, width: int, rows: int) -> jax.Array:
    """Rows `first` to first + rows - 1 of a global array [.., width] as float32."""
    return _read(ref.at[pl.ds(first, rows)], layout(width))


def load_whole(ref) -> jax.Array:
    """A global array [rows, width] as float32."""
    return _read(ref, layout(ref.shape[-1]))


def load_along(ref, rows: int) -> jax.Array:
    """A global vector [width] as float32, repeated for every row."""
    width = ref.shape[0]
    x = _read(ref, layout(width).reduce(0))
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, width), [1]), layout(width))


def _read(ref, as_layout) -> jax.Array:
    return plgpu.load(ref, layout=as_layout, optimized=False).astype(jnp.float32)


def store(ref, first, x: jax.Array) -> None:
    """Writes rows, in the array's dtype."""
    store_any(ref.at[pl.ds(first, x.shape[0])], x.astype(ref.dtype))


def zeros(width: int, rows: int) -> jax.Array:
    """Rows of zeros."""
    return plgpu.layout_cast(jnp.zeros((rows, width), jnp.float32), layout(width))


def row_mean(x: jax.Array) -> jax.Array:
    """Mean of each row, repeated along it."""
    mean = jnp.sum(x, axis=1) * (1.0 / x.shape[1])
    return plgpu.layout_cast(lax.broadcast_in_dim(mean, x.shape, [0]), layout(x.shape[1]))


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + jnp.exp(-x))


def num_ctas(blocks: int, per_sm: int) -> int:
    """CTAs that share the blocks: at most `per_sm` for each multiprocessor."""
    return min(blocks, NUM_SMS * per_sm)


def walk(body: Callable[[Any, Any], Any], blocks: int, ctas: int, carry: Any = ()) -> Any:
    """carry = body(block, carry) for every block of this CTA: its own number, and every ctas-th one from there."""
    first = grid_index()
    count = (blocks - first + ctas - 1) // ctas
    return lax.fori_loop(0, count, lambda i, carry: body(first + i * ctas, carry), carry)
