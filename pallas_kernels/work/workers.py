"""Independent warpgroups that share visits and output heads among them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.device.launch import warpgroup_index
from pallas_kernels.device.layouts import CHUNK, iota
from pallas_kernels.device.operations import Device
from pallas_kernels.work.spans import Span, visit_span


class VisitSizes(NamedTuple):
    """Static sizes of the work: a chunk of a sequence and an output head are an item."""

    HO: int
    N: int
    num_chunks: int
    """Chunks of a row."""
    visits: int
    tokens: int = CHUNK
    """Tokens of a chunk, see `work.halves`."""


class Place(NamedTuple):
    """The place of an item."""

    visit: jax.Array
    head: jax.Array
    row: jax.Array
    """Row of the batch."""
    tokens: Any
    """Slice of the row's tokens."""
    span: Span | None
    """Tokens of packed rows, else None."""


class Worker:
    """One of the independent warpgroups of persistent CTAs, with all that it knows.

    Args:
      config: has `warpgroups` and `ctas`.
    """

    def __init__(self, gmem: Any, smem: Any, *, config: Any, work: VisitSizes, interpreted: bool):
        self.gmem, self.smem, self.work = gmem, smem, work
        self.dev = Device(interpreted)
        self.wg = warpgroup_index()
        self.packed = gmem.first_visit is not None
        # Neighbours run on different SMs, so that few items, or the last ones, are spread over all of them.
        self.worker = self.wg * config.ctas + lax.axis_index("cta").astype(jnp.int32)
        self.workers = config.ctas * config.warpgroups
        visits = gmem.first_visit[work.N] if self.packed else jnp.int32(work.visits)
        self.num_items = self.items_of(visits)

    def items_of(self, visits: jax.Array) -> jax.Array:
        """The number of this warpgroup's items that belong to the first visits."""
        rounds = visits * self.work.HO + (self.workers - 1) - self.worker
        return lax.div(rounds, jnp.int32(self.workers))

    def place(self, n) -> Place:
        """The place of the n-th item."""
        item = self.worker + n * self.workers
        visit, head = lax.div(item, self.work.HO), lax.rem(item, self.work.HO)
        if self.packed:
            span = visit_span(visit, self.gmem)
            return Place(visit, head, jnp.int32(0), pl.ds(span.first_chunk * CHUNK, CHUNK), span)
        row, chunk = lax.div(visit, self.work.num_chunks), lax.rem(visit, self.work.num_chunks)
        return Place(visit, head, row, pl.ds(chunk * self.work.tokens, self.work.tokens), None)

    def rows(self, place: Place) -> Any:
        """Slice of the row's tokens, or of their rows where each has two."""
        return pl.ds(place.tokens.start * (CHUNK // self.work.tokens), CHUNK)


def owned(span: Span, dimension: int, shape: tuple[int, int]) -> jax.Array:
    """Marks the entries of an array whose index along a dimension is a token of the visit."""
    token, start = iota(shape, dimension), span.first_chunk * CHUNK
    return (token >= span.begin - start) & (token < span.end - start)
