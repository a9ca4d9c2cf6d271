"""The levels of `chunks.pairs` in registers: where tokens stand, decays inside blocks, and sums of products."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.chunks.merging import BLOCK, HALF
from pallas_kernels.device import rows as block_rows
from pallas_kernels.device.layouts import CHUNK, along_rows, iota, zeros
from pallas_kernels.device.operations import Device

SLICE = 32
"""Channels that a warpgroup works on at a time: as many as registers allow."""


def places(halves: bool) -> tuple[jax.Array, jax.Array]:
    """Numbers of the row and of the column in a 16x16 block, as rows follow each other in time; see `work.halves`."""
    i, j = iota((CHUNK, BLOCK), 0) & (BLOCK - 1), iota((CHUNK, BLOCK), 1)
    return (_in_time(i), _in_time(j)) if halves else (i, j)


def _in_time(i: jax.Array) -> jax.Array:
    return ((i & 7) << 1) | (i >> 3)


class Masks:
    """Where the rows and pairs of a chunk stand.

    Args:
      columns: of the arrays whose rows are marked.
      halves: whether tokens are two rows, see `work.halves`.
    """

    def __init__(self, dev: Device, columns: int = SLICE, halves: bool = False):
        self.dev, self.halves = dev, halves
        row = iota((CHUNK, columns), 0)
        self.bits = [((row >> n) & 1) == 1 for n in range(6)]
        self.bits[3] = block_rows.second_half(dev, columns)
        """Whether a row is in the later half of its block of 2^(n + 1)."""
        if halves:
            self.bits[:4] = [self.bits[3], *(block_rows.token_bit(dev, columns, n) for n in range(3))]
        i, j = places(halves)
        self.level, self.below = i ^ j, i > j
        block = iota((CHUNK, BLOCK), 0) // BLOCK
        self.odd, self.last = (block & 1) == 1, block == block_rows.BLOCKS - 1

    def of_first(self, x: jax.Array, other: float) -> jax.Array:
        """The array [64, columns] whose first halves are x [32, columns], and its second ones a number."""
        return block_rows.joined(self.dev, x, zeros(x.shape, jnp.float32, block_rows.HALF) + other)

    def of_second(self, x: jax.Array) -> jax.Array:
        """The array [64, columns] whose second halves are x [32, columns], and its first ones zeros."""
        return block_rows.joined(self.dev, zeros(x.shape, jnp.float32, block_rows.HALF), x)

    def exchanged(self, x: jax.Array, n: int) -> jax.Array:
        """Row i ^ 2^n of x in the place of row i, as rows follow each other in time; n is 0 to 3.

        Above level 0 both rows of a token hold the same numbers here, for the second one does not decay.
        """
        if self.halves and n > 0:
            return block_rows.exchanged_tokens(self.dev, x, 1 << (n - 1))
        return block_rows.exchanged(self.dev, x, BLOCK // 2 if self.halves else 1 << n)

    def computed(self, arrays: Any, decays: Any) -> tuple[Any, Any]:
        """Both trees, which LLVM cannot put off computing until they are used.

        Args:
          decays: where tokens are two rows, the same in both rows.
        """
        if not self.halves:
            return lax.optimization_barrier((arrays, decays))
        decays = jax.tree.map(lambda x: block_rows.half_of(self.dev, x, 0), decays)
        arrays, decays = lax.optimization_barrier((arrays, decays))
        return arrays, jax.tree.map(lambda x: block_rows.joined(self.dev, x, x), decays)


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
        cls, masks: Masks, halves: "Decays | None", alpha: jax.Array, n: int
    ) -> "tuple[jax.Array, Decays]":
        """Factors of the tokens in the products of the two halves of a block, and the decays in it.

        Args:
          halves: decays in blocks of 2^n tokens; None for single tokens, whose decays are alpha.
        """
        later = masks.bits[n]
        if halves is None:
            other = masks.exchanged(alpha, 0)
            factor, from_first = jnp.where(later, 1.0, other), jnp.where(later, alpha, 1.0)
            return factor, cls(
                jnp.where(later, other, alpha), jnp.where(later, alpha, other), from_first, factor
            )
        first, rest, from_first, to_end = halves
        other_first = masks.exchanged(first, n)
        other_rest = masks.exchanged(rest, n)
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
    near: tuple[jax.Array, ...]
    """Products with the tokens of block 0, and of block 2, [64, 16]; the rows of the block behind count. Or one array
    of the products of each block with the one before it."""
    far: jax.Array
    """Products with the tokens of the first half [64, 32]; the rows of the second one count."""

    @classmethod
    def of_nothing(cls, near: int = 2) -> "Sums":
        """The sums before the first slice. near: arrays of that name."""
        block = zeros((CHUNK, BLOCK), jnp.float32)
        return cls(block, (block,) * near, zeros((CHUNK, HALF), jnp.float32))

    def _left(self, masks: Masks) -> jax.Array:
        """The products of blocks 1 and 3 with the block before [64, 16]; other rows hold anything."""
        return self.near[0] if len(self.near) == 1 else jnp.where(masks.last, self.near[1], self.near[0])

    def strictly_lower(self, masks: Masks) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The products below the diagonal, as `chunks.merging.invert` takes a matrix in parts."""
        return jnp.where(masks.below, self.diagonal, 0.0), self._left(masks), self.far

    def lower(self, masks: Masks, same: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The products on and below the diagonal, in halves [64, 32].

        Args:
          same: those on the diagonal, in layout ROW.
        """
        diagonal = jnp.where(masks.below, self.diagonal, 0.0)
        diagonal = jnp.where(masks.level == 0, along_rows(same, BLOCK), diagonal)
        left = self._left(masks)
        pairs = lax.concatenate(
            [jnp.where(masks.odd, left, diagonal), jnp.where(masks.odd, diagonal, 0.0)], 1
        )
        lower = iota((CHUNK, HALF), 0) >= HALF
        return jnp.where(lower, self.far, pairs), jnp.where(lower, pairs, 0.0)


class Halves(NamedTuple):
    """Erase keys, queries and keys of a slice, float16."""

    e: jax.Array
    """The array of the keys where these erase."""
    q: jax.Array
    k: jax.Array

    def scaled(self, factor: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Operands of the rows of erase keys, of those of queries, and of the columns."""
        factor = factor.astype(jnp.float16)
        rows_q, columns = self.q * factor, self.k * factor
        return columns if self.e is self.k else self.e * factor, rows_q, columns


def products_within(
    dev: Device, masks: Masks, halves: Halves, alpha: jax.Array, erased: Sums, read: Sums
) -> tuple[Sums, Sums, Decays]:
    """The sums with a slice's products of tokens of one block of 16, and the decays inside of these blocks.

    Args:
      alpha: decays of the tokens.
    """

    def blocks(total, rows, columns, n):
        added = total
        for part in (slice(0, BLOCK), slice(BLOCK, SLICE)):
            added = dev.blocks_multiply_add(added, rows[:, part], columns[:, part])
        return jnp.where((masks.level >> n) == 1, added, total)

    decays = None
    for n in range(4):
        factor, decays = Decays.merged(masks, decays, alpha, n)
        rows_e, rows_q, columns = halves.scaled(factor)
        erased = erased._replace(diagonal=blocks(erased.diagonal, rows_e, columns, n))
        read = read._replace(diagonal=blocks(read.diagonal, rows_q, columns, n))
    assert decays is not None
    return erased, read, decays
