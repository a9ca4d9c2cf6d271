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

from pallas_kernels.device import lanes
from pallas_kernels.device.launch import grid_index, num_sms
from pallas_kernels.device.memory import store_any

WARPS, LANES = 4, 32
"""Warps of a warpgroup, and threads of a warp."""

WARP_WIDTH = 1024
"""Widest row that one warp takes: 32 numbers a thread."""

WIDEST = 8192
"""Widest row that a warpgroup takes."""


def rows_at_once(width: int, N: int = 0) -> int:
    """Rows that a warpgroup holds: a power of two, and as many numbers a thread as fit beside others.

    A single one where so many do not divide N rows.
    """
    fitting = max(1, WARPS * WARP_WIDTH // width)
    rows = WARPS if width <= WARP_WIDTH else 1 << fitting.bit_length() - 1
    return 1 if N % rows else rows


def check_supported(width: int, N: int = 0) -> str | None:
    """Why N rows of a width cannot be taken; None if they can."""
    threads = LANES if _row_to_a_warp(width, rows_at_once(width, N)) else LANES * WARPS
    if width % threads or not 0 < width <= WIDEST:
        return f"rows of {width}; the kernel takes multiples of {threads} up to {WIDEST}"
    return None


def _row_to_a_warp(width: int, rows: int) -> bool:
    return width <= WARP_WIDTH and rows % WARPS == 0


def layout(width: int, rows: int) -> Any:
    """Layout of so many rows of a width."""
    if _row_to_a_warp(width, rows):
        piece = _piece(width, LANES)
        tiles = ((WARPS, LANES * piece), (piece,))
    else:
        piece = _piece(width, WARPS * LANES)
        tiles = ((1, WARPS * LANES * piece), (LANES * piece,), (piece,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _piece(width: int, threads: int) -> int:
    """Neighbouring numbers of a thread."""
    return next(n for n in (4, 2, 1) if width % (threads * n) == 0)


def load(ref, first, width: int, rows: int) -> jax.Array:
    """Rows `first` to first + rows - 1 of a global array [.., width] as float32."""
    return load_whole(ref.at[pl.ds(first, rows)]).astype(jnp.float32)


def load_whole(ref) -> jax.Array:
    """A global array [rows, width] in its own dtype."""
    return plgpu.load(ref, layout=layout(ref.shape[-1], ref.shape[0]), optimized=False)


def load_rows(ref, first, width: int, rows: int) -> jax.Array:
    """Numbers `first` to first + rows - 1 of a global vector, one for each of so many rows of a width."""
    return plgpu.load(ref.at[pl.ds(first, rows)], layout=layout(width, rows).reduce(1), optimized=False)


def load_along(ref, rows: int) -> jax.Array:
    """A global vector [width] as float32, repeated for every row."""
    width = ref.shape[0]
    x = plgpu.load(ref, layout=layout(width, rows).reduce(0), optimized=False).astype(jnp.float32)
    return lanes.spread(x, (rows, width), 1, layout(width, rows))


def store(ref, first, x: jax.Array) -> None:
    """Writes rows, in the array's dtype."""
    store_any(ref.at[pl.ds(first, x.shape[0])], x.astype(ref.dtype))


def zeros(width: int, rows: int) -> jax.Array:
    """Rows of zeros."""
    return plgpu.layout_cast(jnp.zeros((rows, width), jnp.float32), layout(width, rows))


def row_sum(x: jax.Array) -> jax.Array:
    """Sum of each row, [rows]."""
    return jnp.sum(x, axis=1)


def spread(x: jax.Array, width: int) -> jax.Array:
    """[rows] repeated along rows of a width."""
    return lanes.spread(x, (len(x), width), 0, layout(width, len(x)))


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + jnp.exp(-x))


def num_ctas(blocks: int, per_sm: int) -> int:
    """CTAs that share the blocks: at most `per_sm` for each multiprocessor."""
    return min(blocks, num_sms() * per_sm)


def walk(body: Callable[[Any, Any], Any], blocks: int, ctas: int, carry: Any = ()) -> Any:
    """carry = body(block, carry) for every block of this CTA: its own number, and every ctas-th one from there."""
    first = grid_index()
    count = (blocks - first + ctas - 1) // ctas
    return lax.fori_loop(0, count, lambda i, carry: body(first + i * ctas, carry), carry)
