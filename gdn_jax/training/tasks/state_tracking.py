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

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key


@partial(jax.jit, static_argnums=(1, 2))
def parity(key: Key[Array, ""], batch: int, length: int) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Draws bits [batch, length], and computes the parity of the bits up to and including each."""
    bits = jax.random.randint(key, (batch, length), 0, 2)
    return bits, jnp.cumsum(bits, 1) % 2


def elements(things: int) -> np.ndarray:
    """Returns all permutations of so many things [n!, things] in lexicographic order: row p sends thing i to p[i]."""
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
