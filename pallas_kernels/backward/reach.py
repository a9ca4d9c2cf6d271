"""Which segments a cotangent has to be found in so that it is known at the first token of rows that come from
elsewhere. No device code.

A cotangent comes back through the maps of all segments before it. Where these make it small enough, what a segment
adds is no part of the result's digits, and its walk is left out. A state that decays, and keys that overwrite one
another, make it small after some thousand tokens.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.shapes import Dims
from pallas_kernels.work.residuals import Segments, Transition
from pallas_kernels.work.split import open_chains, work_of

FAINT = -64.0
"""log2 of the factor below which a cotangent is left out: forty binary digits below the last one of float32."""


class OpenAdjoints(NamedTuple):
    """Cotangents of states of sequences that come from elsewhere."""

    starts: Float[Array, "items HO V64 K64"]
    """At the start of every segment, from zeros, or from dfinal, at its end."""
    ends: Float[Array, "items HO V64 K64"]
    """At the end of every segment."""
    cut: bool
    """Whether the chains of the backward are to be cut too. If not, what does not reach the first token of a sequence
    that comes from elsewhere is missing."""


class Entry(NamedTuple):
    """Sequences that come from elsewhere."""

    sequence: Int[Array, ""] | None
    """The packed one; None where every row does."""
    enters: Bool[Array, ""]
    """Whether any does."""


class OpenWalk(NamedTuple):
    """How the cotangents of sequences that come from elsewhere are found."""

    walked: Int[Array, "items HO"]
    """Segments that are walked over."""
    warpgroups: int
    cut: bool
    """Whether the chains of the backward are cut."""


def choose_open(dims: Dims, K64: int, V64: int, packed: bool, segments: Segments, entry: Entry) -> OpenWalk:
    """The choice of least predicted time. Chains that are cut need every segment."""
    work, length = work_of(dims, packed, None), segments.items.split.segment_chunks
    assert length is not None
    cut, warpgroups = open_chains(dims, K64, V64, work, length)
    if cut:
        walked = jnp.ones((segments.items.split.num_items, dims.HO), jnp.int32)
    else:
        walked = walked_segments(segments, *entry, dims.B)
    return OpenWalk(walked, warpgroups, cut)


def walked_segments(
    segments: Segments, sequence: Int[Array, ""] | None, enters: Bool[Array, ""], rows: int
) -> Int[Array, "items HO"]:
    """1 where what a segment adds to the cotangent reaches the first token of its row, else 0.

    Args:
      segments: of an open forward; the maps of last segments are not read.
      sequence: the packed sequence that comes from elsewhere; None where every row does.
      enters: whether any does.
      rows: rows of the call.
    """
    growth, (split, tables) = log2_norm(segments.m_t), segments.items
    if sequence is None:
        growth = growth.reshape(rows, split.num_items // rows, -1)
        inside = jnp.ones((), bool)
    else:
        assert tables is not None and tables.first_item is not None
        item = jnp.arange(split.num_items)
        first, end = tables.first_item[sequence], tables.first_item[sequence + 1]
        inside = ((item >= first) & (item < end))[:, None]
        growth = jnp.where(inside & (item < end - 1)[:, None], growth, 0.0)[None]
    before = jnp.cumsum(growth[:, :-1], axis=1)
    before = jnp.concatenate([jnp.zeros_like(growth[:, :1]), before], axis=1).reshape(split.num_items, -1)
    return (inside & enters & jnp.logical_not(before < FAINT)).astype(jnp.int32)  # what is NaN is walked over


def log2_norm(m_t: Transition) -> Float[Array, "items HO"]:
    """log2 of the most that M multiplies the sum of a cotangent's magnitudes by, its largest sum of a row."""
    rest = jnp.sum(jnp.abs(m_t.rest.astype(jnp.float32)), axis=-2)  # a column of M^T is a row of M
    return jnp.log2(jnp.max(jnp.abs(m_t.diagonal) + rest, axis=-1))
