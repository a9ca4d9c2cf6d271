"""Sequences on the grid of chunks: which tokens of a chunk a CTA may use, and the decays inside a chunk.

All sequences lie on one grid of chunks of 64 tokens. The span of a sequence of packed rows is the chunks it touches;
a chunk and a sequence that touches it are a visit. In a chunk that a span shares with another sequence, the tokens
of the others are replaced: zeros in the tiles of tokens, the nearest owned gate in g2_cum. That is exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.common import CHUNK, COL, ROW, WGMMA, along_columns, along_rows, iota
from pallas_kernels.device import Device


class VisitTables(NamedTuple):
    """Where the sequences of packed rows lie (B = 1). The padding past the last one counts as sequence N."""

    cu_seqlens: Int[Array, " N1"]
    first_visit: Int[Array, " N2"]
    """First visit of each sequence and of the padding, and the number of visits."""
    sequence: Int[Array, " visits"]
    """Sequence of each visit."""


class Span(NamedTuple):
    """Tokens [begin, end) of a row that a CTA works on, and the chunks they touch."""

    row: jax.Array
    sequence: jax.Array
    begin: jax.Array
    end: jax.Array
    first_chunk: jax.Array
    num_chunks: jax.Array
    first_visit: jax.Array
    is_padding: jax.Array | bool


def dense_span(row: jax.Array, T: int) -> Span:
    """Span of a row that is one sequence."""
    num_chunks = jnp.int32(-(-T // CHUNK))
    zero = jnp.int32(0)
    return Span(row, row, zero, num_chunks * CHUNK, zero, num_chunks, row * num_chunks, False)


def packed_span(n: jax.Array, T: int, N: int, cu, first_visit) -> Span:
    """Span of sequence n of packed rows; n = N is the padding."""
    is_padding = n >= N
    begin = cu[jnp.minimum(n, N)]
    end = jnp.where(is_padding, T, cu[jnp.minimum(n + 1, N)])
    first = lax.div(begin, CHUNK)
    chunks = jnp.where(end > begin, lax.div(end + CHUNK - 1, CHUNK) - first, 0)
    return Span(jnp.int32(0), n, begin, end, first, chunks, first_visit[jnp.minimum(n, N)], is_padding)


def segment_of(span: Span, segment: jax.Array, length: jax.Array | int) -> Span:
    """The part of a span that is its segment number `segment` of `length` chunks; no chunks past its end."""
    first = segment * length
    chunks = jnp.clip(span.num_chunks - first, 0, length)
    start = (span.first_chunk + first) * CHUNK
    return span._replace(
        begin=jnp.maximum(span.begin, start),
        end=jnp.minimum(span.end, start + chunks * CHUNK),
        first_chunk=span.first_chunk + first,
        num_chunks=chunks,
        first_visit=span.first_visit + first,
    )


def owned_rows(span: Span, chunk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows [begin, end) of a chunk are the span's; whether that is not all of them."""
    start = chunk * CHUNK
    begin, end = jnp.maximum(span.begin - start, 0), jnp.minimum(span.end - start, CHUNK)
    return begin, end, (begin > 0) | (end < CHUNK)


def owned(shape: tuple[int, int], dimension: int, begin, end) -> jax.Array:
    """Which entries have an index of [begin, end) along a dimension."""
    index = iota(shape, dimension)
    return (index >= begin) & (index < end)


def keep_owned_rows(ref, begin, end) -> None:
    """Zeroes the rows of a tile outside [begin, end), 64 columns at a time."""
    for column in range(0, ref.shape[1], CHUNK):
        part = ref.at[:, column : column + CHUNK]
        x = plgpu.load(part, layout=WGMMA)
        part[...] = jnp.where(owned((CHUNK, CHUNK), 0, begin, end), x, jnp.zeros((), x.dtype))


def keep_owned_columns(ref, begin, end) -> None:
    """Zeroes the columns of a [64, 64] tile outside [begin, end)."""
    x = plgpu.load(ref, layout=WGMMA)
    ref[...] = jnp.where(owned((CHUNK, CHUNK), 1, begin, end), x, jnp.zeros((), x.dtype))


def keep_owned_gates(g_smem, begin, end) -> None:
    """Before the first owned token no decay, after the last one the last sum: all exponents stay <= 0."""
    last = g_smem[end - 1]
    g = plgpu.load(g_smem, layout=ROW)
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (CHUNK,), 0), ROW)
    plgpu.commit_smem()  # every warp reads the vector, and one writes it
    g_smem[...] = jnp.where(row < begin, 0.0, jnp.where(row >= end, last, g))


def keep_owned_factors(smem, begin, end) -> None:
    """Zeroes a vector outside [begin, end)."""
    x = plgpu.load(smem, layout=ROW)
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (CHUNK,), 0), ROW)
    plgpu.commit_smem()  # every warp reads the vector, and one writes it
    smem[...] = jnp.where((row >= begin) & (row < end), x, 0.0)


def gamma_of(dev: Device, g_smem, log2_factor: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """G in layout ROW, and factor Gamma [C, C]: 2^(G_i - G_j) for i >= j, 0 above."""
    g_rows, g_columns = plgpu.load(g_smem, layout=ROW), plgpu.load(g_smem, layout=COL)
    difference = along_rows(g_rows + log2_factor, CHUNK) - along_columns(g_columns, CHUNK)
    return g_rows, jnp.where(dev.row_minus_column() >= 0, jnp.exp2(difference), 0.0)


def store_rows(source_smem, destination, begin, end) -> None:
    """Rows [begin, end) of an untiled tile to memory, one by one; destination(row) is where a row goes."""

    def one(t, _):
        plgpu.copy_smem_to_gmem(source_smem.at[t], destination(t))
        return ()

    lax.fori_loop(begin, end, one, ())
