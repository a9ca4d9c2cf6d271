"""Drafts of a model's head for multi-token prediction, and what the head remembers next to the layers.

The head's attention has an entry for each pair of a hidden state and the token after it, see `models.mtp`. `generate`
and a `Server` go through the same round, `run_round`: the head guesses, the model reads the guesses with the newest
token of each request, and the head makes the pairs of the tokens that are new. The pair of the newest token is there
when a round begins, but its entry is not counted yet: a prompt that goes on has another pair in its place.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.models.attention import FixedAttentionCache
from gdn_jax.models.decoder import LanguageModel
from gdn_jax.models.served_layers import Attending, passed
from gdn_jax.serving.pools import Accept
from gdn_jax.serving.programs import Chain
from gdn_jax.serving.slots import Address, Indices, put, take
from gdn_jax.shapes import check_choice, check_whole


def check_drafts(model: LanguageModel, drafts: str, num_drafts: int, draft_vocab: int | None) -> None:
    """Raises ValueError where a model cannot have such drafts."""
    check_choice("drafts", drafts, ("mtp",))
    check_whole("num_drafts", num_drafts, 1)
    if draft_vocab is not None:
        check_whole("draft_vocab", draft_vocab, 1, model.config.vocab_size)
    if model.mtp is None:
        raise ValueError(
            "drafts: expected None for a model without a head for multi-token prediction, got 'mtp'"
        )


class Pieces(NamedTuple):
    """Pieces of prompts, with the arguments of `ServedModel.prefill`, their hidden states and the next tokens."""

    tokens: Int[Array, "1 T"]
    hidden: Float[Array, "1 T D"]
    cu_seqlens: Indices
    slots: Indices
    has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"]
    new: Int[Array, " N"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "pairs", "hidden", "newest"],
    meta_fields=["num_drafts"],
)
@dataclasses.dataclass(frozen=True)
class DraftPools:
    """Pools of a model that drafts by its head. A pytree.

    Fields:
      layers: of the model's layers.
      pairs: keys and values of the head's attention.
      hidden: the model's hidden state of the last token of a prompt, which makes a pair with the first token of the
        next piece; None: prompts are whole.
      newest: what the head makes of the newest pair.
      num_drafts: drafts of a step.
    """

    layers: tuple
    pairs: FixedAttentionCache
    hidden: Float[Array, "slots D"] | Float[np.ndarray, "slots D"] | None
    newest: Float[Array, "slots D"] | Float[np.ndarray, "slots D"]
    num_drafts: int

    @property
    def capacity(self) -> int:
        """Tokens of a request. A `Server` starts a step before it reads how many tokens the one before has given: the
        drafts of two steps may come after the last token."""
        return self.pairs.capacity - 2 * self.num_drafts


class NoDrafts:
    """One token a step."""

    def make_pools(self, layers: tuple, slots: int, capacity: int | None) -> Any:
        """Empty pools of a model, from its layers' pools."""
        return layers

    def layers(self, pools: Any) -> tuple:
        """Pools of the layers."""
        return pools

    def after_prompts(self, model: LanguageModel, pieces: Pieces, layers: tuple, pools: Any) -> Any:
        """The pools after pieces of prompts, from new ones of the layers."""
        return layers

    def guess(
        self, model: LanguageModel, tokens: Int[Array, " B"], slots: Indices, pools: Any
    ) -> tuple[Int[Array, "B k"], Any]:
        """Drafts after the newest token of each request, and the pools."""
        return jnp.zeros((tokens.shape[0], 0), tokens.dtype), pools

    def after_round(
        self,
        model: LanguageModel,
        new: Chain,
        hidden: Float[Array, "B T D"],
        slots: Indices,
        layers: tuple,
        pools: Any,
    ) -> Any:
        """The pools after a round, from its new tokens, the hidden states before them and the layers' pools."""
        return layers


