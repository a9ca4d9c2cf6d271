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

from gdn_jax.layers.block_weights import BlockLinear
from gdn_jax.layers.blocks import Projection, RMSNorm, with_bias
from gdn_jax.parts import block_weights, few_product, row_product
from gdn_jax.parts.products import Addend, array_of, transposed_product
from gdn_jax.shapes import accumulation_dtype

PARTS, PART = (8, 4, 2, 1), 8
"""Numbers of parts of a product, the first of which that leaves whole multiples of `PART` numbers is taken."""


class Group(nnx.Module):
    """Projections of one input as one product.

    Fields:
      weight: rows of all projections, [outputs, D].
      blocks: scales for every column of each block of 128 rows, where weights are in 8 bits; else None.
      whole_blocks: a scale for each block of 128 x 128, where there is one; else None.
      dtype: of the products; None: the dtype that input and weight promote to.
    """

    weight: nnx.Param
    blocks: nnx.Param | None = None
    whole_blocks: nnx.Param | None = None
    dtype: Any

    def takes(self, x: Float[Array, "*S D"], implementation: str | None) -> bool:
        """Whether one kernel makes the norm of a stream, and these products of it."""
        return row_product.takes(x, self.weight[...], implementation, self.scales_of_blocks())

    def from_stream(
        self,
        norm: RMSNorm,
        x: Float[Array, "*S D"],
        y: Float[Array, "*P D"] | Addend | None,
        implementation: str | None,
        ahead: tuple[Array, ...] = (),
    ) -> tuple[Float[Array, "*S D"], Float[Array, "*S F"]]:
        """The stream x + y, and the results for its norm side by side, without a bias."""
        if not self.takes(x, implementation):
            x, normalized = norm.add(x, y)
            return x, self(normalized)
        weight = self.weight[...]
        arrays = x, array_of(y), norm.scale(jnp.float32), weight, self.scales_of_blocks()
        static: Any = dict(eps=norm.eps, dtype=self.dtype or weight.dtype, ahead=ahead)
        return row_product.stream_product(*arrays, **static)

    def scales_of_blocks(self) -> Array | None:
        """`blocks`, as kernels take them."""
        return None if self.blocks is None else self.blocks[...]


class ProjectionGroup(Group):
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
        self.outputs = weight.shape[0]

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S F"]:
        """The results of all projections side by side, without a bias."""
        weight = self.weight[...]
        dtype = self.dtype or jnp.promote_types(x.dtype, weight.dtype)
        x, weight = x.astype(dtype), weight.astype(dtype)
        if few_product.takes(x, weight):
            return few_product.few_product(x, weight)
        return transposed_product(x, weight, dtype)


class BlockGroup(Group):
    """Projections of one input that keep their weights in 8 bits, as one product.

    Args:
      linears: the projections, of one dtype. Rows have scales of their own, so codes and scales only come together.
    """

    def __init__(self, linears: Sequence[BlockLinear]):
        self.dtype = linears[0].dtype or linears[0].param_dtype
        self.weight, self.scales = (
            nnx.Param(jnp.concatenate([getattr(linear.kernel_blocks, name)[...] for linear in linears]))
            for name in ("codes", "scales")
        )
        self.outputs, D = self.weight.shape
        rows = [n for linear in linears for n in (linear.out_features, linear.kernel_blocks.rows)]
        if all(n % block_weights.BLOCK == 0 for n in rows):
            of_blocks = self.scales[...][:: block_weights.BLOCK]
            self.whole_blocks = nnx.Param(of_blocks)
            self.blocks = nnx.Param(jnp.repeat(of_blocks, block_weights.BLOCK, axis=1)[:, :D])

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S F"]:
        """The results of all projections side by side, without a bias."""
        return block_weights.product(x.astype(self.dtype), self.weight[...], self.scales[...])


class FactorGroup(nnx.Module):
    """Projections of one input by two factors each, of which the second ones are one product.

    Args:
      firsts: the first factors.
      seconds: the second ones, of one dtype and one shape, without a bias.
    """

    def __init__(self, firsts: Sequence[Projection], seconds: Sequence[nnx.Linear]):
        self.firsts, self.dtype = nnx.List(firsts), seconds[0].dtype
        weight = jnp.stack([linear.kernel[...].T for linear in seconds])
        self.weight = nnx.Param(with_layout_constraint(weight, Layout((0, 1, 2))))
        self.outputs = weight.shape[0] * weight.shape[1]

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S F"]:
        """The results of all projections side by side."""
        weight, leading = self.weight[...], x.shape[:-1]
        # Not jnp.stack: of inputs that are neighbours in one array XLA sees that this is a part of it.
        x = jnp.concatenate([first(x) for first in self.firsts], -1)
        dtype = self.dtype or jnp.promote_types(x.dtype, weight.dtype)
        x, weight = x.reshape(*leading, len(weight), -1).astype(dtype), weight.astype(dtype)
        if math.prod(leading) > 1:
            y = jnp.einsum("...nd,nfd->...nf", x, weight, preferred_element_type=dtype)
        else:
            wide = accumulation_dtype(x)
            y = x.reshape(x.shape[-2], 1, -1).astype(wide) * weight.astype(wide)
            y = jnp.sum(y, axis=-1).astype(dtype)
        return y.reshape(*leading, -1)


