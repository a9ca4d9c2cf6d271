"""Rows that `layer.row_product` multiplies: a warpgroup makes them from the residual stream, or from heads."""

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.device.memory import store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.gated_norm import ACTIVATIONS

WIDEST = 256
"""Columns of a piece of the matrix at most, and so of a dimension of what is copied at once."""

BYTES = 192 * 1024
"""Shared memory of a multiprocessor's CTAs for tiles of the matrix, at most."""


@runtime_checkable
class Row(Protocol):
    """How the row is made: static, and hashable."""

    def load(self, gmem: Any) -> Any:
        """Asks for all that the row is made of, to registers."""
        ...

    def make(self, gmem: Any, loaded: Any, x: Any, is_first: Any) -> None:
        """Writes the row to shared memory x; the first CTA also writes what else is asked for."""
        ...


@dataclasses.dataclass(frozen=True)
class Stream:
    """The norm of the residual stream."""

    eps: float
    first: int = 0
    """Number of the channel that x begins with; without y the stream may be some channels of an array."""

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
        if 8 * D * weight.dtype.itemsize > BYTES:
            return f"rows of {D} numbers of {weight.dtype}; the kernel takes {BYTES // 8} bytes"
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
        store_any(x, s * r.spread(scale, D) * w)
        if gmem.s is not None:
            pl.when(is_first)(lambda: r.store(gmem.s, 0, s))


@dataclasses.dataclass(frozen=True)
class Heads:
    """The gated norm of each head."""

    eps: float
    activation: str

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
        store_any(x, o * scale * w * ACTIVATIONS[self.activation].value(z, r.sigmoid(z)))
