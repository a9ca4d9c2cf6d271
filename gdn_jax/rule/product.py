"""Gated DeltaProduct: several steps of the gated delta rule for every token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.rule.arguments import known_lengths
from gdn_jax.rule.ops import gated_delta_rule
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

    options: dict[str, Any] = dict(
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm,
        state_layout=state_layout,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    return product_by(gated_delta_rule, q, k, v, g, beta, cu_seqlens, segment_ids, **options)


def product_by(
    rule: Callable[..., Any],
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    cu_seqlens: Any,
    ids: Any,
    **options: Any,
) -> tuple[Outputs, Any]:
    """`gated_delta_product` by a delta rule of n T tokens and with its states; the arguments are not checked."""
    B, T, n = k.shape[:3]

    def steps(x: jax.Array) -> jax.Array:
        return x.reshape(B, T * n, *x.shape[3:])

    def at(x: jax.Array, step: int) -> jax.Array:
        return steps(jnp.stack([x if i == step else jnp.zeros_like(x) for i in range(n)], 2))

    o, state = rule(
        at(q, n - 1),
        steps(k),
        steps(v),
        None if g is None else at(g, 0),
        None if beta is None else steps(beta),
        cu_seqlens=None if cu_seqlens is None else widened(cu_seqlens) * n,
        segment_ids=None if ids is None else steps(jnp.stack([ids] * n, 2)),
        **options,
    )
    return o[:, n - 1 :: n], state
