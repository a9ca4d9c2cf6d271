"""A language model: an embedding, blocks, a norm and an output projection."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.layers.blocks import Initializer
from gdn_jax.models import alike
from gdn_jax.models.attention import Attention
from gdn_jax.models.block import make_block, stream_norm
from gdn_jax.models.config import ModelConfig, period_of
from gdn_jax.parallel.gradient_order import before_earlier, orders_gradients
from gdn_jax.parts.embedding import embed
from gdn_jax.parts.kernels import SMALL, usable
from gdn_jax.parts.products import array_of, transposed_product
from gdn_jax.rule import seam
from gdn_jax.rule.chunks import rows
from gdn_jax.shapes import check_array, check_integer

Cache = tuple[Any, ...]
"""Cache of a LanguageModel: one entry per block, made by its mixer."""

REMAT_POLICIES = {
    "rule": jax.checkpoint_policies.save_only_these_names(*rows.RESIDUAL_NAMES, *seam.RESIDUAL_NAMES),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Arrays that a block keeps beside its input, by `ModelConfig.remat`."""

Around = Callable[..., tuple[Array, Any]]
"""Stands in the place of the mixers, for an analysis: `around(i, mixer, x, **options)` is called for
`mixer(x, **options)` of block i, with x the normalised residual stream. It returns an output and a cache as the mixer
would."""


