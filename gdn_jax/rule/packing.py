"""Packed rows turned into chunks: where each chunk of each sequence lies, and how tokens move there and back.

Of the two forms of packing `segment_ids` needs no table (see `segments`). `cu_seqlens` gives every sequence chunks of
its own, so that all chunks start at the start of a sequence or right after another chunk of it; tokens a chunk does
not own are masked.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class PackedChunks(NamedTuple):
    """Chunk table of packed sequences. L is its static length, an upper bound; unused chunks own no token."""

    token: Int[Array, "L C"]
    """Token of each row of each chunk, clipped to a valid index where the row owns none."""
    owned: Bool[Array, "L C"]
    """Whether the row holds a token of the chunk's sequence."""
    sequence: Int[Array, " L"]
    """Sequence of each chunk, clipped to N - 1 for unused chunks."""
    is_first: Bool[Array, " L"]
    """Whether the chunk is the first of its sequence."""
    is_last: Bool[Array, " L"]
    """Whether the chunk is the last of its sequence."""
    is_empty: Bool[Array, " N"]
    """Whether the sequence has no tokens."""
    chunk_of_token: Int[Array, " T"]
    """Chunk that owns each token (any chunk for padding tokens)."""
    row_of_token: Int[Array, " T"]
    """Row of each token inside that chunk."""
    is_token: Bool[Array, " T"]
    """Whether the token belongs to a sequence; False for padding outside [cu[0], cu[-1])."""


def max_packed_chunks(T: int, N: int, C: int) -> int:
    """Largest number of chunks that N sequences of T tokens together can need: sum of ceil(length / C)."""
    return max(1, min(T, (T + N * (C - 1)) // C))


def packed_chunks(cu_seqlens: Int[Array, " N1"], T: int, C: int) -> PackedChunks:
    """Chunk table of packed sequences; its sizes are static, its values may be traced.

    Args:
      cu_seqlens: ascending borders; sequence n owns the tokens [cu_seqlens[n], cu_seqlens[n + 1]).
      T: tokens of the row, padding included.
      C: tokens of a chunk.
    """
    cu = cu_seqlens.astype(jnp.int32)
    N = cu.shape[0] - 1
    L = max_packed_chunks(T, N, C)
    lengths = jnp.diff(cu)
    counts = -(-lengths // C)
    ends = jnp.cumsum(counts)
    starts = ends - counts

    chunk = jnp.arange(L, dtype=jnp.int32)
    n = jnp.searchsorted(ends, chunk, side="right").astype(jnp.int32)
    used = n < N
    n = jnp.minimum(n, N - 1)
    begin = cu[n] + (chunk - starts[n]) * C
    token = begin[:, None] + jnp.arange(C, dtype=jnp.int32)
    owned = (token < cu[n + 1][:, None]) & used[:, None]

    position = jnp.arange(T, dtype=jnp.int32)
    s = jnp.searchsorted(cu, position, side="right").astype(jnp.int32) - 1
    is_token = (s >= 0) & (s < N)
    s = jnp.clip(s, 0, N - 1)
    offset = position - cu[s]
    return PackedChunks(
        token=jnp.clip(token, 0, T - 1),
        owned=owned,
        sequence=n,
        is_first=used & (chunk == starts[n]),
        is_last=used & (chunk == ends[n] - 1),
        is_empty=lengths == 0,
        chunk_of_token=jnp.clip(starts[s] + offset // C, 0, L - 1),
        row_of_token=jnp.where(is_token, offset % C, 0),
        is_token=is_token,
    )


def gather_chunks(x: Float[Array, "1 T *D"], table: PackedChunks) -> Float[Array, "L 1 C *D"]:
    """Tokens of a packed row in chunk order; rows that own no token are 0."""
    if not x.shape[1]:  # JAX gathers nothing from an axis of no length
        x = jnp.zeros_like(x, shape=(1, 1, *x.shape[2:]))
    owned = table.owned.reshape(table.owned.shape + (1,) * (x.ndim - 2))
    return jnp.where(owned, x[0][table.token], 0)[:, None]


def scatter_chunks(x: Float[Array, "L 1 C *D"], table: PackedChunks) -> Float[Array, "1 T *D"]:
    """Inverse of `gather_chunks`; tokens that belong to no sequence are 0."""
    is_token = table.is_token.reshape(table.is_token.shape + (1,) * (x.ndim - 3))
    return jnp.where(is_token, x[table.chunk_of_token, 0, table.row_of_token], 0)[None]


def row_to_chunks(x: Float[Array, "B T *D"], C: int) -> Float[Array, "L B C *D"]:
    """Splits T into chunks of C, the last one padded with zeros; the chunk axis leads."""
    pad = -x.shape[1] % C
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // C, C, *x.shape[2:]), 1, 0)


def chunks_to_row(x: Float[Array, "L B C *D"], T: int) -> Float[Array, "B T *D"]:
    """Inverse of `row_to_chunks`: drops the padding after token T."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :T]
