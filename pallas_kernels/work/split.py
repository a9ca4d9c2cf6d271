"""How the kernels' work is split over the GPU: predicted times of whole sequences and of segments. No device code.

A CTA walks over the chunks of one item. With a time for each chunk and for each wave of CTAs, the time of a split is
that of its longest wave; the split of least predicted time is chosen, from shapes and known lengths alone.
"""

from typing import NamedTuple

import numpy as np

from gdn_jax.shapes import Dims
from pallas_kernels.device.launch import num_sms
from pallas_kernels.device.layouts import CHUNK, GRANULE

STEP = {1: 1.33, 2: 2.11}
"""Microseconds of one chunk with one or two state warpgroups (H200, 2026-11-21, K = V = 128, all SMs busy)."""

FILL = {1: 4.0, 2: 6.0}
"""Microseconds that each wave of CTAs adds to `STEP`."""

TRANSITION_STEP = {1: 0.84, 2: 1.15}
TRANSITION_FILL = 4.0
"""STEP and FILL without outputs. One warpgroup was not timed again: 0.94 before, times 1.15 / 1.29 of two."""

SEGMENT_STEP = 1.7
"""Microseconds of one step of segment_states."""

SEGMENT_LAUNCHES = 8.0
"""Microseconds of two more launches and of their tables."""

SEGMENT_OCCUPANCY = 0.6
"""Part of the SMs that sequences of unknown lengths must leave idle before they are cut."""

CHAIN_STEP, CHAIN_FILL = 1.6, 4.0
"""Microseconds of one chunk of either chain with one state warpgroup, and what each wave of CTAs adds (H200,
2026-11-21, K = V = 128)."""

PAIR_STEP = 2.03
"""Microseconds of one chunk of either chain with two state warpgroups and an idle GPU around (H200, 2026-11-21)."""

CHAIN_RATE = 1.56
"""Microseconds of an SM for one chunk of 64 rows of either chain, when all SMs are busy: memory binds them then, with
one state warpgroup as with two (H200, 2026-11-21, 32 heads, 4096x8: 0.774 and 0.744 ms)."""

ADJOINTS_STEP = 1.4
"""Microseconds of one chunk of segment_adjoints with one state warpgroup: 49 us for one wave of 32 chunks (H200,
2026-11-21, 4 heads, 1x32768)."""

ADJOINTS_PAIR_STEP = 1.78
"""ADJOINTS_STEP with two state warpgroups. Not timed: PAIR_STEP, less what a chunk takes less than in a chain."""

REACH = 256
"""Chunks over which a cotangent is expected to come back, to the first token of a row that comes from
elsewhere, before it is too faint to count."""

ADJOINTS_LAUNCHES = 6.0
"""Microseconds of two more launches of the backward."""


class Work(NamedTuple):
    """Chunks of the sequences of a call, as far as they are known while tracing."""

    chunks: np.ndarray
    """[N] chunks of each sequence; the mean where the lengths are not known."""
    known: bool


