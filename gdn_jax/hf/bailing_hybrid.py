"""Ling 3.0: Kimi Delta Attention with a bounded gate, rotated and gated latent attention, experts of some groups.

Files that transformers writes and published ones differ in the fields of config.json and the name of an output
projection; both are opened. The model type is also that of Ling 2.5 and 2.6, whose layers are others. Source:
`modeling_bailing_hybrid.py` of transformers; of the head for the token after the next, which is the layer after the
decoder's and which transformers does not read, `bailing_moe_nextn.py` of SGLang.
"""

import dataclasses
from functools import partial
from typing import Any

from gdn_jax.hf import kda_decoder, own
from gdn_jax.hf.family import Family
from gdn_jax.hf.fields import Fields
from gdn_jax.layers.kimi_delta_attention import KimiDelta
from gdn_jax.models.config import ModelConfig

DEFAULTS = kda_decoder.DEFAULTS | {
    "rms_norm_eps": 1e-6,
    "rope_theta": 6e6,
    "partial_rotary_factor": 1.0,
    "layer_group_size": 6,
    "first_k_dense_replace": 2,
    "short_conv_kernel_size": 4,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "num_nextn_predict_layers": 1,
}
GATE = {"kda_safe_gate": True, "kda_lower_bound": -5.0}
"""Fields of the gate and what they are where they are missing. The older generation has none of them."""
MARKS = (*GATE, "no_kda_lora", "use_kda_lora")
"""Fields that only models with Kimi Delta Attention have."""
PUBLISHED = {
    "linear_num_heads": "num_attention_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    "full_attention_interval": "layer_group_size",
}
"""Published fields that count where those that transformers writes are missing, beside `kda_decoder.ALIASES`."""
MIXER = KimiDelta(gate_rank=None, output_gate_rank=None)

SPELLING = kda_decoder.Spelling(
    mixer="attention",
    outputs=("dense", "o_proj"),
    A_log=(-1,),
    experts="mlp",
    dense=("mlp",),
    bias="expert_bias",
    parts=("gate_proj", "up_proj", "down_proj"),
)


def _check_generation(fields: Fields) -> None:
    """Raises NotImplementedError for a model of Ling 2.5 or 2.6, which has the same model type."""
    names = " ".join(map(str, fields.get("architectures", list, type(None)) or ()))
    marked = any(fields.values.get(name) is not None for name in MARKS)
    if "BailingMoeV2" in names or not (marked or "BailingMoeV3" in names):
        raise NotImplementedError(
            f"{fields.where}: model_type 'bailing_hybrid' of Ling 2.5 and 2.6: their lightning attention, "
            "with a fixed decay in each head and no delta rule, is not supported, Ling 3.0 is"
        )


def _config(fields: Fields) -> ModelConfig:
    _check_generation(fields)
    fields = kda_decoder.by_written_names(fields, PUBLISHED, {"num_expert_group": 8} | GATE)
    for name in ("use_bias", "use_qkv_bias"):
        fields.refuse(name, False, "projections with biases are not supported")
    fields.refuse("no_kda_lora", True, "narrow projections of the gates are not supported here")
    fields.refuse("use_kda_lora", False, "narrow projections of the gates are not supported here")
    fields.refuse("use_mla_nope", False, "latent attention without rotary positions is not supported here")
    fields.refuse("rope_interleave", True, "only neighbours are rotated as pairs")
    fields.refuse("gated_attention_proj_granularity_type", "head_wise", "only 'head_wise' is supported")
    theta, _ = fields.rope()  # all of the keys' shared part is rotated, whatever the fields say of a part
    if theta is None:
        raise ValueError(f"{fields.where}: expected rope_theta of type float, got None")
    bounded = fields.get("kda_safe_gate", bool)
    mixer = dataclasses.replace(
        MIXER,
        gate="lower_bound" if bounded else "softplus",
        lower_bound=fields.number("kda_lower_bound"),
    )
    return kda_decoder.decoder(fields, mixer, rope_theta=theta, head_gate=True)


def _fields(config: ModelConfig) -> dict[str, Any]:
    mixer = config.mixer
    if not isinstance(mixer, KimiDelta) or mixer != dataclasses.replace(
        MIXER, gate=mixer.gate, lower_bound=mixer.lower_bound
    ):
        raise NotImplementedError(f"mixer: Ling has a KimiDelta with gates of full rank, got {mixer!r}")
    if mixer.gate == "exponential":
        raise NotImplementedError(f"mixer: Ling has the gate 'softplus' or 'lower_bound', got {mixer.gate!r}")
    fields = kda_decoder.own_fields(config, "Ling")
    a = config.attention
    own.check_like(a, "Ling", {"head_gate": True})
    if a.rope_theta is None:
        raise NotImplementedError("attention: Ling's has rotary positions, got none")
    return fields | {
        "kda_safe_gate": mixer.gate == "lower_bound",
        "kda_lower_bound": mixer.lower_bound,
        "layer_group_size": config.types.index("attention") + 1,
        "short_conv_kernel_size": config.conv_size,
        "head_dim": a.rope_dim,
        "qk_head_dim": a.key_dim,
        "rope_theta": a.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": a.rope_theta},
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    model_types=("bailing_hybrid",),
    architecture="BailingHybridForCausalLM",
    defaults=DEFAULTS,
    config=_config,
    fields=_fields,
    weights=partial(kda_decoder.weights, SPELLING),
    embedding="word_embeddings",
    mtp=partial(kda_decoder.mtp_weights, SPELLING),
    mtp_fields={"num_nextn_predict_layers": 1},
)
