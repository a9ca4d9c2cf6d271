"""Several tokens of every running request at once: speculative decoding with a state after each token.

A step takes the last sampled token and gamma drafts. After it the caller knows how many were accepted, and says so in
the next step, which starts from the state after the last accepted token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from gdn_jax import ops
from gdn_jax.serving import kernels, ring, shards, slots
from gdn_jax.serving.arguments import (
    check_integers,
    check_pool,
    check_range,
    check_scale,
    check_slots,
    check_values,
    choose,
    slot_count,
    state_shape,
    token_dims,
)
from gdn_jax.serving.pools import RingPool, check_ring
from gdn_jax.serving.slots import Address, Indices
from gdn_jax.serving.tokens import Options, Raw, Tokens, by_row, prepare, step
from gdn_jax.shapes import STATE_LAYOUTS

Pool = Float[Array, "slots *state"] | RingPool


def verify(
    q: Float[Array, "N T Hq K"],
    k: Float[Array, "N T Hk K"],
    v: Float[Array, "N T HV V"],
    a: Float[Array, "N T HO"],
    b: Float[Array, "N T HO"],
    pool: Pool,
    *,
    A_log: Float[Array, " HO"],
    dt_bias: Float[Array, " HO"],
    state_slots: Indices,
    num_accepted_tokens: Indices,
    num_tokens: Indices | None = None,
    parents: Indices | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "N T HO V"], Pool]:
    """T = 1 + gamma tokens of every request, of which the caller will accept some. The pool is donated.

    A pool of states keeps one after every token: request n starts from
    pool[state_slots[n, num_accepted_tokens[n] - 1]], and its state after token t goes to state_slots[n, t]. A
    `RingPool` needs one slot a request and no state a token: drafts are appended to the ring, and those that were not
    accepted are dropped by the next call.

    Args:
      q, k, v, a, b, A_log, dt_bias, pool: as for `decode`, with the tokens of a request as the second axis.
      state_slots: [N, T] integers, no slot twice; at -1 no state is kept. With a `RingPool` [N].
      num_accepted_tokens: [N] integers from 1 to T: how many tokens of the call before were accepted, the sampled one
        among them. 1 after `prefill` or `decode`, which leave one state. With parents it is 1 + the last accepted
        token's index. A request that starts from slot -1 is padding: output 0, and nothing is read or written.
      num_tokens: [N] integers from 0 to T, how many tokens of each request there are; the others are padding. By
        default all.
      parents: [N, T] integers for a tree of drafts: the token that each one follows, which comes before it; -1 for
        the last accepted one. By default each follows the one before. A `RingPool` has to be made for trees. To
        the kernels a token that does not follow the one before it costs the arithmetic of its ancestors again, so
        branches are best passed one behind the other.
      scale, use_qk_l2norm, allow_neg_eigval, state_layout, null_slot, layer, batch_invariant, implementation: as for
        `decode`.

    Returns:
      o [N, T, HO, V] in v's dtype, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came. As in `decode`, values are looked
        at where they are known or with `debug_checks` on; without it, a request with a wrong num_accepted_tokens is
        padding.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Numerics: as `decode`. The states between the tokens of a call are not rounded to the pool's dtype, along a branch
      neither: no state that the call wrote is read again.
    Source: vLLM's `fused_recurrent_gated_delta_rule` with `ssm_state_indices` [N, 1 + gamma]; SGLang's
      `retrieve_parent_token`.
    """
    dims = token_dims(q, k, v, a, b, A_log, dt_bias, letters="N, T", state_layout=state_layout)
    is_ring = isinstance(pool, RingPool)
    check_pool(pool.state if is_ring else pool, *state_shape(dims, state_layout), layer)
    check_spans((dims.B, dims.T), pool, state_slots, num_accepted_tokens, num_tokens, parents, null_slot)
    if is_ring:
        check_ring(pool, dims, layer)
        if dims.T > pool.length:
            raise ValueError(
                f"q: expected at most {pool.length} tokens, the length of the ring, got {dims.T}"
            )
        if parents is not None and pool.parents is None:
            raise ValueError("parents: expected a ring that is made for trees, see make_ring_pool")
    raw = Raw(q, k, v, a, b, A_log, dt_bias)
    kv_layout = state_layout == STATE_LAYOUTS[0]
    no_kernel = partial(kernels.unsupported, raw, pool, is_tree=parents is not None, kv_layout=kv_layout)
    options = Options(
        dims,
        check_scale(scale, dims),
        use_qk_l2norm,
        allow_neg_eigval,
        state_layout,
        null_slot,
        batch_invariant,
        choose(implementation, no_kernel),
    )
    if ops.debug_checks_are_on():
        shards.warn_of_gathered(pool, raw)
    spans = (state_slots, num_accepted_tokens, num_tokens, parents)
    spans = tuple(None if x is None else jnp.asarray(x) for x in spans)
    return _verify(pool, raw, *spans, layer, options)


def check_spans(
    size: tuple[int, int], pool, state_slots, num_accepted_tokens, num_tokens, parents, null_slot
) -> None:
    """Checks the arguments [N] and [N, T] that say where the tokens of a call begin, end and follow one another."""
    N, T = size
    shape, letters = ((N,), "N") if isinstance(pool, RingPool) else ((N, T), "N, T")
    check_slots(
        "state_slots", state_slots, shape, letters, slot_count(pool), null_slot=null_slot, unique=True
    )
    check_integers("num_accepted_tokens", num_accepted_tokens, (N,), "N")
    check_range("num_accepted_tokens", num_accepted_tokens, 1, T)
    if num_tokens is not None:
        check_integers("num_tokens", num_tokens, (N,), "N")
        check_range("num_tokens", num_tokens, 0, T)
    if parents is not None:
        check_integers("parents", parents, (N, T), "N, T")
        check_values(_check_parents, parents)


def _check_parents(parents) -> None:
    parents = np.asarray(parents)
    if ((parents < -1) | (parents >= np.arange(parents.shape[1]))).any():
        raise ValueError(
            f"parents: expected an earlier token of the row for each, or -1, got {parents.tolist()}"
        )


def span_addresses(
    pool: Any,
    state_slots: Array,
    num_accepted: Array,
    num_tokens: Array | None,
    null_slot: int | None,
    layer: Any,
) -> tuple[Address, Address]:
    """Where each request starts [N], and where the state after each token goes [N, T]."""
    T = state_slots.shape[1]
    last = num_accepted.astype(jnp.int32) - 1
    start = jnp.take_along_axis(state_slots, jnp.clip(last, 0, T - 1)[:, None], axis=1)[:, 0]
    start = Address.of(start, pool, null_slot, layer).only((last >= 0) & (last < T))
    is_token = start.is_slot[:, None] & token_mask(num_tokens, T)
    return start, Address.of(state_slots, pool, null_slot, layer).only(is_token)


def token_mask(num_tokens: Integer[Array, " N"] | None, T: int) -> Array:
    """[N or 1, T]: which tokens there are."""
    if num_tokens is None:
        return jnp.ones((1, T), bool)
    return jnp.arange(T) < num_tokens[:, None]


def walk(step: Callable, state: Array, tokens: Any, parents: Array | None) -> tuple[Array, Array]:
    """Applies step(state, token) -> (state, output) along the tokens of every request.

    Args:
      state: before the first token [N, ...].
      tokens: a pytree of arrays [N, T, ...].
      parents: [N, T], see `verify`; None for chains.

    Returns:
      The states after every token and the outputs, [N, T, ...].
    """
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    if parents is None:

        def follow(state, x):
            state, o = step(state, x)
            return state, (state, o)

        _, (states, o) = lax.scan(follow, state, tokens)
    else:
        N, T = parents.shape
        request = jnp.arange(N)
        states = jnp.zeros((T + 1, *state.shape), state.dtype).at[0].set(state)

        def branch(states, x):
            t, parent, x = x
            state, o = step(states[parent + 1, request], x)
            return states.at[t + 1].set(state), o

        states, o = lax.scan(branch, states, (jnp.arange(T), parents.T, tokens))
        states = states[1:]
    return jnp.moveaxis(states, 0, 1), jnp.moveaxis(o, 0, 1)


@partial(jax.jit, static_argnums=7, donate_argnums=0, inline=True)
def _verify(pool, raw: Raw, state_slots, num_accepted, num_tokens, parents, layer, options: Options):
    others = (state_slots, num_accepted, num_tokens, parents, layer)
    return shards.serve(_verify_on_shard, options, pool, raw, *others)


def _verify_on_shard(options: Options, pool, raw: Raw, state_slots, num_accepted, num_tokens, parents, layer):
    by_kernels = options.implementation == "mosaic_gpu"
    if isinstance(pool, RingPool):
        at = Address.of(state_slots, pool, options.null_slot, layer)
        at = at.only((num_accepted >= 1) & (num_accepted <= options.dims.T))
        if by_kernels:
            if pool.parents is None:
                return kernels.verify_on_ring(pool, raw, at, num_accepted, num_tokens, None, options)
            pool = ring.drop(pool, at, num_accepted)
            o, pool = kernels.verify_on_ring(pool, raw, at, num_accepted, num_tokens, parents, options)
            return o, ring.put_parents(pool, at, parents, options.dims.T)
        o, pool = ring.verify(pool, raw, at, num_accepted, num_tokens, parents, options)
    else:
        at, after = span_addresses(pool, state_slots, num_accepted, num_tokens, options.null_slot, layer)
        if by_kernels:
            return kernels.verify(pool, raw, at, after, num_tokens, parents, options)
        o, pool = _plain(pool, raw, at, after, parents, options)
    is_token = token_mask(num_tokens, options.dims.T) & at.is_slot[:, None]
    return jnp.where(is_token[..., None, None], o, 0).astype(raw.v.dtype), pool


def _plain(pool, raw: Raw, start: Address, after: Address, parents, options: Options):
    tokens = prepare(raw, pool, options)
    h = options.swap(slots.take(pool, start).astype(tokens.g.dtype))

    def along(h, tokens: Tokens, parents):
        return walk(partial(step, options=options), h, tokens, parents)

    h, o = by_row(along, options, h, tokens, parents)
    return o, slots.put(pool, after, options.swap(h))
