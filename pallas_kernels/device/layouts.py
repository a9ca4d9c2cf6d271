"""Units of the kernels, and arrays in registers: their layouts and how vectors become matrices.

Every kernel here uses Lane semantics: layouts and transforms are explicit. A warpgroup (128 threads, 4 warps)
is one Pallas thread. In the WGMMA layout of an [M, N] array warp w of the warpgroup holds rows 16 w to
16 w + 15 of every 64; ROW and COL are its one-dimensional reductions, a vector along the rows or the columns.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64
"""Tokens of a chunk: the M of a wgmma, and what the inverse is written for."""

GRANULE = 64
"""K and V are padded with zeros to a multiple of this: the columns of a swizzled tile, and the rows of a wgmma."""

LOG2_E = 1.4426950408889634
"""Gates inside the kernels are base-2 exponents: g2 = g LOG2_E."""

RESET_G2 = -150.0
"""Floor of a log2 decay. 2^-150 is 0 in float32, so the floor changes no result, and a reset (g = -inf) is
an ordinary number: sums and differences of gates stay finite."""

L2NORM_EPS = 1e-6
"""Term under the root of the L2 norm of q and k, as in gdn_jax.gates."""

WGMMA = plgpu.Layout.WGMMA
WGMMA_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)


def along_rows(x: jax.Array, columns: int) -> jax.Array:
    """[M] in layout ROW repeated over the columns: [M, columns]."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def along_columns(x: jax.Array, rows: int) -> jax.Array:
    """[N] in layout COL repeated over the rows: [rows, N]."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def iota(shape: tuple[int, int], dimension: int) -> jax.Array:
    """Row (0) or column (1) numbers in the WGMMA layout."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=WGMMA)


def zeros(shape: tuple[int, ...], dtype, layout=WGMMA) -> jax.Array:
    """Zeros in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, dtype), layout)


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple
