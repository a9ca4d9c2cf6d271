"""Tokens that are two rows of a chunk: a first half that decays and erases at a key of its own, and a second one that
erases and writes, and is read.

In every block of 16 rows the first halves of eight tokens come before their second halves. A thread that holds rows i
and i + 8 of an array then holds both halves of a token, and what decays is the same for both.

Tiles of tokens have the 32 tokens of a chunk, as they lie in memory; a thread joins them to rows in registers, where
the rows that a half lacks are zeros.
"""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.layouts import CHUNK

TOKENS = CHUNK // 2
"""Tokens of a chunk, of which T is a multiple."""

GROUP = 8
"""Tokens whose first halves, and then whose second ones, are next to each other."""

COPIES = TOKENS // GROUP
"""Copies of `load`."""


def tokens_of(of_halves: bool) -> int:
    """Tokens of a chunk, where they may be two rows."""
    return TOKENS if of_halves else CHUNK


def second(rows: jax.Array) -> jax.Array:
    """The second halves [B, T, ..] of rows. Outside of kernels."""
    y = rows.reshape(rows.shape[0], -1, 2, GROUP, *rows.shape[2:])[:, :, 1]
    return y.reshape(rows.shape[0], -1, *rows.shape[2:])


def load(source: Any, first: Any, tile: Any, loaded: Any) -> None:
    """Starts the copies of a chunk's tokens to the second halves of the rows of a tile [64, columns].

    Args:
      source: tokens [T, columns] in memory.
      first: the chunk's first one.
    """
    for n in range(COPIES):
        rows = tile.at[pl.ds(GROUP * (2 * n + 1), GROUP)]
        plgpu.copy_gmem_to_smem(source.at[pl.ds(first + GROUP * n, GROUP)], rows, loaded)
