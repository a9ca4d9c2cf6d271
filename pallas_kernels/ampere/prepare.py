"""Everything of a chunk that does not depend on the state: the gated inverse, and what outputs read of a chunk.

    T = (I + L)^-1 * Gamma,   L = strictly lower part of K K^T diag(beta)
    P = scale ((Q K^T) * Gamma) diag(beta)

with Gamma[i, j] = 2^(G_i - G_j) for i >= j, 0 above, G = g2_cum: T of `chunks.inverse` and P of `forward.outputs`.
The inverse is that of `chunks.merging`, whose two last products are mma.sync here.

Inputs (GMEM): q [rows, Hq K], k [rows, Hk K], g2_cum and beta [chunks HO, C] float32, `spans`.
Outputs (GMEM): t = T and p = P [chunks HO C, C] in k's dtype.
Grid: one CTA of one warpgroup for each (chunk, key head); it walks over the output heads that read the key head.
Shared memory: `_memory`, 43 KB at K = 128.
Hardware: compute capability 8.0 and later. Limits: K 64 or 128; |k|^2 beta at most about 2, for the inverse.
Source: `chunks.inverse`; Yang et al. 2024 (Gated DeltaNet), eq. 8 to 10.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.ampere.spans import Spans, clear, first_row_of, inputs, is_partial
from pallas_kernels.chunks.inverse import parts_of_keys
from pallas_kernels.chunks.merging import BLOCK, HALF, invert
from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.layouts import CHUNK, COL, ROW, along_columns, along_rows
from pallas_kernels.device.memory import Buffer, Memory
from pallas_kernels.device.mma import SWIZZLE, MmaDevice


def _memory(K: int, dtype) -> Memory:
    """Shared memory of a CTA."""
    return {
        "q": Buffer((CHUNK, K), dtype, swizzle=SWIZZLE),
        "k": Buffer((CHUNK, K), dtype, swizzle=SWIZZLE),
        "l": Buffer((CHUNK, HALF), jnp.float16, swizzle=64),
        "x": Buffer((CHUNK, HALF), jnp.float16, swizzle=64),
        "x_t": Buffer((CHUNK + BLOCK, BLOCK), jnp.float16, swizzle=32),
    }


class _Sizes(NamedTuple):
    """Static sizes of one kernel."""

    Hq: int
    Hk: int
    HO: int
    K: int
    scale: float


def _body(gmem: Any, smem: Any, *, sizes: _Sizes, interpreted: bool) -> None:
    dev, (Hq, Hk, HO, K, scale) = MmaDevice(interpreted), sizes
    group, chunk, key_head = HO // Hk, lax.div(grid_index(), sizes.Hk), lax.rem(grid_index(), sizes.Hk)
    first_head, row = key_head * group, first_row_of(gmem, chunk)
    one_query = HO // Hq % group == 0  # for all output heads of a key head

    def load_queries(head):
        dev.copy(gmem.q, row, lax.div(head, HO // Hq) * K, smem.q)

    def clear_foreign(*tiles):
        if gmem.first_token is not None:
            pl.when(is_partial(gmem, chunk))(lambda: clear(dev, gmem, chunk, *tiles))

    dev.copy(gmem.k, row, key_head * K, smem.k)
    load_queries(first_head)
    dev.arrived()
    clear_foreign(smem.k, smem.q)
    parts = parts_of_keys(dev.product_transposed(smem.k, smem.k))
    shared = dev.product_transposed(smem.q, smem.k) if one_query else None

    def one(e, _):
        head = first_head + e
        scores = shared
        if scores is None:
            dev.commit()  # every warp has read the queries of the head before
            load_queries(head)
            dev.arrived()
            clear_foreign(smem.q)
            scores = dev.product_transposed(smem.q, smem.k)
        n = chunk * HO + head
        beta = dev.vector(gmem.beta.at[n], COL)
        g_rows, g_columns = dev.vector(gmem.g2_cum.at[n], ROW), dev.vector(gmem.g2_cum.at[n], COL)
        # Exponents above the diagonal are kept from overflow. T is 0 there.
        gamma = jnp.exp2(jnp.minimum(along_rows(g_rows, CHUNK) - along_columns(g_columns, CHUNK), 0.0))
        p = jnp.where(dev.row_minus_column() >= 0, scores * gamma, 0.0) * along_columns(beta * scale, CHUNK)
        rows = pl.ds(n * CHUNK, CHUNK)
        dev.store(gmem.p.at[rows], p.astype(gmem.p.dtype))
        halves = invert(dev, parts, None, beta, smem.l, smem.x, smem.x_t)
        for i, half in enumerate(halves):
            columns = slice(HALF * i, HALF * (i + 1))
            dev.store(gmem.t.at[rows, columns], (half * gamma[:, columns]).astype(gmem.t.dtype))
        return ()

    lax.fori_loop(0, group, one, ())


class Prepared(NamedTuple):
    """Results of `prepare`; see the module docstring."""

    t: Float[Array, "chunks HO C C"]
    p: Float[Array, "chunks HO C C"]


def prepare(
    q: Float[Array, "rows Hq K"],
    k: Float[Array, "rows Hk K"],
    g2_cum: Float[Array, "chunks HO C"],
    beta: Float[Array, "chunks HO C"],
    spans: Spans | None = None,
    *,
    scale: float,
    interpret: Any = None,
) -> Prepared:
    """T and P of every chunk; see the module docstring.

    Args:
      q, k: bfloat16 or float16, K 64 or 128.
      g2_cum: cumulative log2 decays of each chunk, float32.
      beta: write strengths, float32.
      spans: where the chunks lie in the rows of q and k; None: one behind the other.
      scale: factor of the output.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    (rows, Hk, K), (chunks, HO), Hq = k.shape, beta.shape[:2], q.shape[1]
    square = jax.ShapeDtypeStruct((chunks * HO * CHUNK, CHUNK), k.dtype)
    sizes = _Sizes(Hq, Hk, HO, K, scale)
    results = launch(
        "mma_prepare",
        functools.partial(_body, sizes=sizes, interpreted=interpret is not None),
        inputs={
            "q": q.reshape(rows, Hq * K),
            "k": k.reshape(rows, Hk * K),
            **inputs(spans),
            "g2_cum": g2_cum.reshape(-1, CHUNK),
            "beta": beta.reshape(-1, CHUNK),
        },
        outputs={"t": square, "p": square},
        memory=_memory(K, k.dtype),
        ctas=chunks * Hk,
        auto_barriers=True,
        interpret=interpret,
    )
    return Prepared(*(results[name].reshape(chunks, HO, CHUNK, CHUNK) for name in ("t", "p")))
