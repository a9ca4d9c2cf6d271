"""A needle in a haystack: a few values after a marker, asked for at the end.

    . . . . ! v1 v2 . . . . . . . ? v1        v1 must be predicted at the question mark, v2 after it

The values are tokens that the haystack has as well: only the marker tells that they will be asked for, and everything
else must not get in their way, however much of it comes.

    k v k v k v ! k1 v1 k2 v2 ? k2 v2 k1 v1       v2 must be predicted at k2, v1 at k1: the marker makes the
                                                  pairs before it void, see `void_pairs`

Here the haystack cannot be told from the needle when it comes: a state has taken it in and must get rid of it.

Source: the single needle of Hsieh et al. 2024, "RULER" (S-NIAH), with one token for "remember this" and one for "what
was it".
"""

import dataclasses
from functools import partial
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.training.tasks import text
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.generated import GeneratedOptions, GeneratedTask


@dataclasses.dataclass(frozen=True)
class NeedleOptions(GeneratedOptions):
    """A few marked values in a long haystack, asked for at the end; accuracy on fresh sequences."""

    task: ClassVar[str] = "needle"

    haystack: Literal["noise", "text", "pairs"] = "noise"
    """Haystack. noise: random tokens; text: pieces of the standard library's .py files, in bytes; pairs: key-value
    pairs that a marker invalidates, and a needle of such pairs."""
    noise_tokens: Annotated[int, Positive] = 32
    """Different tokens of the noise; the values of a needle are among them. Of pairs, half are keys."""
    num_values: Annotated[int, Positive] = 16
    """Different values of a needle (of pairs: all)."""
    needle_length: Annotated[int, Positive] = 2
    """Values (or pairs) of a needle, all of them asked at the end."""
    length: Annotated[int, Positive] = 64
    """Tokens of a training sequence."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (64, 128, 256, 512)
    """Lengths that the trained model is tested at."""

    def check(self) -> None:
        pairs = self.haystack == "pairs"
        # marker and values, question and all values but the last; or two marks and the needle's pairs twice
        least = 4 * self.needle_length + 2 if pairs else 2 * self.needle_length + 1
        expected = f"at least {'4 * --needle-length + 2' if pairs else '2 * --needle-length + 1'} = {least}"
        if self.length < least:
            fail("length", expected, self.length)
        if min(self.test_lengths) < least:
            fail("test_lengths", expected, min(self.test_lengths))
        if pairs:
            if self.noise_tokens % 2 or self.noise_tokens < 2 * self.needle_length:
                expected = f"an even number, at least 2 * --needle-length = {2 * self.needle_length}"
                fail("noise_tokens", expected, self.noise_tokens)
            return
        most = 26 if self.haystack == "text" else self.noise_tokens
        if self.num_values > most:
            name = "26 letters" if self.haystack == "text" else f"--noise-tokens = {most}"
            fail("num_values", f"at most {name}", self.num_values)


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
      tokens; targets, the needle's value at the keys after the question (0 elsewhere); and where those are.
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


class NeedleTask(GeneratedTask[NeedleOptions]):
    """A needle in a haystack; see `hide` and `needle.void_pairs`."""

    Options = NeedleOptions
    label = "accuracy at the question"

    def __init__(self, options: NeedleOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        self.first_value, self.tokens = 0, self.o.noise_tokens
        if self.o.haystack == "text":
            self.data = jnp.asarray(text.load(None).train)
            self.first_value, self.tokens = ord("a"), 256
        self.vocab_size = self.tokens + 2

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        o = self.o
        if o.haystack == "pairs":
            tokens, targets, asked = void_pairs(key, batch, size, o.noise_tokens, o.needle_length)
            return Batch(tokens, targets, asked.astype(jnp.float32))
        key_haystack, key_needle = jax.random.split(key)
        if self.data is None:
            haystack = jax.random.randint(key_haystack, (batch, size), 0, self.tokens)
        else:
            starts = jax.random.randint(key_haystack, (batch, 1), 0, self.data.size - size)
            haystack = self.data[starts + jnp.arange(size)].astype(jnp.int32)
        tokens, targets, asked = hide(
            key_needle,
            haystack,
            o.needle_length,
            self.first_value,
            o.num_values,
            self.tokens,
            self.tokens + 1,
        )
        return Batch(tokens, targets, asked.astype(jnp.float32))

    def baselines(self) -> dict[str, float]:
        # A needle of pairs holds as many values; one of them is right.
        values = self.o.needle_length if self.o.haystack == "pairs" else self.o.num_values
        return {f"one of {values} values at random": 1 / values}

    def summary(self) -> str:
        o = self.o
        if o.haystack == "pairs":
            return f"{o.needle_length} pairs that count in {o.length} tokens of pairs, always fresh"
        return (
            f"{o.needle_length} of {o.num_values} values in {o.length} tokens of {o.haystack}, always fresh"
        )
