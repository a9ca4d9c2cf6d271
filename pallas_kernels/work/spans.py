"""Spans and items: which chunks and tokens a CTA works on.

All sequences lie on one grid of chunks of 64 tokens. The span of a sequence of packed rows is the chunks it touches.
A chunk and a sequence that touches it are a visit. An item is what one CTA walks over: a sequence, or one of the
segments that it is cut into. Functions take `gmem`, the references of a kernel by name, among which are the tables of
`work.tables` for packed rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device.layouts import CHUNK
from pallas_kernels.work.tables import ROWS_BASE, Split


class Span(NamedTuple):
    """Tokens [begin, end) of a row, and the chunks they touch."""

    row: jax.Array
    """Row of the batch."""
    sequence: Any
    """Number of the sequence; N or more for the padding past the last one. None where it is not looked up."""
    begin: jax.Array
    end: jax.Array
    first_chunk: jax.Array
    num_chunks: jax.Array
    first_visit: Any
    """Number of the first visit; None where the kernel has no table of visits."""
    is_padding: jax.Array | bool

    @property
    def work_chunks(self) -> jax.Array:
        """Chunks to compute: none of the padding."""
        return self.num_chunks if self.is_padding is False else jnp.where(self.is_padding, 0, self.num_chunks)


class Item(NamedTuple):
    """The item that a CTA walks over."""

    index: jax.Array
    span: Span
    is_first: jax.Array | bool
    is_last: jax.Array | bool
    """Whether the sequence ends here, as is_first says whether it begins here."""


def dense_span(row: jax.Array, T: int) -> Span:
    """The span of a row that is one sequence."""
    num_chunks = jnp.int32(-(-T // CHUNK))
    zero = jnp.int32(0)
    return Span(row, row, zero, num_chunks * CHUNK, zero, num_chunks, row * num_chunks, False)


def packed_span(n: jax.Array, T: int, N: int, gmem: Any) -> Span:
    """The span of sequence n of packed rows; n = N is the padding."""
    cu, is_padding = gmem.cu_seqlens, n >= N
    begin = cu[jnp.minimum(n, N)]
    end = jnp.where(is_padding, T, cu[jnp.minimum(n + 1, N)])
    first = lax.div(begin, CHUNK)
    chunks = jnp.where(end > begin, lax.div(end + CHUNK - 1, CHUNK) - first, 0)
    first_visit = None if gmem.first_visit is None else gmem.first_visit[jnp.minimum(n, N)]
    return Span(jnp.int32(0), n, begin, end, first, chunks, first_visit, is_padding)


def visit_span(visit: jax.Array, gmem: Any) -> Span:
    """The part of a sequence of packed rows that one visit is: a chunk, or what the sequence owns of it.

    Two look-ups that do not wait for each other.
    """
    chunk, rows = gmem.visit_chunk[visit], gmem.visit_rows[visit]
    begin, end = lax.rem(rows, ROWS_BASE), lax.div(rows, ROWS_BASE)
    start = chunk * CHUNK
    return Span(jnp.int32(0), None, start + begin, start + end, chunk, jnp.int32(1), visit, False)


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
        first_visit=None if span.first_visit is None else span.first_visit + first,
    )


def item_of(index: jax.Array, split: Split, T: int, N: int, gmem: Any) -> Item:
    """Item number `index`. The padding of packed rows past the last sequence is an item too."""
    length: Any = split.segment_chunks
    if gmem.cu_seqlens is None:
        if length is None:
            return Item(index, dense_span(index, T), True, True)
        per_row = split.num_items // N
        row, segment = lax.div(index, per_row), lax.rem(index, per_row)
        span = segment_of(dense_span(row, T), segment, length)
        return Item(index, span, segment == 0, segment == per_row - 1)
    n = index if gmem.item_sequence is None else gmem.item_sequence[index]
    span = packed_span(n, T, N, gmem)
    if length is None:
        return Item(index, span, True, True)
    segment = index - gmem.first_item[jnp.minimum(n, N)]
    is_last = index + 1 == gmem.first_item[jnp.minimum(n + 1, N + 1)]
    length = jnp.where(span.is_padding, span.num_chunks, length)
    return Item(index, segment_of(span, segment, length), segment == 0, is_last)


def owned_rows(span: Span, chunk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows [begin, end) of a chunk are the span's; whether that is not all of them."""
    start = chunk * CHUNK
    begin, end = jnp.maximum(span.begin - start, 0), jnp.minimum(span.end - start, CHUNK)
    return begin, end, (begin > 0) | (end < CHUNK)
