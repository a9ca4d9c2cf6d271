"""Whole prompts, or pieces of prompts, of several requests: from states in a pool to states in a pool."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from gdn_jax import ops, packing
from gdn_jax.serving import kernels, ring, shards, slots
from gdn_jax.serving.arguments import (
    check_integers,
    check_pool,
    check_scale,
    check_sequences,
    check_slots,
    check_values,
    slot_count,
    state_shape,
)
from gdn_jax.serving.pools import RingPool, check_ring
from gdn_jax.serving.slots import Address, Indices
from gdn_jax.serving.tokens import alone
from gdn_jax.shapes import accumulation_dtype, rule_dims

Pool = Float[Array, "slots *state"] | RingPool

GRID = 64
"""Tokens of a chunk where bits count: pieces of a prompt that end on multiples of it can have the whole's bits."""


def prefill(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | None,
    beta: Float[Array, "B T HO"] | None,
    cu_seqlens: Integer[Array, " N1"] | Integer[np.ndarray, " N1"],
    pool: Pool,
    *,
    read_slots: Indices,
    write_slots: Indices | None = None,
    has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"] | None = None,
    checkpoint_every: int | None = None,
    checkpoint_slots: Indices | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    null_slot: int | None = None,
    layer: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T HO V"], Pool]:
    """The gated delta rule over packed sequences whose states lie in a pool, which is donated.

    A prompt may come in pieces, each going on from the state that the one before left. A sequence without tokens
    keeps its state.

    Args:
      q, k, v, g, beta: of the packed tokens [1, T, ...], as for `gated_delta_rule`.
      cu_seqlens: [N + 1] ascending integers from 0; sequence n owns tokens [cu[n], cu[n + 1]). Tokens past cu[-1] are
        padding with output 0. Other lengths do not compile again.
      pool: states [slots, HO, K, V], or [slots, HO, V, K] with state_layout "vk", of any floating dtype; or a
        `RingPool`, whose rings are empty afterwards.
      read_slots: [N] integers, where the states are. -1 is padding: output 0, and nothing is read or written. The
        tokens of such a sequence are finite.
      write_slots: [N] integers, where the new states go; by default where they were. No slot twice. At -1 the output
        is computed and the state dropped.
      has_initial_state: [N], False for a new request: it starts from zeros, whatever its slot holds. By default all
        have one.
      checkpoint_every: tokens between two states to keep, a multiple of 64 and of chunk_size.
      checkpoint_slots: [N, M] integers: the state after (m + 1) * checkpoint_every tokens of sequence n in this call
        goes to checkpoint_slots[n, m], as when a prefix is to be shared. At -1, and past the end of the sequence,
        none is kept.
      scale, use_qk_l2norm, state_layout, chunk_size: as for `gated_delta_rule`.
      null_slot, layer: as for `decode`.
      batch_invariant: the bits of a sequence do not depend on the others of the call. Chunks of 64 tokens then come
        one after the other, which is slower. With a pool that does not round, pieces that end on multiples of 64
        tokens have the bits of the whole prompt.
      implementation: of `gated_delta_rule`. Where that is "mosaic_gpu", the kernels read states in their slots and
        write them there, if the pool is an array of float32 or bfloat16, K and V are multiples of 64, scale is from
        2^-16 to 16, neither checkpoints nor batch_invariant are asked for, and the call is not inside a `shard_map`
        that keeps check_vma; such a call cannot be differentiated. In all other calls states are taken out of the
        pool and put back.

    Returns:
      o [1, T, HO, V] in q's dtype, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came. As in `decode`, values are looked
        at where they are known or with `debug_checks` on.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Numerics: as `gated_delta_rule`; states are rounded once, to the pool's dtype. States at checkpoints are computed
      in float32.
    Source: FlashInfer's `chunk_gated_delta_rule` with `state_indices` and `checkpoint_every_n_tokens`.
    """
    check_integers("cu_seqlens", cu_seqlens, (None,), "N + 1")
    offsets = jax.ShapeDtypeStruct(cu_seqlens.shape, cu_seqlens.dtype)
    dims = rule_dims(q, k, v, g, beta, None, offsets, None, state_layout)
    is_ring = isinstance(pool, RingPool)
    check_pool(pool.state if is_ring else pool, *state_shape(dims, state_layout), layer)
    if is_ring:
        check_ring(pool, dims, layer)
    check_sequences(cu_seqlens, dims.T, has_initial_state)
    size = slot_count(pool)
    check = partial(check_slots, size=size, null_slot=null_slot)
    check("read_slots", read_slots, (dims.N,), "N", unique=write_slots is None)
    if write_slots is not None:
        check("write_slots", write_slots, (dims.N,), "N", unique=True)
    if (checkpoint_every is None) != (checkpoint_slots is None):
        raise ValueError("checkpoint_slots: expected together with checkpoint_every, got one of the two")
    if checkpoint_every is not None:
        grid = int(np.lcm(GRID, chunk_size))
        if checkpoint_every < 1 or checkpoint_every % grid:
            raise ValueError(f"checkpoint_every: expected a multiple of {grid}, got {checkpoint_every}")
        check("checkpoint_slots", checkpoint_slots, (dims.N, None), "N, M", unique=True)
        written = read_slots if write_slots is None else write_slots
        check_values(partial(_check_apart, null_slot), written, checkpoint_slots)
    scale = check_scale(scale, dims)
    tokens, indices = (q, k, v, g, beta), (cu_seqlens, read_slots, write_slots, has_initial_state)
    indices = tuple(None if x is None else jnp.asarray(x) for x in indices)
    if not (is_ring or batch_invariant or checkpoint_every):
        plain = kernels.PromptOptions(scale, use_qk_l2norm, state_layout, null_slot)
        if kernels.take_prompts(dims, tokens, offsets, pool, plain, chunk_size, implementation):
            return _prefill_in_place(pool, tokens, *indices, layer, plain)
    options = dict(
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        state_layout=state_layout,
        chunk_size=GRID if batch_invariant else chunk_size,
        implementation=implementation,
    )
    checkpoints = None if checkpoint_slots is None else jnp.asarray(checkpoint_slots)
    static = (checkpoint_every, null_slot, batch_invariant, tuple(options.items()))
    return _prefill(pool, tokens, *indices, checkpoints, layer, static)


def _check_apart(null_slot: int | None, written, checkpoints) -> None:
    both = np.intersect1d(written, checkpoints)
    both = both[(both >= 0) & (both != (-1 if null_slot is None else null_slot))]
    if both.size:
        raise ValueError(
            f"checkpoint_slots: expected other slots than those of final states, got {int(both[0])}"
        )


@partial(jax.jit, static_argnums=7, donate_argnums=0, inline=True)
def _prefill_in_place(
    pool,
    tokens,
    cu_seqlens,
    read_slots,
    write_slots,
    has_initial_state,
    layer,
    options: kernels.PromptOptions,
):
    if ops.debug_checks_are_on():
        ops.check_values(tokens[0].shape[1], tokens[3], None)
        shards.warn_of_gathered_prompts(pool, tokens)
    slots = read_slots, write_slots, has_initial_state
    return shards.serve_prompts(kernels.prefill, options, pool, tokens, cu_seqlens, *slots, layer)


@partial(jax.jit, static_argnums=8, donate_argnums=0, inline=True)
def _prefill(
    pool, tokens, cu_seqlens, read_slots, write_slots, has_initial_state, checkpoint_slots, layer, static
):
    every, null_slot, batch_invariant, options = static
    options = dict(options)
    read, write = slots.addresses(pool, read_slots, write_slots, null_slot, layer)
    states = pool.state if isinstance(pool, RingPool) else pool
    initial = _states(pool, read, accumulation_dtype(*tokens, states), options["state_layout"])
    if has_initial_state is not None:
        initial = jnp.where(has_initial_state[:, None, None, None], initial, 0)
    # A sequence without a slot starts from zeros; if it writes nothing either, its outputs are zeros. The gates are
    # the smallest arrays by which that can be said.
    q, k, v, g, beta = tokens
    is_real = slots.is_real(cu_seqlens, read, q.shape[1])[:, None]
    if beta is None:
        beta = jnp.ones_like(initial, shape=(1, q.shape[1], initial.shape[1]))
    tokens = (q, k, v, g, jnp.where(is_real, beta, 0))
    keep = checkpoint_slots is not None
    if batch_invariant:
        o, final, h = _by_chunks(tokens, cu_seqlens, initial, keep, options)
    else:
        o, final = ops.gated_delta_rule(*tokens, initial_state=initial, cu_seqlens=cu_seqlens, **options)
        h = _chunk_states(tokens, final, cu_seqlens, initial, options) if keep else None
    if h is not None:
        at = Address.of(checkpoint_slots, pool, null_slot, layer).only(read.is_slot[:, None])
        pool = _keep(pool, at, h, final, cu_seqlens, every, options["chunk_size"])
    return o, _store(pool, write, final)


def _keep(pool, at: Address, h: Array, final: Array, cu_seqlens: Int[Array, " N1"], every: int, C: int):
    """The pool with the states after every so many tokens of each sequence, from those at the chunks' starts."""
    after, length = every * (1 + jnp.arange(at.slot.shape[1])), jnp.diff(cu_seqlens)[:, None]
    chunks = -(-length // C)
    chunk = jnp.cumsum(chunks, axis=0) - chunks + after // C  # that begins there, if the sequence goes on
    goes_on = (after < length)[..., None, None, None]
    states = jnp.where(goes_on, h.at[chunk].get(mode="clip"), final[:, None])
    return _store(pool, at.only(after <= length), states)


def _states(pool, at: Address, dtype, state_layout: str) -> Array:
    if isinstance(pool, RingPool):
        return ring.present_states(pool, at, state_layout).astype(dtype)
    return slots.take(pool, at).astype(dtype)


def _store(pool, at: Address, states: Array):
    return ring.put_states(pool, at, states) if isinstance(pool, RingPool) else slots.put(pool, at, states)


def _chunk_states(tokens, final, cu_seqlens, initial, options) -> Float[Array, "L HO _ _"]:
    """States at the start of every chunk of `packing.packed_chunks`."""
    _, k, v, g, beta = tokens
    if g is None:
        g = jnp.zeros((*k.shape[:2], final.shape[1]), final.dtype)
    h = ops.chunk_states(
        k,
        v,
        g,
        beta,
        initial_state=initial,
        cu_seqlens=cu_seqlens,
        use_k_l2norm=options["use_qk_l2norm"],
        state_layout=options["state_layout"],
        chunk_size=options["chunk_size"],
    )
    return h[0]


def _by_chunks(
    tokens, cu_seqlens: Int[Array, " N1"], initial: Array, keep: bool, options: dict
) -> tuple[Array, Array, Array | None]:
    """The rule chunk by chunk, each by the same compiled code: outputs, final states, states at chunks' starts."""
    T = tokens[0].shape[1]
    table = packing.packed_chunks(cu_seqlens, T, GRID)
    chunks = [None if x is None else packing.gather_chunks(x, table) for x in tokens]
    work = (table.sequence, table.owned.any(1), chunks)

    def chunk(states, x):
        n, is_used, x = x
        run = alone(lambda x, h: ops.gated_delta_rule(*x, initial_state=h, **options))
        o, h = run(x, states[n][None])
        before = states[n] if keep else None
        return states.at[n].set(jnp.where(is_used, h[0], states[n])), (o, before)

    if table.owned.shape[0] == 1:  # a loop of one iteration would be compiled as no loop at all
        work = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x)]), work)
    final, (o, h) = lax.scan(chunk, initial, work)
    return packing.scatter_chunks(o[: table.owned.shape[0]], table), final, h
