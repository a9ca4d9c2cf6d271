"""A mixture of experts for single tokens: of one row the sum, the norm, the choice and the experts are one kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from gdn_jax.layers.blocks import RMSNorm, SwiGLU, normalise_first
from gdn_jax.models.experts import Experts
from gdn_jax.models.inference.dense import DenseRows
from gdn_jax.models.inference.part import Call, Reader
from gdn_jax.parts import routing
from gdn_jax.parts.experts import SharedExpert
from gdn_jax.parts.products import Addend, array_of, transposed_product, with_words, words_after


class ExpertRows(Experts):
    """Experts whose router and shared expert lie as a GPU reads them fastest in calls of few rows.

    Args:
      experts: the mixture, of a copy for inference, whose parts this one takes over.
    """

    def __init__(self, experts: Experts):
        vars(self).update(vars(experts))
        self.router_rows = nnx.Param(_in_rows(self.router[...].T))
        self.shared: Any = DenseRows(self.shared)

    def scores(self, rows: Float[Array, "N D"], precision: str | None = None) -> Float[Array, "N E"]:
        """See `Experts.scores`: of one row from the transposed router."""
        if rows.shape[0] > 1:
            return super().scores(rows, precision)
        return transposed_product(rows, self.router_rows[...].astype(rows.dtype), jnp.float32)


class ExpertRow(Experts, Reader):
    """Experts whose router lies as the kernel of one row reads it, with the gate of the shared expert as last row.

    Args:
      experts: the mixture, of a copy for inference, whose parts this one takes over.
    """

    def __init__(self, experts: Experts):
        vars(self).update(vars(experts))
        rows = [self.router[...].T]
        if self.shared_gate is not None:
            rows.append(self.shared_gate[...][None].astype(self.router.dtype))
        self.router_rows = nnx.Param(_in_rows(jnp.concatenate(rows)))

    @classmethod
    def of(cls, experts: Experts, call: Call) -> "ExpertRows | ExpertRow":
        """Experts for calls of single tokens: these where a kernel takes them."""
        if call.rows == 1 and call.from_stream and isinstance(experts.shared, SwiGLU):
            row = cls(experts)
            if row.takes(jnp.zeros((1, row.router.shape[0]), row.gate_up.dtype)):
                return row
        return ExpertRows(experts)

    def from_stream(
        self, norm: RMSNorm, x: Float[Array, "*S D"], y: Float[Array, "*P D"] | Addend | None
    ) -> tuple[Float[Array, "*S D"], Float[Array, "*Q D"] | Addend]:
        """See `layers.blocks.from_stream`. The result is in parts."""
        if not self.takes(x):
            return normalise_first(self, norm, x, y)
        bias = None if self.router_bias is None else self.router_bias[...]
        arrays = norm.scale(jnp.float32), self.router_rows[...], bias, self.gate_up[...], self.down[...]
        words = words_after(y)
        static: Any = dict(eps=norm.eps, ahead=self.after(len(self.token_weights())), words=words)
        s, z = routing.routed_stream(x, array_of(y), *arrays, self._shared(), self.choice(), **static)
        return s, with_words(z, words)

    def takes(self, x: Float[Array, "*S D"]) -> bool:
        """Whether the kernel takes a stream: one row, on one device."""
        experts = self.choice(), self.gate_up[...], self._shared()
        return routing.takes(x, self.router_rows[...], *experts, self.implementation)

    def token_weights(self) -> list[nnx.Param]:
        """See `Reader.token_weights`. Those of the experts are known when they are chosen."""
        bias = [] if self.router_bias is None else [self.router_bias]
        return [self.router_rows, *bias, *self._shared_kernels()]

    def _shared_kernels(self) -> list[nnx.Param]:
        return [
            linear.kernel for linear in (self.shared.gate_proj, self.shared.up_proj, self.shared.down_proj)
        ]

    def _shared(self) -> SharedExpert:
        return SharedExpert(*(kernel[...] for kernel in self._shared_kernels()))


def _in_rows(weight: jax.Array) -> jax.Array:
    """A matrix whose rows lie one after the other."""
    return with_layout_constraint(weight, Layout((0, 1)))
