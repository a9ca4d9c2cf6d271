"""Tasks as the training loop sees them: batches that the step alone decides, metrics, baselines, a sample."""

import copy
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from gdn_jax import models
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.options import TaskOptions


@runtime_checkable
class Text(Protocol):
    """Text of a task as tokens and back."""

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ...

    def encode(self, prompt: str) -> Int[Array, "1 T"]:
        """Returns the tokens of a prompt."""
        ...

    def decode(self, tokens: Int[Array, " T"]) -> str:
        """Returns the text of tokens up to one that ends it."""
        ...


class Task:
    """A data source with its own way of keeping score, whose training batches can be drawn inside a program too.

    Attributes:
      Options: class of its options.
      training: defaults of `gdn train`, by the names of the options, where they are not those of every run.
      vocab_size: tokens of the model.
      metric: key of the number that is drawn and printed; label: its name and unit in words.
      lower_is_better: direction of the metric.
      axis: unit of the sizes of the training and test sequences.
      size: of the largest training sequences.
      data: arrays that the batches are drawn from inside a program, None without any. They are an argument of the
        program: as its constants they would be compiled.
      turns: kind of the batch of step 0, 1, ..., from the start again after the last one. Kinds, from 0 on, may
        differ in their shapes; those of one shape share what is compiled of a step.
    """

    Options: ClassVar[type[TaskOptions]]
    training: ClassVar[dict[str, Any]] = {}
    vocab_size: int
    metric: str
    label: str
    lower_is_better: bool
    axis: str
    size: int
    data: PyTree = None
    turns: tuple[int, ...] = (0,)

    def __init__(self, options: Any, batch_size: int, seed: int):
        raise NotImplementedError

    @classmethod
    def vocabulary(cls, options: Any) -> int:
        """Returns how many tokens the model has, without reading a text that may be elsewhere by now."""
        return cls(options, 1, 0).vocab_size

    @classmethod
    def text(cls, options: Any) -> Text | None:
        """Returns the text of the tokens; None where they stand for none."""
        return None

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of one optimiser step, which the seed and the step alone decide."""
        raise NotImplementedError

    def seeded_batch(self, seed: int | Array, step: int | Array, kind: int = 0) -> Batch:
        """Draws the batch of one optimiser step of the run with that seed; both may be traced, the kind may not."""
        raise NotImplementedError

    def val_batches(self, size: int) -> list[Batch]:
        """Returns the validation set, the same at every call, in batches of `size` sequences."""
        raise NotImplementedError

    def test_batches(self, size: int) -> dict[int, list[Batch]]:
        """Returns the sets that a trained model is tested on, by size (pairs, tokens), padded to one length."""
        raise NotImplementedError

    def slices(self, batch: Batch, size: int) -> dict[str, Bool[np.ndarray, "S B T"]]:
        """Splits what counts in a test batch of a size; returns where each slice lies, by what it is split by."""
        return {}

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        """Returns the metrics of a mean loss in nats and a mean accuracy."""
        raise NotImplementedError

    def baselines(self) -> dict[str, float]:
        """Returns the metric of simple methods on the validation set."""
        raise NotImplementedError

    def describe(self) -> dict[str, object]:
        """Returns facts about the data for config.json. `fingerprint` must agree when a run is resumed."""
        raise NotImplementedError

    def summary(self) -> str:
        """Describes the data in one line."""
        raise NotImplementedError

    def sample(self, model: models.LanguageModel) -> str:
        """Returns a text that shows how the trained model does on one sequence."""
        raise NotImplementedError

    def bound(self, data: PyTree) -> "Task":
        """Returns the task with its data in another place."""
        other = copy.copy(self)
        other.data = data
        return other

    def kind_names(self) -> tuple[str, ...]:
        """Names of the kinds of batches; a validation set has batches of all kinds in turn."""
        return ("all",)

    def asked(self, kind: int) -> int | None:
        """Predictions that count in each row of a training batch of that kind, at most; None: all may."""
        return None

    def answers(self) -> float | None:
        """How many answers a guess chooses among, whose loss is the logarithm of it; None where it is not known."""
        return None
