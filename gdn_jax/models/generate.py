"""Generation by a language model through its recurrent cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from gdn_jax.models.decoder import LanguageModel
from gdn_jax.shapes import check_array

MIN_LENGTH = 16
"""Prompts are padded to at least this length: a pass over so few tokens costs little, a compilation seconds."""


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

    The cost of a token does not depend on how many came before. Compiled once per batch size, length of the prompt
    rounded up to a power of two, num_tokens and top_k; may itself be called under jit, where model is an argument or
    closed over. What is added to round a length up is masked padding: it changes logits by rounding only.

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
    if mask is not None:
        check_array("mask", mask, prompt.shape, "B T")
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
    if not isinstance(prompt, jax.core.Tracer):  # under jit the caller compiles for the length anyway
        prompt, mask = _round_up(prompt, mask)
    graphdef, params = nnx.split(model)
    if temperature == 0:
        rng = top_k = None
    return _generate(graphdef, params, prompt, mask, rng, temperature, num_tokens=num_tokens, top_k=top_k)


def _round_up(prompt, mask):
    """The prompt with padding on the right up to a power of two, at least MIN_LENGTH, and the mask that says so.

    On the right, because chunks then hold the same tokens as without padding.
    """
    B, T = prompt.shape
    padding = max(MIN_LENGTH, 1 << (T - 1).bit_length()) - T
    if mask is None:
        mask = jnp.asarray(np.ones((B, T), bool))  # not jnp.ones, which is compiled for every T
    return tuple(jnp.pad(x, ((0, 0), (0, padding))) for x in (prompt, mask))


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
