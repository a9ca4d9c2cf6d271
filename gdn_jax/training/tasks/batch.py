"""Batches of sequences, on which a model is trained and scored."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class Batch(NamedTuple):
    """Sequences and what to predict after each token; a weight of 0 leaves a prediction out."""

    tokens: Int[Array, "B T"] | np.ndarray
    targets: Int[Array, "B T"] | np.ndarray
    weights: Float[Array, "B T"] | np.ndarray

    def pad(self, length: int) -> "Batch":
        """Returns the batch with tokens appended that do not count: a causal model gives the same numbers."""
        more = length - self.tokens.shape[1]
        return Batch(*(jnp.pad(x, ((0, 0), (0, more))) for x in self))

    def cut(self, rows: int) -> list["Batch"]:
        """Returns the sequences in batches of equal size, up to a largest size."""
        size = next(n for n in range(rows, 0, -1) if self.tokens.shape[0] % n == 0)
        return [Batch(*(x[i : i + size] for x in self)) for i in range(0, self.tokens.shape[0], size)]
