"""A mixture of experts for single tokens: of one row the sum, the norm, the choice and the experts are one kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from gdn_jax.layers.blocks import RMSNorm, normalise_first
from gdn_jax.models.experts import Experts
from gdn_jax.models.inference.dense import DenseRows
from gdn_jax.models.inference.part import Call, Reader
from gdn_jax.parts import experts as of_row
from gdn_jax.parts import routing, row_product
from gdn_jax.parts.experts import SharedExpert, row_mixture
from gdn_jax.parts.products import Addend, array_of, transposed_product


class ExpertRows(Experts, Reader):
    """Experts whose weights lie as a GPU reads them fastest in calls of few rows.

    The router has a transposed copy. The shared expert's projections are products of groups, unless the kernels of
    the experts take that too.

    Args:
      experts: the mixture, of a copy for inference, whose parts this one takes over.
      rows: that have a token in every call.
    """

    def __init__(self, experts: Experts, rows: int):
        vars(self).update(vars(experts))
        weight = with_layout_constraint(self.router[...].T, Layout((0, 1)))
        self.router_rows = nnx.Param(weight)
        dtype = self.dtype or self.gate_up[...].dtype
        if self.shared_weights(jax.ShapeDtypeStruct((rows, weight.shape[1]), dtype)) is None:
            self.shared: Any = DenseRows(self.shared)

    @classmethod
    def of(cls, experts: Experts, call: Call) -> "ExpertRows":
        """Experts for calls of single tokens."""
        return cls(experts, call.rows)

    def from_stream(
        self, norm: RMSNorm, x: Float[Array, "*S D"], y: Float[Array, "*P D"] | Addend | None
    ) -> tuple[Float[Array, "*S D"], Float[Array, "*Q D"]]:
        """See `layers.blocks.from_stream`: where one kernel does not take all, one has the norm and the router's
        product. The result is in parts."""
        weight, dtype = self.router_rows[...], self.dtype or x.dtype
        added, scale = array_of(y), norm.scale(jnp.float32)
        if (routed := self._routed(x, dtype)) is not None:
            ahead = self.after(len(self.token_weights()))
            return routing.routed_stream(x, added, scale, weight, *routed, eps=norm.eps, ahead=ahead)
        if not row_product.takes(x, weight, self.implementation):
            return normalise_first(self, norm, x, y)
        options: Any = dict(eps=norm.eps, dtype=jnp.float32, keep=dtype, ahead=self.after(1))
        s, normalized, scores, _ = row_product.stream_product(x, added, scale, weight, **options)
        assert normalized is not None
        row = normalized.reshape(1, -1), *self.chosen(scores.reshape(1, -1))
        if (parts := self._parts(*row)) is not None:
            return s, parts
        return s, super().mix(*row).astype(dtype).reshape(x.shape)

    def mix(
        self, rows: Float[Array, "N D"], weights: Float[Array, "N k"], chosen: Int[Array, "N k"]
    ) -> Float[Array, "N D"]:
        """See `Experts.mix`."""
        parts = self._parts(rows, weights, chosen)
        return super().mix(rows, weights, chosen) if parts is None else jnp.sum(parts, axis=0)

    def _parts(self, rows, weights, chosen):
        """`mix` of one row in parts, where a kernel makes the experts and the shared one; else None."""
        if (shared := self.shared_weights(rows)) is None:
            return None
        return row_mixture(rows, weights, chosen, self.gate_up[...], self.down[...], shared, self.gate(rows))

    def shared_weights(self, rows: jax.Array | jax.ShapeDtypeStruct) -> SharedExpert | None:
        """The shared expert as the kernels of a row take it; None where they do not."""
        if not (kernels := self._shared_kernels()):
            return None
        shared = SharedExpert(*(kernel[...].astype(rows.dtype) for kernel in kernels))
        return shared if of_row.takes(rows, self.gate_up[...], shared, self.implementation) else None

    def _routed(self, x, dtype):
        """Arguments of `routed_stream` that are the layer's own, where it takes the stream x; else None."""
        choice, (*_, D) = self.choice(), x.shape
        shared = self.shared_weights(jax.ShapeDtypeStruct((x.size // D, D), dtype))
        if choice is None or shared is None or self.shared_gate is not None:
            return None
        assert self.router_bias is not None
        gate_up, down = (weight[...].astype(dtype) for weight in (self.gate_up, self.down))
        args = x, self.router_rows[...], choice, gate_up, shared, self.implementation
        return (self.router_bias[...], gate_up, down, shared, choice) if routing.takes(*args) else None

    def scores(self, rows: Float[Array, "N D"], precision: str | None = None) -> Float[Array, "N E"]:
        """See `Experts.scores`: of one row from the transposed router."""
        if rows.shape[0] > 1:
            return super().scores(rows, precision)
        return transposed_product(rows, self.router_rows[...].astype(rows.dtype), jnp.float32)

    def token_weights(self) -> list[nnx.Param]:
        """See `Reader.token_weights`. Those of the experts are known when they are chosen."""
        if not (kernels := self._shared_kernels()):
            return []
        return [self.router_rows, *([] if self.router_bias is None else [self.router_bias]), *kernels]

    def _shared_kernels(self) -> list[nnx.Param]:
        """Weights of the shared expert; none where they are products of groups."""
        linears = [getattr(self.shared, f"{name}_proj", None) for name in ("gate", "up", "down")]
        return [linear.kernel for linear in linears if linear is not None]