class LanguageModel(nnx.Module):
    """Next-token logits: embedding, blocks, RMSNorm, output projection.

    A block is the config's recurrent mixer, or attention where the config has it, and a SwiGLU or a mixture of
    experts.

    The residual stream is float32 with any compute dtype, unless the config says otherwise. Projections run in
    config.dtype, the last one with float32 sums and float32 logits.

    Initial weights: projections LeCun normal (variance 1 / inputs); those that write to the residual stream
    divided by sqrt(2 * num_layers), so that the stream keeps its size with depth; embedding and head normal with
    variance 1 / hidden_size, the embedding multiplied by sqrt(hidden_size) on the way in: stream and logits start
    at unit size. A tied embedding starts at a third of that, because it makes every token predict itself: the
    stream holds the embedding of the present token, and its product with itself is that token's logit. Without
    scale_embedding an embedding that is not tied starts at unit size.

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
        in_scale = scale if config.scale_embedding or config.tie_embeddings else 1.0
        in_init = embedding_init or nnx.initializers.normal(in_scale)
        dtype = jnp.dtype(config.weight_dtype)
        self.embedding = nnx.Param(in_init(rngs.params(), (config.vocab_size, config.hidden_size), dtype))
        blocks, key = {}, rngs.params()
        for kind in dict.fromkeys(config.kinds):
            layers = [layer for layer, other in enumerate(config.kinds) if other == kind]
            make = partial(make_block, config, layers[0], **inits)
            made = alike.make_alike(lambda rngs, make=make: make(rngs=rngs), layers, key)
            blocks |= zip(layers, made, strict=True)
        self.blocks = nnx.List([blocks[i] for i in range(config.num_layers)])
        period = period_of(config.kinds) if config.scan_layers else config.num_layers  # a scan traces one
        for i, block in enumerate(self.blocks):
            if block.mixer.attends:
                block.mixer.layer = i % period
        self.norm = stream_norm(config)
        head = None if config.tie_embeddings else init(rngs.params(), self.embedding.shape, dtype)
        self.head = None if head is None else nnx.Param(head)
        self.origin: Any = None  # of a model that was loaded, see `gdn_jax.hf.load_hf`
        self.mtp: Any = None  # its head for the token after the next, an `MTPHead`

    def init_cache(self, batch: int, capacity: int | None = None) -> Cache:
        """The cache before the first token.

        Args:
          batch: sequences.
          capacity: tokens that attention layers have room for, see `Attention.init_cache`; None: their caches grow.
        """
        return tuple(
            block.mixer.init_cache(batch, capacity)
            if isinstance(block.mixer, Attention)
            else block.mixer.init_cache(batch)
            for block in self.blocks
        )

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

    def mtp_logits(
        self, tokens: Int[Array, "B T"], *, mask: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T1 vocab"]:
        """Logits of the token after the next, by the head of a model that was loaded with one.

        Args:
          tokens: [B, T], T >= 2, integers in [0, vocab_size).
          mask: True at tokens, False at padding on the left or right of a row.

        Returns:
          [B, T - 1, vocab_size], float32: entry t is for token t + 2, from the tokens up to t + 1. It means something
          where token t and token t + 1 are tokens.

        Raises:
          ValueError: the model has no such head, or an argument is wrong; names it.
        """
        if self.mtp is None:
            raise ValueError(
                "model: expected one with a head for the token after the next, which load_hf brings where a "
                "checkpoint of Qwen or Ling 3.0 has all its tensors, got one without"
            )
        return self.mtp.logits(self, tokens, mask)

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
        """All but the output projection: [B, T, hidden_size] in the compute dtype, and the cache.

        Args: those of a call of the model.

        Raises:
          ValueError: an argument is wrong; names it.
        """
        check_array("tokens", tokens, (None, None), "B T")
        check_integer("tokens", tokens)
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache: expected {len(self.blocks)} entries, one per block, got {len(cache)}")
        x = self.embedded(tokens)

        def run(i, block, stream, past):
            mix = None if around is None else partial(around, i, block.mixer)
            x, y, new = block(
                *stream, mix=mix, cache=past, mask=mask, segment_ids=segment_ids, return_cache=return_cache
            )
            return (x, y), new

        walks = cache is not None or return_cache or around is not None
        stacked = alike.stacked(self.blocks) if self.config.scan_layers and not walks else None
        # For training alone: what `around` keeps would not outlive it, and a loop of tokens has no use for it.
        if self.config.remat != "none" and around is None and cache is None:
            # A loop's body cannot be merged with its recomputation, which is what prevent_cse is against.
            options = {"policy": REMAT_POLICIES[self.config.remat], "prevent_cse": stacked is None}
            run = nnx.remat(run, static_argnums=0, **options)
        if stacked is not None:
            graphdefs, states = stacked

            def run_period(stream, states):
                for graphdef, state in zip(graphdefs, states, strict=True):
                    (x, y), _ = run(0, nnx.merge(graphdef, state), stream, None)
                    stream = x, array_of(y)  # that of the start is an array
                return stream, None

            stream, _ = jax.lax.scan(run_period, (x, jnp.zeros(x.shape, self.config.dtype)), states)
            return self.norm.add(*stream)[1], None
        caches, stream, blocks = [], (x, None), [*self.blocks]
        for i in range(len(blocks)):
            if orders_gradients() and i + 1 < len(blocks):
                graphdef, weights = nnx.split(blocks[i + 1])
                x, weights = before_earlier(stream[0], weights)
                stream, blocks[i + 1] = (x, stream[1]), nnx.merge(graphdef, weights)
            stream, new = run(i, blocks[i], stream, None if cache is None else cache[i])
            caches.append(new)
        return self.norm.add(*stream)[1], None if cache is None and not return_cache else tuple(caches)

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeddings of tokens, with which the residual stream begins."""
        x = embed(self.embedding[...], tokens, implementation=self.config.implementation).astype(jnp.float32)
        if self.config.scale_embedding:
            x = x * self.config.hidden_size**0.5
        return x.astype(self.config.residual_dtype)

    def head_weight(self) -> Float[Array, "vocab D"]:
        """Weight of the output projection in its own dtype: the head's, or the tied embedding's."""
        return (self.embedding if self.head is None else self.head)[...]

    def logits(self, x: Float[Array, "*S D"], words: int | None = None) -> Float[Array, "*S vocab"]:
        """Output projection of `hidden_states`: float32 logits, of the first `words` tokens where that is given."""
        weight = self.head_weight()[:words].astype(x.dtype)
        if usable(self.config.implementation, SMALL):
            return transposed_product(x, weight, jnp.float32)
        return jnp.einsum("...d,vd->...v", x, weight, preferred_element_type=jnp.float32)
