"""Tables of packed rows: where sequences, their segments and their visits lie. Made on the host, read by kernels.

Every function works in NumPy where the lengths are known while tracing, so that its tables cost nothing at run time,
and in JAX where they are not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from gdn_jax.shapes import RuleArrays
from pallas_kernels.device.layouts import CHUNK

UNROLLED = 17
"""Borders of sequences up to which tables are element-wise expressions, one fusion each, without a reduction or a
scan."""

ROWS_BASE = 128
"""Base of the two numbers in `VisitTables.rows`; a power of two, more than a chunk has rows."""

REDUCED = 64
"""Borders up to which every token is compared with all of them, in one reduction."""


@jax.tree_util.register_static  # residuals, which hold it, cross the borders of compiled functions
class Split(NamedTuple):
    """Static shape of the work."""

    num_items: int
    """Items, that is sequences or segments; for packed rows one more than needed, which is the padding."""
    segment_chunks: int | None
    """Chunks of a segment, None when sequences are not cut."""


class ItemTables(NamedTuple):
    """Places of the items of packed rows. Without segments items are sequences, and the last table is None."""

    cu_seqlens: Int[Array, " N1"]
    sequence: Int[Array, " items"] | None
    """Sequence of each item; N for the padding past the last sequence. Without segments the order in which the
    sequences are started, or None for theirs."""
    first_item: Int[Array, " N2"] | None
    """First item of each sequence, of the padding, and the number of items used."""


class Items(NamedTuple):
    """The pieces that sequences are cut into."""

    split: Split
    tables: ItemTables | None
    """Tables of packed rows, None for others."""


class VisitTables(NamedTuple):
    """Places of the visits of packed rows (B = 1). The padding past the last sequence counts as sequence N."""

    cu_seqlens: Int[Array, " N1"]
    first_visit: Int[Array, " N2"]
    """First visit of each sequence and of the padding, and the number of visits."""
    chunk: Int[Array, " visits"]
    """Chunk of each visit."""
    rows: Int[Array, " visits"]
    """Rows [begin, end) of the chunk that are the visit's, as begin + ROWS_BASE end."""


class ChunkTables(NamedTuple):
    """Packed tokens (B = 1) moved apart, so that every sequence begins a chunk of its own."""

    first_chunk: Int[Array, " N1"]
    """First chunk of each sequence, and the number of chunks used."""
    token: Int[Array, " places"]
    """Token at each place of all chunks; T where there is none."""
    place: Int[Array, " T"]
    """Place of each token; one past the last place for the padding behind the last sequence."""


def table_inputs(items: ItemTables | None = None, visits: VisitTables | None = None) -> dict[str, Any]:
    """The tables as inputs of a kernel, by the names that `work.spans` reads."""
    some = visits if items is None else items
    return {
        "cu_seqlens": None if some is None else some.cu_seqlens,
        "first_visit": None if visits is None else visits.first_visit,
        "visit_chunk": None if visits is None else visits.chunk,
        "visit_rows": None if visits is None else visits.rows,
        "item_sequence": None if items is None else items.sequence,
        "first_item": None if items is None else items.first_item,
    }


def _running_sums(counts: Any) -> Any:
    """[n + 1] sums of the first 0, 1, .. n of n counts."""
    if isinstance(counts, np.ndarray) or counts.shape[0] > UNROLLED:
        xp: Any = np if isinstance(counts, np.ndarray) else jnp
        return xp.concatenate([xp.zeros_like(counts[:1]), xp.cumsum(counts, dtype=counts.dtype)])
    sums = [0 * counts[0]]
    for n in range(counts.shape[0]):
        sums.append(sums[-1] + counts[n])
    return jnp.stack(sums)


def _rises(heights: Any) -> Any:
    """Differences of neighbours, the first from 0."""
    xp: Any = np if isinstance(heights, np.ndarray) else jnp
    return xp.diff(heights, prepend=xp.zeros_like(heights[:1]))


