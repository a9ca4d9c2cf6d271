"""Generation with drafts: a head guesses some tokens ahead, and one pass of the model says which are its own.

A pass over a few tokens of a row reads the weights once, as a pass over one does. What the model writes stays what it
would write without drafts, but for the rounding of passes of other lengths.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.layers import RecurrentMixer
from gdn_jax.models.attention import FixedAttentionCache, reserve
from gdn_jax.models.decoder import Cache, LanguageModel
from gdn_jax.models.draft_head import DraftPools, HeadDrafts, counting, run_round
from gdn_jax.models.inference.program import for_decoding
from gdn_jax.models.inference.recurrent import RecurrentRows
from gdn_jax.models.served_layers import LayerPools, kind_of

Choose = Callable[[Float[Array, "B T vocab"], Int[Array, "B T"]], Int[Array, "B T"]]
"""The tokens from the logits and their numbers in the new tokens of their rows."""
Tell = Callable[[Int[Array, "B T"], Int[Array, " B"]], tuple[Int[Array, " B"], Bool[Array, ""]]]
"""Called with new tokens and how many of each row are new: how many of them stay, and whether to stop there."""


class Prompt(NamedTuple):
    """A prompt that a model has read."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"] | None
    """True at tokens; None: everywhere."""
    hidden: Float[Array, "B T D"]
    """Hidden states of `LanguageModel.hidden_states`."""
    last: Int[Array, " B"]
    """Place of the last token of each row."""


class Rounds(NamedTuple):
    """The drafts of each round, and how many of them were right; -1 where a row had ended."""

    drafts: Int[Array, "B rounds k"]
    accepted: Int[Array, "B rounds"]


class _Carry(NamedTuple):
    """A round leaves it to the next one."""

    round: Int[Array, ""]
    made: Int[Array, " B"]
    """New tokens of each row."""
    token: Int[Array, " B"]
    """The newest one, which the model has not read."""
    ended: Bool[Array, " B"]
    pools: DraftPools
    """Caches of the model and of its head, whose rows are slots."""
    tokens: Int[Array, "B n"]
    rounds: Rounds


def decode_with_drafts(
    model: LanguageModel,
    prompt: Prompt,
    token: Int[Array, " B"],
    cache: Cache,
    num_tokens: int,
    num_drafts: int,
    draft_vocab: int | None = None,
    *,
    choose: Choose,
    stops: Int[Array, " n"] | None = None,
    tell: Tell | None = None,
) -> tuple[Int[Array, "B num_tokens"], Rounds]:
    """The loop of `generate` with drafts of the model's head for multi-token prediction, for use under jit.

    Args:
      model: of `for_inference`, with the head.
      prompt: the tokens before the first new one.
      token: first of the new tokens of each row [B].
      cache: after the prompt, with room for num_tokens + num_drafts more tokens in its `FixedAttentionCache`s.
      num_tokens: new tokens, the first one counted.
      num_drafts: tokens that are guessed in a round.
      draft_vocab: guesses are among this number of first tokens of the vocabulary; None: among all.
      choose: the tokens from logits.
      stops: tokens that end a row, which repeats them; None: rows do not end.
      tell: is called with the first token, then with the tokens of each round; None: no calls.
    """
    assert model.mtp is not None
    B, k = token.shape[0], num_drafts
    rows, ahead = jnp.arange(B), jnp.arange(k + 1)
    steps, drafts = for_decoding(model, B * (k + 1), head_rows=B), RowDrafts(k, draft_vocab)
    after = jnp.roll(prompt.tokens, -1, axis=1).at[rows, prompt.last].set(token)
    found, head = model.mtp(model.embedded(after), prompt.hidden, mask=prompt.mask, return_cache=True)
    empty = partial(jnp.full, fill_value=-1, dtype=token.dtype)

    def is_stop(tokens: Array) -> Array:
        return jnp.zeros(tokens.shape, bool) if stops is None else jnp.isin(tokens, stops)

    def heard(new: Array, count: Array) -> tuple[Array, Array]:
        return (count, jnp.asarray(False)) if tell is None else tell(new, count)

    count, stopped = heard(token[:, None], jnp.ones(B, jnp.int32))
    start = _Carry(
        round=jnp.int32(0),
        made=count,
        token=token,
        ended=stopped | is_stop(token),
        pools=DraftPools(
            cache, counting(reserve(head, num_tokens + k), -1), None, found[rows, prompt.last], k
        ),
        tokens=jnp.zeros((B, num_tokens), token.dtype).at[:, 0].set(token),
        rounds=Rounds(empty((B, num_tokens, k)), empty((B, num_tokens))),
    )

    def goes_on(carry: _Carry) -> Array:
        return jnp.any(~carry.ended & (carry.made < num_tokens))

    def a_round(carry: _Carry) -> _Carry:
        numbers = carry.made[:, None] + ahead
        this = run_round(
            *(steps, drafts, carry.token, rows, carry.pools),
            read=partial(read_drafts, steps),
            choose=lambda logits: choose(logits, numbers),
        )
        new, right = this.new, this.right
        is_over = carry.ended | (carry.made >= num_tokens)
        stop = is_stop(new)
        until = jnp.where(stop.any(axis=1), 1 + jnp.argmax(stop, axis=1), k + 1)
        count = jnp.where(is_over, 0, jnp.minimum(jnp.minimum(right + 1, until), num_tokens - carry.made))
        count, stopped = heard(new, count)
        is_new = ahead < count[:, None]
        places = jnp.where(is_new, numbers, num_tokens)  # what is there is dropped
        last = jnp.maximum(count - 1, 0)
        told = Rounds(
            jnp.where(is_over[:, None], -1, this.drafts), jnp.where(is_over, -1, right).astype(token.dtype)
        )
        return _Carry(
            carry.round + 1,
            carry.made + count,
            jnp.where(is_over, carry.token, new[rows, last]),
            carry.ended | stopped | jnp.any(is_new & stop, axis=1),
            this.after(count),
            carry.tokens.at[rows[:, None], places].set(new, mode="drop"),
            Rounds(*(x.at[:, carry.round].set(y) for x, y in zip(carry.rounds, told, strict=True))),
        )

    end = jax.lax.while_loop(goes_on, a_round, start)
    last = end.tokens[rows, end.made - 1][:, None]
    return jnp.where(jnp.arange(num_tokens) < end.made[:, None], end.tokens, last), end.rounds


