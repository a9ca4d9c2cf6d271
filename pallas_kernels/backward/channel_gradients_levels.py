"""Products of pairs of tokens in registers, level by level, and the sums that make dg of them.

With X one of the cotangents of pairs, dP or dL, S = X + X^T below and above the diagonal, and f [C, K] the factors of
a level of `chunks.pairs`: a pair is its later token's row of X and its earlier one's column. So at every level one
product with S serves both. Its operand y has q f (or e f) at later tokens and k f at earlier ones, and

    z = f (S y)        is dq (de) of a later token, and a part of dk of an earlier one.

dg is a sum of terms that each hold the decay they are the gradient of. A pair (i, j) of a level with anchor a, that
is j < a <= i, adds the same number to every t from j + 1 to i. Summed over one side of the pairs that number is w:
q z_q + e z_e at later tokens, k (z_q + z_e) at earlier ones.

    dg_t += sum of w_i over later tokens i >= t                for t > a
            sum of w_j over earlier tokens j < t               for t <= a

No sum holds anything that it takes away again.

Everything here is [64, 16]: a warp's block of 16 tokens and 16 channels, so that what a level needs stays in
registers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks.merging import BLOCK, HALF
from pallas_kernels.chunks.pair_levels import Masks, places
from pallas_kernels.device import rows as block_rows
from pallas_kernels.device.layouts import CHUNK, COL, WGMMA, along_columns, iota, zeros
from pallas_kernels.device.operations import Device

TOTALS = 5
"""Arrays of which the sums over blocks of 16 tokens are needed, in their order: w of the levels of 16 and of 32, what
is read of the state (q . dq and e . de), what is written to it (k . dk), and h dh."""


class Score(NamedTuple):
    """The symmetric sum S of dP or of dL, rounded, with zeros on its diagonal. In shared memory, from where every use
    loads it anew: it would take too many registers."""

    within: Any
    """Its diagonal blocks [64, 16]."""
    near: Any
    """Blocks of columns of the neighbour at the level of 16, for every block of rows [64, 16]."""
    far: Any
    """The other half of the columns, for both halves of the rows [64, 32]."""

    def write(self, products: tuple[jax.Array, jax.Array], factor: float, halves: bool = False) -> jax.Array:
        """Writes the sum of what lies below the diagonal of x [64, 64] and its transpose, and returns the diagonal of
        x in layout ROW, all times factor.

        products: x and its transpose.
        halves: whether tokens are two rows, see `work.halves`.
        """
        x, x_t = products
        block, (i, j) = iota((CHUNK, BLOCK), 0) // BLOCK, places(halves)

        def of_rows(y, order):
            """The block of columns order[w] in the rows of block w."""
            chosen = y[:, BLOCK * order[0] : BLOCK * (order[0] + 1)]
            for w in range(1, block_rows.BLOCKS):
                columns = y[:, BLOCK * order[w] : BLOCK * (order[w] + 1)]
                chosen = jnp.where(block == w, columns, chosen)
            return chosen * factor

        own, own_t, odd = of_rows(x, (0, 1, 2, 3)), of_rows(x_t, (0, 1, 2, 3)), (block & 1) == 1
        within = jnp.where(i > j, own, jnp.where(i < j, own_t, 0.0))
        near = jnp.where(odd, of_rows(x, (1, 0, 3, 2)), of_rows(x_t, (1, 0, 3, 2)))
        far = jnp.where(iota((CHUNK, HALF), 0) < HALF, x_t[:, HALF:CHUNK], x[:, 0:HALF]) * factor
        for tile, y in zip(self, (within, near, far), strict=True):
            tile[...] = y.astype(tile.dtype)
        return jnp.sum(jnp.where(i == j, own, 0.0), axis=1)


class Tokens(NamedTuple):
    """Queries, keys and erase keys of 16 channels, float32."""

    q: jax.Array
    k: jax.Array
    e: jax.Array

    def operands(self, factor: jax.Array, later: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The operands y of dP and of dL at a level; later marks the tokens of later halves."""
        return jnp.where(later, self.q, self.k) * factor, jnp.where(later, self.e, self.k) * factor


class Sums(NamedTuple):
    """Gradients of 16 channels so far."""

    dq: jax.Array
    dk: jax.Array
    """Without what comes through the erase keys, also where these are the keys."""
    de: jax.Array
    dg: jax.Array

    def with_level(self, factor, later, operands, products) -> tuple["Sums", jax.Array]:
        """The sums with a level's part of dq, dk and de, and the level's w."""
        read, erased = products
        w = operands[0] * read + operands[1] * erased
        read, erased = factor * read, factor * erased
        dq, de = self.dq + jnp.where(later, read, 0.0), self.de + jnp.where(later, erased, 0.0)
        return self._replace(dq=dq, de=de, dk=self.dk + jnp.where(later, 0.0, read + erased)), w


def _times_blocks(dev: Device, start: jax.Array, blocks: jax.Array, x: jax.Array) -> jax.Array:
    """Adds to start the product of every 16x16 block with its rows of x, rounded to its dtype."""
    return dev.blocks_multiply_add(start, blocks, dev.blocks_transpose(x.astype(blocks.dtype)))


def products_within(dev: Device, masks: Masks, n: int, scores, operands) -> list[jax.Array]:
    """S y of dP and of dL at the level of halves of 2^n tokens, up to 8."""
    is_level, nothing = (masks.level >> n) == 1, zeros((CHUNK, BLOCK), jnp.float32)
    blocks = [plgpu.load(score.within, layout=WGMMA) for score in scores]
    of_level = [jnp.where(is_level, x, jnp.zeros((), x.dtype)) for x in blocks]
    return [_times_blocks(dev, nothing, s, y) for s, y in zip(of_level, operands, strict=True)]


