"""Scores of slices of a test: of recall, by the place of a pair as written and by the order of the questions."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.task import Task

Table = dict[str, dict[str, list[float | None]]]


class Slice(NamedTuple):
    """A part of what counts in a test.

    Fields:
      size: of the test.
      by: what the test is split by, see `Task.slices`.
      number: of the slice, from 0 on.
    """

    size: int
    by: str
    number: int


def split(task: Task, size: int, batch: Batch) -> dict[Slice, Float[np.ndarray, "B T"]]:
    """Returns the weights of each slice of a batch of the test of a size; none where the task does not split it."""
    weights = np.asarray(batch.weights)
    return {
        Slice(size, by, i): weights * counts
        for by, parts in task.slices(batch, size).items()
        for i, counts in enumerate(parts)
    }


def table(scores: Mapping[Slice, float]) -> Table:
    """Returns the scores of slices in their order, by what they are split by and by size, as files have them.

    None stands for a number that is not finite: nothing counts in the slice, or the run has diverged.
    """
    found: Table = {}
    for (size, by, _), value in scores.items():
        of_size = found.setdefault(by, {}).setdefault(str(size), [])
        of_size.append(round(value, 4) if math.isfinite(value) else None)
    return found
