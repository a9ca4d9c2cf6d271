"""Tokens of a call in whole chunks: what the kernels of this room work on, and the way back. No device code.

All tokens lie in one row of places, 64 to a chunk, and every sequence begins a chunk. Where there is no token, keys,
values and write strengths are 0 and nothing decays, which changes no state. So kernels need no masks, no bounds and
no sequence but the one whose chunks they walk over.

The forward reads q, k and v of packed tokens where they lie instead, see `spans`. A tile must end within them, so the
tokens of a chunk at their end lie at the end of its places, and not at the beginning.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.ampere.spans import Spans
from pallas_kernels.device.layouts import CHUNK, round_up
from pallas_kernels.work.tables import ChunkTables


class Packed(NamedTuple):
    """`ChunkTables` whose chunks are tiles of the tokens."""

    first_chunk: Int[Array, " N1"]
    token: Int[Array, " places"]
    place: Int[Array, " T"]
    spans: Spans

    @classmethod
    def of(cls, tables: ChunkTables, T: int) -> "Packed":
        """The tables with the tokens of each chunk at the rows of its tile."""
        xp: Any = np if isinstance(tables.token, np.ndarray) else jnp
        token = tables.token.reshape(-1, CHUNK)
        start, count = xp.where(token[:, 0] < T, token[:, 0], 0), (token < T).sum(1)
        first = xp.minimum(start, max(T - CHUNK, 0))
        shift = start - first
        row = xp.arange(CHUNK)[None]
        is_token = (row >= shift[:, None]) & (row < (shift + count)[:, None])
        places = tables.token.shape[0]
        chunk = xp.minimum(tables.place // CHUNK, len(token) - 1)
        place = xp.where(tables.place < places, tables.place + shift[chunk], places)
        arrays = tables.first_chunk, xp.where(is_token, first[:, None] + row, T).reshape(-1), place
        spans = Spans._make(x.astype(np.int32) for x in (first, shift, shift + count))
        return cls._make((*(x.astype(np.int32) for x in arrays), spans))


class Rows:
    """Where the tokens of [B, T, ..] lie.

    tables: of packed rows, None where every row of the batch is one sequence.
    first_chunk [N + 1] int32: first chunk of each sequence, and the number of chunks used.
    """

    def __init__(self, B: int, T: int, tables: Packed | None):
        self.B, self.T, self.tables = B, T, tables
        self.padded = round_up(T, CHUNK)
        if tables is None:
            self.first_chunk: Any = np.arange(B + 1, dtype=np.int32) * (self.padded // CHUNK)
            self.chunks = B * self.padded // CHUNK
        else:
            self.first_chunk, self.chunks = tables.first_chunk, tables.token.shape[0] // CHUNK

    def spread(self, x: jax.Array) -> jax.Array:
        """[B, T, ..] as [places, ..], with zeros where there is no token."""
        if self.tables is not None:
            return jnp.take(x[0], self.tables.token, axis=0, mode="fill", fill_value=0)
        if self.padded != self.T:
            x = jnp.pad(x, ((0, 0), (0, self.padded - self.T), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(-1, *x.shape[2:])

    @property
    def spans(self) -> Spans | None:
        """Where chunks lie among packed tokens; None where tokens are spread."""
        return None if self.tables is None else self.tables.spans

    def tiled(self, x: jax.Array) -> jax.Array:
        """[B, T, ..] for kernels that know `spans`: packed tokens as they lie, at least a chunk, else `spread`."""
        if self.tables is None:
            return self.spread(x)
        x = x[0]
        return x if self.T >= CHUNK else jnp.pad(x, ((0, CHUNK - self.T), *((0, 0),) * (x.ndim - 1)))

    def back(self, x: jax.Array) -> jax.Array:
        """[places, ..] as [B, T, ..], with zeros for tokens of no sequence."""
        if self.tables is not None:
            return jnp.take(x, self.tables.place, axis=0, mode="fill", fill_value=0)[None]
        return x.reshape(self.B, self.padded, *x.shape[1:])[:, : self.T]

    def by_chunk(self, x: Float[Array, "B T HO"]) -> Float[Array, "chunks HO C"]:
        """Numbers of tokens and heads by chunk and head."""
        return self.spread(x).reshape(self.chunks, CHUNK, -1).swapaxes(1, 2)

    def by_token(self, x: Float[Array, "chunks HO C"]) -> Float[Array, "B T HO"]:
        """The same back."""
        return self.back(x.swapaxes(1, 2).reshape(self.chunks * CHUNK, -1))
