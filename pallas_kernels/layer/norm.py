"""The sum of the residual stream and RMSNorm, and its derivative, each in one pass over its arrays.

    s = x + y,   r = (mean(s^2) + eps)^(-1/2),   n = s r w                       the mean along a row
    dx = dy = ds + r (w dn - s r mean(w dn s r)),   dw = sum over rows of dn s r

Left to XLA, the derivative is two fusions, each of which reads s and dn. Without w, n is all that the derivative
needs beside r: a product that reads n keeps it anyway, and so s need not be written a second time for it.

Inputs (GMEM): x [N, D] float32, bfloat16 or float16; y [N, D] of any of these, or none; w [D] float32, or none;
dn [N, D]; ds [N, D] of x's dtype, or none. The derivative reads s in any of these dtypes, without w n and r instead.
Outputs (GMEM): s, dx [N, D] of x's dtype; s once more, narrower, or without w r [N] float32, if asked for; n, dy
[N, D]; the sums of dw that each CTA made, [CTAs, rows, D] float32, which are added in a fixed order, so that results
repeat bit for bit.
Grid: as many CTAs of one warpgroup as run at once, each of which walks over blocks of rows. No shared memory but that
of sums across warps. Numerics: float32 inside; n is made of s before it is rounded. Hardware: `NEEDS`.
Limits: `check_supported`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import rows as r

NEEDS = Needs.NOTHING

CTAS_PER_SM = 4
"""CTAs for each multiprocessor: as many as their registers allow."""

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_supported(x: Shaped) -> str | None:
    """Why the kernels cannot take a stream [.., D]; None if they can."""
    width = x.shape[-1]
    if x.dtype not in DTYPES:
        return f"x is {jnp.dtype(x.dtype).name}; the kernel takes float32, bfloat16 and float16"
    if not x.size:
        return "0 rows; the kernel takes some"
    return r.check_supported(width, x.size // width)


def _blocks(N: int, D: int) -> tuple[int, int]:
    """Blocks of rows, and CTAs."""
    blocks = N // r.rows_at_once(D, N)
    return blocks, r.num_ctas(blocks, CTAS_PER_SM)


def _forward(gmem: Any, smem: Any, *, eps: float) -> None:
    N, D = gmem.x.shape
    rows = r.rows_at_once(D, N)
    w = None if gmem.w is None else r.load_along(gmem.w, rows)

    def block(i, carry):
        first = i * rows
        s = r.load(gmem.x, first, D, rows)
        if gmem.y is not None:
            s = s + r.load(gmem.y, first, D, rows)
            r.store(gmem.s, first, s)
        if gmem.kept is not None:
            r.store(gmem.kept, first, s)
        scale = lax.rsqrt(r.row_sum(s * s) / D + eps)
        if gmem.r is not None:
            store_any(gmem.r.at[pl.ds(first, rows)], scale)
        unit = s * r.spread(scale, D)
        r.store(gmem.n, first, unit if w is None else unit * w)
        return carry

    r.walk(block, *_blocks(N, D))


def _backward(gmem: Any, smem: Any, *, eps: float) -> None:
    N, D = gmem.dn.shape
    rows = r.rows_at_once(D, N)
    w = None if gmem.w is None else r.load_along(gmem.w, rows)

    def block(i, dw):
        first = i * rows
        dn = r.load(gmem.dn, first, D, rows)
        ds = None if gmem.ds is None else r.load(gmem.ds, first, D, rows)
        if gmem.r is None:
            s = r.load(gmem.s, first, D, rows)
            scale = r.spread(lax.rsqrt(r.row_sum(s * s) / D + eps), D)
            unit = s * scale
        else:
            unit, scale = r.load(gmem.n, first, D, rows), r.spread(r.load_rows(gmem.r, first, D, rows), D)
        through = dn if w is None else dn * w
        dx = scale * (through - unit * r.spread(r.row_sum(through * unit) / D, D))
        dx = dx if ds is None else dx + ds
        r.store(gmem.dx, first, dx)
        if gmem.dy is not None:
            r.store(gmem.dy, first, dx)
        return dw if w is None else dw + dn * unit

    if w is None:
        r.walk(block, *_blocks(N, D))
    else:
        dw = r.walk(block, *_blocks(N, D), r.zeros(D, rows))
        r.store(gmem.dw.at[grid_index()], 0, dw)


@kernel("eps", "dtype", "keep")
def add_norm(
    x: Float[Array, "N D"],
    y: Float[Array, "N D"] | None,
    weight: Float[Array, " D"] | None,
    *,
    eps: float,
    dtype: Any,
    keep: bool = False,
    interpret: Any = None,
) -> tuple[Float[Array, "N D"] | Float[Array, " N"], ...]:
    """The stream x + y in x's dtype (x itself without y), and its RMSNorm in `dtype`.

    Args:
      x: stream that `check_supported` accepts.
      y: what is added to it.
      weight: of the norm; None: ones.
      eps: added to the mean square.
      dtype: of the norm's result.
      keep: a third result is what the derivative needs: the stream in the narrower dtype of the two, or without a
        weight, where it needs the norm's result too, the factors of the rows [N] in float32.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    N, D = x.shape
    unit = keep and weight is None
    narrows = keep and not unit and jnp.dtype(dtype).itemsize < x.dtype.itemsize
    results = launch(
        "add_norm",
        functools.partial(_forward, eps=eps),
        inputs={"x": x, "y": y, "w": None if weight is None else weight.astype(jnp.float32)},
        outputs={
            "s": None if y is None else jax.ShapeDtypeStruct(x.shape, x.dtype),
            "r": jax.ShapeDtypeStruct((N,), jnp.float32) if unit else None,
            "kept": jax.ShapeDtypeStruct(x.shape, dtype) if narrows else None,
            "n": jax.ShapeDtypeStruct(x.shape, dtype),
        },
        ctas=_blocks(N, D)[1],
        interpret=interpret,
    )
    s, n = results.get("s", x), results["n"]
    return (s, n, results["r"] if unit else results.get("kept", s)) if keep else (s, n)


