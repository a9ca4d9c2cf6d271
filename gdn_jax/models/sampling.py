"""Drawing the next token from logits."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


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
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
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
