"""Erase-then-Delta Attention over pools: a token is two of the delta rule, one that erases and one that writes.

Both go through one call of `verify`, which reads a state once and writes it once, and keeps no state between them. So
rings hold two entries for each token, and their length counts entries.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from gdn_jax.gates import channel_log_decay
from gdn_jax.rule.erase_then_delta import ErasingArrays
from gdn_jax.rule.halves import read
from gdn_jax.serving import shards
from gdn_jax.serving.call import At, Call
from gdn_jax.serving.prompts import prefill
from gdn_jax.serving.ring_arrays import Arrays
from gdn_jax.serving.slots import Indices
from gdn_jax.serving.states import opened
from gdn_jax.serving.step import checked, draft_slots, verify
from gdn_jax.serving.tokens import raw_tokens
from gdn_jax.shapes import accumulation_dtype, check_array, check_choice, widened

NO_DECAY = -1e4
"""Raw input of a gate whose softplus is 0 in every dtype."""


def erase_then_delta_prefill(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | Float[Array, "B T HO K"] | None,
    beta: Float[Array, "B T HO"],
    erase_key: Float[Array, "B T Hk K"],
    erase_strength: Float[Array, "B T HO"],
    cu_seqlens: Integer[Array, " N1"] | Integer[np.ndarray, " N1"],
    pool: Arrays,
    *,
    checkpoint_every: int | None = None,
    **options: Any,
) -> tuple[Float[Array, "B T HO V"], Arrays]:
    """`prefill` of `gdn_jax.erase_then_delta_rule`: packed prompts whose states lie in a pool, which is donated.

    Args:
      q, k, v, g, beta, erase_key, erase_strength: of the packed tokens [1, T, ...], as for `erase_then_delta_rule`.
      cu_seqlens, pool: as for `prefill`; offsets count tokens.
      checkpoint_every: as for `prefill`, in tokens, a multiple of half of what it says there.
      options: the other options of `prefill`, implementation among them. Chunks hold half as many tokens.

    Returns:
      o [1, T, HO, V] in q's dtype, and the pool.

    Raises:
      ValueError, NotImplementedError: as for `prefill`.
    """
    _check_keys(k, erase_key)
    every = None if checkpoint_every is None else 2 * checkpoint_every
    x = ErasingArrays(q, k, v, g, beta, erase_key, erase_strength, None, cu_seqlens, None).in_rows()
    o, pool = prefill(*x[:5], x.cu_seqlens, pool, checkpoint_every=every, **options)
    return read(o), pool


def erase_then_delta_decode(
    q: Float[Array, "B Hq K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B HV V"],
    a: Float[Array, "B HO"] | Float[Array, "B HO K"],
    b: Float[Array, "B HO"],
    erase_key: Float[Array, "B Hk K"],
    w: Float[Array, "B HO"],
    pool: Arrays,
    *,
    A_log: Float[Array, " HO"] | None,
    dt_bias: Float[Array, " HO"] | Float[Array, "HO K"],
    lower_bound: float | None = None,
    bound: str = "exponential",
    read_slots: Indices,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
    **options: Any,
) -> tuple[Float[Array, "B HO V"], Arrays]:
    """`decode` of `gdn_jax.erase_then_delta_rule`: one token of every request, in place. The pool is donated.

    Args:
      q, k, v, a, b, erase_key, w: as for `erase_then_delta_verify`, without the axis of tokens.
      pool, A_log, dt_bias, lower_bound, bound: as for `erase_then_delta_verify`.
      read_slots: [B] integers, where the states are and where the new ones go; -1 is padding.
      state_layout, null_slot, layer: as for `decode`.
      options: the other options of `decode`: scale, use_qk_l2norm, allow_neg_eigval, batch_invariant, implementation.

    Returns:
      o [B, HO, V] in v's dtype, and the pool.

    Raises:
      ValueError, NotImplementedError: as for `verify`.
    """
    _check_keys(k[:, None], erase_key[:, None])
    memory, at = opened(pool, state_layout, null_slot), At(read_slots, None, layer)
    bounds: Any = dict(lower_bound=lower_bound, bound=bound)
    if memory.by_kernels().erases_at_once:
        check_choice("bound", bound, ("sigmoid", "exponential"))
        gates = _of_channels(a, 2), b, None, A_log, _of_channels(dt_bias, 1)
        raw = raw_tokens(q, k, v, *gates, lower_bound=lower_bound)
        raw = raw._replace(erase_key=erase_key, erase_strength=w)
        call, memory = checked("B", Call(**bounds, **options), raw, memory, at)
        if memory.erases_at_once:
            return shards.by_heads((type(memory).decode, call), memory, raw, at)
    q, k, v, a, b, erase_key, w = (x[:, None] for x in (q, k, v, a, b, erase_key, w))
    slots = draft_slots(pool, read_slots[:, None])
    where: Any = dict(state_slots=slots, num_accepted_tokens=np.ones(read_slots.shape, np.int32))
    where |= dict(state_layout=state_layout, null_slot=null_slot, layer=layer)
    where |= dict(A_log=A_log, dt_bias=dt_bias) | bounds | options
    o, pool = erase_then_delta_verify(q, k, v, a, b, erase_key, w, pool, **where)
    return o[:, 0], pool


def erase_then_delta_verify(
    q: Float[Array, "N T Hq K"],
    k: Float[Array, "N T Hk K"],
    v: Float[Array, "N T HV V"],
    a: Float[Array, "N T HO"] | Float[Array, "N T HO K"],
    b: Float[Array, "N T HO"],
    erase_key: Float[Array, "N T Hk K"],
    w: Float[Array, "N T HO"],
    pool: Arrays,
    *,
    A_log: Float[Array, " HO"] | None,
    dt_bias: Float[Array, " HO"] | Float[Array, "HO K"],
    lower_bound: float | None = None,
    bound: str = "exponential",
    state_slots: Indices,
    num_accepted_tokens: Indices,
    num_tokens: Indices | None = None,
    parents: Indices | None = None,
    allow_neg_eigval: bool = False,
    **options: Any,
) -> tuple[Float[Array, "N T HO V"], Arrays]:
    """`verify` of `gdn_jax.erase_then_delta_rule`: some tokens of every request. The pool is donated.

        g = channel_log_decay(a, A_log, dt_bias, lower_bound, bound=bound)
        beta = sigmoid(b);   gamma = sigmoid(w)
        S <- Diag(exp(g)) S;   S <- S - gamma e (S^T e)^T;   u = beta (v - S^T k);   S <- S + k u^T;   o = scale S^T q

    Args:
      q, k, v, a, b, A_log, dt_bias: as for `verify`; b has one number a head.
      erase_key: e [N, T, Hk, K] in k's dtype, normalised where q and k are.
      w: raw input of the erase strength [N, T, HO].
      lower_bound, bound: as for `channel_log_decay`.
      pool: as for `verify`. The rings of a `RingPool` are made with `channels`, and have two entries for each token:
        a ring of 16, as the kernels take, holds 8 tokens.
      state_slots, num_accepted_tokens, num_tokens, parents: as for `verify`, in tokens.
      allow_neg_eigval: beta = 2 sigmoid(b); gamma is sigmoid(w) in any case.
      options: the other options of `verify`, implementation among them.

    Returns:
      o [N, T, HO, V] in v's dtype, and the pool.

    Raises:
      ValueError, NotImplementedError: as for `verify`.

    Numerics: as `verify`, whose gate is given the input at which its softplus is -g.
    """
    _check_keys(k, erase_key)
    N, T = k.shape[:2]
    dtype = accumulation_dtype(*(x for x in (a, b, w, A_log, dt_bias) if x is not None))
    gate = _of_channels(a, 3), A_log, _of_channels(dt_bias, 1)
    g = channel_log_decay(*gate, lower_bound, bound=bound)
    decays = jnp.maximum(jnp.log(-jnp.expm1(g)) - g, NO_DECAY)
    w = w.astype(dtype)
    if allow_neg_eigval:  # 2 sigmoid of this is sigmoid(w)
        w = -jax.nn.softplus(math.log(2) - w)

    def pair(first: Any, second: Any) -> Any:
        xp = np if isinstance(second, np.ndarray) else jnp
        return xp.stack([xp.broadcast_to(first, second.shape), second], 2).reshape(
            N, 2 * T, *second.shape[2:]
        )

    if state_slots.ndim == 2:
        state_slots = pair(-1, state_slots)
    if parents is not None:
        parents = pair(2 * widened(parents) + 1, jnp.broadcast_to(2 * jnp.arange(T), (N, T)))
        parents = jnp.maximum(parents, -1)
    o, pool = verify(
        pair(q, q),
        pair(erase_key, k),
        pair(jnp.zeros_like(v), v),
        pair(decays, jnp.full_like(decays, NO_DECAY)),
        pair(w, b.astype(dtype)),
        pool,
        A_log=None,
        dt_bias=jnp.zeros_like(decays, shape=decays.shape[2:]),
        state_slots=state_slots,
        num_accepted_tokens=2 * widened(num_accepted_tokens),
        num_tokens=None if num_tokens is None else 2 * widened(num_tokens),
        parents=parents,
        allow_neg_eigval=allow_neg_eigval,
        **options,
    )
    return o[:, 1::2], pool


def _of_channels(x: Any, axes: int) -> Any:
    """An input of a gate with an axis of channels after its others."""
    return x if x.ndim > axes else x[..., None]


def _check_keys(k: Any, erase_key: Any) -> None:
    """Raises ValueError where there is no erase key for each key."""
    check_array("k", k, (None,) * 4, "N, T, Hk, K")
    check_array("erase_key", erase_key, k.shape, "N, T, Hk, K")
