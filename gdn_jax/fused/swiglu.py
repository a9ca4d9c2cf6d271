"""The second half of a SwiGLU: the product of its two branches and the projection down."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.fused.kernels import inner_axes, run, usable
from gdn_jax.partitioning import on_explicit_shards
from gdn_jax.shapes import accumulation_dtype

_MOST_PARTS = 8
"""Into how many parts F is split at most. Of more parts, more tokens are a block of the kernel."""


def swiglu_down(
    gate: Float[Array, "*S F"],
    up: Float[Array, "*S F"],
    kernel: Float[Array, "F D"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*S D"]:
    """(silu(gate) * up) @ kernel.

    With the kernels, the product of the branches is not kept for the backward pass but made again there beside their
    derivatives, and the result can be differentiated once, in reverse.

    Args:
      gate, up: [.., F], any floating dtype, both alike.
      kernel: projection [F, D], any floating dtype, used in gate's.
      implementation: None takes a kernel where there is one (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not.

    Returns:
      [.., D] in gate's dtype. Numerics: the product of the branches in float32 (float64 when gate is), rounded once.
    """
    from pallas_kernels.layer import swiglu

    kernel = kernel.astype(gate.dtype)
    if usable(implementation, swiglu.check_supported(gate)):
        names, sizes = _axes(gate)
        sizes.pop("h", None)  # the projection sums over it
        return on_explicit_shards(_swiglu_down, (gate, up, kernel), (names, names, ". ."), names, sizes)
    wide = accumulation_dtype(gate)
    h = (jax.nn.silu(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)
    return h @ kernel


def _axes(gate) -> tuple[str, dict[str, int]]:
    from pallas_kernels.layer import swiglu

    return inner_axes(gate, swiglu.BLOCK, _MOST_PARTS)


@jax.custom_vjp
def _swiglu_down(gate, up, kernel):
    names, sizes = _axes(gate)
    return run(_product, None, (gate, up), (names, names), names, sizes) @ kernel


def _product(_, gate, up):
    from pallas_kernels.layer import swiglu

    return swiglu.swiglu(gate.reshape(-1), up.reshape(-1)).reshape(gate.shape)


def _swiglu_down_fwd(gate, up, kernel):
    return _swiglu_down(gate, up, kernel), (gate, up, kernel)


def _swiglu_down_bwd(saved, dy):
    gate, up, kernel = saved
    dh = jnp.einsum("...d,fd->...f", dy, kernel)
    names, sizes = _axes(gate)
    dgate, dup, h = run(_derivatives, None, (gate, up, dh), (names,) * 3, (names,) * 3, sizes)
    return dgate, dup, jnp.einsum("...f,...d->fd", h, dy)


def _derivatives(_, gate, up, dh):
    """Of the product of the branches, from its cotangent; and the product."""
    from pallas_kernels.layer import swiglu

    parts = swiglu.swiglu_backward(gate.reshape(-1), up.reshape(-1), dh.reshape(-1))
    return tuple(x.reshape(gate.shape) for x in parts)


_swiglu_down.defvjp(_swiglu_down_fwd, _swiglu_down_bwd)
