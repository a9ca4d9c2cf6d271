"""The sum of the residual stream of a few rows with what products left in parts, and its norm.

    s = x + sum_p y_p,   n = s (mean(s^2) + eps)^(-1/2) w

A product of few rows and a narrow result is made in parts of its sum, or most multiprocessors have nothing to do. A
kernel of its own that adds them up would take as long as this one.

Inputs (GMEM): x [B, D], y [P, B, D], w [D] float32. Outputs (GMEM): s [B, D] of x's dtype, n [B, D] in the dtype
asked for. Grid: a CTA for each row, whose warpgroups make four lines of it at a time. Shared memory: the row.

    barrier     arrivals            who waits
    made        all warpgroups      all, for the squares

Numerics: float32, rounded once. The same bits in every call. Hardware: `NEEDS`. Limits: `check_supported`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.device import generations
from pallas_kernels.device.lanes import WARPS
from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch, warpgroup_index
from pallas_kernels.device.memory import Barriers, Buffer, store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import rows as r
from pallas_kernels.rows.stream import DTYPES, LINE, PART, scale, total

NEEDS = Needs.NOTHING

MOST_PARTS = 8
MOST_ROWS = 128
WARPGROUPS = 4
REDUCTION_BYTES = 16


def check_supported(x: Shaped, parts: int) -> str | None:
    """Why the kernel cannot take a stream [.., D] and this number of parts; None if it can."""
    D = x.shape[-1]
    if x.dtype not in DTYPES or D % PART or not 0 < D <= r.WIDEST:
        of = f"multiples of {PART} up to {r.WIDEST}"
        return f"rows of {D} {x.dtype}; the kernel takes float32, bfloat16 and float16, and {of}"
    if not 0 < x.size // D <= MOST_ROWS or not 0 < parts <= MOST_PARTS:
        return f"{x.size // D} rows in {parts} parts; the kernel takes {MOST_ROWS} in {MOST_PARTS} at most"
    return None


def _body(gmem: Any, smem: Any, *, eps: float, warpgroups: int) -> None:
    row, wg, (lines, _) = grid_index(), warpgroup_index(), gmem.w.shape
    groups = range(0, lines // WARPS, warpgroups)

    def each(part: Callable[[Any], None]) -> None:
        """Calls part(place) for the lines that this warpgroup makes, four at a time."""
        for first in groups:
            own = pl.ds((wg + first) * WARPS, WARPS)
            pl.when(wg + first < lines // WARPS)(functools.partial(part, own))

    def add(own: Any) -> None:
        refs = [gmem.x.at[row, own], *(gmem.y.at[n, row, own] for n in range(gmem.y.shape[0]))]
        w, *parts = [r.load_whole(ref) for ref in (gmem.w.at[own], *refs)]
        s = total(parts)
        store_any(smem.v.at[own], s * w)
        store_any(smem.squares.at[own], r.row_sum(s * s))
        store_any(gmem.s.at[row, own], s.astype(gmem.s.dtype))

    def scaled(own: Any) -> None:
        store_any(gmem.n.at[row, own], (r.load_whole(smem.v.at[own]) * factor).astype(gmem.n.dtype))

    each(add)
    generations.meet(smem.made)
    factor = scale(smem.squares, lines * LINE, eps)
    each(scaled)


@kernel("eps", "dtype")
def parts_norm(
    x: Float[Array, "B D"],
    y: Float[Array, "P B D"],
    norm: Float[Array, " D"],
    *,
    eps: float,
    dtype: Any,
    interpret: Any = None,
) -> tuple[Float[Array, "B D"], Float[Array, "B D"]]:
    """The stream x + y, and its norm.

    Args:
      x: stream that `check_supported` accepts.
      y: what is added to it, in parts.
      norm: weight of the norm.
      eps: of the norm.
      dtype: of the norm.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    (B, D), like = x.shape, jax.ShapeDtypeStruct
    lines = D // LINE, LINE
    warpgroups = min(WARPGROUPS, lines[0] // WARPS)
    made = launch(
        "parts_norm",
        functools.partial(_body, eps=eps, warpgroups=warpgroups),
        inputs={
            "x": x.reshape(B, *lines),
            "y": y.reshape(-1, B, *lines),
            "w": norm.astype(jnp.float32).reshape(lines),
        },
        outputs={"s": like((B, *lines), x.dtype), "n": like((B, *lines), dtype)},
        memory={
            "v": Buffer(lines),
            "squares": Buffer((lines[0],)),
            "made": Barriers(arrivals=warpgroups),
        },
        reduction_bytes=REDUCTION_BYTES,
        ctas=B,
        warpgroups=warpgroups,
        interpret=interpret,
    )
    return made["s"].reshape(B, D), made["n"].reshape(B, D)
