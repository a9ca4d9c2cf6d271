"""Tokens that are two rows of a chunk: a first half that decays and erases at a key of its own, and a second one that
erases and writes, and is read.

In every block of 16 rows the first halves of eight tokens come before their second halves. A thread that holds rows i
and i + 8 of an array then holds both halves of a token, and what decays is the same for both.

Arrays of tokens lie in memory without the rows that one half lacks. A bulk copy brings them to their places: to it an
array [B, T, H, K] is [B T / 8, 1, 8, H, K], of which it reads [4, 2, 8] rows from row -half of the axis of length 1.
What lies outside of an array it fills with zeros, and does not write.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.layouts import CHUNK, iota
from pallas_kernels.device.operations import Device

FIRST, SECOND = 0, 1

TOKENS = CHUNK // 2
"""Tokens of a chunk, of which T is a multiple."""

GROUP = 8
"""Tokens whose first halves, and then whose second ones, are next to each other."""


def grouped(x: jax.Array) -> jax.Array:
    """An array of tokens [B, T, H, K] as copies take it, [B T / 8, 1, 8, H, K]."""
    return x.reshape(-1, 1, GROUP, *x.shape[2:])


def rows(second: jax.Array) -> jax.Array:
    """The rows of tokens [B, T, ..] that are second halves, and zeros for the first ones. Outside of kernels."""
    y = second.reshape(second.shape[0], -1, 1, GROUP, *second.shape[2:])
    return jnp.concatenate([jnp.zeros_like(y), y], 2).reshape(second.shape[0], -1, *second.shape[2:])


def second(rows: jax.Array) -> jax.Array:
    """The second halves [B, T, ..] of rows. Outside of kernels."""
    y = rows.reshape(rows.shape[0], -1, 2, GROUP, *rows.shape[2:])[:, :, 1]
    return y.reshape(rows.shape[0], -1, *rows.shape[2:])


def of_tokens(x: jax.Array, B: int) -> jax.Array:
    """The inverse of `grouped` for B rows."""
    return x.reshape(B, -1, *x.shape[3:])


def copies(interpret: Any) -> int:
    """The copies that bring a tile's rows of one half. The interpreter takes one for each group."""
    return 1 if interpret is None else TOKENS // GROUP


def apart(smem: Any, names: Any) -> dict[str, tuple[Any, Any]]:
    """Tiles by name, [.., 64, columns] and as [.., 4, 2, 8, columns]. In smem they are the former alone."""
    tiles = {name: tuple(getattr(smem, name)) for name in names if getattr(smem, name) is not None}
    vars(smem).update({name: tile for name, (tile, _) in tiles.items()})
    return tiles


def or_zeros(dev: Device, x_t: jax.Array) -> jax.Array:
    """A transposed tile [rows, 64] of second halves, with zeros for the first ones.

    On the device the copy has put them there.
    """
    if not dev.interpreted:
        return x_t
    is_second = (iota((x_t.shape[0], CHUNK), 1) & GROUP) != 0
    return jnp.where(is_second, x_t, jnp.zeros((), x_t.dtype))


def load(
    dev: Device, source: Any, visit: jax.Array, head: Any, columns: Any, tile: list, half: int, loaded: Any
) -> None:
    """Starts the copies of a visit's rows of one half to a tile, of which both views are given."""
    for array, rows in _places(dev, source, visit, head, columns, tile, half):
        plgpu.copy_gmem_to_smem(array, rows, loaded)


def store(dev: Device, tile: list, target: Any, visit: jax.Array, head: Any, columns: Any, half: int) -> None:
    """Starts the copies of a tile's rows of one half to those of a visit."""
    for array, rows in _places(dev, target, visit, head, columns, tile, half):
        plgpu.copy_smem_to_gmem(rows, array)


def _places(dev: Device, array: Any, visit, head, columns, tile: list, half: int) -> list[tuple[Any, Any]]:
    """Rows in memory and in the tile. The interpreter knows no rows before an array, and no second view of a tile."""
    first, count = visit * (TOKENS // GROUP), TOKENS // GROUP
    if dev.interpreted:
        rows = [tile[0].at[pl.ds(GROUP * (2 * n + half), GROUP)] for n in range(count)]
        return [(array.at[first + n, 0, :, head, columns], x) for n, x in enumerate(rows)]
    before = jnp.minimum(visit, 0) - half  # not known while tracing, where it would be refused
    return [(array.at[pl.ds(first, count), pl.ds(before, 2), :, head, columns], tile[1])]
