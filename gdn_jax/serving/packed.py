"""Prefill and decode in two passes from one packed array of queries, keys and values.

Pass 1 is the convolution over [T, 2 Hk K + HV V] channels, in the order queries, keys, values: `causal_conv1d`, or
`causal_conv1d_update` for one token. Pass 2 is the rule on what it gives. Modular's documentation divides the work of
a prompt in this way.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from gdn_jax.gates import log_decay_from_alpha
from gdn_jax.serving import shards
from gdn_jax.serving.call import At, Call
from gdn_jax.serving.pools import Arrays, opened, serve
from gdn_jax.serving.prompts import prefill
from gdn_jax.serving.slots import Indices
from gdn_jax.serving.states import StatePool
from gdn_jax.serving.tokens import Raw
from gdn_jax.shapes import STATE_LAYOUTS, check_array


def prefill_packed(
    qkv: Float[Array, "T D"],
    decay: Float[Array, "T HV"],
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
      decay: linear decay [T, HV] in [0, 1], exp(g); 0 is a full reset.
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
    q, k, v = _heads(qkv, opened(pool, state_layout))
    T, HV, V = v.shape
    for name, x in (("decay", decay), ("beta", beta)):
        check_array(name, x, (T, HV), "T, HV")
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


def decode_packed(
    qkv: Float[Array, "B D"],
    a: Float[Array, "B HV"],
    b: Float[Array, "B HV"],
    pool: Arrays,
    *,
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    read_slots: Indices,
    write_slots: Indices | None = None,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
    **options: Any,
) -> tuple[Float[Array, "B HV V"], Arrays]:
    """`decode` of queries, keys and values in one array, as `causal_conv1d_update` gives them. The pool is donated.

    The kernel reads them where they lie. The widths of the heads are the pool's; what channels are left make the key
    heads, and there are as many query heads.

    Args:
      qkv: [B, 2 Hk K + HV V], queries, keys and values of every request.
      a, b, pool, A_log, dt_bias, read_slots, write_slots, state_layout, null_slot, layer: as for `decode`.
      options: the other options of `decode`.

    Returns:
      o [B, HV, V] in qkv's dtype, and the pool.

    Raises:
      ValueError, NotImplementedError: as for `decode`.
    """
    memory = opened(pool, state_layout, null_slot)
    raw = Raw(*_heads(qkv, memory), a, b, A_log, dt_bias, None if shards.is_split(memory, qkv) else qkv)
    return serve("decode", Call(**options), raw, memory, At(read_slots, write_slots, layer))


def _heads(
    qkv: Float[Array, "T D"], pool: StatePool
) -> tuple[Float[Array, "T Hk K"], Float[Array, "T Hk K"], Float[Array, "T HV V"]]:
    """Queries, keys and values of packed channels.

    Raises:
      ValueError: the channels are not those of the pool's heads.
    """
    HV, *widths = pool.states.shape[-3:]
    K, V = widths if pool.layout == STATE_LAYOUTS[0] else widths[::-1]
    check_array("qkv", qkv, (None, None), "T, D")
    T, D = qkv.shape
    key_dim, rest = divmod(D - HV * V, 2)
    if rest or key_dim < K or key_dim % K:
        raise ValueError(
            f"qkv: expected 2 Hk K + HV V channels with HV V = {HV} * {V} and K = {K}, which are the pool's, got {D}"
        )
    q, k, v = jnp.split(qkv, [key_dim, 2 * key_dim], axis=-1)
    Hk = key_dim // K
    return q.reshape(T, Hk, K), k.reshape(T, Hk, K), v.reshape(T, HV, V)
