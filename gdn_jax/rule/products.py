"""Products of queries and keys whose decay differs from channel to channel, for any decay.

Inside a chunk of C tokens, with a_t = exp(g_t) the decay of a channel at token t, the chunked form needs

    products_ij = sum_c x_ic k_jc a_{j+1,c} ... a_{i,c}        i >= j

for x the queries and for x the erase keys. The decay cannot leave the sum over channels, and its usual split into
exp(G_i) and exp(-G_j) overflows. Here a pair (i, j) is computed in the smallest aligned block of 2, 4, 8, ... tokens
whose halves separate it: the later token's factor is the product of the decays from the first token of the later half
to i, the earlier one's the product from j to that token. Both are products of numbers in [0, 1]. So nothing
overflows, -inf is a gate like any other, and a pair takes no gate after token i.

A block's factors are those of its halves times one number, so that no exponential is taken beside exp(g). Their
derivative is that of products: no two sums that ought to cancel are subtracted.

Source: the idea of sub-chunks is that of fla's `chunk_kda_fwd_intra`; halving them down to single tokens, which makes
every gate exact, is this project's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.rule.chunks.stages import Numerics

# Blocks of up to so many tokens are multiplied and summed elementwise: a product of matrices of one or two rows costs
# more than its arithmetic.
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
    alpha: Float[Array, "*S C K"],
    numerics: Numerics,
) -> DecayedProducts:
    """products_ij = sum_c rows_ic k_jc alpha_{j+1,c} ... alpha_{i,c} for i >= j, else 0, for each of the rows.

    Args:
      rows, k: queries or erase keys, and keys, [.., C, K] in the dtype of alpha; leading axes broadcast to alpha's.
      alpha: decays exp(g) in [0, 1] of each token and channel [.., C, K]. C is a power of two.
      numerics: how the products are computed.
    """
    C = alpha.shape[-2]
    # Decays inside a block: from its first token to token i, without the first one's gate, and from j to its end.
    after_first = to_end = jnp.ones_like(_blocks(alpha, 1))
    products = [jnp.broadcast_to((x * k).sum(-1), alpha.shape[:-1])[..., None, None] for x in rows]
    size = 1
    while size < C:
        anchor = _blocks(alpha, size)[..., 1::2, :1, :]  # the gate of the first token of the later half
        (first_early, first_late), (end_early, end_late) = _halves(after_first), _halves(to_end)
        columns = _halves(_blocks(k, size))[0] * (end_early * anchor)
        below = [_product(_halves(_blocks(x, size))[1] * first_late, columns, numerics) for x in rows]
        products = [_merged(x, y) for x, y in zip(products, below, strict=True)]
        whole_early, whole_late = first_early[..., -1:, :], anchor * first_late[..., -1:, :]
        after_first = jnp.concatenate([first_early, first_late * (whole_early * anchor)], -2)
        to_end = jnp.concatenate([end_early * whole_late, end_late], -2)
        size *= 2
    from_start = after_first[..., 0, :, :] * alpha[..., :1, :]
    return DecayedProducts(tuple(x[..., 0, :, :] for x in products), from_start, to_end[..., 0, :, :])


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """[.., C, K] to [.., C / size, size, K]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The earlier and the later of every two neighbouring blocks [.., n, size, K], each [.., n / 2, size, K]."""
    return x[..., 0::2, :, :], x[..., 1::2, :, :]


def _product(x: jax.Array, k: jax.Array, numerics: Numerics) -> jax.Array:
    """x k^T of every block."""
    if x.shape[-2] <= _ELEMENTWISE_TOKENS:
        x, k = (y.astype(numerics.operand).astype(numerics.accumulate) for y in (x, k))
        return (x[..., :, None, :] * k[..., None, :, :]).sum(-1)
    return numerics.einsum("...ik,...jk->...ij", x, k)


def _merged(products: jax.Array, below: jax.Array) -> jax.Array:
    """Lower triangular blocks of twice the size, from those on the diagonal and what stands below the diagonal."""
    early, late = products[..., 0::2, :, :], products[..., 1::2, :, :]
    top = jnp.concatenate([early, jnp.zeros_like(below)], -1)
    return jnp.concatenate([top, jnp.concatenate([below, late], -1)], -2)
