"""The levels of `chunks.pairs` in registers: where tokens stand, decays inside blocks, and sums of products."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.chunks.merging import BLOCK, HALF
from pallas_kernels.device import rows as block_rows
from pallas_kernels.device.layouts import CHUNK, iota, zeros
from pallas_kernels.device.operations import Device

SLICE = 32
"""Channels that a warpgroup works on at a time: as many as registers allow."""


class Masks:
    """Where the rows and pairs of a chunk stand.

    Args:
      columns: of the arrays whose rows are marked.
    """

    def __init__(self, dev: Device, columns: int = SLICE):
        row = iota((CHUNK, columns), 0)
        self.bits = [((row >> n) & 1) == 1 for n in range(6)]
        self.bits[3] = block_rows.second_half(dev, columns)
        """Whether a token is in the later half of its block of 2^(n + 1)."""
        i, j = iota((CHUNK, BLOCK), 0) & (BLOCK - 1), iota((CHUNK, BLOCK), 1)
        self.level, self.below = i ^ j, i > j
        block = iota((CHUNK, BLOCK), 0) // BLOCK
        self.odd, self.last = (block & 1) == 1, block == block_rows.BLOCKS - 1


class Decays(NamedTuple):
    """Decays inside aligned blocks of 2^n tokens, of every token and channel."""

    first: jax.Array
    """The decay of the block's first token."""
    rest: jax.Array
    """The decay of the block's other tokens together."""
    from_first: jax.Array
    """The decay from the block's first token to this one, without the first one's own."""
    to_end: jax.Array
    """The decay from this token to the block's end, without its own."""

    @classmethod
    def merged(
        cls, dev: Device, halves: "Decays | None", alpha: jax.Array, later: jax.Array, n: int
    ) -> "tuple[jax.Array, Decays]":
        """Factors of the tokens in the products of the two halves of a block, and the decays in it.

        Args:
          halves: decays in blocks of 2^n tokens; None for single tokens, whose decays are alpha.
          later: marks the tokens of the later halves.
        """
        if halves is None:
            other = block_rows.exchanged(dev, alpha, 1)
            factor, from_first = jnp.where(later, 1.0, other), jnp.where(later, alpha, 1.0)
            return factor, cls(
                jnp.where(later, other, alpha), jnp.where(later, alpha, other), from_first, factor
            )
        first, rest, from_first, to_end = halves
        other_first = block_rows.exchanged(dev, first, 1 << n)
        other_rest = block_rows.exchanged(dev, rest, 1 << n)
        return jnp.where(later, from_first, to_end * other_first), cls(
            jnp.where(later, other_first, first),
            rest * other_rest * jnp.where(later, first, other_first),
            jnp.where(later, from_first * (other_rest * first), from_first),
            jnp.where(later, to_end, to_end * (other_first * other_rest)),
        )


class Sums(NamedTuple):
    """Products of tokens, summed over the slices so far, for the erase keys or for the queries as rows."""

    diagonal: jax.Array
    """Products in the diagonal blocks [64, 16]; only what lies below the diagonal counts."""
    near: tuple[jax.Array, jax.Array]
    """Products with the tokens of block 0, and of block 2, [64, 16]; the rows of the block behind count."""
    far: jax.Array
    """Products with the tokens of the first half [64, 32]; the rows of the second one count."""

    @classmethod
    def of_nothing(cls) -> "Sums":
        """The sums before the first slice."""
        block = zeros((CHUNK, BLOCK), jnp.float32)
        return cls(block, (block, block), zeros((CHUNK, HALF), jnp.float32))
