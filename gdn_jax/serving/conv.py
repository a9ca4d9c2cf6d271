"""The short convolution over a pool of its states, for prompts, for one token and for drafts.

A slot of the pool holds the last W - 1 inputs of a request, [D, W - 1], oldest first. A model keeps such a pool
beside that of its recurrent states and gives both the same slots. Rejected drafts are then dropped from both alike.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from gdn_jax import conv
from gdn_jax.serving import kernels, shards, slots
from gdn_jax.serving.arguments import check_pool, check_sequences, check_slots, choose, slot_count
from gdn_jax.serving.drafts import check_spans, span_addresses, token_mask, walk
from gdn_jax.serving.slots import Indices
from gdn_jax.shapes import check_array

Pool = Float[Array, "slots *state"]


def causal_conv1d(
    x: Float[Array, "B T D"],
    cu_seqlens: Integer[Array, " N1"] | Integer[np.ndarray, " N1"],
    pool: Pool,
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    read_slots: Indices,
    write_slots: Indices | None = None,
    has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"] | None = None,
    activation: str | None = "silu",
    null_slot: int | None = None,
    layer: Any = None,
) -> tuple[Float[Array, "B T D"], Pool]:
    """The convolution of packed sequences, pieces of prompts, whose states lie in a pool, which is donated.

    Args:
      x: inputs [1, T, D], floating.
      cu_seqlens: [N + 1], as for `prefill`; a sequence may be shorter than the filter, or empty.
      pool: the last inputs of every slot [slots, D, W - 1], any floating dtype.
      weight, bias, activation: as for `gdn_jax.causal_conv1d`.
      read_slots, write_slots, has_initial_state, null_slot, layer: as for `prefill`.

    Returns:
      y [1, T, D] in x's dtype, 0 at padding, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.

    Source: vLLM's `causal_conv1d_fn`; pass 1 of Modular's two-pass prefill.
    """
    check_array("x", x, (1, None, None), "1, T, D")
    _check(x.shape[2], pool, weight, layer)
    check_sequences(cu_seqlens, x.shape[1], has_initial_state)
    N = cu_seqlens.shape[0] - 1
    check = partial(check_slots, size=slot_count(pool), null_slot=null_slot)
    check("read_slots", read_slots, (N,), "N", unique=write_slots is None)
    if write_slots is not None:
        check("write_slots", write_slots, (N,), "N", unique=True)
    indices = (cu_seqlens, read_slots, write_slots, has_initial_state)
    indices = tuple(None if y is None else jnp.asarray(y) for y in indices)
    return _prompts(pool, x, weight, bias, *indices, layer, (activation, null_slot))


def causal_conv1d_update(
    x: Float[Array, "B D"],
    pool: Pool,
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    read_slots: Indices,
    write_slots: Indices | None = None,
    activation: str | None = "silu",
    null_slot: int | None = None,
    layer: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B D"], Pool]:
    """One token of every request. The pool is donated.

    Args:
      x: the new inputs [B, D], floating.
      pool, weight, bias, activation: as for `causal_conv1d`.
      read_slots, write_slots, null_slot, layer, implementation: as for `decode`. Two implementations leave the same
        bits in the pool; their y differs by rounding.

    Returns:
      y [B, D] in x's dtype, 0 at padding, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: the named implementation cannot run this call, with the reason.
    """
    check_array("x", x, (None, None), "B, D")
    _check(x.shape[1], pool, weight, layer)
    check = partial(check_slots, size=slot_count(pool), null_slot=null_slot)
    check("read_slots", read_slots, (x.shape[0],), "B", unique=write_slots is None)
    if write_slots is not None:
        check("write_slots", write_slots, (x.shape[0],), "B", unique=True)
    conv.check(x[:, None], weight, bias, activation)
    implementation = choose(implementation, partial(kernels.convolution_unsupported, pool, x, weight, bias))
    indices = (None if y is None else jnp.asarray(y) for y in (read_slots, write_slots))
    return _token(pool, x, weight, bias, *indices, layer, (activation, null_slot), implementation)


def causal_conv1d_verify(
    x: Float[Array, "N T D"],
    pool: Pool,
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    state_slots: Indices,
    num_accepted_tokens: Indices,
    num_tokens: Indices | None = None,
    parents: Indices | None = None,
    activation: str | None = "silu",
    null_slot: int | None = None,
    layer: Any = None,
) -> tuple[Float[Array, "N T D"], Pool]:
    """T = 1 + gamma tokens of every request, with a state after each. The pool is donated.

    Beside a `RingPool`, whose requests have one slot, this pool still has a slot a token: its states are small.

    Args:
      x: the new inputs [N, T, D], floating.
      pool, weight, bias, activation: as for `causal_conv1d`.
      state_slots: [N, T] integers. Everything else as for `verify`: a token of a tree sees those on its own path.

    Returns:
      y [N, T, D] in x's dtype, 0 at padding, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
    """
    check_array("x", x, (None, None, None), "N, T, D")
    _check(x.shape[2], pool, weight, layer)
    spans = (state_slots, num_accepted_tokens, num_tokens, parents)
    check_spans((x.shape[0], x.shape[1]), pool, *spans, null_slot)
    spans = tuple(None if y is None else jnp.asarray(y) for y in spans)
    return _drafts(pool, x, weight, bias, *spans, layer, (activation, null_slot))


def _check(D: int, pool, weight, layer) -> None:
    check_array("weight", weight, (D, None), "D, W")
    check_pool(pool, (D, weight.shape[1] - 1), "D, W - 1", layer)


@partial(jax.jit, static_argnums=9, donate_argnums=0, inline=True)
def _prompts(pool, x, weight, bias, cu_seqlens, read_slots, write_slots, has_initial_state, layer, static):
    activation, null_slot = static
    read, write = slots.addresses(pool, read_slots, write_slots, null_slot, layer)
    state = slots.take(pool, read)
    if has_initial_state is not None:
        state = jnp.where(has_initial_state[:, None, None], state, 0)
    options = dict(activation=activation, initial_state=state, cu_seqlens=cu_seqlens)
    y, state = conv.causal_conv1d(x, weight, bias, **options)
    y = jnp.where(slots.is_real(cu_seqlens, read, x.shape[1])[:, None], y, 0)
    return y, slots.put(pool, write, state)


@partial(jax.jit, static_argnums=(7, 8), donate_argnums=0, inline=True)
def _token(pool, x, weight, bias, read_slots, write_slots, layer, static, implementation):
    activation, null_slot = static
    if implementation == "mosaic_gpu":
        others = (weight, bias, read_slots, write_slots)
        return shards.convolve(kernels.convolve, static, pool, x, *others, layer=layer)
    read, write = slots.addresses(pool, read_slots, write_slots, null_slot, layer)
    y, state = conv.causal_conv1d_update(x, slots.take(pool, read), weight, bias, activation=activation)
    return jnp.where(read.is_slot[:, None], y, 0), slots.put(pool, write, state)


@partial(jax.jit, static_argnums=9, donate_argnums=0, inline=True)
def _drafts(pool, x, weight, bias, state_slots, num_accepted, num_tokens, parents, layer, static):
    activation, null_slot = static
    start, after = span_addresses(pool, state_slots, num_accepted, num_tokens, null_slot, layer)

    def step(state, x):
        y, state = conv.causal_conv1d_update(x, state, weight, bias, activation=activation)
        return state, y

    states, y = walk(step, slots.take(pool, start), x, parents)
    is_token = token_mask(num_tokens, x.shape[1]) & start.is_slot[:, None]
    return jnp.where(is_token[..., None], y, 0), slots.put(pool, after, states)
