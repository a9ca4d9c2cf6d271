"""The gated delta rule in its chunkwise WY form: tokens laid out in chunks, the stages on them, and back.

    decay     = chunk_cumsum(g)                               `chunks.decay`
    kkt       = strictLower(beta_i k_i.k_j exp(G_i - G_j))    `stages`
    h, v_new  = the recurrence over chunks                    `chunks.recurrence`
    o         = scale (exp(G) q h + lower(q k^T exp(G_i - G_j)) v_new)

Everything but the recurrence is parallel over chunks. It takes v_new as A (beta v - beta exp(G) (k h)), which needs
fewer products than the WY keys w and values u; `stages.wy` gives those to whoever studies them.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", section 3.3; fla's `chunk_gated_delta_rule`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax import packing
from gdn_jax.chunks.decay import ChunkDecay, chunk_cumsum
from gdn_jax.chunks.recurrence import INVERSE_NAME, STATES_NAME, States, Transition, solve_states
from gdn_jax.chunks.stages import Numerics, chunk_output, kkt
from gdn_jax.shapes import split_heads

RESIDUAL_NAMES = (INVERSE_NAME, STATES_NAME)
"""`checkpoint_name`s of what the backward pass keeps beside the inputs: one C x C matrix and one state per chunk."""

# Tokens times heads of a stretch and longest chunk on a CPU: the fastest of 32, 64, 128 and 32, 64 on two cores of an
# EPYC 9004 (2026-11-21, jax 0.12.0, T = 2048, 4 heads, K = V = 64, float32; see the performance log).
_CPU_STRETCH = 64 * 32
_CPU_CHUNK_SIZE = 32


def chunked_rule(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"],
    beta: Float[Array, "B T HO"],
    initial_state: Float[Array, "N HO K V"] | None,
    *,
    scale: float | Float[Array, ""],
    cu_seqlens: Int[Array, "N1"] | None,
    chunk_size: int,
    lanes: int | None = None,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"]]:
    """The rule in chunks of `chunk_size` tokens. A reset is a gate of -inf.

    A row's chunks are walked in `lanes` parts side by side (see `solve_states`); None chooses. On a CPU a long row
    is computed in stretches one after another, each from the state the last one left, and in chunks of at most 32
    tokens (see `_stretch`).

    Args: those of `reference.recurrent_rule`, and
      chunk_size: tokens of a chunk, a power of two.
      lanes: parts of a row's chunks, for rows without cu_seqlens.

    Returns:
      o [B, T, HO, V] and the final states [N, HO, K, V], in the dtype of g.

    Numerics: gates, the triangular solve, states and sums in g's dtype (float32 or float64); operands of the
      products in bfloat16 when q is bfloat16.
    Memory: the backward pass keeps the inputs and the residuals named in `RESIDUAL_NAMES`, and recomputes the rest.
      The temporary arrays of either pass are those of one stretch.
    """
    B, T, HO = g.shape
    tokens = T
    if cu_seqlens is None and lanes is None:
        tokens, chunk_size = _stretch(T, chunk_size, B * HO)
    numerics = Numerics.of(q.dtype, g.dtype)
    run = partial(_rule, numerics=numerics, cu_seqlens=cu_seqlens, chunk_size=chunk_size, lanes=lanes)
    keep = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    run = jax.checkpoint(run, policy=keep)
    if tokens >= T:
        return run(q, k, v, g, beta, initial_state, scale)

    def stretch(h, x):
        o, h = run(*x, h, scale)
        return h, o

    h = initial_state
    if h is None:
        h = jnp.zeros_like(g, shape=(B, HO, k.shape[3], v.shape[3]))
    final, o = lax.scan(stretch, h, [packing.row_to_chunks(x, tokens) for x in (q, k, v, g, beta)])
    return packing.chunks_to_row(o, T), final


def _rule(q, k, v, g, beta, initial_state, scale, *, numerics, cu_seqlens, chunk_size, lanes):
    counts = (q.shape[2], k.shape[2], v.shape[2], g.shape[2])
    row = _Row(cu_seqlens, k.shape[0], k.shape[1], counts, chunk_size, lanes)
    k, v, g, beta = (row.to_chunks(x) for x in (k, v, g, beta))
    decay = chunk_cumsum(g)
    states, final = row.solve(numerics, k, v, decay, beta, initial_state)
    # The output's own arrays come to life after the walk, not before it: they would be kept through it.
    q, decay, states = lax.optimization_barrier((q, decay, states))
    q = row.to_chunks(q)
    o = chunk_output(q, k, states.v_new, states.h, decay, scale, numerics)
    return row.from_chunks(o), final


def chunk_states_of(
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"],
    beta: Float[Array, "B T HO"],
    initial_state: Float[Array, "N HO K V"] | None,
    *,
    cu_seqlens: Int[Array, "N1"] | None,
    chunk_size: int,
) -> Float[Array, "B L HO K V"]:
    """State at the start of every chunk, in the dtype of g and computed in it; differentiable.

    With cu_seqlens the chunks are those of `packing.packed_chunks`; unused ones hold 0.

    Args: those of `chunked_rule`.
    """
    numerics = Numerics(g.dtype, g.dtype, lax.Precision.HIGHEST)
    row = _Row(cu_seqlens, k.shape[0], k.shape[1], (k.shape[2], v.shape[2], g.shape[2]), chunk_size)
    k, v, g, beta = (row.to_chunks(x) for x in (k, v, g, beta))
    states, _ = row.solve(numerics, k, v, chunk_cumsum(g), beta, initial_state)
    h = jnp.moveaxis(states.h, (2, 1), (0, 1))  # [B, lanes, L, heads..., K, V]
    return h.reshape(h.shape[0], h.shape[1] * h.shape[2], row.HO, *h.shape[-2:])[:, : row.num_chunks]


class _Row:
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
        self.lanes = _num_lanes(self.num_chunks, B * self.HO) if lanes is None else lanes

    def to_chunks(self, x: jax.Array) -> jax.Array:
        """[B, T, H, D] or [B, T, H] to [L, lanes, B, heads..., C, D]."""
        x = packing.row_to_chunks(x, self.C) if self.table is None else packing.gather_chunks(x, self.table)
        return split_heads(self._to_lanes(jnp.moveaxis(x, 2, 3)), 3, self.head_counts)

    def from_chunks(self, x: jax.Array) -> jax.Array:
        """[L, lanes, B, heads..., C, D] to [B, T, HO, D]."""
        x = jnp.swapaxes(x, 0, 1)  # lanes one after another
        x = x.reshape(x.shape[0] * x.shape[1], self.B, self.HO, *x.shape[-2:])[: self.num_chunks]
        x = jnp.moveaxis(x, 2, 3)
        return (
            packing.chunks_to_row(x, self.T) if self.table is None else packing.scatter_chunks(x, self.table)
        )

    def _to_lanes(self, x: jax.Array) -> jax.Array:
        """[chunks, ...] to [L, lanes, ...], padded with chunks that leave the state alone."""
        pad = -x.shape[0] % self.lanes
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return jnp.swapaxes(x.reshape(self.lanes, x.shape[0] // self.lanes, *x.shape[1:]), 0, 1)

    def solve(
        self,
        numerics: Numerics,
        k: jax.Array,
        v: jax.Array,
        decay: ChunkDecay,
        beta: jax.Array,
        initial_state: jax.Array | None,
    ) -> tuple[States, jax.Array]:
        """Solution of the recurrence for chunked inputs, and the final states [N, HO, K, V]."""
        dtype = numerics.accumulate
        transition = Transition(decay.total(), decay.to_end(), beta * decay.from_start(), k.astype(dtype))
        L = kkt(k, decay, beta, numerics)
        x = beta[..., None] * v.astype(dtype)
        shape = (*transition.total.shape[3:], k.shape[-1], v.shape[-1])
        if self.table is None:
            h0 = jnp.zeros_like(x, shape=(self.B, *shape))
            if initial_state is not None:
                h0 = split_heads(initial_state, 1, self.head_counts)
            states = solve_states(numerics, L, transition, x, None, h0)
            return states, states.last.reshape(self.B, self.HO, *shape[-2:])

        # A sequence's last chunk passes nothing on; what the next chunk starts from is its sequence's own state.
        table, N = self.table, self.table.is_empty.shape[0]
        chain = transition._replace(keep=_like(self._to_lanes(~table.is_last), transition.total))
        forcing, h0 = None, jnp.zeros_like(x, shape=(1, *shape))
        if initial_state is not None:
            starts = split_heads(initial_state, 1, self.head_counts)
            starts = jnp.where(_like(table.is_first, starts), starts[table.sequence], 0)[:, None]
            h0 = starts[0]
            forcing = self._to_lanes(jnp.roll(starts, -1, 0).at[-1].set(0))
        states = solve_states(numerics, L, chain, x, forcing, h0)

        def of_last_chunks(x):
            return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])[table.last_chunk]

        last, h, v_new = jax.tree.map(of_last_chunks, (transition, states.h, states.v_new))
        final = last.next_state(h, v_new, numerics)
        final = final.reshape(N, self.HO, *shape[-2:])
        untouched = 0 if initial_state is None else initial_state
        return states, jnp.where(_like(table.is_empty, final), untouched, final)


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    """mask with axes of size 1 appended, to broadcast against x."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def _stretch(T: int, chunk_size: int, width: int) -> tuple[int, int]:
    """Tokens of a stretch, and of a chunk in it, for B * HO = width; a row that is one stretch stays as it is.

    A CPU is bound by its arithmetic, of which shorter chunks need less, and by its caches, where the arrays of a
    stretch find room. A GPU needs all chunks of a row at once, and wide products.
    """
    if jax.default_backend() != "cpu" or T * width <= _CPU_STRETCH:
        return T, chunk_size
    chunk_size = min(chunk_size, _CPU_CHUNK_SIZE)
    chunks = -(-T // chunk_size)
    stretches = -(-chunks // max(1, _CPU_STRETCH // (width * chunk_size)))
    return -(-chunks // stretches) * chunk_size, chunk_size


def _num_lanes(num_chunks: int, width: int) -> int:
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
