"""Linear attention with a decay for each head, in chunks: what the rules without a correction share."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.gates import no_gate
from gdn_jax.rule import segments
from gdn_jax.rule.chunks.decay import chunk_cumsum
from gdn_jax.rule.chunks.stages import Numerics, chunk_output
from gdn_jax.rule.packing import chunks_to_row, row_to_chunks
from gdn_jax.shapes import (
    Keys,
    LogDecay,
    Outputs,
    Queries,
    SegmentIds,
    Strength,
    Values,
    accumulation_dtype,
    split_heads,
)

REFUSES = {"cu_seqlens": "expected the delta rules, which alone take packed sequences"}


def gated_linear_attention(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HO K V"] | None = None,
    chunk_size: int = 64,
) -> tuple[Outputs, Float[Array, "B HO K V"]]:
    """Linear attention with a decay for each head: the gated delta rule without its correction.

        S <- exp(g) S + k v^T;   o = scale q^T S

    Args:
      q, k, v: as for `gated_delta_rule`; a write strength is a factor of v.
      g: log decay [B, T, HO] <= 0, -inf for a full reset; None for no decay.
      scale: factor of the output, K ** -0.5 by default.
      initial_state: state before the first token, None for zeros.
      chunk_size: tokens that are computed at once as masked attention.

    Returns:
      o in q's dtype and the final state, float32 (float64 when an input is).

    Numerics: sums, gates and states in float32 (float64 when an input is), operands of the products in bfloat16
      where q is.
    Source: Dao & Gu 2024 (arXiv 2405.21060), the chunked form of a scalar decay; fla's `chunk_simple_gla`.
    """
    B, T, _, K = q.shape
    HO, V = max(q.shape[2], v.shape[2]), v.shape[3]
    counts = (q.shape[2], k.shape[2], v.shape[2], HO)
    dtype = accumulation_dtype(q, g, initial_state)
    numerics = Numerics.of(q.dtype, dtype)
    g = no_gate(v, (B, T, HO), dtype) if g is None else g.astype(dtype)

    def to_chunks(x):  # [L, B, heads..., C, D]
        return split_heads(jnp.moveaxis(row_to_chunks(x, min(chunk_size, T)), 2, 3), 2, counts)

    q, k, v = (to_chunks(x) for x in (q, k, v))
    decay = chunk_cumsum(to_chunks(g[..., None])[..., 0])
    v = v.astype(dtype)
    writes = numerics.wide().einsum("...ck,...cv->...kv", k, decay.to_end()[..., None] * v)
    state = (
        jnp.zeros_like(writes, shape=(B, HO, K, V)) if initial_state is None else initial_state.astype(dtype)
    )

    def chunk(S, x):
        total, write = x
        return total[..., None, None] * S + write, S

    state, states = lax.scan(chunk, split_heads(state, 1, counts), (decay.total(), writes))
    o = chunk_output(q, k, v, states, decay, K**-0.5 if scale is None else scale, numerics)
    o = o.reshape(o.shape[0], B, HO, *o.shape[-2:])
    return chunks_to_row(jnp.moveaxis(o, 2, 3), T).astype(q.dtype), state.reshape(B, HO, K, V)


def rows(
    q: Queries,
    k: Keys,
    v: Values,
    beta: Strength,
    g: LogDecay | None = None,
    *,
    initial_state: Float[Array, "B HO K V"] | None,
    segment_ids: SegmentIds | None,
) -> tuple[Outputs, Float[Array, "B HO K V"]]:
    """`gated_linear_attention` with a write strength, which belongs to the output head and is a factor of v."""
    if segment_ids is not None and g is None:
        g = jnp.zeros_like(beta)
    repeated = jnp.repeat(v, beta.shape[2] // v.shape[2], axis=2)
    written = (beta[..., None] * repeated).astype(v.dtype)
    arrays = dict(q=q, k=k, v=written, g=g, initial_state=initial_state)
    return segments.within(gated_linear_attention, segment_ids, segments.OF_ROWS, **arrays)
