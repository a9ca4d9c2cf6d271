"""Configurations of hybrid models by name: published ones, and small ones of the same forms for a laptop."""

import dataclasses
from typing import Any

from gdn_jax.layers.erase_then_delta import EraseDelta
from gdn_jax.layers.kimi_delta_attention import KimiDelta
from gdn_jax.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    ModelConfig,
    SigmoidRouting,
)


def _qwen(num_heads: int, num_kv_heads: int, *, head_dim: int = 256, theta: float = 1e7) -> AttentionConfig:
    """Attention of Qwen3-Next and Qwen3.5: a quarter of each head is rotated."""
    rotary = head_dim // 4
    return AttentionConfig(num_heads, num_kv_heads, head_dim, "head", True, rotary, theta)


_QWEN = ModelConfig(
    vocab_size=248320,
    num_layers=4,
    num_heads=16,
    head_dim=128,
    expand_v=1.0,
    attention=_qwen(16, 4),
    norm_eps=1e-6,
    zero_centred_norms=True,
    scale_embedding=False,
)
_OLMO = ModelConfig(
    vocab_size=100352,
    hidden_size=3840,
    num_layers=32,
    num_heads=30,
    head_dim=96,
    expand_v=2.0,
    intermediate_size=11008,
    allow_neg_eigval=True,
    attention=AttentionConfig(30, 30, 128, "width", reordered_norm=True),
    norm_eps=1e-6,
    mixer_norm_eps=1e-5,
    scale_embedding=False,
)


def _sized(hidden: int, layers: int, v_heads: int, attention: AttentionConfig, **options: Any) -> ModelConfig:
    """A model of Qwen of other sizes."""
    sizes: Any = dict(hidden_size=hidden, num_layers=layers, num_v_heads=v_heads, attention=attention)
    return dataclasses.replace(_QWEN, **sizes, **options)


_SMALL: dict[str, Any] = dict(
    vocab_size=256, hidden_size=128, num_layers=4, num_heads=2, num_v_heads=4, head_dim=32
)

# Models of recurrent layers alone: the small ones as `gdn train` makes them by default, the others of 0.4 billion
# parameters.
_RECURRENT = ModelConfig(expand_v=1.0, intermediate_size=256)
_RECURRENT_04B = ModelConfig(
    vocab_size=32768,
    hidden_size=1024,
    num_layers=24,
    num_heads=8,
    head_dim=128,
    expand_v=1.0,
    intermediate_size=2736,
)

_KIMI_LINEAR = ModelConfig(
    vocab_size=163840,
    hidden_size=2304,
    num_layers=27,
    num_heads=32,
    head_dim=128,
    expand_v=1.0,
    intermediate_size=9216,
    mixer="kda",
    layer_types=(*("kda", "kda", "kda", "attention") * 6, "kda", "kda", "attention"),
    attention=LatentAttentionConfig(32, 128, 64, 128, 512),
    experts=ExpertsConfig(256, 8, 1024, 1024, shared_gate=False, routing=SigmoidRouting(factor=2.446)),
    dense_layers=(0,),
    scale_embedding=False,
)

_LING_TINY = ModelConfig(
    vocab_size=157184,
    hidden_size=1536,
    num_layers=24,
    num_heads=16,
    head_dim=128,
    expand_v=1.0,
    intermediate_size=4608,
    mixer=KimiDelta(gate="lower_bound", lower_bound=-5.0, gate_rank=None, output_gate_rank=None),
    layer_types=("kda", "kda", "kda", "attention") * 6,
    attention=LatentAttentionConfig(16, 128, 64, 128, 512, q_rank=256, rope_theta=6e6, head_gate=True),
    experts=ExpertsConfig(128, 8, 512, 512, shared_gate=False, routing=SigmoidRouting(8, 4, 2.5)),
    dense_layers=(0,),
    norm_eps=1e-6,
    scale_embedding=False,
)

_EDA = EraseDelta(gate_rank=128, output_gate_rank=None)

PRESETS: dict[str, ModelConfig] = {
    "qwen3.5-small": dataclasses.replace(
        _QWEN, **_SMALL, attention=_qwen(4, 2, head_dim=32, theta=1e4), tie_embeddings=True
    ),
    "qwen3.5-moe-small": dataclasses.replace(
        _QWEN, **_SMALL, attention=_qwen(4, 2, head_dim=32, theta=1e4), experts=ExpertsConfig(8, 2, 64, 64)
    ),
    "olmo-hybrid-small": dataclasses.replace(
        _OLMO,
        **_SMALL | {"num_v_heads": None},
        intermediate_size=344,
        attention=AttentionConfig(4, 4, 32, "width", reordered_norm=True),
    ),
    "qwen3.5-0.8b": _sized(1024, 24, 16, _qwen(8, 2), intermediate_size=3584, tie_embeddings=True),
    "qwen3.5-2b": _sized(2048, 24, 16, _qwen(8, 2), intermediate_size=6144, tie_embeddings=True),
    "qwen3.5-4b": _sized(2560, 32, 32, _qwen(16, 4), intermediate_size=9216, tie_embeddings=True),
    "qwen3.5-9b": _sized(4096, 32, 32, _qwen(16, 4), intermediate_size=12288),
    "qwen3.5-27b": _sized(5120, 64, 48, _qwen(24, 4), intermediate_size=17408),
    "qwen3.6-27b": _sized(5120, 64, 48, _qwen(24, 4), intermediate_size=17408),
    "qwen3.5-35b-a3b": _sized(2048, 40, 32, _qwen(16, 2), experts=ExpertsConfig(256, 8, 512, 512)),
    "qwen3.5-122b-a10b": _sized(3072, 48, 64, _qwen(32, 2), experts=ExpertsConfig(256, 8, 1024, 1024)),
    "qwen3-next-80b-a3b": _sized(
        2048, 48, 32, _qwen(16, 2), experts=ExpertsConfig(512, 10, 512, 512), vocab_size=151936
    ),
    "olmo-hybrid-7b": _OLMO,
    "kimi-linear-48b-a3b": _KIMI_LINEAR,
    "ling-3.0-tiny": _LING_TINY,
    "kda-small": dataclasses.replace(_RECURRENT, mixer="kda"),
    "kda-0.4b": dataclasses.replace(_RECURRENT_04B, mixer="kda"),
    "gated-delta-net-2-small": dataclasses.replace(_RECURRENT, mixer="gated_delta_net_2"),
    "gated-delta-net-2-0.4b": dataclasses.replace(_RECURRENT_04B, mixer="gated_delta_net_2"),
    "eda-small": dataclasses.replace(_RECURRENT, mixer="eda"),
    "eda-0.4b": dataclasses.replace(_RECURRENT_04B, mixer="eda"),
    "eda-2.5b": _sized(2048, 24, 16, _qwen(8, 2), intermediate_size=7488, num_heads=8, mixer=_EDA),
    "gated-delta-product-small": dataclasses.replace(
        _RECURRENT, mixer="gated_delta_product", allow_neg_eigval=True
    ),
}
"""Model configurations by name, in float32: `dataclasses.replace(config, dtype=..., weight_dtype=...)` for others.

Source: the configurations of transformers (Qwen3-Next, Qwen3.5-9B and 35B-A3B, OLMo-Hybrid), of torchtitan (the
other Qwen3.5 models) and of released checkpoints (Kimi-Linear-48B-A3B, Ling-3.0-tiny). "eda-2.5b" is the dense model
of Erase-then-Delta Attention (arXiv 2606.26560): its sizes, and of what is not said there what gives its 2.5295B
parameters. Those of the other mixers are this project's, with the sizes of its Gated DeltaNets.
"""
