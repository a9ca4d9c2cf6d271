"""Qwen3-Next: projections of a GatedDeltaNet interleaved by key head, mixture of experts.

The norms have zero-centred weights, but for the one at the output of a GatedDeltaNet. Attention has an output gate, a
norm of queries and keys in each head, and partial rotary positions. Source: `modeling_qwen3_next.py` of transformers.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gdn_jax.commands.errors import brief
from gdn_jax.hf import own
from gdn_jax.hf.family import Family, Names
from gdn_jax.hf.fields import Fields
from gdn_jax.hf.weights import (
    Weight,
    attention_weights,
    bias_rows,
    convolution,
    fused_experts,
    projection,
    row,
    rows,
    same,
    separate_experts,
)
from gdn_jax.layers.gated_delta_net import GatedDeltaNetMixer
from gdn_jax.layers.options import value_width
from gdn_jax.models.config import AttentionConfig, ExpertsConfig, ModelConfig

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

EIGHT_BITS = re.compile(
    r"\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.(experts\.[0-9]+\.|shared_expert\.)?(gate|up|down)_proj)\.weight$"
)
"""Names of matrices that FP8 checkpoints of Qwen's hybrid models have in 8 bits; routers and narrow gates stay."""


def attention(fields: Fields) -> AttentionConfig:
    """The attention layers of Qwen's hybrid models."""
    head_dim = fields.size("head_dim")
    theta, part = fields.rope()
    if theta is None:
        raise ValueError(f"{fields.where}: expected rope_theta of type float, got None")
    return AttentionConfig(
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=fields.size("num_key_value_heads"),
        head_dim=head_dim,
        qk_norm="head",
        output_gate=True,
        rotary_dim=int(head_dim * part),
        rope_theta=theta,
        bias=fields.get("attention_bias", bool),
    )


def decoder(fields: Fields, **options: Any) -> ModelConfig:
    """The model of Qwen's hybrid families, but for its feed-forward part, which `options` say."""
    fields.refuse("hidden_act", "silu", "only 'silu' is supported")
    fields.refuse("attn_output_gate", True, "attention without its output gate is not supported")
    fields.refuse("output_gate_type", "swish", "only 'swish' is supported")
    fields.refuse("use_sliding_window", False, "sliding windows are not supported")
    types = fields.layer_types()
    head_dim = fields.size("linear_key_head_dim")
    return ModelConfig(
        **fields.of_decoder(types),
        num_heads=fields.size("linear_num_key_heads"),
        num_v_heads=fields.size("linear_num_value_heads"),
        head_dim=head_dim,
        expand_v=fields.size("linear_value_head_dim") / head_dim,
        attention=attention(fields) if "attention" in types else None,
        zero_centred_norms=True,
        **options,
    )


def experts(fields: Fields, normalise: bool) -> ExpertsConfig:
    """The mixture of experts of Qwen's hybrid models."""
    return ExpertsConfig(
        num_experts=fields.size("num_experts"),
        per_token=fields.size("num_experts_per_tok"),
        expert_size=fields.size("moe_intermediate_size"),
        shared_size=fields.size("shared_expert_intermediate_size"),
        normalise=normalise,
    )


def _config(fields: Fields) -> ModelConfig:
    number, step = fields.size("num_hidden_layers"), fields.size("decoder_sparse_step")
    only = fields.get("mlp_only_layers", list, type(None)) or []
    if not all(type(layer) is int for layer in only):
        raise ValueError(f"{fields.where}: expected numbers of layers mlp_only_layers, got {brief(only)}")
    plain, sparse = {*only}, fields.get("num_experts", int) > 0
    dense = tuple(i for i in range(number) if i in plain or (i + 1) % step or not sparse)
    options: dict[str, Any] = {"dense_layers": dense if len(dense) < number else ()}
    if len(dense) < number:
        options["experts"] = experts(fields, fields.get("norm_topk_prob", bool))
    if dense:
        options["intermediate_size"] = fields.size("intermediate_size")
    return decoder(fields, **options)


