"""Causal softmax attention, o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(K)) v_j: every token is kept, no state."""

import math

import jax
import jax.numpy as jnp

from gdn_jax.parts.attention import attend, same_segment
from gdn_jax.rules.rule import Rule
from gdn_jax.shapes import Keys, Outputs, Queries, SegmentIds, Values
from gdn_jax.styles import BLACK, Style

_NO_STATE = "softmax_attention keeps no state and takes whole rows only"


def softmax_attention(
    q: Queries,
    k: Keys,
    v: Values,
    segment_ids: SegmentIds | None = None,
    *,
    layer: int = 0,
) -> Outputs:
    """Causal softmax attention, o_i = sum_{j <= i} softmax_j(q_i.k_j / sqrt(K)) v_j.

    q and k keep their length: it sets how sharp the attention is. No positions are added. Order reaches the layer
    through the causal mask and the short convolution, as it does the other rules; rotary positions would fail beyond
    the trained length for a reason of their own.

    bfloat16 and float16 go through cuDNN where it takes them, see `gdn_jax.parts.attention.attend`, and no scores are
    kept in memory; all else is plain XLA, which keeps them.

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


def _rows(
    q: Queries, k: Keys, v: Values, *, segment_ids: SegmentIds | None, layer: int
) -> tuple[Outputs, None]:
    return softmax_attention(q, k, v, segment_ids, layer=layer), None


SOFTMAX_ATTENTION = Rule(
    "softmax_attention",
    _rows,
    gates=(),
    options=("segment_ids", "layer"),
    refuses={"initial_state": _NO_STATE, "cu_seqlens": _NO_STATE},
    unit_length=False,
    style=Style(
        BLACK,
        "x",
        "full",
        (0, (4, 1, 1, 1, 1, 1)),
        "softmax attention without positions",
        ("softmax attention",),
    ),
)
