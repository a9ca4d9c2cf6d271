"""The frame of tasks whose sequences are drawn at random."""

import dataclasses
import hashlib
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn_jax import models
from gdn_jax.commands.fields import Positive
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.options import TaskOptions
from gdn_jax.training.tasks.task import Task

_TRAINING_SET = 2**16
"""Purpose of the keys of a training set of fixed size; those of its kinds of batches follow."""


@dataclasses.dataclass(frozen=True)
class GeneratedOptions(TaskOptions):
    """Sequences drawn at random, in any number."""

    val_sequences: Annotated[int, Positive] = 512
    """Number of new sequences for a validation, and for a test at each size."""
    train_sequences: Annotated[int | None, Positive] = None
    """Size of the training set (for each of --cases), sampled with replacement. None: every sequence is new."""
    if TYPE_CHECKING:  # a field of each task, see `TaskOptions`

        @property
        def test_lengths(self) -> tuple[int, ...]: ...

    def freshness(self) -> str:
        """Says in words whether training sequences come again."""
        n = self.train_sequences
        return "always fresh" if n is None else f"trained on {n} sequences"

    def tests(self) -> dict[int, int]:
        """Returns the sizes that the trained model is tested at, with the tokens of a sequence of each."""
        return {length: length for length in self.test_lengths}

    def drawn(self) -> tuple[int, list[int]]:
        tests = [*self.tests().values()]
        return self.val_sequences, [self.longest(), *[max(tests)] * len(tests)]


class GeneratedTask[T: GeneratedOptions](Task):
    """A task of fresh sequences; a subclass says how they are drawn.

    Attributes: as for `Task`, and
      o: options of the task.
      batch_size: sequences of a training step.
      seed: of the training batches and of the validation and test sets.
      test_sizes: sizes that a trained model is tested at.
    """

    training: ClassVar[dict[str, Any]] = {
        "batch_size": 64,
        "steps": 400,
        "eval_every": 100,
        "num_layers": 2,
        "expand_v": 1.0,
        "lr": 5e-3,
    }
    metric = "accuracy"
    lower_is_better = False
    axis = "tokens"

    def __init__(self, options: T, batch_size: int, seed: int):
        self.o, self.batch_size, self.seed = options, batch_size, seed
        self.size, self.test_sizes = options.trained_size(), tuple(options.tests())

    def draw(self, key: jax.Array, batch: int, size: int) -> Batch:
        """Draws fresh sequences of a size; a pure function of its arguments, also under jit."""
        raise NotImplementedError

    def draw_training(self, key: jax.Array, batch: int, kind: int = 0) -> Batch:
        """Draws fresh sequences to train on."""
        return self.draw(key, batch, self.size)

    def draw_validation(self, key: jax.Array, batch: int, kind: int = 0) -> Batch:
        """Draws fresh sequences to validate with."""
        return self.draw_training(key, batch, kind)

    def _key(self, seed: int | jax.Array, purpose: int, i: int | jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), i)

    def seeded_batch(self, seed: int | jax.Array, step: int | jax.Array, kind: int = 0) -> Batch:
        """Draws the batch of one optimiser step, see `Task.seeded_batch`.

        Of a training set of a fixed size every sequence is a function of its number and of the seed of the options,
        which the runs of a sweep share: it is drawn again whenever its number is.
        """
        key, batch = self._key(seed, 0, step), self.batch_size
        if self.o.train_sequences is None:
            return self.draw_training(key, batch, kind)
        numbers = jax.random.randint(key, (batch,), 0, self.o.train_sequences)
        keys = jax.vmap(partial(self._key, self.seed, _TRAINING_SET + kind))(numbers)
        rows = jax.vmap(lambda key: self.draw_training(key, 1, kind))(keys)
        return jax.tree.map(lambda x: x[:, 0], rows)

    def train_batch(self, step: int) -> Batch:
        return self.seeded_batch(self.seed, step, self.turns[step % len(self.turns)])

    def _keys(self, purpose: int, batch: int) -> list[jax.Array]:
        count = max(1, self.o.val_sequences // batch)
        return [self._key(self.seed, purpose, i) for i in range(count)]

    def val_batches(self, size: int) -> list[Batch]:
        kinds = max(self.turns) + 1
        drawn = [self.draw_validation(key, size, i % kinds) for i, key in enumerate(self._keys(1, size))]
        longest = max(batch.tokens.shape[1] for batch in drawn)
        return [batch.pad(longest) for batch in drawn]

    def test_batches(self, size: int) -> dict[int, list[Batch]]:
        sets = {
            n: [self.draw(key, size, n) for key in self._keys(3 + i, size)]
            for i, n in enumerate(self.test_sizes)
        }
        longest = max(batch.tokens.shape[1] for batches in sets.values() for batch in batches)
        return {n: [batch.pad(longest) for batch in batches] for n, batches in sets.items()}

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        del loss
        return {"accuracy": accuracy}

    def answers(self) -> float:
        [accuracy] = self.baselines().values()
        return 1 / accuracy

    def describe(self) -> dict[str, object]:
        first = jax.tree.map(np.asarray, self.train_batch(len(self.turns)))
        digest = hashlib.sha256(b"".join(a.tobytes() for a in first)).hexdigest()[:16]
        return {"source": "generated", "fingerprint": digest}

    def sample(self, model: models.LanguageModel) -> str:
        batch = self.draw(self._key(self.seed, 2, 0), 1, self.size)
        graphdef, state = nnx.split(model)
        logits = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens)[0])(state, batch.tokens)
        tokens, targets, weights = (np.asarray(x[0]) for x in batch)
        predicted = np.argmax(np.asarray(logits[0]), -1)
        lines = ["place  token  target  predicted"]
        for t in np.flatnonzero(weights):
            wrong = "" if predicted[t] == targets[t] else "  wrong"
            lines.append(f"{t:5d} {tokens[t]:6d} {targets[t]:7d} {predicted[t]:10d}{wrong}")
        return "\n".join(lines) + "\n"


def past(tokens: jax.Array, targets: jax.Array, trained: int) -> Batch:
    """Makes a batch in which every prediction counts; in sequences beyond the trained length, those past it."""
    length = tokens.shape[1]
    counts = jnp.arange(length) >= (trained if length > trained else 0)
    return Batch(tokens, targets, jnp.broadcast_to(counts.astype(jnp.float32), tokens.shape))
