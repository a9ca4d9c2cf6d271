"""A block of a language model: a recurrent layer or attention, then a SwiGLU or a mixture of experts."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax.layers.block_weights import BlockSwiGLU, keep_projections
from gdn_jax.layers.blocks import Initializer, RMSNorm, SwiGLU, TokenMixer, from_stream, set_product, whole
from gdn_jax.models.attention import Attention
from gdn_jax.models.config import AttentionConfig, LatentAttentionConfig, ModelConfig
from gdn_jax.models.experts import BlockExperts, Experts
from gdn_jax.models.latent import LatentAttention
from gdn_jax.models.window import WindowAttention
from gdn_jax.parts.products import PRODUCTS, Addend


def arithmetic(config: ModelConfig) -> dict[str, Any]:
    """Compute and parameter dtype of a part."""
    return {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.weight_dtype)}


def stream_norm(config: ModelConfig) -> RMSNorm:
    """A norm of the residual stream."""
    zero_centred = config.zero_centred_norms
    options = dict(eps=config.norm_eps, zero_centred=zero_centred, implementation=config.implementation)
    return RMSNorm(config.hidden_size, **options, **arithmetic(config))


def make_block(config: ModelConfig, layer: int, **weights: Any) -> "Block":
    """Block `layer`, counted from 0, of a model.

    Args:
      config: of the model; its `layer_types`, `experts` and `dense_layers` say what the block is made of.
      layer: number of the block.
      weights: `rngs`, and initialisers of all projections of the block as for `Block`.
    """
    a, e = config.attention_of(config.types[layer]), config.experts
    if a is None:
        mixer = config.mixer.make(config, **arithmetic(config), **weights)
    else:
        options = arithmetic(config) | {"implementation": config.implementation} | weights
        if isinstance(a, LatentAttentionConfig):
            mixer = LatentAttention(config.hidden_size, a, **options)
        else:
            mixer = _attention(config, a, **options)
    mlp = None
    if config.has_experts(layer):
        assert e is not None
        options = arithmetic(config) | {"implementation": config.implementation}
        mlp = Experts(config.hidden_size, e, **options, **weights)
    reordered = a is not None and a.reordered_norm
    block = (ReorderedBlock if reordered else Block)(config, mixer, mlp, **weights)
    set_product(block, PRODUCTS[config.matmul])
    if config.weights == "float8":
        parts: Any = block
        keep_projections(parts.mixer)
        parts.mlp = BlockSwiGLU(parts.mlp) if mlp is None else BlockExperts(parts.mlp)
    return block


def _attention(config: ModelConfig, a: AttentionConfig, **options: Any) -> Attention:
    """The attention of a layer, whole or in a window."""
    kind = Attention if a.window is None else WindowAttention
    norms = {"norm_eps": config.norm_eps, "zero_centred_norms": config.zero_centred_norms}
    return kind(config.hidden_size, a, **norms, **options)


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the sums are in the dtype of the residual stream x.

    The stream comes as two parts, x and what the block before adds to it, and leaves so: a sum is made together with
    the norm of it.

    Args:
      config: of the model.
      mixer: the token mixer of this block.
      mlp: what follows it; None: a SwiGLU.
      kernel_init, out_kernel_init: initialisers of the SwiGLU, see there.
      rngs: source of the initial weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        mixer: TokenMixer,
        mlp: nnx.Module | None = None,
        *,
        kernel_init: Initializer | None = None,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        self.mixer_norm = stream_norm(config)
        self.mixer = mixer
        self.mlp_norm = stream_norm(config)
        inits = {"kernel_init": kernel_init, "out_kernel_init": out_kernel_init}
        if mlp is None:
            options = arithmetic(config) | {"implementation": config.implementation}
            mlp = SwiGLU(config.hidden_size, config.mlp_size, **options, **inits, rngs=rngs)
        self.mlp = mlp

    def __call__(
        self,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | None,
        *,
        mix: Callable[..., tuple[Array, Any]] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "Q T D"] | Addend, Any]:
        """Applies the block.

        Args:
          x: residual stream [B, T, hidden_size].
          y: what is added to it first, whole or in parts, see `layers.blocks.whole`; None: nothing.
          mix: what is called instead of the mixer; None: the mixer.
          options: of the mixer, see `TokenMixer`.

        Returns:
          The stream after the mixer, what the MLP adds to it, and the mixer's cache.
        """
        mix = from_stream(self.mixer if mix is None else mix)
        x, (y, cache) = mix(self.mixer_norm, x, y, **options)
        return *from_stream(self.mlp)(self.mlp_norm, x, y), cache


class ReorderedBlock(Block):
    """x + norm(mixer(x)), then x + norm(mlp(x)): a Block that norms what its parts write.

    Source: the attention layers of Olmo 2 (arXiv 2501.00656) and its successors.
    """

    def __call__(
        self,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | None,
        *,
        mix: Callable[..., tuple[Array, Any]] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "Q T D"] | Addend, Any]:
        """Applies the block, see `Block`."""
        dtype = self.mixer_norm.dtype
        x = x if y is None else x + whole(y, x).astype(x.dtype)
        y, cache = (self.mixer if mix is None else mix)(x.astype(dtype), **options)
        x = x + self.mixer_norm(y).astype(x.dtype)
        return x, self.mlp_norm(self.mlp(x.astype(dtype))), cache
