"""Rows that `rows.row_product` multiplies: a warpgroup makes them from the residual stream, or from heads."""

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.device.lanes import load
from pallas_kernels.device.launch import Shaped, grid_index, room
from pallas_kernels.device.memory import store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.gated_norm import ACTIVATIONS
from pallas_kernels.rows import stream
from pallas_kernels.rows.weights import BLOCK

WIDEST = 256
"""Columns of a piece of the matrix at most, and so of a dimension of what is copied at once."""

OTHER_BYTES = 35 * 1024
"""Shared memory of a multiprocessor's CTAs for all but tiles of the matrix, at most."""


def bytes_for_tiles() -> int:
    """Shared memory of a multiprocessor's CTAs for tiles of the matrix, at most."""
    return room() - OTHER_BYTES


@runtime_checkable
class Row(Protocol):
    """How the row is made: static, and hashable.

    Fields:
      blocks: of a matrix of codes; None of others.
    """

    @property
    def blocks(self) -> "Blocks | None": ...

    def load(self, gmem: Any) -> Any:
        """Asks for all that the row is made of, to registers."""
        ...

    def make(self, gmem: Any, loaded: Any, x: Any, is_first: Any) -> None:
        """Writes the row to shared memory x; the first CTA also writes what else is asked for."""
        ...


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Where the rows of a CTA lie in a matrix of codes of E4M3, of which blocks of 128 rows share scales.

    The row is made once for each of these blocks, multiplied by its scales. Further inputs (GMEM): scales, float32,
    one for every column of each block, [F / 128, *shape of the row].
    """

    rows: int
    """Rows of the matrix that a CTA has, one after the other."""

    @property
    def count(self) -> int:
        """Blocks that the rows of a CTA lie in at most."""
        return 1 if BLOCK % self.rows == 0 else (self.rows - 2) // BLOCK + 2

    def of(self, row: Any) -> Any:
        """Which of the CTA's blocks a row of the matrix lies in."""
        return lax.div(row, jnp.int32(BLOCK)) - lax.div(grid_index() * self.rows, jnp.int32(BLOCK))

    def keep(self, gmem: Any, x: Any, v: jax.Array, first: int) -> None:
        """Writes lines of the row [n, width], once for each block, to shared memory x [blocks n, width]."""
        own, (blocks, lines, _) = lax.div(grid_index() * self.rows, jnp.int32(BLOCK)), gmem.scales.shape
        for n in range(self.count):
            place = jnp.minimum(own + n, blocks - 1), pl.ds(first, v.shape[0])
            scales = r.load_whole(gmem.scales.at[place])
            store_any(x.at[pl.ds(n * lines + first, v.shape[0])], v * scales)


