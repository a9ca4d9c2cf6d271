"""The public operations in plain JAX: arguments as callers give them, brought to the forms and back.

The forms themselves, `definition.recurrent_rule`, `chunked.chunked_rule` for gates of each head and
`channels.chunked_rule` for others, take normalised keys, whole gates and states [K, V]. What stands between them and
a call is here, and nothing else.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax import gates
from gdn_jax.rule import channels, chunked, definition, halves, segments
from gdn_jax.rule.call import ERASURES, HEADS, Arrays, Call
from gdn_jax.shapes import (
    STATE_LAYOUTS,
    AnyStates,
    Outputs,
    Scale,
    accumulation_dtype,
    split_heads,
)


def rule(call: Call, x: Arrays, scale: Scale) -> tuple[Outputs, AnyStates]:
    """`delta_rule` by the form that the call names."""
    if call.gates == ERASURES:
        o, final = rule(*halves.in_rows(call, x), scale)
        return halves.read(o), final
    options: dict[str, Any] = dict(scale=traced(scale), cu_seqlens=x.cu_seqlens)
    form = partial(definition.recurrent_rule, **options)
    if call.form != "recurrent":
        form = partial(_chunks(call).chunked_rule, **options, chunk_size=call.chunk_size)
    o, final = segments.within(form, x.segment_ids, segments.OF_ROWS, **_prepared(call, x))
    return o.astype(x.v.dtype), kv(final, call.state_layout)


def step(call: Call, x: Arrays, scale: Scale) -> tuple[Float[Array, "B HO V"], AnyStates]:
    """`delta_step`; arrays of tokens have a token axis of length 1, initial_state is the state."""
    arrays = _prepared(call, x)
    h, dtype = arrays.pop("initial_state"), arrays["g"].dtype
    counts = (x.q.shape[2], x.k.shape[2], x.v.shape[2], h.shape[1])
    tokens = {name: split_heads(y[:, 0].astype(dtype), 1, counts) for name, y in arrays.items()}
    form = definition.recurrent_step if call.gates == HEADS else definition.channel_step
    new, o = form(split_heads(h, 1, counts), **tokens, scale=traced(scale))
    state = kv(new.reshape(h.shape), call.state_layout).astype(x.initial_state.dtype)
    return o.reshape(*h.shape[:2], h.shape[3]).astype(x.v.dtype), state


def chunk_states(call: Call, x: Arrays) -> Float[Array, "B L HO _ _"]:
    """`delta_chunk_states`; there is no q."""
    form = partial(_chunks(call).chunk_states_of, cu_seqlens=x.cu_seqlens, chunk_size=call.chunk_size)
    owners = segments.of_chunks(x.k.shape[1], call.chunk_size)
    states = segments.within(form, x.segment_ids, owners, **_prepared(call, x))
    return kv(states, call.state_layout)


def traced(scale: Scale) -> Scale:
    """The factor as the forms take it: an array, or a number that JAX makes a part of what it traces."""
    return scale if isinstance(scale, jax.Array) else float(scale)


def _chunks(call: Call) -> Any:
    """The chunked form of the call's gates."""
    return chunked if call.gates == HEADS else channels


def _prepared(call: Call, x: Arrays) -> dict[str, Any]:
    """The arrays of a form by name: q and k of unit length where the call asks for it, whole gates of one dtype,
    states [K, V]."""
    dtype = accumulation_dtype(x.k, *x[3:7])
    shape = *x.k.shape[:2], x.num_heads
    arrays = {name: y for name, y in (("q", x.q), ("k", x.k)) if y is not None}
    if call.use_qk_l2norm:
        arrays = {name: gates.l2norm(y) for name, y in arrays.items()}
    if call.gates == HEADS:
        g = gates.no_gate(x.k, shape, dtype) if x.g is None else x.g.astype(dtype)
        strengths = dict(beta=_strength(x.erase, x.k, dtype, shape))
    else:
        g = jnp.zeros_like(x.k, dtype, shape) if x.g is None else x.g.astype(dtype)
        g = jnp.broadcast_to(g if g.ndim == 4 else g[..., None], (*shape, x.k.shape[3]))
        apart = dict(erase=x.erase, write=x.erase if call.is_beta else x.write)
        strengths = {name: _strength(y, x.k, dtype, (*shape, 1)) for name, y in apart.items()}
    h_0 = None if x.initial_state is None else kv(x.initial_state.astype(dtype), call.state_layout)
    return arrays | dict(v=x.v, g=g, **strengths, initial_state=h_0)


def _strength(y: jax.Array | None, like: jax.Array, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    """A strength with the axes of that shape, of which the last may be one of channels; 1 for None."""
    if y is None:
        return jnp.ones_like(like, dtype, shape)
    y = y.astype(dtype)
    return y if y.ndim == len(shape) else y[..., None]


def kv(state: jax.Array, layout: str) -> jax.Array:
    """Between [.., K, V] and the caller's layout; its own inverse."""
    return state if layout == STATE_LAYOUTS[0] else jnp.swapaxes(state, -1, -2)
