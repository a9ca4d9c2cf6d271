"""Sequences of multi-query associative recall (MQAR).

    k1 v1 k2 v2 ... kn vn | q . . q . q ...      q is one of the keys; its value must be predicted there

Source: Arora et al. 2023, "Zoology". As there: keys and values are disjoint halves of the vocabulary, every
key occurs once in the pairs and is queried once, on even places after them, and the gap between the end of
the pairs and a query follows p(gap) ~ gap^(a - 1), drawn without replacement. Unlike there, the tokens
between queries are values only, so that a small vocabulary never shows a key twice by accident. With `rewrite`, keys
come again with other values and the last one counts: what a state does not erase is in its way.

The first pair gets the gap with the largest `log p + noise`, the next one the largest of the others. So early pairs
have short gaps: the order of the questions is tied to that of the pairs. With `shuffled` it is independent of it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

SLICES = 8
"""Parts that the pairs of a sequence are told apart in, at most."""


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5), static_argnames=("rewrite", "shuffled"))
def sequences(
    key: Key[Array, ""],
    batch: int,
    length: int,
    vocab_size: int,
    num_pairs: int,
    power: float,
    kept: Int[Array, " B"] | None = None,
    *,
    rewrite: bool = False,
    shuffled: bool = False,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """Draws sequences of recall.

    Args:
      key: source of the randomness; the same key gives the same sequences.
      batch, length: B and T; T even, at least 4 * num_pairs.
      vocab_size: even, at least 2 * num_pairs without rewrite; keys are below vocab_size / 2, values from there on.
      num_pairs: pairs, and queries, of a sequence.
      power: exponent a of the gap law, > 0.
      kept: pairs that each sequence keeps, the first of them; the others, and their queries, become fill. All by
        default.
      rewrite: draw keys and values with replacement, and ask each key once, for its last value.
      shuffled: let the queries of the pairs take the drawn gaps in any order, with even chances.

    Returns:
      tokens; targets, the value that belongs to the key at a query (0 elsewhere); and where the queries are.
    """
    half = vocab_size // 2
    slots = length // 2 - num_pairs  # even places after the pairs
    log_law = (power - 1) * jnp.log(jnp.arange(1, slots + 1, dtype=jnp.float32))

    def one(key, kept):
        key_keys, key_values, key_gaps, key_fill = jax.random.split(key, 4)
        if rewrite:
            keys, values = (jax.random.randint(k, (num_pairs,), 0, half) for k in (key_keys, key_values))
        else:
            keys, values = (
                jax.lax.top_k(jax.random.uniform(k, (half,)), num_pairs)[1] for k in (key_keys, key_values)
            )
        values = half + values
        # The largest of log p + Gumbel noise are a draw without replacement.
        gaps = jax.lax.top_k(log_law + jax.random.gumbel(key_gaps, (slots,)), num_pairs)[1]
        if shuffled:
            gaps = jax.random.permutation(jax.random.fold_in(key_gaps, 0), gaps)
        at, pair = 2 * num_pairs + 2 * gaps, jnp.arange(num_pairs)
        here = pair < kept
        # asked for: a pair without a later one of its key
        last = here & ~jnp.any((keys[:, None] == keys) & (pair[:, None] < pair) & here, axis=1)
        tokens = jax.random.randint(key_fill, (length,), half, vocab_size)
        for places, written, where in (
            (2 * pair, keys, here),
            (2 * pair + 1, values, here),
            (at, keys, last),
        ):
            tokens = tokens.at[places].set(jnp.where(where, written, tokens[places]))
        targets = jnp.zeros((length,), tokens.dtype).at[at].set(jnp.where(last, values, 0))
        return tokens, targets, jnp.zeros((length,), bool).at[at].set(last)

    kept = jnp.full((batch,), num_pairs) if kept is None else kept
    return jax.vmap(one)(jax.random.split(key, batch), kept)


def slices(
    tokens: Int[Array | np.ndarray, "B T"], asked: Bool[Array | np.ndarray, "B T"], num_pairs: int
) -> dict[str, Bool[np.ndarray, "S B T"]]:
    """Splits the queries of sequences by the place of their pairs, as written, and by their own order.

    The S = min(num_pairs, SLICES) slices of each are of equal size where S divides the number of pairs.

    Args:
      tokens: of `sequences`.
      asked: where the queries are.
      num_pairs: pairs that each sequence keeps.

    Returns:
      where the queries of each slice are, by "place" and by "order".
    """
    tokens, asked = np.asarray(tokens), np.asarray(asked)
    count, rows = min(num_pairs, SLICES), np.arange(len(tokens))[:, None]
    place = np.zeros((len(tokens), tokens.max() + 1), int)
    place[rows, tokens[:, : 2 * num_pairs : 2]] = np.arange(
        num_pairs
    )  # a key that comes again has its last place
    order = np.cumsum(asked, axis=1) - 1
    found = {
        "place": place[rows, tokens] * count // num_pairs,
        "order": order * count // asked.sum(axis=1, keepdims=True),
    }
    number = np.arange(count)[:, None, None]
    return {name: (at == number) & asked for name, at in found.items()}
