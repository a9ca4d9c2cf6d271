"""A language model of token mixers and SwiGLU blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.blocks import Initializer, RMSNorm, SwiGLU, TokenMixer
from gdn_jax.layers import GatedDeltaNet
from gdn_jax.models.config import ModelConfig
from gdn_jax.shapes import check_array

Cache = tuple[Any, ...]
"""Cache of a LanguageModel: one entry per block, made by its mixer."""

Around = Callable[..., tuple[Array, Any]]
"""What an analysis puts in the place of the mixers: `around(i, mixer, x, **options)` for `mixer(x, **options)` of
block i, with x the normalised residual stream. Returns what the mixer would: its output and its cache."""


def make_mixer(
    config: ModelConfig,
    *,
    kernel_init: Initializer | None = None,
    out_kernel_init: Initializer | None = None,
    rngs: nnx.Rngs,
) -> TokenMixer:
    """The token mixer of a block: a GatedDeltaNet with every option of the config that it knows."""
    options = config.options_of(GatedDeltaNet.__init__) | {"dtype": jnp.dtype(config.dtype)}
    return GatedDeltaNet(**options, kernel_init=kernel_init, out_kernel_init=out_kernel_init, rngs=rngs)


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), on a float32 residual stream.

    Args:
      config: of the model.
      mixer: the token mixer of this block.
      kernel_init, out_kernel_init: initialisers of the SwiGLU, see there.
      rngs: source of the initial weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        mixer: TokenMixer,
        *,
        kernel_init: Initializer | None = None,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        dtype = jnp.dtype(config.dtype)
        self.mixer_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = SwiGLU(
            config.hidden_size,
            config.mlp_size,
            dtype=dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            rngs=rngs,
        )

    def __call__(
        self, x: Float[Array, "B T D"], *, mix: Callable[..., tuple[Array, Any]] | None = None, **options: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Applies the block.

        Args:
          x: residual stream [B, T, hidden_size], float32.
          mix: what is called instead of the mixer; None: the mixer.
          options: of the mixer, see `TokenMixer`.

        Returns:
          The stream after the block, and the mixer's cache.
        """
        y, cache = (self.mixer if mix is None else mix)(self.mixer_norm(x), **options)
        x = x + y.astype(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).astype(x.dtype), cache


class LanguageModel(nnx.Module):
    """Next-token logits: embedding, blocks of GatedDeltaNet and SwiGLU, RMSNorm, output projection.

    The residual stream is float32 with any compute dtype: in bfloat16 the small contribution of a late block
    to a large sum would be rounded away. Projections run in config.dtype, the last one with float32 sums and
    float32 logits.

    Initial weights: projections LeCun normal (variance 1 / inputs); those that write to the residual stream
    divided by sqrt(2 * num_layers), so that the stream keeps its size with depth; embedding and head normal with
    variance 1 / hidden_size, the embedding multiplied by sqrt(hidden_size) on the way in: stream and logits start
    at unit size. A tied embedding starts at a third of that, because it makes every token predict itself: the
    stream holds the embedding of the present token, and its product with itself is that token's logit.

    Args:
      config: sizes and arithmetic.
      kernel_init, out_kernel_init: initialisers of the projections: the inner ones, and those that write to the
        residual stream. Default as above.
      embedding_init: initialiser of embedding and head. Default as above.
      rngs: source of the initial weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        kernel_init: Initializer | None = None,
        out_kernel_init: Initializer | None = None,
        embedding_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        scaled = nnx.initializers.variance_scaling(1 / (2 * config.num_layers), "fan_in", "truncated_normal")
        inits = {"kernel_init": kernel_init, "out_kernel_init": out_kernel_init or scaled}
        scale = config.hidden_size**-0.5 / (3 if config.tie_embeddings else 1)
        init = embedding_init or nnx.initializers.normal(scale)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32))
        self.blocks = nnx.List(
            [
                Block(config, make_mixer(config, **inits, rngs=rngs), **inits, rngs=rngs)
                for _ in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=jnp.dtype(config.dtype))
        head = None if config.tie_embeddings else init(rngs.params(), self.embedding.shape, jnp.float32)
        self.head = None if head is None else nnx.Param(head)

    def init_cache(self, batch: int) -> Cache:
        """The cache before the first token, for `batch` sequences."""
        return tuple(block.mixer.init_cache(batch) for block in self.blocks)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        cache: Cache | None = None,
        mask: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        return_cache: bool = False,
        around: Around | None = None,
    ) -> tuple[Float[Array, "B T vocab"], Cache | None]:
        """Logits of the token after each token.

        Args:
          tokens: integers in [0, vocab_size); another value gives NaN logits.
          cache: of the tokens before, see `GatedDeltaNet`.
          mask: True at tokens, False at padding on the left or right of a row; logits there mean nothing.
          segment_ids: packed rows; nothing crosses a change of id.
          return_cache: returns a cache also when none came in.
          around: called in the place of every mixer, see `Around`. With it remat has no effect.

        Returns:
          Logits [B, T, vocab_size], float32, and the cache after the last token (None without cache and
          return_cache).

        Raises:
          ValueError: an argument is wrong; names it.
        """
        x, cache = self.hidden_states(
            tokens,
            cache=cache,
            mask=mask,
            segment_ids=segment_ids,
            return_cache=return_cache,
            around=around,
        )
        return self.logits(x), cache

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        *,
        cache: Cache | None = None,
        mask: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        return_cache: bool = False,
        around: Around | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """All but the output projection: [B, T, hidden_size] in the compute dtype, and the cache."""
        check_array("tokens", tokens, (None, None), "B T")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens: expected an integer dtype, got {tokens.dtype}")
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache: expected {len(self.blocks)} entries, one per block, got {len(cache)}")
        x = jnp.take(self.embedding[...], tokens, axis=0, mode="fill") * self.config.hidden_size**0.5

        def run(i, block, x, past):
            mix = None if around is None else partial(around, i, block.mixer)
            return block(
                x, mix=mix, cache=past, mask=mask, segment_ids=segment_ids, return_cache=return_cache
            )

        if self.config.remat and around is None:  # what `around` keeps of a block would not outlive remat
            run = nnx.remat(run, static_argnums=0)
        caches = []
        for i, block in enumerate(self.blocks):
            x, new = run(i, block, x, None if cache is None else cache[i])
            caches.append(new)
        return self.norm(x), None if cache is None and not return_cache else tuple(caches)

    def head_weight(self) -> Float[Array, "vocab D"]:
        """Weight of the output projection in its own dtype: the head's, or the tied embedding's."""
        return (self.embedding if self.head is None else self.head)[...]

    def logits(self, x: Float[Array, "*S D"]) -> Float[Array, "*S vocab"]:
        """Output projection of `hidden_states`: float32 logits."""
        weight = self.head_weight().astype(x.dtype)
        return jnp.einsum("...d,vd->...v", x, weight, preferred_element_type=jnp.float32)
