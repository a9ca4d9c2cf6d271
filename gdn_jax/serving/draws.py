"""How the requests of a server draw their tokens: the numbers of each, and where it is in its own tokens.

A request has a key of its own. The key of a token is `fold_in(key, number)` with the token's number in the request,
so what a request draws depends on no other request.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, UInt32

ALL = np.iinfo(np.int32).max
"""The top_k that keeps every token."""


class Draws(NamedTuple):
    """Rows of requests. A pytree; a limit that a request does not have is the number that leaves nothing out.

    Fields:
      temperature: [N]; 0 takes the likeliest token.
      top_k: [N] integers, 1 or more; `ALL` for none.
      top_p: [N] above 0; infinity for none.
      min_p: [N] from 0 to 1; 0 for none.
      key: [N, words], data of the keys.
      number: [N], tokens that a request has been given.
    """

    temperature: Float[Any, " N"]
    top_k: Int[Any, " N"]
    top_p: Float[Any, " N"]
    min_p: Float[Any, " N"]
    key: UInt32[Any, "N words"]
    number: Int[Any, " N"]

    @classmethod
    def of(cls, requests: Sequence["Draw"]) -> "Draws":
        """Rows of requests whose first tokens come next."""
        columns = zip(*requests, strict=True)
        dtypes = np.float32, np.int32, np.float32, np.float32, np.uint32
        rows = [np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)]
        return cls._make([*rows, np.zeros(len(requests), np.int32)])


class Draw(NamedTuple):
    """How one request draws: a row of `Draws`, on the host."""

    temperature: float = 0.0
    top_k: int = ALL
    top_p: float = math.inf
    min_p: float = 0.0
    key: tuple[int, ...] = ()

    @classmethod
    def none(cls) -> "Draw":
        """The likeliest tokens."""
        return cls(key=_no_key())

    @classmethod
    def made(
        cls,
        vocab_size: int,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        min_p: float | None,
        rng: Any,
    ) -> "Draw":
        """The arguments of `generate`, checked.

        Raises:
          ValueError: `check_draw`; the key is of another implementation than `jax.random.key`'s.
        """
        check_draw(vocab_size, temperature, top_k, top_p, min_p, rng)
        key = _no_key() if temperature == 0 else _words(rng)
        limits = ALL if top_k is None else min(top_k, ALL), math.inf if top_p is None else top_p, min_p or 0.0
        return cls(float(temperature), *limits, key)


@functools.cache
def _no_key() -> tuple[int, ...]:
    """Words of the key of a request that draws nothing."""
    return (0,) * jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).size


def _words(rng: Any) -> tuple[int, ...]:
    """The words of a key.

    Raises:
      ValueError: it is none, or of another implementation than `jax.random.key`'s.
    """
    typed = isinstance(rng, jax.Array) and jax.dtypes.issubdtype(rng.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(rng) if typed else rng)
    if words.dtype != np.uint32 or words.shape != (size := len(_no_key()),):
        raise ValueError(
            f"rng: expected a key of {size} words, as `jax.random.key` makes it, got {words.dtype}{list(words.shape)}"
        )
    return tuple(words.tolist())


def check_draw(
    vocab_size: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    rng: Any,
) -> None:
    """Raises ValueError for the first argument of a draw that is out of its range."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    if temperature > 0 and rng is None:
        raise ValueError(f"rng: expected a key with temperature = {temperature}, got None")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k: expected 1 to vocab_size = {vocab_size}, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a number above 0 and up to 1, got {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p: expected a number from 0 to 1, got {min_p}")
