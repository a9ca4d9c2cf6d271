"""The stages of `layer.dense_stream`, which says what they compute, and how their work is cut."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.grid_barrier import most_ctas
from pallas_kernels.device.lanes import WARP, WARPS, lane_layout, load
from pallas_kernels.device.launch import grid_index
from pallas_kernels.device.memory import store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.tile_ring import Slots

ROWS = WARPS
"""Rows of a tile of the branches: a warp has one."""

SLICE = WARP * WARPS
"""Numbers of h of a CTA at most: a thread has one."""

TILE = 5120
"""Numbers of a tile of the branches at most: a warpgroup has them in registers."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut, not what is computed."""

    ctas: int
    slices: int
    """CTAs that have a slice, a multiple of all warps of a CTA."""
    warpgroups: int = 4
    slots: int = 0
    """Tiles of the branches of a warpgroup in shared memory; 0: those that fit."""
    down_slots: int = 0
    """Tiles of the projection down of a warpgroup in shared memory; 0: those that fit."""

    @classmethod
    def of(cls, ctas: int) -> "Config":
        """So many CTAs, as many of them with a slice as can have one."""
        return cls(ctas, ctas // (cls.warpgroups * WARPS) * cls.warpgroups * WARPS)

    @classmethod
    def default(cls) -> "Config":
        """All multiprocessors of the device."""
        return cls.of(most_ctas())


class Sizes(NamedTuple):
    """Static sizes of a call."""

    D: int
    F: int
    warps: int
    """Warps of a CTA: a row lies in as many pieces, because a bulk copy takes at most 256 numbers of a dimension."""
    slices: int

    @property
    def own(self) -> int:
        """Numbers of h of a CTA."""
        return pl.cdiv(self.F, self.slices)

    @property
    def groups(self) -> int:
        """Tiles one below the other of a branch."""
        return pl.cdiv(self.own, ROWS)

    @property
    def width(self) -> int:
        """Numbers of a piece of a row."""
        return self.D // self.warps

    @property
    def pieces(self) -> int:
        """Pieces of a row in a tile of the branches."""
        return next(
            n for n in (self.warps, self.warps // 2, self.warps // 4) if ROWS * n * self.width <= TILE
        )

    @property
    def chunks(self) -> int:
        """Tiles that a row lies in."""
        return self.warps // self.pieces

    @property
    def down_width(self) -> int:
        """Numbers of a piece of a row of W: a multiple of a warpgroup's threads."""
        return 256 if self.D // (self.warps // WARPS) % 256 == 0 else 128

    @property
    def down_rows(self) -> int:
        """Rows of a tile of W."""
        return 8 if self.own % 8 == 0 else ROWS

    @property
    def down_tiles(self) -> int:
        """Tiles of W of a warpgroup."""
        return pl.cdiv(self.own, self.down_rows)

    def columns(self, ctas: int) -> int:
        """Columns of z that a CTA adds up: few, where a warpgroup's share of the parts is whole layouts of them."""
        share = self.slices // (self.warps // WARPS)
        return next(n for n in (8, 16, 32) if self.D // n <= ctas and share % (WARPS * (WARP // n)) == 0)


class Slice:
    """The part of the inner width of a CTA."""

    def __init__(self, sizes: Sizes) -> None:
        self.own, self.start = sizes.own, grid_index() * sizes.own
        self.first = jnp.minimum(self.start, sizes.F - self.own)
        """The last slice begins earlier; its first numbers of h, which the slice before has too, are 0."""
        self.is_some = (self.start < sizes.F) & (grid_index() < sizes.slices)

    def row(self, group: Any, rows: int) -> Any:
        """First row of the CTA's group-th tile of so many rows; the last one begins earlier, too."""
        return self.first + jnp.minimum(group * rows, self.own - rows)


class Row:
    """The norm of the stream, of which each warp of every CTA makes a part."""

    def __init__(self, gmem: Any, smem: Any, eps: float, wg: Any, meet: Callable[[], None]) -> None:
        self.gmem, self.smem, self.eps, self.meet = gmem, smem, eps, meet
        self.own = pl.ds(wg * WARPS, WARPS)

    def load(self) -> tuple[list[jax.Array], jax.Array]:
        """Asks for all that is needed."""
        gmem, own = self.gmem, self.own
        parts = [] if gmem.y is None else [gmem.y.at[n, own] for n in range(gmem.y.shape[0])]
        return [r.load_whole(part) for part in (gmem.x.at[own], *parts)], r.load_whole(gmem.w.at[own])

    def make(self, loaded: tuple[list[jax.Array], jax.Array]) -> None:
        """Writes v to shared memory; the first CTA writes s."""
        (parts, w), gmem, smem, own = loaded, self.gmem, self.smem, self.own
        s = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
        store_any(smem.of_warps.at[own], r.row_sum(s * s))
        self.meet()
        square = functools.reduce(jnp.add, [smem.of_warps[n] for n in range(smem.v.shape[0])])
        scale = lax.rsqrt(square / smem.v.size + self.eps)
        store_any(smem.v.at[own], s * w * scale)
        self.meet()
        if gmem.s is not None:
            pl.when(grid_index() == 0)(lambda: store_any(gmem.s.at[own], s.astype(gmem.s.dtype)))


class Branches:
    """Tiles of A and then of B, rows of the CTA's slice."""

    def __init__(self, gmem: Any, smem: Any, sizes: Sizes, warpgroups: int, wg: Any, own: Slice) -> None:
        self.gmem, self.smem, self.sizes, self.own = gmem, smem, sizes, own
        self.ring = Slots(smem.tiles, smem.full, wg, warpgroups, self._copy)
        self.end = jnp.where(own.is_some, self.ring.before(2 * sizes.groups * sizes.chunks), 0)
        self.layout = lane_layout(WARP, next(n for n in (8, 4, 2, 1) if sizes.width % (WARP * n) == 0))

    def _place(self, i: Any) -> tuple[Any, Any, Any]:
        """Branch, group of rows and chunk of columns of tile i: neighbours in memory one after the other."""
        chunk, group = (op(i, jnp.int32(self.sizes.chunks)) for op in (lax.rem, lax.div))
        branch = lax.div(group, jnp.int32(self.sizes.groups))
        return branch, group - branch * self.sizes.groups, chunk

    def _copy(self, i: Any, slot: Any, barrier: Any) -> None:
        branch, group, chunk = self._place(i)
        rows, n = pl.ds(branch * self.sizes.F + self.own.row(group, ROWS), ROWS), self.sizes.pieces
        plgpu.copy_gmem_to_smem(self.gmem.gate_up.at[rows, pl.ds(chunk * n, n)], slot, barrier)

    def begin(self) -> None:
        """Starts the first copies."""
        self.ring.fill(jnp.int32(0), self.end)

    def add(self, then: Callable[[], None]) -> None:
        """Multiplies the tiles; `then` is called when the last copy of this warpgroup has been started."""
        ring, smem, sizes = self.ring, self.smem, self.sizes
        turn, shape = jnp.maximum(0, self.end - ring.slots), (ROWS, sizes.width)

        def multiply(n: Any, _: None) -> None:
            pl.when(n == turn)(then)
            branch, group, chunk = self._place(ring.number(n))
            tile = ring.wait(n)
            total = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.layout)
            for p in range(sizes.pieces):
                v = load(smem.v.at[chunk * sizes.pieces + p], self.layout.reduce(0))
                v = plgpu.layout_cast(lax.broadcast_in_dim(v, shape, [1]), self.layout)
                total = total + load(tile.at[:, p], self.layout).astype(jnp.float32) * v
            sums = jnp.sum(total, axis=1)
            ring.follow(n, self.end)
            store_any(smem.parts.at[branch, chunk, pl.ds(group * ROWS, ROWS)], sums)

        lax.fori_loop(0, self.end, multiply, None)
        pl.when(self.end == 0)(then)


def _over_threads(width: int) -> Any:
    """Layout of rows over all threads of a warpgroup, which have neighbouring columns."""
    piece = width // (WARPS * WARP)
    tiles = ((1, WARPS * WARP * piece), (WARP * piece,), (piece,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


class Down:
    """The rows of W of the CTA's slice, some columns to each warpgroup, and the sum of all CTAs."""

    def __init__(self, gmem: Any, smem: Any, sizes: Sizes, warpgroups: int, wg: Any, own: Slice) -> None:
        self.gmem, self.smem, self.sizes, self.wg, self.own = gmem, smem, sizes, wg, own
        self.warpgroups, self.rows, self.width = warpgroups, sizes.down_rows, sizes.down_width
        self.pieces = sizes.D // warpgroups // self.width
        self.ring = Slots(smem.down_tiles, smem.down_full, wg, warpgroups, self._copy)
        self.end = jnp.where(own.is_some, jnp.int32(sizes.down_tiles), 0)
        self.layout = _over_threads(self.width)

    def _copy(self, i: Any, slot: Any, barrier: Any) -> None:
        rows = pl.ds(self.own.row(lax.div(i, jnp.int32(self.warpgroups)), self.rows), self.rows)
        columns = pl.ds(self.wg * self.pieces, self.pieces)
        plgpu.copy_gmem_to_smem(self.gmem.down.at[rows, columns], slot, barrier)

    def begin(self) -> None:
        """Starts the first copies."""
        self.ring.fill(jnp.int32(0), self.end)

    def make_h(self) -> None:
        """Writes the CTA's numbers of h to shared memory, for each warpgroup by itself."""
        layout, smem, own, sizes = (
            plgpu.Layout.WG_STRIDED((SLICE,), vec_size=1),
            self.smem,
            self.own,
            self.sizes,
        )
        gate, up = (
            functools.reduce(jnp.add, [load(smem.parts.at[b, c], layout) for c in range(sizes.chunks)])
            for b in range(2)
        )
        h = gate / (1.0 + jnp.exp(-gate)) * up
        at, rest = plgpu.broadcasted_iota(jnp.int32, (SLICE,), 0, layout=layout), own.own % ROWS
        if rest:  # the last tile begins with rows that the one before has too
            last = (sizes.groups - 1) * ROWS
            h = jnp.where((at >= last) & (at < last + ROWS - rest), 0.0, h)
            at = jnp.where(at >= last, at - (ROWS - rest), at)
        if sizes.F % own.own:  # and so does the last slice
            h = jnp.where(at < own.start - own.first, 0.0, h)
        store_any(smem.h.at[self.wg], h)
        plgpu.commit_smem()

    def add(self) -> None:
        """Multiplies the tiles, and writes the CTA's part of z."""
        ring, layout, shape = self.ring, self.layout, (self.rows, self.width)

        def multiply(n: Any, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            h = load(self.smem.h.at[self.wg, pl.ds(n * self.rows, self.rows)], layout.reduce(1))
            tile, made = ring.wait(n), []
            h = plgpu.layout_cast(lax.broadcast_in_dim(h, shape, [0]), layout)
            for p, total in enumerate(totals):
                products = load(tile.at[:, p], layout).astype(jnp.float32) * h
                made.append(functools.reduce(jnp.add, [products[i : i + 1] for i in range(self.rows)], total))
            ring.follow(n, self.end)
            return tuple(made)

        zeros = plgpu.layout_cast(jnp.zeros((1, self.width), jnp.float32), layout)
        totals = lax.fori_loop(0, self.end, multiply, (zeros,) * self.pieces)

        @pl.when(grid_index() < self.sizes.slices)
        def _():
            for p, total in enumerate(totals):
                store_any(self.gmem.part.at[pl.ds(grid_index(), 1), self.wg * self.pieces + p], total)

    def total(self, ctas: int, meet: Callable[[], None]) -> None:
        """Adds up some columns of all parts."""
        sizes, columns, sums = self.sizes, self.sizes.columns(ctas), self.smem.sums
        layout, each, step = lane_layout(columns, 1), sizes.slices // self.warpgroups, sums.shape[1]
        shares = sizes.D // columns
        first = jnp.minimum(grid_index(), shares - 1) * columns
        piece, own = lax.div(first, jnp.int32(self.width)), pl.ds(first, columns)
        of_piece = pl.ds(first - piece * self.width, columns)
        parts = load(self.gmem.seen_part.at[pl.ds(self.wg * each, each), piece, of_piece], layout)
        store_any(
            sums.at[self.wg], functools.reduce(jnp.add, [parts[i : i + step] for i in range(0, each, step)])
        )
        meet()

        @pl.when((self.wg == 0) & (grid_index() < shares))
        def _():
            rows = [sums.at[w, i] for w in range(self.warpgroups) for i in range(step)]
            z = functools.reduce(jnp.add, [load(row, layout.reduce(0)) for row in rows])
            store_any(self.gmem.z.at[0, own], z)
