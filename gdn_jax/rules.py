"""What a token mixer may do with q, k, v, g and beta: the rules that are compared, under one interface.

    linear_attention    S <- S + beta k v^T                                          neither decay nor correction
    mamba2              S <- exp(g) S + beta k v^T                                   decay
    delta               S <- S + beta k (v - k^T S)^T                                correction
    gated_delta         S <- exp(g) S;  S <- S + beta k (v - k^T S)^T                both
    softmax_attention   o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(K)) v_j          no state: every token is kept

The first four read o = q^T S / sqrt(K), with q and k of unit length. A rule that has no use for g or beta leaves
it unread, so a layer has the same parameters, and the same initial weights, under every rule.

Source: Yang et al. 2024 (arXiv 2412.06464), table 1; Mamba2 there and here with a write strength of its own instead
of its time step.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax.attention import attend, same_segment
from gdn_jax.chunks.decay import chunk_cumsum
from gdn_jax.chunks.stages import Numerics, chunk_output
from gdn_jax.gates import l2norm, no_gate
from gdn_jax.ops import gated_delta_step
from gdn_jax.packing import chunks_to_row, reset_at_segments, row_to_chunks
from gdn_jax.parallel.token_shards import gated_delta_rule_on_mesh
from gdn_jax.shapes import accumulation_dtype, split_heads


class RuleInputs(NamedTuple):
    """What a token mixer feeds a rule, in the order in which `apply` takes it.

    Fields:
      q, k: queries and keys [B, T, H, K], of unit length where the rule wants that.
      v: values [B, T, HV, V].
      g: log decay [B, T, HV], <= 0.
      beta: write strength [B, T, HV].
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T HV V"]
    g: Float[Array, "B T HV"]
    beta: Float[Array, "B T HV"]


def gated_linear_attention(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HO K V"] | None = None,
    chunk_size: int = 64,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "B HO K V"]]:
    """Linear attention with a decay for each head: the gated delta rule without its correction.

        S <- exp(g) S + k v^T;   o = scale q^T S

    Args:
      q, k, v: as for `gated_delta_rule`; a write strength is a factor of v.
      g: log decay [B, T, HO] <= 0, -inf for a full reset; None for no decay.
      scale: factor of the output, K ** -0.5 by default.
      initial_state: state before the first token, None for zeros.
      chunk_size: tokens that are computed at once as masked attention.

    Returns:
      o in q's dtype and the final state, float32 (float64 when an input is).

    Numerics: sums, gates and states in float32 (float64 when an input is), operands of the products in bfloat16
      where q is.
    Source: Dao & Gu 2024 (arXiv 2405.21060), the chunked form of a scalar decay; fla's `chunk_simple_gla`.
    """
    B, T, _, K = q.shape
    HO, V = max(q.shape[2], v.shape[2]), v.shape[3]
    counts = (q.shape[2], k.shape[2], v.shape[2], HO)
    dtype = accumulation_dtype(q, g, initial_state)
    numerics = Numerics.of(q.dtype, dtype)
    g = no_gate(v, (B, T, HO), dtype) if g is None else g.astype(dtype)

    def to_chunks(x):  # [L, B, heads..., C, D]
        return split_heads(jnp.moveaxis(row_to_chunks(x, min(chunk_size, T)), 2, 3), 2, counts)

    q, k, v = (to_chunks(x) for x in (q, k, v))
    decay = chunk_cumsum(to_chunks(g[..., None])[..., 0])
    v = v.astype(dtype)
    writes = numerics.wide().einsum("...ck,...cv->...kv", k, decay.to_end()[..., None] * v)
    state = (
        jnp.zeros_like(writes, shape=(B, HO, K, V)) if initial_state is None else initial_state.astype(dtype)
    )

    def chunk(S, x):
        total, write = x
        return total[..., None, None] * S + write, S

    state, states = lax.scan(chunk, split_heads(state, 1, counts), (decay.total(), writes))
    o = chunk_output(q, k, v, states, decay, K**-0.5 if scale is None else scale, numerics)
    o = o.reshape(o.shape[0], B, HO, *o.shape[-2:])
    return chunks_to_row(jnp.moveaxis(o, 2, 3), T).astype(q.dtype), state.reshape(B, HO, K, V)


