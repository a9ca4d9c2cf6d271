"""Evictions: a token gives one name a value and takes another name's value away, which is not named again for it.

    x=a/y   ask x -> a   y=b/z   ask y -> b   x=c/y   ask y -> none   ask x -> c      x=a/y: x has a, y has no value

Every operation is one token. What it writes at one key and what it erases at another happen together, where a delta
rule with one key for both has to find the second one in another head, layer or channel.

Source: a choice of this project, for claims that content is erased without a new write at its key (Qwen Team,
"Erase-then-Delta Attention", arXiv 2606.26560). Half of the tokens give a value, half ask. A question is for a name
that has a value, or with even chances for one that was evicted, if there are any. The evicted name is one of the next
names on a ring.
"""

import dataclasses
from functools import partial
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.generated import GeneratedOptions, GeneratedTask, past


@dataclasses.dataclass(frozen=True)
class EvictionOptions(GeneratedOptions):
    """Names that get values, each of which takes another name's away; accuracy on fresh sequences."""

    task: ClassVar[str] = "eviction"

    num_names: Annotated[int, Positive] = 8
    """Names, drawn evenly, on a ring."""
    num_tokens: Annotated[int, Positive] = 4
    """Different values."""
    reach: Annotated[int, Positive] = 2
    """A name evicts one of this many names that follow it, drawn evenly."""
    length: Annotated[int, Positive] = 48
    """Tokens of a training sequence, one for an operation."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (48, 96)
    """Lengths that the trained model is tested at; beyond the training length only questions past it count."""

    def check(self) -> None:
        if self.reach >= self.num_names:
            fail("reach", f"less than --num-names = {self.num_names}", self.reach)


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def sequences(
    key: Key[Array, ""], batch: int, length: int, num_names: int, num_tokens: int, reach: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """Draws operations on names that have no value at first.

    Args:
      key: source of the randomness.
      batch: B.
      length: T.
      num_names: how many names there are.
      num_tokens: different values.
      reach: names after a name that it may evict.

    Returns:
      tokens: num_tokens + 1 of them are values and "none", which no sequence holds, then come (name, place of the
      evicted name after it, value), then questions by name; targets, the value of a question's name or "none" (0
      elsewhere); and where the questions are.
    """
    none = num_tokens
    gives, asks_for = none + 1, none + 1 + num_names * reach * num_tokens

    def operation(values, drawn):  # [names]; -1 before a name has its first value
        noise, value, place, wants_ask, wants_evicted = drawn
        evicted, has = values == none, (values >= 0) & (values != none)
        asks = wants_ask & (values >= 0).any()
        among = jnp.where((wants_evicted | ~has.any()) & evicted.any(), evicted, has) | ~asks
        name = jnp.argmax(jnp.where(among, noise, -1))
        other = (name + 1 + place) % num_names
        after = values.at[other].set(jnp.where(values[other] < 0, -1, none)).at[name].set(value)
        token = jnp.where(asks, asks_for + name, gives + (name * reach + place) * num_tokens + value)
        return jnp.where(asks, values, after), (token, jnp.where(asks, values[name], 0), asks)

    def one(key):
        key_names, key_values, key_places, key_asks, key_evicted = jax.random.split(key, 5)
        drawn = (
            jax.random.uniform(key_names, (length, num_names)),
            jax.random.randint(key_values, (length,), 0, num_tokens),
            jax.random.randint(key_places, (length,), 0, reach),
            jax.random.bernoulli(key_asks, shape=(length,)),
            jax.random.bernoulli(key_evicted, shape=(length,)),
        )
        return jax.lax.scan(operation, jnp.full(num_names, -1), drawn)[1]

    return jax.vmap(one)(jax.random.split(key, batch))


class EvictionTask(GeneratedTask[EvictionOptions]):
    """Names that evict others; see `sequences`."""

    Options = EvictionOptions
    label = "accuracy of the names' values"

    def __init__(self, options: EvictionOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        o = self.o
        self.vocab_size = o.num_tokens + 1 + o.num_names * (o.reach * o.num_tokens + 1)

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        o = self.o
        tokens, targets, asked = sequences(key, batch, size, o.num_names, o.num_tokens, o.reach)
        counts = past(tokens, targets, self.size)
        return counts._replace(weights=counts.weights * asked)

    def slices(self, batch: Batch, size: int) -> dict[str, Bool[np.ndarray, "S B T"]]:
        """Splits questions: first those for a name that was evicted, then the others."""
        asked, evicted = np.asarray(batch.weights) != 0, np.asarray(batch.targets) == self.o.num_tokens
        return {"evicted": np.stack([asked & evicted, asked & ~evicted])}

    def baselines(self) -> dict[str, float]:
        batches = self.val_batches(self.batch_size)
        asked, evicted = (sum(float(part.sum()) for part in parts) for parts in self._counts(batches))
        return {
            f"one of {self.o.num_tokens + 1} answers at random": 1 / (self.o.num_tokens + 1),
            "every name was evicted": evicted / asked,
        }

    def _counts(self, batches: list[Batch]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Where questions count, and of these where the name was evicted."""
        weights = [np.asarray(batch.weights) for batch in batches]
        targets = [np.asarray(batch.targets) for batch in batches]
        return weights, [w * (t == self.o.num_tokens) for w, t in zip(weights, targets, strict=True)]

    def answers(self) -> float:
        return float(self.o.num_tokens + 1)

    def summary(self) -> str:
        o = self.o
        names = f"{o.num_names} names of {o.num_tokens} values that evict one of the next {o.reach}"
        return f"{names}, {self.size} operations, {o.freshness()}"
