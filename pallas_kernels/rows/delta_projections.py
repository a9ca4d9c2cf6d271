"""The first stage of a layer of the delta rule: a head's channels from the residual stream, made by its CTAs.

    s = x + y;   c = s (mean(s^2) + eps)^(-1/2) w W^T;   q, k and v of c pass through the convolution

A warpgroup has its own tiles of rows of W, among which are all that pass through the convolution, see `delta_plan`.
Their copies are on their way while the row is made, of which each warp makes a part. The others are claimed, by those
that get memory fast more than by others. Sums are taken of s w, and scaled at the end: nobody waits for the norm. A
CTA makes, by one warpgroup, at most one row that is no part of a tile: of the strengths, or of a head's decay.

References (GMEM): x, y, w and s of `stream`; weight
[F, pieces, WIDEST], whose rows lie as `Places` says; filters [C, taps], bias [C] or None; in place conv
[1, C, taps - 1]; channels [F] float32; words [H, LINE], see
`delta_layer`. Shared memory: `Room.memory`.

| barrier | who arrives                                            | who waits                      |
|---------|--------------------------------------------------------|--------------------------------|
| arrived | the copy of a tile of a warpgroup                      | that warpgroup                 |
| asked   | the copy of a row that is no tile, where there is room | the warpgroup that makes it    |
| made    | each warpgroup, with its part of the row               | all of the CTA                 |
| taken   | each warpgroup that has the row in registers, where    | the one that asks for the      |
|         | the state comes to the row's bytes                     | state                          |

Numerics: float32; what passes through the convolution is rounded to W's dtype before it.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.claims import Claims, Turns
from pallas_kernels.device.lanes import load, vector_layout
from pallas_kernels.device.launch import warpgroup_index
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.operations import Device
from pallas_kernels.layer import rows as r
from pallas_kernels.rows import stream
from pallas_kernels.rows.delta_heads import Head, Places, Share
from pallas_kernels.rows.delta_plan import Plan
from pallas_kernels.rows.delta_rooms import LAST, ROWS, STAGES, WARPGROUPS, WIDEST


class Own(NamedTuple):
    """A tile that its warpgroup need not claim."""

    number: Any
    """Its own among the tiles of the key head."""
    rows: Any
    """Its rows of W."""
    is_filtered: bool | jax.Array
    """Whether they pass through the convolution."""


class Alone:
    """In the place of the second stage, where the first one runs alone: it asks for nothing."""

    def ask_state(self, by: int = 0, after: Any = None) -> None:
        """See `Head.ask_state`."""

    def ask_rows(self, i: Any) -> None:
        """See `Head.ask_rows`."""


class Projections:
    """The stage, as a warpgroup knows it: its rows of each kind of channels."""

    def __init__(
        self, gmem: Any, smem: Any, share: Share, places: Places, plan: Plan, eps: float, dev: Device
    ) -> None:
        """Takes where the channels lie, how they are divided, and what is added under the root of the norm."""
        self.gmem, self.smem, self.places, self.eps, self.dev = gmem, smem, places, eps, dev
        self.plan, self.room, self.wg, self.pieces = plan, plan.room, warpgroup_index(), smem.tiles.shape[3]
        self.first, self.weights = share.key * plan.K, plan.weights
        self.number, self.claimable = share.rank * WARPGROUPS + self.wg, plan.claimable
        self.own = [self._own(i * plan.warpgroups) for i in range(plan.own)]
        self.claims: Claims | Turns = (
            Turns(self.number, plan.warpgroups)
            if dev.interpreted
            else Claims(gmem.words.at[share.key, pl.ds(1, 1)], smem.claimed)
        )
        singles = [getattr(places, name) + i for name in plan.decay.singles for i in range(plan.R)]
        self.single = _chosen(share.rank, enumerate(singles)) + share.key * plan.R
        """The channel of the row that is no part of a tile, of a CTA that makes one."""
        makes = functools.reduce(jnp.logical_or, [share.rank == i for i in range(len(singles))])
        self.makes_single = makes & (self.wg == LAST)

    def _own(self, begin: int) -> Own:
        """The tile of a turn that begins with a tile of the head."""
        end, filtered = begin + self.plan.warpgroups, self.plan.filtered
        known = True if end <= filtered else False if begin >= filtered else self.number < filtered - begin
        return Own(self.number + begin, self._rows(self.number, begin, end), known)

    def _rows(self, number: Any, begin: int, end: int) -> Any:
        """Rows of W of the head's tile begin + number, which is before the tile `end`."""
        kinds = [kind for kind in self.plan.kinds if kind.begin < end and kind.end > begin]
        starts = [kind.begin - begin for kind in kinds]
        place = _chosen(number, zip(starts, (getattr(self.places, kind.name) for kind in kinds), strict=True))
        first = _chosen(number, zip(starts, (self.first * kind.heads for kind in kinds), strict=True))
        tile = _chosen(number, ((start, number - start if start else number) for start in starts))
        return pl.ds(place + first + tile * ROWS, ROWS)

    def _claimed(self, number: jax.Array) -> Any:
        """The same of a tile that is claimed."""
        begin = self.plan.own * self.plan.warpgroups
        return self._rows(number, begin, begin + self.claimable)

    def row_of_single(self) -> Any:
        """The row of W that is no part of a tile, in pieces."""
        if self.gmem.narrow is None:
            return self.gmem.weight.at[self.single]
        return self.gmem.narrow.at[self.single - self.gmem.weight.shape[0]]

    def _slot(self, n: Any) -> Any:
        return n % STAGES if isinstance(n, int) else lax.rem(n, jnp.int32(STAGES))

    def _start(self, rows: Any, n: Any) -> None:
        """Starts the copy of a tile to the n-th slot in turn."""
        slot = self.smem.tiles.at[self.wg, self._slot(n)]
        plgpu.copy_gmem_to_smem(self.gmem.weight.at[rows], slot, self._barrier(n))

    def _barrier(self, n: Any) -> Any:
        return self.smem.arrived.at[self.wg * STAGES + self._slot(n)]

    def piece(self, i: int) -> Any:
        """A piece of s w in shared memory."""
        return self.room.row(self.smem).at[pl.ds(i * WIDEST, WIDEST)]

    def _past(self, own: Own) -> Sequence[jax.Array]:
        """States, filters and bias of a tile's channels; zeros of one that is not filtered."""
        if isinstance(own.is_filtered, bool):
            return self._read_past(own.rows) if own.is_filtered else ()
        return lax.cond(own.is_filtered, lambda: tuple(self._read_past(own.rows)), self._no_past)

    def _read_past(self, own: Any) -> list[jax.Array]:
        gmem, layout = self.gmem, self.weights.of_rows
        taps = gmem.filters.shape[1]
        refs = [gmem.conv.at[0, own, j] for j in range(taps - 1)]
        refs += [gmem.filters.at[own, j] for j in range(taps)]
        refs += [] if gmem.bias is None else [gmem.bias.at[own]]
        return [load(ref, layout) for ref in refs]

    def _no_past(self) -> tuple[jax.Array, ...]:
        gmem, layout = self.gmem, self.weights.of_rows
        taps = gmem.filters.shape[1]
        arrays = [gmem.conv] * (taps - 1) + [gmem.filters] * taps + [gmem.bias] * (gmem.bias is not None)
        return tuple(plgpu.layout_cast(jnp.zeros((ROWS,), x.dtype), layout) for x in arrays)

    def _start_all(self) -> None:
        for n in range(STAGES):
            self._start(self.own[n].rows, n)

    def _make_row(self) -> None:
        """s w, and sums of squares of s, of which each warpgroup makes a part, and the first copies."""
        smem, room = self.smem, self.room

        def keep(part: Any, lines: Any, s: jax.Array, w: jax.Array, asked: list[jax.Array]) -> None:
            self.dev.store_flat(room.row(smem).at[pl.ds(part * s.size, s.size)], s * w)
            store_any(room.squares(smem).at[lines], r.row_sum(s * s))
            self.weights.keep(self, lines, asked)

        ask = functools.partial(self.weights.ask, self)
        stream.make(self.gmem, self.wg, WARPGROUPS, ask, self._start_all, keep)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.made)

    def _scale(self) -> jax.Array:
        """The factor of the norm, when all have made their parts of the row."""
        plgpu.barrier_wait(self.smem.made)
        return stream.scale(self.room.squares(self.smem), self.plan.D, self.eps)

    def _product(self, n: Any, number: Any, row: list[jax.Array], scale: jax.Array) -> jax.Array:
        """Results of the rows of the tile in the n-th slot in turn, the number-th one of the head."""
        plgpu.barrier_wait(self._barrier(n))
        return self.weights.product(self, self.smem.tiles.at[self.wg, self._slot(n)], number, row) * scale

    def _keep(self, own: Own, x: jax.Array, past: Sequence[jax.Array]) -> None:
        """The channels of a tile of this warpgroup, through the convolution where they pass through it."""
        channels = self.gmem.channels.at[own.rows]
        _either(
            own.is_filtered,
            lambda: store_any(channels, self._filter(own.rows, x, past)),
            lambda: store_any(channels, x),
        )

    def _filter(self, own: Any, x: jax.Array, past: Sequence[jax.Array]) -> jax.Array:
        """The convolution of a tile's channels, as in `decode.conv_update`."""
        gmem, taps = self.gmem, self.gmem.filters.shape[1]
        past = [y.astype(jnp.float32) for y in past]
        inputs = [*past[: taps - 1], x.astype(self.plan.results).astype(jnp.float32)]
        total = sum(s * w for s, w in zip(inputs, past[taps - 1 :], strict=False))
        total = total if gmem.bias is None else total + past[-1]
        for j, s in enumerate(inputs[1:]):
            store_any(gmem.conv.at[0, own, j], s.astype(gmem.conv.dtype))
        return total / (1.0 + jnp.exp(-total))

    def _make_single(self, scale: jax.Array) -> None:
        """The channel of the row that is no part of a tile."""
        layout, total = vector_layout(WIDEST), None
        for i, x in enumerate(self.room.single(self, layout)):
            part = x.astype(jnp.float32) * load(self.piece(i), layout)
            total = part if total is None else total + part
        assert total is not None
        self.gmem.channels[self.single] = jnp.sum(total) * scale

    def run(self, then: Head | Alone) -> None:
        """Makes the channels.

        Args:
          then: the second stage, which asks for its state and its rows when the room says so.
        """
        room, plan = self.room, self.plan
        self._make_row()
        room.ask_single(self)
        known = [self._past(own) for own in self.own] if room.reads_ahead else None
        room.row_made(self, then)
        scale = self._scale()

        def single(tiles: int) -> None:
            """Makes the row that is no tile, when its turn is after this number of tiles."""
            if tiles == room.single_after:
                pl.when(self.makes_single)(lambda: self._make_single(scale))

        def follow(i: Any, asked: Any) -> jax.Array:
            """Takes the i-th tile that was asked for, and starts its copy, where there is one."""
            self.claims.keep(i, asked)
            plgpu.commit_smem()  # a barrier: every thread of the warpgroup has read the tile before
            number = self.claims.take(i, asked)
            pl.when(number < self.claimable)(lambda: self._start(self._claimed(number), plan.own + i))
            room.slot_free(then, number >= self.claimable, self._slot(plan.own + i))
            return number

        single(0)
        row = self.weights.row(self.dev, [self.piece(i) for i in range(self.pieces)])
        room.row_taken(self, then)
        if not self.claimable:
            room.all_asked(then, True)
        numbers = []
        for n, own in enumerate(self.own):
            i = n - (plan.own - STAGES)
            asked = self.claims.ask(i) if i >= 0 and self.claimable else None
            past = self._past(own) if known is None else known[n]  # on its way while the tile is
            x = self._product(n, own.number, row, scale)
            if asked is not None:
                numbers.append(follow(i, asked))
            else:
                plgpu.commit_smem()  # likewise
                if i < 0:
                    self._start(self.own[n + STAGES].rows, n + STAGES)
                else:
                    room.slot_free(then, True, self._slot(n))
            self._keep(own, x, past)
            single(n + 1)
        if not self.claimable:
            return

        def one(carry):
            i, number, *following = carry
            room.all_asked(then, following[0] >= self.claimable)
            asked = self.claims.ask(i + STAGES)
            x = self._product(plan.own + i, number + plan.own * plan.warpgroups, row, scale)
            last = follow(i + STAGES, asked)
            store_any(self.gmem.channels.at[self._claimed(number)], x)
            return i + 1, *following, last

        room.all_asked(then, numbers[0] >= self.claimable)
        lax.while_loop(lambda carry: carry[1] < self.claimable, one, (jnp.int32(0), *numbers))


def _chosen(number: Any, values: Iterable[tuple[int, Any]]) -> Any:
    """The value that holds for a number, of some with the number from which each does; the first one holds from 0."""
    (_, found), *others = values
    for begin, value in others:
        found = jnp.where(number < begin, found, value)
    return found


def _either(condition: bool | jax.Array, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Calls one of two functions; with a condition that is known when the kernel is made there is one alone."""
    if isinstance(condition, bool):
        (then if condition else otherwise)()
    else:
        pl.when(condition)(then)
        pl.when(~condition)(otherwise)
