"""A sentence hidden in a long text, and a question for its answer, all in bytes.

    ...haystack... The secret of KEY is VALUE. ...haystack... What is the secret of KEY? It is VALUE

KEY is a word of eight random letters, VALUE random digits; the bytes of the last VALUE must be predicted, each after
those before it. Nothing but the sentence's own words announces that it will be asked for.

Source: Hsieh et al. 2024, "RULER", single needles: S-NIAH-1 (repeated noise, a number), S-NIAH-2 (text, a number) and
S-NIAH-3 (text, a long code), as Yang et al. 2024 (arXiv 2412.06464), table 3, run them; the words are this project's.
"""

import dataclasses
from functools import partial
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, UInt8

from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, NotNegative, Positive
from gdn_jax.training.tasks import text
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.generated import GeneratedOptions, GeneratedTask
from gdn_jax.training.tasks.options import CorpusOptions


@dataclasses.dataclass(frozen=True)
class SentenceOptions(GeneratedOptions, CorpusOptions):
    """A sentence in a long text, asked for at the end (Hsieh et al. 2024, "RULER"; S-NIAH 1 to 3), in bytes."""

    task: ClassVar[str] = "sentence"

    haystack: Literal["repeated", "text"] = "repeated"
    """repeated: the same few words over and over; text: pieces of --data, the held-out part of which is for tests."""
    value: Literal["number", "code"] = "number"
    """Answer that the sentence gives: a number of seven digits, or a code of 32 hexadecimal digits."""
    text_weight: Annotated[float, NotNegative] = 0.0
    """Training weight of every byte that is not part of the value. Above 0 the model also learns to read text."""
    length: Annotated[int, Positive] = 512
    """Bytes of a training sequence."""
    test_lengths: Annotated[tuple[int, ...], Distinct, Positive] = (512, 1024)
    """Lengths that the trained model is tested at."""

    def check(self) -> None:
        for name, given in (("length", self.length), ("test_lengths", min(self.test_lengths))):
            if given < 256:
                fail(name, "at least 256: the sentence and the question take up to 150 bytes", given)


NOISE = b"The road is long. The day is warm. The river runs low. We walk out, and we walk back again. "
DIGITS = {"number": (7, b"0123456789"), "code": (32, b"0123456789abcdef")}
"""Digits of a value, and what each of them may be."""
_KEY = 8  # letters


def _bytes(words: bytes) -> UInt8[np.ndarray, " n"]:
    return np.frombuffer(words, np.uint8)


@partial(jax.jit, static_argnames="value")
def hide(
    key: Key[Array, ""], haystack: UInt8[Array, "B T"], *, value: str
) -> tuple[Int[Array, "B T-1"], Int[Array, "B T-1"], Bool[Array, "B T-1"]]:
    """Writes a sentence somewhere over a haystack, and the question for it over its end.

    Args:
      key: source of the randomness; the same key gives the same sentences and places.
      haystack: bytes [B, T], T at least 150.
      value: "number" or "code".

    Returns:
      tokens [B, T - 1]; targets, the byte after each; and where the target is a digit of the asked value.
    """
    B, T = haystack.shape
    count, digits = DIGITS[value]
    key_key, key_value, key_place = jax.random.split(key, 3)
    names = jax.random.randint(key_key, (B, _KEY), ord("a"), ord("z") + 1).astype(jnp.uint8)
    values = jnp.asarray(_bytes(digits))[jax.random.randint(key_value, (B, count), 0, len(digits))]

    def say(*parts):
        parts = [jnp.broadcast_to(_bytes(x), (B, len(x))) if isinstance(x, bytes) else x for x in parts]
        return jnp.concatenate(parts, 1)

    sentence = say(b" The secret of ", names, b" is ", values, b". ")
    question = say(b"\nWhat is the secret of ", names, b"? It is ", values)
    free = T - question.shape[1] - sentence.shape[1]
    place = jax.random.randint(key_place, (B, 1), 0, free + 1)
    row = haystack.at[jnp.arange(B)[:, None], place + jnp.arange(sentence.shape[1])].set(sentence)
    row = row.at[:, T - question.shape[1] :].set(question).astype(jnp.int32)
    asked = jnp.broadcast_to(jnp.arange(1, T) >= T - count, (B, T - 1))
    return row[:, :-1], row[:, 1:], asked


def noise(batch: int, length: int) -> UInt8[Array, "B T"]:
    """Returns the same few words over and over."""
    return jnp.broadcast_to(np.resize(_bytes(NOISE), length), (batch, length))


@partial(jax.jit, static_argnames=("batch", "length"))
def pieces(
    key: Key[Array, ""], stream: UInt8[Array, " n"], *, batch: int, length: int
) -> UInt8[Array, "batch length"]:
    """Draws pieces that begin anywhere in a stream. A zero, between two files, becomes the end of a line."""
    starts = jax.random.randint(key, (batch, 1), 0, stream.size - length + 1)
    rows = stream[starts + jnp.arange(length)]
    return jnp.where(rows == 0, jnp.uint8(ord("\n")), rows)


class SentenceTask(GeneratedTask[SentenceOptions]):
    """A sentence in a long text; see `hide`. The data are the two parts of the text."""

    Options = SentenceOptions
    label = "accuracy at the digits of the answer"
    axis = "bytes"
    vocab_size = 256

    def __init__(self, options: SentenceOptions, batch_size: int, seed: int):
        super().__init__(options, batch_size, seed)
        o, self.source = self.o, "repeated words"
        if o.haystack == "text":
            longest = max(o.length, *o.test_lengths)
            corpus = text.load(o.data, o.glob, packages=o.packages, length=longest)
            self.data = {"train": jnp.asarray(corpus.train), "held out": jnp.asarray(corpus.val)}
            self.source = corpus.source

    def _draw(self, key: jax.Array, batch: int, size: int, part: str) -> Batch:
        key_haystack, key_sentence = jax.random.split(key)
        if self.o.haystack == "text":
            haystack = pieces(key_haystack, self.data[part], batch=batch, length=size + 1)
        else:
            haystack = noise(batch, size + 1)
        tokens, targets, asked = hide(key_sentence, haystack, value=self.o.value)
        return Batch(tokens, targets, asked.astype(jnp.float32))

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        return self._draw(key, batch, size, "held out")

    def draw_training(self, key: jax.Array, batch: int, kind: int = 0) -> Batch:
        drawn = self._draw(key, batch, self.size, "train")
        return drawn._replace(weights=jnp.maximum(drawn.weights, self.o.text_weight))

    def draw_validation(self, key: jax.Array, batch: int, kind: int = 0) -> Batch:
        return self.draw(key, batch, self.size)

    def baselines(self) -> dict[str, float]:
        digits = len(DIGITS[self.o.value][1])
        return {f"one of {digits} digits at random": 1 / digits}

    def summary(self) -> str:
        o, (count, _) = self.o, DIGITS[self.o.value]
        return f"a {o.value} of {count} digits in {o.length} bytes of {self.source}, {o.freshness()}"