def softmax_attention(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    layer: int = 0,
) -> Float[Array, "B T HO V"]:
    """Causal softmax attention, o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(K)) v_j.

    q and k keep their length: it sets how sharp the attention is. No positions are added. Order reaches the layer
    through the causal mask and the short convolution, as it does the other rules; rotary positions would fail beyond
    the trained length for a reason of their own.

    bfloat16 and float16 go through cuDNN where it takes them, see `gdn_jax.attention.attend`, and no scores are kept
    in memory; all else is plain XLA, which keeps them.

    Args:
      q, k, v: as for `gated_delta_rule`.
      segment_ids: nothing is seen across a change of id.
      layer: another number for each call whose gradient is taken in one program, see `attend`.

    Returns:
      o in q's dtype. Numerics: see `attend`; products of float32 are not rounded further.
    """
    HO, shared = max(q.shape[2], v.shape[2]), math.lcm(k.shape[2], v.shape[2])
    q = jnp.repeat(q, HO // q.shape[2], axis=2)
    k, v = (jnp.repeat(x, shared // x.shape[2], axis=2) for x in (k, v))
    # Else a GPU would round float32 operands to 19 bits.
    with jax.default_matmul_precision(None if q.dtype in (jnp.bfloat16, jnp.float16) else "highest"):
        return attend(q, k, v, causal=True, visible=same_segment(segment_ids), layer=layer)


def wants_unit_length(rule: str) -> bool:
    """Whether a rule reads q and k of unit length."""
    return rule != "softmax_attention"


def apply(
    rule: str,
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HO"],
    beta: Float[Array, "B T HO"],
    *,
    normalized: bool = False,
    initial_state: Float[Array, "N HO K V"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    layer: int = 0,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO K V"] | None]:
    """Applies the rule of that name, one of `RULES`; see the module docstring.

    Args:
      rule: its name.
      q, k, v, g, beta: as for `gated_delta_rule`, q and k of any length.
      normalized: q and k have the length that the rule wants; False gives it to them.
      initial_state, cu_seqlens, segment_ids: as for `gated_delta_rule`.
      implementation: of the delta rules. The linear ones have one form, in plain JAX; softmax attention chooses its
        own.
      layer: of softmax attention, see there.

    Returns:
      o, and the final states (None for softmax_attention).

    Raises:
      NotImplementedError: the rule cannot run with these arguments, with the reason.
    """
    if not normalized and wants_unit_length(rule):
        q, k = l2norm(q), l2norm(k)
    return RULES[rule](
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        implementation=implementation,
        layer=layer,
    )


def _delta(q, k, v, g, beta, *, initial_state, cu_seqlens, segment_ids, implementation, layer, decays: bool):
    del layer
    g = g if decays else None
    if q.shape[1] == 1 and initial_state is not None and cu_seqlens is None:
        g = None if g is None else g[:, 0]
        o, state = gated_delta_step(q[:, 0], k[:, 0], v[:, 0], g, beta[:, 0], initial_state)
        return o[:, None], state
    return gated_delta_rule_on_mesh(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        implementation=implementation,
    )


def _linear(q, k, v, g, beta, *, initial_state, cu_seqlens, segment_ids, implementation, layer, decays: bool):
    del implementation, layer
    if cu_seqlens is not None:
        raise NotImplementedError("cu_seqlens: expected the delta rules, which alone take packed sequences")
    g = g if decays else None
    if segment_ids is not None:
        g = reset_at_segments(jnp.zeros_like(beta) if g is None else g, segment_ids)
    v = (beta[..., None] * _repeat(v, beta.shape[2])).astype(v.dtype)
    return gated_linear_attention(q, k, v, g, initial_state=initial_state)


def _repeat(v, HO):
    """v for every output head: the write strength, a factor of v here, belongs to the output head."""
    return jnp.repeat(v, HO // v.shape[2], axis=2)


def _softmax(q, k, v, g, beta, *, initial_state, cu_seqlens, segment_ids, implementation, layer):
    del g, beta, implementation
    if initial_state is not None or cu_seqlens is not None:
        name = "initial_state" if initial_state is not None else "cu_seqlens"
        raise NotImplementedError(f"{name}: softmax_attention keeps no state and takes whole rows only")
    return softmax_attention(q, k, v, segment_ids, layer=layer), None


RULES: dict[str, Callable] = {
    "linear_attention": partial(_linear, decays=False),
    "mamba2": partial(_linear, decays=True),
    "delta": partial(_delta, decays=False),
    "gated_delta": partial(_delta, decays=True),
    "softmax_attention": _softmax,
}
"""Rules by name; called through `apply`."""
