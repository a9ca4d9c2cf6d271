"""What a task is to the training loop: batches given by the step alone, metrics, baselines, a sample."""

import hashlib
import json
import math
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax import models
from gdn_jax.experiments import ngrams, recall, text
from gdn_jax.experiments.errors import RunError
from gdn_jax.experiments.options import BytesOptions, RecallOptions, TrainOptions


class Batch(NamedTuple):
    """Sequences and what to predict after each token; a weight of 0 leaves a prediction out."""

    tokens: Int[Array, "B T"] | np.ndarray
    targets: Int[Array, "B T"] | np.ndarray
    weights: Float[Array, "B T"] | np.ndarray


@runtime_checkable
class Task(Protocol):
    """A data source with its own way of keeping score.

    Attributes:
      vocab_size: tokens of the model.
      metric: key of the number that is drawn and printed; label: its name and unit in words.
      lower_is_better: direction of the metric.
    """

    vocab_size: int
    metric: str
    label: str
    lower_is_better: bool

    def train_batch(self, step: int) -> Batch:
        """Batch of one optimiser step, a function of the seed and the step alone."""
        ...

    def val_batches(self, size: int) -> list[Batch]:
        """The validation set, the same at every call, in batches of `size` sequences."""
        ...

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        """Metrics of a mean loss in nats and a mean accuracy."""
        ...

    def baselines(self) -> dict[str, float]:
        """The metric of simple methods on the validation set."""
        ...

    def describe(self) -> dict[str, object]:
        """Facts about the data for config.json; `fingerprint` must agree when a run is resumed."""
        ...

    def summary(self) -> str:
        """The data in one line."""
        ...

    def sample(self, model: models.LanguageModel) -> str:
        """What the trained model does, as text, through the recurrent cache."""
        ...


class BytesTask:
    """Next-byte modelling of a text."""

    vocab_size = 256
    metric = "bpb"
    label = "bits per byte"
    lower_is_better = True

    def __init__(self, options: BytesOptions):
        self.options = options
        self.length = options.text.length
        self.corpus = text.load(options.text.data, options.text.glob, length=self.length)
        self.starts = text.window_starts(self.corpus.val.size, self.length, options.text.val_bytes)

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
        options = self.options.text
        prompt = b"\0" + options.prompt.encode()
        tokens = jnp.asarray(np.frombuffer(prompt, np.uint8).astype(np.int32))[None]
        rng = jax.random.fold_in(jax.random.key(self.options.run.seed), 2)
        out = models.generate(model, tokens, options.sample_bytes, rng=rng, temperature=options.temperature)
        written = bytes(np.asarray(out[0], np.uint8)).split(b"\0")[0]  # a zero ends the file
        readable = (options.prompt.encode() + written).decode(errors="replace")
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in readable)


class RecallTask:
    """Multi-query associative recall; see `recall.sequences`."""

    metric = "accuracy"
    label = "accuracy at the queries"
    lower_is_better = False

    def __init__(self, options: RecallOptions):
        self.options = options
        self.vocab_size = options.recall.vocab_size
        root = jax.random.key(options.run.seed)
        self.train_key, self.val_key, self.sample_key = (jax.random.fold_in(root, i) for i in range(3))

    def _batch(self, key: jax.Array, size: int) -> Batch:
        o = self.options.recall
        tokens, targets, asked = recall.sequences(key, size, o.length, o.vocab_size, o.num_pairs, o.power)
        return Batch(tokens, targets, asked.astype(jnp.float32))

    def train_batch(self, step: int) -> Batch:
        return self._batch(jax.random.fold_in(self.train_key, step), self.options.run.batch_size)

    def val_batches(self, size: int) -> list[Batch]:
        count = max(1, self.options.recall.val_sequences // size)
        return [self._batch(jax.random.fold_in(self.val_key, i), size) for i in range(count)]

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        del loss
        return {"accuracy": accuracy}

    def baselines(self) -> dict[str, float]:
        return {"a value of the sequence at random": 1 / self.options.recall.num_pairs}

    def describe(self) -> dict[str, object]:
        first = jax.tree.map(np.asarray, self.train_batch(1))
        digest = hashlib.sha256(b"".join(a.tobytes() for a in first)).hexdigest()[:16]
        return {"source": "generated", "fingerprint": digest}

    def summary(self) -> str:
        o = self.options.recall
        return f"recall of {o.num_pairs} pairs in {o.length} tokens, vocabulary {o.vocab_size}, always fresh"

    def sample(self, model: models.LanguageModel) -> str:
        batch = jax.tree.map(np.asarray, self._batch(self.sample_key, 1))
        graphdef, state = nnx.split(model)

        @jax.jit
        def predict(state, tokens):
            def token(cache, x):
                logits, cache = nnx.merge(graphdef, state)(x[None, None], cache=cache)
                return cache, jnp.argmax(logits[0, 0])

            return jax.lax.scan(token, nnx.merge(graphdef, state).init_cache(1), tokens)[1]

        predicted = np.asarray(predict(state, jnp.asarray(batch.tokens[0])))
        lines = ["place  key  value  predicted"]
        for t in np.flatnonzero(batch.weights[0]):
            key, value, guess = batch.tokens[0, t], batch.targets[0, t], predicted[t]
            lines.append(f"{t:5d} {key:4d} {value:6d} {guess:10d}{'' if guess == value else '  wrong'}")
        return "\n".join(lines) + "\n"


def make_task(options: TrainOptions) -> Task:
    """Task of the options, its data read.

    Raises:
      RunError: the data cannot be used.
    """
    return BytesTask(options) if isinstance(options, BytesOptions) else RecallTask(options)


def check_same_data(stored: dict[str, object], task: Task) -> None:
    """Raises RunError when the data of a run to resume has changed."""
    now = task.describe()
    if now["fingerprint"] != stored.get("fingerprint"):
        facts = json.dumps({k: v for k, v in now.items() if isinstance(v, str | int)})
        raise RunError(
            f"--resume: expected the data of the run ({stored.get('source')}), got other data: {facts}"
        )
