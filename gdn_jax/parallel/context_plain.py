"""The plain JAX form of the rule over split tokens, see `context`: a state beside the identity as one wide state."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.parallel.borders import Borders
from gdn_jax.parallel.prefix import Affine
from gdn_jax.rule import plain
from gdn_jax.rule.call import Arrays, Call

Saved = Callable[..., tuple[jax.Array, ...]]
"""The function from cotangents of o and of the final states to those of q, k, v, the gates and the first states."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """`plain.rule` with these options on one device's tokens; the same methods as `context_kernels.Kernels`."""

    scale: float
    call: Call
    """Its states are [K, V]."""

    def forward(
        self, x: Arrays, begins: Float[Array, "N HO K V"], borders: Borders
    ) -> tuple[Affine, Callable[[jax.Array], tuple[tuple[jax.Array, jax.Array], Saved]]]:
        """See `context_kernels.Kernels.forward`. The values of the identity's columns are zeros."""
        HO, K, V = x.initial_state.shape[1], x.k.shape[3], x.v.shape[3]
        identity = jnp.broadcast_to(jnp.eye(K, dtype=begins.dtype), (begins.shape[0], HO, K, K))
        wide = _widened(x, K)._replace(initial_state=jnp.concatenate([begins, identity], 3))

        def run(*primals):
            return plain.rule(self.call, Arrays._make((*primals, *x[7:])), self.scale)

        final = borders.pick(run(*wide.floats)[1], borders.last)
        return Affine(final[..., :V], final[..., V:]), lambda start: jax.vjp(run, *x[:6], start)

    def backward(
        self, saved: Saved, borders: Borders, do: jax.Array, ends: jax.Array
    ) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
        """See `context_kernels.Kernels.backward`."""
        return borders.pick(saved((do, ends))[-1], borders.first), lambda ends: saved((do, ends))


def _widened(x: Arrays, columns: int) -> Arrays:
    """The tokens with so many more columns of values, which are zeros."""
    write = x.write
    if write is not None and write.ndim == 4:
        write = _with_zeros(write, columns)
    return x._replace(v=_with_zeros(x.v, columns), write=write)


def _with_zeros(x: Float[Array, "B T H V"], columns: int) -> Float[Array, "B T H _"]:
    """The array with so many more columns."""
    return jnp.concatenate([x, jnp.zeros_like(x, shape=(*x.shape[:3], columns))], 3)
