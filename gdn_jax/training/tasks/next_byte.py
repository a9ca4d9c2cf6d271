"""Next-byte modelling of a text, as a task."""

import dataclasses
import math
from functools import cached_property
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from gdn_jax import models
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, NotNegative, Positive
from gdn_jax.rules import Rule
from gdn_jax.training.tasks import ngrams, text
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.options import CorpusOptions, prompt_bytes
from gdn_jax.training.tasks.task import Task, Text


@dataclasses.dataclass(frozen=True)
class TextOptions(CorpusOptions):
    """Next-byte modelling of real text; validated in bits per byte on held-out files."""

    task: ClassVar[str] = "bytes"

    length: Annotated[int, Positive] = 256
    """Bytes of a training sequence, T."""
    test_lengths: Annotated[tuple[int, ...] | None, Distinct, Positive] = None
    """Context lengths to test: the model reads held-out text in windows of the longest one, and gets a score for the
    bytes between each length and the next. None: no such test."""
    val_bytes: Annotated[int, Positive] = 131072
    """Held-out bytes scored by a validation, spread evenly over the held-out text."""
    prompt: str = ""
    """Start of the sample, any bytes; empty: the start of a new file."""
    sample_bytes: Annotated[int, Positive] = 600
    """Bytes of the sample."""
    temperature: Annotated[float, NotNegative] = 0.7
    """Temperature of the sample; 0 takes the likeliest byte."""

    def check(self) -> None:
        prompt_bytes(self.prompt)
        if self.test_lengths is not None and list(self.test_lengths) != sorted(self.test_lengths):
            fail("test_lengths", "ascending lengths", " ".join(map(str, self.test_lengths)))

    def check_rule(self, rule: Rule) -> None:
        if "initial_state" not in rule.options:
            fail("rule", "a rule with a recurrent state, through which the sample is written", rule.name)

    def check_sweep(self, batch_size: int | None) -> None:
        if self.test_lengths is None:
            fail("test_lengths", "at least one length", "none")


