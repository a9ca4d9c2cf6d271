"""Kernels bring to the L2 cache what those that follow them read.

The memory has nothing to do while a kernel ends and the next one begins. A kernel that knows the weights of the next
ones asks for them behind its own: they are on their way meanwhile. That is a hint alone. No result depends on it, and
nothing waits for it.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.device import generations
from pallas_kernels.device.launch import grid_index

WIDTH = 256
"""Numbers of a row of what is asked for at once."""

ROWS = 32
"""Rows of it at most."""

BYTES = 8 * 2**20
"""A kernel asks for so many at most: more than arrives between two kernels would be in the way of the next one."""


def rows_of(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The arrays as the kernels take them, [n, WIDTH] or [n, a part of it], up to `BYTES`; outside kernels."""
    taken, room = [], BYTES
    for x in arrays:
        if room <= 0:
            break
        width = math.gcd(x.size, WIDTH)
        if width * x.dtype.itemsize % 16 == 0:
            taken.append(x.reshape(-1, width))
            room -= x.nbytes
    return tuple(taken)


def bring(refs: Sequence[Any], ctas: int) -> None:
    """Asks for this CTA's share of arrays, by one warpgroup, and of the last one only while there is room.

    Args:
      refs: the arrays of `rows_of`, in global memory.
      ctas: CTAs that share them.
    """
    room = BYTES
    for ref in refs:
        n, width = ref.shape
        rows = min(ROWS, n)
        box = rows * width * jnp.dtype(ref.dtype).itemsize
        boxes = min(pl.cdiv(n, rows), pl.cdiv(room, box))
        room -= boxes * box

        def ask(i, _, ref=ref, rows=rows, last=n - rows):
            first = jnp.minimum((grid_index() + i * ctas) * rows, last)
            generations.prefetch(ref.at[pl.ds(first, rows)])

        lax.fori_loop(0, lax.div(boxes - grid_index() + (ctas - 1), jnp.int32(ctas)), ask, None)
        if room <= 0:
            return
