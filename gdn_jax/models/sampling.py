"""Drawing the next token from logits."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, UInt32

from gdn_jax.serving.draws import Draws


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_p", "min_p"],
    meta_fields=["top_k"],
)
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from softmax(logits / temperature), among those that every limit lets through.

    The limits are taken one after the other: top_k, top_p, min_p, each on what the one before has left. The likeliest
    token always stays. A pytree.

    Fields:
      temperature: above 0.
      top_k: the k likeliest tokens, and others as likely as the last of them; None: all.
      top_p: the fewest of the likeliest tokens whose probabilities sum to top_p or more; None: all.
      min_p: tokens at least min_p times as likely as the likeliest; None: all.
    """

    temperature: float | Float[Array, ""]
    top_k: int | None = None
    top_p: float | Float[Array, ""] | None = None
    min_p: float | Float[Array, ""] | None = None

    def limited(self, logits: Float[Array, "B vocab"]) -> Float[Array, "B vocab"]:
        """logits / temperature, -inf for tokens that a limit leaves out."""
        logits = logits / self.temperature
        if self.top_k is not None:
            logits = jnp.where(logits < self._last_of_top_k(logits, self.top_k), -jnp.inf, logits)
        if self.top_p is not None:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            p = jax.nn.softmax(ordered, axis=-1)
            kept = jnp.cumsum(p, axis=-1) - p < self.top_p  # the likelier ones alone do not reach top_p
            kept = kept.at[:, 0].set(True)
            least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.min_p is not None:
            least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(self.min_p)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return logits

    def draw(self, key: PRNGKeyArray, logits: Float[Array, "B vocab"]) -> Int[Array, " B"]:
        """A token of each row."""
        return jax.random.categorical(key, self.limited(logits))

    def draw_each(
        self, keys: Key[Array, " B"] | UInt32[Array, "B words"], logits: Float[Array, "B vocab"]
    ) -> Int[Array, " B"]:
        """Draws a token for each row by the row's own key [B]: the same token as `draw` for the row alone."""

        def draw(key: PRNGKeyArray, logits: Float[Array, " vocab"]) -> Int[Array, ""]:
            return jax.random.categorical(key, logits[None])[0]

        return jax.vmap(draw)(keys, self.limited(logits))

    def _last_of_top_k(self, logits: Float[Array, "B vocab"], k: Any) -> Float[Array, "B 1"]:
        return jax.lax.top_k(logits, k)[0][:, -1:]


@partial(
    jax.tree_util.register_dataclass, data_fields=["temperature", "top_k", "top_p", "min_p"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class RowSampling(Sampling):
    """A `Sampling` of rows with numbers of their own: its fields are arrays [B, 1], and none is None."""

    temperature: Any
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None

    @classmethod
    def of(cls, draws: Draws) -> "RowSampling":
        """How requests draw that have a temperature above 0; others get some tokens."""
        temperature = jnp.where(draws.temperature > 0, draws.temperature, 1)
        return cls(*(x[:, None] for x in (temperature, draws.top_k, draws.top_p, draws.min_p)))

    def limited(self, logits: Float[Array, "B vocab"]) -> Float[Array, "B vocab"]:
        """See `Sampling.limited`. Nothing is sorted where no row has a limit."""
        limits = (self.top_k < logits.shape[-1]) | (self.top_p < jnp.inf) | (self.min_p > 0)
        return jax.lax.cond(limits.any(), super().limited, lambda x: x / self.temperature, logits)

    def _last_of_top_k(self, logits: Float[Array, "B vocab"], k: Any) -> Float[Array, "B 1"]:
        last = jnp.minimum(k, logits.shape[-1]) - 1
        return jnp.take_along_axis(jnp.sort(logits, axis=-1, descending=True), last, axis=-1)


def next_tokens(logits: Float[Array, "N T vocab"], draws: Draws | None = None) -> Int[Array, "N T"]:
    """The tokens after each of T tokens of every request, by how it draws; -1 where logits are NaN.

    Args:
      logits: after each token.
      draws: of the requests, which have been given `number` tokens before the T new ones; None: the likeliest tokens.
    """
    tokens = jnp.argmax(logits, -1).astype(jnp.int32)  # of NaN, where there is one
    if draws is not None:
        tokens = jax.lax.cond(
            (draws.temperature > 0).any(), partial(_drawn, draws), lambda *x: x[1], logits, tokens
        )
    is_number = ~jnp.isnan(jnp.max(logits, -1))
    return jnp.where(is_number, tokens, -1)


def _drawn(
    draws: Draws, logits: Float[Array, "N T vocab"], likeliest: Int[Array, "N T"]
) -> Int[Array, "N T"]:
    """Drawn tokens, and the likeliest ones of requests that draw none."""
    N, T, vocab = logits.shape
    numbers = draws.number[:, None] + jnp.arange(T)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(jax.random.wrap_key_data(draws.key), numbers)
    each = RowSampling.of(jax.tree.map(lambda x: jnp.repeat(x, T, axis=0), draws))
    drawn = each.draw_each(keys.reshape(-1), logits.reshape(-1, vocab)).reshape(N, T)
    return jnp.where(draws.temperature[:, None] > 0, drawn, likeliest).astype(jnp.int32)
