"""Gated DeltaProduct: several steps of the gated delta rule for every token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.rule.arguments import known_lengths
from gdn_jax.rule.call import Arrays, Call
from gdn_jax.rule.ops import on_shards, program
from gdn_jax.shapes import (
    AnyStates,
    ArgumentError,
    KnownOffsets,
    Outputs,
    Queries,
    Scale,
    SegmentIds,
    check_array,
    check_packing,
    widened,
)


def gated_delta_product(
    q: Queries,
    k: Float[Array, "B T n Hk K"],
    v: Float[Array, "B T n HV V"],
    g: Float[Array, "B T HO"] | None = None,
    beta: Float[Array, "B T n HO"] | None = None,
    *,
    scale: Scale | None = None,
    initial_state: AnyStates | None = None,
    cu_seqlens: KnownOffsets | None = None,
    segment_ids: SegmentIds | None = None,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Outputs, AnyStates]:
    """Gated DeltaProduct: n steps of the delta rule for every token.

        S <- exp(g) S;   n times: u_i = beta_i (v_i - k_i^T S), S <- S + k_i u_i^T;   o = scale q^T S

    The steps become a sequence of n T tokens that the gated delta rule computes: only the first step of a token
    decays, and its last one is read. With n = 1 this is `gated_delta_rule`, to the bit.

    Args:
      q: queries [B, T, Hq, K].
      k, v: keys [B, T, n, Hk, K] and values [B, T, n, HV, V] of every step.
      g: log decay of every token [B, T, HO]; None for no decay.
      beta: strength of every step [B, T, n, HO], in [0, 2] for products of reflections; None for 1.
      The other arguments: as for `gated_delta_rule`. Positions of cu_seqlens count tokens.

    Returns:
      o [B, T, HO, V] and the final states, as `gated_delta_rule`.

    Raises:
      ValueError: an argument is wrong.
      NotImplementedError: the named implementation cannot run this call, with the reason.

    Source: Siems et al., "DeltaProduct" (arXiv 2502.10297); fla's `chunk_gated_delta_product`.
    """
    check_array("k", k, (None,) * 5, "B, T, n, Hk, K")
    check_array("q", q, (*k.shape[:2], None, k.shape[4]), "B, T, Hq, K")
    B, T, n = k.shape[:3]
    check_array("v", v, (B, T, n, None, None), "B, T, n, HV, V")
    if n < 1:
        raise ArgumentError("k", "at least one step", list(k.shape))
    HO = max(q.shape[2], v.shape[3])
    for name, y, shape, letters in (
        ("g", g, (B, T, HO), "B, T, HO"),
        ("beta", beta, (B, T, n, HO), "B, T, n, HO"),
    ):
        if y is not None:
            check_array(name, y, shape, letters)
    check_packing(B, T, cu_seqlens, segment_ids)
    known_lengths(cu_seqlens, T)
    x = in_steps(Arrays(q, k, v, g, beta, None, initial_state, cu_seqlens, segment_ids))
    call = Call(use_qk_l2norm, state_layout, chunk_size=chunk_size)
    o, state = on_shards(*program(call, x, scale, implementation))
    return o[:, n - 1 :: n], state


def in_steps(x: Arrays) -> Arrays:
    """A call of n T tokens, one for each step of each token of x, of which every n-th is read.

    Args:
      x: k, v and erase are of every step, as in `gated_delta_product`. They are not checked.
    """
    B, T, n = x.k.shape[:3]

    def steps(y: jax.Array) -> jax.Array:
        return y.reshape(B, T * n, *y.shape[3:])

    def at(y: jax.Array, step: int) -> jax.Array:
        return steps(jnp.stack([y if i == step else jnp.zeros_like(y) for i in range(n)], 2))

    return Arrays(
        at(x.q, n - 1),
        steps(x.k),
        steps(x.v),
        None if x.g is None else at(x.g, 0),
        None if x.erase is None else steps(x.erase),
        None,
        x.initial_state,
        None if x.cu_seqlens is None else widened(x.cu_seqlens) * n,
        None if x.segment_ids is None else steps(jnp.stack([x.segment_ids] * n, 2)),
    )
