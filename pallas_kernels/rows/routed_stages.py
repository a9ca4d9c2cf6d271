"""The stages of `rows.routed_stream`, which says what they compute, and how their work is cut."""

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
from pallas_kernels.device.lanes import WARPS, load
from pallas_kernels.device.launch import grid_index
from pallas_kernels.device.memory import store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.rows import stream
from pallas_kernels.rows.ring import TileRing

DEPTH = 32
"""Numbers of the sum in a tile of the branches."""

COLUMNS = 128
"""Columns of a tile of the branches, and numbers of h that belong to one expert."""

DOWN_COLUMNS = 64
"""Columns of a tile of the projection down: fewer CTAs then share a sum, and its reader has fewer parts to add up."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut, not what is computed."""

    ctas: int
    warpgroups: int = 4
    slots: int = 2
    """Tiles of the branches of a warpgroup in shared memory."""
    down_slots: int = 2
    """Tiles of the projection down of a warpgroup in shared memory, where there is room."""

    @classmethod
    def default(cls) -> "Config":
        """All multiprocessors of the device."""
        return cls(most_ctas())


class Share(NamedTuple):
    """How the tiles of some matrices, side by side, are shared out: so many to a CTA."""

    items: int
    """Tiles in a row."""
    steps: int
    """Tiles in a column."""
    each: int
    """Tiles of a CTA, one below the other and then in the next column of tiles."""
    parts: int
    """CTAs that share a column of tiles, at most."""
    spans: int
    """Columns of tiles that a CTA has a part of, at most."""

    @classmethod
    def of(cls, items: int, steps: int, ctas: int) -> "Share":
        each = pl.cdiv(items * steps, ctas)
        parts = max((i * steps + steps - 1) // each - i * steps // each + 1 for i in range(items))
        ends = (min(first + each, items * steps) - 1 for first in range(0, items * steps, each))
        firsts = range(0, items * steps, each)
        spans = max(end // steps - first // steps + 1 for first, end in zip(firsts, ends, strict=True))
        return cls(items, steps, each, parts, spans)


class Sizes(NamedTuple):
    """Static sizes of a call."""

    D: int
    F: int
    k: int
    S: int
    E: int
    scores: int
    """Rows of the router: E, and one more where the shared expert has a gate."""

    @property
    def experts(self) -> tuple[int, int, int]:
        """Inner width of an expert, experts of a token, and inner width of the shared one."""
        return self.F, self.k, self.S

    def branches(self, config: Config) -> tuple[Share, Share]:
        """Shares of the branches of the shared expert and of the chosen ones."""
        steps, (shared, chosen) = self.D // DEPTH, (2 * n // COLUMNS for n in (self.S, self.k * self.F))
        return Share.of(shared, steps, config.ctas), Share.of(chosen, steps, config.ctas)

    @property
    def blocks(self) -> int:
        """Blocks of `COLUMNS` numbers of h."""
        return (self.k * self.F + self.S) // COLUMNS

    def down(self, config: Config) -> tuple[int, int]:
        """Blocks of h of a CTA of the projection down, and CTAs that share a tile of columns."""
        each = pl.cdiv(self.blocks, config.ctas // (self.D // DOWN_COLUMNS))
        return each, pl.cdiv(self.blocks, each)


CHUNKS = (128, 256)
"""Numbers of the stream that a warp makes, where several warpgroups make the row."""


def makers(D: int, warpgroups: int) -> int:
    """Warpgroups that make a row of D together: the more, the fewer loads wait for each other."""
    found = (divmod(D, WARPS * chunk) for chunk in CHUNKS)
    return next((n for n, rest in found if not rest and n <= warpgroups), 1)


class Router:
    """The norm of the stream, by some warpgroups of every CTA, and its products with some rows of the router."""

    def __init__(self, gmem: Any, smem: Any, barrier: Any, eps: float, ctas: int, wg: Any) -> None:
        self.gmem, self.smem, self.barrier, self.eps, self.wg = gmem, smem, barrier, eps, wg
        self.makers, self.own = smem.v.shape[0] // WARPS, pl.ds(wg * WARPS, WARPS)
        """How many warpgroups, and this one's part of the row."""
        self.rows = range(smem.of_warps.shape[0] - 1)
        self.experts = [grid_index() + n * ctas for n in self.rows]

    def load(self) -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
        """Asks for all that is needed."""
        gmem, own, last = self.gmem, self.own, self.gmem.router.shape[0] - 1
        parts = [] if gmem.y is None else [gmem.y.at[n, own] for n in range(gmem.y.shape[0])]
        rows = [r.load_whole(gmem.router.at[jnp.minimum(e, last), own]) for e in self.experts]
        return [r.load_whole(part) for part in (gmem.x.at[own], *parts)], r.load_whole(gmem.w.at[own]), rows

    def make(self, loaded: tuple[list[jax.Array], jax.Array, list[jax.Array]]) -> None:
        """Publishes scores, and writes v to shared memory; the first CTA writes s."""
        (parts, w, rows), gmem, smem, own = loaded, self.gmem, self.smem, self.own
        s = stream.total(parts)
        n = s * w
        sums = [r.row_sum(s * s), *(r.row_sum(n * row.astype(jnp.float32)) for row in rows)]
        for i, of_warps in enumerate(sums):
            store_any(smem.of_warps.at[i, own], of_warps)
        plgpu.commit_smem()
        if self.makers > 1:
            plgpu.barrier_arrive(smem.summed)
            plgpu.barrier_wait(smem.summed)
        square, *products = (
            functools.reduce(jnp.add, [smem.of_warps[i, n] for n in range(self.makers * WARPS)])
            for i in range(len(sums))
        )
        scale = lax.rsqrt(square / smem.v.size + self.eps)
        for e, product in zip(self.experts, products, strict=True):
            publishes = (e < gmem.router.shape[0]) & (self.wg == 0)
            pl.when(publishes)(lambda e=e, x=product * scale: self.barrier.publish(e, x))
        store_any(smem.v.at[own], n * scale)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.v_made)
        if gmem.s is not None:
            pl.when(grid_index() == 0)(lambda: store_any(gmem.s.at[own], s.astype(gmem.s.dtype)))

    def forget(self) -> None:
        """Takes the scores back."""
        for e in self.experts:
            pl.when(e < self.gmem.router.shape[0])(lambda e=e: self.barrier.withdraw(e))


class Tiles:
    """A CTA's share of the tiles of some matrices."""

    def __init__(self, share: Share) -> None:
        self.share, self.first = share, grid_index() * share.each
        self.count = jnp.clip(share.items * share.steps - self.first, 0, share.each)
        rest = share.steps - lax.rem(self.first, jnp.int32(share.steps))
        self.bounds = [
            jnp.int32(0),
            *(jnp.minimum(self.count, rest + i * share.steps) for i in range(share.spans)),
        ]

    def item(self, i: Any) -> Any:
        """The column of tiles of tile i."""
        return lax.div(self.first + i, jnp.int32(self.share.steps))

    def place(self, i: Any) -> Any:
        """Where tile i begins in the row."""
        return lax.rem(self.first + i, jnp.int32(self.share.steps)) * DEPTH

    def store(self, target: Any, span: int, sums: jax.Array) -> None:
        """Writes the sums of a span to target [parts, columns]. The last part is followed by zeros for those that no
        CTA has."""
        share, end = self.share, self.bounds[span + 1]

        @pl.when(self.bounds[span] < end)
        def _():
            item = self.item(end - 1)
            own = pl.ds(item * COLUMNS, COLUMNS)
            part = grid_index() - lax.div(item * share.steps, jnp.int32(share.each))
            store_any(target.at[part, own], sums)
            is_last = self.place(end - 1) == (share.steps - 1) * DEPTH
            behind = jnp.where(is_last, part + 1, share.parts)
            zeros = sums * 0.0
            lax.fori_loop(behind, share.parts, lambda n, _: store_any(target.at[n, own], zeros), None)


class Branches:
    """Both branches: first the tiles of the shared expert, and then those of the chosen ones."""

    def __init__(self, gmem: Any, smem: Any, sizes: Sizes, config: Config, wg: Any) -> None:
        self.gmem, self.smem, self.sizes, self.wg = gmem, smem, sizes, wg
        self.shared, self.chosen = (Tiles(share) for share in sizes.branches(config))
        self.ring = TileRing(smem.tiles, smem.full, wg, config.warpgroups, self._copy)
        self.end = self.ring.before(self.shared.count)
        self.last = self.ring.before(self.shared.count + self.chosen.count)

    def _copy(self, i: Any, slot: Any, barrier: Any) -> None:
        gmem, (F, k, S), own = self.gmem, self.sizes.experts, i - self.shared.count

        @pl.when(own < 0)
        def _():
            column, rows = self.shared.item(i) * COLUMNS, pl.ds(self.shared.place(i), DEPTH)
            for ref, start in ((gmem.gate, 0), (gmem.up, S)):

                @pl.when((column >= start) & (column < start + S))
                def _(ref=ref, start=start):
                    plgpu.copy_gmem_to_smem(ref.at[rows, pl.ds(column - start, COLUMNS)], slot, barrier)

        @pl.when(own >= 0)
        def _():
            column, rows = self.chosen.item(own) * COLUMNS, pl.ds(self.chosen.place(own), DEPTH)
            j = jnp.minimum(lax.div(column, jnp.int32(2 * F)), k - 1)
            columns = pl.ds(column - j * (2 * F), COLUMNS)
            expert = self.smem.chosen[j]
            plgpu.copy_gmem_to_smem(gmem.gate_up.at[expert, rows, columns], slot, barrier)

    def begin(self) -> None:
        """Starts the copies that need no choice."""
        self.ring.fill(jnp.int32(0), self.end)

    def add_shared(self) -> None:
        """Multiplies the tiles of the shared expert."""
        self._add(self.shared, jnp.int32(0), self.end, 0, lambda n: None)

    def add_chosen(self, behind: Callable[[], None]) -> None:
        """Multiplies the tiles of the chosen experts, once they are known.

        Args:
          behind: called by every warpgroup when all its copies have been started.
        """
        self.ring.fill(self.end, self.last)
        turn = jnp.maximum(self.end, self.last - self.ring.slots)
        self._add(
            self.chosen,
            self.shared.count,
            self.last,
            self.shared.share.spans,
            lambda n: pl.when(n == turn)(behind),
        )
        pl.when(self.end >= self.last)(behind)

    def _add(self, tiles: Tiles, offset: Any, last: Any, span: int, behind: Callable[[Any], None]) -> None:
        def row(i):
            place = tiles.place(i - offset)
            width = self.smem.v.shape[1]
            warp = lax.div(place, jnp.int32(width))
            return self.smem.v.at[warp, pl.ds(place - warp * width, DEPTH)]

        for n in range(tiles.share.spans):
            first, end = (self.ring.before(offset + tiles.bounds[m]) for m in (n, n + 1))
            acc = self.ring.add(self.ring.zeros(), first, end, last, row, behind)
            store_any(self.smem.sums.at[span + n, self.wg], acc)

    def store(self, warpgroups: int) -> None:
        """Adds up what all warpgroups have, and writes it."""
        spans = [(self.shared, self.gmem.g, n) for n in range(self.shared.share.spans)]
        spans += [(self.chosen, self.gmem.h, n) for n in range(self.chosen.share.spans)]
        for number, (tiles, target, n) in enumerate(spans):

            @pl.when(number % warpgroups == self.wg)
            def _(number=number, tiles=tiles, target=target, n=n):
                tiles.store(target, n, self.ring.total(self.smem.sums.at[number]))


class Down:
    """The projection down: a CTA has some blocks of h, and some columns. A tile has the rows of a block, so that a
    warpgroup multiplies by what it makes itself."""

    def __init__(self, gmem: Any, smem: Any, sizes: Sizes, config: Config, wg: Any) -> None:
        self.gmem, self.smem, self.sizes, self.wg = gmem, smem, sizes, wg
        self.warpgroups, (self.each, parts) = config.warpgroups, sizes.down(config)
        item, self.part = lax.div(grid_index(), jnp.int32(parts)), lax.rem(grid_index(), jnp.int32(parts))
        self.first, items = self.part * self.each, sizes.D // DOWN_COLUMNS
        self.is_known = self.first >= sizes.k * sizes.F // COLUMNS
        self.count = jnp.where(item < items, jnp.clip(sizes.blocks - self.first, 0, self.each), 0)
        self.columns = pl.ds(jnp.minimum(item, items - 1) * DOWN_COLUMNS, DOWN_COLUMNS)
        self.ring = TileRing(smem.down_tiles, smem.down_full, wg, config.warpgroups, self._copy)
        self.end = self.ring.before(self.count)

    def _copy(self, i: Any, slot: Any, barrier: Any) -> None:
        gmem, (F, k, _), columns = self.gmem, self.sizes.experts, self.columns
        number = (self.first + i) * COLUMNS
        j = jnp.minimum(lax.div(number, jnp.int32(F)), k)
        rows = pl.ds(number - j * F, COLUMNS)

        @pl.when(j < k)
        def _():
            expert = self.smem.chosen[jnp.minimum(j, k - 1)]
            plgpu.copy_gmem_to_smem(gmem.down.at[expert, rows, columns], slot, barrier)

        @pl.when(j == k)
        def _():
            plgpu.copy_gmem_to_smem(gmem.shared_down.at[rows, columns], slot, barrier)

    def begin_known(self) -> None:
        """Starts the first copies of a CTA that has blocks of the shared expert alone."""
        pl.when(self.is_known)(lambda: self.ring.fill(jnp.int32(0), self.end))

    def begin(self) -> None:
        """Starts those of the others, once the experts are known."""
        pl.when(jnp.logical_not(self.is_known))(lambda: self.ring.fill(jnp.int32(0), self.end))

    def make_row(self) -> None:
        """Writes this warpgroup's blocks of h, times their weights, to shared memory."""
        (F, k, S), gmem = self.sizes.experts, self.gmem
        layout = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=1)
        parts, of_shared = gmem.seen_h.shape[0], gmem.seen_g.shape[0]

        def branches(block):
            """The expert of a block among those of the row, and its branches in parts."""
            number = block * COLUMNS
            j = jnp.minimum(lax.div(number, jnp.int32(F)), k)
            place = number - j * F

            def chosen():
                return [
                    load(gmem.seen_h.at[n, pl.ds(j * (2 * F) + branch * F + place, COLUMNS)], layout)
                    for branch in (0, 1)
                    for n in range(parts)
                ]

            def shared():
                def some(branch, n):
                    loaded = [
                        load(gmem.seen_g.at[m, pl.ds(branch * S + place, COLUMNS)], layout)
                        for m in range(n, of_shared, parts)
                    ]
                    zeros = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), layout)
                    return functools.reduce(jnp.add, loaded, zeros)

                return [some(branch, n) for branch in (0, 1) for n in range(parts)]

            return j, lax.cond(j < k, chosen, shared)

        own = [self.wg + n * self.warpgroups for n in range(pl.cdiv(self.each, self.warpgroups))]
        last = jnp.maximum(self.count - 1, 0)
        # All is asked for before any of it is used.
        loaded = [branches(self.first + jnp.minimum(i, last)) for i in own]
        for i, (j, numbers) in zip(own, loaded, strict=True):
            gate, up = (functools.reduce(jnp.add, x) for x in (numbers[:parts], numbers[parts:]))
            h = gate / (1.0 + jnp.exp(-gate)) * up * self.smem.weights[j]

            @pl.when(i < self.count)
            def _(i=i, h=h):
                store_any(self.smem.h.at[pl.ds(i * COLUMNS, COLUMNS)], h)

        plgpu.commit_smem()

    def add(self) -> None:
        """Multiplies the tiles."""
        acc = self.ring.add(
            self.ring.zeros(),
            jnp.int32(0),
            self.end,
            self.end,
            lambda i: self.smem.h.at[pl.ds(i * COLUMNS, COLUMNS)],
        )
        store_any(self.smem.sums.at[0, self.wg, :, pl.ds(0, DOWN_COLUMNS)], acc)

    def store(self) -> None:
        """Adds up what all warpgroups have, and writes it."""

        @pl.when((self.wg == 0) & (self.count > 0))
        def _():
            sums = self.smem.sums.at[0, :, :, pl.ds(0, DOWN_COLUMNS)]
            store_any(self.gmem.z.at[self.part, self.columns], self.ring.total(sums))
