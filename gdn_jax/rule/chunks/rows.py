"""How the tokens of a call lie in chunks: whole rows, packed sequences, lanes side by side, stretches in turn.

Both chunked forms of the rule, with one decay a head and with one a channel, lay out their arrays here.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.rule import packing
from gdn_jax.rule.chunks.recurrence import INVERSE_NAME, STATES_NAME, States, Transition, solve_states
from gdn_jax.rule.chunks.stages import Numerics
from gdn_jax.shapes import split_heads

RESIDUAL_NAMES = (INVERSE_NAME, STATES_NAME)
"""`checkpoint_name`s of what the backward pass keeps beside the inputs: one C x C matrix and one state per chunk."""

# Tokens times heads of a stretch and longest chunk on a CPU: the fastest of 32, 64, 128 and 32, 64 on two cores of an
# EPYC 9004 (2026-11-21, jax 0.12.0, T = 2048, 4 heads, K = V = 64, float32; see the performance log).
CPU_STRETCH = 64 * 32
_CPU_CHUNK_SIZE = 32


def in_stretches(
    run: Callable[..., tuple[jax.Array, jax.Array]],
    tokens: int,
    arrays: tuple[jax.Array, ...],
    initial_state: jax.Array | None,
    scale: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Outputs and final states of rows that are computed in stretches of `tokens` tokens, one after another.

    Args:
      run: maps the arrays of a stretch, the states before it and the scale to outputs and the states after it. Its
        backward pass keeps what `RESIDUAL_NAMES` names and recomputes the rest.
      tokens: of a stretch.
      arrays: q, k, v, g and whatever a form takes beside them, [B, T, heads, ...]. The last stretch is padded with
        zeros, which leave a state alone.
      initial_state: states before the first token, None for zeros.
      scale: factor of the output.
    """
    keep = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    run = jax.checkpoint(run, policy=keep)
    _, k, v, g, *_ = arrays
    T = k.shape[1]
    if tokens >= T:
        return run(*arrays, initial_state, scale)

    def stretch(h, x):
        o, h = run(*x, h, scale)
        return h, o

    h = initial_state
    if h is None:
        h = jnp.zeros_like(g, shape=(g.shape[0], g.shape[2], k.shape[3], v.shape[3]))
    final, o = lax.scan(stretch, h, [packing.row_to_chunks(x, tokens) for x in arrays])
    return packing.chunks_to_row(o, T), final


