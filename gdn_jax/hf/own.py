"""A config.json for a model of our own: fields that every family writes alike, and options that a family lacks."""

from typing import Any

from gdn_jax.layers.options import value_width
from gdn_jax.models.config import AttentionConfig, LatentAttentionConfig, ModelConfig

THEIR_TYPES = {"attention": "full_attention", "window_attention": "sliding_attention"}
"""Hugging Face's types of our layers that are not recurrent."""


def check_like(
    config: ModelConfig | AttentionConfig | LatentAttentionConfig, family: str, wanted: dict[str, Any]
) -> None:
    """Raises NotImplementedError for the first option that is not what models of a family have."""
    for name, value in wanted.items():
        if getattr(config, name, None) != value:
            raise NotImplementedError(
                f"{name}: models of the family {family} have {value!r}, got {getattr(config, name, None)!r}"
            )


def decoder_fields(config: ModelConfig) -> dict[str, Any]:
    """Fields of a decoder with GatedDeltaNets, but for its feed-forward part and its attention layers."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "layer_types": [THEIR_TYPES.get(kind, "linear_attention") for kind in config.types],
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "linear_conv_kernel_dim": config.conv_size,
        "linear_key_head_dim": config.head_dim,
        "linear_value_head_dim": value_width(config.head_dim, config.expand_v),
        "linear_num_key_heads": config.num_heads,
        "linear_num_value_heads": config.num_v_heads or config.num_heads,
    }


def attention_fields(config: AttentionConfig) -> dict[str, Any]:
    """Fields of attention layers, but for their rotary positions."""
    return {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.bias,
    }
