"""Projections, and a SwiGLU of them, that keep their weights in 8 bits with a scale for each block."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.layers.blocks import RMSNorm, SwiGLU, is_one_product, normalise_first
from gdn_jax.parts import block_weights
from gdn_jax.parts.block_weights import DEQUANTISING
from gdn_jax.parts.products import Addend
from gdn_jax.parts.swiglu import gated

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that are kept in 8 bits, as in FP8 checkpoints. Narrow ones, to decays and strengths, stay whole."""
BLOCKS = "_blocks"
"""Ending of the name of a `BlockWeight`, after the name of the parameter in whose place it is."""


class BlockWeight(nnx.Module):
    """A weight, or several [E, ..], as codes and scales, see `gdn_jax.parts.block_weights`.

    Args:
      weight: [.., inputs, outputs], as projections have it.

    Parameters: codes [.., outputs, inputs], E4M3; scales [.., outputs, ceil(inputs / 128)], float32.
    """

    rows: int = block_weights.BLOCK
    """Rows of a block; a checkpoint may have blocks of another number of rows."""

    def __init__(self, weight: Float[Array, "*E D F"]):
        codes, scales = block_weights.quantised(jnp.swapaxes(weight, -1, -2))
        self.codes, self.scales = nnx.Param(codes), nnx.Param(scales)

    def whole(self, dtype: DTypeLike) -> Float[Array, "*E D F"]:
        """The dequantised weight."""
        weight = block_weights.dequantised(self.codes[...], self.scales[...], dtype)
        return jnp.swapaxes(weight, -1, -2)


class BlockLinear(nnx.Linear):
    """x W + bias with W kept in 8 bits.

    Args:
      linear: the projection, whose weight is quantised.

    Parameters: kernel_blocks, a `BlockWeight`; bias.
    """

    def __init__(self, linear: nnx.Linear):
        # Without nnx.Linear's __init__, which makes a weight: here the weight is a property, for code that reads it.
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype, self.param_dtype = linear.dtype, linear.param_dtype
        self.use_bias, self.bias = linear.use_bias, linear.bias
        self.dot_general = DEQUANTISING
        self.kernel_blocks = BlockWeight(linear.kernel[...])

    @property
    def kernel(self) -> Any:  # pyrefly: ignore[bad-override]
        """The dequantised weight [inputs, outputs], in the dtype of the model's parameters."""
        return self.kernel_blocks.whole(self.param_dtype)

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S F"]:
        """The projection of x."""
        x = x.astype(self.dtype or jnp.promote_types(x.dtype, self.param_dtype))
        y = block_weights.product(x, self.kernel_blocks.codes[...], self.kernel_blocks.scales[...])
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def keep_projections(part: nnx.Module) -> None:
    """Makes those of a module's `PROJECTIONS` that it has keep their weights in 8 bits, in place."""
    for name in PROJECTIONS:
        if type(linear := getattr(part, name, None)) is nnx.Linear:
            setattr(part, name, BlockLinear(linear))


class BlockSwiGLU(SwiGLU):
    """A SwiGLU whose projections keep their weights in 8 bits; of few rows each multiplies by itself.

    Args:
      mlp: the SwiGLU, whose parts this one takes over.
    """

    def __init__(self, mlp: SwiGLU):
        vars(self).update(vars(mlp))
        keep_projections(self)

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """See `SwiGLU`."""
        if is_one_product(x, (self.gate_proj, self.up_proj)):
            return super().__call__(x)
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))

    def from_stream(
        self, norm: RMSNorm, x: Float[Array, "*S D"], y: Float[Array, "*P D"] | Addend | None
    ) -> tuple[Float[Array, "*S D"], Float[Array, "*S D"] | Addend]:
        """See `layers.blocks.from_stream`: the norm's scale is not multiplied into weights."""
        return normalise_first(self, norm, x, y)
