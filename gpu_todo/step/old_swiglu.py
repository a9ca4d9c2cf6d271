"""A SwiGLU: two projections of one input, the product of one with the SiLU of the other, and the projection down."""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from gdn_jax.fused.kernels import FEW_ROWS, run, token_axes, usable
from gdn_jax.partitioning import on_explicit_shards
from gdn_jax.shapes import accumulation_dtype

BRANCHES_NAME = "swiglu_branches"
"""`checkpoint_name` of all that the kernels keep for the backward pass beside x and the weights: the branches and
their product."""


def swiglu(
    x: Float[Array, "*S D"],
    gate_kernel: Float[Array, "D F"],
    up_kernel: Float[Array, "D F"],
    down_kernel: Float[Array, "F E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*S E"]:
    """(silu(x @ gate_kernel) * (x @ up_kernel)) @ down_kernel.

    With the kernels both branches are one product, in the backward pass too, whose cotangent of x is then one product
    instead of two and their sum. What is kept for it are the branches and the product of the two. The result can then
    be differentiated once, in reverse.

    Args:
      x: input [.., D], any floating dtype.
      gate_kernel, up_kernel: projections [D, F], any floating dtype, used in x's.
      down_kernel: projection [F, E], likewise.
      implementation: None takes a kernel where there is one (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not.

    Returns:
      [.., E] in x's dtype. Numerics: the branches are rounded to x's dtype; their product is in float32 (float64 when
      x is), rounded once.
    """
    gate_kernel, up_kernel, down_kernel = (w.astype(x.dtype) for w in (gate_kernel, up_kernel, down_kernel))
    if usable(implementation, _check_supported(x, gate_kernel)):
        weight = side_by_side(gate_kernel, up_kernel)
        names, sizes = _axes(x, gate_kernel.shape[1])
        operands = names, ". .", ". ."
        return on_explicit_shards(_swiglu, (x, weight, down_kernel), operands, names, sizes)
    gate, up = (checkpoint_name(x @ w, BRANCHES_NAME) for w in (gate_kernel, up_kernel))
    return gated(gate, up) @ down_kernel


def gated(gate: Float[Array, "*S F"], up: Float[Array, "*S F"]) -> Float[Array, "*S F"]:
    """silu(gate) * up in float32 (float64 when gate is), rounded once to gate's dtype."""
    wide = accumulation_dtype(gate)
    return (jax.nn.silu(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)


def side_by_side(gate: Float[Array, "*S F"], up: Float[Array, "*S F"]) -> Float[Array, "*S F2"]:
    """Both in one array as the kernels read them: some numbers of gate, as many of up, and so on."""
    from pallas_kernels.layer.swiglu import GROUP

    groups = (x.reshape(*x.shape[:-1], -1, 1, GROUP) for x in (gate, up))
    return jnp.concatenate([*groups], axis=-2).reshape(*gate.shape[:-1], -1)


def _check_supported(x, gate_kernel) -> str | None:
    from pallas_kernels.layer import swiglu

    rows, F = math.prod(x.shape[:-1]), gate_kernel.shape[1]
    if rows <= FEW_ROWS:
        return f"x has {rows} rows; the kernel takes more than {FEW_ROWS}"
    if F % swiglu.GROUP:
        return f"gate_kernel has {F} columns; the kernel takes a multiple of {swiglu.GROUP}"
    return swiglu.check_supported(jax.ShapeDtypeStruct((*x.shape[:-1], F), x.dtype))


def _axes(x, F: int) -> tuple[str, dict[str, int]]:
    from pallas_kernels.layer.swiglu import BLOCK

    return token_axes(x, BLOCK // math.gcd(F, BLOCK))


@jax.custom_vjp
def _swiglu(x, weight, down_kernel):
    return _swiglu_fwd(x, weight, down_kernel)[0]


def _swiglu_fwd(x, weight, down_kernel):
    branches = checkpoint_name(x @ weight, BRANCHES_NAME)
    names, sizes = _axes(x, len(down_kernel))
    h = run(_product, None, (branches,), (names,), names, sizes)
    h = checkpoint_name(h, BRANCHES_NAME)
    return h @ down_kernel, (x, branches, h, weight, down_kernel)


def _product(_, branches):
    from pallas_kernels.layer import swiglu

    return swiglu.swiglu(branches.reshape(-1)).reshape(*branches.shape[:-1], -1)


def _swiglu_bwd(saved, dy):
    x, branches, h, weight, down_kernel = saved
    dh = jnp.einsum("...e,fe->...f", dy, down_kernel)
    names, sizes = _axes(x, len(down_kernel))
    dbranches = run(_derivatives, None, (branches, dh), (names,) * 2, names, sizes)
    dx = jnp.einsum("...f,df->...d", dbranches, weight)
    dweight = jnp.einsum("...d,...f->df", x, dbranches)
    return dx, dweight, jnp.einsum("...f,...e->fe", h, dy)


def _derivatives(_, branches, dh):
    """Of the product of the branches, from its cotangent."""
    from pallas_kernels.layer import swiglu

    return swiglu.swiglu_backward(branches.reshape(-1), dh.reshape(-1)).reshape(branches.shape)


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)