def _staircase(at: Any, rises: Any, size: int) -> Any:
    """[size] heights at 0, 1, .. of a staircase that rises by rises[n] at at[n]; at is ascending.

    A search for every place would be a loop of XLA with four small kernels a turn; here are one to three in all.
    """
    if isinstance(at, np.ndarray):
        steps = np.zeros(size + 1, np.int32)
        np.add.at(steps, np.minimum(at, size), rises)
        return np.cumsum(steps[:size], dtype=np.int32)
    rises = jnp.broadcast_to(jnp.asarray(rises, jnp.int32), at.shape)
    place = jnp.arange(size, dtype=jnp.int32)
    if at.shape[0] <= UNROLLED:
        heights = jnp.zeros_like(place)
        for n in range(at.shape[0]):
            heights = heights + jnp.where(place >= at[n], rises[n], 0)
        return heights
    if at.shape[0] <= REDUCED:
        return jnp.sum(jnp.where(place[:, None] >= at, rises, 0), axis=1, dtype=jnp.int32)
    return jnp.cumsum(jnp.zeros_like(place).at[at].add(rises, mode="drop"), dtype=jnp.int32)


def known_lengths(cu_seqlens) -> np.ndarray | None:
    """cu_seqlens as int64 in NumPy where its values are known while tracing, else None."""
    if cu_seqlens is None or isinstance(cu_seqlens, jax.core.Tracer | jax.ShapeDtypeStruct):
        return None
    return np.asarray(cu_seqlens).astype(np.int64)


def borders(cu_seqlens: Any, known: np.ndarray | None) -> Any:
    """cu_seqlens as int32: in NumPy where the values are known, else in JAX."""
    return cu_seqlens.astype(jnp.int32) if known is None else known.astype(np.int32)


def common_length(cu_seqlens: np.ndarray, T: int) -> int | None:
    """Tokens of every sequence, if all have equally many and fill the row: then they are rows of a batch."""
    lengths = np.diff(cu_seqlens)
    length = int(lengths[0])
    return length if length and not length % 8 and cu_seqlens[-1] == T and (lengths == length).all() else None


def as_rows(x: RuleArrays, rows: int) -> RuleArrays:
    """Returns the call with packed sequences of equal lengths as the rows of a batch."""
    tokens = (None if y is None else y.reshape(rows, -1, *y.shape[2:]) for y in x[:5])
    return RuleArrays._make((*tokens, x.initial_state, None, None))


def share_chunks(cu_seqlens: np.ndarray, T: int) -> bool:
    """Whether some chunk holds tokens of two sequences, or of one and of the padding."""
    starts = cu_seqlens[:-1] if cu_seqlens[-1] == T else cu_seqlens
    return bool((starts % CHUNK).any())


def longest_first(chunks: Any) -> Any:
    """[N + 1] sequences, those of most chunks first, then N for the padding. In NumPy; a device has `work.search`."""
    return np.append(np.argsort(-chunks, kind="stable"), chunks.shape[0]).astype(np.int32)


