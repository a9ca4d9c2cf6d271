"""A language model of GatedDeltaNet and SwiGLU blocks, and generation through its recurrent cache."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from gdn_jax.blocks import RMSNorm, SwiGLU
from gdn_jax.layers import GatedDeltaNet, GatedDeltaNetCache, value_width
from gdn_jax.ops import IMPLEMENTATIONS
from gdn_jax.rules import RULES
from gdn_jax.shapes import check_array, check_choice

DTYPES = ("float32", "bfloat16")

Cache = tuple[GatedDeltaNetCache, ...]
"""Cache of a LanguageModel: one entry per block."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and arithmetic of a LanguageModel. Every value is checked when the object is made.

    Fields:
      vocab_size: number of tokens.
      hidden_size: width of the residual stream.
      num_layers: blocks.
      num_heads: query and key heads of a GatedDeltaNet.
      num_v_heads: its value and state heads, a multiple of num_heads; None: num_heads.
      head_dim: K. num_heads * head_dim = 0.75 * hidden_size and expand_v = 2 give a mixer of about
        6 * hidden_size^2 parameters.
      expand_v: V / K, with head_dim * expand_v whole.
      conv_size: taps of the short convolution, 2 to 4.
      intermediate_size: inner width of the SwiGLU; None: mlp_ratio * hidden_size, up to a multiple of 8.
      mlp_ratio: read only where intermediate_size is None.
      allow_neg_eigval: write strength in [0, 2] instead of [0, 1].
      rule: of the token mixers, one of `rules.RULES`. Sizes and parameters do not depend on it.
      tie_embeddings: use the embedding as the output projection, which saves vocab_size * hidden_size parameters;
        with a small vocabulary a projection of its own learns faster.
      norm_eps: of every RMSNorm.
      dtype: compute dtype, "float32" or "bfloat16". Parameters, residual stream, norms, gates, states and
        logits are float32 in any case.
      implementation: of the rule, see `gated_delta_rule`; None: the fastest that supports the call.

    Raises:
      ValueError: names the field, what was expected and what came.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 2
    num_v_heads: int | None = None
    head_dim: int = 32
    expand_v: float = 2.0
    conv_size: int = 4
    intermediate_size: int | None = None
    mlp_ratio: float = 8 / 3
    allow_neg_eigval: bool = False
    rule: str = "gated_delta"
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    dtype: str = "float32"
    implementation: str | None = None

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value}")
        if self.num_v_heads is not None and (self.num_v_heads < 1 or self.num_v_heads % self.num_heads):
            raise ValueError(
                f"num_v_heads: expected a multiple of num_heads = {self.num_heads}, got {self.num_v_heads}"
            )
        value_width(self.head_dim, self.expand_v)
        if not 2 <= self.conv_size <= 4:
            raise ValueError(f"conv_size: expected 2 to 4, got {self.conv_size}")
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise ValueError(f"intermediate_size: expected a positive integer, got {self.intermediate_size}")
        if not self.mlp_ratio > 0:
            raise ValueError(f"mlp_ratio: expected a positive number, got {self.mlp_ratio}")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps: expected a positive number, got {self.norm_eps}")
        check_choice("rule", self.rule, tuple(RULES))
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("implementation", self.implementation, (*IMPLEMENTATIONS, None))

    @property
    def mlp_size(self) -> int:
        """Inner width of the SwiGLU."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-round(self.mlp_ratio * self.hidden_size) // 8) * 8


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), on a float32 residual stream.

    A mixer is a layer called as `GatedDeltaNet` is, with `init_cache(batch)`.

    Args:
      config: of the model.
      mixer: the token mixer of this block.
      rngs: source of the initial weights.
    """

    def __init__(self, config: ModelConfig, mixer: GatedDeltaNet, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        kernel_init, out_kernel_init = _initializers(config)
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
        self, x: Float[Array, "B T D"], **options
    ) -> tuple[Float[Array, "B T D"], GatedDeltaNetCache | None]:
        """x [B, T, hidden_size] float32 to the same; options and the cache are the mixer's."""
        y, cache = self.mixer(self.mixer_norm(x), **options)
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
      rngs: source of the initial weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.hidden_size**-0.5 / (3 if config.tie_embeddings else 1))
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32))
        self.blocks = nnx.List(
            [Block(config, _mixer(config, rngs), rngs=rngs) for _ in range(config.num_layers)]
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
    ) -> tuple[Float[Array, "B T vocab"], Cache | None]:
        """Logits of the token after each token.

        Args:
          tokens: integers in [0, vocab_size); another value gives NaN logits.
          cache: of the tokens before, see `GatedDeltaNet`.
          mask: True at tokens, False at padding on the left or right of a row; logits there mean nothing.
          segment_ids: packed rows; nothing crosses a change of id.
          return_cache: returns a cache also when none came in.

        Returns:
          Logits [B, T, vocab_size], float32, and the cache after the last token (None without cache and
          return_cache).

        Raises:
          ValueError: an argument is wrong; names it.
        """
        x, cache = self.hidden_states(
            tokens, cache=cache, mask=mask, segment_ids=segment_ids, return_cache=return_cache
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
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """All but the output projection: [B, T, hidden_size] in the compute dtype, and the cache."""
        check_array("tokens", tokens, (None, None), "B T")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens: expected an integer dtype, got {tokens.dtype}")
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache: expected {len(self.blocks)} entries, one per block, got {len(cache)}")
        x = jnp.take(self.embedding[...], tokens, axis=0, mode="fill") * self.config.hidden_size**0.5
        caches = []
        for i, block in enumerate(self.blocks):
            x, new = block(
                x,
                cache=None if cache is None else cache[i],
                mask=mask,
                segment_ids=segment_ids,
                return_cache=return_cache,
            )
            if new is not None:
                caches.append(new)
        return self.norm(x), tuple(caches) if caches else None

    def logits(self, x: Float[Array, "*S D"]) -> Float[Array, "*S vocab"]:
        """Output projection of `hidden_states`: float32 logits."""
        weight = self.embedding if self.head is None else self.head
        return jnp.einsum("...d,vd->...v", x, weight[...].astype(x.dtype), preferred_element_type=jnp.float32)


def generate(
    model: LanguageModel,
    prompt: Int[Array, "B T"],
    num_tokens: int,
    *,
    mask: Bool[Array, "B T"] | None = None,
    rng: PRNGKeyArray | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
) -> Int[Array, "B num_tokens"]:
    """Continues prompts: one pass over the prompt, then single steps through the recurrent cache.

    The cost of a token does not depend on how many came before. Compiled once per shape of the prompt,
    num_tokens and top_k; may itself be called under jit, where model is an argument or closed over.

    Args:
      model: the model.
      prompt: [B, T] integers, T >= 1.
      num_tokens: how many to append, at least 1.
      mask: True at tokens, False at padding on the left or right of a prompt (each row needs a token).
      rng: key of the draws; needed where temperature > 0.
      temperature: 0 takes the likeliest token; above 0 tokens are drawn from softmax(logits / temperature).
      top_k: draws among the k likeliest tokens only.

    Returns:
      The new tokens [B, num_tokens], in the prompt's dtype.

    Raises:
      ValueError: an argument is wrong; names it.
    """
    check_array("prompt", prompt, (None, None), "B T")
    if prompt.shape[1] == 0:
        raise ValueError("prompt: expected at least one token, got T = 0")
    if num_tokens < 1:
        raise ValueError(f"num_tokens: expected at least 1, got {num_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    if temperature > 0 and rng is None:
        raise ValueError(f"rng: expected a key with temperature = {temperature}, got None")
    if top_k is not None and not 1 <= top_k <= model.config.vocab_size:
        raise ValueError(f"top_k: expected 1 to vocab_size = {model.config.vocab_size}, got {top_k}")
    graphdef, params = nnx.split(model)
    if temperature == 0:
        rng = top_k = None
    return _generate(graphdef, params, prompt, mask, rng, temperature, num_tokens=num_tokens, top_k=top_k)


@partial(jax.jit, static_argnums=0, static_argnames=("num_tokens", "top_k"))
def _generate(graphdef, params, prompt, mask, rng, temperature, *, num_tokens, top_k):
    model = nnx.merge(graphdef, params)

    def choose(logits, i):
        if rng is None:
            return jnp.argmax(logits, axis=-1).astype(prompt.dtype)
        if top_k is not None:
            least = jax.lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        key = jax.random.fold_in(rng, i)
        return jax.random.categorical(key, logits / temperature).astype(prompt.dtype)

    x, cache = model.hidden_states(prompt, mask=mask, return_cache=True)
    if mask is None:
        last = x[:, -1]
    else:
        position = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
        last = jnp.take_along_axis(x, position[:, None, None], axis=1)[:, 0]
    token = choose(model.logits(last), 0)

    def step(carry, i):
        token, cache = carry
        logits, cache = nnx.merge(graphdef, params)(token[:, None], cache=cache)
        token = choose(logits[:, 0], i)
        return (token, cache), token

    _, tokens = jax.lax.scan(step, (token, cache), jnp.arange(1, num_tokens))
    return jnp.concatenate([token[:, None], tokens.T], axis=1)


def _mixer(config: ModelConfig, rngs: nnx.Rngs) -> GatedDeltaNet:
    kernel_init, out_kernel_init = _initializers(config)
    return GatedDeltaNet(
        config.hidden_size,
        num_heads=config.num_heads,
        num_v_heads=config.num_v_heads,
        head_dim=config.head_dim,
        expand_v=config.expand_v,
        conv_size=config.conv_size,
        allow_neg_eigval=config.allow_neg_eigval,
        rule=config.rule,
        norm_eps=config.norm_eps,
        dtype=jnp.dtype(config.dtype),
        implementation=config.implementation,
        kernel_init=kernel_init,
        out_kernel_init=out_kernel_init,
        rngs=rngs,
    )


def _initializers(config: ModelConfig):
    """Of the inner projections, and of those that write to the residual stream."""
    scaled = nnx.initializers.variance_scaling(1 / (2 * config.num_layers), "fan_in", "truncated_normal")
    return nnx.initializers.lecun_normal(), scaled
