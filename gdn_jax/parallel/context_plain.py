"""The plain JAX form of the rule over split tokens, see `context`: a state beside the identity as one wide state."""

import dataclasses
from collections.abc import Callable

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

    def forward(
        self, x: RuleArrays, begins: Float[Array, "N HO K V"], borders: Borders
    ) -> tuple[Affine, Callable[[jax.Array], tuple[tuple[jax.Array, jax.Array], Saved]]]:
        """See `context_kernels.Kernels.forward`. The values of the identity's columns are zeros."""
        HO, K, V = x.initial_state.shape[1], x.k.shape[3], x.v.shape[3]
        identity = jnp.broadcast_to(jnp.eye(K, dtype=begins.dtype), (begins.shape[0], HO, K, K))
        wide = x._replace(
            v=jnp.concatenate([x.v, jnp.zeros_like(x.v, shape=(*x.v.shape[:3], K))], 3),
            initial_state=jnp.concatenate([begins, identity], 3),
        )

        def run(*primals):
            call = xla.Call(self.use_qk_l2norm, "kv", self.implementation, self.chunk_size)
            return xla.rule(call, RuleArrays._make((*primals, *x[6:])), self.scale)

        final = borders.pick(run(*wide[:6])[1], borders.last)
        return Affine(final[..., :V], final[..., V:]), lambda start: jax.vjp(run, *x[:5], start)

    def backward(
        self, saved: Saved, borders: Borders, do: jax.Array, ends: jax.Array
    ) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
        """See `context_kernels.Kernels.backward`."""
        return borders.pick(saved((do, ends))[5], borders.first), lambda ends: saved((do, ends))