def products_between(dev: Device, tiles: Any, far: bool, scores, operands) -> list[jax.Array]:
    """S y of dP and of dL at the level of halves of 16 tokens, or of 32.

    tiles: shared memory for both operands.
    """
    for n, y in enumerate(operands):
        tiles.at[n][...] = y.astype(tiles.dtype)
    dev.commit()
    block, first = iota((CHUNK, BLOCK), 0) // BLOCK, iota((CHUNK, HALF), 0) < HALF
    nothing = jnp.zeros((), tiles.dtype)

    def product(n: int) -> jax.Array:
        x = plgpu.load(scores[n].far if far else scores[n].near, layout=WGMMA)
        if far:
            halves = [jnp.where(first, nothing, x), jnp.where(first, x, nothing)]
        else:
            of_columns = [jnp.where(block == w ^ 1, x, nothing) for w in range(block_rows.BLOCKS)]
            halves = [lax.concatenate(of_columns[:2], 1), lax.concatenate(of_columns[2:], 1)]

        def add_halves(add):
            for half, x in enumerate(halves):
                add(0, x, tiles.at[n, HALF * half : HALF * (half + 1)])

        return dev.accumulate([zeros((CHUNK, BLOCK), jnp.float32)], add_halves)[0]

    return [product(n) for n in range(2)]  # one after the other: together they would take too many registers


def _ones(marks: jax.Array) -> jax.Array:
    return jnp.where(marks, 1.0, 0.0)


def write_gate_blocks(dev: Device, masks: Masks, tiles: Any) -> None:
    """Writes which tokens of a block of 16 count for dg of which others, as blocks of ones and zeros [8, 64, 16]: at
    the levels of 1 to 8, of 16, of 32, and of what is read of the state, and what is written to it.

    From the level of 16 on the first token of a block counts whole blocks alone: see `gates_of_blocks`.
    """
    (i, j), block = places(masks.halves), iota((CHUNK, BLOCK), 0) // BLOCK
    for n in range(4):
        later, same_half = ((i >> n) & 1) == 1, (masks.level >> n) == 0
        is_anchor, other_half = (i & (2 * (1 << n) - 1)) == (1 << n), (masks.level >> n) == 1
        after = jnp.where(is_anchor, _ones(other_half), _ones(same_half & (j >= i)))
        before = _ones(same_half & (j < i))
        tiles.at[n][...] = jnp.where(later, after, before).astype(tiles.dtype)
    after, before = _ones((j >= i) & (i > 0)), _ones(j < i)
    near, far = jnp.where((block & 1) == 1, after, before), jnp.where(block >= 2, after, before)
    for n, x in enumerate((near, far, after, before), 4):
        tiles.at[n][...] = x.astype(tiles.dtype)
    dev.commit()


def add_gates(
    dev: Device, dg: jax.Array, x: jax.Array, tile: Any, totals: Any = None, *, parts: int = 1
) -> jax.Array:
    """dg with what x adds inside blocks of 16.

    Args:
      tile: of those of `write_gate_blocks` that of x; None for an array that counts as whole blocks only.
      totals: shared memory for the sums of x over blocks [4, 16]; None where they are not needed.
      parts: numbers of bfloat16 that x is the sum of inside of a block; sums over blocks take the first.
    """
    xs_t = []
    for _ in range(parts):
        part = x.astype(jnp.bfloat16)
        x = x - part.astype(jnp.float32)
        xs_t.append(dev.blocks_transpose(part))
    if totals is not None:
        ones = plgpu.layout_cast(jnp.ones((CHUNK, BLOCK), jnp.bfloat16), WGMMA)
        sums = dev.blocks_multiply_add(zeros((CHUNK, BLOCK), jnp.float32), ones, xs_t[0])
        block_rows.store_first_rows(dev, totals, sums)
    if tile is not None:
        counted = plgpu.load(tile, layout=WGMMA)
        for x_t in xs_t:
            dg = dev.blocks_multiply_add(dg, counted, x_t)
    return dg


def gates_of_blocks(totals: Any, gl: jax.Array) -> jax.Array:
    """The part of dg that is sums over whole blocks.

    Args:
      totals: shared memory with the sums over blocks of the arrays of `TOTALS` [5, 4, 16].
      gl: the decay of the whole chunk, in layout COL.
    """
    near, far, read, late, inner = (
        [plgpu.load(totals.at[n, w], layout=COL) for w in range(block_rows.BLOCKS)] for n in range(TOTALS)
    )
    last = gl * (inner[0] + inner[1] + inner[2] + inner[3])
    others = [
        last + read[1] + read[2] + read[3],
        last + read[2] + read[3] + late[0],
        last + read[3] + late[0] + late[1],
        last + late[0] + late[1] + late[2],
    ]
    firsts = [x + y for x, y in zip(others, read, strict=True)]
    firsts[1] = firsts[1] + near[0] + far[0]
    firsts[2] = firsts[2] + far[0] + far[1]
    firsts[3] = firsts[3] + near[2] + far[3]
    others[1], others[2] = others[1] + far[0], others[2] + far[3]
    block, is_first = iota((CHUNK, BLOCK), 0) // BLOCK, places(False)[0] == 0

    def of_blocks(values):
        x = along_columns(values[0], CHUNK)
        for w in range(1, block_rows.BLOCKS):
            x = jnp.where(block == w, along_columns(values[w], CHUNK), x)
        return x

    return jnp.where(is_first, of_blocks(firsts), of_blocks(others))
