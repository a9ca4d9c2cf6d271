"""Rows that `layer.row_product` multiplies: a warpgroup makes them from the residual stream, or from heads."""

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.device.launch import grid_index, room
from pallas_kernels.device.memory import store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.dense_weights import BLOCK
from pallas_kernels.layer.gated_norm import ACTIVATIONS

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

    def keep(self, gmem: Any, x: Any, v: jax.Array) -> None:
        """Writes the row [n, width], once for each block, to shared memory x [blocks n, width]."""
        own, last = lax.div(grid_index() * self.rows, jnp.int32(BLOCK)), gmem.scales.shape[0] - 1
        for n in range(self.count):
            scales = r.load_whole(gmem.scales.at[jnp.minimum(own + n, last)])
            store_any(x.at[pl.ds(n * v.shape[0], v.shape[0])], v * scales)


def keep(blocks: Blocks | None, gmem: Any, x: Any, v: jax.Array) -> None:
    """Writes a row to shared memory x."""
    if blocks is None:
        store_any(x, v)
    else:
        blocks.keep(gmem, x, v)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The norm of the residual stream."""

    eps: float
    first: int = 0
    """Number of the channel that x begins with; without y the stream may be some channels of an array."""
    blocks: Blocks | None = None
    """A matrix of codes has them; None: the matrix is whole numbers."""

    @staticmethod
    def check_supported(
        x: jax.ShapeDtypeStruct | jax.Array, weight: jax.ShapeDtypeStruct | jax.Array
    ) -> str | None:
        """Why the kernel cannot take a stream [1, D], or D of more channels, for a matrix [F, D]; None if it can."""
        if x.shape[0] != 1:
            return f"{x.shape[0]} rows; the kernel takes one"
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"x is {x.dtype}; the kernel takes float32, bfloat16 and float16"
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
        s, D = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts]), gmem.w.shape[0]
        scale = lax.rsqrt(r.row_sum(s * s) / D + self.eps)
        keep(self.blocks, gmem, x, s * r.spread(scale, D) * w)
        if gmem.s is not None:
            pl.when(is_first)(lambda: r.store(gmem.s, 0, s))


@dataclasses.dataclass(frozen=True)
class Heads:
    """The gated norm of each head."""

    eps: float
    activation: str
    blocks: Blocks | None = None
    """A matrix of codes has them; None: the matrix is whole numbers."""

    @staticmethod
    def check_supported(o: jax.ShapeDtypeStruct | jax.Array, channels: int) -> str | None:
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