def work_of(dims: Dims, packed: bool, cu_seqlens: np.ndarray | None) -> Work:
    """The sequences' chunks.

    Args:
      packed: whether all sequences lie in one row.
      cu_seqlens: of `known_lengths`.
    """
    num_chunks = -(-dims.T // CHUNK)
    if cu_seqlens is not None:
        begin, end = cu_seqlens[:-1], cu_seqlens[1:]
        return Work(np.where(end > begin, -(-end // CHUNK) - begin // CHUNK, 0), True)
    if packed and dims.N > 1:
        return Work(np.full(dims.N, -(-num_chunks // dims.N)), False)
    return Work(np.full(dims.N, num_chunks), True)


def makespan(values: np.ndarray, counts: np.ndarray, step: float, fill: float, sms: int) -> float:
    """Time of counts[i] CTAs of values[i] chunks, the longest first, on sms of them at a time."""
    order = np.argsort(-values)
    values, ends = values[order], np.cumsum(counts[order])
    if not len(ends) or not ends[-1]:
        return 0.0
    first_of_wave = np.arange(0, ends[-1], sms)
    longest = values[np.searchsorted(ends, first_of_wave, side="right")]
    mean = float((values * counts[order]).sum()) / sms
    return float(min((longest * step + fill).sum(), (mean + longest[0]) * step + fill * len(longest)))


def cut(values: np.ndarray, counts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Cuts counts[i] sequences of values[i] chunks into segments.

    Returns:
      Lengths of the segments, how many there are of each, and how many segments have another one behind them.
    """
    whole, rest = (values // length * counts).sum(), values % length
    inner = int(((-(-values // length) - 1) * counts).sum())
    return np.append(rest, length), np.append(np.where(rest, counts, 0), whole), inner


_SEGMENTS = {m << n for m in (4, 5, 6, 7) for n in range(10)}
"""Chunks of a segment for uneven lengths: few choices, for each one is a compilation."""


def choose_split(
    dims: Dims,
    K: int,
    V: int,
    work: Work,
    *,
    state_warpgroups: int | None = None,
    segment_chunks: int | None = None,
    is_open: bool = False,
    sms: int | None = None,
) -> tuple[int, int | None]:
    """The forward's (state warpgroups per CTA, chunks of a segment or None) of least predicted time.

    Args:
      K, V: padded widths.
      work: of `work_of`. Sequences of unknown lengths count as equally long, and are cut only where they would
        leave most SMs idle.
      state_warpgroups, segment_chunks: what is decided already (0 chunks: whole sequences), None for a choice.
      is_open: the sequences go on elsewhere: what every segment does to states is found, and there is always one. The
        time is that of both passes then.
      sms: multiprocessors; None: those of the device.
    """
    sms = sms or num_sms()
    values, counts = np.unique(work.chunks[work.chunks > 0], return_counts=True)
    longest, sequences = int(values.max(initial=1)), int(counts.sum())
    pairs = V % (2 * GRANULE) == 0 and K % (2 * GRANULE) == 0 and K <= 128
    warpgroups = [state_warpgroups] if state_warpgroups else [2, 1] if pairs else [1]
    paired = 2 if pairs else 1

    def time(n: int, length: int) -> float:
        ctas = dims.HO * V // (GRANULE * n)
        if not length:
            return makespan(values, counts * ctas, STEP[n], FILL[n], sms)
        items, item_counts, inner = cut(values, counts, length)
        main = makespan(items, item_counts * ctas, STEP[n], FILL[n], sms)
        walks = -(-sequences * dims.HO * V // GRANULE // sms)
        walk = walks * -(-longest // length) * SEGMENT_STEP
        lengths, number = (items, item_counts) if is_open else (np.array([length]), np.array([inner]))
        transitions = number * (dims.HO * (V + K) // (GRANULE * paired))
        prepare = makespan(lengths, transitions, TRANSITION_STEP[paired], TRANSITION_FILL, sms)
        if not is_open:
            return main + prepare + walk + SEGMENT_LAUNCHES
        tiles = dims.HO * V // GRANULE
        backward = min(
            t for of_cut in _open_backward(values, counts, length, tiles, pairs, walk, sms) for t in of_cut
        )
        return main + prepare + backward + 3 * walk

    if segment_chunks is not None:
        lengths = [segment_chunks]
    else:
        lengths = [-(-dims.T // CHUNK) if is_open else 0]
        if work.known or dims.N * dims.HO * V // GRANULE < SEGMENT_OCCUPANCY * sms:
            even = {-(-longest // n) for n in range(2, 65)}
            lengths += [n for n in sorted(even if len(values) == 1 else _SEGMENTS) if 4 <= n < longest]
    n, length = min(((n, length) for n in warpgroups for length in lengths), key=lambda c: time(*c))
    return n, length or None


def _open_adjoints(items, counts, tiles: int, pairs: bool, sms: int) -> list[float]:
    """Times of segment_adjoints over counts[i] segments of items[i] chunks, with one state warpgroup and with two."""
    times = [makespan(items, counts * tiles, ADJOINTS_STEP, CHAIN_FILL, sms)]
    if pairs:
        times.append(makespan(items, counts * (tiles // 2), ADJOINTS_PAIR_STEP, CHAIN_FILL, sms))
    return times


def _open_backward(
    values, counts, length: int, tiles: int, pairs: bool, walk: float, sms: int
) -> list[list[float]]:
    """Times of the walks of a backward over counts[i] sequences of values[i] chunks that come from elsewhere.

    Args:
      walk: time of `segment_states`.

    Returns:
      With whole chains, and with chains that are cut into segments of `length` chunks; for each number of state
      warpgroups of segment_adjoints.
    """
    items, item_counts, _ = cut(values, counts, length)
    reached = np.minimum(-(-values // length), -(-REACH // length)) * counts
    faint = _open_adjoints(np.minimum(values, length), reached, tiles, pairs, sms)
    whole = makespan(values, 2 * counts * tiles, CHAIN_STEP, CHAIN_FILL, sms)
    in_segments = makespan(items, 2 * item_counts * tiles, CHAIN_STEP, CHAIN_FILL, sms) + walk
    every = _open_adjoints(items, item_counts, tiles, pairs, sms)
    return [[t + whole for t in faint], [t + in_segments for t in every]]


def open_chains(
    dims: Dims, K: int, V: int, work: Work, length: int, sms: int | None = None
) -> tuple[bool, int]:
    """Whether the chains of rows that come from elsewhere are cut into segments, and the state warpgroups of a CTA of
    segment_adjoints, of least predicted time.

    Args:
      K, V: padded widths.
      work: of `work_of`.
      length: chunks of a segment.
      sms: as for `choose_split`.
    """
    sms = sms or num_sms()
    values, counts = np.unique(work.chunks[work.chunks > 0], return_counts=True)
    tiles, pairs = dims.HO * V // GRANULE, V % (2 * GRANULE) == 0 and K <= 128
    walks = -(-int(counts.sum()) * tiles // sms)
    walk = walks * -(-int(values.max(initial=1)) // length) * SEGMENT_STEP
    whole, in_segments = _open_backward(values, counts, length, tiles, pairs, walk, sms)
    is_cut = min(in_segments) < min(whole)
    return is_cut, 1 + int(np.argmin(in_segments if is_cut else whole))


def segments_pay(dims: Dims, V: int, work: Work, length: int, sms: int | None = None) -> bool:
    """Whether segments of `length` chunks are predicted to take less time than whole sequences.

    Args:
      V: padded width.
      work: of `work_of`.
      sms: as for `choose_split`.
    """
    sms = sms or num_sms()
    values, counts = np.unique(work.chunks[work.chunks > 0], return_counts=True)
    tiles = dims.HO * V // GRANULE
    items, item_counts, inner = cut(values, counts, length)
    ends = makespan(np.array([length]), np.array([inner * tiles]), ADJOINTS_STEP, CHAIN_FILL, sms)
    walks = -(-int(counts.sum()) * tiles // sms)
    walk = walks * -(-int(values.max(initial=1)) // length) * SEGMENT_STEP
    chains = makespan(items, 2 * item_counts * tiles, CHAIN_STEP, CHAIN_FILL, sms)
    whole = makespan(values, 2 * counts * tiles, CHAIN_STEP, CHAIN_FILL, sms)
    return ends + walk + ADJOINTS_LAUNCHES + chains < whole


def chain_warpgroups(
    dims: Dims, K: int, V: int, work: Work, length: int | None, sms: int | None = None
) -> int:
    """State warpgroups of a CTA of the chains: two where the CTAs then still fill the GPU more than once, and where
    the longest item does not take longer for it than all of them do.

    Args:
      K, V: padded widths.
      work: of `work_of`.
      length: chunks of a segment; None for whole sequences.
      sms: as for `choose_split`.
    """
    sms = sms or num_sms()
    if V % (2 * GRANULE) or K > 128:
        return 1
    values, counts = np.unique(work.chunks[work.chunks > 0], return_counts=True)
    if length is not None:
        values, counts, _ = cut(values, counts, length)
    rows = 2 * dims.HO * V // GRANULE  # of both chains
    pairs, chunks = int(counts.sum()) * rows // 2, float((values * counts).sum()) * rows
    return 2 if pairs > sms and values.max() * PAIR_STEP < chunks * CHAIN_RATE / sms else 1
