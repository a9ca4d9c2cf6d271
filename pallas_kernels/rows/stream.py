"""The sum of the residual stream of one row and its norm, of which every CTA makes all, four lines a warpgroup.

    s = x + sum_p y_p,   v = s w,   n = v (mean(s^2) + eps)^(-1/2)

Products are taken of v, and scaled in the end: nobody waits for the norm.

References (GMEM): x [D / LINE, LINE], w likewise, float32, y [P, D / LINE, LINE] or None; s of x's shape, or None.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.device.lanes import WARPS
from pallas_kernels.device.launch import Shaped, grid_index
from pallas_kernels.device.memory import store_any
from pallas_kernels.layer import rows as r

LINE = 128
"""Numbers of the stream that a warp adds up, four for each thread."""

PART = WARPS * LINE
"""Numbers of the stream that a warpgroup adds up at a time."""

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_supported(x: Shaped) -> str | None:
    """Why no kernel of one row can take a stream [rows, D]; None if one may."""
    if x.shape[0] != 1:
        return f"{x.shape[0]} rows; the kernel takes one"
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}; the kernel takes float32, bfloat16 and float16"
    return None


def inputs(x: jax.Array, y: jax.Array | None, norm: jax.Array) -> dict[str, Any]:
    """Inputs of a kernel, by name. Outside kernels."""
    shape = x.size // LINE, LINE
    parts = None if y is None else y.reshape(-1, *shape)
    return {"x": x.reshape(shape), "y": parts, "w": norm.astype(jnp.float32).reshape(shape)}


def total(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum of arrays of any floating dtypes, float32."""
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])


def make(
    gmem: Any,
    wg: Any,
    warpgroups: int,
    ask: Callable[[Any], Any],
    begin: Callable[[], None],
    keep: Callable[[Any, Any, jax.Array, jax.Array, Any], None],
) -> None:
    """Makes the stream, by all warpgroups of a CTA; the first CTA writes s.

    Args:
      wg: number of this warpgroup.
      ask: ask(own) asks for what else belongs to some lines.
      begin: starts copies; called when what the first lines are made of has been asked for: it would come after them.
      keep: keep(part, own, s, w, asked) writes the lines of a part to shared memory.
    """

    def part(n: Any, then: Callable[[], None] = lambda: None) -> None:
        own = pl.ds(n * WARPS, WARPS)
        refs = [gmem.w.at[own], gmem.x.at[own]]
        refs += [] if gmem.y is None else [gmem.y.at[i, own] for i in range(gmem.y.shape[0])]
        w, *parts = [r.load_whole(ref) for ref in refs]
        asked = ask(own)
        then()
        s = total(parts)
        keep(n, own, s, w, asked)
        if gmem.s is not None:
            pl.when(grid_index() == 0)(lambda: store_any(gmem.s.at[own], s.astype(gmem.s.dtype)))

    parts = gmem.x.shape[0] // WARPS
    makers = min(parts, warpgroups)
    pl.when(wg < makers)(lambda: part(wg, begin))
    pl.when(wg >= makers)(begin)
    for later in range(warpgroups, parts, warpgroups):
        pl.when(wg < parts - later)(lambda later=later: part(wg + later))


def scale(squares: Any, D: int, eps: float) -> jax.Array:
    """The factor of the norm, from the sums of squares of all lines in shared memory."""
    return lax.rsqrt(functools.reduce(jnp.add, [squares[n] for n in range(D // LINE)]) / D + eps)
