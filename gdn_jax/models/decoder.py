"""A language model of blocks: GatedDeltaNet or attention, then a SwiGLU or a mixture of experts."""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from gdn_jax import mosaic
from gdn_jax.blocks import Initializer, RMSNorm, SwiGLU, TokenMixer, from_stream, transposed_product
from gdn_jax.chunks import rows
from gdn_jax.fused.embedding import embed
from gdn_jax.fused.kernels import kernels_run
from gdn_jax.layers import GatedDeltaNet
from gdn_jax.models.attention import Attention
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.experts import Experts
from gdn_jax.shapes import check_array

Cache = tuple[Any, ...]
"""Cache of a LanguageModel: one entry per block, made by its mixer."""

REMAT_POLICIES = {
    "rule": jax.checkpoint_policies.save_only_these_names(*rows.RESIDUAL_NAMES, *mosaic.RESIDUAL_NAMES),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What a block keeps beside its input, by `ModelConfig.remat`."""

Around = Callable[..., tuple[Array, Any]]
"""What an analysis puts in the place of the mixers: `around(i, mixer, x, **options)` for `mixer(x, **options)` of
block i, with x the normalised residual stream. Returns what the mixer would: its output and its cache."""


def _arithmetic(config: ModelConfig) -> dict[str, Any]:
    """Compute and parameter dtype of a part."""
    return {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.weight_dtype)}


def _norm(config: ModelConfig) -> RMSNorm:
    """A norm of the residual stream."""
    zero_centred = config.zero_centred_norms
    options = dict(eps=config.norm_eps, zero_centred=zero_centred, implementation=config.implementation)
    return RMSNorm(config.hidden_size, **options, **_arithmetic(config))


def make_mixer(
    config: ModelConfig,
    layer_type: str = "gated_delta_net",
    *,
    kernel_init: Initializer | None = None,
    out_kernel_init: Initializer | None = None,
    rngs: nnx.Rngs,
) -> TokenMixer:
    """The token mixer of a block: a GatedDeltaNet or an Attention with every option of the config that it knows.

    Args:
      config: of the model.
      layer_type: "gated_delta_net", or "attention" in a model whose config has `attention`.
      kernel_init, out_kernel_init: initialisers of its projections, see `GatedDeltaNet`.
      rngs: source of the initial weights.
    """
    inits = {"kernel_init": kernel_init, "out_kernel_init": out_kernel_init}
    if layer_type == "gated_delta_net":
        options = config.options_of(GatedDeltaNet.__init__) | _arithmetic(config)
        options["norm_eps"] = config.mixer_norm_eps or config.norm_eps
        return GatedDeltaNet(**options, **inits, rngs=rngs)
    assert config.attention is not None
    norms = {"norm_eps": config.norm_eps, "zero_centred_norms": config.zero_centred_norms}
    return Attention(config.hidden_size, config.attention, **norms, **_arithmetic(config), **inits, rngs=rngs)


def make_block(
    config: ModelConfig,
    layer: int,
    *,
    kernel_init: Initializer | None = None,
    out_kernel_init: Initializer | None = None,
    rngs: nnx.Rngs,
) -> "Block":
    """Block `layer`, counted from 0, of a model.

    Args:
      config: of the model; its `layer_types`, `experts` and `dense_layers` say what the block is made of.
      layer: number of the block.
      kernel_init, out_kernel_init, rngs: as for `make_mixer`, of all projections of the block.
    """
    inits = {"kernel_init": kernel_init, "out_kernel_init": out_kernel_init}
    layer_type = config.types[layer]
    mixer = make_mixer(config, layer_type, **inits, rngs=rngs)
    mlp = None
    if config.has_experts(layer):
        assert config.experts is not None
        mlp = Experts(config.hidden_size, config.experts, **_arithmetic(config), **inits, rngs=rngs)
    reordered = layer_type == "attention" and config.attention is not None and config.attention.reordered_norm
    return (ReorderedBlock if reordered else Block)(config, mixer, mlp, **inits, rngs=rngs)


def _period(things: Sequence[Any]) -> int:
    """The shortest period of a sequence that it is a multiple of."""
    n = len(things)
    return next(
        p for p in range(1, n + 1) if n % p == 0 and all(things[i] == things[i - p] for i in range(p, n))
    )


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
        self.mixer_norm = _norm(config)
        self.mixer = mixer
        self.mlp_norm = _norm(config)
        inits = {"kernel_init": kernel_init, "out_kernel_init": out_kernel_init}
        if mlp is None:
            options = _arithmetic(config) | {"implementation": config.implementation}
            mlp = SwiGLU(config.hidden_size, config.mlp_size, **options, **inits, rngs=rngs)
        self.mlp = mlp

    def __call__(
        self,
        x: Float[Array, "B T D"],
        y: Float[Array, "B T D"] | None,
        *,
        mix: Callable[..., tuple[Array, Any]] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Any]:
        """Applies the block.

        Args:
          x: residual stream [B, T, hidden_size].
          y: what is added to it first; None: nothing.
          mix: what is called instead of the mixer; None: the mixer.
          options: of the mixer, see `TokenMixer`.

        Returns:
          The stream after the mixer, what the MLP adds to it, and the mixer's cache.
        """
        x, (y, cache) = from_stream(self.mixer if mix is None else mix, self.mixer_norm, x, y, **options)
        return *from_stream(self.mlp, self.mlp_norm, x, y), cache


class ReorderedBlock(Block):
    """x + norm(mixer(x)), then x + norm(mlp(x)): a Block that norms what its parts write.

    Source: the attention layers of Olmo 2 (arXiv 2501.00656) and its successors.
    """

    def __call__(
        self,
        x: Float[Array, "B T D"],
        y: Float[Array, "B T D"] | None,
        *,
        mix: Callable[..., tuple[Array, Any]] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Any]:
        """Applies the block, see `Block`."""
        dtype = self.mixer_norm.dtype
        x = x if y is None else x + y.astype(x.dtype)
        y, cache = (self.mixer if mix is None else mix)(x.astype(dtype), **options)
        x = x + self.mixer_norm(y).astype(x.dtype)
        return x, self.mlp_norm(self.mlp(x.astype(dtype))), cache


def _make_alike(make: Callable[[nnx.Rngs], Block], layers: list[int], key: PRNGKeyArray) -> list[Block]:
    """Blocks with fresh weights for some layers; those of layer i are a function of the key and of i.

    Every array is drawn for all blocks at once: compiling one draw takes XLA half a second on a GPU, and a deep model
    has hundreds of arrays.
    """
    graphdef = None

    def draw(i):
        nonlocal graphdef
        graphdef, state = nnx.split(make(nnx.Rngs(jax.random.fold_in(key, i))))
        return state

    arrays, treedef = jax.tree.flatten(jax.vmap(draw)(jnp.asarray(layers)))
    assert graphdef is not None
    per_block = zip(*(jnp.unstack(x) for x in arrays), strict=True)
    return [nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)) for leaves in per_block]


@jax.custom_jvp
def _stack(xs: tuple[Array, ...]) -> Array:
    """jnp.stack(xs), with a derivative that compiles fast."""
    return jnp.stack(xs)


@_stack.defjvp
def _stack_jvp(primals, tangents):
    """Reads the cotangents of the parts by an index that the compiler does not know.

    With known ones XLA compiles as many slices as the model has arrays, with unknown ones one for each shape.
    """
    stacked = _stack(*primals)
    zeros = jnp.zeros_like(stacked)

    def place(i, x):
        index = jax.lax.optimization_barrier(jnp.int32(i))
        return jax.lax.dynamic_update_index_in_dim(zeros, x, index, 0)

    return stacked, reduce(jnp.add, [place(i, x) for i, x in enumerate(*tangents)])


def _layers_by_kind(config: ModelConfig) -> dict[Any, list[int]]:
    """Layers whose blocks differ in their weights alone."""
    kinds: dict[Any, list[int]] = {}
    for layer, layer_type in enumerate(config.types):
        kinds.setdefault((layer_type, config.has_experts(layer)), []).append(layer)
    return kinds


class LanguageModel(nnx.Module):
    """Next-token logits: embedding, blocks, RMSNorm, output projection.

    A block is a GatedDeltaNet, or attention where the config has it, and a SwiGLU or a mixture of experts.

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
        for layers in _layers_by_kind(config).values():
            make = partial(make_block, config, layers[0], **inits)
            blocks |= zip(
                layers, _make_alike(lambda rngs, make=make: make(rngs=rngs), layers, key), strict=True
            )
        self.blocks = nnx.List([blocks[i] for i in range(config.num_layers)])
        types = [(kind, config.has_experts(i)) for i, kind in enumerate(config.types)]
        period = _period(types) if config.scan_layers else config.num_layers  # a scan traces one period
        for i, block in enumerate(self.blocks):
            if isinstance(block.mixer, Attention) or block.mixer.rule == "softmax_attention":
                block.mixer.layer = i % period
        self.norm = _norm(config)
        head = None if config.tie_embeddings else init(rngs.params(), self.embedding.shape, dtype)
        self.head = None if head is None else nnx.Param(head)
        self.origin: Any = None  # of a model that was loaded, see `gdn_jax.hf.load_hf`

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
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens: expected an integer dtype, got {tokens.dtype}")
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache: expected {len(self.blocks)} entries, one per block, got {len(cache)}")
        x = embed(self.embedding[...], tokens, implementation=self.config.implementation)
        x = x.astype(jnp.float32)
        if self.config.scale_embedding:
            x = x * self.config.hidden_size**0.5
        x = x.astype(self.config.residual_dtype)

        def run(i, block, stream, past):
            mix = None if around is None else partial(around, i, block.mixer)
            x, y, new = block(
                *stream, mix=mix, cache=past, mask=mask, segment_ids=segment_ids, return_cache=return_cache
            )
            return (x, y), new

        walks = cache is not None or return_cache or around is not None
        stacked = None if walks else self._stacked_blocks()
        if self.config.remat != "none" and around is None:  # what `around` keeps would not outlive remat
            # A loop's body cannot be merged with its recomputation, which is what prevent_cse is against.
            options = {"policy": REMAT_POLICIES[self.config.remat], "prevent_cse": stacked is None}
            run = nnx.remat(run, static_argnums=0, **options)
        if stacked is not None:
            graphdefs, states = stacked

            def run_period(stream, states):
                for graphdef, state in zip(graphdefs, states, strict=True):
                    stream, _ = run(0, nnx.merge(graphdef, state), stream, None)
                return stream, None

            stream, _ = jax.lax.scan(run_period, (x, jnp.zeros(x.shape, self.config.dtype)), states)
            return self.norm.add(*stream)[1], None
        caches, stream = [], (x, None)
        for i, block in enumerate(self.blocks):
            stream, new = run(i, block, stream, None if cache is None else cache[i])
            caches.append(new)
        return self.norm.add(*stream)[1], None if cache is None and not return_cache else tuple(caches)

    def head_weight(self) -> Float[Array, "vocab D"]:
        """Weight of the output projection in its own dtype: the head's, or the tied embedding's."""
        return (self.embedding if self.head is None else self.head)[...]

    def _stacked_blocks(self) -> tuple[Any, Any] | None:
        """The structures of the blocks of a period, and their weights, stacked along a new first axis.

        A model of blocks alike has periods of one block. None without scan_layers.

        Raises:
          ValueError: the config asks for a scan, and blocks differ in more than their weights without a period.
        """
        if not self.config.scan_layers:
            return None
        graphdefs, states, others = zip(*(nnx.split(b, nnx.Param, ...) for b in self.blocks), strict=True)
        shapes = [jax.tree.map(jax.typeof, state) for state in states]
        n = len(self.blocks)
        period = _period(list(zip(graphdefs, shapes, strict=True)))
        if jax.tree.leaves(others):
            reason = "a block with state beside its parameters"
        elif period == n > 1:
            reason = "blocks that differ"
        else:
            stacked = (jax.tree.map(lambda *xs: _stack(xs), *states[i::period]) for i in range(period))
            return graphdefs[:period], tuple(stacked)
        raise ValueError(
            f"scan_layers: expected blocks that differ in their weights alone, or do so from period to period, "
            f"got {reason}"
        )

    def logits(self, x: Float[Array, "*S D"]) -> Float[Array, "*S vocab"]:
        """Output projection of `hidden_states`: float32 logits."""
        weight = self.head_weight().astype(x.dtype)
        if kernels_run(self.config.implementation):
            return transposed_product(x, weight, jnp.float32)
        return jnp.einsum("...d,vd->...v", x, weight, preferred_element_type=jnp.float32)
