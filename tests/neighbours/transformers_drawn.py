"""Small checkpoints of all families with random sizes, layers, weights and spelling, which transformers makes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

LINEAR, FULL, WINDOW = "linear_attention", "full_attention", "sliding_attention"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
Fields = dict[str, Any]


class Random(np.random.Generator):
    """Random numbers, with a choice of one of several things."""

    def one(self, *things: Any) -> Any:
        return things[int(self.integers(len(things)))]

    def layers(self, *kinds: str, needed: tuple[str, ...]) -> Fields:
        """Two to five layers, of which there is one of each kind that is needed."""
        types = [*needed, *(self.one(*kinds) for _ in range(self.integers(max(1, 6 - len(needed)))))]
        self.shuffle(types)
        return {"num_hidden_layers": len(types), "layer_types": types}


def _every(random: Random) -> Fields:
    return {
        "vocab_size": int(random.integers(90, 200)),
        "hidden_size": random.one(32, 40, 48, 72),
        "tie_word_embeddings": random.one(True, False),
        "rms_norm_eps": random.one(1e-5, 1e-6, 1e-3),
        **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id")),
    }


def _latent_and_sigmoids(random: Random) -> Fields:
    """Latent attention, and experts of groups behind dense layers."""
    heads, groups = random.one(1, 2, 3, 5), random.one(1, 1, 2, 3, 4)
    size = int(random.integers(2, 5)) if groups > 1 else int(random.integers(3, 9))
    kept = int(random.integers(1, groups + 1))
    return _every(random) | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": random.one(8, 12, 24, 33),
        "q_lora_rank": random.one(None, 12, 20),
        "qk_nope_head_dim": random.one(4, 8, 12, 24),
        "qk_rope_head_dim": random.one(2, 4, 6, 16),
        "v_head_dim": random.one(4, 8, 20, 32),
        "num_local_experts": groups * size,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": int(random.integers(1, min(4, kept * size) + 1)),
        "n_shared_experts": random.one(1, 1, 2, 3),
        "moe_intermediate_size": random.one(8, 12, 21),
        "intermediate_size": random.one(24, 40, 56),
        "routed_scaling_factor": random.one(1.0, 2.446, 0.7),
        "norm_topk_prob": random.one(True, True, False),
    }


def _kimi_linear(random: Random) -> Fields:
    needed = random.one((FULL,), (LINEAR, FULL), (LINEAR, FULL))
    fields = _latent_and_sigmoids(random) | random.layers(LINEAR, LINEAR, FULL, needed=needed)
    dense, number = random.one(0, 1, 2), fields["num_hidden_layers"]
    return fields | {
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(number)],
        "linear_num_heads": random.one(1, 2, 3),
        "linear_head_dim": random.one(8, 12, 16, 32),
        "linear_conv_kernel_dim": random.one(2, 3, 4),
    }


def _bailing_hybrid(random: Random) -> Fields:
    number = int(random.integers(2, 6))
    return _latent_and_sigmoids(random) | {
        "num_hidden_layers": number,
        "layer_group_size": min(number, random.one(2, 3)),
        "first_k_dense_replace": random.one(0, 1, 2),
        "rope_parameters": {"rope_type": "default", "rope_theta": random.one(6e6, 1e4, 500.0)},
        "head_dim": random.one(8, 12, 16, 32),
        "short_conv_kernel_size": random.one(2, 3, 4),
        "kda_safe_gate": random.one(True, True, False),
        "kda_lower_bound": random.one(-5.0, -1.5, -8.0),
        "num_mtp_layers": random.one(0, 1),
    }


def _delta_nets(random: Random) -> Fields:
    """Gated DeltaNets and attention with heads that share keys and values."""
    keys, groups = random.one(1, 2, 3), random.one(1, 2, 3)
    return _every(random) | {
        "num_attention_heads": groups * random.one(1, 2, 3),
        "num_key_value_heads": groups,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * random.one(1, 2, 3),
        "linear_key_head_dim": random.one(8, 12, 16),
        "linear_value_head_dim": random.one(8, 12, 20, 32),
        "linear_conv_kernel_dim": random.one(2, 3, 4),
    }


def _softmax(random: Random) -> Fields:
    """Experts by the softmax of their scores."""
    number = int(random.integers(2, 9))
    return {
        "num_experts": number,
        "num_experts_per_tok": int(random.integers(1, min(number, 4) + 1)),
        "moe_intermediate_size": random.one(8, 12, 21),
        "shared_expert_intermediate_size": random.one(8, 20, 33),
    }


def _lara_mini(random: Random) -> Fields:
    fields = _delta_nets(random) | _softmax(random)
    fields |= random.layers(LINEAR, WINDOW, WINDOW, FULL, needed=(LINEAR, WINDOW))
    return fields | {
        "head_dim": random.one(8, 12, 24),
        # transformers' own cache for a window of 1 keeps all tokens.
        "sliding_window": random.one(2, 5, 9, 20, 200),
        "norm_topk_prob": random.one(True, False),
        "rope_parameters": {"rope_type": "default", "rope_theta": random.one(1e4, 1e6, 300.0)},
    }


def _qwen(random: Random) -> Fields:
    fields = _delta_nets(random) | random.layers(LINEAR, LINEAR, FULL, needed=(LINEAR, FULL))
    rope = {"rope_theta": random.one(1e4, 1e7), "partial_rotary_factor": random.one(0.25, 0.5, 1.0)}
    return fields | {
        "head_dim": random.one(8, 16, 24),
        "attention_bias": random.one(True, False, False),
        "rope_parameters": {"rope_type": "default"} | rope,
    }


def _qwen3_next(random: Random) -> Fields:
    return (
        _qwen(random)
        | _softmax(random)
        | {
            "intermediate_size": random.one(24, 40),
            "norm_topk_prob": random.one(True, False),
            "decoder_sparse_step": random.one(1, 1, 2),
            "mlp_only_layers": random.one([], [0], [1]),
        }
    )


def _olmo_hybrid(random: Random) -> Fields:
    fields = _delta_nets(random) | random.layers(LINEAR, LINEAR, FULL, needed=(LINEAR, FULL))
    return fields | {
        "hidden_size": fields["num_attention_heads"] * random.one(24, 32),
        "intermediate_size": random.one(24, 40),
        "attention_bias": random.one(True, False, False),
        "rope_parameters": {"rope_type": "default", "rope_theta": random.one(None, 5e5)},
        "linear_allow_neg_eigval": random.one(True, False),
    }


FAMILIES: dict[str, Callable[[Random], Fields]] = {
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
    "lara_mini": _lara_mini,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": lambda random: _qwen(random) | {"intermediate_size": random.one(24, 40)},
    "qwen3_5_moe_text": lambda random: _qwen(random) | _softmax(random),
    "olmo_hybrid": _olmo_hybrid,
}
"""Fields of a family's config.json, under the names of transformers' classes."""


def model_of(name: str, fields: Fields, seed: int) -> Any:
    """A model with norms and biases away from their beginnings, and projections of unit gain."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(name, **fields)
    options = dict(attn_implementation="eager", experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for place, x in model.named_parameters():
            if "norm" in place:
                x.add_(0.2 * torch.randn_like(x))
            elif place.endswith(("A_log", "dt_bias")):
                x.add_(0.3 * torch.randn_like(x))
            elif place.endswith("bias"):
                x.normal_(std=0.3)
            else:
                x.normal_(std=0.5 if "conv1d" in place else x.shape[-1] ** -0.5)
        for place, x in model.named_buffers():
            if place.endswith("e_score_correction_bias"):
                x.normal_(std=0.3)
    return model.float().eval()


def _amplification(model: Any) -> float:
    """Change of the logits for one of the weights: the norm of a GatedDeltaNet amplifies outputs near 0."""
    ids = torch.arange(240).reshape(2, 120) % 80
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        for x in model.parameters():
            x.mul_(1 + 1e-6 * torch.randn_like(x))
        return (model(ids, use_cache=False).logits - before).abs().max().item()


def draw(name: str, seed: int, folder: Path) -> str:
    """Writes the checkpoint of a seed, with names as published where the seed is odd; tells its spelling."""
    random = Random(np.random.PCG64([seed, *name.encode()]))
    fields = FAMILIES[name](random)
    best = min(range(8), key=lambda i: _amplification(model_of(name, fields, 100 * seed + i)))
    model = model_of(name, fields, 100 * seed + best)
    half, pieces, released = random.one(True, False), random.one(1, 3), bool(seed % 2)
    if half:
        for place, x in model.named_parameters():
            if not place.endswith(("A_log", "dt_bias")):
                x.data = x.data.to(torch.bfloat16)
    model.save_pretrained(folder)
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    config |= {"use_cache": True, "of_no_model": [1, {"x": None}], "transformers_version": "9.9.9"}
    if released and name in RELEASES:
        config, tensors = RELEASES[name](config, tensors)
    (folder / CONFIG).write_text(json.dumps(config))
    _write(folder, tensors, pieces)
    kind = "as published" if released and name in RELEASES else "as saved"
    return f"{kind}, {'bfloat16' if half else 'float32'}, {pieces} file{'s' * (pieces > 1)}"


def _write(folder: Path, tensors: dict, pieces: int) -> None:
    """One file, or several and an index."""
    (folder / WEIGHTS).unlink()
    places = {}
    for i in range(pieces):
        file = WEIGHTS if pieces == 1 else f"model-{i + 1:05}-of-{pieces:05}.safetensors"
        part = {x: tensors[x].contiguous() for x in sorted(tensors)[i::pieces]}
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    if pieces > 1:
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _published_kimi(config, tensors):
    kinds, mlps = config.pop("layer_types"), config.pop("mlp_layer_types")
    config["linear_attn_config"] = {
        "kda_layers": [i for i, kind in enumerate(kinds, 1) if kind == LINEAR],
        "full_attn_layers": [i for i, kind in enumerate(kinds, 1) if kind == FULL],
        "num_heads": config.pop("linear_num_heads"),
        "head_dim": config.pop("linear_head_dim"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    config |= {"first_k_dense_replace": mlps.count("dense"), "moe_layer_freq": 1, "mla_use_nope": True}
    config |= {"moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "head_dim": 72}
    config |= {"rope_theta": 10000.0, "rope_scaling": None}
    for part in ("gate", "up", "down"):
        inner = f"block_sparse_moe.{part}_proj"  # not of the shared experts
        tensors = {x.replace(inner, f"mlp.{part}_proj"): tensor for x, tensor in tensors.items()}
    return config, tensors


def _published_ling(config, tensors):
    config["head_dim"] = config.pop("linear_head_dim")
    for ours, name in (
        ("num_expert_group", "n_group"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("moe_renormalize", "norm_topk_prob"),
    ):
        config[name] = config.pop(ours)
    dropped = ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_conv_kernel_dim", "qk_head_dim")
    config = {x: value for x, value in config.items() if x not in dropped}
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    config |= {"architectures": ["BailingMoeV3ForCausalLM"], "no_kda_lora": True, "rope_interleave": True}
    config |= {"score_function": "sigmoid", "gated_attention_proj_granularity_type": "head_wise"}
    config |= {"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1, "router_dtype": "fp32"}
    number, hidden = config["num_hidden_layers"], config["hidden_size"]
    for i in range(number):
        place = f"model.layers.{i}.attention."
        if (i + 1) % config["layer_group_size"]:
            tensors[f"{place}o_proj.weight"] = tensors.pop(f"{place}dense.weight")
    tensors[f"model.layers.{number}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
    return config, tensors


def _published_qwen(config, tensors):
    """The decoder of a model for images, with experts in one tensor."""
    outside = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": config["model_type"].removesuffix("_text"),
        "tie_word_embeddings": config["tie_word_embeddings"],
        "text_config": config,
    }
    tensors = {x.replace("model.", "model.language_model.", 1): tensor for x, tensor in tensors.items()}
    tensors |= {"model.visual.norm.weight": torch.ones(8), "mtp.fc.weight": torch.randn(8, 8)}
    if (number := config.get("num_experts")) is None:
        return outside, tensors
    for layer in range(config["num_hidden_layers"]):
        place = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{place}.{i}.{part}_proj.weight") for i in range(number)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{place}.gate_up_proj": torch.cat([gate, up], 1), f"{place}.down_proj": down}
    return outside, tensors


RELEASES = {
    "kimi_linear": _published_kimi,
    "bailing_hybrid": _published_ling,
    "qwen3_5_text": _published_qwen,
    "qwen3_5_moe_text": _published_qwen,
}
"""config.json and tensors as a family is published, from those that transformers writes."""
