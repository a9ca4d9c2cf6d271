"""Language models: configuration, decoder and generation, and what an optimiser must know of the parameters."""

from gdn_jax.layers.blocks import NoDecayParam, weight_decay_mask
from gdn_jax.models.block import Block
from gdn_jax.models.config import AttentionConfig, ExpertsConfig, ModelConfig
from gdn_jax.models.decoder import Cache, LanguageModel
from gdn_jax.models.generate import generate

__all__ = [
    "AttentionConfig",
    "Block",
    "Cache",
    "ExpertsConfig",
    "LanguageModel",
    "ModelConfig",
    "NoDecayParam",
    "generate",
    "weight_decay_mask",
]
