"""The product of a few rows and a weight by a kernel, for projections of one input in a copy for single tokens."""

import jax
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import is_whole, token_op, usable

Weight = Array | jax.ShapeDtypeStruct


def takes(x: Weight, weight: Weight) -> bool:
    """Whether `few_product` takes rows [.., D] and a weight [F, D], or such shapes.

    It takes a multiple of 8 rows, up to 32, on one device.
    """
    from pallas_kernels.rows import few_product as kernel

    arrays = [a for a in (x, weight) if isinstance(a, jax.Array)]
    return usable(None, kernel, reason=kernel.check_supported(x, weight)) and is_whole(*arrays)


@token_op
def few_product(x: Float[Array, "*S D"], weight: Float[Array, "F D"]) -> Float[Array, "*S F"]:
    """x @ weight.T in one kernel.

    Args:
      x: rows for which `takes` is true, bfloat16 or float16.
      weight: the weight, of the same dtype, a row for each output.

    Returns:
      [.., F] in that dtype. Numerics: float32 sums, rounded once.
    """
    from pallas_kernels.rows import few_product as kernel

    y = kernel.few_product(x.reshape(-1, x.shape[-1]), weight)
    return y.reshape(*x.shape[:-1], -1)
