"""Chunks of packed tokens that kernels read where they lie: where they begin, and which rows of a tile are theirs.

A chunk is loaded as 64 rows of the tokens [T, ..] from `first_token` on, of which `first_row` to `end_row` belong to
it. The others are of other sequences, or of none, and may hold anything: in shared memory they are made zeros.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.device.layouts import CHUNK, WGMMA
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.mma import MmaDevice

COLUMNS = 64
"""Columns of a tile that are in registers at once."""


class Spans(NamedTuple):
    """Where the tokens of each chunk lie, by chunk."""

    first_token: Int[Array, " chunks"]
    first_row: Int[Array, " chunks"]
    end_row: Int[Array, " chunks"]


def inputs(spans: Spans | None) -> dict[str, Any]:
    """The spans as inputs of a kernel, by name; None for tokens that are spread over whole chunks."""
    return dict.fromkeys(Spans._fields) if spans is None else spans._asdict()


def first_row_of(gmem: Any, chunk: Any) -> Any:
    """The row of the tokens' arrays at which a chunk's tile begins."""
    return chunk * CHUNK if gmem.first_token is None else gmem.first_token[chunk]


def is_partial(gmem: Any, chunk: Any) -> jax.Array:
    """Whether rows of a chunk's tiles are no tokens of it."""
    return gmem.end_row[chunk] - gmem.first_row[chunk] < CHUNK


def clear(dev: MmaDevice, gmem: Any, chunk: Any, *tiles: Any) -> None:
    """Makes the rows of tiles [C, columns] that are no tokens of a chunk zeros, by one warpgroup."""
    parts = [tile.at[:, pl.ds(c, COLUMNS)] for tile in tiles for c in range(0, tile.shape[1], COLUMNS)]
    for part in parts:
        x = plgpu.load(part, layout=WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, (CHUNK, COLUMNS), 0, layout=WGMMA)
        is_token = (row >= gmem.first_row[chunk]) & (row < gmem.end_row[chunk])
        store_any(part, jnp.where(is_token, x, jnp.zeros_like(x)))
    dev.commit()
