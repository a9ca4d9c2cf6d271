"""Kimi Linear: Kimi Delta Attention, latent attention without positions, experts by sigmoids after dense layers.

Files that transformers writes and published ones differ in the fields of config.json and the names of the dense
layers; both are opened. Source: `modeling_kimi_linear.py` of transformers.
"""

from functools import partial
from typing import Any

from gdn_jax.commands.errors import brief
from gdn_jax.hf import kda_decoder, own
from gdn_jax.hf.family import Family
from gdn_jax.hf.fields import Fields
from gdn_jax.layers.kimi_delta_attention import KimiDelta
from gdn_jax.models.config import ModelConfig

PUBLISHED = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Fields of a published `linear_attn_config`, by the names that transformers writes."""

DEFAULTS = kda_decoder.DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "linear_conv_kernel_dim": 4,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
}

OF_K3 = "a part of Kimi K3, whose text model has this model type too, is not supported"

SPELLING = kda_decoder.Spelling(
    mixer="self_attn",
    outputs=("o_proj",),
    A_log=(1, 1, -1, 1),
    experts="block_sparse_moe",
    dense=("block_sparse_moe", "mlp"),
    bias="e_score_correction_bias",
    parts=("w1", "w3", "w2"),
)


def _as_written(fields: Fields) -> Fields:
    """The fields as transformers writes them: those of `linear_attn_config` beside the others."""
    fields = kda_decoder.by_written_names(fields, {}, {"num_expert_group": 1})
    number, inner = fields.size("num_hidden_layers"), fields.values.get("linear_attn_config")
    if inner is None:
        fields.get("layer_types", list)
        return fields
    if not isinstance(inner, dict):
        raise ValueError(f"{fields.where}: expected an object linear_attn_config, got {brief(inner)}")
    linear = Fields(inner, {}, f"{fields.where}: linear_attn_config")
    for name in ("gate_lower_bound", "use_full_rank_gate"):
        linear.refuse(name, False, OF_K3)
    values: dict[str, Any] = {
        ours: linear.size(theirs) for ours, theirs in PUBLISHED.items() if theirs in inner
    }
    if fields.values.get("layer_types") is None:
        kda, full = linear.get("kda_layers", list), linear.get("full_attn_layers", list)
        if sorted([*kda, *full], key=str) != sorted(range(1, number + 1), key=str):
            raise ValueError(
                f"{linear.where}: expected kda_layers and full_attn_layers to be 1 to {number}, got {brief(kda)} and "
                f"{brief(full)}"
            )
        layers, linear_layers = range(1, number + 1), {*kda}
        values["layer_types"] = [
            "linear_attention" if i in linear_layers else "full_attention" for i in layers
        ]
    return Fields(fields.values | values, {}, fields.where)


def _config(fields: Fields) -> ModelConfig:
    fields.refuse("mla_use_nope", True, "latent attention with rotary positions is not supported here")
    for name in ("attn_res_block_size", "routed_expert_hidden_size", "mla_use_output_gate"):
        fields.refuse(name, False, OF_K3)
    return kda_decoder.decoder(_as_written(fields), KimiDelta())


def _fields(config: ModelConfig) -> dict[str, Any]:
    own.check_like(config, "Kimi Linear", {"mixer": KimiDelta()})
    fields = kda_decoder.own_fields(config, "Kimi Linear")
    own.check_like(config.attention, "Kimi Linear", {"rope_theta": None, "head_gate": False})
    return fields


FAMILY = Family(
    model_types=("kimi_linear",),
    architecture="KimiLinearForCausalLM",
    defaults=DEFAULTS,
    config=_config,
    fields=_fields,
    weights=partial(kda_decoder.weights, SPELLING),
)
