"""Products of queries and keys whose decay differs from channel to channel, for any decay.

Inside a chunk of C tokens, with a_t = exp(g_t) the decay of a channel at token t, the chunked form needs

    products_ij = sum_c x_ic k_jc a_{j+1,c} ... a_{i,c}        i >= j

for x the queries and for x the erase keys. The decay cannot leave the sum over channels, and its usual split into
exp(G_i) and exp(-G_j) overflows. Here a pair (i, j) is computed in the smallest aligned block of 2, 4, 8, ... tokens
whose halves separate it: the earlier token's factor is the product of the decays from j + 1 to the end of the earlier
half, the later one's the product from the first token of the later half to i. Both are products of numbers in [0, 1].
So nothing overflows, -inf is a gate like any other, and a pair takes no gate after token i.

A block's factors are those of its halves times one number, so that no exponential is taken except exp(g). The
derivative of a factor is the factor times the sum of the dg of its own gates: no two sums that ought to cancel are
subtracted. All of these sums are one product with a constant matrix, which compiles in half the time that the
derivative of the halving took.

Source: the idea of sub-chunks is that of fla's `chunk_kda_fwd_intra`; halving them down to single tokens, which makes
every gate exact, is this project's.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.rule.chunks.stages import Numerics

# Halves of up to this many tokens are multiplied and summed elementwise on a GPU. On a CPU the derivative of that sum
# takes twice as long as one of a product of matrices, even of one row.
_ELEMENTWISE_TOKENS = 2


class DecayedProducts(NamedTuple):
    """Results of `decayed_products`."""

    products: tuple[Float[Array, "*S C C"], ...]
    """For each of the rows, lower triangular with its diagonal."""
    from_start: Float[Array, "*S C K"]
    """Decay from the chunk's start to each token, its own gate included: a_1 ... a_i."""
    to_end: Float[Array, "*S C K"]
    """Decay from each token to the chunk's end, its own gate not included: a_{j+1} ... a_C."""


def decayed_products(
    rows: Sequence[Float[Array, "... C K"]],
    k: Float[Array, "*Q C K"],
    g: Float[Array, "*S C K"],
    numerics: Numerics,
) -> DecayedProducts:
    """products_ij = sum_c rows_ic k_jc exp(g_{j+1,c} + ... + g_{i,c}) for i >= j, else 0, for each of the rows.

    Args:
      rows, k: queries or erase keys, and keys, [.., C, K] in the dtype of g; leading axes broadcast to those of g.
      g: log decay <= 0 of each token and channel [.., C, K], -inf for a reset. C is a power of two.
      numerics: how the products are computed.
    """
    *lead, C, K = g.shape
    stacked = jnp.stack([jnp.broadcast_to(x, g.shape) for x in rows], -2)
    k = jnp.broadcast_to(k, g.shape)
    # XLA's CPU compiles a loop for each axis. A mesh may split the axes of rows and heads: one device merges them.
    axes = (prod(lead),) if jax.device_count() == 1 else tuple(lead)
    arrays = stacked.reshape(*axes, C, len(rows), K), k.reshape(*axes, C, K), g.reshape(*axes, C, K)
    products, *decays = _decayed_products(numerics, *arrays)
    # Without the barrier XLA's CPU assembles the products again wherever a block of them is read.
    products = lax.optimization_barrier(products).reshape(*lead, C, len(rows), C)
    from_start, to_end = (x.reshape(g.shape) for x in decays)
    return DecayedProducts(tuple(products[..., i, :] for i in range(len(rows))), from_start, to_end)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _decayed_products(numerics: Numerics, rows: jax.Array, k: jax.Array, g: jax.Array):
    """Products [.., C, R, C] of rows [.., C, R, K], and the decays from the chunk's start and to its end."""
    levels, from_start, to_end = _levels(jnp.exp(g))
    below = [_products(numerics, *_operands(rows, k, level)) for level in levels]
    return _assembled((rows * k[..., None, :]).sum(-1), below), from_start, to_end


@_decayed_products.defjvp
def _decayed_products_jvp(numerics, primals, tangents):
    (rows, k, g), (drows, dk, dg) = primals, tangents
    levels, from_start, to_end = _levels(jnp.exp(g))
    *parts, start, end = _sums_of_gates(dg)
    below, dbelow = [], []
    for level, early, late in zip(levels, parts[0::2], parts[1::2], strict=True):
        x, columns = _operands(rows, k, level)
        dx, dcolumns = _operands(drows, dk, level)
        dx = dx + x * _for_rows(late.reshape(level.late.shape), x)
        dcolumns = dcolumns + columns * early.reshape(level.early.shape)
        below.append(_products(numerics, x, columns))
        dbelow.append(_products(numerics, dx, columns) + _products(numerics, x, dcolumns))
    diagonal = (rows * k[..., None, :]).sum(-1)
    ddiagonal = (drows * k[..., None, :]).sum(-1) + (rows * dk[..., None, :]).sum(-1)
    out = _assembled(diagonal, below), from_start, to_end
    return out, (_assembled(ddiagonal, dbelow), from_start * start, to_end * end)