@kernel("eps", "x_dtype", "y_dtype")
def add_norm_backward(
    s: Float[Array, "N D"],
    weight: Float[Array, " D"] | None,
    ds: Float[Array, "N D"] | None,
    dn: Float[Array, "N D"],
    *,
    eps: float,
    x_dtype: Any,
    y_dtype: Any = None,
    factors: Float[Array, " N"] | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "N D"], Float[Array, "N D"] | None, Float[Array, " D"] | None]:
    """Derivative of `add_norm`.

    Args:
      s: the stream that it returned or kept; without a weight the result of the norm.
      ds, dn: cotangents of its results; ds None for zeros.
      x_dtype: dtype of the stream.
      y_dtype: dtype of y; None where there was none.
      factors: without a weight, of the rows, as `add_norm` kept them.

    Returns:
      dx in the stream's dtype, the same in y_dtype, and dweight in float32, None without a weight.
    """
    N, D = s.shape
    ctas, separate = _blocks(N, D)[1], y_dtype is not None and y_dtype != x_dtype
    sums = jax.ShapeDtypeStruct((ctas, r.rows_at_once(D, N), D), jnp.float32)
    results = launch(
        "add_norm_backward",
        functools.partial(_backward, eps=eps),
        inputs={
            "s": s if factors is None else None,
            "n": None if factors is None else s,
            "r": factors,
            "ds": ds,
            "dn": dn,
            "w": None if weight is None else weight.astype(jnp.float32),
        },
        outputs={
            "dx": jax.ShapeDtypeStruct(s.shape, x_dtype),
            "dy": jax.ShapeDtypeStruct(s.shape, y_dtype) if separate else None,
            "dw": sums if weight is not None else None,
        },
        ctas=ctas,
        interpret=interpret,
    )
    dx = results["dx"]
    dy = None if y_dtype is None else results.get("dy", dx)
    return dx, dy, None if weight is None else jnp.sum(results["dw"], axis=(0, 1))
