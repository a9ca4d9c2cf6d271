"""The SwiGLU of a block for single tokens: of one row the sum, the norm and the MLP are one kernel."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax.layers.blocks import RMSNorm, SwiGLU, normalise_first
from gdn_jax.models.inference.part import Call, Reader
from gdn_jax.models.inference.projections import ProjectionGroup
from gdn_jax.parts import dense_stream
from gdn_jax.parts.products import Addend, array_of
from gdn_jax.parts.swiglu import gated


class DenseRows(nnx.Module):
    """A SwiGLU whose branches are one product.

    Args:
      mlp: the SwiGLU, of a copy for inference.
    """

    def __init__(self, mlp: SwiGLU):
        self.branches = ProjectionGroup((mlp.gate_proj, mlp.up_proj))
        self.down = ProjectionGroup((mlp.down_proj,))

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """The MLP, see `SwiGLU`."""
        y, F = self.branches(x), self.down.weight.shape[1]
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
        return DenseRows(mlp)

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """The MLP of any rows, see `SwiGLU`."""
        a, b = jnp.split(self.branches(x), 2, axis=-1)
        h = gated(a, b)
        return h @ self.down[...].astype(h.dtype)

    def from_stream(
        self, norm: RMSNorm, x: Float[Array, "*S D"], y: Float[Array, "*P D"] | Addend | None
    ) -> tuple[Float[Array, "*S D"], Float[Array, "*S D"]]:
        """See `layers.blocks.from_stream`: the MLP of one row is float32."""
        weights = self.branches.weight[...], self.down[...]
        if not dense_stream.takes(x, *weights, self.implementation):
            return normalise_first(self, norm, x, y)
        scale, ahead = norm.scale(jnp.float32), self.after(2)
        return dense_stream.dense_stream(x, array_of(y), scale, *weights, eps=norm.eps, ahead=ahead)

    def token_weights(self) -> list[nnx.Param]:
        """See `Reader.token_weights`."""
        return [self.branches.weight, self.down]


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
