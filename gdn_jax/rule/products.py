"""Products of queries and keys whose decay differs from channel to channel, for any decay.

Inside a chunk of C tokens, with a_t = exp(g_t) the decay of a channel at token t, the chunked form needs

    products_ij = sum_c x_ic k_jc a_{j+1,c} ... a_{i,c}        i >= j

for x the queries and for x the erase keys. The decay cannot leave the sum over channels, and its usual split into
exp(G_i) and exp(-G_j) overflows. Here a pair (i, j) is computed in the smallest aligned block of 2, 4, 8, ... tokens
whose halves separate it: the earlier token's factor is the product of the decays from j + 1 to the end of the earlier
half, the later one's the product from the first token of the later half to i. Both are products of numbers in [0, 1].
So nothing overflows, -inf is a gate like any other, and a pair takes no gate after token i.

A factor is exp of the sum of its own gates, and all of these sums are one product with a constant matrix of zeros and
ones: nothing is subtracted, in the derivative neither, where a factor's is the factor times the sum of the dg. Blocks
of four sizes are one array and one product, so that XLA compiles few operations.

Source: the idea of sub-chunks is that of fla's `chunk_kda_fwd_intra`; halving them down to single tokens, which makes
every gate exact, is this project's.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.rule.chunks.stages import Numerics

# Levels of halves that are one array: with two rows a token, its operands have four times the keys' size.
_LEVELS = 4


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


def _decayed_products(numerics: Numerics, rows: jax.Array, k: jax.Array, g: jax.Array):
    """Products [.., C, R, C] of rows [.., C, R, K], and the decays from the chunk's start and to its end."""
    *lead, C, R, K = rows.shape
    axis, sizes = len(lead), [1 << level for level in range(C.bit_length() - 1)]
    below = []
    for some in (sizes[at : at + _LEVELS] for at in range(0, len(sizes), _LEVELS)):
        early, late = _decays(g, some)
        x = _halves(rows, 1, some, axis) * late[..., None, :]
        columns = _halves(k, 0, some, axis) * early
        x = x.reshape(*columns.shape[:-2], C // 2 * R, K)
        products = numerics.einsum("...ik,...jk->...ij", x, columns).reshape(*lead, -1, C // 2, R, C // 2)
        below += [products[..., level, :, :, :] for level in range(len(some))]
    token, gate = np.arange(C)[:, None], np.arange(C)
    from_start, to_end = (_decay(jnp.asarray(x, g.dtype), g) for x in (gate <= token, gate > token))
    return _assembled((rows * k[..., None, :]).sum(-1), below), from_start, to_end


def _halves(x: jax.Array, half: int, sizes: list[int], axis: int) -> jax.Array:
    """The earlier (0) or later (1) halves, of these sizes, of all blocks: [.., C, ...] to [.., sizes, C / 2, ...]."""
    lead, C, rest = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    blocks = (x.reshape(*lead, C // (2 * size), 2, size, *rest) for size in sizes)
    halves = (lax.index_in_dim(y, half, axis + 1, keepdims=False) for y in blocks)
    return jnp.stack([y.reshape(*lead, C // 2, *rest) for y in halves], axis)


def _decays(g: jax.Array, sizes: list[int]) -> tuple[jax.Array, jax.Array]:
    """Decays to the end of the earlier halves, and from the start of the later ones, [.., sizes, C / 2, K] each."""
    C, K = g.shape[-2:]
    token, gate = np.arange(C)[:, None], np.arange(C)
    early, late = [], []
    for size in sizes:
        half, own = token[:, 0] // size % 2, token // size == gate // size
        early.append((own & (gate > token))[half == 0])
        late.append((own & (gate <= token))[half == 1])
    both = (_decay(jnp.asarray(np.concatenate(x), g.dtype), g) for x in (early, late))
    before, after = (x.reshape(*g.shape[:-2], len(sizes), C // 2, K) for x in both)
    return before, after


@jax.custom_jvp
def _decay(gates: jax.Array, g: jax.Array) -> jax.Array:
    """exp of the sum of the gates that each row of `gates` [M, C] has, zeros and ones: [.., M, K]."""
    # A reset is a number that no sum brings back, for 0 * -inf is NaN.
    g = jnp.maximum(g, jnp.finfo(g.dtype).min / g.shape[-2])
    # Without the barrier XLA's CPU takes an exponential again wherever a part of them is read.
    return lax.optimization_barrier(jnp.exp(_sums(gates, g)))


@_decay.defjvp
def _decay_jvp(primals, tangents):
    out = _decay(*primals)
    return out, out * _sums(primals[0], tangents[1])


def _sums(gates: jax.Array, g: jax.Array) -> jax.Array:
    gates = jnp.broadcast_to(gates, (*g.shape[:-2], *gates.shape))
    return jnp.einsum("...mt,...tk->...mk", gates, g, precision=lax.Precision.HIGHEST)


def _assembled(diagonal: jax.Array, below: list[jax.Array]) -> jax.Array:
    """[.., C, R, C] from the diagonal [.., C, R] and the levels below it, [.., C / 2, R, C / 2] each."""
    *lead, C, R = diagonal.shape
    i, j = np.arange(C)[:, None, None], np.arange(C)
    products = jnp.where(jnp.asarray(i == j), diagonal[..., None], 0)
    for level, x in enumerate(below):
        size = 1 << level
        blocks = C // (2 * size)
        x = x.reshape(*lead, blocks, 1, size, R, blocks, 1, size)
        # Later halves of rows, earlier ones of columns.
        padded = {len(lead) + 1: (1, 0, 0), len(lead) + 5: (0, 1, 0)}
        x = lax.pad(x, jnp.zeros((), x.dtype), [padded.get(axis, (0, 0, 0)) for axis in range(x.ndim)])
        one_block = jnp.asarray(i // (2 * size) == j // (2 * size))
        products = products + jnp.where(one_block, x.reshape(products.shape), 0)
    return products
