"""The SwiGLU of a few rows by one kernel, which reads the weights once and leaves the result in parts."""

import math

import jax
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import is_whole, token_op, usable

Weight = Array | jax.ShapeDtypeStruct

TILES = (8, 16, 32)
"""Numbers of rows that the kernel multiplies by."""


def takes(x: Weight, gate_up: Weight, down: Weight, implementation: str | None) -> bool:
    """Whether `few_swiglu` takes rows [.., D], branches [D, 2 F] and a projection down [F, D], or such shapes.

    It takes a multiple of 8 rows, up to 32, on one device.
    """
    from pallas_kernels.rows import expert_swiglu, parts_norm

    rows, expert = math.prod(x.shape[:-1]), jax.ShapeDtypeStruct((1, *gate_up.shape), gate_up.dtype)
    if rows % expert_swiglu.GROUP or not 0 < rows <= TILES[-1] or not usable(implementation, expert_swiglu):
        return False
    if expert_swiglu.check_supported(x, expert, _tile(rows)) is not None:
        return False
    config = expert_swiglu.Config.of_one_tile(_tile(rows), *down.shape[::-1])
    arrays = [a for a in (x, gate_up, down) if isinstance(a, jax.Array)]
    return config.ctas <= parts_norm.MOST_PARTS and is_whole(*arrays)


@token_op
def few_swiglu(
    x: Float[Array, "*S D"], gate_up: Float[Array, "D F2"], down: Float[Array, "F D"]
) -> Float[Array, "P *S D"]:
    """The parts of (silu(x A) * (x B)) W, with [A | B] = gate_up and W = down, in one kernel.

    Args: those that `takes` accepts, bfloat16 or float16.

    Returns:
      Parts whose sum is the result, float32. Numerics: sums are float32, what is between both products is rounded
      once.
    """
    from pallas_kernels.rows import expert_swiglu

    (F, D), rows = down.shape, x.reshape(-1, x.shape[-1])
    config = expert_swiglu.Config.of_one_tile(_tile(len(rows)), D, F)
    return expert_swiglu.swiglu_in_pieces(rows, gate_up, down, config=config).reshape(-1, *x.shape)


def _tile(rows: int) -> int:
    return next(n for n in TILES if rows <= n)