def check_decoder(config: ModelConfig) -> None:
    """Raises NotImplementedError for the first option of a model that no hybrid model of Qwen has."""
    wanted = {
        "mixer": GatedDeltaNetMixer(),
        "rule": "gated_delta",
        "write_start": None,
        "allow_neg_eigval": False,
        "zero_centred_norms": True,
        "window_attention": None,
    }
    own.check_like(config, "Qwen", wanted | {"scale_embedding": False})
    if config.mixer_norm_eps not in (None, config.norm_eps):
        raise NotImplementedError("mixer_norm_eps: Qwen's models have the same epsilon in all norms")
    if config.attention is not None:
        wanted = {"qk_norm": "head", "output_gate": True, "reordered_norm": False}
        own.check_like(config.attention, "Qwen", wanted)
        if not config.attention.rotary_dim:
            raise NotImplementedError("rotary_dim: Qwen's attention has rotary positions, got 0")
    if config.experts is not None and not config.experts.shared_gate:
        raise NotImplementedError("shared_gate: Qwen's shared expert has a gate")


def decoder_fields(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json of a model of our own, but for its feed-forward part."""
    check_decoder(config)
    fields = own.decoder_fields(config)
    if (a := config.attention) is not None:
        part = a.rotary_dim / a.head_dim
        rope = {"rope_type": "default", "rope_theta": a.rope_theta, "partial_rotary_factor": part}
        fields |= own.attention_fields(a) | {"rope_parameters": rope}
    return fields


def expert_fields(config: ExpertsConfig) -> dict[str, Any]:
    """Fields of config.json of a mixture of experts."""
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.per_token,
        "moe_intermediate_size": config.expert_size,
        "shared_expert_intermediate_size": config.shared_size,
    }


def _fields(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        raise NotImplementedError(
            "experts: Qwen3-Next is written with experts only; Qwen3.5 has dense models"
        )
    fields = decoder_fields(config) | expert_fields(config.experts)
    return fields | {
        "intermediate_size": config.mlp_size,
        "norm_topk_prob": config.experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
    }


def _attention_weights(config: ModelConfig, tensors: str, params: str) -> Iterator[Weight]:
    """Weights of an attention layer. q_proj holds queries and gate of each head in turn."""
    a, hidden = config.attention, config.hidden_size
    assert a is not None
    kernels, biases = (
        {f"{params}.{name}_proj.{kind}": a.head_dim for name in "qg"} for kind in ("kernel", "bias")
    )
    yield rows(f"{tensors}.q_proj.weight", kernels, hidden, a.num_heads)
    if a.bias:
        yield bias_rows(f"{tensors}.q_proj.bias", biases, a.num_heads)
    yield from attention_weights(a, hidden, tensors, params, "kvo")


def gated_delta_net_weights(
    config: ModelConfig, tensors: str, params: str, norm: str = "norm"
) -> Iterator[Weight]:
    """Weights of a GatedDeltaNet, without those of the projections of its input."""
    heads, width = config.num_v_heads or config.num_heads, value_width(config.head_dim, config.expand_v)
    channels = 2 * config.num_heads * config.head_dim + heads * width
    yield convolution({f"{tensors}.conv1d.weight": channels}, f"{params}.conv_weight", config.conv_size)
    yield same(f"{tensors}.A_log", f"{params}.A_log", heads)
    yield same(f"{tensors}.dt_bias", f"{params}.dt_bias", heads)
    yield same(f"{tensors}.{norm}.weight", f"{params}.o_norm.weight", width)
    yield projection(
        f"{tensors}.out_proj.weight", f"{params}.o_proj.kernel", config.hidden_size, heads * width
    )


def swiglu_weights(tensors: str, params: str, hidden: int, inner: int) -> Iterator[Weight]:
    """Weights of a SwiGLU."""
    for name, outputs, inputs in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield projection(f"{tensors}.{name}_proj.weight", f"{params}.{name}_proj.kernel", outputs, inputs)


def mlp_weights(config: ModelConfig, layer: int, names: Names) -> Iterator[Weight]:
    """Weights of the feed-forward part of a layer: a SwiGLU or experts, in one tensor each or together."""
    tensors, params, hidden = f"{names.prefix}layers.{layer}.mlp", f"blocks.{layer}.mlp", config.hidden_size
    if not config.has_experts(layer):
        yield from swiglu_weights(tensors, params, hidden, config.mlp_size)
        return
    e = config.experts
    assert e is not None
    yield projection(f"{tensors}.gate.weight", f"{params}.router", e.num_experts, hidden)
    sizes = (params, e.num_experts, e.expert_size, hidden)
    gate_up, down = f"{tensors}.experts.gate_up_proj", f"{tensors}.experts.down_proj"
    if gate_up in names.found or down in names.found:
        yield from fused_experts(gate_up, down, *sizes)
    else:
        yield from separate_experts(f"{tensors}.experts", *sizes)
    yield from swiglu_weights(f"{tensors}.shared_expert", f"{params}.shared", hidden, e.shared_size)
    yield row(f"{tensors}.shared_expert_gate.weight", f"{params}.shared_gate", hidden)


def norm_weights(config: ModelConfig, layer: int, names: Names) -> Iterator[Weight]:
    """Weights of the two norms of a block."""
    tensors, params = f"{names.prefix}layers.{layer}", f"blocks.{layer}"
    yield same(f"{tensors}.input_layernorm.weight", f"{params}.mixer_norm.weight", config.hidden_size)
    yield same(f"{tensors}.post_attention_layernorm.weight", f"{params}.mlp_norm.weight", config.hidden_size)


def mtp_weights(config: ModelConfig, names: Names) -> Iterator[Weight]:
    """Weights of the head for the token after the next: its layer has the names of a layer with attention."""
    hidden, inner = config.hidden_size, Names("mtp.", names.found)
    yield projection("mtp.fc.weight", "mtp.fc.kernel", hidden, 2 * hidden)
    for name in ("embedding", "hidden"):
        yield same(f"mtp.pre_fc_norm_{name}.weight", f"mtp.{name}_norm.weight", hidden)
    yield same("mtp.norm.weight", "mtp.norm.weight", hidden)
    yield from in_head(0, norm_weights(config, 0, inner))
    yield from in_head(0, _attention_weights(config, "mtp.layers.0.self_attn", "blocks.0.mixer"))
    yield from in_head(0, mlp_weights(dataclasses.replace(config, dense_layers=()), 0, inner))


def in_head(layer: int, weights: Iterator[Weight]) -> Iterator[Weight]:
    """Weights of a layer as those of the block of the head for the token after the next."""
    for weight in weights:
        params = (param.removeprefix(f"blocks.{layer}.") for param in weight.params)
        yield weight._replace(params=tuple(f"mtp.block.{param}" for param in params))


def _projections(config: ModelConfig, tensors: str, params: str) -> Iterator[Weight]:
    """[q | k | v | z] and [b | a] of each key head in turn, with the value heads that read it."""
    groups = config.num_heads
    shared = (config.num_v_heads or groups) // groups
    K, V = config.head_dim, shared * value_width(config.head_dim, config.expand_v)
    for name, parts in (
        ("in_proj_qkvz", {"q_proj": K, "k_proj": K, "v_proj": V, "g_proj": V}),
        ("in_proj_ba", {"b_proj": shared, "a_proj": shared}),
    ):
        sizes = {f"{params}.{part}.kernel": size for part, size in parts.items()}
        yield rows(f"{tensors}.{name}.weight", sizes, config.hidden_size, groups)


def weights(
    projections: Callable[[ModelConfig, str, str], Iterator[Weight]], config: ModelConfig, names: Names
) -> Iterator[Weight]:
    """Weights of the blocks of a hybrid model of Qwen.

    Args:
      projections: makes the weights of the projections of a GatedDeltaNet's input, as `_projections`.
    """
    for layer, kind in enumerate(config.types):
        tensors, params = f"{names.prefix}layers.{layer}", f"blocks.{layer}.mixer"
        yield from norm_weights(config, layer, names)
        if kind == "attention":
            yield from _attention_weights(config, f"{tensors}.self_attn", params)
        else:
            yield from projections(config, f"{tensors}.linear_attn", params)
            yield from gated_delta_net_weights(config, f"{tensors}.linear_attn", params)
        yield from mlp_weights(config, layer, names)


FAMILY = Family(
    model_types=("qwen3_next",),
    architecture="Qwen3NextForCausalLM",
    defaults=DEFAULTS,
    config=_config,
    fields=_fields,
    weights=partial(weights, _projections),
    eight_bits=EIGHT_BITS,
    mtp=mtp_weights,
)
