"""The two-pass prefill from one packed array of queries, keys and values.

Pass 1 is the convolution of `serving.causal_conv1d` over [T, 2 Hk K + HV V] channels, in the order queries, keys,
values. Pass 2 is the rule on what it gives. Modular's documentation divides the work in this way.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from gdn_jax.gates import log_decay_from_alpha
from gdn_jax.serving.pools import RingPool
from gdn_jax.serving.prompts import Pool, prefill
from gdn_jax.serving.slots import Indices
from gdn_jax.shapes import STATE_LAYOUTS, check_array, check_choice


def prefill_packed(
    qkv: Float[Array, "T D"],
    decay: Float[Array, "T HV"],
    beta: Float[Array, "T HV"],
    row_offsets: Integer[Array, " N1"] | Integer[np.ndarray, " N1"],
    pool: Pool,
    *,
    read_slots: Indices,
    write_slots: Indices | None = None,
    has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"] | None = None,
    scale: float | None = None,
    state_layout: str = "kv",
    **options: Any,
) -> tuple[Float[Array, "T HV_V"], Pool]:
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
    check_choice("state_layout", state_layout, STATE_LAYOUTS)
    states = pool.state if isinstance(pool, RingPool) else pool
    HV, *widths = states.shape[-3:]
    K, V = widths if state_layout == "kv" else widths[::-1]
    check_array("qkv", qkv, (None, None), "T, D")
    T, D = qkv.shape
    key_dim, rest = divmod(D - HV * V, 2)
    if rest or key_dim < K or key_dim % K:
        raise ValueError(
            f"qkv: expected 2 Hk K + HV V channels with HV V = {HV} * {V} and K = {K}, which are the pool's, got {D}"
        )
    for name, x in (("decay", decay), ("beta", beta)):
        check_array(name, x, (T, HV), "T, HV")
    q, k, v = jnp.split(qkv[None], [key_dim, 2 * key_dim], axis=-1)
    o, pool = prefill(
        q.reshape(1, T, -1, K),
        k.reshape(1, T, -1, K),
        v.reshape(1, T, HV, V),
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
