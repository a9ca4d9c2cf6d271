"""Tokens of running requests, from states in a pool to states in a pool: one of each, or several at once.

In speculative decoding a step takes the last sampled token and gamma drafts. After it the caller knows how many were
accepted, and says so in the next step, which starts from the state after the last accepted token.
"""

from typing import Any

from jaxtyping import Array, Float

from gdn_jax.serving import shards
from gdn_jax.serving.call import At, Call, Spans
from gdn_jax.serving.pools import Accept, Pool, Run
from gdn_jax.serving.ring_arrays import Arrays
from gdn_jax.serving.slots import Indices
from gdn_jax.serving.states import opened
from gdn_jax.serving.tokens import Raw, heads_of, raw_tokens
from gdn_jax.shapes import STATE_LAYOUTS


def decode(
    q: Float[Array, "B Hq K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B HV V"],
    a: Float[Array, "B HO"] | Float[Array, "B HO K"],
    b: Float[Array, "B HO"] | Float[Array, "B HO K"],
    pool: Arrays,
    *,
    A_log: Float[Array, " HO"] | None,
    dt_bias: Float[Array, " HO"] | Float[Array, "HO K"],
    w: Float[Array, "B HO"] | Float[Array, "B HO V"] | None = None,
    lower_bound: float | None = None,
    read_slots: Indices,
    write_slots: Indices | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B HO V"], Arrays]:
    """One token of every request: gates from a and b, the rule, and the new state into the pool, which is donated.

        g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
        S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = scale q^T S

    If a has a value for each key channel, or if you pass w or lower_bound, it is `delta_rule` with its gates:

        g = channel_log_decay(a, A_log, dt_bias, lower_bound);   erase = sigmoid(b);   write = sigmoid(w)
        S <- Diag(exp(g)) S;   u = write * v - S^T (erase * k);   S <- S + k u^T;   o = scale S^T q

    Args:
      q, k, v: queries [B, Hq, K], keys [B, Hk, K] and values [B, HV, V] of one floating dtype. Usually Hq = Hk and HO
        is HV; what `gated_delta_rule` says of heads holds here.
      a, b: raw inputs [B, HO] of the gates, any floating dtype. Pass the outputs of the projections unchanged: the
        gates are computed in float32. With per-channel gates a is [B, HO, K]. With w, b may be [B, HO, K], too.
      pool: states [slots, HO, K, V], or [slots, HO, V, K] with state_layout "vk", of any floating dtype; or a
        `RingPool`, which writes a state only when its ring is full. For per-channel gates make the ring with
        `channels`.
      A_log, dt_bias: parameters of the decay [HO], see `log_decay`. With per-channel gates A_log may be None
        and dt_bias [HO, K], see `channel_log_decay`.
      w: raw input of a separate write strength [B, HO] or [B, HO, V]; b is then the raw erase strength.
      lower_bound: the strongest log decay of a token, below 0, of the bounded gate.
      read_slots: [B] integers, the slots of the states. -1 is padding: output 0, and nothing is read or written.
      write_slots: [B] integers, the slots for the new states, by default read_slots. No slot may come twice. With -1
        the output is computed and the state dropped. In a `RingPool` the rings go there too, with the new token.
      scale: factor of the output, K ** -0.5 by default.
      use_qk_l2norm: replaces q and k by x * rsqrt(sum(x^2) + 1e-6), in float32.
      allow_neg_eigval: beta = 2 sigmoid(b), or with w erase = 2 sigmoid(b).
      state_layout: "kv" or "vk".
      null_slot: one more padding slot, next to -1, for servers that keep one free (vLLM, tpu-inference: slot 0).
      layer: index of the second axis of a pool [slots, layers, HO, K, V] that serves a whole model.
      batch_invariant: makes the bits of a request independent of the other requests of the call and their number.
      implementation: "xla" (plain JAX) or "mosaic_gpu" (the kernels), run exactly or refused. None takes the
        kernels where they can run, else plain JAX.

    Returns:
      o [B, HO, V] in v's dtype, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came. Slots that lie outside the pool or
        are written twice are reported where they are known (NumPy arrays), others with `debug_checks` on; without it,
        a slot outside the pool is padding.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Numerics: gates, norms, states and sums in float32 (float64 when an argument is), rounded once on the way out.
    Source: FlashInfer's `gated_delta_rule_decode_pretranspose`, vLLM's `fused_recurrent_gated_delta_rule`.
    """
    call = Call(scale, use_qk_l2norm, allow_neg_eigval, batch_invariant, implementation, lower_bound)
    memory, at = opened(pool, state_layout, null_slot), At(read_slots, write_slots, layer)
    raw = raw_tokens(q, k, v, a, b, w, A_log, dt_bias, lower_bound=lower_bound)
    call, memory = checked("B", call, raw, memory, at)
    return shards.by_heads((type(memory).decode, call), memory, raw, at)


def decode_packed(
    qkv: Float[Array, "B D"],
    a: Float[Array, "B HV"] | Float[Array, "B HV K"],
    b: Float[Array, "B HV"] | Float[Array, "B HV K"],
    pool: Arrays,
    *,
    A_log: Float[Array, " HV"] | None,
    dt_bias: Float[Array, " HV"] | Float[Array, "HV K"],
    w: Float[Array, "B HV"] | Float[Array, "B HV V"] | None = None,
    lower_bound: float | None = None,
    read_slots: Indices,
    write_slots: Indices | None = None,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
    **options: Any,
) -> tuple[Float[Array, "B HV V"], Arrays]:
    """`decode` of queries, keys and values in one array, as `causal_conv1d_update` gives them. The pool is donated.

    The kernel reads the array without a copy. The pool gives the widths of the heads and the number of value heads;
    the remaining channels are key heads and the same number of query heads.

    Args:
      qkv: [B, 2 Hk K + HV V], queries, keys and values of every request.
      a, b, pool, A_log, dt_bias, w, lower_bound, read_slots, write_slots, state_layout, null_slot, layer: as for
        `decode`.
      options: the other options of `decode`.

    Returns:
      o [B, HV, V] in qkv's dtype, and the pool.

    Raises:
      ValueError, NotImplementedError: as for `decode`.
    """
    memory = opened(pool, state_layout, null_slot)
    together = qkv if shards.is_whole(memory, qkv) else None
    gates = dict(qkv=together, lower_bound=lower_bound)
    raw = raw_tokens(*heads_of(qkv, memory), a, b, w, A_log, dt_bias, **gates)
    at = At(read_slots, write_slots, layer)
    call, memory = checked("B", Call(lower_bound=lower_bound, **options), raw, memory, at)
    return shards.by_heads((type(memory).decode, call), memory, raw, at)


def verify(
    q: Float[Array, "N T Hq K"],
    k: Float[Array, "N T Hk K"],
    v: Float[Array, "N T HV V"],
    a: Float[Array, "N T HO"] | Float[Array, "N T HO K"],
    b: Float[Array, "N T HO"] | Float[Array, "N T HO K"],
    pool: Arrays,
    *,
    A_log: Float[Array, " HO"] | None,
    dt_bias: Float[Array, " HO"] | Float[Array, "HO K"],
    w: Float[Array, "N T HO"] | Float[Array, "N T HO V"] | None = None,
    lower_bound: float | None = None,
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
) -> tuple[Float[Array, "N T HO V"], Arrays]:
    """T = 1 + gamma tokens of every request, of which the caller will accept some. The pool is donated.

    A pool of states keeps one after every token: request n starts from
    pool[state_slots[n, num_accepted_tokens[n] - 1]], and its state after token t goes to state_slots[n, t]. A
    `RingPool` needs one slot a request and no state a token: drafts are appended to the ring, and those that were not
    accepted are dropped by the next call.

    Args:
      q, k, v, a, b, w, A_log, dt_bias, lower_bound, pool: as for `decode`, with the tokens of a request as the second
        axis.
      state_slots: [N, T] integers, no slot twice; at -1 no state is kept. With a `RingPool` [N].
      num_accepted_tokens: [N] integers from 1 to T, or to the length of a `RingPool`: how many tokens of the call
        before were accepted, the sampled one among them. 1 after `prefill` or `decode`, which leave one state, and
        after `accept`. With parents it is 1 + the last accepted token's index. A request that starts from slot -1 is
        padding: output 0, and nothing is read or written.
      num_tokens: [N] integers from 0 to T, how many tokens of each request there are; the others are padding. By
        default all.
      parents: [N, T] integers for a tree of drafts: the token that each one follows, which comes before it; -1 for
        the last accepted one. By default each follows the one before. Make a `RingPool` with trees for them. Pass the
        tokens of a branch one after another: a token that does not follow its neighbour makes the kernels compute its
        ancestors again.
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
    call = Call(scale, use_qk_l2norm, allow_neg_eigval, batch_invariant, implementation, lower_bound)
    memory = opened(pool, state_layout, null_slot)
    spans = Spans(state_slots, num_accepted_tokens, num_tokens, parents, layer)
    raw = raw_tokens(q, k, v, a, b, w, A_log, dt_bias, lower_bound=lower_bound)
    call, memory = checked("N, T", call, raw, memory, spans)
    return shards.by_heads((type(memory).verify, call), memory, raw, spans)


def draft_slots(arrays: Arrays, state_slots: Indices) -> Indices:
    """The slots [N, T] of a step's drafts as `verify` takes them for a pool: [N] where a request has one slot."""
    return state_slots if opened(arrays, STATE_LAYOUTS[0]).slot_per_token else state_slots[:, 0]


def on_trial(run: Run, arrays: Arrays, slots: Indices, T: int) -> tuple[Array, Accept]:
    """Tokens of which the caller accepts some within the same program.

    Args:
      run: the call of `verify` of these tokens.
      arrays: a pool with a state of each request, in one slot.
      slots: of the requests [N]; -1 is padding.
      T: tokens of a request.

    Returns:
      The outputs of `run`, and accept(count): the arrays after the first `count` [N] tokens, again in one slot.
    """
    return opened(arrays, STATE_LAYOUTS[0]).on_trial(run, slots, T)


def checked(letters: str, call: Call, raw: Raw, pool: Pool, where: At | Spans) -> tuple[Call, Pool]:
    """The options of a call of `decode` or `verify`, and the pool by the implementation that runs it.

    Args:
      letters: the axes of tokens before their heads.
    """
    dims = raw.check(letters=letters, state_layout=pool.layout)
    pool.check_tokens(raw)
    pool.check(dims, where.layer)
    where.check(pool, letters, *raw.q.shape[:-2])
    return call.checked(dims), pool.by(call.implementation, raw, where)
