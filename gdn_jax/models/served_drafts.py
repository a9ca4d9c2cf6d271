"""Drafts of a served model, and the pools that their writer has next to those of the layers.

A kind of drafts is an object with the same five methods. The drafts of `HeadDrafts` are those of the model's head for
multi-token prediction, see `models.mtp`. Its attention has a pool of its own, with an entry for each pair of a hidden
state and the token after it. The last pair of a request is known once its next token is chosen; until then a slot
holds the hidden state.
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
from gdn_jax.serving.programs import Chain
from gdn_jax.serving.slots import Address, Indices, put, take


class Pieces(NamedTuple):
    """Pieces of prompts, with the arguments of `ServedModel.prefill`, and their hidden states."""

    tokens: Int[Array, "1 T"]
    hidden: Float[Array, "1 T D"]
    cu_seqlens: Indices
    slots: Indices
    has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"]


@partial(
    jax.tree_util.register_dataclass, data_fields=["layers", "pairs", "hidden"], meta_fields=["num_drafts"]
)
@dataclasses.dataclass(frozen=True)
class DraftPools:
    """Pools of a model that drafts by its head. A pytree.

    Fields:
      layers: of the model's layers.
      pairs: keys and values of the head's attention.
      hidden: the model's hidden state of the newest token that it has read.
      num_drafts: drafts of a step.
    """

    layers: tuple
    pairs: FixedAttentionCache
    hidden: Float[Array, "slots D"] | Float[np.ndarray, "slots D"]
    num_drafts: int

    @property
    def capacity(self) -> int:
        """Tokens of a request. A `Server` starts a step before it reads how many tokens the one before has given: the
        drafts of two steps may come after the last token."""
        return self.pairs.capacity - 2 * self.num_drafts


class NoDrafts:
    """One token a step."""

    def make_pools(self, layers: tuple, slots: int, capacity: int | None) -> Any:
        """Empty pools of a model, from those of its layers."""
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

    def after_step(
        self, model: LanguageModel, new: Chain, hidden: Array, slots: Indices, layers: tuple, pools: Any
    ) -> tuple[Any, Any]:
        """The tokens of a step as `ServedModel.decode` returns them, and the pools, from new ones of the layers.

        Args:
          model: the model.
          new: the tokens after the newest one and each draft, and how many of them are right.
          hidden: hidden states [B, 1 + k, D] of the newest token and the drafts.
          slots: of the requests.
          layers: pools after the new tokens.
          pools: of `guess`.
        """
        return new.tokens[:, 0], layers


class HeadDrafts:
    """The likeliest tokens by a model's head for multi-token prediction. The methods are those of `NoDrafts`.

    Args:
      model: the model, with the head.
      number: drafts of a step.
      words: drafts are among this number of first tokens of the vocabulary; None: among all.
      kind: of the head's attention.
    """

    def __init__(self, model: LanguageModel, number: int, words: int | None, kind: Attending):
        self._config, self._mixer = model.config, model.mtp.block.mixer
        self._number, self._words, self._kind = number, words, kind

    def make_pools(self, layers: tuple, slots: int, capacity: int | None) -> DraftPools:
        pairs = self._kind.make_pool(self._mixer, slots, jnp.float32, None, capacity)
        hidden = jnp.zeros((slots, self._config.hidden_size), self._config.dtype)
        return DraftPools(layers, pairs, hidden, self._number)

    def layers(self, pools: DraftPools) -> tuple:
        return pools.layers

    def after_prompts(
        self, model: LanguageModel, pieces: Pieces, layers: tuple, pools: DraftPools
    ) -> DraftPools:
        """Each token makes a pair with the hidden state before it, that of a slot where a piece goes on."""
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

        def mix(x: Array) -> tuple[Array, Any]:
            where = ends, slots, pieces.has_initial_state
            return self._kind.prefill(model.mtp.block.mixer, x, pools.pairs, *where)

        _, pairs = self._head(model, tokens[token][None], before[None], mix)
        last = hidden[jnp.maximum(begins[1:] - 1, 0)]
        return DraftPools(layers, pairs, put(pools.hidden, at.only(lengths > 0), last), self._number)

    def guess(
        self, model: LanguageModel, tokens: Int[Array, " B"], slots: Indices, pools: DraftPools
    ) -> tuple[Int[Array, "B k"], DraftPools]:
        """The pair of the newest token stays; those of drafts will be made again from the model's hidden states."""
        pairs, drafts, lengths = pools.pairs, [tokens], []
        hidden = take(pools.hidden, Address.of(slots, pools.hidden))[:, None]
        for _ in range(self._number):
            mix = partial(self._kind.decode, model.mtp.block.mixer, pool=pairs, slots=slots)
            hidden, pairs = self._head(model, drafts[-1][:, None], hidden, mix)
            drafts.append(jnp.argmax(model.logits(hidden[:, 0], self._words), -1).astype(tokens.dtype))
            lengths.append(pairs.length)
        pairs = pairs._replace(length=lengths[0])
        return jnp.stack(drafts[1:], 1), dataclasses.replace(pools, pairs=pairs)

    def after_step(
        self,
        model: LanguageModel,
        new: Chain,
        hidden: Array,
        slots: Indices,
        layers: tuple,
        pools: DraftPools,
    ) -> tuple[Chain, DraftPools]:
        mix = partial(self._kind.drafts, model.mtp.block.mixer, pool=pools.pairs, slots=slots)
        _, accept = self._head(model, new.tokens[:, :-1], hidden[:, :-1], mix)
        newest = jnp.take_along_axis(hidden, (new.count - 1)[:, None, None], axis=1)[:, 0]
        kept = put(pools.hidden, Address.of(slots, pools.hidden), newest)
        return new, DraftPools(layers, accept(new.count - 1), kept, self._number)

    def _head(
        self, model: LanguageModel, tokens: Array, hidden: Array, mix: Callable[[Array], tuple[Array, Any]]
    ) -> tuple[Array, Any]:
        """The head on tokens and the hidden states before them; `mix` is called for its attention."""
        return model.mtp(model.embedded(tokens), hidden, mix=lambda x, **_: mix(x))
