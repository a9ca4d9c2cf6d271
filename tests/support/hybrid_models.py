"""Small models with attention beside Gated DeltaNet, of each family that checkpoints are read of."""

import jax
import numpy as np
from flax import nnx
from small_models import made

from gdn_jax.models import AttentionConfig, ExpertsConfig, ModelConfig

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_layers": 2,
    "layer_types": ("gated_delta_net", "attention"),
    "num_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "implementation": "recurrent",
    "scale_embedding": False,
}

QWEN = AttentionConfig(4, 2, 8, "head", output_gate=True, rotary_dim=4)

OLMO = AttentionConfig(3, None, 8, "width", rotary_dim=8, bias=True, reordered_norm=True)

MODELS = {
    "qwen3_5": {"attention": QWEN, "zero_centred_norms": True, "tie_embeddings": True},
    "qwen3_next": {"attention": QWEN, "experts": ExpertsConfig(5, 2, 8, 12), "zero_centred_norms": True},
    "olmo_hybrid": {"attention": OLMO, "allow_neg_eigval": True, "expand_v": 1.5},
}


def make(name="qwen3_5", **options):
    return made(ModelConfig(**{**SIZES, **MODELS[name], **options}))


@nnx.jit(static_argnames="return_cache")
def _call(model, tokens, **options):
    return model(tokens, **options)


def call(model, tokens, **options):
    options = {k: jax.device_put(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    return _call(model, jax.device_put(tokens), **options)


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], shape).astype(np.int32)
