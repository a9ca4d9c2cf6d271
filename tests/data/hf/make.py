"""Writes the checkpoints of this folder with what transformers computes from them. Needs torch and transformers.

    python tests/data/hf/make.py [NAME ...]

They were written with transformers 5.23.0 and torch 2.13.0. Tests read them, none runs this.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
LINEAR, FULL = "linear_attention", "full_attention"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "pad_token_id": None,
    "eos_token_id": None,
}
DENSE = {"intermediate_size": 40}
MOE = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
OLMO = {
    name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
}
OLMO |= DENSE | {"hidden_size": 64, "pad_token_id": None, "eos_token_id": None}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
VISION |= {"patch_size": 4, "num_position_embeddings": 4}
IMAGES = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def checkpoints():
    """Name -> class of the model, configuration."""
    yield (
        "qwen3_5",
        tf.Qwen3_5ForCausalLM,
        tf.Qwen3_5TextConfig(**SIZES, **DENSE, attention_bias=True, tie_word_embeddings=True),
    )
    yield (
        "qwen3_5_bfloat16",
        tf.Qwen3_5ForCausalLM,
        tf.Qwen3_5TextConfig(**SIZES | {"num_hidden_layers": 3}, **DENSE, layer_types=[FULL, LINEAR, FULL]),
    )
    yield (
        "qwen3_5_released",
        tf.Qwen3_5ForConditionalGeneration,
        tf.Qwen3_5Config(
            text_config=SIZES | DENSE | {"rope_parameters": ROPE, "tie_word_embeddings": True},
            vision_config=VISION,
            tie_word_embeddings=True,
            **IMAGES,
        ),
    )
    yield "qwen3_5_moe", tf.Qwen3_5MoeForCausalLM, tf.Qwen3_5MoeTextConfig(**SIZES, **MOE)
    yield (
        "qwen3_5_moe_released",
        tf.Qwen3_5MoeForConditionalGeneration,
        tf.Qwen3_5MoeConfig(
            text_config=SIZES | MOE | {"rope_parameters": ROPE}, vision_config=VISION, **IMAGES
        ),
    )
    options = {"mlp_only_layers": [1], "norm_topk_prob": False, "linear_conv_kernel_dim": 3}
    yield "qwen3_next", tf.Qwen3NextForCausalLM, tf.Qwen3NextConfig(**SIZES, **DENSE, **MOE, **options)
    yield "olmo_hybrid", tf.OlmoHybridForCausalLM, tf.OlmoHybridConfig(**OLMO, num_key_value_heads=2)
    options = {"rope_parameters": {"rope_theta": None}, "linear_num_key_heads": 2, "linear_key_head_dim": 20}
    yield "olmo_hybrid_released", tf.OlmoHybridForCausalLM, tf.OlmoHybridConfig(**OLMO, **options)


def randomise(model):
    """Weights that matter: norms away from 1, projections of unit gain."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.2 * torch.randn_like(p))
            elif name.endswith("bias") and "dt_bias" not in name:
                p.normal_(std=0.3)
            elif "conv1d" in name:
                p.normal_(std=0.5)
            elif p.ndim >= 2:
                p.normal_(std=p.shape[-1] ** -0.5)


def amplification(model, ids):
    """Change of the logits for one of the weights: the norm of a GatedDeltaNet amplifies outputs near 0."""
    with torch.no_grad():
        before = model(ids).logits
        for p in model.parameters():
            p.mul_(1 + 1e-6 * torch.randn_like(p))
        return (model(ids).logits - before).abs().max().item()


def release(folder, name):
    """Rewrites what transformers writes as it is released."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if name == "qwen3_5_released":
        tensors["mtp.fc.weight"] = torch.randn(32, 64)
    if name == "qwen3_5_moe_released":  # fused experts in two files
        for layer in range(4):
            prefix = f"model.language_model.layers.{layer}.mlp.experts"
            parts = {
                part: torch.stack([tensors.pop(f"{prefix}.{i}.{part}_proj.weight") for i in range(6)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
            tensors[f"{prefix}.down_proj"] = parts["down"]
    if name == "olmo_hybrid_released":
        for layer in range(3):
            prefix = f"model.layers.{layer}.linear_attn"
            names = [f"{prefix}.{x}_conv1d.weight" for x in "qkv"]
            whole = torch.cat([tensors[x] for x in names])
            tensors |= {
                x: part.contiguous() for x, part in zip(names, whole.split([40, 40, 160]), strict=True)
            }
        prefix = "model.layers.3"
        tensors[f"{prefix}.post_attention_layernorm.weight"] = tensors.pop(
            f"{prefix}.feedforward_layer_norm.weight"
        )
    if name != "qwen3_5_moe_released":
        save_file(tensors, file, {"format": "pt"})
        return
    file.unlink()
    names, places = sorted(tensors), {}
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        place = f"model-{i:05}-of-00002.safetensors"
        save_file({x: tensors[x] for x in part}, folder / place, {"format": "pt"})
        places |= dict.fromkeys(part, place)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def main():
    for name, cls, config in checkpoints():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        ids = torch.randint(0, 60, (2, 70), generator=torch.Generator().manual_seed(len(name)))
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)

        def draw(seed, cls=cls, config=config):
            torch.manual_seed(seed)
            model = cls(config)
            randomise(model)
            return model

        seed = min(range(6), key=lambda seed, draw=draw, ids=ids: amplification(draw(seed), ids))
        model = draw(seed)
        model.to(torch.bfloat16 if "bfloat16" in name else torch.float32).save_pretrained(folder)
        if "released" in name:
            release(folder, name)
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
        model = tf.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        mask = torch.ones_like(ids)
        mask[0, :37] = 0
        mask[1, :2] = 0
        start = ids[:, :9]
        with torch.no_grad():
            expected = {
                "ids": ids.int(),
                "mask": mask.int(),
                "logits": model(ids).logits,
                "padded_logits": model(ids, attention_mask=mask).logits,
                "generated": model.generate(
                    start,
                    attention_mask=torch.ones_like(start),
                    max_new_tokens=16,
                    do_sample=False,
                    pad_token_id=0,
                )[:, 9:].int(),
            }
        save_file({x: tensor.contiguous() for x, tensor in expected.items()}, folder / "expected.safetensors")
        print(name, seed)


if __name__ == "__main__":
    main()
