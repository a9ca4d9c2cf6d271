"""The first stage of a layer of the delta rule: a head's channels from the residual stream, made by its CTAs.

    s = x + y;   c = s (mean(s^2) + eps)^(-1/2) w W^T;   q, k and v of c pass through the convolution

A warpgroup has its tiles of rows of W for q, k and v. Their copies are on their way while the row is made, of which
each warp makes a part. The tiles of decay and gate are claimed, by those that get memory fast more than by others.
Sums are taken of s w, and scaled at the end: nobody waits for the norm. One warpgroup of a head makes the raw input
of the strength too, one row of W.

References (GMEM): x [D / CHUNK, CHUNK], y [P, ..] of x's shape or None, w of x's shape, float32; weight
[F, pieces, WIDEST], whose rows lie as `Places` says; filters [C, taps], bias [C] or None; in place conv
[1, C, taps - 1]; s of x's shape, or None; channels [F] float32; words [H, LINE], see
`delta_layer`. Shared memory: `memory`.

| barrier | who arrives                              | who waits                          |
|---------|------------------------------------------|------------------------------------|
| arrived | the copy of a tile of a warpgroup        | that warpgroup                     |
| asked   | the copy of the strength's row           | the warpgroup that makes it        |
| made    | each warpgroup, with its part of the row | all of the CTA                     |

Numerics: float32; what passes through the convolution is rounded to W's dtype before it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.claims import Claims, Turns
from pallas_kernels.device.lanes import WARP, WARPS, lane_layout, load, vector_layout
from pallas_kernels.device.launch import grid_index, warpgroup_index
from pallas_kernels.device.memory import Barriers, Buffer, Memory, store_any
from pallas_kernels.device.operations import Device
from pallas_kernels.layer import rows as r
from pallas_kernels.token.heads import WARPGROUPS, Places, Share

WIDEST = 256
"""Columns of a piece of W: of a dimension of what is copied at once."""

FILTERED = 3
"""Kinds of channels that pass through the convolution: q, k and v."""

ROWS = WARPS
"""Rows of a tile."""

STAGES = 2
"""Tiles of a warpgroup in shared memory."""

CHUNK = 128
"""Numbers of the stream that a warp adds up."""

CHUNKS = WARPS * CHUNK
"""Numbers of a warpgroup."""


def memory(D: int, dtype: Any) -> Memory:
    """Shared memory of a CTA."""
    pieces = D // WIDEST
    return {
        "tiles": Buffer((WARPGROUPS, STAGES, ROWS, pieces, WIDEST), dtype),
        "row": Buffer((D,)),
        "squares": Buffer((D // CHUNK,)),
        "strength": Buffer((pieces, WIDEST), dtype),
        "claimed": Buffer((2 * WARPGROUPS,), jnp.int32),
        "arrived": Barriers(arrivals=1, count=WARPGROUPS * STAGES),
        "asked": Barriers(arrivals=1),
        "made": Barriers(arrivals=WARPGROUPS),
    }


class Projections:
    """The stage, as a warpgroup knows it: its rows of each kind of channels."""

    def __init__(
        self, gmem: Any, smem: Any, share: Share, places: Places, width: int, eps: float, dev: Device
    ) -> None:
        """Takes where the channels lie, of heads of a width, and what is added under the root of the norm."""
        self.gmem, self.smem, self.places, self.eps, self.dev = gmem, smem, places, eps, dev
        self.wg, self.pieces, self.layout = (
            warpgroup_index(),
            smem.tiles.shape[3],
            lane_layout(WARP, WIDEST // WARP),
        )
        self.first, self.width, claimers = share.head * width, width, share.ctas * WARPGROUPS
        number, self.claimable = share.rank * WARPGROUPS + self.wg, 2 * width // ROWS
        each = width // ROWS // claimers
        tiles = [number * each + i for i in range(each)]
        self.own = [self._rows(place, i) for place in places[:FILTERED] for i in tiles]
        """Rows of W of this warpgroup, those that it need not claim."""
        self.claims: Claims | Turns = (
            Turns(number, claimers)
            if dev.interpreted
            else Claims(gmem.words.at[share.head, pl.ds(1, 1)], smem.claimed)
        )
        self.strength = places.strength + share.head
        self.makes_strength = (share.rank == 0) & (self.wg == WARPGROUPS - 1)

    def _rows(self, place: Any, tile: Any) -> Any:
        """Rows of W of a tile of the head's channels of a kind."""
        return pl.ds(place + self.first + tile * ROWS, ROWS)

    def _claimed(self, number: jax.Array) -> Any:
        """The same of a tile of decay and gate that is claimed."""
        tiles = self.width // ROWS
        place = jnp.where(number < tiles, self.places.decay, self.places.gate)
        return self._rows(place, jnp.where(number < tiles, number, number - tiles))

    def _slot(self, n: Any) -> Any:
        return n % STAGES if isinstance(n, int) else lax.rem(n, jnp.int32(STAGES))

    def _start(self, rows: Any, n: Any) -> None:
        """Starts the copy of a tile to the n-th slot in turn."""
        slot = self.smem.tiles.at[self.wg, self._slot(n)]
        plgpu.copy_gmem_to_smem(self.gmem.weight.at[rows], slot, self._barrier(n))

    def _barrier(self, n: Any) -> Any:
        return self.smem.arrived.at[self.wg * STAGES + self._slot(n)]

    def _piece(self, i: int) -> Any:
        return self.smem.row.at[pl.ds(i * WIDEST, WIDEST)]

    def _past(self, own: Any) -> list[jax.Array]:
        """States, filters and bias of a tile's channels."""
        gmem, layout = self.gmem, self.layout.reduce(1)
        taps = gmem.filters.shape[1]
        refs = [gmem.conv.at[0, own, j] for j in range(taps - 1)]
        refs += [gmem.filters.at[own, j] for j in range(taps)]
        refs += [] if gmem.bias is None else [gmem.bias.at[own]]
        return [load(ref, layout) for ref in refs]

    def _start_all(self) -> None:
        for n in range(STAGES):
            self._start(self.own[n], n)

    def _make_part(self) -> None:
        """This warpgroup's part of the row: s w, and sums of squares of s."""
        gmem, smem, own = self.gmem, self.smem, pl.ds(self.wg * WARPS, WARPS)
        refs = [gmem.w.at[own], gmem.x.at[own]]
        refs += [] if gmem.y is None else [gmem.y.at[n, own] for n in range(gmem.y.shape[0])]
        w, *parts = [r.load_whole(ref) for ref in refs]
        self._start_all()  # what the row is made of would come behind these copies
        s = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
        self.dev.store_flat(smem.row.at[pl.ds(self.wg * CHUNKS, CHUNKS)], s * w)
        store_any(smem.squares.at[own], r.row_sum(s * s))
        if gmem.s is not None:
            pl.when(grid_index() == 0)(lambda: store_any(gmem.s.at[own], s.astype(gmem.s.dtype)))

    def _row(self) -> tuple[jax.Array, list[jax.Array]]:
        """The factor of the norm, and s w in pieces, when all have made their parts."""
        smem = self.smem
        plgpu.barrier_wait(smem.made)
        squares = functools.reduce(jnp.add, [smem.squares[i] for i in range(smem.squares.shape[0])])
        scale = lax.rsqrt(squares / smem.row.shape[0] + self.eps)
        return scale, [load(self._piece(i), self.layout.reduce(0)) for i in range(self.pieces)]

    def _product(self, n: Any, row: list[jax.Array], scale: jax.Array) -> jax.Array:
        """Results of the rows of the tile in the n-th slot in turn."""
        plgpu.barrier_wait(self._barrier(n))
        tile, total = self.smem.tiles.at[self.wg, self._slot(n)], None
        for i, v in enumerate(row):
            x = load(tile.at[:, i], self.layout)
            v = plgpu.layout_cast(lax.broadcast_in_dim(v, x.shape, [1]), self.layout)
            part = x.astype(jnp.float32) * v
            total = part if total is None else total + part
        assert total is not None
        return jnp.sum(total, axis=1) * scale

    def _filter(self, own: Any, x: jax.Array, past: list[jax.Array]) -> jax.Array:
        """The convolution of a tile's channels, as in `decode.conv_update`."""
        gmem, taps = self.gmem, self.gmem.filters.shape[1]
        past = [y.astype(jnp.float32) for y in past]
        inputs = [*past[: taps - 1], x.astype(gmem.weight.dtype).astype(jnp.float32)]
        total = sum(s * w for s, w in zip(inputs, past[taps - 1 :], strict=False))
        total = total if gmem.bias is None else total + past[-1]
        for j, s in enumerate(inputs[1:]):
            store_any(gmem.conv.at[0, own, j], s.astype(gmem.conv.dtype))
        return total / (1.0 + jnp.exp(-total))

    def _make_strength(self, scale: jax.Array) -> None:
        """The raw input of the head's strength."""
        smem, layout = self.smem, vector_layout(WIDEST)
        plgpu.barrier_wait(smem.asked)
        total = None
        for i in range(self.pieces):
            part = load(smem.strength.at[i], layout).astype(jnp.float32) * load(self._piece(i), layout)
            total = part if total is None else total + part
        assert total is not None
        self.gmem.channels[self.strength] = jnp.sum(total) * scale

    def run(self, early: Callable[[], None], later: Callable[[], None]) -> None:
        """Makes the channels.

        Args:
          early: called when the first copies are on their way.
          later: called when all are that this warpgroup has claimed.
        """
        makers = self.smem.row.shape[0] // CHUNKS
        pl.when(self.wg < makers)(self._make_part)
        pl.when(self.wg >= makers)(self._start_all)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem.made)
        strength = self.gmem.weight.at[self.strength]
        pl.when(self.makes_strength)(
            lambda: plgpu.copy_gmem_to_smem(strength, self.smem.strength, self.smem.asked)
        )
        past = [self._past(rows) for rows in self.own]
        early()
        scale, row = self._row()
        own = len(self.own)

        def follow(i: Any, asked: Any) -> jax.Array:
            """Takes the i-th tile that was asked for, and starts its copy, where there is one."""
            self.claims.keep(i, asked)
            plgpu.commit_smem()  # a barrier: every thread of the warpgroup has read the tile before
            number = self.claims.take(i, asked)
            pl.when(number < self.claimable)(lambda: self._start(self._claimed(number), own + i))
            return number

        numbers = []
        for n, rows in enumerate(self.own):
            i = n - (own - STAGES)
            asked = None if i < 0 else self.claims.ask(i)
            x = self._product(n, row, scale)
            if asked is None:
                plgpu.commit_smem()  # likewise
                self._start(self.own[n + STAGES], n + STAGES)
            else:
                numbers.append(follow(i, asked))
            store_any(self.gmem.channels.at[rows], self._filter(rows, x, past[n]))
            if n == 1:
                pl.when(self.makes_strength)(lambda: self._make_strength(scale))

        def one(carry):
            i, number, *following = carry
            pl.when(following[0] >= self.claimable)(later)
            asked = self.claims.ask(i + STAGES)
            x = self._product(own + i, row, scale)
            last = follow(i + STAGES, asked)
            store_any(self.gmem.channels.at[self._claimed(number)], x)
            return i + 1, *following, last

        pl.when(numbers[0] >= self.claimable)(later)
        lax.while_loop(lambda carry: carry[1] < self.claimable, one, (jnp.int32(0), *numbers))
