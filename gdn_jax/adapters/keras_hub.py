"""The gated delta rule as keras-hub's Qwen3.5 calls it, with padding that leaves the state alone.

    from keras_hub.src.models.qwen3_5 import qwen3_5_gated_delta_net
    from gdn_jax.adapters import keras_hub

    qwen3_5_gated_delta_net._chunk_gated_delta_rule = keras_hub.chunk_gated_delta_rule
    qwen3_5_gated_delta_net._recurrent_gated_delta_rule = keras_hub.recurrent_gated_delta_rule

The backend of Keras must be JAX. The layers look both functions up at every call, in the mixture of experts too,
so models that are built already take them. Keras-hub's own functions ignore `padding_mask`; these read it.
"""

from gdn_jax.adapters.padding import Mask, masked_rule
from gdn_jax.shapes import Keys, LogDecay, Outputs, Queries, States, Strength, Values


def chunk_gated_delta_rule(
    query: Queries,
    key: Keys,
    value: Values,
    g: LogDecay,
    beta: Strength,
    chunk_size: int = 64,
    initial_state: States | None = None,
    output_final_state: bool = False,
    padding_mask: Mask | None = None,
) -> tuple[Outputs, States | None]:
    """keras-hub's `_chunk_gated_delta_rule`: the rule over whole rows.

    Args:
      query, key: [B, T, H, K], repeated to the value heads or not; they get unit length inside.
      value: [B, T, HV, V], query's dtype.
      g: log decay [B, T, HV]. beta: write strength [B, T, HV].
      chunk_size: 16, 32, 64 or 128.
      initial_state: [B, HV, K, V] of any floating dtype, None for zeros.
      output_final_state: whether the second result is the final state.
      padding_mask: [B, T], 0 or False at padding, on either side: the state passes through, and the output is 0.
        Keras-hub's own function ignores it, so padding decays the state there.

    Returns:
      o [B, T, HV, V] in query's dtype, and the final state [B, HV, K, V] in float32, or None.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.

    Source: keras-hub 0.32.0, `keras_hub.src.models.qwen3_5.qwen3_5_gated_delta_net._chunk_gated_delta_rule`.
    """
    rule = (query, key, value, g, beta, initial_state, padding_mask, "padding_mask")
    o, state = masked_rule(*rule, chunk_size=chunk_size)
    return o, state if output_final_state else None


def recurrent_gated_delta_rule(
    query: Queries,
    key: Keys,
    value: Values,
    g: LogDecay,
    beta: Strength,
    initial_state: States | None = None,
    output_final_state: bool = False,
    padding_mask: Mask | None = None,
) -> tuple[Outputs, States | None]:
    """keras-hub's `_recurrent_gated_delta_rule`: the rule token by token, which the layer calls for one token.

    Args, Returns, Raises: as for `chunk_gated_delta_rule`.

    Source: keras-hub 0.32.0, `keras_hub.src.models.qwen3_5.qwen3_5_gated_delta_net._recurrent_gated_delta_rule`.
    """
    rule = (query, key, value, g, beta, initial_state, padding_mask, "padding_mask")
    o, state = masked_rule(*rule, implementation="recurrent")
    return o, state if output_final_state else None
