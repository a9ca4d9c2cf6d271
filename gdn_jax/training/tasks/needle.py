"""A needle in a haystack: a few values behind a marker, asked for at the end.

    . . . . ! v1 v2 . . . . . . . ? v1        v1 must be predicted at the question mark, v2 after it

The values are tokens that the haystack has as well: only the marker tells that they will be asked for, and everything
else must not get in their way, however much of it comes.

    k v k v k v ! k1 v1 k2 v2 ? k2 v2 k1 v1       v2 must be predicted at k2, v1 at k1: the marker makes the
                                                  pairs before it void, see `void_pairs`

Here the haystack cannot be told from the needle when it comes: a state has taken it in and must get rid of it.

Source: the single needle of Hsieh et al. 2024, "RULER" (S-NIAH), with one token for "remember this" and one for "what
was it".
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key


@partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def hide(
    key: Key[Array, ""],
    haystack: Int[Array, "B T"],
    needle_length: int,
    first_value: int,
    num_values: int,
    marker: int,
    question: int,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """Writes a needle and its question over random tokens.

    Args:
      key: source of the randomness; the same key gives the same needles and places.
      haystack: tokens [B, T], T at least 2 * needle_length + 1.
      needle_length: values of a needle.
      first_value, num_values: values are drawn from [first_value, first_value + num_values).
      marker, question: tokens that the haystack does not have.

    Returns:
      tokens, with the needle at a place drawn evenly; targets, the values at the last needle_length places (0
      elsewhere); and where those places are.
    """
    B, T = haystack.shape
    key_values, key_place = jax.random.split(key)
    values = first_value + jax.random.randint(key_values, (B, needle_length), 0, num_values)
    place = jax.random.randint(key_place, (B, 1), 0, T - 2 * needle_length)
    rows = jnp.arange(B)[:, None]
    needle = jnp.concatenate([jnp.full((B, 1), marker), values], 1)
    asked = jnp.concatenate([jnp.full((B, 1), question), values[:, :-1]], 1)
    tokens = haystack.at[rows, place + jnp.arange(needle_length + 1)].set(needle)
    tokens = tokens.at[:, T - needle_length :].set(asked)
    targets = jnp.zeros_like(tokens).at[:, T - needle_length :].set(values)
    return tokens, targets, jnp.broadcast_to(jnp.arange(T) >= T - needle_length, (B, T))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def void_pairs(
    key: Key[Array, ""], batch: int, length: int, num_tokens: int, num_pairs: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """Draws random pairs, a marker that makes them void, a needle of pairs, and the needle's pairs in another order.

    Args:
      key: source of the randomness; the same key gives the same sequences.
      batch, length: B and T, at least 4 * num_pairs + 2.
      num_tokens: even, at least 2 * num_pairs; keys are below num_tokens / 2, values from there on; num_tokens is the
        marker and num_tokens + 1 the question.
      num_pairs: pairs of the needle; no key comes twice among them.

    Returns:
      tokens; targets, the needle's value at the keys behind the question (0 elsewhere); and where those are.
    """
    half, hay = num_tokens // 2, length - 4 * num_pairs - 2

    def one(key):
        key_hay, key_keys, key_values, key_order = jax.random.split(key, 4)
        # keys and values by turns; the last one before the marker is a value
        first = half * ((jnp.arange(hay) + hay) % 2)
        void = first + jax.random.randint(key_hay, (hay,), 0, half)
        keys = jax.random.permutation(key_keys, half)[:num_pairs]
        values = jax.random.randint(key_values, (num_pairs,), half, num_tokens)
        order = jax.random.permutation(key_order, num_pairs)
        needle = jnp.stack([keys, values], 1)
        marker, question = jnp.array([num_tokens]), jnp.array([num_tokens + 1])
        tokens = jnp.concatenate([void, marker, needle.reshape(-1), question, needle[order].reshape(-1)])
        at = length - 2 * num_pairs + 2 * jnp.arange(num_pairs)
        targets = jnp.zeros_like(tokens).at[at].set(values[order])
        return tokens, targets, jnp.zeros((length,), bool).at[at].set(True)

    return jax.vmap(one)(jax.random.split(key, batch))
