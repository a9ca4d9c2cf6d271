"""Next-byte modelling of a text, as a task."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import models
from gdn_jax.experiments.options import TrainOptions
from gdn_jax.experiments.tasks import ngrams, text
from gdn_jax.experiments.tasks.batch import Batch
from gdn_jax.experiments.tasks.options import TextOptions


class BytesTask:
    """Next-byte modelling of a text."""

    vocab_size = 256
    metric = "bpb"
    label = "bits per byte"
    lower_is_better = True
    axis = "bytes"

    def __init__(self, options: TrainOptions[TextOptions]):
        self.options = options
        o, self.length = options.task, options.task.length
        self.corpus = text.load(o.data, o.glob, length=self.length)
        self.starts = text.window_starts(self.corpus.val.size, self.length, o.val_bytes)

    def train_batch(self, step: int) -> Batch:
        # Philox is a counter: key (seed, step) needs no state to be saved.
        generator = np.random.Generator(np.random.Philox(key=[self.options.run.seed, step]))
        high = self.corpus.train.size - self.length
        starts = generator.integers(0, high, self.options.run.batch_size)
        tokens, targets = text.windows(self.corpus.train, starts, self.length)
        return Batch(tokens, targets, np.ones(tokens.shape, np.float32))

    def val_batches(self, size: int) -> list[Batch]:
        batches = []
        for first in range(0, len(self.starts), size):
            starts = self.starts[first : first + size]
            weights = np.zeros((size, self.length), np.float32)
            weights[: len(starts)] = 1
            starts = np.concatenate([starts, np.zeros(size - len(starts), starts.dtype)])
            batches.append(Batch(*text.windows(self.corpus.val, starts, self.length), weights))
        return batches

    def test_batches(self, size: int) -> dict[int, list[Batch]]:
        del size
        return {}  # the held-out text is the test

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        del accuracy
        return {"bpb": loss / math.log(2)}

    def baselines(self) -> dict[str, float]:
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
            "val_files": list(corpus.val_files),
        }

    def summary(self) -> str:
        corpus = self.corpus
        return (
            f"{corpus.source}: "
            f"{corpus.train.size / 1e6:.2f} MB to train on ({len(corpus.train_files)} files), "
            f"{corpus.val.size / 1e6:.2f} MB held out ({len(corpus.val_files)} files)"
        )

    def sample(self, model: models.LanguageModel) -> str:
        options = self.options.task
        prompt = b"\0" + options.prompt.encode()
        tokens = jnp.asarray(np.frombuffer(prompt, np.uint8).astype(np.int32))[None]
        rng = jax.random.fold_in(jax.random.key(self.options.run.seed), 2)
        out = models.generate(model, tokens, options.sample_bytes, rng=rng, temperature=options.temperature)
        written = bytes(np.asarray(out[0], np.uint8)).split(b"\0")[0]  # a zero ends the file
        readable = (options.prompt.encode() + written).decode(errors="replace")
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in readable)
