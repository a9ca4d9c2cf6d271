"""The second half of a layer with a SwiGLU for one row, from the residual stream on, in one kernel."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import fused_op, is_whole, usable
from gdn_jax.parts.unsummed import Parts, addends

Weight = Array | jax.ShapeDtypeStruct


def takes(x: Weight, gate_up: Weight, down: Weight, implementation: str | None) -> bool:
    """Whether `dense_stream` takes a stream [.., D], branches [2 F, D] and a projection down [F, D], or such shapes:
    one row, on one device."""
    arrays = [a for a in (x, gate_up, down) if isinstance(a, jax.Array)]
    if x.size != x.shape[-1] or not usable(implementation) or not is_whole(*arrays):
        return False
    from pallas_kernels.device.grid_barrier import most_ctas
    from pallas_kernels.layer.dense_stream import check_supported

    row = jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype)
    return check_supported(row, gate_up, down, most_ctas()) is None


def dense_stream(
    x: Float[Array, "*S D"],
    y: Float[Array, "*P D"] | Parts | None,
    norm: Float[Array, " D"],
    gate_up: Float[Array, "F2 D"],
    down: Float[Array, "F D"],
    *,
    eps: float,
    ahead: Sequence[jax.Array] = (),
) -> tuple[Float[Array, "*S D"], Float[Array, "*S D"]]:
    """The stream s = x + y, and the SwiGLU of its norm v = s (mean(s^2) + eps)^(-1/2) norm, in one kernel.

        z = (silu(v A^T) * (v B^T)) W,   [A; B] = gate_up,   W = down

    The result can be differentiated once, in reverse.

    Args:
      x: residual stream, for which, with the weights, `takes` is true.
      y: what is added to it, or parts of that, [P, .., D]; None: nothing.
      norm: weight of the norm, float32.
      gate_up: rows of both branches, one branch after the other.
      down: rows of the projection down.
      eps: of the norm.
      ahead: as for `row_product.stream_product`.

    Returns:
      s in x's dtype, and z, float32. Numerics: nothing in between is rounded.
    """
    return _dense(eps, x, addends(y), norm, gate_up, down, tuple(ahead))


def _by_kernel(eps: float, x: Any, y: Any, *arrays: Any) -> tuple[Array, Array]:
    from pallas_kernels.layer.dense_stream import dense_stream

    *own, ahead = arrays
    parts = None if y is None else y.reshape(-1, y.shape[-1])
    s, z = dense_stream(x.reshape(1, -1), parts, *own, eps=eps, ahead=ahead)
    return s.reshape(x.shape), z.reshape(x.shape)


def _plain(eps: float, x: Any, y: Any, norm: Any, gate_up: Any, down: Any) -> tuple[Array, Array]:
    """The operation in plain JAX, for its derivative."""
    s, wide = x.astype(jnp.float32), (w.astype(jnp.float32) for w in (gate_up, down))
    if y is not None:
        s = s + jnp.sum(y.astype(jnp.float32).reshape(-1, *x.shape), axis=0)
    v, (branches, last) = s * jax.lax.rsqrt(jnp.mean(s * s) + eps) * norm, wide
    a, b = jnp.split(jnp.einsum("...d,fd->...f", v, branches, precision="highest"), 2, axis=-1)
    z = jnp.einsum("...f,fd->...d", jax.nn.silu(a) * b, last, precision="highest")
    return (x if y is None else s.astype(x.dtype)), z


_dense = fused_op(
    lambda eps, *arrays: (_by_kernel(eps, *arrays), arrays[:-1]),
    lambda eps, saved, cotangents: (*jax.vjp(partial(_plain, eps), *saved)[1](cotangents), None),
)
