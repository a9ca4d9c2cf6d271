"""The plain JAX form of the rule over split tokens, see `context`: a state beside the identity as one wide state."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax import xla
from gdn_jax.parallel.borders import Borders
from gdn_jax.parallel.prefix import Affine
from gdn_jax.shapes import RuleArrays

Saved = Callable[..., tuple[jax.Array, ...]]
"""The function from cotangents of o and of the final states to those of q, k, v, g, beta and the first states."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """`xla.rule` with these options on one device's tokens; the same methods as `context_kernels.Kernels`."""

    scale: float
    use_qk_l2norm: bool
    chunk_size: int
    implementation: str
    record: ClassVar[Any] = RuleArrays

    def run(self, call: xla.Call, x: Any) -> tuple[jax.Array, jax.Array]:
        """Outputs and final states of this device's tokens."""
        return xla.rule(call, x, self.scale)

    def widened(self, x: Any, columns: int) -> Any:
        """The tokens with so many more columns of values, which are zeros."""
        return x._replace(v=with_zeros(x.v, columns))

    def forward(
        self, x: Any, begins: Float[Array, "N HO K V"], borders: Borders
    ) -> tuple[Affine, Callable[[jax.Array], tuple[tuple[jax.Array, jax.Array], Saved]]]:
        """See `context_kernels.Kernels.forward`. The values of the identity's columns are zeros."""
        HO, K, V = x.initial_state.shape[1], x.k.shape[3], x.v.shape[3]
        identity = jnp.broadcast_to(jnp.eye(K, dtype=begins.dtype), (begins.shape[0], HO, K, K))
        wide = self.widened(x, K)._replace(initial_state=jnp.concatenate([begins, identity], 3))
        states = self.record._fields.index("initial_state")

        def run(*primals):
            call = xla.Call(self.use_qk_l2norm, "kv", self.implementation, self.chunk_size)
            return self.run(call, self.record._make((*primals, *x[states + 1 :])))

        final = borders.pick(run(*wide[: states + 1])[1], borders.last)
        return Affine(final[..., :V], final[..., V:]), lambda start: jax.vjp(run, *x[:states], start)

    def backward(
        self, saved: Saved, borders: Borders, do: jax.Array, ends: jax.Array
    ) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
        """See `context_kernels.Kernels.backward`."""
        return borders.pick(saved((do, ends))[-1], borders.first), lambda ends: saved((do, ends))


def with_zeros(x: Float[Array, "B T H V"], columns: int) -> Float[Array, "B T H _"]:
    """The array with so many more columns."""
    return jnp.concatenate([x, jnp.zeros_like(x, shape=(*x.shape[:3], columns))], 3)