class RowDrafts(HeadDrafts):
    """`HeadDrafts` whose pairs are the head's cache, with the rows as slots.

    Args: as for `HeadDrafts`.
    """

    def _one(self, head, x, hidden, pairs, slots):
        return head(x, hidden, cache=pairs)

    def _some(self, head, x, hidden, pairs, slots):
        y, after = head(x, hidden, cache=pairs)
        return y, lambda count: after._replace(length=pairs.length + count)


def read_drafts(
    model: LanguageModel, tokens: Int[Array, "B T"], cache: Cache
) -> tuple[Float[Array, "B T D"], Callable[[Int[Array, " B"]], Cache]]:
    """Hidden states of tokens of which some may be wrong, and accept(count): the cache after the first `count` [B].

    Attention forgets the others by its length. A recurrent layer reads those that are right once more, from the state
    before: as a server's does, from a pool whose slots are the rows, or one that cannot be served as a call in which
    the others are padding. It needs its projections for that, and nothing else of the block.

    Args:
      model: the model.
      tokens: the tokens.
      cache: of the tokens before, whose attention is a `FixedAttentionCache` with room for all.
    """
    B, T = tokens.shape

    def mix(i: int, mixer: Any, x: Array, **options: Any) -> tuple[Array, Any]:
        before = cache[i]
        if isinstance(before, FixedAttentionCache):
            y, after = mixer(x, **options)
            return y, lambda count: after._replace(length=before.length + count)
        layer = mixer.mixer if isinstance(mixer, RecurrentRows) else mixer
        if isinstance(layer, RecurrentMixer) and layer.can_be_served:
            kind: Any = kind_of(layer, i, batch_invariant=False)
            y, keep = kind.drafts(layer, x, LayerPools(*before), jnp.arange(B))
            return y, lambda count: keep(jnp.maximum(count, 1))  # a row with 0 has ended
        y, _ = mixer(x, **options)
        return y, lambda count: mixer(x, cache=before, mask=jnp.arange(T) < count[:, None])[1]

    hidden, accepts = model.hidden_states(tokens, cache=cache, around=mix)
    return hidden, lambda count: tuple(accept(count) for accept in accepts or ())
