"""Copying: a random sequence, a sign, and the sequence again; or backwards, which makes a palindrome.

    a b c d | a b c        each of a b c d must be predicted, from the sign on
    a b c d | d c b        each of d c b a

Source: Jelassi et al. 2024, "Repeat After Me"; palindromes: Kimi Team, "Kimi Linear" (arXiv 2510.26692), section 5.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key


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
