"""Tiles of matrices that come to shared memory in turn, and are multiplied by one row as they come.

    sum_i x_i W_i,   over the rows i of some tiles

A CTA's warpgroups take its tiles in turn, each through slots of its own. Tiles come by bulk copies, the first of
which may be on their way long before the row is there. Threads multiply and add.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import generations
from pallas_kernels.device.lanes import WARP, WARPS, lane_layout, load, spread


class Slots:
    """The slots of a warpgroup for tiles, which it numbers one behind the other."""

    def __init__(
        self, tiles: Any, full: Any, wg: Any, warpgroups: int, copy: Callable[[Any, Any, Any], None]
    ) -> None:
        """Takes the slots of all warpgroups.

        Args:
          tiles: [warpgroups n, ..] in shared memory.
          full: as many barriers, of one arrival.
          wg: number of the warpgroup.
          warpgroups: how many.
          copy: copy(i, slot, barrier) starts the copy of the CTA's tile i.
        """
        self.tiles, self.full, self.wg, self.warpgroups, self.copy = tiles, full, wg, warpgroups, copy
        self.slots = tiles.shape[0] // warpgroups

    def before(self, end: Any) -> Any:
        """How many tiles of this warpgroup there are before the CTA's tile `end`."""
        return lax.div(end + (self.warpgroups - 1) - self.wg, jnp.int32(self.warpgroups))

    def number(self, n: Any) -> Any:
        """The CTA's number of this warpgroup's tile n."""
        return n * self.warpgroups + self.wg

    def _slot(self, n: Any) -> Any:
        return self.wg * self.slots + lax.rem(n, jnp.int32(self.slots))

    def start(self, n: Any) -> None:
        """Starts the copy of this warpgroup's tile n; its slot is free."""
        slot = self._slot(n)
        self.copy(self.number(n), self.tiles.at[slot], self.full.at[slot])

    def fill(self, first: Any, end: Any) -> None:
        """Starts as many copies from tile `first` on as there are slots, up to tile `end`."""
        lax.fori_loop(first, jnp.minimum(end, first + self.slots), lambda n, _: self.start(n), None)
        generations.skip(lambda: jnp.maximum(first + self.slots - end, 0))

    def wait(self, n: Any) -> Any:
        """The slot of this warpgroup's tile n, when it is there."""
        slot = self._slot(n)
        generations.arrived(self.full.at[slot], self.slots - 1)
        return self.tiles.at[slot]

    def follow(self, n: Any, last: Any) -> None:
        """Starts the copy of the tile after n in its slot, if it is before `last`; tile n is in registers."""

        @pl.when(n + self.slots < last)
        def _():
            generations.commit()  # a barrier: every thread has read the tile
            self.start(n + self.slots)

        generations.skip(lambda: n + self.slots >= last)


class TileRing(Slots):
    """Slots for tiles [depth, columns], depth a multiple of `WARPS`, that rows are multiplied by."""

    def __init__(
        self, tiles: Any, full: Any, wg: Any, warpgroups: int, copy: Callable[[Any, Any, Any], None]
    ) -> None:
        """Takes the slots of all warpgroups, see `Slots`."""
        super().__init__(tiles, full, wg, warpgroups, copy)
        self.depth, self.columns = tiles.shape[1:]
        self.layout = lane_layout(WARP, self.columns // WARP)  # rows lie below each other over the warps

    def zeros(self) -> jax.Array:
        """A sum of nothing: of each warp, [WARPS, columns]."""
        return plgpu.layout_cast(jnp.zeros((WARPS, self.columns), jnp.float32), self.layout)

    def add(
        self,
        acc: jax.Array,
        first: Any,
        end: Any,
        last: Any,
        row: Callable[[Any], Any],
        behind: Callable[[Any], None] = lambda n: None,
    ) -> jax.Array:
        """acc and the products of tiles first to end - 1.

        Args:
          acc: sums of each warp.
          first, end: tiles of this warpgroup. Copies of `first` and of those that fit behind it have been started.
          last: the tile before which copies go on.
          row: row(i) is the part of the row, in shared memory, that the CTA's tile i is multiplied by.
          behind: called before each tile.
        """

        def multiply(n, acc):
            behind(n)
            slot = self._slot(n)
            x = load(row(self.number(n)), self.layout.reduce(1))
            plgpu.barrier_wait(self.full.at[slot])
            x = spread(x, (self.depth, self.columns), 0, self.layout)
            products = load(self.tiles.at[slot], self.layout).astype(jnp.float32) * x
            for i in range(0, self.depth, WARPS):
                acc = acc + products[i : i + WARPS]
            self.follow(n, last)
            return acc

        return lax.fori_loop(first, end, multiply, acc)

    def total(self, sums: Any) -> jax.Array:
        """The sum of what all warps of all warpgroups have: sums [warpgroups, WARPS, columns] in shared memory."""
        rows = [sums.at[w, warp] for w in range(self.warpgroups) for warp in range(WARPS)]
        total = load(rows[0], self.layout.reduce(0))
        for row in rows[1:]:
            total = total + load(row, self.layout.reduce(0))
        return total
