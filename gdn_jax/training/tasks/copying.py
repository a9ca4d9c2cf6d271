"""Copying: a random sequence, a sign, and the sequence again; or backwards, which makes a palindrome.

    a b c d | a b c        each of a b c d must be predicted, from the sign on
    a b c d | d c b        each of d c b a

Source: Jelassi et al. 2024, "Repeat After Me"; palindromes: Kimi Team, "Kimi Linear" (arXiv 2510.26692), section 5.
"""

import dataclasses
from functools import partial
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.generated import GeneratedOptions, GeneratedTask


@dataclasses.dataclass(frozen=True)
class CopyOptions(GeneratedOptions):
    """Repeating a random sequence; accuracy on fresh sequences."""

    task: ClassVar[str] = "copy"

    num_tokens: Annotated[int, Positive] = 32
    """Size of the vocabulary to copy from."""
    length: Annotated[int, Positive] = 16
    """Tokens to copy; a sequence has twice as many."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (8, 16, 32)
    """Numbers of tokens to test the trained model with."""


@dataclasses.dataclass(frozen=True)
class PalindromeOptions(CopyOptions):
    """Repeating a random sequence backwards; accuracy on fresh sequences."""

    task: ClassVar[str] = "palindrome"


@partial(jax.jit, static_argnums=(1, 2, 3), static_argnames="backwards")
def sequences(
    key: Key[Array, ""], batch: int, length: int, num_tokens: int, *, backwards: bool = False
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """Draws sequences to copy.

    Args:
      key: source of the randomness.
      batch: B.
      length: tokens to copy; T is twice that.
      num_tokens: different tokens; the sign is the token num_tokens.
      backwards: whether the last token comes first in the second half.

    Returns:
      tokens; targets, the token to predict in the second half (0 elsewhere); and where the second half is.
    """
    x = jax.random.randint(key, (batch, length), 0, num_tokens)
    sign = jnp.full((batch, 1), num_tokens)
    again = x[:, ::-1] if backwards else x
    tokens = jnp.concatenate([x, sign, again[:, :-1]], 1)
    targets = jnp.concatenate([jnp.zeros_like(x), again], 1)
    return tokens, targets, jnp.broadcast_to(jnp.arange(2 * length) >= length, tokens.shape)


class CopyTask(GeneratedTask[CopyOptions]):
    """Repeating a sequence; see `sequences`."""

    Options = CopyOptions
    label = "accuracy of the copy"
    backwards = False

    def __init__(self, options: CopyOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        self.vocab_size = self.o.num_tokens + 1

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        tokens, targets, asked = sequences(key, batch, size, self.o.num_tokens, backwards=self.backwards)
        return Batch(tokens, targets, asked.astype(jnp.float32))

    def baselines(self) -> dict[str, float]:
        return {f"one of {self.o.num_tokens} tokens at random": 1 / self.o.num_tokens}

    def summary(self) -> str:
        how = "backwards, " if self.backwards else ""
        return f"copies of {self.size} tokens of {self.o.num_tokens}, {how}{self.o.freshness()}"


class PalindromeTask(CopyTask):
    """Repeating a sequence backwards; see `sequences`."""

    Options = PalindromeOptions
    label = "accuracy of the copy backwards"
    backwards = True
