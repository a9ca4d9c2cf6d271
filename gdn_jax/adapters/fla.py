"""The gated delta rule as flash-linear-attention calls it, for code that is ported from PyTorch.

Names, order, defaults, layouts and results are those of fla-core 0.6.0; arrays are JAX's. What fla leaves to its
`**kwargs` is a keyword here, so that a misspelt one is an error. There is nothing to put into a function's place: fla
computes with torch tensors.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gdn_jax import delta_rule, gated_delta_rule, log_decay, write_strength
from gdn_jax.adapters.arguments import named, refuse
from gdn_jax.shapes import (
    AnyStates,
    ArgumentError,
    Keys,
    KnownOffsets,
    LogDecay,
    Outputs,
    Queries,
    Scale,
    Strength,
    Values,
    check_array,
    check_floating,
)

NAMES = {"a": "g", "b": "beta", "use_qk_l2norm": "use_qk_l2norm_in_kernel"}
"""fla's names of our arguments, those of `log_decay` and `write_strength` among them."""


def chunk_gated_delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay,
    beta: Strength,
    scale: Scale | None = None,
    initial_state: AnyStates | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: KnownOffsets | None = None,
    cu_seqlens_cpu: KnownOffsets | None = None,
    chunk_indices: Any = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Float[Array, " HV"] | None = None,
    dt_bias: Float[Array, " HV"] | None = None,
    chunk_size: int = 64,
) -> tuple[Outputs, AnyStates | None]:
    """fla's `chunk_gated_delta_rule`: the rule over whole sequences, by the fastest form for this device.

    Args:
      q, k: queries and keys [B, T, H, K] of one dtype. v: values [B, T, HV, V] of that dtype; H divides HV.
      g: log decay [B, T, HV], or its raw input.
      beta: write strength [B, T, HV], or its raw input.
      scale: factor of the output, K ** -0.5 by default.
      initial_state: [N, HV, K, V]; N = B, or the number of packed sequences.
      output_final_state: whether the second result is the final state; None else.
      use_qk_l2norm_in_kernel: replaces q and k by x * rsqrt(sum(x^2) + 1e-6).
      use_beta_sigmoid_in_kernel: beta is the raw input of a sigmoid.
      allow_neg_eigval: doubles the strength; only with use_beta_sigmoid_in_kernel.
      state_v_first: states are [N, HV, V, K].
      cu_seqlens: [N + 1] borders of packed sequences, with B = 1.
      cu_seqlens_cpu: the same as a NumPy array. The GPU kernels then split their work by the true lengths.
      chunk_indices, cp_context: None. Chunks are found here, and tokens that are split over devices are
        `gdn_jax.parallel.context.gated_delta_rule`'s.
      use_gate_in_kernel: g is the raw input a of -exp(A_log) softplus(a + dt_bias).
      A_log, dt_bias: parameters [HV] of the decay, with use_gate_in_kernel; dt_bias may be None.
      chunk_size: 16, 32, 64 or 128.

    Returns:
      o [B, T, HV, V] in q's dtype, and the final state in float32, or None.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: chunk_indices or cp_context is given.

    Source: fla-core 0.6.0, `fla.ops.gated_delta_rule.chunk_gated_delta_rule`.
    """
    refuse("for chunks are found from cu_seqlens", chunk_indices=chunk_indices)
    refuse(
        "use gdn_jax.parallel.context.gated_delta_rule for tokens split over devices", cp_context=cp_context
    )
    if cu_seqlens_cpu is not None:
        if cu_seqlens is None:
            raise ArgumentError("cu_seqlens_cpu", "cu_seqlens with it", "no cu_seqlens")
        cu_seqlens = np.asarray(cu_seqlens_cpu)
    with named(**NAMES):
        o, final_state = gated_delta_rule(
            q,
            k,
            v,
            _log_decay(g, use_gate_in_kernel, A_log, dt_bias),
            _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
            state_layout="vk" if state_v_first else "kv",
            chunk_size=chunk_size,
        )
    return o, final_state if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecay | None = None,
    gk: Float[Array, "B T HV K"] | None = None,
    gv: Any = None,
    beta: Strength | None = None,
    scale: Scale | None = None,
    initial_state: AnyStates | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Float[Array, " HV"] | None = None,
    dt_bias: Float[Array, " HV"] | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: KnownOffsets | None = None,
) -> tuple[Outputs, AnyStates | None]:
    """fla's `fused_recurrent_gated_delta_rule`: the rule token by token, also where fla has no derivative.

    The fifth argument is gk, and beta is the seventh: name them.

    Args:
      g: as for `chunk_gated_delta_rule`; None for no decay.
      gk: a log decay of each key channel [B, T, HV, K], which comes on top of g.
      gv: None. A decay of each value channel is in no form of the rule here.
      beta: [B, T, HV]; None for 1. A strength of each value channel [B, T, HV, V] is refused.
      The other arguments: as for `chunk_gated_delta_rule`.

    Returns:
      o [B, T, HV, V] in q's dtype, and the final state in float32, or None.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: gv, or a beta of each value channel.

    Source: fla-core 0.6.0, `fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule`.
    """
    refuse("for no form of the rule has a decay of each value channel", gv=gv)
    if getattr(beta, "ndim", 3) == 4:
        raise NotImplementedError("beta: expected shape [B, T, HV], one strength a head, got one a channel")
    if beta is None and use_beta_sigmoid_in_kernel:
        raise ArgumentError("beta", "an array with use_beta_sigmoid_in_kernel", "None")
    check_array("q", q, (None,) * 4, "B, T, H, K")
    check_array("v", v, (None,) * 4, "B, T, HV, V")
    for name, x, width in (("g", g, ()), ("gk", gk, q.shape[-1:])):  # their sum would broadcast
        if x is not None:
            check_array(name, x, (*v.shape[:-1], *width), "B, T, HV, K" if width else "B, T, HV")
            check_floating(name, x)
    with named(**NAMES):
        g = _log_decay(g, use_gate_in_kernel, A_log, dt_bias)
        if gk is not None:
            g = gk if g is None else gk + g[..., None]
        o, final_state = delta_rule(
            q,
            k,
            v,
            g,
            _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
            state_layout="vk" if state_v_first else "kv",
            implementation="recurrent",
        )
    return o, final_state if output_final_state else None


def _log_decay(g: Any, is_raw: bool, A_log: Any, dt_bias: Any) -> Any:
    if not is_raw:
        return g
    for name, x in (("g", g), ("A_log", A_log)):
        if x is None:
            raise ArgumentError(name, "an array with use_gate_in_kernel", "None")
    return log_decay(g, A_log, jnp.zeros_like(A_log) if dt_bias is None else dt_bias)


def _strength(beta: Any, is_raw: bool, allow_neg_eigval: bool) -> Any:
    if is_raw:
        return write_strength(beta, allow_neg_eigval=allow_neg_eigval)
    if allow_neg_eigval:
        raise ArgumentError("allow_neg_eigval", "False without use_beta_sigmoid_in_kernel", "True")
    return beta
