"""Qwen3.5, and 3.6 and 3.8, which have its types: Qwen3-Next with plain projections, dense or with experts.

Released models hold the decoder in a model for images: its fields are the `text_config`, its tensors begin with
`model.language_model.`. Source: `modeling_qwen3_5.py` of transformers.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from gdn_jax.hf import qwen3_next
from gdn_jax.hf.family import Family
from gdn_jax.hf.fields import Fields
from gdn_jax.hf.weights import Weight, projection, rows
from gdn_jax.layers.options import value_width
from gdn_jax.models.config import ModelConfig

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "head_dim": 256,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
}


def _dense_config(fields: Fields) -> ModelConfig:
    return qwen3_next.decoder(fields, intermediate_size=fields.size("intermediate_size"))


def _moe_config(fields: Fields) -> ModelConfig:
    return qwen3_next.decoder(fields, experts=qwen3_next.experts(fields, normalise=True))


def _dense_fields(config: ModelConfig) -> dict[str, Any]:
    if config.experts is not None:
        raise NotImplementedError("experts: dense models of the family Qwen3.5 have none")
    return qwen3_next.decoder_fields(config) | {"intermediate_size": config.mlp_size}


def _moe_fields(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None or config.dense_layers or not config.experts.normalise:
        raise NotImplementedError(
            "experts: models of the family Qwen3.5 have them in every layer, normalised"
        )
    return qwen3_next.decoder_fields(config) | qwen3_next.expert_fields(config.experts)


def _projections(config: ModelConfig, tensors: str, params: str) -> Iterator[Weight]:
    heads, hidden = config.num_v_heads or config.num_heads, config.hidden_size
    keys, values = config.num_heads * config.head_dim, heads * value_width(config.head_dim, config.expand_v)
    parts = {f"{params}.{name}_proj.kernel": size for name, size in (("q", keys), ("k", keys), ("v", values))}
    yield rows(f"{tensors}.in_proj_qkv.weight", parts, hidden)
    for theirs, ours, outputs in (("z", "g", values), ("b", "b", heads), ("a", "a", heads)):
        yield projection(
            f"{tensors}.in_proj_{theirs}.weight", f"{params}.{ours}_proj.kernel", outputs, hidden
        )


DENSE = Family(
    model_types=("qwen3_5_text", "qwen3_5"),
    architecture="Qwen3_5ForCausalLM",
    defaults=DEFAULTS,
    config=_dense_config,
    fields=_dense_fields,
    weights=partial(qwen3_next.weights, _projections),
    eight_bits=qwen3_next.EIGHT_BITS,
    mtp=qwen3_next.mtp_weights,
)
MOE = dataclasses.replace(
    DENSE,
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    architecture="Qwen3_5MoeForCausalLM",
    config=_moe_config,
    fields=_moe_fields,
)
