"""Projections of a layer in a copy for single tokens: several are one product, whose weight lies as a GPU reads it
fastest for few rows.

XLA makes one kernel of a row's products and their sums. From weights [D, outputs] it would write all products before
it sums them, which moves three times the bytes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from gdn_jax.layers.blocks import Projection, with_bias
from gdn_jax.parts.products import transposed_product
from gdn_jax.shapes import accumulation_dtype


class ProjectionGroup(nnx.Module):
    """Projections of one input as one product, its weight [outputs, D].

    Args:
      linears: the projections, of one dtype.
      fill: outputs that are 0, before those of the last projection.
    """

    def __init__(self, linears: Sequence[nnx.Linear], fill: int = 0):
        self.dtype = linears[0].dtype
        *kernels, last = [linear.kernel[...].T for linear in linears]
        weight = jnp.concatenate([*kernels, jnp.zeros((fill, last.shape[1]), last.dtype), last])
        # Else XLA would leave the weights as they lie and transpose them in name only.
        self.weight = nnx.Param(with_layout_constraint(weight, Layout((0, 1))))

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S F"]:
        """The results of all projections side by side, without a bias."""
        weight = self.weight[...]
        dtype = self.dtype or jnp.promote_types(x.dtype, weight.dtype)
        return transposed_product(x.astype(dtype), weight.astype(dtype), dtype)


class ProjectionStack(nnx.Module):
    """Projections of as many inputs, one each, as one product.

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


class PartOfProduct(nnx.Module):
    """A projection whose results are some of those of a product.

    Under jit the calls of all parts of a product with one input are one product.

    Args:
      linear: the projection.
      start: where its results begin in those of the product.
    """

    def __init__(self, linear: nnx.Linear, start: int):
        self.bias, self.out_features = linear.bias, linear.out_features
        self.start, self.stop = start, start + linear.out_features

    def product(self, x: Float[Array, "*S D"]) -> Float[Array, "*S F"]:
        """The results of the whole product, without a bias."""
        raise NotImplementedError

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S F"]:
        """The projection of x."""
        return with_bias(self.product(x)[..., self.start : self.stop], self)


class ProjectionOfGroup(PartOfProduct):
    """One projection of a `ProjectionGroup`.

    Args:
      group: the group.
    """

    def __init__(self, linear: nnx.Linear, start: int, group: ProjectionGroup):
        super().__init__(linear, start)
        self.group = group

    @property
    def is_last(self) -> bool:
        """Whether it ends the group, and has no bias."""
        return self.bias is None and self.stop == self.group.weight.shape[0]

    @property
    def is_alone(self) -> bool:
        """Whether the group is this projection alone, without a bias."""
        return self.is_last and self.start == 0

    def product(self, x: Float[Array, "*S D"]) -> Float[Array, "*S F"]:
        """See `PartOfProduct.product`."""
        return self.group(x)


class ProjectionOfStack(PartOfProduct):
    """A projection by two factors, of which the second is in a `ProjectionStack`.

    Args:
      linear: the second factor.
      stack: the stack.
      firsts: what makes the stack's inputs.
    """

    def __init__(self, linear: nnx.Linear, start: int, stack: ProjectionStack, firsts: Sequence[Projection]):
        super().__init__(linear, start)
        self.stack, self.firsts = stack, nnx.List(firsts)

    def product(self, x: Float[Array, "*S D"]) -> Float[Array, "*S F"]:
        """See `PartOfProduct.product`."""
        return self.stack([first(x) for first in self.firsts])


def group_projections(part: nnx.Module, names: Sequence[str], unit: int = 1) -> None:
    """Replaces those of a module's projections that it has, in place, by one `ProjectionGroup`.

    Args:
      part: the module.
      names: its projections.
      unit: the group is filled up with zeros to a multiple of this number of outputs.
    """
    present = [name for name in names if type(getattr(part, name, None)) is nnx.Linear]
    linears = [getattr(part, name) for name in present]
    if not linears or any(linear.dtype != linears[0].dtype for linear in linears):
        return
    fill = -sum(linear.out_features for linear in linears) % unit
    group, start = ProjectionGroup(linears, fill), 0
    for name, linear in zip(present, linears, strict=True):
        start += fill if linear is linears[-1] else 0
        setattr(part, name, ProjectionOfGroup(linear, start, group))
        start += linear.out_features


def group_of(linears: Sequence[Any]) -> ProjectionGroup | None:
    """The group of all these projections, which have no bias; None where there is none."""
    own = [x.group for x in linears if isinstance(x, ProjectionOfGroup) and x.bias is None]
    return own[0] if len(own) == len(linears) and all(group is own[0] for group in own) else None


def multiply_factors(part: nnx.Module, names: Sequence[str]) -> None:
    """Makes one projection of two factors, in place: f_proj of f_a_proj and f_b_proj.

    A kernel of one row that takes the whole layer reads more bytes then, and waits for nothing in between.

    Args:
      part: the module.
      names: the projections, "f" for those above. One that has no factors stays as it is.
    """
    for name in names:
        if (pair := _factors(part, name)) is not None:
            first, last = pair
            product = jnp.dot(first.kernel[...], last.kernel[...], precision="highest")
            whole = nnx.clone(last)
            whole.kernel.set_value(product.astype(last.kernel.dtype))
            whole.in_features = first.in_features
            _replace_factors(part, name, whole)


def stack_factors(part: nnx.Module, names: Sequence[str]) -> None:
    """Makes one product of the second factors of projections, in place, if all have factors of one size.

    Args: those of `multiply_factors`.
    """
    pairs = [pair for name in names if (pair := _factors(part, name)) is not None]
    firsts, lasts = ([pair[i] for pair in pairs] for i in range(2))
    if len(pairs) < len(names) or not all(type(x) is nnx.Linear and x.bias is None for x in lasts):
        return
    if len({(linear.kernel.shape, linear.dtype) for linear in lasts}) > 1:
        return
    stack = ProjectionStack(lasts)
    for i, (name, linear) in enumerate(zip(names, lasts, strict=True)):
        _replace_factors(part, name, ProjectionOfStack(linear, i * linear.out_features, stack, firsts))


def _factors(part: Any, name: str) -> tuple[Any, Any] | None:
    """The factors of a projection; None of one that has none."""
    names = f"{name}_a_proj", f"{name}_b_proj"
    return tuple(getattr(part, name) for name in names) if hasattr(part, names[0]) else None


def _replace_factors(part: Any, name: str, whole: Projection) -> None:
    for factor in (f"{name}_a_proj", f"{name}_b_proj"):
        delattr(part, factor)
    setattr(part, f"{name}_proj", whole)
