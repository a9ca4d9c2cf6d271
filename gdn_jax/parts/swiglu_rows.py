"""The SwiGLU of a few rows in one kernel, which reads the weights once and leaves the result in parts."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import is_whole, token_op, usable

Weight = Array | jax.ShapeDtypeStruct

TILES = (8, 16, 32)
"""Numbers of rows that the kernel multiplies by."""


def takes(x: Weight, gate_up: Weight, down: Weight, implementation: str | None) -> bool:
    """Whether `swiglu_rows` takes rows [.., D], branches [D, 2 F] and a projection down [F, D], or such shapes.

    It takes 2 to 32 rows on one device.
    """
    from pallas_kernels.rows import expert_swiglu, parts_norm

    arrays = [a for a in (x, gate_up, down) if isinstance(a, jax.Array)]
    rows, expert = math.prod(x.shape[:-1]), jax.ShapeDtypeStruct((1, *gate_up.shape), gate_up.dtype)
    if not 1 < rows <= TILES[-1] or not usable(implementation, expert_swiglu) or not is_whole(*arrays):
        return False
    tile = _tile(rows)
    if expert_swiglu.check_supported(x, expert, tile) is not None:
        return False
    return expert_swiglu.Config.of_one_tile(tile, *down.shape[::-1]).ctas <= parts_norm.MOST_PARTS


def _tile(rows: int) -> int:
    return next(n for n in TILES if rows <= n)


@token_op
def swiglu_rows(
    x: Float[Array, "*S D"], gate_up: Float[Array, "D F2"], down: Float[Array, "F D"]
) -> Float[Array, "P *S D"]:
    """The parts of (silu(x A) * (x B)) W, with [A | B] = gate_up and W = down, in one kernel.

    Args:
      x: rows for which `takes` is true; bfloat16 or float16, as the weights are.

    Returns:
      Parts whose sum is the result, float32. Numerics: sums are float32, what is between both products is rounded
      once.
    """
    from pallas_kernels.rows import expert_swiglu

    rows, (F, D) = math.prod(x.shape[:-1]), down.shape
    config = expert_swiglu.Config.of_one_tile(_tile(rows), D, F)
    few = jnp.pad(x.reshape(rows, D), ((0, -rows % expert_swiglu.GROUP), (0, 0)))
    parts = expert_swiglu.swiglu_in_pieces(few, gate_up, down, config=config)
    return parts[:, :rows].reshape(-1, *x.shape)
