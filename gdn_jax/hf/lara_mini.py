"""Lara: Gated DeltaNet with one projection of its input, attention in a window or whole, experts in every layer.

Queries and keys have a norm in each head. Those of a window are rotated, those of whole attention have no positions.
The shared expert has no gate. Source: `modeling_lara_mini.py` of transformers.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from gdn_jax.hf import own, qwen3_next
from gdn_jax.hf.family import Family, Names
from gdn_jax.hf.fields import LAYER_TYPES, Fields
from gdn_jax.hf.weights import Weight, attention_weights, fused_experts, projection, rows
from gdn_jax.layers.gated_delta_net import GatedDeltaNetMixer
from gdn_jax.layers.options import value_width
from gdn_jax.models.config import AttentionConfig, ModelConfig

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 512,
    "linear_conv_kernel_dim": 4,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "partial_rotary_factor": 1.0,
    "norm_topk_prob": True,
}
PERIOD = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
"""Types of layers, over and over, of a file that says none."""


def _config(fields: Fields) -> ModelConfig:
    fields.refuse("hidden_act", "silu", "only 'silu' is supported")
    fields.refuse("attention_bias", False, "attention with biases is not supported")
    fields.refuse("partial_rotary_factor", 1.0, "a window's heads are rotated whole")
    if fields.values.get("layer_types") is None:
        kinds = list(itertools.islice(itertools.cycle(PERIOD), fields.size("num_hidden_layers")))
        fields = Fields(fields.values | {"layer_types": kinds}, {}, fields.where)
    types = fields.layer_types(LAYER_TYPES | {"sliding_attention": "window_attention"})
    head_dim, key_dim = fields.size("head_dim"), fields.size("linear_key_head_dim")
    whole = AttentionConfig(
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=fields.size("num_key_value_heads"),
        head_dim=head_dim,
        qk_norm="head",
    )
    window = None
    if "window_attention" in types:
        theta, part = fields.rope()
        if theta is None or part != 1:
            raise NotImplementedError(f"{fields.where}: rope_parameters: a window's heads are rotated whole")
        rotation = {"rotary_dim": head_dim, "rope_theta": theta}
        window = dataclasses.replace(whole, window=fields.size("sliding_window"), **rotation)
    experts = qwen3_next.experts(fields, fields.get("norm_topk_prob", bool))
    return ModelConfig(
        **fields.of_decoder(types),
        num_heads=fields.size("linear_num_key_heads"),
        num_v_heads=fields.size("linear_num_value_heads"),
        head_dim=key_dim,
        expand_v=fields.size("linear_value_head_dim") / key_dim,
        attention=whole if "attention" in types else None,
        window_attention=window,
        experts=dataclasses.replace(experts, shared_gate=False),
    )


def _fields(config: ModelConfig) -> dict[str, Any]:
    wanted = {
        "mixer": GatedDeltaNetMixer(),
        "rule": "gated_delta",
        "write_start": None,
        "allow_neg_eigval": False,
        "zero_centred_norms": False,
        "scale_embedding": False,
        "dense_layers": (),
    }
    own.check_like(config, "Lara", wanted)
    if config.mixer_norm_eps not in (None, config.norm_eps):
        raise NotImplementedError("mixer_norm_eps: Lara's models have the same epsilon in all norms")
    a, e = config.window_attention, config.experts
    if a is None or a.rotary_dim != a.head_dim:
        raise NotImplementedError("window_attention: models of the family Lara have windows, rotated whole")
    own.check_like(
        a, "Lara", {"qk_norm": "head", "output_gate": False, "bias": False, "reordered_norm": False}
    )
    whole = dataclasses.replace(a, window=None, rotary_dim=0, rope_theta=AttentionConfig.rope_theta)
    if config.attention not in (None, whole):
        raise NotImplementedError("attention: Lara's has the sizes of its windows, and no positions")
    if e is None or e.shared_gate:
        raise NotImplementedError("experts: Lara has them in every layer, the shared one without gate")
    return {
        **own.decoder_fields(config),
        **own.attention_fields(a),
        **qwen3_next.expert_fields(e),
        "norm_topk_prob": e.normalise,
        "sliding_window": a.window,
        "rope_parameters": {"rope_type": "default", "rope_theta": a.rope_theta},
    }


def _mixer_weights(config: ModelConfig, tensors: str, params: str) -> Iterator[Weight]:
    heads, width = config.num_v_heads or config.num_heads, value_width(config.head_dim, config.expand_v)
    keys, values = config.num_heads * config.head_dim, heads * width
    parts = {"q": keys, "k": keys, "v": values, "g": values, "b": heads, "a": heads}
    sizes = {f"{params}.{name}_proj.kernel": size for name, size in parts.items()}
    yield rows(f"{tensors}.in_proj.weight", sizes, config.hidden_size)
    yield from qwen3_next.gated_delta_net_weights(config, tensors, params, norm="out_norm")


def _weights(config: ModelConfig, names: Names) -> Iterator[Weight]:
    e, hidden = config.experts, config.hidden_size
    assert e is not None
    for layer, kind in enumerate(config.types):
        tensors, params = f"{names.prefix}layers.{layer}", f"blocks.{layer}"
        yield from qwen3_next.norm_weights(config, layer, names)
        if (a := config.attention_of(kind)) is not None:
            yield from attention_weights(a, hidden, f"{tensors}.self_attn", f"{params}.mixer")
        else:
            yield from _mixer_weights(config, f"{tensors}.linear_attn", f"{params}.mixer")
        mlp, fused = f"{params}.mlp", f"{tensors}.mlp.experts"
        yield projection(f"{tensors}.mlp.gate.weight", f"{mlp}.router", e.num_experts, hidden)
        sizes = (e.num_experts, e.expert_size, hidden)
        yield from fused_experts(f"{fused}.gate_up_proj", f"{fused}.down_proj", mlp, *sizes)
        shared = f"{tensors}.mlp.shared_expert"
        yield from qwen3_next.swiglu_weights(shared, f"{mlp}.shared", hidden, e.shared_size)


FAMILY = Family(
    model_types=("lara_mini",),
    architecture="LaraMiniForCausalLM",
    defaults=DEFAULTS,
    config=_config,
    fields=_fields,
    weights=_weights,
)
