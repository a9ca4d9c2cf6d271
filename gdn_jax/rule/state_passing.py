"""One device's part of a rule whose tokens are split over devices: state passing.

A device finds what its tokens do to a state, receives the state that enters and runs its tokens from there. In the
backward pass the cotangent of the state travels the other way. `parallel.context` sends both; here is what a device
computes between. An implementation brings its own part (`Implementation.state_passing`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.rule import plain
from gdn_jax.rule.call import APART, Arrays, Call

Saved = Any
"""A pytree: what a forward keeps for its backward."""


class Affine(NamedTuple):
    """A map of states, h -> m h + e."""

    e: Float[Array, "R HO K V"]
    m: Float[Array, "R HO K K"]


@runtime_checkable
class StatePassing(Protocol):
    """The part of one device. It is hashable, being static in what is compiled; states are [K, V]."""

    def forward(
        self, x: Arrays, begins: Float[Array, "N HO K V"], borders: Any
    ) -> tuple[Affine, Callable[[jax.Array], tuple[tuple[jax.Array, jax.Array], Saved]]]:
        """The forward pass up to the states that enter, and the rest of it.

        Args:
          x: this device's tokens; cu_seqlens holds the offsets of their sequences on this device.
          begins: the states that sequences begin with on this device, zeros for a sequence that enters.
          borders: the sequences that cross the device's borders, a `parallel.borders.Borders`.

        Returns:
          The map of states over this device's tokens, for sequences that leave: e from `begins`, m from the first
          segment of each that lies here. And a function from the states that the tokens start from to (o, final
          states) and what `backward` needs.
        """
        ...

    def backward(
        self, saved: Saved, borders: Any, do: jax.Array, ends: jax.Array
    ) -> tuple[jax.Array, Callable[[jax.Array], tuple[Any, ...]]]:
        """The backward pass up to the cotangents that enter from the next device, and the rest of it.

        Args:
          ends: cotangents of the final states, zeros for a sequence that leaves.

        Returns:
          The cotangent of the states that entered. And a function from the cotangents of all final states to those
          of q, k, v, the gates, the strengths and the states that the tokens started from.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PlainPassing:
    """`plain.rule` with the call's options: a state beside the identity as one wide state."""

    call: Call

    def forward(
        self, x: Arrays, begins: Float[Array, "N HO K V"], borders: Any
    ) -> tuple[Affine, Callable[[jax.Array], tuple[tuple[jax.Array, jax.Array], Saved]]]:
        """See `StatePassing`. The values of the identity's columns are zeros."""
        HO, K, V = x.initial_state.shape[1], x.k.shape[3], x.v.shape[3]
        identity = jnp.broadcast_to(jnp.eye(K, dtype=begins.dtype), (begins.shape[0], HO, K, K))
        wide = self._widened(x, K)._replace(initial_state=jnp.concatenate([begins, identity], 3))

        def run(*primals):
            return plain.rule(self.call, Arrays._make((*primals, *x[7:])), self.call.scale)

        final = borders.pick(run(*wide.floats)[1], borders.last)
        return Affine(final[..., :V], final[..., V:]), lambda start: jax.vjp(run, *x[:6], start)

    def backward(
        self, saved: Saved, borders: Any, do: jax.Array, ends: jax.Array
    ) -> tuple[jax.Array, Callable[[jax.Array], tuple[Any, ...]]]:
        """See `StatePassing`; what is saved is a function from cotangents of o and of the final states."""
        return borders.pick(saved((do, ends))[-1], borders.first), lambda ends: saved((do, ends))

    def _widened(self, x: Arrays, columns: int) -> Arrays:
        """The tokens with so many more columns of values, which are zeros."""
        write = x.write
        if self.call.gates == APART and write is not None and write.ndim == 4:
            write = _with_zeros(write, columns)
        return x._replace(v=_with_zeros(x.v, columns), write=write)


def _with_zeros(x: Float[Array, "B T H V"], columns: int) -> Float[Array, "B T H _"]:
    """The array with so many more columns."""
    return jnp.concatenate([x, jnp.zeros_like(x, shape=(*x.shape[:3], columns))], 3)
