"""The second half of a layer with a SwiGLU for one row, from the residual stream on, in one kernel."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import is_whole, token_op, usable

Weight = Array | jax.ShapeDtypeStruct


def takes(x: Weight, gate_up: Weight, down: Weight, implementation: str | None) -> bool:
    """Whether `dense_stream` takes a stream [.., D], branches [2 F, D] and a projection down [F, D], or such shapes:
    one row, on one device."""
    arrays = [a for a in (x, gate_up, down) if isinstance(a, jax.Array)]
    from pallas_kernels.device.grid_barrier import most_ctas
    from pallas_kernels.rows import dense_stream as kernels

    if x.size != x.shape[-1] or not usable(implementation, kernels) or not is_whole(*arrays):
        return False
    row = jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype)
    return kernels.check_supported(row, gate_up, down, most_ctas()) is None


@token_op
def dense_stream(
    x: Float[Array, "*S D"],
    y: Float[Array, "*P D"] | None,
    norm: Float[Array, " D"],
    gate_up: Float[Array, "F2 D"],
    down: Float[Array, "F D"],
    scales: Float[Array, "3 M N"] | None = None,
    *,
    eps: float,
    ahead: Sequence[jax.Array] = (),
    words: Any = None,
) -> tuple[Float[Array, "*S D"], Float[Array, "*S D"]]:
    """The stream s = x + y, and the SwiGLU of its norm v = s (mean(s^2) + eps)^(-1/2) norm, in one kernel.

        z = (silu(v A^T) * (v B^T)) W,   [A; B] = gate_up,   W = down

    Args: as for the kernel's function; x, for which `takes` is true, and y may have more axes, of length 1.

    Returns:
      s in x's dtype, and z, float32. Numerics: nothing in between is rounded.
    """
    from pallas_kernels.rows import dense_stream as kernels

    parts = None if y is None else y.reshape(-1, y.shape[-1])
    arrays = x.reshape(1, -1), parts, norm, gate_up, down, scales
    s, z = kernels.dense_stream(*arrays, eps=eps, ahead=tuple(ahead), words=words)
    return s.reshape(x.shape), z.reshape(x.shape)
