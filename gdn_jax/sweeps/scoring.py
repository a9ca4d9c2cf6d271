"""Sets that share their sequences are read once: of a text, the places up to each length count in the same rows."""

import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.training.slices import Slice
from gdn_jax.training.tasks.batch import Batch

Parts = Mapping[Slice, Float[np.ndarray, "B T"]]


class Scored(NamedTuple):
    """Sequences, the sets that they are in, and what counts in each of these.

    Fields:
      names: of the sets, and the slices of them.
      batch: the sequences; its weights are of no use.
      weights: of the predictions in each set; what is after that of the last name is zero.
      most: predictions of a row that count, at most, in all batches of this shape.
    """

    names: tuple[str | Slice, ...]
    batch: Batch
    weights: Float[Array, "S B T"] | np.ndarray
    most: int = 0

    def counts(self) -> Bool[np.ndarray, "B T"]:
        """Whether a prediction counts in any set."""
        return np.any(np.asarray(self.weights) != 0, axis=0)

    def places(self) -> Int[np.ndarray, "B N"] | None:
        """The first `most` places of each row, those that count before others; None where that is most of a row."""
        counts = self.counts()
        return (
            np.argsort(~counts, axis=1, stable=True)[:, : self.most]
            if 2 * self.most <= counts.shape[1]
            else None
        )


def shared(
    sets: dict[str, list[Batch]], parts: Callable[[str, Batch], Parts] = lambda name, batch: {}
) -> list[Scored]:
    """The batches of all sets, those with equal tokens and targets together.

    Batches of one shape have as many weights each, so that a program is compiled once for them.

    Args:
      sets: batches by name.
      parts: from a set's name and a batch of it to the slices of the batch, with their weights.
    """
    found: dict[bytes, tuple[Batch, list[tuple[str | Slice, np.ndarray]]]] = {}
    for name, batches in sets.items():
        before: dict[bytes, int] = {}  # a set that has a batch twice counts it twice
        for batch in batches:
            batch = jax.tree.map(np.asarray, batch)
            digest = hashlib.sha256(batch.tokens.tobytes() + batch.targets.tobytes()).digest()
            before[digest] = before.get(digest, 0) + 1
            key = digest + repr((batch.tokens.shape, before[digest])).encode()
            members = found.setdefault(key, (batch, []))[1]
            members += [(name, batch.weights), *parts(name, batch).items()]
    most: dict[tuple[int, ...], int] = {}
    for batch, members in found.values():
        most[batch.tokens.shape] = max(most.get(batch.tokens.shape, 0), len(members))
    scored = []
    for batch, members in found.values():
        weights = np.zeros((most[batch.tokens.shape], *batch.tokens.shape), np.float32)
        for i, (_, given) in enumerate(members):
            weights[i] = given
        scored.append(Scored(tuple(name for name, _ in members), batch, weights))
    asked: dict[tuple[int, ...], int] = {}
    for part in scored:
        shape = part.batch.tokens.shape
        asked[shape] = max(asked.get(shape, 0), int(np.max(np.sum(part.counts(), axis=1))))
    return [part._replace(most=asked[part.batch.tokens.shape]) for part in scored]
