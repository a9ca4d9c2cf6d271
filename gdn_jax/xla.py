"""The public operations in plain JAX: arguments as callers give them, brought to the two forms and back.

The forms themselves, `reference.recurrent_rule` and `chunked.chunked_rule`, take normalised keys, whole gates and
states [K, V]. What stands between them and a call is here, and nothing else.
"""

import jax
import jax.numpy as jnp

from gdn_jax import chunked, gates, packing, reference
from gdn_jax.shapes import STATE_LAYOUTS, RuleArrays, accumulation_dtype, split_heads


def rule(
    x: RuleArrays,
    scale: float | jax.Array,
    *,
    implementation: str,
    use_qk_l2norm: bool,
    state_layout: str,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` by the form of that name, "recurrent" or "chunked"."""
    q, k, v = x.q, x.k, x.v
    if use_qk_l2norm:
        q, k = gates.l2norm(q), gates.l2norm(k)
    g, beta = _full_gates(max(q.shape[2], v.shape[2]), q, x.g, x.beta, x.initial_state)
    if x.segment_ids is not None:
        g = packing.reset_at_segments(g, x.segment_ids)
    h_0 = x.initial_state
    if h_0 is not None:
        h_0 = _kv(h_0.astype(g.dtype), state_layout)
    options = dict(scale=scale, cu_seqlens=x.cu_seqlens)
    if implementation == "recurrent":
        o, final = reference.recurrent_rule(q, k, v, g, beta, h_0, **options)
    else:
        o, final = chunked.chunked_rule(q, k, v, g, beta, h_0, chunk_size=chunk_size, **options)
    return o.astype(v.dtype), _kv(final, state_layout)


def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array | None,
    state: jax.Array,
    *,
    scale: float | jax.Array,
    use_qk_l2norm: bool,
    state_layout: str,
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_step`; q, k, v, g and beta have a token axis of length 1."""
    if use_qk_l2norm:
        q, k = gates.l2norm(q), gates.l2norm(k)
    (B, HO), (K, V) = state.shape[:2], (q.shape[3], v.shape[3])
    g, beta = _full_gates(HO, q, g, beta, state)
    counts = (q.shape[2], k.shape[2], v.shape[2], HO)
    tokens = (split_heads(x[:, 0].astype(g.dtype), 1, counts) for x in (q, k, v, g, beta))
    h = split_heads(_kv(state.astype(g.dtype), state_layout), 1, counts)
    h, o = reference.recurrent_step(h, *tokens, scale=scale)
    h = h.reshape(B, HO, K, V)
    return o.reshape(B, HO, V).astype(v.dtype), _kv(h, state_layout).astype(state.dtype)


def chunk_states(x: RuleArrays, *, use_k_l2norm: bool, state_layout: str, chunk_size: int) -> jax.Array:
    """`chunk_states`; q is not read."""
    HO = next((y.shape[2] for y in (x.g, x.beta) if y is not None), max(x.k.shape[2], x.v.shape[2]))
    k = gates.l2norm(x.k) if use_k_l2norm else x.k
    g, beta = _full_gates(HO, k, x.g, x.beta, x.initial_state)
    if x.segment_ids is not None:
        g = packing.reset_at_segments(g, x.segment_ids)
    h_0 = x.initial_state
    if h_0 is not None:
        h_0 = _kv(h_0.astype(g.dtype), state_layout)
    options = dict(cu_seqlens=x.cu_seqlens, chunk_size=chunk_size)
    return _kv(chunked.chunk_states_of(k, x.v, g, beta, h_0, **options), state_layout)


def _full_gates(HO: int, x, g, beta, state) -> tuple[jax.Array, jax.Array]:
    """g and beta for HO heads as full arrays of the accumulation dtype; x is q or k."""
    dtype = accumulation_dtype(x, g, beta, state)
    shape = (*x.shape[:2], HO)
    g = gates.no_gate(x, shape, dtype) if g is None else g.astype(dtype)
    beta = jnp.ones_like(x, dtype, shape) if beta is None else beta.astype(dtype)
    return g, beta


def _kv(state: jax.Array, layout: str) -> jax.Array:
    """Between [.., K, V] and the caller's layout; its own inverse."""
    return state if layout == STATE_LAYOUTS[0] else jnp.swapaxes(state, -1, -2)