class BytesTask(Task):
    """Next-byte modelling of a text."""

    Options = TextOptions
    vocab_size = 256
    metric = "bpb"
    label = "bits per byte"
    lower_is_better = True
    axis = "bytes"

    def __init__(self, options: TextOptions, batch_size: int, seed: int):
        self.o, self.batch_size, self.seed = options, batch_size, seed
        o, self.length = options, options.length
        self.size, self.tests = self.length, o.test_lengths or ()
        longest = max((self.length, *self.tests))
        self.corpus = text.load(o.data, o.glob, packages=o.packages, length=longest)
        self.data, self.val = self.corpus.train, self.corpus.val
        self.starts = text.window_starts(self.val.size, self.length, o.val_bytes)

    @classmethod
    def vocabulary(cls, options: Any) -> int:
        return cls.vocab_size

    @classmethod
    def text(cls, options: Any) -> Text:
        return TEXT

    def train_batch(self, step: int) -> Batch:
        # Philox is a counter: key (seed, step) needs no state to be saved.
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step]))
        high = self.data.size - self.length
        starts = generator.integers(0, high, self.batch_size)
        tokens, targets = text.windows(self.data, starts, self.length)
        return Batch(tokens, targets, np.ones(tokens.shape, np.float32))

    def seeded_batch(self, seed: int | Array, step: int | Array, kind: int = 0) -> Batch:
        """Draws windows inside a program, other ones than `train_batch` draws."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), step)
        starts = jax.random.randint(key, (self.batch_size, 1), 0, self.data.shape[0] - self.length)
        rows = jnp.asarray(self.data)[starts + jnp.arange(self.length + 1)].astype(jnp.int32)
        return Batch(rows[:, :-1], rows[:, 1:], jnp.ones((rows.shape[0], self.length), jnp.float32))

    def val_batches(self, size: int) -> list[Batch]:
        return batches(self.val, self.starts, self.length, size)

    def test_batches(self, size: int) -> dict[int, list[Batch]]:
        # Without --test-lengths the held-out text is the test.
        made, before = {}, 0
        for length in self.tests:
            longest = self.tests[-1]
            starts = text.window_starts(self.corpus.val.size, longest, self.o.val_bytes)
            counts = (np.arange(longest) >= before) & (np.arange(longest) < length)
            made[length] = [
                batch._replace(weights=batch.weights * counts)
                for batch in batches(self.corpus.val, starts, longest, size)
            ]
            before = length
        return made

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        del accuracy
        return {"bpb": bits(loss)}

    def baselines(self) -> dict[str, float]:
        return self._tables

    @cached_property
    def _tables(self) -> dict[str, float]:
        positions = (self.starts[:, None] + np.arange(1, self.length + 1)).reshape(-1)
        return ngrams.bits_per_byte(self.corpus.train, self.corpus.val, positions)

    def describe(self) -> dict[str, object]:
        corpus = self.corpus
        return {
            "source": corpus.source,
            "fingerprint": corpus.fingerprint,
            "train_bytes": corpus.train.size,
            "val_bytes": corpus.val.size,
            "val_bytes_scored": len(self.starts) * self.length,
            "train_files": len(corpus.train_files),
            "val_files": self._held_out(),
        }

    def _held_out(self) -> list[str]:
        """Returns the names of the files that are held out, or of the packages."""
        files = self.corpus.val_files
        return sorted({name.split("/")[0] for name in files}) if self.o.packages else list(files)

    def summary(self) -> str:
        corpus = self.corpus
        return (
            f"{corpus.source}: "
            f"{corpus.train.size / 1e6:.2f} MB to train on ({len(corpus.train_files)} files), "
            f"{corpus.val.size / 1e6:.2f} MB held out ({len(corpus.val_files)} files)"
        )

    def sample(self, model: models.LanguageModel) -> str:
        options = self.o
        rng = jax.random.fold_in(jax.random.key(self.seed), 2)
        prompt = encode(options.prompt)
        out = models.generate(model, prompt, options.sample_bytes, rng=rng, temperature=options.temperature)
        return decode(jnp.concatenate([prompt[0, 1:], out[0]]))


def encode(prompt: str) -> Int[Array, "1 T"]:
    """Returns the tokens of the beginning of a file: a zero, and the bytes of the prompt.

    Raises:
      RunError: the prompt stands for no bytes.
    """
    return jnp.asarray(np.frombuffer(b"\0" + prompt_bytes(prompt), np.uint8).astype(np.int32))[None]


def decode(tokens: Int[Array, " T"]) -> str:
    """Returns readable text of bytes up to a zero, which ends a file. What is no text becomes U+FFFD."""
    readable = bytes(np.asarray(tokens, np.uint8)).split(b"\0")[0].decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in readable)


class Bytes:
    """The text of bytes, as a run of the task has it."""

    stops: tuple[int, ...] = (0,)

    def encode(self, prompt: str) -> Int[Array, "1 T"]:
        """See the function `encode`."""
        return encode(prompt)

    def decode(self, tokens: Int[Array, " T"]) -> str:
        """See the function `decode`."""
        return decode(tokens)


TEXT = Bytes()


def batches(stream: np.ndarray, starts: np.ndarray, length: int, size: int) -> list[Batch]:
    """Cuts windows of a stream in batches of `size`. The last batch is filled up with windows that do not count."""
    made = []
    for first in range(0, len(starts), size):
        some = starts[first : first + size]
        weights = np.zeros((size, length), np.float32)
        weights[: len(some)] = 1
        some = np.concatenate([some, np.zeros(size - len(some), some.dtype)])
        made.append(Batch(*text.windows(stream, some, length), weights))
    return made


def bits(loss: float) -> float:
    """Returns the bits per byte of a mean loss in nats."""
    return loss / math.log(2)
