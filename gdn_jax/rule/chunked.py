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
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.rule.chunks.decay import ChunkDecay, chunk_cumsum
from gdn_jax.rule.chunks.recurrence import HeadTransition
from gdn_jax.rule.chunks.rows import Row, in_stretches, stretch_of
from gdn_jax.rule.chunks.stages import Numerics, chunk_output, kkt
from gdn_jax.shapes import Keys, LogDecay, Offsets, Outputs, Queries, Scale, States, Strength, Values


def chunked_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay,
    beta: Strength,
    initial_state: States | None,
    *,
    scale: Scale,
    cu_seqlens: Offsets | None,
    chunk_size: int,
    lanes: int | None = None,
) -> tuple[Outputs, States]:
    """The rule in chunks of `chunk_size` tokens. A reset is a gate of -inf.

    A row's chunks are walked in `lanes` parts side by side (see `solve_states`); None chooses. On a CPU a long row
    is computed in stretches one after another, each from the state the last one left, and in chunks of at most 32
    tokens (see `chunks.rows.stretch_of`).

    Args: those of `definition.recurrent_rule`, and
      chunk_size: tokens of a chunk, a power of two.
      lanes: parts of a row's chunks, for rows without cu_seqlens.

    Returns:
      o [B, T, HO, V] and the final states [N, HO, K, V], in the dtype of g.

    Numerics: gates, the triangular solve, states and sums in g's dtype (float32 or float64); operands of the
      products in bfloat16 when q is bfloat16.
    Memory: the backward pass keeps the inputs and the residuals named in `chunks.rows.RESIDUAL_NAMES`, and
      recomputes the rest. The temporary arrays of either pass are those of one stretch.
    """
    B, T, HO = g.shape
    tokens = T
    if cu_seqlens is None and lanes is None:
        tokens, chunk_size = stretch_of(T, chunk_size, B * HO)
    numerics = Numerics.of(q.dtype, g.dtype)

    run = partial(_rule, numerics=numerics, cu_seqlens=cu_seqlens, chunk_size=chunk_size, lanes=lanes)
    return in_stretches(run, tokens, (q, k, v, g, beta), initial_state, scale)


def _rule(q, k, v, g, beta, initial_state, scale, *, numerics, cu_seqlens, chunk_size, lanes):
    counts = (q.shape[2], k.shape[2], v.shape[2], g.shape[2])
    row = Row(cu_seqlens, k.shape[0], k.shape[1], counts, chunk_size, lanes)
    k, v, g, beta = (row.to_chunks(x) for x in (k, v, g, beta))
    decay = chunk_cumsum(g)
    states, final = row.solve(numerics, *_equations(numerics, k, v, decay, beta), initial_state)
    # The output's own arrays come to life after the walk, not before it: they would be kept through it.
    q, decay, states = lax.optimization_barrier((q, decay, states))
    q = row.to_chunks(q)
    o = chunk_output(q, k, states.v_new, states.h, decay, scale, numerics)
    return row.from_chunks(o), final


def chunk_states_of(
    k: Keys,
    v: Values,
    g: LogDecay,
    beta: Strength,
    initial_state: States | None,
    *,
    cu_seqlens: Offsets | None,
    chunk_size: int,
) -> Float[Array, "B L HO K V"]:
    """State at the start of every chunk, in the dtype of g and computed in it; differentiable.

    With cu_seqlens the chunks are those of `packing.packed_chunks`; unused ones hold 0.

    Args: those of `chunked_rule`.
    """
    numerics = Numerics(g.dtype, g.dtype, lax.Precision.HIGHEST)
    row = Row(cu_seqlens, k.shape[0], k.shape[1], (k.shape[2], v.shape[2], g.shape[2]), chunk_size)
    k, v, g, beta = (row.to_chunks(x) for x in (k, v, g, beta))
    states, _ = row.solve(numerics, *_equations(numerics, k, v, chunk_cumsum(g), beta), initial_state)
    return row.states(states.h)


def _equations(
    numerics: Numerics, k, v, decay: ChunkDecay, beta
) -> tuple[jax.Array, HeadTransition, jax.Array]:
    """kkt, transition and x of `solve_states`, for chunked inputs."""
    dtype = numerics.accumulate
    transition = HeadTransition(decay.total(), decay.to_end(), beta * decay.from_start(), k.astype(dtype))
    return kkt(k, decay, beta, numerics), transition, beta[..., None] * v.astype(dtype)
