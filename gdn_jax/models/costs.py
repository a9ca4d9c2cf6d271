"""Costs of a model, from its configuration alone: parameters, cache, and the work of mixing tokens."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from gdn_jax.layers.options import value_width
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.decoder import LanguageModel

CHUNK = 64
"""Tokens of a chunk in the costs of the chunked form."""


class MixerCosts(NamedTuple):
    """Costs of a token mixer without its projections, for one sequence of L tokens.

    Fields:
      prefill_flops: operations of one pass over all tokens; a multiplication and an addition are two.
      activation_bytes: queries, keys, values and outputs of all tokens, and a state where there is one.
      decode_flops: operations of the token after them.
      cache_bytes: what is kept for that token.
    """

    prefill_flops: int
    activation_bytes: int
    decode_flops: int
    cache_bytes: int


def count(params: PyTree) -> int:
    """Number of values in a tree of arrays, or of their shapes."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def parameters(config: ModelConfig) -> dict[str, int]:
    """Number of parameters by part, in the order of a table; makes no array."""
    counts = dict.fromkeys(
        ("embedding", "GatedDeltaNet", "attention", "SwiGLU", "experts", "norms", "head"), 0
    )
    state = nnx.state(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))), nnx.Param)
    for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(state)):
        names = [getattr(key, "key", key) for key in path]
        counts[_part(config, names)] += count(leaf)
    return {part: number for part, number in counts.items() if number}


def _part(config: ModelConfig, names: list) -> str:
    if names[0] in ("embedding", "head"):
        return names[0]
    if names[0] == "norm" or names[2] in ("mixer_norm", "mlp_norm"):
        return "norms"
    layer = int(names[1])
    if names[2] == "mlp":
        return "experts" if config.has_experts(layer) else "SwiGLU"
    return "attention" if config.types[layer] == "attention" else "GatedDeltaNet"


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token meets: of the experts, its own and the shared one."""
    total = sum(parameters(config).values())
    if (e := config.experts) is None:
        return total
    layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    return total - layers * (e.num_experts - e.per_token) * 3 * e.expert_size * config.hidden_size


def multiplied_parameters(config: ModelConfig) -> int:
    """Values that a token is multiplied by: those of its experts, not those of an embedding that only looks up."""
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return active_parameters(config) - looked_up


def attention_costs(config: ModelConfig, L: int) -> MixerCosts:
    """Costs of an attention layer, in which every token meets all before it.

    Args:
      config: of a model with attention.
      L: tokens of the sequence.
    """
    a = config.attention
    assert a is not None
    size, kv_heads = jnp.dtype(config.dtype).itemsize, a.num_kv_heads or a.num_heads
    return MixerCosts(
        prefill_flops=2 * L * (L + 1) * a.num_heads * a.head_dim,
        activation_bytes=2 * L * (a.num_heads + kv_heads) * a.head_dim * size,
        decode_flops=4 * (L + 1) * a.num_heads * a.head_dim,
        cache_bytes=2 * L * kv_heads * a.head_dim * size,
    )


def gated_delta_net_costs(config: ModelConfig, L: int) -> MixerCosts:
    """Costs of a GatedDeltaNet layer, in which a token meets its chunk, and a state of fixed size.

    Of a chunk of C tokens and a head: k k^T and q k^T (4 C^2 K), the corrected keys and values (2 C^2 (K + V)), the
    outputs inside it (2 C^2 V), and three products with the state (6 C K V).

    Args:
      config: of the model.
      L: tokens of the sequence.
    """
    heads, K, V = (
        config.num_v_heads or config.num_heads,
        config.head_dim,
        value_width(config.head_dim, config.expand_v),
    )
    size, keys, values = jnp.dtype(config.dtype).itemsize, config.num_heads * K, heads * V
    state = heads * K * V * 4
    return MixerCosts(
        prefill_flops=L * heads * (CHUNK * (6 * K + 4 * V) + 6 * K * V),
        activation_bytes=2 * L * (keys + values) * size + state,
        decode_flops=6 * heads * K * V,
        cache_bytes=state + (2 * keys + values) * (config.conv_size - 1) * size,
    )


COSTS: dict[str, Callable[[ModelConfig, int], MixerCosts]] = {
    "attention": attention_costs,
    "gated_delta_net": gated_delta_net_costs,
}
"""Costs by layer type."""


def model_costs(config: ModelConfig, L: int) -> MixerCosts:
    """Costs of the mixers of all layers together, for one sequence of L tokens."""
    layers = [COSTS[kind](config, L) for kind in config.types]
    return MixerCosts(*(sum(numbers) for numbers in zip(*layers, strict=True)))