class _Level(NamedTuple):
    """Decays of the halves of all blocks of two halves, [.., blocks, tokens of a half, K]."""

    early: jax.Array
    """From after each token to the end of the earlier half."""
    late: jax.Array
    """From the start of the later half to each token, its own gate included."""


def _levels(alpha: jax.Array) -> tuple[list[_Level], jax.Array, jax.Array]:
    """The decays of blocks of 2, 4, ... C tokens, and those from the chunk's start and to its end."""
    levels, from_start, to_end = [], alpha, jnp.ones_like(alpha)
    size = 1
    while size < alpha.shape[-2]:
        (start_early, start_late), (end_early, end_late) = _halves(from_start, size), _halves(to_end, size)
        levels.append(_Level(end_early, start_late))
        from_start = jnp.concatenate([start_early, start_late * start_early[..., -1:, :]], -2)
        to_end = jnp.concatenate([end_early * start_late[..., -1:, :], end_late], -2)
        from_start, to_end = from_start.reshape(alpha.shape), to_end.reshape(alpha.shape)
        size *= 2
    return levels, from_start, to_end


def _sums_of_gates(dg: jax.Array) -> list[jax.Array]:
    """Sums of dg over the gates of every factor: early and late of each level [.., C / 2, K], from_start, to_end."""
    C = dg.shape[-2]
    token, gate = np.arange(C)[:, None], np.arange(C)
    sums, size = [], 1
    while size < C:
        block, own = token // size, gate // size == token // size
        sums += [(own & (gate > token))[block[:, 0] % 2 == 0], (own & (gate <= token))[block[:, 0] % 2 == 1]]
        size *= 2
    sums += [gate <= token, gate > token]
    out = []
    for at in range(0, len(sums), 6):  # at most four arrays of dg's size in one
        some = sums[at : at + 6]
        matrix = jnp.asarray(np.concatenate(some), dg.dtype)
        matrix = jnp.broadcast_to(matrix, (*dg.shape[:-2], *matrix.shape))
        summed = jnp.einsum("...mt,...tk->...mk", matrix, dg, precision=lax.Precision.HIGHEST)
        out += lax.split(summed, [len(x) for x in some], summed.ndim - 2)
    return out


def _halves(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The earlier and the later half of every block of two halves of [.., C, K], each [.., blocks, size, K]."""
    x = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * size), 2, size, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _operands(rows: jax.Array, k: jax.Array, level: _Level) -> tuple[jax.Array, jax.Array]:
    """Rows of the later halves [.., blocks, size R, K] and keys of the earlier ones, each with its decay."""
    size, (*lead, C, R, K) = level.late.shape[-2], rows.shape
    late = rows.reshape(*lead, C // (2 * size), 2, size * R, K)[..., 1, :, :]
    return late * _for_rows(level.late, late), _halves(k, size)[0] * level.early


def _for_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """[.., size, K] repeated for the R rows of each token, [.., size R, K]."""
    *lead, size, K = x.shape
    return jnp.broadcast_to(x[..., None, :], (*lead, size, rows.shape[-2] // size, K)).reshape(rows.shape)


def _products(numerics: Numerics, x: jax.Array, k: jax.Array) -> jax.Array:
    """x k^T of every block: [.., size R, K] and [.., size, K] to [.., size R, size]."""
    if k.shape[-2] <= _ELEMENTWISE_TOKENS and jax.default_backend() != "cpu":
        x, k = (y.astype(numerics.operand).astype(numerics.accumulate) for y in (x, k))
        return (x[..., :, None, :] * k[..., None, :, :]).sum(-1)
    return numerics.einsum("...ik,...jk->...ij", x, k)


def _assembled(diagonal: jax.Array, below: list[jax.Array]) -> jax.Array:
    """[.., C, R, C] from the diagonal [.., C, R] and what stands below the diagonal in blocks of 2, 4, ... tokens."""
    *lead, C, R = diagonal.shape
    i, j = np.arange(C)[:, None, None], np.arange(C)
    products = jnp.where(jnp.asarray(i == j), diagonal[..., None], 0)
    for x in below:
        size = x.shape[-1]
        x = x.reshape(*lead, C // (2 * size), 1, size * R, 1, size)
        x = jnp.broadcast_to(x, (*lead, C // (2 * size), 2, size * R, C // size, size))
        mine = (i > j) & (i ^ j >= size) & (i ^ j < 2 * size)
        products = products + jnp.where(jnp.asarray(mine), x.reshape(products.shape), 0)
    return products