class Row:
    """How the tokens of one call lie in chunks and lanes, for batches of whole rows and for packed sequences."""

    def __init__(
        self,
        cu_seqlens: jax.Array | None,
        B: int,
        T: int,
        head_counts: tuple[int, ...],
        chunk_size: int,
        lanes: int | None = None,
    ):
        self.B, self.T, self.C = B, T, chunk_size
        self.head_counts, self.HO = head_counts, max(head_counts)
        self.table = None
        self.num_chunks = max(1, -(-T // chunk_size))
        if cu_seqlens is not None:
            self.table = packing.packed_chunks(cu_seqlens, T, chunk_size)
            self.num_chunks = self.table.token.shape[0]
        self.lanes = num_lanes(self.num_chunks, B * self.HO) if lanes is None else lanes

    def to_chunks(self, x: jax.Array) -> jax.Array:
        """[B, T, H, D] or [B, T, H] to [L, lanes, B, heads..., C, D]."""
        x = packing.row_to_chunks(x, self.C) if self.table is None else packing.gather_chunks(x, self.table)
        return self.lay(x)

    def lay(self, x: jax.Array) -> jax.Array:
        """Chunks [chunks, B, C, H, D] or [chunks, B, C, H] to [L, lanes, B, heads..., C, D]."""
        return split_heads(self._to_lanes(jnp.moveaxis(x, 2, 3)), 3, self.head_counts)

    def from_chunks(self, x: jax.Array) -> jax.Array:
        """[L, lanes, B, heads..., C, D] to [B, T, HO, D]."""
        x = self.unlay(x)
        return (
            packing.chunks_to_row(x, self.T) if self.table is None else packing.scatter_chunks(x, self.table)
        )

    def unlay(self, x: jax.Array) -> jax.Array:
        """Inverse of `lay` for HO heads: [L, lanes, B, heads..., C, D] to [chunks, B, C, HO, D]."""
        x = jnp.swapaxes(x, 0, 1)  # lanes one after another
        x = x.reshape(x.shape[0] * x.shape[1], self.B, self.HO, *x.shape[-2:])[: self.num_chunks]
        return jnp.moveaxis(x, 2, 3)

    def states(self, h: jax.Array) -> jax.Array:
        """States of all chunks [L, lanes, B, heads..., K, V] to [B, chunks, HO, K, V]."""
        h = jnp.moveaxis(h, (2, 1), (0, 1))  # [B, lanes, L, heads..., K, V]
        return h.reshape(h.shape[0], h.shape[1] * h.shape[2], self.HO, *h.shape[-2:])[:, : self.num_chunks]

    def _to_lanes(self, x: jax.Array) -> jax.Array:
        """[chunks, ...] to [L, lanes, ...], padded with chunks that leave the state alone."""
        pad = -x.shape[0] % self.lanes
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return jnp.swapaxes(x.reshape(self.lanes, x.shape[0] // self.lanes, *x.shape[1:]), 0, 1)

    def solve(
        self,
        numerics: Numerics,
        L: jax.Array,
        transition: Transition,
        x: jax.Array,
        initial_state: jax.Array | None,
    ) -> tuple[States, jax.Array]:
        """Solution of the recurrence for chunked inputs, and the final states [N, HO, K, V].

        Args: those of `solve_states`, with `L` its kkt, and initial_state [N, HO, K, V].
        """
        shape = (*transition.shape()[3:], transition.width(), x.shape[-1])
        if self.table is None:
            h0 = jnp.zeros_like(x, shape=(self.B, *shape))
            if initial_state is not None:
                h0 = split_heads(initial_state, 1, self.head_counts)
            states = solve_states(numerics, L, transition, x, None, h0)
            return states, states.last.reshape(self.B, self.HO, *shape[-2:])

        # A sequence's last chunk passes nothing on; what the next chunk starts from is its sequence's own state.
        table, N = self.table, self.table.is_empty.shape[0]
        chain = transition.replace_ends(self._to_lanes(jnp.where(table.is_last, table.sequence + 1, 0)))
        forcing, h0 = None, jnp.zeros_like(x, shape=(1, *shape))
        if initial_state is not None:
            starts = split_heads(initial_state, 1, self.head_counts)
            starts = jnp.where(_like(table.is_first, starts), starts[table.sequence], 0)[:, None]
            h0 = starts[0]
            forcing = self._to_lanes(jnp.roll(starts, -1, 0).at[-1].set(0))
        states = solve_states(numerics, L, chain, x, forcing, h0, jnp.zeros_like(x, shape=(N, *h0.shape)))
        assert states.ends is not None
        final = states.ends.reshape(N, self.HO, *shape[-2:])
        untouched = 0 if initial_state is None else initial_state
        return states, jnp.where(_like(table.is_empty, final), untouched, final)


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    """mask with axes of size 1 appended, to broadcast against x."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def stretch_of(
    T: int, chunk_size: int, width: int, *, on_cpu: int | None = CPU_STRETCH, on_gpu: int | None = None
) -> tuple[int, int]:
    """Tokens of a stretch, and of a chunk in it, for B * HO = width; a row that is one stretch stays as it is.

    A CPU is bound by its arithmetic, of which shorter chunks need less, and by its caches, where the arrays of a
    stretch find room. A GPU needs wide products: its stretches only bound the memory that a long row takes. A size
    that is a symbol of `jax.export` is compared with nothing: such a row stays as it is too.

    Args:
      on_cpu, on_gpu: tokens times heads of a stretch there; None: all chunks of a row at once.
    """
    is_cpu = jax.default_backend() == "cpu"
    limit = on_cpu if is_cpu else on_gpu
    if limit is None or not isinstance(T * width, int) or T * width <= limit:
        return T, chunk_size
    if is_cpu:
        chunk_size = min(chunk_size, _CPU_CHUNK_SIZE)
    chunks = -(-T // chunk_size)
    stretches = -(-chunks // max(1, limit // (width * chunk_size)))
    if not is_cpu:  # stretches that fill the row, where there are such: a padded row would be a copy of it
        stretches = next((n for n in range(stretches, 2 * stretches) if chunks % n == 0), stretches)
    return -(-chunks // stretches) * chunk_size, chunk_size


def num_lanes(num_chunks: int, width: int) -> int:
    """Lanes to walk a row's chunks in, for B * HO = width: more than one where the walk is bound by latency.

    Forward on an H200 (2026-11-21, jax 0.11.2, bfloat16, K = V = 128, 32768 tokens): 8 heads take 10.4 ms in one
    lane, 5.6 in 8, 4.5 in 16; 64 heads take 19.0 ms in one lane and 26.1 in 8.
    """
    if jax.default_backend() == "cpu":
        return 1
    lanes = 1
    while 2 * lanes * width <= 128 and 8 * lanes * lanes <= num_chunks:
        lanes *= 2
    return lanes if lanes >= 8 else 1
