"""Packed rows whose chunks are computed in stretches, one after another, each from the state that the last one left.

What `rows.in_stretches` is for whole rows: the temporary arrays are those of one stretch. But the inputs are gathered
in chunks all at once, and so are their cotangents. A chunk that is the last of its sequence passes nothing on; the
one after it starts from the state of its own sequence.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from gdn_jax.rule import packing
from gdn_jax.rule.chunks.recurrence import States, Transition, solve_states
from gdn_jax.rule.chunks.rows import RESIDUAL_NAMES, Row
from gdn_jax.rule.chunks.stages import Numerics
from gdn_jax.shapes import split_heads


def packed_in_stretches(
    run: Callable[..., tuple[jax.Array, Any]],
    table: packing.PackedChunks,
    chunks: int,
    arrays: tuple[jax.Array, ...],
    initial_state: jax.Array | None,
    scale: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Outputs and final states of packed sequences, `chunks` chunks at a time.

    Args:
      run: maps a `ChunkRow`, the arrays of its chunks [chunks, 1, C, heads, ...], the state before it and the scale
        to outputs and what `ChunkRow.solve` returns beside the states.
      table: the chunks of the row.
      chunks: of a stretch.
      arrays, initial_state, scale: as for `rows.in_stretches`.
    """
    _, k, v, g, *_ = arrays
    L, N = table.token.shape[0], table.is_empty.shape[0]
    counts = tuple(y.shape[2] for y in arrays[:4])

    def stretches(x: jax.Array) -> jax.Array:
        """[L, ...] to [stretches, chunks, ...]; chunks after the last own no token."""
        x = jnp.pad(x, ((0, -L % chunks),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, chunks, *x.shape[1:])

    def starts(sequence: jax.Array, is_first: jax.Array) -> jax.Array:
        """States [.., HO, K, V] that chunks start from which are the first of their sequence; 0 for others."""
        assert initial_state is not None
        return jnp.where(is_first[..., None, None, None], initial_state[sequence], 0)

    keep = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)

    def of_chunks(arrays, h, is_last, behind, scale):
        forcing = None if initial_state is None else starts(*behind)
        return run(ChunkRow(counts, is_last, forcing), *arrays, h, scale)

    of_chunks = jax.checkpoint(of_chunks, policy=keep)

    def stretch(carry, x):
        h, final = carry
        arrays, sequence, is_last, behind = x
        o, (h, ends) = of_chunks(arrays, h, is_last, behind, scale)
        return (h, final.at[jnp.where(is_last, sequence, N)].add(ends)), o

    final = jnp.zeros_like(g, shape=(N + 1, g.shape[2], k.shape[3], v.shape[3]))  # the last: of no sequence
    h = final[:1] if initial_state is None else starts(table.sequence[:1], table.is_first[:1])
    behind = jnp.roll(table.sequence, -1), jnp.roll(table.is_first, -1).at[-1].set(False)
    laid = tuple(stretches(packing.gather_chunks(x, table)) for x in arrays)
    where = jax.tree.map(stretches, (table.sequence, table.is_last, behind))
    (_, final), o = lax.scan(stretch, (h, final), (laid, *where))
    untouched = 0 if initial_state is None else initial_state
    final = jnp.where(table.is_empty[:, None, None, None], untouched, final[:N])
    return packing.scatter_chunks(o.reshape(-1, *o.shape[2:]), table), final


class ChunkRow(Row):
    """The chunks of a stretch as a form takes them: its arrays are in chunks already."""

    def __init__(
        self,
        head_counts: tuple[int, ...],
        is_last: Bool[Array, " chunks"],
        forcing: Float[Array, "chunks HO K V"] | None,
    ):
        self.is_last, self.forcing = is_last, forcing
        super().__init__(
            None, 1, is_last.shape[0], head_counts, 1
        )  # a row that has a chunk in place of each token

    def to_chunks(self, x: jax.Array) -> jax.Array:
        """[chunks, 1, C, H, D] to [L, lanes, 1, heads..., C, D]."""
        return self.lay(x)

    def from_chunks(self, x: jax.Array) -> jax.Array:
        """[L, lanes, 1, heads..., C, D] to [chunks, 1, C, HO, D]."""
        return self.unlay(x)

    def solve(
        self,
        numerics: Numerics,
        L: jax.Array,
        transition: Transition,
        x: jax.Array,
        initial_state: jax.Array | None,
    ) -> tuple[States, Any]:
        """Solves the recurrence as `Row.solve` does, from one state [1, HO, K, V].

        Beside the states it returns the one after the stretch and those at the ends of sequences [chunks, HO, K, V],
        each in the place of the last chunk of its sequence; 0 in the place of other chunks.
        """
        assert initial_state is not None
        chunks = self.is_last.shape[0]
        number = jnp.where(self.is_last, jnp.arange(1, chunks + 1), 0)
        chain = transition.replace_ends(self._to_lanes(number))
        forcing = self.forcing
        if forcing is not None:
            forcing = self._to_lanes(split_heads(forcing[:, None], 2, self.head_counts))
        h = split_heads(initial_state, 1, self.head_counts)
        states = solve_states(numerics, L, chain, x, forcing, h, jnp.zeros_like(h, shape=(chunks, *h.shape)))
        assert states.ends is not None
        last, ends = (y.reshape(-1, self.HO, *y.shape[-2:]) for y in (states.last, states.ends))
        return states, (last, ends)