def packed_items(
    cu_seqlens: Any, T: int, segment_chunks: int | None, by_length: bool = False, open_sequence: Any = None
) -> Items:
    """Items of packed rows.

    Args:
      segment_chunks: of a segment, None for whole sequences.
      by_length: whether whole sequences are started the longest first. Their lengths are known.
      open_sequence: a sequence that goes on behind the row, where sequences are cut: an empty segment of it follows
        its last one, so that what each of its tokens does to a state is found.
    """
    N = cu_seqlens.shape[0] - 1
    xp: Any = np if isinstance(cu_seqlens, np.ndarray) else jnp
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    chunks = xp.where(end > begin, -(-end // CHUNK) - begin // CHUNK, 0)
    if segment_chunks is None:
        order = longest_first(chunks) if by_length else None
        return Items(Split(N + 1, None), ItemTables(cu_seqlens, order, None))
    segments = xp.maximum(-(-chunks // segment_chunks), 1)
    if open_sequence is not None:
        segments = segments + (np.arange(N) == open_sequence)
    # Sum of ceil(c / s) <= (sum of c) / s + N, and every border between sequences lies in at most one more chunk.
    num_items = (-(-T // CHUNK) + N) // segment_chunks + N + 1 + (open_sequence is not None)
    first_item = _running_sums(xp.append(segments, xp.ones_like(segments[:1])))  # the padding is one item
    sequence = _staircase(first_item[1:], 1, num_items)
    tables = ItemTables(cu_seqlens, sequence.astype(np.int32), first_item.astype(np.int32))
    return Items(Split(num_items, segment_chunks), tables)


def row_items(B: int, T: int, segment_chunks: int | None, is_open: bool = False) -> Items:
    """Items of a batch whose rows are one sequence each.

    Args:
      is_open: the rows go on, as `open_sequence` of `packed_items`.
    """
    if segment_chunks is None:
        return Items(Split(B, None), None)
    num_chunks = -(-T // CHUNK)
    return Items(Split(B * (-(-num_chunks // segment_chunks) + is_open), segment_chunks), None)


def visit_tables(cu_seqlens: Any, T: int) -> VisitTables:
    """Chunks that each sequence of packed rows touches, the padding being one more."""
    xp: Any = np if isinstance(cu_seqlens, np.ndarray) else jnp
    N = cu_seqlens.shape[0] - 1
    ends = xp.concatenate([cu_seqlens, xp.full((1,), T, np.int32)])
    begin, end = ends[:-1], ends[1:]
    chunks = xp.where(end > begin, -(-end // CHUNK) - begin // CHUNK, 0)
    first = _running_sums(chunks)
    num_visits = -(-T // CHUNK) + N
    sequence = xp.minimum(_staircase(first[1:], 1, num_visits), N)

    def of_visits(table):
        return table[sequence] if xp is np else jnp.take(table, sequence, mode="clip")

    chunk = of_visits(begin // CHUNK - first[:-1]) + xp.arange(num_visits, dtype=np.int32)
    first_row = xp.maximum(of_visits(begin) - chunk * CHUNK, 0)
    end_row = xp.minimum(of_visits(end) - chunk * CHUNK, CHUNK)
    rows = first_row + ROWS_BASE * end_row
    return VisitTables(cu_seqlens, *(x.astype(np.int32) for x in (first, chunk, rows)))


def visit_of_token(T: int, tables: VisitTables) -> tuple[jax.Array, jax.Array]:
    """[T] visit of each token of packed rows, and where the token's sequence begins."""
    cu, first_visit = jnp.asarray(tables.cu_seqlens), jnp.asarray(tables.first_visit)
    chunk = jnp.arange(T, dtype=jnp.int32) // CHUNK
    ahead = _staircase(cu, _rises(first_visit[:-1] - cu // CHUNK), T)  # a chunk may be several visits
    return chunk + ahead, _staircase(cu, _rises(cu), T)


def chunk_tables(cu_seqlens: Any, T: int) -> ChunkTables:
    """Places of packed tokens in chunks that no two sequences share. Their number depends on T and N alone."""
    xp: Any = np if isinstance(cu_seqlens, np.ndarray) else jnp
    N = cu_seqlens.shape[0] - 1
    first = _running_sums(-(-(cu_seqlens[1:] - cu_seqlens[:-1]) // CHUNK))
    places = (T + (CHUNK - 1) * N) // CHUNK * CHUNK
    ahead = first[:-1] * CHUNK - cu_seqlens[:-1]  # of a place before its token
    token, place = xp.arange(T, dtype=np.int32), xp.arange(places, dtype=np.int32)
    place_of = xp.where(token < cu_seqlens[-1], token + _staircase(cu_seqlens[:-1], _rises(ahead), T), places)
    token_of = place - _staircase(first[:-1] * CHUNK, _rises(ahead), places)
    end = _staircase(first[:-1] * CHUNK, _rises(cu_seqlens[1:]), places)
    token_of = xp.where(token_of < end, token_of, T)
    return ChunkTables(*(x.astype(np.int32) for x in (first, token_of, place_of)))
