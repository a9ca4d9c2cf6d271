"""The gradient of an embedding: the sum of the cotangents of every token that has an id, in the order of the tokens.

    dE[v] = sum over t with id_t = v of dx[t]

Left to XLA in an order that repeats, the sum is made by sorting every number of dx.

Inputs (GMEM): dx [N, D] of any floating dtype; order [N] int32, the tokens sorted by id; starts [V + 1] int32, where
the tokens of each id begin in it.
Output (GMEM): dE [V, D] float32.
Grid: a CTA of one warpgroup for each id and `columns` columns. It reads `AHEAD` rows at once. No shared memory.
Numerics: float32. Hardware: `NEEDS`. Limits: `check_supported`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.launch import Shaped, grid_index, launch
from pallas_kernels.device.needs import Needs

NEEDS = Needs.NOTHING

AHEAD = 8
"""Rows that are read before the first is added."""

COLUMNS = (1024, 512, 256, 128)
"""Columns of a CTA: the most that divide D."""


def check_supported(dx: Shaped) -> str | None:
    """Why the kernel cannot take cotangents [N, D]; None if it can."""
    if dx.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the stream is {jnp.dtype(dx.dtype).name}; the kernel takes float32, bfloat16 and float16"
    if not dx.size or dx.shape[-1] % COLUMNS[-1]:
        return f"rows of {dx.shape[-1]}; the kernel takes multiples of {COLUMNS[-1]}"
    return None


def _columns(D: int) -> int:
    return next(n for n in COLUMNS if D % n == 0)


def _body(gmem: Any, smem: Any) -> None:
    N, D = gmem.dx.shape
    columns = _columns(D)
    parts = D // columns
    index = grid_index()
    v, part = lax.div(index, parts), pl.ds(lax.rem(index, parts) * columns, columns)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=min(4, columns // 128))
    begin, end = gmem.starts[v], gmem.starts[v + 1]

    def few(i, total):
        first = begin + i * AHEAD
        rows = []
        for j in range(AHEAD):
            token = gmem.order[jnp.minimum(first + j, N - 1)]
            row = plgpu.load(gmem.dx.at[token, part], layout=layout, optimized=False)
            rows.append(jnp.where(first + j < end, row.astype(jnp.float32), 0.0))
        for row in rows:
            total = total + row
        return total

    zero = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
    gmem.out.at[v, part][...] = lax.fori_loop(0, lax.div(end - begin + AHEAD - 1, AHEAD), few, zero)


def embedding_gradient(
    dx: Float[Array, "N D"],
    order: Int[Array, " N"],
    starts: Int[Array, " V1"],
    *,
    interpret: Any = None,
) -> Float[Array, "V D"]:
    """Sums of the rows of dx by id, float32.

    Args:
      dx: cotangents that `check_supported` accepts.
      order: tokens sorted by id.
      starts: position in `order` of the first token of each id, and where those of the last one end.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    V, D = starts.shape[0] - 1, dx.shape[1]
    return launch(
        "embedding_gradient",
        _body,
        inputs={"dx": dx, "order": order, "starts": starts},
        outputs={"out": jax.ShapeDtypeStruct((V, D), jnp.float32)},
        ctas=V * (D // _columns(D)),
        interpret=interpret,
    )["out"]
