"""The gated delta rule as SkyRL's Qwen3.5 model calls it, with masks of padding and segments.

    from skyrl.tx.models import qwen3_5
    from gdn_jax.adapters import skyrl

    qwen3_5.chunk_gated_delta_rule = skyrl.chunk_gated_delta_rule
    qwen3_5.recurrent_gated_delta_rule = skyrl.recurrent_gated_delta_rule

Both normalise queries and keys, as they do there. States and triangular systems are in float32 here, in the dtype of
query there; the final state is returned in that dtype, because it goes into a cache of it.
"""

from gdn_jax.adapters.padding import Mask, masked_rule
from gdn_jax.shapes import Keys, LogDecay, Outputs, Queries, SegmentIds, States, Strength, Values


def chunk_gated_delta_rule(
    query: Queries,
    key: Keys,
    value: Values,
    g: LogDecay,
    beta: Strength,
    chunk_size: int = 64,
    initial_state: States | None = None,
    *,
    attention_mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Outputs, States]:
    """SkyRL's `chunk_gated_delta_rule`: the rule over whole rows.

    Args:
      query, key: [B, T, H, K], repeated to the value heads or not. value: [B, T, HV, V], query's dtype.
      g: log decay [B, T, HV]. beta: write strength [B, T, HV].
      chunk_size: 16, 32, 64 or 128.
      initial_state: [B, HV, K, V] of any floating dtype, None for zeros.
      attention_mask: [B, T], 0 or False at padding, on either side: the state passes through, the output is 0.
        SkyRL's own function has no mask, and padding decays its state.
      segment_ids: [B, T] integers of packed rows; see `gated_delta_rule`.

    Returns:
      o [B, T, HV, V] and the final state [B, HV, K, V], both in query's dtype.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.

    Source: skyrl 0.4.0, `skyrl.tx.models.qwen3_5.chunk_gated_delta_rule`.
    """
    arrays = (query, key, value, g, beta, initial_state, attention_mask)
    o, state = masked_rule(*arrays, segment_ids=segment_ids, chunk_size=chunk_size)
    return o, state.astype(query.dtype)


def recurrent_gated_delta_rule(
    query: Queries,
    key: Keys,
    value: Values,
    g: LogDecay,
    beta: Strength,
    initial_state: States | None = None,
) -> tuple[Outputs, States]:
    """SkyRL's `recurrent_gated_delta_rule`: the rule token by token, which it calls for one token.

    Args, Returns, Raises: as for `chunk_gated_delta_rule`.

    Source: skyrl 0.4.0, `skyrl.tx.models.qwen3_5.recurrent_gated_delta_rule`.
    """
    arrays = (query, key, value, g, beta, initial_state, None)
    o, state = masked_rule(*arrays, implementation="recurrent")
    return o, state.astype(query.dtype)
