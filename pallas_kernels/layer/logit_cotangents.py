"""The cotangents of logits, from their exponentials by tiles of words as `layer.cross_entropy` makes them.

    dl[t, v] = b[t] where v is the target of t, else f[c, t] u[t, v] for the tile c of `COLUMNS` words in which v is

A kernel, so that XLA does not make these numbers again inside each of the two products that read them.

Inputs (GMEM): u [T, V] bfloat16; f [tiles, T] float32; targets [T] int32; b [T] float32. Output (GMEM): dl like u.
Grid: `CTAS_PER_SM` CTAs of one warpgroup to a multiprocessor, each of which takes one block after another, rows of
`HEIGHTS` and words of `WIDTHS`. No shared memory. Numerics: float32, rounded once. Hardware: `NEEDS`.
Limits: `check_supported`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.launch import Shaped, kernel, launch
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.tiles import COLUMNS

NEEDS = Needs.NOTHING

HEIGHTS = (16, 8)
"""Rows of a block: the most that divide T."""

WIDTHS = (COLUMNS, COLUMNS // 2)
"""Words of a block, all of one tile: the most that divide V."""

CTAS_PER_SM = 6


def check_supported(u: Shaped) -> str | None:
    """Why the kernel cannot take exponentials [T, V]; None if it can."""
    if u.dtype != jnp.bfloat16:
        return f"x is {jnp.dtype(u.dtype).name}; the kernel takes bfloat16"
    T, V = u.shape
    if not T * V or T % HEIGHTS[-1] or V % WIDTHS[-1]:
        return f"{T} rows of {V} words; the kernel takes multiples of {HEIGHTS[-1]} and of {WIDTHS[-1]}"
    return None


def _block(T: int, V: int) -> tuple[int, int]:
    return next(n for n in HEIGHTS if T % n == 0), next(n for n in WIDTHS if V % n == 0)


def _body(gmem: Any, smem: Any) -> None:
    T, V = gmem.u.shape
    height, width = _block(T, V)
    layout, down = r.layout(width, height), T // height

    def block(n, carry):
        first, column = lax.rem(n, down) * height, lax.div(n, down) * width
        part = pl.ds(first, height), pl.ds(column, width)
        u = r.load_whole(gmem.u.at[part]).astype(jnp.float32)

        def along(ref):
            """Numbers of the rows."""
            return r.spread(r.load_rows(ref, first, width, height), width)

        word = plgpu.broadcasted_iota(jnp.int32, (height, width), 1, layout=layout) + column
        scaled = u * along(gmem.f.at[lax.div(column, COLUMNS)])
        dl = jnp.where(word == along(gmem.targets), along(gmem.b), scaled)
        r.store(gmem.dl.at[:, pl.ds(column, width)], first, dl)
        return carry

    blocks = down * (V // width)
    r.walk(block, blocks, r.num_ctas(blocks, CTAS_PER_SM))


@kernel()
def logit_cotangents(
    u: Float[Array, "T V"],
    f: Float[Array, "tiles T"],
    targets: Int[Array, " T"],
    b: Float[Array, " T"],
    *,
    interpret: Any = None,
) -> Float[Array, "T V"]:
    """dl of the module's docstring, for exponentials that `check_supported` accepts."""
    (T, V), inputs = u.shape, {"u": u, "f": f, "targets": targets.astype(jnp.int32), "b": b}
    ctas = r.num_ctas(u.size // math.prod(_block(T, V)), CTAS_PER_SM)
    outputs = {"dl": jax.ShapeDtypeStruct(u.shape, u.dtype)}
    options = dict(inputs=inputs, outputs=outputs, ctas=ctas, auto_barriers=True, interpret=interpret)
    return launch("logit_cotangents", _body, **options)["dl"]
