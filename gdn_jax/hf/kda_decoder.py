"""Decoders of Kimi Delta Attention, latent attention and experts by sigmoids: what their families have in common.

A family gives its fields the names that transformers writes, and says how it spells its tensors.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from gdn_jax.commands.errors import brief
from gdn_jax.hf import own, qwen3_next
from gdn_jax.hf.family import Names
from gdn_jax.hf.fields import Fields
from gdn_jax.hf.weights import Weight, convolution, projection, reshaped, same, separate_experts
from gdn_jax.layers.kimi_delta_attention import KimiDelta
from gdn_jax.models.config import ExpertsConfig, LatentAttentionConfig, ModelConfig, SigmoidRouting

DEFAULTS = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
}
SAME = {"num_experts_per_token": 8, "num_shared_experts": 1, "moe_renormalize": True}
"""Fields with other names in the checkpoints' authors' files, and what they are where neither name is there."""
ALIASES = {
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
}
"""Other names of fields, by those that transformers writes. It reads both, and those that it writes go first."""
TYPES = {"linear_attention": "kda", "full_attention": "attention"}
SCORES = ("moe_router_activation_func", "score_function", "scoring_func")
"""Fields that name the function of the router's scores."""


@dataclasses.dataclass(frozen=True)
class Spelling:
    """Names of the tensors of a family.

    Fields:
      mixer: what stands before those of a layer's mixer.
      outputs: of the output projection of a mixer; the first one is what we write.
      A_log: its shape as we write it, -1 for the heads.
      experts: what stands before those of router, experts and shared expert.
      dense: the same in layers without experts; the first one is what we write.
      bias: of the router.
      parts: of the gate, up and down projections of an expert.
    """

    mixer: str
    outputs: tuple[str, ...]
    A_log: tuple[int, ...]
    experts: str
    dense: tuple[str, ...]
    bias: str
    parts: tuple[str, str, str]


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    number, kinds = fields.size("num_hidden_layers"), fields.values.get("mlp_layer_types")
    if kinds is None:
        fields.refuse("moe_layer_freq", 1, "experts in some layers only are not supported")
        return tuple(range(min(number, fields.get("first_k_dense_replace", int))))
    if not isinstance(kinds, list) or len(kinds) != number or {*map(str, kinds)} - {"dense", "sparse"}:
        raise ValueError(
            f"{fields.where}: expected {number} mlp_layer_types, dense or sparse, got {brief(kinds)}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "dense")


def by_written_names(fields: Fields, others: dict[str, str], defaults: dict[str, Any]) -> Fields:
    """Fields under the names that transformers writes.

    Args:
      fields: of config.json.
      others: names that count where those that transformers writes are missing, beside `ALIASES`.
      defaults: what a field is where it is missing under all its names.
    """
    values = fields.values
    found = {name: values[other] for name, other in (ALIASES | others).items() if other in values}
    missing = {name: value for name, value in found.items() if values.get(name) is None}
    return Fields(values | missing, SAME | defaults, fields.where)


def decoder(fields: Fields, mixer: KimiDelta, **attention: Any) -> ModelConfig:
    """The model of fields as transformers writes them.

    Args:
      fields: of config.json.
      mixer: the layers of Kimi Delta Attention.
      attention: options of `LatentAttentionConfig`, beside its sizes.
    """
    fields.refuse("hidden_act", "silu", "only 'silu' is supported")
    fields.refuse("attention_bias", False, "attention with biases is not supported")
    for name in SCORES:
        fields.refuse(name, "sigmoid", "only 'sigmoid' is supported")
    types = fields.layer_types(TYPES)
    latent = LatentAttentionConfig(
        num_heads=fields.size("num_attention_heads"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        v_dim=fields.size("v_head_dim"),
        kv_rank=fields.size("kv_lora_rank"),
        q_rank=None if fields.values.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        **attention,
    )
    inner = fields.size("moe_intermediate_size")
    factor = fields.number("routed_scaling_factor")
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
        **fields.of_decoder(types),
        num_heads=fields.size("linear_num_heads"),
        head_dim=fields.size("linear_head_dim"),
        expand_v=1.0,
        mixer=mixer,
        intermediate_size=fields.size("intermediate_size"),
        attention=latent if "attention" in types else None,
        experts=experts,
        dense_layers=_dense_layers(fields),
    )


def own_fields(config: ModelConfig, family: str) -> dict[str, Any]:
    """Fields of config.json of a model of our own, but for what is the family's."""
    wanted = {
        "expand_v": 1.0,
        "write_start": None,
        "allow_neg_eigval": False,
        "zero_centred_norms": False,
        "scale_embedding": False,
        "window_attention": None,
    }
    own.check_like(config, family, wanted)
    a, e, heads, eps = config.attention, config.experts, config.num_v_heads, config.mixer_norm_eps
    if heads not in (None, config.num_heads) or eps not in (None, config.norm_eps):
        raise NotImplementedError(f"num_v_heads, mixer_norm_eps: {family} has the same for all")
    if not isinstance(a, LatentAttentionConfig):
        raise NotImplementedError(f"attention: {family} has latent attention")
    if e is None or e.routing is None or e.shared_gate or e.shared_size % e.expert_size:
        raise NotImplementedError(f"experts: {family} chooses them by sigmoids, and shares whole ones")
    dense = [not config.has_experts(layer) for layer in range(config.num_layers)]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.mlp_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None,
        "layer_types": ["full_attention" if t == "attention" else "linear_attention" for t in config.types],
        "mlp_layer_types": ["dense" if is_dense else "sparse" for is_dense in dense],
        "first_k_dense_replace": [*dense, False].index(False),
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


def _kda_weights(
    config: ModelConfig, spelling: Spelling, tensors: str, params: str, names: Names
) -> Iterator[Weight]:
    H, K, hidden = config.num_heads, config.head_dim, config.hidden_size
    width = H * K
    parts = {name: (width, hidden) for name in ("q_proj", "k_proj", "v_proj")} | {"b_proj": (H, hidden)}
    for name, rank in (("f", config.mixer.gate_rank), ("g", config.mixer.output_gate_rank)):
        narrow = {f"{name}_a_proj": (K, hidden), f"{name}_b_proj": (width, K)}
        parts |= {f"{name}_proj": (width, hidden)} if rank is None else narrow
    for name, shape in parts.items():
        yield projection(f"{tensors}.{name}.weight", f"{params}.{name}.kernel", *shape)
    yield _output(tensors, params, spelling, names, hidden, width)
    filters = {f"{tensors}.{name}_conv1d.weight": width for name in "qkv"}
    yield convolution(filters, f"{params}.conv_weight", config.conv_size)
    found, written = names.found.get(f"{tensors}.A_log"), tuple(H if n < 0 else n for n in spelling.A_log)
    rates = next((shape for shape in ((H,), (1, 1, H, 1)) if shape == found), written)
    yield reshaped(f"{tensors}.A_log", f"{params}.A_log", rates, (H,))
    yield reshaped(f"{tensors}.dt_bias", f"{params}.dt_bias", (width,), (H, K))
    yield same(f"{tensors}.o_norm.weight", f"{params}.o_norm.weight", K)


def _output(tensors: str, params: str, spelling: Spelling, names: Names, outputs: int, inputs: int) -> Weight:
    name = names.first(*(f"{tensors}.{name}.weight" for name in spelling.outputs))
    return projection(name, f"{params}.o_proj.kernel", outputs, inputs)


def _latent_weights(
    config: ModelConfig, spelling: Spelling, tensors: str, params: str, names: Names
) -> Iterator[Weight]:
    a, hidden = config.attention, config.hidden_size
    H, rank = a.num_heads, a.q_rank
    parts = {
        "kv_a_proj_with_mqa": ("kv_a_proj", a.kv_rank + a.rope_dim, hidden),
        "kv_b_proj": ("kv_b_proj", H * (a.nope_dim + a.v_dim), a.kv_rank),
    }
    if rank is None:
        parts["q_proj"] = ("q_proj", H * a.key_dim, hidden)
    else:
        parts |= {"q_a_proj": ("q_a_proj", rank, hidden), "q_b_proj": ("q_b_proj", H * a.key_dim, rank)}
        yield same(f"{tensors}.q_a_layernorm.weight", f"{params}.q_a_norm.weight", rank)
    if a.head_gate:
        parts["g_proj"] = ("g_proj", H, hidden)
    for theirs, (ours, outputs, inputs) in parts.items():
        yield projection(f"{tensors}.{theirs}.weight", f"{params}.{ours}.kernel", outputs, inputs)
    yield _output(tensors, params, spelling, names, hidden, H * a.v_dim)
    yield same(f"{tensors}.kv_a_layernorm.weight", f"{params}.kv_a_norm.weight", a.kv_rank)


def _mlp_weights(
    config: ModelConfig, spelling: Spelling, tensors: str, params: str, names: Names, layer: int
) -> Iterator[Weight]:
    hidden, e, moe = config.hidden_size, config.experts, f"{tensors}.{spelling.experts}"
    if not config.has_experts(layer):
        first = names.first(*(f"{tensors}.{name}.gate_proj.weight" for name in spelling.dense))
        dense = first.removesuffix(".gate_proj.weight")
        yield from qwen3_next.swiglu_weights(dense, params, hidden, config.mlp_size)
        return
    assert e is not None
    yield projection(f"{moe}.gate.weight", f"{params}.router", e.num_experts, hidden)
    yield same(f"{moe}.gate.{spelling.bias}", f"{params}.router_bias", e.num_experts)
    sizes = (e.num_experts, e.expert_size, hidden)
    yield from separate_experts(f"{moe}.experts", params, *sizes, parts=spelling.parts)
    yield from qwen3_next.swiglu_weights(f"{moe}.shared_experts", f"{params}.shared", hidden, e.shared_size)


def weights(spelling: Spelling, config: ModelConfig, names: Names) -> Iterator[Weight]:
    """Weights of the blocks of a model."""
    for layer, kind in enumerate(config.types):
        tensors, params = f"{names.prefix}layers.{layer}", f"blocks.{layer}"
        yield from qwen3_next.norm_weights(config, layer, names)
        mixer = _latent_weights if kind == "attention" else _kda_weights
        yield from mixer(config, spelling, f"{tensors}.{spelling.mixer}", f"{params}.mixer", names)
        yield from _mlp_weights(config, spelling, tensors, f"{params}.mlp", names, layer)


def mtp_weights(spelling: Spelling, config: ModelConfig, names: Names) -> Iterator[Weight]:
    """Weights of the head for the token after the next, in the layer after the decoder's: attention with experts."""
    layer, hidden = config.num_layers, config.hidden_size
    tensors, params = f"{names.prefix}layers.{layer}", f"blocks.{layer}"
    yield projection(f"{tensors}.eh_proj.weight", "mtp.fc.kernel", hidden, 2 * hidden)
    for theirs, ours in (("enorm", "embedding_norm"), ("hnorm", "hidden_norm"), ("final_layernorm", "norm")):
        yield same(f"{tensors}.{theirs}.weight", f"mtp.{ours}.weight", hidden)
    sparse = dataclasses.replace(config, dense_layers=())
    yield from qwen3_next.in_head(layer, qwen3_next.norm_weights(config, layer, names))
    mixer = _latent_weights(config, spelling, f"{tensors}.{spelling.mixer}", f"{params}.mixer", names)
    yield from qwen3_next.in_head(layer, mixer)
    experts = _mlp_weights(sparse, spelling, tensors, f"{params}.mlp", names, layer)
    yield from qwen3_next.in_head(layer, experts)
