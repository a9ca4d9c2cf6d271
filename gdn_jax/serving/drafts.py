"""Several tokens of every running request at once: speculative decoding with a state after each token.

A step takes the last sampled token and gamma drafts. After it the caller knows how many were accepted, and says so in
the next step, which starts from the state after the last accepted token.
"""

from typing import Any

from jaxtyping import Array, Float

from gdn_jax.serving.call import Call, Spans
from gdn_jax.serving.pools import Arrays, opened, serve
from gdn_jax.serving.slots import Indices
from gdn_jax.serving.tokens import Raw


def verify(
    q: Float[Array, "N T Hq K"],
    k: Float[Array, "N T Hk K"],
    v: Float[Array, "N T HV V"],
    a: Float[Array, "N T HO"],
    b: Float[Array, "N T HO"],
    pool: Arrays,
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
) -> tuple[Float[Array, "N T HO V"], Arrays]:
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
    call = Call(scale, use_qk_l2norm, allow_neg_eigval, batch_invariant, implementation)
    memory = opened(pool, state_layout, null_slot)
    spans = Spans(state_slots, num_accepted_tokens, num_tokens, parents, layer)
    return serve("verify", call, Raw(q, k, v, a, b, A_log, dt_bias), memory, spans)
