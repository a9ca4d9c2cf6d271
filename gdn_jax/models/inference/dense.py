"""The SwiGLU of a block for single tokens: of one row the sum, the norm and the MLP are one kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from gdn_jax.layers.block_weights import BlockSwiGLU, BlockWeight
from gdn_jax.layers.blocks import RMSNorm, SwiGLU, normalise_first
from gdn_jax.models.inference.part import Call, Reader
from gdn_jax.models.inference.projections import PartsOfProjection, ProjectionGroup, ProjectionOfGroup
from gdn_jax.parts import block_weights, dense_stream
from gdn_jax.parts.products import Addend, array_of, with_words, words_after
from gdn_jax.parts.swiglu import gated


class DenseRows(nnx.Module):
    """A SwiGLU whose branches are one product.

    Args:
      mlp: the SwiGLU, of a copy for inference.
      in_parts: whether its results may be parts of a sum, see `PartsOfProjection`.
    """

    def __init__(self, mlp: SwiGLU, in_parts: bool = False):
        self.branches = ProjectionGroup((mlp.gate_proj, mlp.up_proj))
        down = ProjectionOfGroup(mlp.down_proj, 0, ProjectionGroup((mlp.down_proj,)))
        self.down = PartsOfProjection(down) if in_parts else down

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*P D"]:
        """The MLP, see `SwiGLU`."""
        y, F = self.branches(x), self.branches.outputs // 2
        return self.down(gated(y[..., :F], y[..., F:]))


class DenseRow(Reader):
    """A SwiGLU whose weights lie as the kernel of one row reads them: the branches [2 F, D], the projection down
    [F, D].

    Args:
      mlp: the SwiGLU, of a copy for inference.
    """

    def __init__(self, mlp: SwiGLU):
        self.branches = ProjectionGroup((mlp.gate_proj, mlp.up_proj))
        self.down = mlp.down_proj.kernel
        self.implementation = mlp.implementation

    @classmethod
    def of(cls, mlp: SwiGLU, call: Call) -> "DenseRows | DenseRow":
        """The SwiGLU for calls of single tokens: this one where a kernel takes it."""
        if call.rows == 1 and call.from_stream:
            down = mlp.down_proj.kernel[...]
            row, gate_up = (jax.ShapeDtypeStruct((n, down.shape[1]), down.dtype) for n in (1, 2 * len(down)))
            if dense_stream.takes(row, gate_up, down, mlp.implementation):
                return cls(mlp)
        _fill(mlp)
        return DenseRows(mlp, call.in_parts)

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """The MLP of any rows, see `SwiGLU`."""
        a, b = jnp.split(self.branches(x), 2, axis=-1)
        h = gated(a, b)
        return h @ self.down[...].astype(h.dtype)

    def from_stream(
        self, norm: RMSNorm, x: Float[Array, "*S D"], y: Float[Array, "*P D"] | Addend | None
    ) -> tuple[Float[Array, "*S D"], Float[Array, "*S D"] | Addend]:
        """See `layers.blocks.from_stream`: the MLP of one row is float32."""
        gate_up, down, *scales = [weight[...] for weight in self._weights()]
        if not dense_stream.takes(x, gate_up, down, self.implementation):
            return normalise_first(self, norm, x, y)
        arrays, words = (norm.scale(jnp.float32), gate_up, down, *scales), words_after(y)
        static: Any = dict(eps=norm.eps, ahead=self.after(2), words=words)
        s, z = dense_stream.dense_stream(x, array_of(y), *arrays, **static)
        return s, with_words(z, words)

    def token_weights(self) -> list[nnx.Param]:
        """See `Reader.token_weights`."""
        return self._weights()[:2]

    def _weights(self) -> list[nnx.Param]:
        """The weights as `dense_stream` takes them."""
        return [self.branches.weight, self.down]


class BlockDenseRow(DenseRow):
    """A SwiGLU of weights in 8 bits, whose codes lie as the kernel of one row reads them. Other rows have the SwiGLU
    itself.

    Args:
      mlp: the SwiGLU.
    """

    def __init__(self, mlp: BlockSwiGLU):
        self.mlp, self.implementation = mlp, mlp.implementation
        gate, up, down = (blocks.codes[...] for blocks in _blocks_of(mlp))
        scales = [blocks.scales[...][:: block_weights.BLOCK] for blocks in _blocks_of(mlp)]
        # As it is written here: a transposition in name alone would be made for every token.
        lie = Layout((0, 1))
        self.gate_up = nnx.Param(with_layout_constraint(jnp.concatenate([gate, up]), lie))
        self.down = nnx.Param(with_layout_constraint(down.T, lie))
        self.scales = nnx.Param(jnp.stack([scales[0], scales[1], scales[2].T]))

    @classmethod
    def of(cls, mlp: Any, call: Call) -> Any:
        """The SwiGLU for calls of single tokens: this one where a kernel takes it."""
        gate = _blocks_of(mlp)[0]
        (F, D), code = gate.codes.shape, gate.codes.dtype
        in_blocks = all(blocks.rows % block_weights.BLOCK == 0 for blocks in _blocks_of(mlp))
        if call.rows == 1 and call.from_stream and in_blocks:
            row = jax.ShapeDtypeStruct((1, D), mlp.down_proj.dtype or mlp.down_proj.param_dtype)
            gate_up, rows = (jax.ShapeDtypeStruct((n, D), code) for n in (2 * F, F))
            if dense_stream.takes(row, gate_up, rows, mlp.implementation):
                return cls(mlp)
        return mlp

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """See `SwiGLU`."""
        return self.mlp(x)

    def _weights(self) -> list[nnx.Param]:
        return [self.gate_up, self.down, self.scales]


def _blocks_of(mlp: Any) -> list[BlockWeight]:
    """Weights of both branches and of the projection down."""
    return [linear.kernel_blocks for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]


WHOLE = 64
"""Multiples of it are inner widths of which XLA's products of few rows copy no weights before they multiply."""


def _fill(mlp: SwiGLU) -> None:
    """Fills the inner width up to a multiple of `WHOLE` with zeros, in place: they add nothing."""
    F = mlp.down_proj.in_features
    more = -F % WHOLE
    for linear, axis in ((mlp.gate_proj, 1), (mlp.up_proj, 1), (mlp.down_proj, 0)):
        around = [(0, more if n == axis else 0) for n in range(2)]
        linear.kernel.set_value(jnp.pad(linear.kernel[...], around))
    mlp.gate_proj.out_features = mlp.up_proj.out_features = mlp.down_proj.in_features = F + more
