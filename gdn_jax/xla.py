"""The public operations in plain JAX: arguments as callers give them, brought to the two forms and back.

The forms themselves, `reference.recurrent_rule` and `chunked.chunked_rule`, take normalised keys, whole gates and
states [K, V]. What stands between them and a call is here, and nothing else.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax import chunked, gates, reference, segments
from gdn_jax.shapes import (
    STATE_LAYOUTS,
    AnyStates,
    Outputs,
    RuleArrays,
    Scale,
    accumulation_dtype,
    split_heads,
)


class Call(NamedTuple):
    """Everything that a call is compiled for, besides shapes."""

    use_qk_l2norm: bool
    state_layout: str
    implementation: str = "chunked"
    """The form, "recurrent" or "chunked"."""
    chunk_size: int = 64


def rule(call: Call, x: RuleArrays, scale: Scale) -> tuple[Outputs, AnyStates]:
    """`gated_delta_rule` by the form that the call names."""
    q, k, v = x.q, x.k, x.v
    if call.use_qk_l2norm:
        q, k = gates.l2norm(q), gates.l2norm(k)
    g, beta = _full_gates(max(q.shape[2], v.shape[2]), q, x.g, x.beta, x.initial_state)
    h_0 = x.initial_state
    if h_0 is not None:
        h_0 = kv(h_0.astype(g.dtype), call.state_layout)
    form = partial(reference.recurrent_rule, scale=traced(scale), cu_seqlens=x.cu_seqlens)
    if call.implementation != "recurrent":
        options = dict(scale=traced(scale), cu_seqlens=x.cu_seqlens, chunk_size=call.chunk_size)
        form = partial(chunked.chunked_rule, **options)
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=h_0)
    o, final = segments.within(form, x.segment_ids, segments.OF_ROWS, **arrays)
    return o.astype(v.dtype), kv(final, call.state_layout)


def step(call: Call, x: RuleArrays, scale: Scale) -> tuple[Float[Array, "B HO V"], AnyStates]:
    """`gated_delta_step`; q, k, v, g and beta have a token axis of length 1, initial_state is the state."""
    q, k, v, state = x.q, x.k, x.v, x.initial_state
    if call.use_qk_l2norm:
        q, k = gates.l2norm(q), gates.l2norm(k)
    (B, HO), (K, V) = state.shape[:2], (q.shape[3], v.shape[3])
    g, beta = _full_gates(HO, q, x.g, x.beta, state)
    counts = (q.shape[2], k.shape[2], v.shape[2], HO)
    tokens = (split_heads(y[:, 0].astype(g.dtype), 1, counts) for y in (q, k, v, g, beta))
    h = split_heads(kv(state.astype(g.dtype), call.state_layout), 1, counts)
    h, o = reference.recurrent_step(h, *tokens, scale=traced(scale))
    h = h.reshape(B, HO, K, V)
    return o.reshape(B, HO, V).astype(v.dtype), kv(h, call.state_layout).astype(state.dtype)


def chunk_states(call: Call, x: RuleArrays) -> Float[Array, "B L HO _ _"]:
    """`chunk_states`; q is not read."""
    HO = next((y.shape[2] for y in (x.g, x.beta) if y is not None), max(x.k.shape[2], x.v.shape[2]))
    k = gates.l2norm(x.k) if call.use_qk_l2norm else x.k
    g, beta = _full_gates(HO, k, x.g, x.beta, x.initial_state)
    h_0 = x.initial_state
    if h_0 is not None:
        h_0 = kv(h_0.astype(g.dtype), call.state_layout)
    form = partial(chunked.chunk_states_of, cu_seqlens=x.cu_seqlens, chunk_size=call.chunk_size)
    owners = segments.of_chunks(k.shape[1], call.chunk_size)
    states = segments.within(form, x.segment_ids, owners, k=k, v=x.v, g=g, beta=beta, initial_state=h_0)
    return kv(states, call.state_layout)


def traced(scale: Scale) -> Scale:
    """The factor as the forms take it: an array, or a number that JAX makes a part of what it traces."""
    return scale if isinstance(scale, jax.Array) else float(scale)


def _full_gates(HO: int, x, g, beta, state) -> tuple[jax.Array, jax.Array]:
    """g and beta for HO heads as full arrays of the accumulation dtype; x is q or k."""
    dtype = accumulation_dtype(x, g, beta, state)
    shape = (*x.shape[:2], HO)
    g = gates.no_gate(x, shape, dtype) if g is None else g.astype(dtype)
    beta = jnp.ones_like(x, dtype, shape) if beta is None else beta.astype(dtype)
    return g, beta


def kv(state: jax.Array, layout: str) -> jax.Array:
    """Between [.., K, V] and the caller's layout; its own inverse."""
    return state if layout == STATE_LAYOUTS[0] else jnp.swapaxes(state, -1, -2)