class HeadDrafts:
    """The likeliest tokens by a model's head for multi-token prediction. Its methods are some of `NoDrafts`.

    Args:
      number: drafts of a round.
      words: drafts are among this number of first tokens of the vocabulary; None: among all.
    """

    def __init__(self, number: int, words: int | None):
        self._number, self._words = number, words

    def layers(self, pools: DraftPools) -> tuple:
        return pools.layers

    def guess(
        self, model: LanguageModel, tokens: Int[Array, " B"], slots: Indices, pools: DraftPools
    ) -> tuple[Int[Array, "B k"], DraftPools]:
        """Pairs of drafts are not counted: they will be made again from the model's hidden states."""
        hidden, pairs = take(pools.newest, Address.of(slots, pools.newest))[:, None], counting(pools.pairs, 1)
        drafts: list[Array] = []
        for i in range(self._number):
            drafts.append(jnp.argmax(model.logits(hidden, self._words), axis=-1).astype(tokens.dtype))
            if i < self._number - 1:
                hidden, pairs = self._one(model.mtp, model.embedded(drafts[-1]), hidden, pairs, slots)
        pairs = pairs._replace(length=pools.pairs.length)
        return jnp.concatenate(drafts, axis=1), dataclasses.replace(pools, pairs=pairs)

    def after_round(
        self,
        model: LanguageModel,
        new: Chain,
        hidden: Float[Array, "B T D"],
        slots: Indices,
        layers: tuple,
        pools: DraftPools,
    ) -> DraftPools:
        arrays = model.embedded(new.tokens), hidden, counting(pools.pairs, 1), slots
        found, accept = self._some(model.mtp, *arrays)
        last = jnp.maximum(new.count - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(found, last, axis=1)[:, 0]
        newest = put(pools.newest, Address.of(slots, pools.newest), newest)
        pairs = counting(accept(new.count), -1)
        return dataclasses.replace(pools, layers=layers, pairs=pairs, newest=newest)

    def _one(self, head: Any, x: Array, hidden: Array, pairs: Any, slots: Indices) -> tuple[Array, Any]:
        """The head's outputs for a pair of each request, and the pairs with these."""
        raise NotImplementedError

    def _some(self, head: Any, x: Array, hidden: Array, pairs: Any, slots: Indices) -> tuple[Array, Accept]:
        """The head's outputs for some pairs of each request, and the pairs by how many of them stay."""
        raise NotImplementedError


class SlotDrafts(HeadDrafts):
    """`HeadDrafts` whose pairs lie in the slots of a server, with the methods of `NoDrafts`.

    Args:
      number, words: as for `HeadDrafts`.
      model: the model, with the head.
      kind: of the head's attention.
    """

    def __init__(self, number: int, words: int | None, model: LanguageModel, kind: Attending):
        super().__init__(number, words)
        self._config, self._mixer, self._kind = model.config, model.mtp.block.mixer, kind

    def make_pools(self, layers: tuple, slots: int, capacity: int | None) -> DraftPools:
        pairs = self._kind.make_pool(self._mixer, slots, jnp.float32, None, capacity)
        hidden, newest = (jnp.zeros((slots, self._config.hidden_size), self._config.dtype) for _ in range(2))
        return DraftPools(layers, pairs, hidden, newest, self._number)

    def after_prompts(
        self, model: LanguageModel, pieces: Pieces, layers: tuple, pools: DraftPools
    ) -> DraftPools:
        """Each token makes a pair with the hidden state before it; where a piece goes on, its slot has that state."""
        tokens, hidden, slots, T = pieces.tokens[0], pieces.hidden[0], pieces.slots, pieces.tokens.shape[1]
        at, goes_on = Address.of(slots, pools.hidden), jnp.asarray(pieces.has_initial_state)
        begins = jnp.asarray(pieces.cu_seqlens, jnp.int32)
        skipped, lengths = jnp.where(goes_on, 0, 1), jnp.diff(begins)
        count = jnp.maximum(lengths - skipped, 0)
        ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count)])  # pairs are packed too
        place = jnp.arange(T)
        piece = jnp.clip(passed(ends, place) - 1, 0, len(count) - 1)
        token = jnp.clip(begins[piece] + skipped[piece] + place - ends[piece], 0, T - 1)
        is_first = (token == begins[piece])[:, None]
        before = jnp.where(is_first, take(pools.hidden, at)[piece], hidden[token - 1])

        def mix(x: Array, **_: Any) -> tuple[Array, Any]:
            where = ends, slots, pieces.has_initial_state
            return self._kind.prefill(model.mtp.block.mixer, x, pools.pairs, *where)

        _, pairs = model.mtp(model.embedded(tokens[token][None]), before[None], mix=mix)
        last = hidden[jnp.maximum(begins[1:] - 1, 0)]
        newest, after = self._one(model.mtp, model.embedded(pieces.new[:, None]), last[:, None], pairs, slots)
        to, pairs = at.only(lengths > 0), after._replace(length=pairs.length)
        kept = put(pools.hidden, to, last), put(pools.newest, to, newest[:, 0])
        return DraftPools(layers, pairs, *kept, self._number)

    def _one(self, head, x, hidden, pairs, slots):
        return head(x, hidden, mix=lambda y, **_: self._kind.decode(head.block.mixer, y, pairs, slots))

    def _some(self, head, x, hidden, pairs, slots):
        return head(x, hidden, mix=lambda y, **_: self._kind.drafts(head.block.mixer, y, pairs, slots))


def counting(pairs: FixedAttentionCache, more: int) -> FixedAttentionCache:
    """Pairs of which more entries count, or fewer."""
    return pairs._replace(length=pairs.length + more)


class Round(NamedTuple):
    """The results of a round of drafts."""

    drafts: Int[Array, "B k"]
    new: Int[Array, "B k1"]
    """The model's own tokens after the newest one and after each draft."""
    right: Int[Array, " B"]
    """Drafts that are the model's own, up to the first that is not: one token more is new."""
    after: Accept
    """The pools after the first tokens of each request."""


def run_round(
    model: LanguageModel,
    drafts: Any,
    tokens: Int[Array, " B"],
    slots: Indices,
    pools: Any,
    *,
    read: Callable[[Int[Array, "B T"], tuple], tuple[Float[Array, "B T D"], Accept]],
    choose: Callable[[Float[Array, "B T vocab"]], Int[Array, "B T"]],
) -> Round:
    """The drafts after the newest token of each request, and what the model makes of them.

    Args:
      model: the model.
      drafts: `NoDrafts` or `HeadDrafts`.
      tokens: the newest ones, which the model has not read.
      slots: of the requests.
      pools: of the drafts.
      read: the model's hidden states of tokens, and the pools of its layers by how many of them stay.
      choose: the tokens from logits.
    """
    guesses, pools = drafts.guess(model, tokens, slots, pools)
    hidden, accept = read(jnp.concatenate([tokens[:, None], guesses], axis=1), drafts.layers(pools))
    new = choose(model.logits(hidden))
    right = jnp.cumprod(new[:, :-1] == guesses, axis=1).sum(axis=1)

    def after(count: Array) -> Any:
        return drafts.after_round(model, Chain(new, count), hidden, slots, accept(count), pools)

    return Round(guesses, new, right, after)
