"""Inverse of a unit lower triangular [64, 64] matrix by merging diagonal blocks, in registers. For kernels.

Blocks of 2 are I - L; then X <- X - X L' X with L' the part of L that joins two blocks, up to 64. Exact in exact
arithmetic and stable, unlike powers of L. Operands are float16 and sums float32. Blocks up to 16 live as a [64, 16]
array (warp w holds the w-th diagonal block) and are merged by warp-level mma without leaving the registers; 16 -> 32
exchanges one tile through shared memory; 32 -> 64 is two wgmmas.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.layouts import CHUNK, WGMMA, along_columns, along_rows, iota, zeros
from pallas_kernels.device.operations import Device

HALF = CHUNK // 2
BLOCK = 16
"""Rows of the diagonal blocks that one warp inverts."""


def parts_of(x):
    """Parts of [64, 64]: its diagonal blocks [64, 16], the blocks left of the odd ones [64, 16] and its left half
    [64, 32]."""
    w = iota((CHUNK, BLOCK), 0) // BLOCK
    diagonal = x[:, 0:BLOCK]
    for n in (1, 2, 3):
        diagonal = jnp.where(w == n, x[:, BLOCK * n : BLOCK * (n + 1)], diagonal)
    left = jnp.where(w == 3, x[:, 2 * BLOCK : 3 * BLOCK], x[:, 0:BLOCK])
    return diagonal, left, x[:, 0:HALF]


def _of_one_sequence(first, part: int):
    """Marks the entries of part number `part` that join a token to one of its sequence, not after it.

    first [64] in layout ROW.
    """
    if part == 2:  # of which only the lower half is read, where no column is after a row
        return iota((CHUNK, HALF), 1) >= along_rows(first, HALF)
    block = iota((CHUNK, BLOCK), 0) // BLOCK - part
    own = block * BLOCK + iota((CHUNK, BLOCK), 1) >= along_rows(first, BLOCK)
    if part == 0:
        own = own & (iota((CHUNK, BLOCK), 0) % BLOCK >= iota((CHUNK, BLOCK), 1))
    return own


def _kept(x, first, part: int):
    """x with zeros where it joins tokens of two sequences.

    A product of zeros with what another sequence holds is no zero where that is NaN or infinite.
    """
    return x if first is None else jnp.where(_of_one_sequence(first, part), x, jnp.zeros((), x.dtype))


def _kept_transposed(dev: Device, x, first):
    """x with zeros as by `_kept`, for the transposed blocks left of the diagonal."""
    if first is None:
        return x
    marks = jnp.where(_of_one_sequence(first, 1), 1.0, 0.0).astype(jnp.float16)
    return jnp.where(dev.blocks_transpose(marks) != 0.0, x, 0.0)


def invert(dev: Device, parts, first, beta, l_smem, x_smem, xt_smem, level=None):
    """A as two halves [64, 32] float32. parts hold -K K^T, so that every merge is X + X L' X with L' = -L.

    beta [64] in layout COL. level [64, 16], where rows of a block of 16 do not stand in the order of time: which they
    come together in, as below.
    """
    strengths = parts_of(along_columns(beta, CHUNK))

    def scaled(n):
        part = parts[n] * strengths[n]
        if first is None:
            return part
        # Zeros stay zeros whatever beta the padding holds: NaN times 0 would spread to the tokens beside it.
        return _kept(jnp.where(parts[n] != 0.0, part, 0.0), first, n)

    w, i, j = iota((CHUNK, BLOCK), 0) // BLOCK, iota((CHUNK, BLOCK), 0) % BLOCK, iota((CHUNK, BLOCK), 1)
    if level is None:
        level = i ^ j  # 2^n <= level < 2^(n + 1): first together in a block of 2^(n + 1)
    nothing = zeros((CHUNK, BLOCK), jnp.float32)

    l = scaled(0)
    l_t = dev.blocks_transpose(l.astype(jnp.float16))
    l_left = scaled(1).astype(jnp.float16)
    l_smem[...] = scaled(2).astype(jnp.float16)

    x = jnp.where(level == 0, 1.0, jnp.where(level == 1, l, 0.0))
    x_half = x.astype(jnp.float16)
    for n in (1, 2, 3):  # to blocks of 4, 8, 16
        x_l = dev.blocks_multiply_add(nothing, x_half, l_t)
        x_l = _kept(jnp.where((level >> n) == 1, x_l, 0.0), first, 0).astype(jnp.float16)
        x = _kept(dev.blocks_multiply_add(x, x_l, dev.blocks_transpose(x_half)), first, 0)
        x_half = x.astype(jnp.float16)

    # To blocks of 32: rows of an odd block w gain X_w L[w, w-1] X_{w-1}. Row 16 + r of xt_smem is row r of X^T, so
    # rows 0 to 63 are the transposed blocks of w - 1.
    xt_smem[BLOCK : CHUNK + BLOCK] = dev.blocks_transpose(x_half)
    dev.commit()
    below = plgpu.load(xt_smem.at[0:CHUNK], layout=WGMMA)
    l_x_t = dev.blocks_multiply_add(nothing, below, l_left)  # (L[w, w-1] X_{w-1})^T
    l_x_t = _kept_transposed(dev, l_x_t, first).astype(jnp.float16)
    gained = _kept(dev.blocks_multiply_add(nothing, x_half, l_x_t), first, 1)
    odd = (w & 1) == 1
    x32 = lax.concatenate([jnp.where(odd, gained, x), jnp.where(odd, x, 0.0)], 1)

    # To 64: the lower left quarter is X_1 L_10 X_0, computed for all rows and kept for the lower ones.
    lower = iota((CHUNK, HALF), 0) >= HALF
    x_smem[...] = x32.astype(jnp.float16)
    dev.commit()
    right = jnp.where(lower, x32, 0.0)
    x_l = _kept(dev.product(right.astype(jnp.float16), l_smem.at[HALF:CHUNK]), first, 2)
    quarter = _kept(dev.product(x_l.astype(jnp.float16), x_smem.at[0:HALF]), first, 2)
    return jnp.where(lower, quarter, x32), right
