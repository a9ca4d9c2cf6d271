"""The family's operations in plain JAX: arguments as callers give them, brought to the two forms and back."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gdn_jax import gates, segments
from gdn_jax.family import chunked, definition
from gdn_jax.family.arrays import Arrays
from gdn_jax.shapes import accumulation_dtype, split_heads
from gdn_jax.xla import Call, kv, traced


def rule(call: Call, x: Arrays, scale: float | jax.Array) -> tuple[jax.Array, jax.Array]:
    """`delta_rule` by the form that the call names."""
    q, k = _normalised(call, x.q, x.k)
    g, erase, write, h_0 = _prepared(call, x)
    form = partial(definition.recurrent_rule, scale=traced(scale), cu_seqlens=x.cu_seqlens)
    if call.implementation != "recurrent":
        options = dict(scale=traced(scale), cu_seqlens=x.cu_seqlens, chunk_size=call.chunk_size)
        form = partial(chunked.chunked_rule, **options)
    arrays = dict(q=q, k=k, v=x.v, g=g, erase=erase, write=write, initial_state=h_0)
    o, final = segments.within(form, x.segment_ids, segments.OF_ROWS, **arrays)
    return o.astype(x.v.dtype), kv(final, call.state_layout)


def step(call: Call, x: Arrays, scale: float | jax.Array) -> tuple[jax.Array, jax.Array]:
    """`delta_step`: everything has a token axis of length 1, and initial_state is the state."""
    q, k = _normalised(call, x.q, x.k)
    g, erase, write, h = _prepared(call, x)
    assert h is not None
    (B, HO), counts = g.shape[::2][:2], (q.shape[2], k.shape[2], x.v.shape[2], g.shape[2])
    tokens = (split_heads(y[:, 0].astype(g.dtype), 1, counts) for y in (q, k, x.v, g, erase, write))
    h, o = definition.recurrent_step(split_heads(h, 1, counts), *tokens, scale=traced(scale))
    state = kv(h.reshape(B, HO, *h.shape[-2:]), call.state_layout)
    return o.reshape(B, HO, -1).astype(x.v.dtype), state.astype(x.initial_state.dtype)


def chunk_states(call: Call, x: Arrays) -> jax.Array:
    """`delta_chunk_states`; q is not read."""
    (k,) = _normalised(call, x.k)
    g, erase, write, h_0 = _prepared(call, x)
    form = partial(chunked.chunk_states_of, cu_seqlens=x.cu_seqlens, chunk_size=call.chunk_size)
    owners = segments.of_chunks(k.shape[1], call.chunk_size)
    arrays = dict(k=k, v=x.v, g=g, erase=erase, write=write, initial_state=h_0)
    return kv(segments.within(form, x.segment_ids, owners, **arrays), call.state_layout)


def _normalised(call: Call, *arrays: jax.Array) -> list[jax.Array]:
    return [gates.l2norm(y) if call.use_qk_l2norm else y for y in arrays]


def _prepared(call: Call, x: Arrays) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """g of every channel, erase and write with an axis of channels, and the initial states, in one dtype."""
    dtype = accumulation_dtype(x.k, x.g, x.erase, x.write, x.initial_state)
    HO = next(y.shape[2] for y in (x.g, x.erase, x.write, x.q, x.v) if y is not None)
    shape = (*x.k.shape[:2], HO)
    g = jnp.zeros_like(x.k, dtype, shape) if x.g is None else x.g.astype(dtype)
    g = g if g.ndim == 4 else g[..., None]
    g = jnp.broadcast_to(g, (*shape, x.k.shape[3]))
    erase, write = (_strength(y, x.k, dtype, shape) for y in (x.erase, x.write))
    h_0 = None if x.initial_state is None else kv(x.initial_state.astype(dtype), call.state_layout)
    return g, erase, write, h_0


def _strength(y: jax.Array | None, like: jax.Array, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    if y is None:
        return jnp.ones_like(like, dtype, (*shape, 1))
    return y.astype(dtype) if y.ndim == 4 else y.astype(dtype)[..., None]
