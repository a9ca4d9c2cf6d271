"""Copying: a random sequence, a sign, and the sequence again.

    a b c d | a b c        each of a b c d must be predicted, from the sign on

Source: Jelassi et al. 2024, "Repeat After Me".
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key


@partial(jax.jit, static_argnums=(1, 2, 3))
def sequences(
    key: Key[Array, ""], batch: int, length: int, num_tokens: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """Draws sequences to copy.

    Args:
      key: source of the randomness.
      batch: B.
      length: tokens to copy; T is twice that.
      num_tokens: different tokens; the sign is the token num_tokens.

    Returns:
      tokens; targets, the token to predict in the second half (0 elsewhere); and where the second half is.
    """
    x = jax.random.randint(key, (batch, length), 0, num_tokens)
    sign = jnp.full((batch, 1), num_tokens)
    tokens = jnp.concatenate([x, sign, x[:, :-1]], 1)
    targets = jnp.concatenate([jnp.zeros_like(x), x], 1)
    return tokens, targets, jnp.broadcast_to(jnp.arange(2 * length) >= length, tokens.shape)
