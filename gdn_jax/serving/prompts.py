"""Whole prompts, or pieces of prompts, of several requests: from states in a pool to states in a pool."""

from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from gdn_jax.gates import log_decay_from_alpha
from gdn_jax.rule import arguments
from gdn_jax.serving import shards
from gdn_jax.serving.arguments import check_integers, check_sequences, check_slots, check_values
from gdn_jax.serving.call import At, PromptCall
from gdn_jax.serving.pools import GRID
from gdn_jax.serving.prompt_tokens import Prompts
from gdn_jax.serving.ring_arrays import Arrays
from gdn_jax.serving.slots import Indices
from gdn_jax.serving.states import opened
from gdn_jax.serving.tokens import heads_of
from gdn_jax.shapes import check_array, check_channels, check_whole


def prefill(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | Float[Array, "B T HO K"] | None,
    beta: Float[Array, "B T HO"] | None,
    cu_seqlens: Integer[Array, " N1"] | Integer[np.ndarray, " N1"],
    pool: Arrays,
    *,
    erase: Float[Array, "B T HO"] | Float[Array, "B T HO K"] | None = None,
    write: Float[Array, "B T HO"] | Float[Array, "B T HO V"] | None = None,
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
) -> tuple[Float[Array, "B T HO V"], Arrays]:
    """The delta rule over packed sequences whose states lie in a pool, which is donated.

    A prompt may come in pieces, each going on from the state that the one before left. A sequence without tokens
    keeps its state, and one that is new has zeros.

    Args:
      q, k, v, g, beta, erase, write: arrays of the packed tokens [1, T, ...], as for `delta_rule`, which is
        `gated_delta_rule` for g and beta of each head.
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
      batch_invariant: the bits of a sequence do not depend on other sequences of the call. Chunks of 64 tokens then
        come one after the other, which is slower. With a pool that does not round, pieces that end on multiples of 64
        tokens have the bits of the whole prompt.
      implementation: of `delta_rule`. Where that is "mosaic_gpu", the kernels read states in their slots and write
        them there, if g and beta are of each head, the pool is an array of float32 or bfloat16, K and V are multiples
        of 64, scale is from 2^-16 to 16, neither checkpoints nor batch_invariant are asked for, and the call is not
        inside a `shard_map` that keeps check_vma; such a call cannot be differentiated. In all other calls states are
        taken out of the pool and put back.

    Returns:
      o [1, T, HO, V] in q's dtype, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came. As in `decode`, values are looked
        at where they are known or with `debug_checks` on.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Numerics: as `delta_rule`; states are rounded once, to the pool's dtype. States at checkpoints are computed
      in float32.
    Source: FlashInfer's `chunk_gated_delta_rule` with `state_indices` and `checkpoint_every_n_tokens`.
    """
    check_integers("cu_seqlens", cu_seqlens, (None,), "N + 1")
    tokens = Prompts(q, k, v, g, beta, erase, write, cu_seqlens)
    dims = tokens.check(state_layout)
    memory = opened(pool, state_layout, null_slot)
    at = At(read_slots, write_slots, layer, has_initial_state, checkpoint_slots)
    memory.check(dims, layer)
    check_sequences(cu_seqlens, dims.T, has_initial_state)
    tokens = tokens._replace(cu_seqlens=cu_seqlens.astype(np.int32))  # which may be narrow or unsigned
    at.check(memory, "N", dims.N)
    arguments.check_chunk_size(chunk_size)
    if (checkpoint_every is None) != (checkpoint_slots is None):
        raise ValueError("checkpoint_slots: expected together with checkpoint_every, got one of the two")
    if checkpoint_every is not None:
        grid = int(np.lcm(GRID, chunk_size))
        check_whole("checkpoint_every", checkpoint_every, 1)
        if checkpoint_every % grid:
            raise ValueError(f"checkpoint_every: expected a multiple of {grid}, got {checkpoint_every}")
        check = partial(check_slots, size=memory.size, null_slot=null_slot, unique=True)
        check("checkpoint_slots", checkpoint_slots, (dims.N, None), "N, M")
        written = read_slots if write_slots is None else write_slots
        check_values(partial(_check_apart, null_slot), written, checkpoint_slots)
    options = dict(batch_invariant=batch_invariant, chunk_size=chunk_size, checkpoint_every=checkpoint_every)
    call = PromptCall(scale, use_qk_l2norm, implementation=implementation, **options).checked(dims)
    fast, of_heads = memory.by_kernels(), tokens.of_heads
    if of_heads is None or not fast.takes(call, of_heads):
        return shards.left_to_xla((type(memory).prefill, call), memory, tokens, at)
    if arguments.debug_checks_are_on():
        arguments.check_values(dims.T, g, None)
    return shards.by_heads((type(fast).prefill, call), fast, of_heads, at)


def prefill_packed(
    qkv: Float[Array, "T D"],
    decay: Float[Array, "T HV"] | Float[Array, "T HV K"],
    beta: Float[Array, "T HV"],
    row_offsets: Integer[Array, " N1"] | Integer[np.ndarray, " N1"],
    pool: Arrays,
    *,
    read_slots: Indices,
    write_slots: Indices | None = None,
    has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"] | None = None,
    scale: float | None = None,
    state_layout: str = "kv",
    **options: Any,
) -> tuple[Float[Array, "T HV_V"], Arrays]:
    """Pass 2 of the two-pass prefill: the rule on the output of the convolution. The pool is donated.

    Queries and keys are normalised and queries scaled inside. The widths of the heads are the pool's; what channels
    are left make the key heads.

    Args:
      qkv: [T, 2 Hk K + HV V], queries, keys and values of every token, as the convolution gave them.
      decay: linear decay [T, HV], or of each key channel [T, HV, K], in [0, 1], exp(g); 0 is a full reset.
      beta: write strength [T, HV].
      row_offsets: [N + 1], the cu_seqlens of `prefill`.
      pool: states [slots, HV, K, V], or [slots, HV, V, K] with state_layout "vk"; or a `RingPool`. Its dtype is
        independent of qkv's.
      read_slots, write_slots, has_initial_state, scale, state_layout: as for `prefill`.
      options: the other options of `prefill`, but use_qk_l2norm.

    Returns:
      o [T, HV * V] in qkv's dtype, and the pool.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.

    Source: Modular's `gated_delta`. Its documentation calls the decay exp(-softplus), which leaves out the learned
      rate: it is exp(-exp(A_log) softplus(a + dt_bias)).
    """
    q, k, v = heads_of(qkv, opened(pool, state_layout))
    T, HV, V = v.shape
    check_channels("decay", decay, (T, HV), k.shape[-1], "T, HV, K")
    check_array("beta", beta, (T, HV), "T, HV")
    o, pool = prefill(
        q[None],
        k[None],
        v[None],
        log_decay_from_alpha(decay)[None],
        beta[None],
        row_offsets,
        pool,
        read_slots=read_slots,
        write_slots=write_slots,
        has_initial_state=has_initial_state,
        scale=scale,
        use_qk_l2norm=True,
        state_layout=state_layout,
        **options,
    )
    return o.reshape(T, HV * V), pool


def _check_apart(null_slot: int | None, written, checkpoints) -> None:
    both = np.intersect1d(written, checkpoints)
    both = both[(both >= 0) & (both != (-1 if null_slot is None else null_slot))]
    if both.size:
        raise ValueError(f"checkpoint_slots: expected slots without a final state, got {int(both[0])}")
