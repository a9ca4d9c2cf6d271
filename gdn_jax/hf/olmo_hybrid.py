"""OLMo-Hybrid: every projection and convolution of its own, negative eigenvalues, attention blocks that norm outputs.

Attention norms queries and keys over their full width; released models have no positions. Source:
`modular_olmo_hybrid.py` of transformers.
"""

from collections.abc import Iterator
from typing import Any

from gdn_jax.hf import own
from gdn_jax.hf.family import Family, Names
from gdn_jax.hf.fields import Fields
from gdn_jax.hf.qwen3_next import swiglu_weights
from gdn_jax.hf.weights import Weight, attention_weights, convolution, projection, same
from gdn_jax.layers.gated_delta_net import GatedDeltaNetMixer
from gdn_jax.layers.options import value_width
from gdn_jax.models.config import AttentionConfig, ModelConfig

MIXER_NORM_EPS = 1e-5
"""Epsilon of the norm at the output of a GatedDeltaNet, whatever rms_norm_eps is."""

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}


def _config(fields: Fields) -> ModelConfig:
    fields.refuse("hidden_act", "silu", "only 'silu' is supported")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")

    def or_else(name: str, default: int) -> int:
        return default if fields.values.get(name) is None else fields.size(name)

    types = fields.layer_types(attends_at_last=True)
    attention_dim = or_else("head_dim", hidden // heads)
    theta, _ = fields.rope()
    key_heads = or_else("linear_num_key_heads", heads)
    head_dim = or_else("linear_key_head_dim", int(0.75 * hidden / key_heads))
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=or_else("num_key_value_heads", heads),
        head_dim=attention_dim,
        qk_norm="width",
        rotary_dim=0 if theta is None else attention_dim,
        rope_theta=theta or 1e4,
        bias=fields.get("attention_bias", bool),
        reordered_norm=True,
    )
    return ModelConfig(
        **fields.of_decoder(types),
        num_heads=key_heads,
        num_v_heads=or_else("linear_num_value_heads", heads),
        head_dim=head_dim,
        expand_v=or_else("linear_value_head_dim", 2 * head_dim) / head_dim,
        intermediate_size=fields.size("intermediate_size"),
        allow_neg_eigval=fields.get("linear_allow_neg_eigval", bool),
        mixer_norm_eps=MIXER_NORM_EPS,
        attention=attention if "attention" in types else None,
    )


def _fields(config: ModelConfig) -> dict[str, Any]:
    wanted = {
        "write_start": None,
        "mixer": GatedDeltaNetMixer(),
        "rule": "gated_delta",
        "zero_centred_norms": False,
        "scale_embedding": False,
        "experts": None,
        "window_attention": None,
    }
    own.check_like(config, "OLMo-Hybrid", wanted | {"mixer_norm_eps": MIXER_NORM_EPS})
    a = config.attention
    if a is None or "gated_delta_net" not in config.types:
        raise NotImplementedError("layer_types: models of the family OLMo-Hybrid have layers of both types")
    own.check_like(a, "OLMo-Hybrid", {"qk_norm": "width", "output_gate": False, "reordered_norm": True})
    if a.rotary_dim not in (0, a.head_dim):
        raise NotImplementedError(
            f"rotary_dim: OLMo-Hybrid rotates whole heads, {a.head_dim}, or nothing, got {a.rotary_dim}"
        )
    rope = {"rope_type": "default", "rope_theta": a.rope_theta if a.rotary_dim else None}
    return {
        **own.decoder_fields(config),
        **own.attention_fields(a),
        "intermediate_size": config.mlp_size,
        "rope_parameters": rope,
        "linear_allow_neg_eigval": config.allow_neg_eigval,
        # Without them transformers takes tokens of the released vocabulary, which ours may not have.
        "pad_token_id": None,
        "eos_token_id": None,
    }


def _gated_delta_net_weights(
    config: ModelConfig, tensors: str, params: str, names: Names
) -> Iterator[Weight]:
    heads, width = config.num_v_heads or config.num_heads, value_width(config.head_dim, config.expand_v)
    keys, values, hidden = config.num_heads * config.head_dim, heads * width, config.hidden_size
    outputs = {"q": keys, "k": keys, "v": values, "a": heads, "b": heads, "g": values}
    for name, number in outputs.items():
        yield projection(f"{tensors}.{name}_proj.weight", f"{params}.{name}_proj.kernel", number, hidden)
    yield convolution(_convolutions(tensors, outputs, names), f"{params}.conv_weight", config.conv_size)
    yield same(f"{tensors}.A_log", f"{params}.A_log", heads)
    yield same(f"{tensors}.dt_bias", f"{params}.dt_bias", heads)
    yield same(f"{tensors}.o_norm.weight", f"{params}.o_norm.weight", width)
    yield projection(f"{tensors}.o_proj.weight", f"{params}.o_proj.kernel", hidden, values)


def _convolutions(tensors: str, outputs: dict[str, int], names: Names) -> dict[str, int]:
    """The tensors of the convolution and their channels.

    Released files have one each for q, k and v. What transformers writes are three equal parts of the whole, wherever
    they cut it; inside it has one tensor.
    """
    parts = {f"{tensors}.{name}_conv1d.weight": outputs[name] for name in "qkv"}
    channels = sum(parts.values())
    if (whole := f"{tensors}.conv1d.weight") in names.found:
        return {whole: channels}
    found = {name: names.found[name][0] for name in parts if names.found.get(name)}
    return found if len(found) == len(parts) and sum(found.values()) == channels else parts


def _weights(config: ModelConfig, names: Names) -> Iterator[Weight]:
    for layer, kind in enumerate(config.types):
        tensors, params = f"{names.prefix}layers.{layer}", f"blocks.{layer}"
        # Released files and those that transformers writes have other names for the same norms.
        if (a := config.attention_of(kind)) is not None:
            yield from attention_weights(a, config.hidden_size, f"{tensors}.self_attn", f"{params}.mixer")
            mixer_norm, mlp_norm = (
                ("post_attention_layernorm", "feedforward_layer_norm"),
                ("post_feedforward_layernorm",),
            )
        else:
            yield from _gated_delta_net_weights(config, f"{tensors}.linear_attn", f"{params}.mixer", names)
            mixer_norm = ("attention_layer_norm", "input_layernorm")
            mlp_norm = ("feedforward_layer_norm", "post_attention_layernorm")
        for param, choices in (("mixer_norm", mixer_norm), ("mlp_norm", mlp_norm)):
            name = names.first(*(f"{tensors}.{choice}.weight" for choice in choices))
            yield same(name, f"{params}.{param}.weight", config.hidden_size)
        yield from swiglu_weights(f"{tensors}.mlp", f"{params}.mlp", config.hidden_size, config.mlp_size)


FAMILY = Family(
    model_types=("olmo_hybrid",),
    architecture="OlmoHybridForCausalLM",
    defaults=DEFAULTS,
    config=_config,
    fields=_fields,
    weights=_weights,
)
