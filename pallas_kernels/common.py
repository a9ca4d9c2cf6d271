"""What the kernels share: units, register layouts, shared-memory tiles, and their launch.

Every kernel here uses Lane semantics: layouts and transforms are explicit. A warpgroup (128 threads, 4 warps)
is one Pallas thread. In the WGMMA layout of an [M, N] array warp w of the warpgroup holds rows 16 w to
16 w + 15 of every 64; ROW and COL are its one-dimensional reductions, a vector along the rows or the columns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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

FLOAT16_LOG2 = 4
"""In float16 the gated inverse T is stored times 2^4, so that a write strength of 2^-20 keeps its digits."""

L2NORM_EPS = 1e-6
"""Of the L2 norm of q and k, as in gdn_jax.gates."""

SMEM_LIMIT = 232_448
"""Bytes of shared memory one CTA may have on compute capability 9.0."""

NUM_SMS = 132
"""Streaming multiprocessors of an H100 SXM or H200. Only speed depends on it."""

WGMMA = plgpu.Layout.WGMMA
WGMMA_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)

COMPILER_PARAMS = dict(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True)


def tiling(swizzle: int, itemsize: int = 2) -> tuple:
    """Transforms of a shared-memory operand of wgmma whose rows are swizzled over `swizzle` bytes."""
    return (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))


def transposed(ref):
    """A transposed view of a two-dimensional reference: a wgmma operand, or ldmatrix/stmatrix with .trans."""
    return ref.transpose((1, 0))


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


def store_any(ref, x: jax.Array) -> None:
    """ref[...] = x by plain stores, where no conflict-free pattern exists (jax from 0.12 on wants that said)."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def inverse_log2(dtype) -> int:
    """The gated inverse T of tril_inverse is stored times two to the power of this."""
    return FLOAT16_LOG2 if dtype == jnp.float16 else 0


def launch(body, *arrays: jax.Array | np.ndarray | None, **options) -> Any:
    """plgpu.kernel(body, **options) on those of the arrays that are given.

    Traced with 32-bit constants also where jax_enable_x64 is set. Inside jax.shard_map the outputs vary over the mesh
    axes that any of the arrays varies over; Pallas forgets these.
    """
    given = [x for x in arrays if x is not None]
    outputs = plgpu.kernel(functools.partial(_with_32_bits, body), **options)(*given)
    varying: frozenset = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in given))
    return lax.pcast(outputs, tuple(varying), to="varying")


def _with_32_bits(body, *refs) -> None:
    """A kernel's body with integer constants of int32, also where jax_enable_x64 is set."""
    with jax.enable_x64(False):
        body(*refs)


def load_state(ref, rows, kv_layout: bool) -> jax.Array:
    """Rows of a float32 state [V, K] in memory, or of one that lies there as [K, V].

    Times 1, which compiles to nothing: what is loaded from an argument keeps in its type, inside jax.shard_map, the
    mesh axes that it varies over, and what is computed in a kernel does not. A loop's carry must stay of one type.
    """
    if kv_layout:
        source = transposed(ref.at[:, rows])
        s = plgpu.layout_cast(plgpu.load(source, layout=WGMMA_TRANSPOSED, optimized=False), WGMMA)
    else:
        s = plgpu.load(ref.at[rows], layout=WGMMA, optimized=False)
    return s * 1.0


def take(refs: list, used: bool = True) -> Any:
    """The next reference of a kernel's arguments, None where the kernel was built without it."""
    return refs.pop(0) if used else None


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def grid_index(name: str = "cta") -> jax.Array:
    """Index of this CTA in a one-dimensional grid, int32."""
    return lax.axis_index(name).astype(jnp.int32)