class ProjectionOfGroup(nnx.Module):
    """A projection whose results are some of those of a group.

    Under jit the calls of all of them with one input are one product.

    Args:
      linear: the projection.
      start: where its results begin in those of the group.
      group: the group.
    """

    def __init__(self, linear: nnx.Linear, start: int, group: ProjectionGroup | BlockGroup | FactorGroup):
        self.bias, self.out_features, self.group = linear.bias, linear.out_features, group
        self.start, self.stop = start, start + linear.out_features

    @property
    def is_last(self) -> bool:
        """Whether it ends the group, and has no bias."""
        return self.bias is None and self.stop == self.group.outputs

    @property
    def is_alone(self) -> bool:
        """Whether the group is this projection alone, without a bias."""
        return self.is_last and self.start == 0

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S F"]:
        """The projection of x."""
        return with_bias(self.group(x)[..., self.start : self.stop], self)


class PartsOfProjection(nnx.Module):
    """A projection to the residual stream whose results for a token of each row are parts of a sum, [P rows, 1, D].

    A GPU makes a product of few rows and a narrow result in parts, or most of it has nothing to do; the norm of the
    stream adds them up, where XLA would have a kernel of its own for it.

    Args:
      projection: the projection, its group alone.
    """

    def __init__(self, projection: ProjectionOfGroup):
        self.projection, self.bias, self.out_features = projection, None, projection.out_features

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "P T F"]:
        """The parts of a token; of more than one the projection itself."""
        (F, D), weight = self.projection.group.weight.shape, self.projection.group.weight[...]
        parts = next(n for n in PARTS if D % (n * PART) == 0 or n == 1)
        if x.shape[1] > 1 or parts == 1:
            return self.projection(x)
        x, weight = x.reshape(len(x), parts, -1), weight.reshape(F, parts, -1)
        y = jnp.einsum("bpk,fpk->pbf", x, weight, preferred_element_type=accumulation_dtype(x))
        return y.reshape(-1, 1, F)


def parts_of(projection: Any) -> PartsOfProjection | None:
    """The projection in parts of a sum; None of one with a bias, of one in 8 bits, and of one of several."""
    if not isinstance(projection, ProjectionOfGroup) or not projection.is_alone:
        return None
    return None if isinstance(projection.group, BlockGroup) else PartsOfProjection(projection)


def group_projections(part: nnx.Module, names: Sequence[str], unit: int = 1) -> None:
    """Replaces a module's projections, in place, by one `ProjectionGroup`, and projections that keep their weights
    in 8 bits by one `BlockGroup`.

    Args:
      part: the module.
      names: its projections.
      unit: the group is filled up with zeros to a multiple of this number of outputs.
    """
    for kind in (nnx.Linear, BlockLinear):
        present = [name for name in names if type(getattr(part, name, None)) is kind]
        linears = [getattr(part, name) for name in present]
        if not linears or any(linear.dtype != linears[0].dtype for linear in linears):
            continue
        fill, start = 0, 0
        if kind is BlockLinear:
            group = BlockGroup(linears)
        else:
            fill = -sum(linear.out_features for linear in linears) % unit
            group = ProjectionGroup(linears, fill)
        for name, linear in zip(present, linears, strict=True):
            start += fill if linear is linears[-1] else 0
            setattr(part, name, ProjectionOfGroup(linear, start, group))
            start += linear.out_features


def group_of(linears: Sequence[Any]) -> Any:
    """The group of all these projections, which have no bias; None where there is none."""
    own = [x.group for x in linears if isinstance(x, ProjectionOfGroup) and x.bias is None]
    return own[0] if len(own) == len(linears) and all(group is own[0] for group in own) else None


def weights_of(*groups: Any) -> list[nnx.Param]:
    """The weights of groups; none where one of them is None."""
    return [] if any(group is None for group in groups) else [group.weight for group in groups]


def multiply_factors(part: nnx.Module, names: Sequence[str]) -> None:
    """Makes one projection of two factors, in place: f_proj of f_a_proj and f_b_proj.

    A kernel of one row that takes the whole layer reads more bytes then, and waits for nothing in between.

    Args:
      part: the module.
      names: the projections, "f" for those above. One that has no factors stays as it is.
    """
    for name in names:
        if hasattr(part, f"{name}_a_proj"):
            first, whole = (_pop(part, f"{name}_{factor}_proj") for factor in "ab")
            product = jnp.dot(first.kernel[...], whole.kernel[...], precision="highest")
            whole.kernel.set_value(product.astype(whole.kernel.dtype))
            whole.in_features = first.in_features
            setattr(part, f"{name}_proj", whole)


def group_factors(part: nnx.Module, names: Sequence[str]) -> None:
    """Makes one product of the second factors of projections, in place, if all have factors of one size.

    Args: those of `multiply_factors`.
    """
    seconds: list[Any] = [getattr(part, f"{name}_b_proj", None) for name in names]
    if not all(type(linear) is nnx.Linear and linear.bias is None for linear in seconds):
        return
    if len({(linear.kernel.shape, linear.dtype) for linear in seconds}) > 1:
        return
    group = FactorGroup([_pop(part, f"{name}_a_proj") for name in names], seconds)
    for i, name in enumerate(names):
        linear = _pop(part, f"{name}_b_proj")
        setattr(part, f"{name}_proj", ProjectionOfGroup(linear, i * linear.out_features, group))


def _pop(part: nnx.Module, name: str) -> Any:
    """An attribute, which the module then has no more."""
    value = getattr(part, name)
    delattr(part, name)
    return value
