"""Weights that are kept in 8 bits with a scale for each block, and products by them.

    W[f, d] = codes[f, d] * scales[f, d // BLOCK]

Codes are E4M3. Rows are outputs, as in a checkpoint, so that a product of one row of activations sums along memory.
The blocks of a checkpoint are BLOCK x BLOCK; here every row has scales of its own, which are the same for all rows of
such a block, so that rows can be taken apart and put side by side.

Such weights are not trained: to differentiate with respect to them raises NotImplementedError. Gradients of
activations go through the products.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.shapes import accumulation_dtype

BLOCK = 128
"""Columns that share a scale."""
LARGEST = 448.0
"""The largest number in E4M3."""
FEW = 4
"""Rows for which codes may be read once each: a weight that is dequantised is read, and written and read in 16 bits,
five bytes in all. Worked out, not measured."""
SMALLEST_SCALE = 2.0**-126
"""The least number that bfloat16 holds with all its digits."""


def quantised(weight: Float[Array, "*E F D"]) -> tuple[Float[Array, "*E F D"], Float[Array, "*E F N"]]:
    """Codes and scales of a weight: the largest number of a block of BLOCK x BLOCK becomes 448.

    Scales are numbers of bfloat16, as published checkpoints have them, in float32. Codes are rounded to nearest.

    Args:
      weight: [.., outputs, inputs], any floating dtype.
    """
    *_, F, D = weight.shape
    wide = weight.astype(jnp.float32)
    around = [(0, 0)] * (weight.ndim - 2) + [(0, -F % BLOCK), (0, -D % BLOCK)]
    blocks = jnp.pad(jnp.abs(wide), around).reshape(*weight.shape[:-2], -(-F // BLOCK), BLOCK, -1, BLOCK)
    scales = jnp.maximum(jnp.max(blocks, axis=(-3, -1)) / LARGEST, SMALLEST_SCALE)
    scales = lax.reduce_precision(scales, 8, 7)  # of bfloat16; XLA drops a cast to it and back on a GPU
    scales = jnp.repeat(scales, BLOCK, axis=-2)[..., :F, :]
    return (wide / _spread(scales, D)).astype(jnp.float8_e4m3fn), scales


def _spread(scales, D: int):
    """The scale of each number of rows of D."""
    return jnp.repeat(scales, BLOCK, axis=-1)[..., :D]


@jax.custom_jvp
def _wide(codes, scales):
    """The numbers that codes and scales mean, in float32."""
    return codes.astype(jnp.float32) * _spread(scales, codes.shape[-1])


@_wide.defjvp
def _refuse(*_):
    raise NotImplementedError(
        "weights that are kept in 8 bits have no derivative: load the model without weights='float8' to train it"
    )


def dequantised(
    codes: Float[Array, "*E F D"], scales: Float[Array, "*E F N"], dtype: DTypeLike
) -> Float[Array, "*E F D"]:
    """codes * scales in float32, rounded once to dtype: the weight of a checkpoint that is loaded in this dtype."""
    return _wide(codes, scales).astype(dtype)


def product(
    x: Float[Array, "*S D"], codes: Float[Array, "F D"], scales: Float[Array, "F N"]
) -> Float[Array, "*S F"]:
    """x @ W.T in x's dtype: of up to `FEW` rows `by_sums` on a GPU, else `by_whole_weight`."""
    if math.prod(x.shape[:-1]) > FEW:
        return by_whole_weight(x, codes, scales)
    return lax.platform_dependent(x, codes, scales, cuda=by_sums, default=by_whole_weight)


def by_sums(
    x: Float[Array, "*S D"], codes: Float[Array, "F D"], scales: Float[Array, "F N"]
) -> Float[Array, "*S F"]:
    """x @ W.T as products and sums, of which XLA makes one kernel of a GPU that reads the codes for every row.

    Sums are in float32 (float64 when x is), of weights that are not rounded to x's dtype.
    """
    wide = accumulation_dtype(x)
    y = jnp.sum(x[..., None, :].astype(wide) * _wide(codes, scales).astype(wide), axis=-1)
    return y.astype(x.dtype)


def by_whole_weight(
    x: Float[Array, "*S D"], codes: Float[Array, "F D"], scales: Float[Array, "F N"]
) -> Float[Array, "*S F"]:
    """x @ W.T with W dequantised to x's dtype, at every call.

    The barrier keeps a compiler from doing it for all weights before a loop of tokens begins, which would need the
    memory that 8 bits save.
    """
    x, codes, scales = lax.optimization_barrier((x, codes, scales))
    weight = dequantised(codes, scales, x.dtype)
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


@dataclasses.dataclass(frozen=True)
class Dequantising:
    """The product of a projection that keeps its weight in 8 bits: who multiplies by the dequantised weight itself
    does so in its dtype, as `products.PLAIN`, and who can calls the projection instead."""

    def __call__(self, x: Array, w: Array, dimension_numbers: Any, **options: Any) -> Array:
        """Multiplies as `lax.dot_general`."""
        return lax.dot_general(x, w, dimension_numbers, **options)


DEQUANTISING = Dequantising()
"""The product of all projections that keep their weights in 8 bits."""
