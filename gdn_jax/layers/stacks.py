"""Projections of different inputs as one product, in copies of layers for single tokens."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from gdn_jax.shapes import accumulation_dtype


class ProjectionStack(nnx.Module):
    """Projections of as many inputs, one each, as one product, see `blocks.ProjectionGroup`.

    Args:
      linears: the projections, of one dtype and one shape, without a bias.
    """

    def __init__(self, linears: Sequence[nnx.Linear]):
        self.dtype = linears[0].dtype
        weight = jnp.stack([linear.kernel[...].T for linear in linears])
        self.weight = nnx.Param(with_layout_constraint(weight, Layout((0, 1, 2))))

    def __call__(self, xs: Sequence[Float[Array, "*S D"]]) -> Float[Array, "*S F"]:
        """The results of all projections side by side."""
        weight = self.weight[...]
        # Not jnp.stack: of inputs that are neighbours in one array XLA sees that this is a part of it.
        x, leading = jnp.concatenate(xs, -1), xs[0].shape[:-1]
        dtype = self.dtype or jnp.promote_types(x.dtype, weight.dtype)
        x, weight = x.reshape(*leading, len(xs), -1).astype(dtype), weight.astype(dtype)
        if math.prod(leading) > 1:
            y = jnp.einsum("...nd,nfd->...nf", x, weight, preferred_element_type=dtype)
        else:
            wide = accumulation_dtype(x)
            y = x.reshape(x.shape[-2], 1, -1).astype(wide) * weight.astype(wide)
            y = jnp.sum(y, axis=-1).astype(dtype)
        return y.reshape(*leading, -1)


def stack_of(linears: Sequence[Any]) -> ProjectionStack | None:
    """The stack of these projections; None where they cannot be one."""
    if not all(type(linear) is nnx.Linear and linear.bias is None for linear in linears):
        return None
    kinds = {(linear.kernel.shape, linear.dtype) for linear in linears}
    return ProjectionStack(linears) if len(kinds) == 1 else None
