"""Kimi Linear: Kimi Delta Attention, latent attention without positions, experts by sigmoids behind dense layers.

Files that transformers writes and published ones differ in the fields of config.json and the names of the dense
layers; both are opened. Source: `modeling_kimi_linear.py` of transformers.
"""

from collections.abc import Iterator
from typing import Any

from gdn_jax.hf import own, qwen3_next
from gdn_jax.hf.family import Family, Names
from gdn_jax.hf.fields import Fields
from gdn_jax.hf.weights import Weight, convolution, projection, reshaped, same, separate_experts
from gdn_jax.models.config import ExpertsConfig, LatentAttentionConfig, ModelConfig, SigmoidRouting
from gdn_jax.models.mixers.kimi_delta_attention import KimiDelta

DEFAULTS = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 0,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
}
TYPES = {"linear_attention": "kda", "full_attention": "attention"}


def _mixer_fields(fields: Fields) -> tuple[tuple[str, ...], int, int, int]:
    """Layer types, heads, width of a head and taps: of `linear_attn_config`, or of fields beside it."""
    number, inner = fields.size("num_hidden_layers"), fields.values.get("linear_attn_config")
    if inner is None:
        heads, width = fields.size("linear_num_heads"), fields.size("linear_head_dim")
        return fields.layer_types(TYPES), heads, width, fields.size("linear_conv_kernel_dim")
    if not isinstance(inner, dict):
        raise ValueError(f"{fields.where}: expected an object linear_attn_config, got {inner!r}")
    linear = Fields(inner, {}, f"{fields.where}: linear_attn_config")
    heads, width, taps = (linear.size(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    if fields.values.get("layer_types") is not None:
        return fields.layer_types(TYPES), heads, width, taps
    kda, full = linear.get("kda_layers", list), linear.get("full_attn_layers", list)
    if sorted([*kda, *full], key=str) != sorted(range(1, number + 1), key=str):
        raise ValueError(
            f"{linear.where}: expected kda_layers and full_attn_layers to be 1 to {number}, got {kda} and {full}"
        )
    return tuple("kda" if i in kda else "attention" for i in range(1, number + 1)), heads, width, taps


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    number, kinds = fields.size("num_hidden_layers"), fields.values.get("mlp_layer_types")
    if kinds is None:
        fields.refuse("moe_layer_freq", 1, "experts in some layers only are not supported")
        return tuple(range(min(number, fields.get("first_k_dense_replace", int))))
    if not isinstance(kinds, list) or len(kinds) != number or {*map(str, kinds)} - {"dense", "sparse"}:
        raise ValueError(f"{fields.where}: expected {number} mlp_layer_types, dense or sparse, got {kinds!r}")
    return tuple(i for i, kind in enumerate(kinds) if kind == "dense")


def _config(fields: Fields) -> ModelConfig:
    fields.refuse("hidden_act", "silu", "only 'silu' is supported")
    fields.refuse("attention_bias", False, "attention with biases is not supported")
    fields.refuse("mla_use_nope", True, "latent attention with rotary positions is not supported here")
    fields.refuse("moe_router_activation_func", "sigmoid", "only 'sigmoid' is supported")
    types, heads, width, taps = _mixer_fields(fields)
    q_rank = None if fields.values.get("q_lora_rank") is None else fields.size("q_lora_rank")
    latent = LatentAttentionConfig(
        num_heads=fields.size("num_attention_heads"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        v_dim=fields.size("v_head_dim"),
        kv_rank=fields.size("kv_lora_rank"),
        q_rank=q_rank,
    )
    inner = fields.size("moe_intermediate_size")
    factor = float(fields.get("routed_scaling_factor", float, int))
    experts = ExpertsConfig(
        num_experts=fields.size("num_experts"),
        per_token=fields.size("num_experts_per_token"),
        expert_size=inner,
        shared_size=inner * fields.size("num_shared_experts"),
        normalise=fields.get("moe_renormalize", bool),
        shared_gate=False,
        routing=SigmoidRouting(fields.size("num_expert_group"), fields.size("topk_group"), factor),
    )
    return ModelConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        num_layers=len(types),
        num_heads=heads,
        head_dim=width,
        expand_v=1.0,
        conv_size=taps,
        mixer=KimiDelta(),
        intermediate_size=fields.size("intermediate_size"),
        tie_embeddings=fields.get("tie_word_embeddings", bool),
        norm_eps=float(fields.get("rms_norm_eps", float)),
        layer_types=types,
        attention=latent if "attention" in types else None,
        experts=experts,
        dense_layers=_dense_layers(fields),
        scale_embedding=False,
    )


def _fields(config: ModelConfig) -> dict[str, Any]:
    wanted = {
        "mixer": KimiDelta(),
        "expand_v": 1.0,
        "write_start": None,
        "allow_neg_eigval": False,
        "zero_centred_norms": False,
        "scale_embedding": False,
        "window_attention": None,
    }
    own.check_like(config, "Kimi Linear", wanted)
    a, e = config.attention, config.experts
    if config.num_v_heads not in (None, config.num_heads) or config.mixer_norm_eps not in (
        None,
        config.norm_eps,
    ):
        raise NotImplementedError("num_v_heads, mixer_norm_eps: Kimi Linear has the same for all")
    if not isinstance(a, LatentAttentionConfig) or a.head_gate or a.rope_theta is not None:
        raise NotImplementedError("attention: Kimi Linear's is latent, without gate and positions")
    if e is None or e.routing is None or e.shared_gate or e.shared_size % e.expert_size:
        raise NotImplementedError("experts: Kimi Linear's are chosen by sigmoids, whole ones are shared")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.mlp_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "layer_types": ["full_attention" if t == "attention" else "linear_attention" for t in config.types],
        "mlp_layer_types": ["sparse" if config.has_experts(i) else "dense" for i in range(config.num_layers)],
        "linear_num_heads": config.num_heads,
        "linear_head_dim": config.head_dim,
        "linear_conv_kernel_dim": config.conv_size,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_heads,
        "qk_nope_head_dim": a.nope_dim,
        "qk_rope_head_dim": a.rope_dim,
        "v_head_dim": a.v_dim,
        "kv_lora_rank": a.kv_rank,
        "q_lora_rank": a.q_rank,
        "num_experts": e.num_experts,
        "num_experts_per_token": e.per_token,
        "moe_intermediate_size": e.expert_size,
        "num_shared_experts": e.shared_size // e.expert_size,
        "moe_renormalize": e.normalise,
        "num_expert_group": e.routing.groups,
        "topk_group": e.routing.kept_groups,
        "routed_scaling_factor": e.routing.factor,
    }


def _kda_weights(config: ModelConfig, tensors: str, params: str, names: Names) -> Iterator[Weight]:
    H, K, hidden = config.num_heads, config.head_dim, config.hidden_size
    width = H * K
    outer = {"q_proj": width, "k_proj": width, "v_proj": width, "f_a_proj": K, "g_a_proj": K, "b_proj": H}
    for name, outputs in outer.items():
        yield projection(f"{tensors}.{name}.weight", f"{params}.{name}.kernel", outputs, hidden)
    for name, outputs, inputs in (("f_b", width, K), ("g_b", width, K), ("o", hidden, width)):
        yield projection(f"{tensors}.{name}_proj.weight", f"{params}.{name}_proj.kernel", outputs, inputs)
    filters = {f"{tensors}.{name}_conv1d.weight": width for name in "qkv"}
    yield convolution(filters, f"{params}.conv_weight", config.conv_size)
    shape = (H,) if names.found.get(f"{tensors}.A_log") == (H,) else (1, 1, H, 1)
    yield reshaped(f"{tensors}.A_log", f"{params}.A_log", shape, (H,))
    yield reshaped(f"{tensors}.dt_bias", f"{params}.dt_bias", (width,), (H, K))
    yield same(f"{tensors}.o_norm.weight", f"{params}.o_norm.weight", K)


def latent_weights(
    a: LatentAttentionConfig, hidden: int, tensors: str, params: str, output: str
) -> Iterator[Weight]:
    """Weights of latent attention, whose output projection has the name `output`."""
    H, rank = a.num_heads, a.q_rank
    q = {"q_proj": ("q_proj", H * a.key_dim, hidden)}
    if rank is not None:
        q = {"q_a_proj": ("q_a_proj", rank, hidden), "q_b_proj": ("q_b_proj", H * a.key_dim, rank)}
        yield same(f"{tensors}.q_a_layernorm.weight", f"{params}.q_a_norm.weight", rank)
    parts = q | {
        "kv_a_proj_with_mqa": ("kv_a_proj", a.kv_rank + a.rope_dim, hidden),
        "kv_b_proj": ("kv_b_proj", H * (a.nope_dim + a.v_dim), a.kv_rank),
        output: ("o_proj", hidden, H * a.v_dim),
    }
    for theirs, (ours, outputs, inputs) in parts.items():
        yield projection(f"{tensors}.{theirs}.weight", f"{params}.{ours}.kernel", outputs, inputs)
    yield same(f"{tensors}.kv_a_layernorm.weight", f"{params}.kv_a_norm.weight", a.kv_rank)


def _mlp_weights(config: ModelConfig, layer: int, names: Names) -> Iterator[Weight]:
    tensors, params, hidden = f"{names.prefix}layers.{layer}", f"blocks.{layer}.mlp", config.hidden_size
    moe, e = f"{tensors}.block_sparse_moe", config.experts
    if not config.has_experts(layer):
        first = names.first(f"{moe}.gate_proj.weight", f"{tensors}.mlp.gate_proj.weight")
        yield from qwen3_next.swiglu_weights(
            first.removesuffix(".gate_proj.weight"), params, hidden, config.mlp_size
        )
        return
    assert e is not None
    yield projection(f"{moe}.gate.weight", f"{params}.router", e.num_experts, hidden)
    yield same(f"{moe}.gate.e_score_correction_bias", f"{params}.router_bias", e.num_experts)
    sizes = (e.num_experts, e.expert_size, hidden)
    yield from separate_experts(f"{moe}.experts", params, *sizes, parts=("w1", "w3", "w2"))
    yield from qwen3_next.swiglu_weights(f"{moe}.shared_experts", f"{params}.shared", hidden, e.shared_size)


def _weights(config: ModelConfig, names: Names) -> Iterator[Weight]:
    for layer, kind in enumerate(config.types):
        tensors, params = f"{names.prefix}layers.{layer}.self_attn", f"blocks.{layer}.mixer"
        yield from qwen3_next.norm_weights(config, layer, names)
        if kind == "attention":
            assert isinstance(config.attention, LatentAttentionConfig)
            yield from latent_weights(config.attention, config.hidden_size, tensors, params, "o_proj")
        else:
            yield from _kda_weights(config, tensors, params, names)
        yield from _mlp_weights(config, layer, names)


FAMILY = Family(
    model_types=("kimi_linear",),
    architecture="KimiLinearForCausalLM",
    defaults=DEFAULTS,
    config=_config,
    fields=_fields,
    weights=_weights,
)
