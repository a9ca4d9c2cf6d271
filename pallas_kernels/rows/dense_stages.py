"""The stages of `rows.dense_stream`, which says what they compute, and how their work is cut."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import generations
from pallas_kernels.device.grid_barrier import most_ctas
from pallas_kernels.device.lanes import WARP, WARPS, lane_layout, load, spread
from pallas_kernels.device.launch import grid_index
from pallas_kernels.device.layouts import round_up
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.operations import Device
from pallas_kernels.rows.ring import Slots
from pallas_kernels.rows.weights import BLOCK, WIDEST, Whole

SLICE = WARP * WARPS
"""Numbers of h of a CTA are kept in multiples of it: a thread has as many of them as there are multiples."""

LONGEST = 2 * SLICE - 2 * WARPS
"""Numbers of h of a CTA at most."""

COLUMNS = (8, 16, 32, 64)
"""Columns of z that a CTA may add up."""

PIECES = 7
"""Pieces of a row in a tile at most: a thread has their part of v in registers."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut, not what is computed."""

    ctas: int
    slices: int
    """CTAs that have a slice, a multiple of all warps of a CTA."""
    warpgroups: int = 4
    slots: int = 0
    """Tiles of a warpgroup in shared memory; 0: those that fit."""

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
    warpgroups: int
    slices: int
    weights: Whole = Whole()

    @property
    def own(self) -> int:
        """Numbers of h of a CTA."""
        return round_up(pl.cdiv(self.F, self.slices), self.weights.unit)

    @property
    def rows(self) -> int:
        """Rows of a tile: as many in every warp."""
        return self.weights.rows(self.F, self.own)

    @property
    def room(self) -> int:
        """Numbers of h that a CTA has room for."""
        return round_up(self.own + self.rows, SLICE)

    @property
    def groups(self) -> int:
        """Tiles one below the other of a CTA's slice of a matrix."""
        return pl.cdiv(self.own, self.rows)

    @property
    def chunks(self) -> int:
        """Tiles that a row lies in: a divisor of the warpgroups, so that a warpgroup has one chunk of all its tiles;
        0 where there is none."""
        pieces = self.D // WIDEST
        found = (n for n in range(1, self.warpgroups + 1) if self.warpgroups % n == 0 and pieces % n == 0)
        return next((n for n in found if pieces // n <= PIECES), 0)

    @property
    def pieces(self) -> int:
        """Pieces of a row in a tile."""
        return self.D // WIDEST // self.chunks

    @property
    def tiles(self) -> int:
        """Tiles of a CTA of each of the three matrices."""
        return self.groups * self.chunks

    def columns(self, ctas: int) -> int:
        """Columns of z that a CTA adds up: few, where a warpgroup's share of the parts is whole layouts of them."""
        share = self.slices // self.warpgroups
        return next(n for n in COLUMNS if self.D // n <= ctas and share % rows_of_columns(n) == 0)


def rows_of_columns(columns: int) -> int:
    """Rows of so many columns that a warpgroup takes at once, as `_of_columns` lays them."""
    return WARPS * (WARP // min(columns, WARP))


def _of_columns(columns: int) -> Any:
    """Layout of rows of so few columns."""
    lanes = min(columns, WARP)
    return lane_layout(lanes, columns // lanes)


class Slice:
    """The part of the inner width of a CTA."""

    def __init__(self, sizes: Sizes) -> None:
        self.own, self.rows, self.start = sizes.own, sizes.rows, grid_index() * sizes.own
        self.first = jnp.minimum(self.start, sizes.F - self.own)
        """The last slice begins earlier; its first numbers of h, which the slice before has too, are 0."""
        self.is_some = (self.start < sizes.F) & (grid_index() < sizes.slices)

    def row(self, group: Any) -> Any:
        """First row of the CTA's group-th tile; the last one begins earlier, too."""
        return self.first + jnp.minimum(group * self.rows, self.own - self.rows)


def _over_threads() -> Any:
    """Layout of rows of a piece over all threads of a warpgroup, which have neighbouring columns."""
    each = WIDEST // (WARPS * WARP)
    tiles = ((1, WIDEST), (WARP * each,), (each,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


class Tiles:
    """A warpgroup's tiles of the rows of A, B and W of the CTA's slice, in this order, and what is made of them."""

    def __init__(self, gmem: Any, smem: Any, sizes: Sizes, wg: Any, own: Slice, dev: Device) -> None:
        self.gmem, self.smem, self.sizes, self.own, self.wg, self.dev = gmem, smem, sizes, own, wg, dev
        self.weights = sizes.weights
        self.ring = Slots(smem.tiles, smem.full, wg, sizes.warpgroups, self._copy)
        self.chunk = lax.rem(wg, jnp.int32(sizes.chunks))
        self.turn, self.end = (jnp.where(own.is_some, self.ring.before(n * sizes.tiles), 0) for n in (2, 3))
        """Its first tile of W, and the one after its last."""

    def _place(self, n: Any) -> tuple[Any, Any]:
        """Matrix and group of rows of this warpgroup's tile n: chunks of a row one after the other."""
        chunked = lax.div(self.ring.number(n), jnp.int32(self.sizes.chunks))
        matrix = lax.div(chunked, jnp.int32(self.sizes.groups))
        return matrix, chunked - matrix * self.sizes.groups

    def _copy(self, i: Any, slot: Any, barrier: Any) -> None:
        matrix, group = self._place(lax.div(i, jnp.int32(self.sizes.warpgroups)))
        row, columns = self.own.row(group), pl.ds(self.chunk * self.sizes.pieces, self.sizes.pieces)

        def start(source: Any, row: Any) -> None:
            generations.copy(source.at[pl.ds(row, self.sizes.rows), columns], slot, barrier)

        pl.when(matrix < 2)(lambda: start(self.gmem.gate_up, matrix * self.sizes.F + row))
        pl.when(matrix == 2)(lambda: start(self.gmem.down, row))

    def _scales(self, matrix: Any, group: Any, p: int) -> Any:
        """A reference to the scales of a tile's p-th piece."""
        edge = (lax.div(self.own.first, jnp.int32(BLOCK)) + 1) * BLOCK
        of_rows = 2 * matrix + (self.own.row(group) >= edge).astype(jnp.int32)
        first, count = self.chunk * self.sizes.pieces + p, WIDEST // BLOCK
        return self.smem.scales.at[of_rows, pl.ds(first * count, count)]

    def begin(self) -> None:
        """Starts the first copies."""
        self.ring.fill(jnp.int32(0), self.end)

    def multiply_branches(self) -> None:
        """Products of A and B and the row, of each chunk by itself."""
        ring, smem, pieces, rows = self.ring, self.smem, self.sizes.pieces, self.sizes.rows
        first = self.chunk * pieces

        def multiply(row: list[jax.Array], n: Any, _: None) -> None:
            matrix, group = self._place(n)

            def scales(i: int, layout: Any) -> jax.Array:
                return load(self._scales(matrix, group, i), layout)

            products = self.weights.products(self.dev, ring.wait(n), row, scales)
            ring.follow(n, self.end)
            sums = self.weights.sums(products)
            store_any(smem.parts.at[matrix, self.chunk, pl.ds(group * rows, rows)], sums)

        places = [pl.ds((first + p) * WIDEST, WIDEST) for p in range(pieces)]
        row = self.weights.row(self.dev, [smem.v.at[place] for place in places])
        lax.fori_loop(0, self.turn, functools.partial(multiply, row), None)

    def make_h(self, scale: jax.Array) -> None:
        """Writes the CTA's numbers of h to shared memory, for each warpgroup by itself.

        Args:
          scale: the factor of the norm.
        """
        room, smem = self.sizes.room, self.smem
        layout = plgpu.Layout.WG_STRIDED((room,), vec_size=1)
        own, sizes = self.own, self.sizes
        gate, up = (
            functools.reduce(jnp.add, [load(smem.parts.at[b, c], layout) for c in range(sizes.chunks)])
            * scale
            for b in range(2)
        )
        h = gate / (1.0 + jnp.exp(-gate)) * up
        at, rest = plgpu.broadcasted_iota(jnp.int32, (room,), 0, layout=layout), own.own % own.rows
        if rest:  # the last tile begins with rows that the one before has too
            last = (sizes.groups - 1) * own.rows
            h = jnp.where((at >= last) & (at < last + own.rows - rest), 0.0, h)
            at = jnp.where(at >= last, at - (own.rows - rest), at)
        if sizes.F % own.own:  # and so does the last slice
            h = jnp.where(at < own.start - own.first, 0.0, h)
        store_any(smem.h.at[self.wg], h)
        generations.commit()

    def multiply_down(self) -> None:
        """Products of h and the warpgroup's rows of W, added up in shared memory."""
        ring, layout, rows = self.ring, _over_threads(), self.sizes.rows
        at = plgpu.broadcasted_iota(jnp.int32, (1, WIDEST), 1, layout=layout)

        def scale(group: Any, p: int) -> jax.Array:
            low, high = (self._scales(2, group, p)[n] for n in range(2))
            return jnp.where(at < BLOCK, low, high)

        def multiply(n: Any, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            _, group = self._place(n)
            h = load(self.smem.h.at[self.wg, pl.ds(group * rows, rows)], layout.reduce(1))
            tile, made = ring.wait(n), []
            h = spread(h, (rows, WIDEST), 0, layout)
            for p, total in enumerate(totals):
                products = load(tile.at[:, p], layout).astype(jnp.float32) * h
                parts = [products[i : i + 1] for i in range(rows)]
                made.append(self.weights.add(total, parts, functools.partial(scale, group, p)))
            ring.follow(n, self.end)
            return tuple(made)

        zeros = plgpu.layout_cast(jnp.zeros((1, WIDEST), jnp.float32), layout)
        totals = lax.fori_loop(self.turn, self.end, multiply, (zeros,) * self.sizes.pieces)
        for p, total in enumerate(totals):
            store_any(self.smem.z.at[self.wg, pl.ds(p, 1)], total)

    def write_part(self) -> None:
        """The CTA's part of z, of which each warpgroup writes some pieces."""
        sizes, layout = self.sizes, _over_threads()
        sharing = range(0, sizes.warpgroups, sizes.chunks)
        for p in range(sizes.pieces):

            @pl.when(lax.div(self.wg, jnp.int32(sizes.chunks)) == p % len(sharing))
            def _(p=p):
                some = [load(self.smem.z.at[self.chunk + n, pl.ds(p, 1)], layout) for n in sharing]
                place = self.gmem.part.at[pl.ds(grid_index(), 1), self.chunk * sizes.pieces + p]
                store_any(place, functools.reduce(jnp.add, some))


def add_parts(gmem: Any, smem: Any, sizes: Sizes, ctas: int, wg: Any, meet: Callable[[], None]) -> None:
    """Adds up some columns of the parts of z of all CTAs."""
    columns, sums = sizes.columns(ctas), smem.sums
    layout, each, step = _of_columns(columns), sizes.slices // sizes.warpgroups, sums.shape[1]
    shares = sizes.D // columns
    first = jnp.minimum(grid_index(), shares - 1) * columns
    piece, own = lax.div(first, jnp.int32(WIDEST)), pl.ds(first, columns)
    of_piece = pl.ds(first - piece * WIDEST, columns)
    parts = load(gmem.seen_part.at[pl.ds(wg * each, each), piece, of_piece], layout)
    store_any(sums.at[wg], functools.reduce(jnp.add, [parts[i : i + step] for i in range(0, each, step)]))
    meet()

    @pl.when((wg == 0) & (grid_index() < shares))
    def _():
        rows = [sums.at[w, i] for w in range(sizes.warpgroups) for i in range(step)]
        store_any(gmem.z.at[0, own], functools.reduce(jnp.add, [load(row, layout.reduce(0)) for row in rows]))
