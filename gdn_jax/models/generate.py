"""Generation by a language model through its cache."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from gdn_jax.models.attention import AttentionCache, reserve
from gdn_jax.models.decoder import Cache, LanguageModel
from gdn_jax.models.draft_head import check_drafts
from gdn_jax.models.drafts import Prompt, decode_with_drafts
from gdn_jax.models.inference.program import for_decoding, for_inference
from gdn_jax.models.sampling import Sampling
from gdn_jax.models.structure import split
from gdn_jax.serving.arguments import check_values
from gdn_jax.serving.draws import check_draw
from gdn_jax.shapes import check_array, check_integer, check_whole

MIN_LENGTH = 16
"""Prompts are padded to at least this length: a pass over so few tokens costs little, a compilation seconds."""

MOST_TOKENS = 2**31 - 1
"""New tokens of a call at most: places of tokens are numbers of 32 bits."""

OnToken = Callable[[np.ndarray], Any]
"""Listener to every step: it is called with the new tokens [B], and returns True to stop."""


def generate(
    model: LanguageModel,
    prompt: Int[Array, "B T"],
    num_tokens: int,
    *,
    mask: Bool[Array, "B T"] | None = None,
    rng: PRNGKeyArray | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    on_token: OnToken | None = None,
    drafts: str | None = None,
    num_drafts: int = 3,
    draft_vocab: int | None = None,
) -> Int[Array, "B num_tokens"]:
    """Continues prompts: one pass over the prompt, then single steps through the cache.

    A token costs the same in a GatedDeltaNet however many came before; in an attention layer its cost grows with
    them. JAX compiles once per batch size, num_tokens, sampling limits in use, and prompt length rounded up to a
    power of two (once more for a prompt of exactly that length, which needs no padding). The padding is masked and
    changes logits by rounding only. You may call it under jit, with the model as an argument or closed over. On a GPU
    the loop keeps copies of the projections' weights, in the order in which it reads them.

    Args:
      model: the model.
      prompt: [B, T] tokens, T >= 1, of a dtype that holds every token of the model. Tokens outside of the vocabulary
        are an error where they are known (a NumPy array) or with `gdn_jax.debug_checks`; under padding
        any number may stand.
      num_tokens: number of tokens to append, 1 to MOST_TOKENS.
      mask: True at tokens, False at padding on the left or right of a prompt (each row needs a token).
      rng: key of the sampling; needed with temperature > 0.
      temperature: 0: greedy. Above 0: tokens are sampled from softmax(logits / temperature).
      top_k, top_p, min_p: limits of the sampling, see `Sampling`: the k likeliest tokens; the fewest likeliest tokens
        with total probability top_p, in (0, 1]; tokens at least min_p times as likely as the likeliest, in [0, 1].
      stop_tokens: a row ends with the first of these that it writes, and repeats it to num_tokens. The loop ends when
        all rows have ended.
      on_token: called on the host with the new tokens [B] of every step, before the next step begins; if it returns
        True the loop stops, and every row repeats its last token. Not under jit. With drafts a pass gives several
        tokens; the function is called for each of them, and the batch must be one row.
      drafts: "mtp": the model's multi-token-prediction head drafts tokens, and each pass of the model verifies them.
        Greedy tokens stay the same, except for ties within rounding. Sampled tokens have the same probabilities, but
        are not the same tokens as without drafts. None: no drafts.
      num_drafts: drafts in a pass, 1 or more.
      draft_vocab: drafts are among this number of first tokens of the vocabulary, 1 to vocab_size, whose rows of the
        output projection each draft reads; a tokenizer by merges has the most frequent tokens first. Tokens stay
        as with drafts among all, but fewer drafts are right where the model writes other tokens. None: all.

    Returns:
      The new tokens [B, num_tokens], in the prompt's dtype.

    Raises:
      ValueError: an argument is wrong; names it. What on_token raises comes through.
    """
    check_array("prompt", prompt, (None, None), "B T")
    if mask is not None:
        check_array("mask", mask, prompt.shape, "B T")
    if prompt.shape[1] == 0:
        raise ValueError("prompt: expected at least one token, got T = 0")
    check_whole("num_tokens", num_tokens, 1, MOST_TOKENS)
    vocab_size = model.config.vocab_size
    check_draw(vocab_size, temperature, top_k, top_p, min_p, rng)
    _check_tokens(prompt, mask, vocab_size)
    for token in stop_tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop_tokens: expected tokens below vocab_size = {vocab_size}, got {token}")
    if drafts is not None:
        check_drafts(model, drafts, num_drafts, draft_vocab)
        if on_token is not None and prompt.shape[0] != 1:
            raise ValueError(
                "on_token: expected None with drafts of several rows, of which a pass gives unlike numbers of "
                "tokens, got a function"
            )
    structure, params = split(model)
    traced = any(isinstance(x, jax.core.Tracer) for x in (prompt, *params))
    if on_token is not None and traced:
        raise ValueError("on_token: expected None under jit, got a function")
    if not isinstance(prompt, jax.core.Tracer):  # under jit the caller compiles for the length anyway
        prompt, mask = _round_up(prompt, mask)
    sampling = Sampling(temperature, top_k, top_p, min_p) if temperature > 0 else None
    stops = np.asarray(stop_tokens, prompt.dtype) if len(stop_tokens) else None
    with _heard(on_token) as listener:
        key = None if sampling is None else rng
        guesses = (0, None) if drafts is None else (num_drafts, draft_vocab)
        arguments = params, prompt, mask, key, sampling, stops, listener
        tokens = _generate(structure, *arguments, num_tokens=num_tokens, guesses=guesses)
        return tokens if listener is None else jax.block_until_ready(tokens)


def _check_tokens(prompt, mask, vocab_size: int) -> None:
    """Raises ValueError for a dtype without room for a token, and for known tokens that the model does not have."""
    check_integer("prompt", prompt)
    if np.iinfo(prompt.dtype).max < vocab_size - 1:  # drawn tokens, which have its dtype, would wrap
        raise ValueError(
            f"prompt: expected a dtype for tokens below vocab_size = {vocab_size}, got {prompt.dtype}"
        )

    def check(prompt, mask=True):
        wrong = prompt[((prompt < 0) | (prompt >= vocab_size)) & mask]
        if wrong.size:
            raise ValueError(f"prompt: expected tokens from 0 to {vocab_size - 1}, got {wrong[0]}")

    check_values(check, prompt, *(() if mask is None else (mask,)))


def _round_up(prompt, mask):
    """The prompt with padding on the right up to a power of two, at least MIN_LENGTH, and the mask that says so.

    On the right, because chunks then hold the same tokens as without padding. Where none is needed a mask of None
    stays, with which a pass takes kernels that know no padding.
    """
    B, T = prompt.shape
    padding = max(MIN_LENGTH, 1 << (T - 1).bit_length()) - T
    if not padding:
        return prompt, mask
    if mask is None:
        mask = jnp.asarray(np.ones((B, T), bool))  # not jnp.ones, which is compiled for every T
    return tuple(jnp.pad(x, ((0, 0), (0, padding))) for x in (prompt, mask))


class _Listener:
    """A function that hears of tokens, and the exception that it raised."""

    def __init__(self, on_token: OnToken):
        self.on_token = on_token
        self.error: BaseException | None = None

    def hear(self, tokens: np.ndarray) -> bool:
        try:
            return bool(self.on_token(tokens))
        except BaseException as error:  # raised again where the caller is
            self.error = error
            return True


_LISTENERS: dict[int, _Listener] = {}
"""Listeners of the calls at work, by a number that the compiled program is given: another function is no
compilation."""

_NUMBERS = itertools.count()


@contextlib.contextmanager
def _heard(on_token: OnToken | None) -> Iterator[np.int32 | None]:
    """The number of a listener for the time of a call, which has to be over by then."""
    if on_token is None:
        yield None
        return
    number, listener = next(_NUMBERS) % 2**31, _Listener(on_token)
    _LISTENERS[number] = listener
    try:
        yield np.int32(number)
    finally:
        del _LISTENERS[number]
    if listener.error is not None:
        raise listener.error


def _tell(number, tokens) -> np.ndarray:
    """Tells a listener of new tokens; whether it wants to stop."""
    return np.asarray(_LISTENERS[int(number)].hear(np.asarray(tokens)))


def _tell_each(number, tokens, count) -> tuple[np.ndarray, np.ndarray]:
    """Tells a listener of the first tokens [1, T] of a row; how many it has heard, and whether it wants to stop."""
    tokens, told, stops = np.asarray(tokens), 0, False
    while told < int(count[0]) and not stops:
        stops = bool(_tell(number, tokens[:, told]))
        told += 1
    return np.array([told], np.int32), np.asarray(stops)


@partial(jax.jit, static_argnums=0, static_argnames=("num_tokens", "guesses"))
def _generate(structure, params, prompt, mask, rng, sampling, stops, listener, *, num_tokens, guesses):
    num_drafts, draft_vocab = guesses
    model = for_inference(structure.merge(params))

    def choose(logits, i):
        if sampling is None:
            return likeliest(logits, i).astype(prompt.dtype)
        return sampling.draw(jax.random.fold_in(rng, i), logits).astype(prompt.dtype)

    def tell(token):
        """Whether the listener stops; the answer is waited for, so that steps are told in order."""
        return io_callback(_tell, jax.ShapeDtypeStruct((), jnp.bool_), listener, token)

    def tell_each(tokens, count):
        shapes = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
        return io_callback(_tell_each, shapes, listener, tokens, count)

    x, cache = model.hidden_states(prompt, mask=mask, return_cache=True)
    position = jnp.full(prompt.shape[0], prompt.shape[1] - 1)
    if mask is None:
        last = x[:, -1]
    else:
        position = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
        last = jnp.take_along_axis(x, position[:, None, None], axis=1)[:, 0]
    room = num_tokens + num_drafts if num_drafts else num_tokens - 1
    cache = tuple(reserve(c, room) if isinstance(c, AttentionCache) else c for c in cache or ())
    token = choose(model.logits(last), 0)
    if num_drafts:
        read, each = Prompt(prompt, mask, x, position), partial(_choose_each, sampling, rng, prompt.dtype)
        heard = None if listener is None else tell_each
        return decode_with_drafts(
            model,
            read,
            token,
            cache,
            num_tokens,
            num_drafts,
            draft_vocab,
            choose=each,
            stops=stops,
            tell=heard,
        )[0]
    heard = None if listener is None else tell
    return decode(model, token, cache, num_tokens, choose=choose, stops=stops, tell=heard)[0]


def _choose_each(sampling, rng, dtype, logits, numbers):
    """Tokens [B, T] from the logits [B, T, vocab] of rows that are at unlike numbers of tokens.

    A draft is accepted where the token that is drawn is the same. So tokens have the probabilities of the logits,
    whatever the drafts are.
    """
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(dtype)

    def key(row, number):
        return jax.random.fold_in(jax.random.fold_in(rng, number), row)

    keys = jax.vmap(jax.vmap(key, (None, 0)))(jnp.arange(logits.shape[0]), numbers)
    tokens = sampling.draw_each(keys.reshape(-1, *keys.shape[2:]), logits.reshape(-1, logits.shape[-1]))
    return tokens.reshape(numbers.shape).astype(dtype)


def likeliest(logits: Float[Array, "B vocab"], _: Any) -> Int[Array, " B"]:
    """The likeliest token of each row."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def decode(
    model: LanguageModel,
    token: Int[Array, " B"],
    cache: Cache,
    num_tokens: int,
    *,
    choose: Callable[[Array, Array], Array] = likeliest,
    stops: Int[Array, " n"] | None = None,
    tell: Callable[[Array], Array] | None = None,
) -> tuple[Int[Array, "B num_tokens"], Cache]:
    """The loop of `generate`, for use under jit: a step through the cache for every token but the first.

    Args:
      model: of `for_inference`.
      token: first of the new tokens of each row [B].
      cache: of the tokens before it, with room for num_tokens - 1 more in its `FixedAttentionCache`s.
      num_tokens: new tokens, the first one counted.
      choose: the tokens [B] from the logits [B, vocab] and their number, 1 for those after the first.
      stops: tokens that end a row, which repeats them; None: rows do not end.
      tell: called with every step's tokens [B], the first too; whether to stop there. None: nobody listens.

    Returns:
      The new tokens, and the cache of all but the last one.
    """
    graphdef, params = nnx.split(for_decoding(model, token.shape[0], in_parts=True))

    def ends(token, ended):
        """Which rows have ended with this token."""
        return ended if stops is None else ended | jnp.isin(token, stops)

    def stopped_by(token):
        return jnp.asarray(False) if tell is None else tell(token)

    def goes_on(carry):
        i, _, ended, stopped, _, _ = carry
        return (i < num_tokens) & ~stopped & ~ended.all()

    def step(carry):
        i, token, ended, _, cache, tokens = carry
        logits, cache = nnx.merge(graphdef, params)(token[:, None], cache=cache)
        token = jnp.where(ended, token, choose(logits[:, 0], i))
        return i + 1, token, ends(token, ended), stopped_by(token), cache, tokens.at[i].set(token)

    tokens = jnp.zeros((num_tokens, token.shape[0]), token.dtype).at[0].set(token)
    ended = ends(token, jnp.zeros(token.shape, bool))
    start = (jnp.int32(1), token, ended, stopped_by(token), cache, tokens)
    i, token, _, _, after, tokens = jax.lax.while_loop(goes_on, step, start)
    return jnp.where(jnp.arange(num_tokens) < i, tokens.T, token[:, None]), after or ()
