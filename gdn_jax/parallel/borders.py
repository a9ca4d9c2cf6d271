"""Sequences that cross from one device's tokens to the next, where tokens are split over a mesh axis in order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.shapes import changes_segment


class Borders(NamedTuple):
    """Sequences that cross the first and last border of this device's tokens: every row, or one that is packed."""

    first: Int[Array, ""] | None
    """In packed rows, the number of the sequence that crosses the first border; any number where none does."""
    last: Int[Array, ""] | None
    """In packed rows, the number of the sequence that crosses the last border; any number where none does."""
    enters: Bool[Array, ""]
    """True where a sequence crosses the first border: it comes from the device before."""
    leaves: Bool[Array, ""]
    """True where a sequence crosses the last border: it goes on at the next device."""
    passes: Bool[Array, ""]
    """True where one sequence crosses both borders."""

    @classmethod
    def of_rows(cls, axis_name: str) -> "Borders":
        """The borders of rows that are one sequence each."""
        index, last = lax.axis_index(axis_name), lax.axis_size(axis_name) - 1
        return cls(None, None, index > 0, index < last, (index > 0) & (index < last))

    @classmethod
    def of_packed(cls, cu_seqlens: Int[Array, " N1"], T: int, axis_name: str) -> "Borders":
        """The borders of sequences [cu[n], cu[n + 1]) of one row, of which this device holds T tokens."""
        begin = lax.axis_index(axis_name) * T
        N = cu_seqlens.shape[0] - 1

        def across(token) -> tuple[jax.Array, jax.Array]:
            """The sequence that tokens `token - 1` and `token` both belong to, and whether there is one."""
            n = jnp.searchsorted(cu_seqlens, token - 1, side="right").astype(jnp.int32) - 1
            inside = jnp.clip(n, 0, N - 1)
            return inside, (n >= 0) & (n < N) & (token > 0) & (token < cu_seqlens[inside + 1])

        first, enters = across(begin)
        last, leaves = across(begin + T)
        return cls(first, last, enters, leaves, enters & leaves & (first == last))

    def pick(self, states: Array, sequence: Int[Array, ""] | None) -> Array:
        """Takes the states of the sequences that cross a border: all rows, or [1, ...] of one packed sequence.

        Args:
          states: [N, ...], one for each sequence.
          sequence: `first` or `last`.
        """
        return states if sequence is None else lax.dynamic_slice_in_dim(states, sequence, 1)

    def put(self, states: Array, sequence: Int[Array, ""] | None, crossing: Array, crosses: Array) -> Array:
        """Puts states of the sequences that cross a border back in their places, where any does.

        Args:
          states, sequence: those of `pick`.
          crossing: the states to put there, as `pick` returns them.
          crosses: `enters` or `leaves`; where it is False, states are returned as they are.
        """
        if sequence is None:
            return jnp.where(crosses, crossing, states)
        own = lax.dynamic_slice_in_dim(states, sequence, 1)
        return lax.dynamic_update_slice_in_dim(states, jnp.where(crosses, crossing, own), sequence, 0)


def local_offsets(cu_seqlens: Int[Array, " N1"], T: int, axis_name: str) -> Int[Array, " N1"]:
    """Offsets of packed sequences in the T tokens of this device; sequences of other devices are empty there."""
    return jnp.clip(cu_seqlens - lax.axis_index(axis_name) * T, 0, T)


def last_states(
    local: Float[Array, "N ..."],
    initial: Float[Array, "N ..."] | None,
    cu_seqlens: Int[Array, " N1"] | None,
    T: int,
    axis_name: str,
) -> Float[Array, "N ..."]:
    """Gives every device the final states of whole sequences, from the states after each device's own tokens.

    One device holds the end of a sequence, so that a sum over the devices is a choice. XLA sends nothing where nobody
    reads the result.
    """
    index = lax.axis_index(axis_name)
    if cu_seqlens is None:
        return lax.psum(jnp.where(index == lax.axis_size(axis_name) - 1, local, 0), axis_name)
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    mine = (end > begin) & (end > index * T) & (end <= (index + 1) * T)
    shape = (-1,) + (1,) * (local.ndim - 1)
    final = lax.psum(jnp.where(mine.reshape(shape), local, 0), axis_name)
    return jnp.where((end > begin).reshape(shape), final, 0 if initial is None else initial).astype(
        local.dtype
    )


def reset_across(
    g: Float[Array, "B T HO *K"], segment_ids: Int[Array, "B T"], axis_name: str
) -> Float[Array, "B T HO *K"]:
    """Sets the log decay to -inf at every token whose segment differs from the segment before."""
    changes = jnp.concatenate(
        [
            segment_ids[:, :1] != previous(segment_ids[:, -1:], axis_name),
            changes_segment(segment_ids)[:, 1:],
        ],
        1,
    )
    token = lax.axis_index(axis_name) * g.shape[1] + jnp.arange(g.shape[1])
    return jnp.where(jnp.expand_dims(changes & (token > 0), tuple(range(2, g.ndim))), -jnp.inf, g)


def previous(x: jax.Array, axis_name: str) -> jax.Array:
    """Gives each device the x of the device before it, and zeros to the first."""
    return lax.ppermute(x, axis_name, [(d, d + 1) for d in range(lax.axis_size(axis_name) - 1)])
