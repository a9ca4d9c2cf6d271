"""Costs of a model, from its configuration alone: parameters, cache, and the work of mixing tokens."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from gdn_jax.layers.block_weights import BLOCKS
from gdn_jax.layers.mixer import MixerCosts
from gdn_jax.models.config import ATTENTION_TYPES, AttentionConfig, LatentAttentionConfig, ModelConfig
from gdn_jax.models.decoder import LanguageModel


def count(params: PyTree) -> int:
    """Number of values in a tree of arrays, or of their shapes."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def shapes(config: ModelConfig) -> PyTree:
    """Shapes and dtypes of the parameters, a pytree with the names of the modules; makes no array.

    One layer of each kind is traced, as those of a kind have the same shapes and a model may have thousands.
    """
    small, _ = config.of_each_kind()
    state = nnx.state(nnx.eval_shape(lambda: LanguageModel(small, rngs=nnx.Rngs(0))), nnx.Param)
    found = nnx.to_pure_dict(state)
    of_kind = dict(zip(small.kinds, found["blocks"].values(), strict=True))
    return found | {"blocks": {i: of_kind[kind] for i, kind in enumerate(config.kinds)}}


def parameters(config: ModelConfig) -> dict[str, int]:
    """Number of parameters by part, in the order of a table; makes no array."""
    parts = ("embedding", config.mixer.title, *ATTENTION_TYPES, "SwiGLU", "experts", "norms", "head")
    counts, kinds = dict.fromkeys(parts, 0), config.kinds
    for names, leaf in _leaves(config):
        if not (_is_kept(names) and names[-1] == "scales"):
            counts[_part(config, kinds, names)] += count(leaf)
    return {part: number for part, number in counts.items() if number}


def _leaves(config: ModelConfig) -> list[tuple[list, jax.ShapeDtypeStruct]]:
    """Names and shapes of all parameters, and of the scales of those in 8 bits."""
    leaves = jax.tree.leaves_with_path(shapes(config))
    return [([getattr(key, "key", key) for key in path], leaf) for path, leaf in leaves]


def _is_kept(names: list) -> bool:
    """Tells parameters in 8 bits, and their scales, from others."""
    return len(names) > 1 and str(names[-2]).endswith(BLOCKS)


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all parameters as they are kept, with the scales of those in 8 bits; makes no array."""
    return sum(count(leaf) * leaf.dtype.itemsize for _, leaf in _leaves(config))


def _part(config: ModelConfig, kinds: tuple[tuple[str, bool], ...], names: list) -> str:
    if names[0] in ("embedding", "head"):
        return names[0]
    if names[0] == "norm" or names[2] in ("mixer_norm", "mlp_norm"):
        return "norms"
    layer_type, experts = kinds[int(names[1])]
    if names[2] == "mlp":
        return "experts" if experts else "SwiGLU"
    return title(config, layer_type)


def title(config: ModelConfig, layer_type: str) -> str:
    """Name of a layer type of the model in tables."""
    return layer_type if layer_type in ATTENTION_TYPES else config.mixer.title


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


def parameters_of_step(config: ModelConfig, rows: int) -> float:
    """Number of weights that a step of `rows` rows, a token of each, reads at least once.

    Where rows choose experts at random, this is the mean: an expert is left out by a row with 1 - per_token /
    num_experts, and by all with that to the power of rows.
    """
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return sum(parameters(config).values()) - looked_up - _left_out(config, rows)


def bytes_of_step(config: ModelConfig, rows: int) -> float:
    """Bytes of the weights that `parameters_of_step` counts: those in 8 bits with their scales, others in `dtype`."""
    kept = [(names[-1], leaf) for names, leaf in _leaves(config) if _is_kept(names)]
    values, size = parameters_of_step(config, rows), jnp.dtype(config.dtype).itemsize
    if not kept:
        return values * size
    in_blocks = sum(count(leaf) for name, leaf in kept if name == "codes")
    each = sum(count(leaf) * leaf.dtype.itemsize for _, leaf in kept) / in_blocks
    read = in_blocks - _left_out(config, rows)
    return read * each + (values - read) * size


def _left_out(config: ModelConfig, rows: int) -> float:
    """Values of the experts that no row chooses, in the mean."""
    if (e := config.experts) is None:
        return 0.0
    left = e.num_experts * (1 - e.per_token / e.num_experts) ** rows
    layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    return layers * left * 3 * e.expert_size * config.hidden_size


def attention_costs(
    config: ModelConfig, L: int, of: AttentionConfig | LatentAttentionConfig | None = None
) -> MixerCosts:
    """Costs of an attention layer, in which every token meets all before it, or those of its window.

    Args:
      config: of a model with attention.
      L: tokens of the sequence.
      of: the layer's attention; None: `config.attention`.
    """
    a = of or config.attention
    assert a is not None
    if isinstance(a, LatentAttentionConfig):
        return _latent_costs(config, L, a)
    size, kv_heads = jnp.dtype(config.dtype).itemsize, a.num_kv_heads or a.num_heads
    seen = min(L, a.window or L)
    pairs = seen * (2 * L - seen + 1)  # twice those of a token and one that it sees
    return MixerCosts(
        prefill_flops=2 * pairs * a.num_heads * a.head_dim,
        activation_bytes=2 * L * (a.num_heads + kv_heads) * a.head_dim * size,
        decode_flops=4 * min(L + 1, a.window or L + 1) * a.num_heads * a.head_dim,
        cache_bytes=2 * (a.window or L) * kv_heads * a.head_dim * size,
    )


def _latent_costs(config: ModelConfig, L: int, a: LatentAttentionConfig) -> MixerCosts:
    """Costs of latent attention: one pass meets keys and values of all heads, a token after it their latents."""
    size, latent = jnp.dtype(config.dtype).itemsize, a.kv_rank + a.rope_dim
    return MixerCosts(
        prefill_flops=L * (L + 1) * a.num_heads * (a.key_dim + a.v_dim),
        activation_bytes=2 * L * a.num_heads * (a.key_dim + a.v_dim) * size,
        decode_flops=2 * a.num_heads * ((L + 1) * (latent + a.kv_rank) + a.kv_rank * (a.nope_dim + a.v_dim)),
        cache_bytes=L * latent * size,
    )


def layer_costs(config: ModelConfig, layer_type: str, L: int) -> MixerCosts:
    """Costs of a layer of that type, for one sequence of L tokens."""
    a = config.attention_of(layer_type)
    return config.mixer.costs(config, L) if a is None else attention_costs(config, L, a)


def model_costs(config: ModelConfig, L: int) -> MixerCosts:
    """Costs of the mixers of all layers together, for one sequence of L tokens."""
    layers = [layer_costs(config, kind, L) for kind in config.types]
    return MixerCosts(*(sum(numbers) for numbers in zip(*layers, strict=True)))