def keep(blocks: Blocks | None, gmem: Any, x: Any, v: jax.Array, first: int = 0) -> None:
    """Writes lines of a row to shared memory x, from `first` on."""
    if blocks is None:
        store_any(x.at[pl.ds(first, v.shape[0])], v)
    else:
        blocks.keep(gmem, x, v, first)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The norm of the residual stream."""

    eps: float
    first: int = 0
    """Number of the channel that x begins with; without y the stream may be some channels of an array."""
    blocks: Blocks | None = None
    """A matrix of codes has them; None: the matrix is whole numbers."""

    @staticmethod
    def check_supported(x: Shaped, weight: Shaped) -> str | None:
        """Why the kernel cannot take a stream [1, D], or D of more channels, for a matrix [F, D]; None if it can."""
        if reason := stream.check_supported(x):
            return reason
        D = weight.shape[1]
        if D % WIDEST or D > r.WIDEST:
            return f"rows of {D}; the kernel takes multiples of {WIDEST} up to {r.WIDEST}"
        if 8 * D * weight.dtype.itemsize > bytes_for_tiles():
            return f"rows of {D} numbers of {weight.dtype}; the kernel takes {bytes_for_tiles() // 8} bytes"
        return None

    def load(self, gmem: Any) -> Any:
        """See `Row.load`: the weight of the norm and the parts of the sum."""
        D = gmem.w.shape[0]
        parts = [gmem.x.at[:, pl.ds(self.first, D)]]
        parts += [] if gmem.y is None else [gmem.y.at[pl.ds(n, 1)] for n in range(gmem.y.shape[0])]
        return r.load_along(gmem.w, 1), [r.load_whole(part) for part in parts]

    def make(self, gmem: Any, loaded: Any, x: Any, is_first: Any) -> None:
        """See `Row.make`."""
        w, parts = loaded
        s, D = stream.total(parts), gmem.w.shape[0]
        scale = lax.rsqrt(r.row_sum(s * s) / D + self.eps)
        keep(self.blocks, gmem, x, s * r.spread(scale, D) * w)
        if gmem.s is not None:
            pl.when(is_first)(lambda: r.store(gmem.s, 0, s))


MOST_NUMBERS = 96 * r.WARPS * r.LANES
"""Numbers of the parts of all heads that a warpgroup holds at most."""


@dataclasses.dataclass(frozen=True)
class Attended:
    """Heads of softmax attention as `rows.attention_rows` leaves them, times the sigmoids of their gates.

        o = sum_p f_p o_p / sum_p f_p total_p,   f_p = 2^(largest_p - max largest)

    References (GMEM): o [N, P, G', V], of whose G' heads the first `group` count; largest and total [N, P, G'], or
    None of one part that is divided; z, whose last heads are the gates, or None; in place length [1], to which the
    first CTA adds the token.
    """

    group: int
    blocks: Blocks | None = None

    @staticmethod
    def check_supported(H: int, V: int, channels: int, D: int) -> str | None:
        """Why H heads of V, gates among this number of channels, and rows of D cannot be taken; None if they can."""
        if V not in (64, 128, 256) or channels % V or D != H * V or D > MOST_NUMBERS:
            return f"{H} heads of {V}, {channels} channels, rows of {D}; the kernel takes heads of 64, 128 or 256"
        return None

    def load(self, gmem: Any) -> Any:
        """See `Row.load`: for each key head the parts, with their maxima and sums, and the gates."""
        (N, P, _, V), own = gmem.o.shape, pl.ds(0, self.group)
        layout, found = r.layout(V, self.group).reduce(1), []
        for n in range(N):
            parts = [r.load_whole(gmem.o.at[n, p, own]) for p in range(P)]
            sums = [
                None if x is None else [load(x.at[n, p, own], layout) for p in range(P)] for x in _sums(gmem)
            ]
            z = None
            if gmem.z is not None:
                first = gmem.z.shape[0] - (N - n) * self.group
                z = r.load_whole(gmem.z.at[pl.ds(first, self.group)])
            found.append((parts, *sums, z))
        return found

    def make(self, gmem: Any, loaded: Any, x: Any, is_first: Any) -> None:
        """See `Row.make`."""
        for n, (parts, largest, total, z) in enumerate(loaded):
            v, *others = (part.astype(jnp.float32) for part in parts)
            if total is not None:
                most = functools.reduce(jnp.maximum, largest)
                factors = [jnp.exp2(y - most) for y in largest]
                whole = functools.reduce(jnp.add, [f * y for f, y in zip(factors, total, strict=True)])
                scaled = [
                    r.spread(f / whole, y.shape[1]) * y for f, y in zip(factors, (v, *others), strict=True)
                ]
                v = functools.reduce(jnp.add, scaled)
            v = v if z is None else v * r.sigmoid(z.astype(jnp.float32))
            keep(self.blocks, gmem, x, v, n * self.group)

        @pl.when(is_first)
        def _():
            gmem.length[0] = gmem.length[0] + 1


def _sums(gmem: Any) -> tuple[Any, Any]:
    return gmem.largest, gmem.total


@dataclasses.dataclass(frozen=True)
class Heads:
    """The gated norm of each head."""

    eps: float
    activation: str
    blocks: Blocks | None = None
    """A matrix of codes has them; None: the matrix is whole numbers."""

    @staticmethod
    def check_supported(o: Shaped, channels: int) -> str | None:
        """Why the kernel cannot take heads [H, V] and gates among so many channels; None if it can."""
        H, V = o.shape
        if V not in (64, 128, 256) or H % r.WARPS or H * V > r.WIDEST:
            return f"{H} heads of {V}; the kernel takes multiples of 4, of 64, 128 or 256"
        if channels % V:
            return f"{channels} channels; the kernel takes whole heads of {V}"
        if o.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"o is {o.dtype}; the kernel takes float32, bfloat16 and float16"
        return None

    def load(self, gmem: Any) -> Any:
        """See `Row.load`: the heads, their gates and the weight of the norm."""
        H = gmem.o.shape[0]
        z = gmem.z.at[pl.ds(gmem.z.shape[0] - H, H)]
        return r.load_along(gmem.w, H), r.load_whole(gmem.o), r.load_whole(z)

    def make(self, gmem: Any, loaded: Any, x: Any, is_first: Any) -> None:
        """See `Row.make`."""
        w, *heads = loaded
        o, z = (part.astype(jnp.float32) for part in heads)
        V = o.shape[1]
        scale = r.spread(lax.rsqrt(r.row_sum(o * o) / V + self.eps), V)
        keep(self.blocks, gmem, x, o * scale * w * ACTIVATIONS[self.activation].value(z, r.sigmoid(z)))
