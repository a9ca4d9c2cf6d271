"""State tracking: after every token, the state of a finite group that the tokens so far have led to.

    parity        1 0 1 1 0        the running sum modulo 2:                                  1 1 0 1 1
    permutation   a b c d          the running product, first a, then b (a word problem):     a  ab  abc  abcd

A linear recurrence whose transitions have eigenvalues in [0, 1] alone cannot keep count modulo 2 over any length;
with eigenvalues in [-1, 1] it can. One Householder reflection a token exchanges two things; a permutation of five
things is a product of up to four. As turns of a dodecahedron the even ones (A5) are products of two reflections of
three dimensions, and so are all permutations of three things (S3), as motions of a triangle, in two dimensions.

Source: Merrill et al. 2024, "The Illusion of State in State-Space Models"; Grazzi et al. 2024 (arXiv 2411.12537);
Siems et al. 2025, "DeltaProduct" (arXiv 2502.10297).
"""

import dataclasses
import itertools
from functools import partial
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.generated import GeneratedOptions, GeneratedTask, past


@dataclasses.dataclass(frozen=True)
class ParityOptions(GeneratedOptions):
    """The parity of the bits so far, after every bit; accuracy on fresh sequences."""

    task: ClassVar[str] = "parity"

    length: Annotated[int, Positive] = 32
    """Bits of a training sequence."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (32, 64, 128)
    """Lengths that the trained model is tested at; beyond the training length only bits past it count."""


@dataclasses.dataclass(frozen=True)
class PermutationOptions(GeneratedOptions):
    """The product of the permutations so far (word problem of a group); accuracy on fresh sequences."""

    task: ClassVar[str] = "permutation"

    group: Literal["S3", "A5", "S5"] = "S3"
    """Permutations of three or of five things; A5: the even ones of five."""
    elements: Literal["all", "swaps"] = "all"
    """Tokens of a word: all elements of the group, or those that exchange two things."""
    length: Annotated[int, Positive] = 32
    """Permutations of a training sequence."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (32, 64, 128)
    """Lengths that the trained model is tested at; beyond the training length only products past it count."""

    def check(self) -> None:
        if self.group == "A5" and self.elements == "swaps":
            fail("elements", "all, since no swap is in A5", self.elements)


@partial(jax.jit, static_argnums=(1, 2))
def parity(key: Key[Array, ""], batch: int, length: int) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Draws bits [batch, length], and computes the parity of the bits up to and including each."""
    bits = jax.random.randint(key, (batch, length), 0, 2)
    return bits, jnp.cumsum(bits, 1) % 2


def elements(things: int) -> np.ndarray:
    """Returns all permutations of n things [n!, n] in lexicographic order: row p sends thing i to p[i]."""
    return np.array(list(itertools.permutations(range(things))))


def even(permutations: np.ndarray) -> np.ndarray:
    """Returns the permutations that are products of an even number of swaps; they are a group too."""
    places = range(permutations.shape[1])
    inversions = sum(permutations[:, i] > permutations[:, j] for j in places for i in range(j))
    return permutations[inversions % 2 == 0]


def products(permutations: np.ndarray) -> np.ndarray:
    """Returns a table [n, n] of indices of a group's n elements: entry a, b is the product of first a, then b."""
    index = {tuple(p): i for i, p in enumerate(permutations.tolist())}
    return np.array([[index[tuple(b[a])] for b in permutations] for a in permutations])


def swaps(permutations: np.ndarray) -> np.ndarray:
    """Returns the indices of the permutations that exchange two things."""
    moved = (permutations != np.arange(permutations.shape[1])).sum(1)
    return np.flatnonzero(moved == 2)


@partial(jax.jit, static_argnums=(1, 2))
def words(
    key: Key[Array, ""],
    batch: int,
    length: int,
    letters: Int[Array, " L"],
    table: Int[Array, "G G"],
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Draws words of a group, and computes the product of each word's letters up to and including each letter.

    Args:
      key: source of the randomness.
      batch, length: B and T.
      letters: elements that a word is made of, drawn evenly.
      table: products of the group's elements.

    Returns:
      tokens and products, both elements of the group.
    """
    tokens = letters[jax.random.randint(key, (batch, length), 0, letters.shape[0])]
    return tokens, jax.lax.associative_scan(lambda a, b: table[a, b], tokens, axis=1)


class ParityTask(GeneratedTask[ParityOptions]):
    """Parity of the bits so far; see `parity`."""

    Options = ParityOptions
    training = GeneratedTask.training | {"allow_neg_eigval": True}
    label = "accuracy of the running parity"
    vocab_size = 2

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        tokens, targets = parity(key, batch, size)
        return past(tokens, targets, self.size)

    def baselines(self) -> dict[str, float]:
        return {"a guess": 0.5}

    def summary(self) -> str:
        return f"parity of {self.size} bits, {self.o.freshness()}"


class PermutationTask(GeneratedTask[PermutationOptions]):
    """Product of the permutations so far; see `words`."""

    Options = PermutationOptions
    training = GeneratedTask.training | {"allow_neg_eigval": True}
    label = "accuracy of the running product"

    def __init__(self, options: PermutationOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        group = elements(int(self.o.group[1]))
        group = even(group) if self.o.group == "A5" else group
        letters = swaps(group) if self.o.elements == "swaps" else np.arange(len(group))
        self.letters, self.table = jnp.asarray(letters), jnp.asarray(products(group))
        self.vocab_size = len(group)

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        tokens, targets = words(key, batch, size, self.letters, self.table)
        return past(tokens, targets, self.size)

    def baselines(self) -> dict[str, float]:
        # Swaps change the sign at every token: half of the group can be told apart by counting them.
        return {"a guess": (2 if self.o.elements == "swaps" else 1) / self.vocab_size}

    def summary(self) -> str:
        o = self.o
        return f"products of {self.size} permutations of {o.group} ({o.elements}), {o.freshness()}"
