"""Tasks as the training loop sees them: batches that the step alone decides, metrics, baselines, a sample."""

import json
from typing import Protocol, runtime_checkable

from jaxtyping import Array, PyTree

from gdn_jax import models
from gdn_jax.commands.errors import RunError
from gdn_jax.tasks import generated, next_byte
from gdn_jax.tasks.batch import Batch
from gdn_jax.tasks.options import TaskOptions


@runtime_checkable
class Task(Protocol):
    """A data source with its own way of keeping score.

    Attributes:
      vocab_size: tokens of the model.
      metric: key of the number that is drawn and printed; label: its name and unit in words.
      lower_is_better: direction of the metric.
      axis: unit of the sizes of the tests.
    """

    vocab_size: int
    metric: str
    label: str
    lower_is_better: bool
    axis: str

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of one optimiser step, which the seed and the step alone decide."""
        ...

    def val_batches(self, size: int) -> list[Batch]:
        """Returns the validation set, the same at every call, in batches of `size` sequences."""
        ...

    def test_batches(self, size: int) -> dict[int, list[Batch]]:
        """Returns the sets that a trained model is tested on, by size (pairs, tokens), padded to one length."""
        ...

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        """Returns the metrics of a mean loss in nats and a mean accuracy."""
        ...

    def baselines(self) -> dict[str, float]:
        """Returns the metric of simple methods on the validation set."""
        ...

    def describe(self) -> dict[str, object]:
        """Returns facts about the data for config.json. `fingerprint` must agree when a run is resumed."""
        ...

    def summary(self) -> str:
        """Describes the data in one line."""
        ...

    def sample(self, model: models.LanguageModel) -> str:
        """Returns a text that shows how the trained model does on one sequence."""
        ...


@runtime_checkable
class SweptTask(Task, Protocol):
    """A task whose batches are drawn inside a compiled program.

    Attributes:
      data: arrays that the batches are drawn from, None without any. They are an argument of the program: as its
        constants they would be compiled.
      turns: kind of the batch of step 0, 1, ..., from the start again behind the last one. Kinds, from 0 on, may
        differ in their shapes; those of one shape share what is compiled of a step.
      size: of the largest training sequences, in the unit of `axis`.
    """

    data: PyTree
    turns: tuple[int, ...]
    size: int

    def bound(self, data: PyTree) -> "SweptTask":
        """Returns the task with its data in another place."""
        ...

    def kind_names(self) -> tuple[str, ...]:
        """Names of the kinds of batches; a validation set has batches of all kinds in turn."""
        ...

    def asked(self, kind: int) -> int | None:
        """Predictions that count in each row of a training batch of that kind, at most; None: all may."""
        ...

    def answers(self) -> float | None:
        """How many answers a guess chooses among, whose loss is the logarithm of it; None where it is not known."""
        ...

    def seeded_batch(self, seed: int | Array, step: int | Array, kind: int) -> Batch:
        """Draws the batch of one optimiser step of the run with that seed. Its kind is known to Python."""
        ...


def make_task(options: TaskOptions, batch_size: int, seed: int = 0) -> Task:
    """Makes the task of the options and reads its data.

    Args:
      options: of the task.
      batch_size: sequences of a training step.
      seed: of the training batches and of the validation and test sets.

    Raises:
      RunError: the data cannot be used.
    """
    return _TASKS[options.task](options, batch_size, seed)


def vocab_size(options: TaskOptions) -> int:
    """Returns how many tokens the task's model has, without reading a text that may be elsewhere by now."""
    return next_byte.BytesTask.vocab_size if options.task == "bytes" else make_task(options, 1).vocab_size


_TASKS: dict[str, type] = {
    "bytes": next_byte.BytesTask,
    "recall": generated.RecallTask,
    "needle": generated.NeedleTask,
    "sentence": generated.SentenceTask,
    "parity": generated.ParityTask,
    "permutation": generated.PermutationTask,
    "copy": generated.CopyTask,
}


def check_same_data(stored: dict[str, object], task: Task) -> None:
    """Raises RunError when the data of a run to resume has changed."""
    now = task.describe()
    if now["fingerprint"] != stored.get("fingerprint"):
        facts = json.dumps({k: v for k, v in now.items() if isinstance(v, str | int)})
        raise RunError(
            f"--resume: expected the data of the run ({stored.get('source')}), got other data: {facts}"
        )
