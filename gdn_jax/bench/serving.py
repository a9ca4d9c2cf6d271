"""Options that the benchmarks of serving share."""

import dataclasses
from typing import Annotated, Literal

import ml_dtypes
import numpy as np

from gdn_jax.bench.benchmark import Benchmark, Width
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive

BOUNDS = {"bfloat16": 1e-2, "float32": 1e-5}
"""Largest error of an output, by the dtype of the inputs."""
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
BYTE_BOUNDS = {"int8": 1e-2, "float8_e4m3fn": 4e-2}
"""Largest error of an output from states that were written in 8 bits once: one and a half times that of a rounding.
Worked out, of 128 normal numbers in a row: 0.0064 (the largest of them is 2.8, a step 1 / 127 of it) and 0.026."""


@dataclasses.dataclass(frozen=True)
class ServingBenchmark(Benchmark):
    """Options that the benchmarks of serving share."""

    repeats: Annotated[int, Positive] = 20
    """Timed calls; of deferred writes, timed periods."""
    pools: Annotated[tuple[Literal["float32", "bfloat16"], ...], Distinct] = ("float32", "bfloat16")
    """dtypes of the pool of states."""
    heads: Annotated[tuple[int, int], Positive] = (16, 32)
    """Key heads (and query heads) and value heads."""
    width: Annotated[int, Width] = 128
    """Width K = V of a head."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of q, k, v, of the gates' inputs, and of the keys and values in a ring."""
    state_layout: Literal["kv", "vk"] = "kv"
    """Layout of the states."""

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        if self.heads[1] % self.heads[0]:
            fail("heads", "a number of value heads that the key heads divide", " ".join(map(str, self.heads)))
