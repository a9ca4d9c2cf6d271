"""Scopes: names get values, and where a scope closes what was said in it is no longer valid.

    x a   y b   open   x c   ask x -> c   close   ask x -> a      `open` and `close` are two tokens, as all operations

A name has the value that it got in the innermost open scope that gave it one. When a scope closes, its values have to
be forgotten though none of its names comes again, and those that they hid count again.

Source: a choice of this project, for claims that content is erased without a new write at its key (Qwen Team,
"Erase-then-Delta Attention", arXiv 2606.26560). Half of the operations give a value, a quarter asks, the rest opens
and closes. A question is for a name that has a value; with even chances it is for one whose last value has gone with
its scope, if there is any. Where there is nothing to ask a name gets a value, and where no scope can be opened or
closed the other happens.
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
class ScopeOptions(GeneratedOptions):
    """Names that get values in scopes; a scope that closes takes its values along; accuracy on fresh sequences."""

    task: ClassVar[str] = "scope"

    num_names: Annotated[int, Positive] = 4
    """Number of names, drawn uniformly."""
    num_tokens: Annotated[int, Positive] = 16
    """Different values."""
    num_scopes: Annotated[int, Positive] = 2
    """Most scopes that are open at once inside the outermost one, which never closes."""
    length: Annotated[int, Positive] = 64
    """Tokens of a training sequence, two for an operation."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (64, 128)
    """Lengths that the trained model is tested at; beyond the training length only questions past it count."""

    def check(self) -> None:
        for name, given in (("length", (self.length,)), ("test_lengths", self.test_lengths)):
            if wrong := [length for length in given if length % 2 or length < 4]:
                fail(name, "an even number, at least 4: two tokens for an operation", wrong[0])


SET, ASK, OPEN, CLOSE = range(4)
KINDS = np.array([SET, SET, SET, SET, ASK, ASK, OPEN, CLOSE])
"""An operation wants to be one of these, with even chances."""


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def sequences(
    key: Key[Array, ""], batch: int, length: int, num_names: int, num_tokens: int, num_scopes: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """Draws operations on names that have no value at first.

    Args:
      key: source of the randomness.
      batch: B.
      length: T, even.
      num_names: how many names there are.
      num_tokens: different values.
      num_scopes: scopes that are open at once, at most, inside the outermost one.

    Returns:
      tokens, values below num_tokens, then the names, then ask, open and close; targets, the name's value at the name
      of a question (0 elsewhere); and where the questions' names are.
    """
    number = length // 2
    ask = num_tokens + num_names
    scopes = jnp.arange(num_scopes + 1)

    def operation(memory, drawn):
        values, last, depth = memory  # [names, scopes], -1 for none; [names]; the innermost open scope
        noise, value, kind, wants_gone = drawn
        inner = jnp.max(jnp.where(values >= 0, scopes, -1), axis=1)
        valid = values[jnp.arange(num_names), inner]
        has, gone = inner >= 0, (inner >= 0) & (valid != last)
        asks = (kind == ASK) & has.any()
        opens = (kind == OPEN) & (depth < num_scopes) | (kind == CLOSE) & (depth == 0)
        closes = (kind >= OPEN) & ~opens
        sets = (kind <= ASK) & ~asks
        among = jnp.where(wants_gone & gone.any(), gone, has) | ~asks
        name = jnp.argmax(jnp.where(among, noise, -1))
        values = values.at[name, depth].set(jnp.where(sets, value, values[name, depth]))
        values = jnp.where(closes & (scopes == depth), -1, values)
        last = last.at[name].set(jnp.where(sets, value, last[name]))
        first = jnp.where(sets, num_tokens + name, ask + jnp.where(asks, 0, 1 + closes))
        second = jnp.where(sets, value, jnp.where(asks, num_tokens + name, first))
        memory = values, last, depth + opens - closes
        return memory, (jnp.stack([first, second]), jnp.where(asks, valid[name], 0), asks)

    def one(key):
        key_names, key_values, key_kinds, key_gone = jax.random.split(key, 4)
        drawn = (
            jax.random.uniform(key_names, (number, num_names)),
            jax.random.randint(key_values, (number,), 0, num_tokens),
            jax.random.choice(key_kinds, KINDS, (number,)),
            jax.random.bernoulli(key_gone, shape=(number,)),
        )
        empty = jnp.full((num_names, num_scopes + 1), -1), jnp.full(num_names, -1), jnp.int32(0)
        _, (rows, answers, asks) = jax.lax.scan(operation, empty, drawn)
        places = 1 + 2 * jnp.arange(number)
        targets = jnp.zeros((length,), answers.dtype).at[places].set(answers)
        return rows.reshape(-1), targets, jnp.zeros((length,), bool).at[places].set(asks)

    return jax.vmap(one)(jax.random.split(key, batch))


def latest(tokens: Int[np.ndarray, "B T"], num_names: int, num_tokens: int) -> Int[np.ndarray, "B T"]:
    """Returns the value that a name got last, at the place of the name in a question; elsewhere it says nothing."""
    rows, found = np.arange(len(tokens)), np.zeros(tokens.shape, int)
    value = np.zeros((len(tokens), num_names), int)
    for t in range(0, tokens.shape[1], 2):
        first, second = tokens[:, t], tokens[:, t + 1]
        sets = (first >= num_tokens) & (first < num_tokens + num_names)
        value[rows[sets], first[sets] - num_tokens] = second[sets]
        found[:, t + 1] = value[rows, np.clip(second - num_tokens, 0, num_names - 1)]
    return found


class ScopeTask(GeneratedTask[ScopeOptions]):
    """Names in scopes; see `sequences`."""

    Options = ScopeOptions
    label = "accuracy of the names' values"

    def __init__(self, options: ScopeOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        self.vocab_size = self.o.num_tokens + self.o.num_names + 3

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        o = self.o
        tokens, targets, asked = sequences(key, batch, size, o.num_names, o.num_tokens, o.num_scopes)
        counts = past(tokens, targets, self.size)
        return counts._replace(weights=counts.weights * asked)

    def _is_latest(self, batch: Batch) -> np.ndarray:
        """Whether a question's answer is the value that the name got last, in whichever scope."""
        tokens, targets = np.asarray(batch.tokens), np.asarray(batch.targets)
        return latest(tokens, self.o.num_names, self.o.num_tokens) == targets

    def slices(self, batch: Batch, size: int) -> dict[str, Bool[np.ndarray, "S B T"]]:
        """Splits questions: first those where the name's last value is not the answer, then the others."""
        asked, same = np.asarray(batch.weights) != 0, self._is_latest(batch)
        return {"latest": np.stack([asked & ~same, asked & same])}

    def baselines(self) -> dict[str, float]:
        batches = self.val_batches(self.batch_size)
        right = sum(float((self._is_latest(batch) * np.asarray(batch.weights)).sum()) for batch in batches)
        asked = sum(float(np.asarray(batch.weights).sum()) for batch in batches)
        return {
            f"one of {self.o.num_tokens} values at random": 1 / self.o.num_tokens,
            "the value that the name got last": right / asked,
        }

    def answers(self) -> float:
        return float(self.o.num_tokens)

    def summary(self) -> str:
        o = self.o
        names = f"{o.num_names} names of {o.num_tokens} values in up to {o.num_scopes} inner scopes"
        return f"{names}, {self.size // 2} operations, {o.freshness()}"
