"""The sum of the residual stream with its RMSNorm, and its derivative, whose results are 8-bit operands of products.

    s = x + y,   r = (mean(s^2) + eps)^(-1/2),   n = s r                         the mean along a row
    dx = dy = ds + r (dn - n mean(dn n))

n, and dy, are made in 8 bits beside, or instead of, 16: rounded to 16 bits, then as in `eight_bits`, by rows and by
columns, the codes of both kernels one after the other. That saves what `eight_bits` reads, and for dy also what is
written for it. The norm has no weight: it is in the projections that read n.

Inputs (GMEM): x [N, D] float32, bfloat16 or float16; y [N, D] of any of these, or none. The derivative reads n and dn
[N, D] bfloat16 or float16, r [N] float32, ds [N, D] of x's dtype, or none, and scale [1] float32, with
what `eight_bits.left` makes of it.
Outputs (GMEM): s [N, D] of x's dtype where there is y; n [N, D]; r [N]; dx [N, D]; n or dy in 8 bits [N, D], [D, N];
of dy how many numbers each CTA saturated, int32. The scale of n has room for every number.
Grid: as many CTAs of one warpgroup as run at once, each of which walks over blocks of `TOKENS` rows. The codes of a
block wait in shared memory, 1 byte a number, until all of its rows are there; then a thread writes 16 bytes of a
column. Shared memory: `TOKENS` (D + 16) bytes; with rows of D bytes four threads would meet in each bank.
Numerics: those of `norm` and `eight_bits`. Hardware: `NEEDS`. Limits: `check_supported`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.device.eight_bits import BELOW
from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch
from pallas_kernels.device.memory import Buffer, store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer import norm
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.eight_bits import TOKENS, left, of_threads, total

NEEDS = Needs.TMA

CTAS_PER_SM = 2
"""CTAs for each multiprocessor: as many as their registers allow."""

COLUMNS = 128
"""Columns that a warpgroup writes at once."""

SKEW = 16
"""Bytes between the rows of codes in shared memory."""

NARROW = (jnp.bfloat16, jnp.float16)


def check_supported(x: Shaped, dtype: DTypeLike) -> str | None:
    """Why the kernels cannot take a stream [.., D] whose norm has a dtype; None if they can."""
    if jnp.dtype(dtype) not in NARROW:
        return f"the norm is {jnp.dtype(dtype).name}; the kernel makes bfloat16 and float16"
    D = x.shape[-1]
    if D % COLUMNS or D > r.WARP_WIDTH:
        return f"rows of {D}; the kernel takes multiples of {COLUMNS} up to {r.WARP_WIDTH}"
    if not x.size or x.size // D % TOKENS:
        return f"{x.size // D} rows; the kernel takes a multiple of {TOKENS}"
    return norm.check_supported(x)


def _blocks(N: int) -> tuple[int, int]:
    """Blocks of rows, and CTAs, which have the same number of blocks."""
    blocks = N // TOKENS
    each = -(-blocks // r.num_ctas(blocks, CTAS_PER_SM))
    return blocks, -(-blocks // each)


def _write(
    gmem: Any,
    smem: Any,
    dev: Device,
    scale: Any,
    read: Callable[[Any, int], tuple[jax.Array, ...]],
    make: Callable[..., jax.Array],
) -> None:
    """Makes gmem.x8 and gmem.x8_t, and gmem.saturated where it is asked for.

    Args:
      scale: of the codes.
      read: loads some rows, from the number of the first and how many; the next ones while some are worked on.
      make: from the number of the first row and what was read to these rows, of 16 bits.
    """
    (N, D), dtype = gmem.x8.shape, gmem.x8.dtype
    rows, (blocks, ctas) = r.rows_at_once(D, N), _blocks(N)
    groups = TOKENS // rows

    def block(i, carry):
        first = i * TOKENS
        after = jnp.minimum(i + ctas, blocks - 1) * TOKENS

        def some(n, carry):
            (found, count), inside = carry, n * rows
            following = read(jnp.where(n + 1 < groups, first + inside + rows, after), rows)
            x = make(first + inside, *found)
            # The conversion would make the largest number of an infinite one.
            if count is not None:
                count = dev.count_beyond(count, left, x, r.layout(D, rows))
            x = x.astype(jnp.float32)
            wide = jnp.where(jnp.abs(x) < jnp.inf, x * scale, jnp.nan)
            codes = dev.to_eight_bits(wide, dtype)
            store_any(gmem.x8.at[pl.ds(first + inside, rows)], codes)
            store_any(smem.codes.at[pl.ds(inside, rows), pl.ds(0, D)], codes)
            return following, count

        def columns(n, carry):
            column = n * COLUMNS
            x = plgpu.load(smem.codes.at[:, pl.ds(column, COLUMNS)], layout=BELOW, optimized=False)
            store_any(gmem.x8_t.at[pl.ds(column, COLUMNS), pl.ds(first, TOKENS)], dev.columns_together(x))
            return carry

        plgpu.commit_smem()  # all have read the block before
        following = lax.fori_loop(0, groups, some, carry)
        plgpu.commit_smem()
        lax.fori_loop(0, D // COLUMNS, columns, None)
        return following

    counts = gmem.saturated is not None
    left = of_threads(gmem.left[0]) if counts else None
    start = read(grid_index() * TOKENS, rows), of_threads(0) if counts else None
    _, count = r.walk(block, blocks, ctas, start)
    if count is not None:
        gmem.saturated[grid_index()] = jnp.sum(count)


def _forward(gmem: Any, smem: Any, *, eps: float, scale: float, interpreted: bool) -> None:
    D = gmem.x.shape[1]
    inputs = [x for x in (gmem.x, gmem.y) if x is not None]

    def read(first, rows):
        return tuple(r.load_whole(x.at[pl.ds(first, rows)]) for x in inputs)

    def make(first, x, y=None):
        rows, s = x.shape[0], x.astype(jnp.float32)
        if y is not None:
            s = s + y.astype(jnp.float32)
            r.store(gmem.s, first, s)
        factor = lax.rsqrt(r.row_sum(s * s) / D + eps)
        store_any(gmem.r.at[pl.ds(first, rows)], factor)
        n = (s * r.spread(factor, D)).astype(gmem.n.dtype)
        store_any(gmem.n.at[pl.ds(first, rows)], n)
        return n

    _write(gmem, smem, Device(interpreted), scale, read, make)


def _backward(gmem: Any, smem: Any, *, interpreted: bool) -> None:
    D, dev = gmem.n.shape[1], Device(interpreted)
    inputs = [x for x in (gmem.dn, gmem.n, gmem.ds) if x is not None]

    def read(first, rows):
        whole = (r.load_whole(x.at[pl.ds(first, rows)]) for x in inputs)
        return r.load_rows(gmem.r, first, D, rows), *whole

    def make(first, factor, dn, n, ds=None):
        narrow, layout = (dn, n), r.layout(D, dn.shape[0])
        dn, n = (x.astype(jnp.float32) for x in narrow)
        mean = r.spread(r.row_sum(dn * n) / D, D)
        # Widened a second time: in 16 bits both wait for the sum in half the registers.
        dn, n = (dev.unknown(x, layout).astype(jnp.float32) for x in narrow)
        dx = r.spread(factor, D) * (dn - n * mean)
        dx = dx if ds is None else dx + ds.astype(jnp.float32)
        r.store(gmem.dx, first, dx)
        return dx.astype(gmem.n.dtype)

    _write(gmem, smem, dev, gmem.scale[0], read, make)


def _launch(name: str, body: Callable[..., None], inputs: dict, outputs: dict, codes: Any, interpret: Any):
    (N, D), dtype = codes[0], jnp.dtype(codes[1])
    return launch(
        name,
        functools.partial(body, interpreted=interpret is not None),
        inputs=inputs,
        outputs=outputs
        | {"x8": jax.ShapeDtypeStruct((N, D), dtype), "x8_t": jax.ShapeDtypeStruct((D, N), dtype)},
        memory={"codes": Buffer((TOKENS, D + SKEW), dtype)},
        ctas=_blocks(N)[1],
        interpret=interpret,
    )


@kernel("eps", "dtype", "scale", "codes")
def add_norm_eight_bits(
    x: Float[Array, "N D"],
    y: Float[Array, "N D"] | None,
    *,
    eps: float,
    dtype: Any,
    scale: float,
    codes: DTypeLike,
    interpret: Any = None,
) -> tuple[Array, Array, Array, tuple[Array, Array]]:
    """The stream x + y in x's dtype (x itself without y), its RMSNorm in `dtype` and in 8 bits.

    Args:
      x: stream that `check_supported` accepts.
      y: what is added to it.
      eps: added to the mean square.
      dtype: of the norm's result.
      scale: factor of the codes.
      codes: their dtype, float8_e4m3fn or float8_e5m2.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      s, n, the factors r of the rows, and the codes by rows and by columns.
    """
    found = _launch(
        "add_norm_eight_bits",
        functools.partial(_forward, eps=eps, scale=scale),
        {"x": x, "y": y},
        {
            "saturated": None,
            "s": None if y is None else jax.ShapeDtypeStruct(x.shape, x.dtype),
            "n": jax.ShapeDtypeStruct(x.shape, dtype),
            "r": jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
        },
        (x.shape, codes),
        interpret,
    )
    return found.get("s", x), found["n"], found["r"], (found["x8"], found["x8_t"])


@kernel("x_dtype", "codes")
def add_norm_eight_bits_backward(
    n: Float[Array, "N D"],
    factors: Float[Array, " N"],
    ds: Float[Array, "N D"] | None,
    dn: Float[Array, "N D"],
    scale: Float[Array, ""],
    *,
    x_dtype: Any,
    codes: DTypeLike,
    interpret: Any = None,
) -> tuple[Float[Array, "N D"], tuple[Float[Array, "N D"], Float[Array, "D N"], Float[Array, ""]]]:
    """Derivative of `add_norm_eight_bits`: dx in the stream's dtype, and in 8 bits by rows and by columns, with how
    many numbers are saturated.

    Args:
      n, factors: results of `add_norm_eight_bits`.
      ds, dn: cotangents of s and n; ds None for zeros.
      scale: factor of the codes, float32.
      x_dtype: dtype of the stream.
      codes: dtype of the codes.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    scaling = {"scale": scale.astype(jnp.float32).reshape(1), "left": left(scale, codes, n.dtype)}
    found = _launch(
        "add_norm_eight_bits_backward",
        _backward,
        {"n": n, "r": factors, "ds": ds, "dn": dn} | scaling,
        {
            "dx": jax.ShapeDtypeStruct(n.shape, x_dtype),
            "saturated": jax.ShapeDtypeStruct((_blocks(len(n))[1],), jnp.int32),
        },
        (n.shape, codes),
        interpret,
    )
    return found["dx"], (found["x8"], found["x8_t"], total(found["saturated"]))
