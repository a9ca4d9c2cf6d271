"""Where the arrays of `delta_layer` lie in the shared memory of a CTA, and so when the second stage asks for its own.

A room is an object that both stages of the kernel hold. `APART` has memory for everything. `LENT` has less, so that
wide rows fit: arrays that are not needed at the same time have the same bytes.

| bytes of                    | with `APART`             | with `LENT`, one after the other                        |
|-----------------------------|--------------------------|---------------------------------------------------------|
| the slots of tiles of W_in  | tiles                    | tiles, and then, slot by slot, rows of W_o              |
| the state                   | the state from the start | s w and sums of squares, the state, o in its first row  |
| the row, o, the rows of W_o | themselves               | none                                                    |

The interpreter knows no view of an array's bytes as another array: there every array of `LENT` has its own memory.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.lanes import WARPS, load
from pallas_kernels.device.memory import REDUCTION_BYTES, Barriers, Buffer, Memory
from pallas_kernels.rows.stream import LINE
from pallas_kernels.rows.weights import WIDEST

WARPGROUPS = 4
"""Warpgroups of a CTA, which have a quarter of V and of the CTA's rows of W_o each."""

ROWS = WARPS
"""Rows of a tile of W_in."""

STAGES = 2
"""Tiles of a warpgroup in shared memory. A layer of 2560 codes takes 20.0 us with two, and 21.5 with four."""

CLAIMED = 2 * WARPGROUPS
"""Numbers of tiles that the warpgroups have claimed: two in turn of each."""

LAST = WARPGROUPS - 1
"""The warpgroup that makes a row of W_in that is no part of a tile."""


class Room:
    """A room where every array has its own memory: state and W_o come while the first stage works.

    The stages ask it: `stage` is the first one, `then` the second one, `plan` the `Plan` of both.
    """

    reduction_bytes: ClassVar[int] = REDUCTION_BYTES
    """Bytes that are set aside for reductions over more than a warp."""
    all_at_once: ClassVar[bool] = True
    """Whether all rows of W_o of a copy are multiplied at once; else as many as the weights' kind says."""
    reads_ahead: ClassVar[bool] = True
    """Whether a warpgroup reads what the convolution needs of all its tiles before the row is there; else of each
    tile while it waits for it: a wide row leaves no registers."""
    pieces: ClassVar[int] = 1
    """Copies in which the rows of W_o of a warpgroup come."""
    single_after: ClassVar[int] = STAGES
    """Tiles that a warpgroup makes before a row of W_in that is no part of a tile."""

    def fits(self, plan: Any) -> bool:
        """Whether what has the same bytes as something else is not larger."""
        return True

    def memory(self, plan: Any) -> dict[str, Any]:
        """Shared memory of both stages."""
        return {**self.first(plan), **self.second(plan)}

    def first(self, plan: Any) -> Memory:
        """The same of the first stage alone, interpreted."""
        return {
            "tiles": Buffer((WARPGROUPS, STAGES, ROWS, plan.D // WIDEST, WIDEST), plan.dtype),
            "row": Buffer((plan.D,)),
            "squares": Buffer((plan.D // LINE,)),
            "single": Buffer((plan.D // WIDEST, WIDEST), plan.results),
            "claimed": Buffer((CLAIMED,), jnp.int32),
            "arrived": Barriers(arrivals=1, count=WARPGROUPS * STAGES),
            "asked": Barriers(arrivals=1),
            "made": Barriers(arrivals=WARPGROUPS),
        }

    def second(self, plan: Any) -> Memory:
        """The same of the second stage alone, interpreted."""
        vectors = plan.decay.vectors
        return {
            "rows": Buffer((WARPGROUPS, plan.rows, plan.K), plan.dtype),
            "state": Buffer((plan.K, plan.K)),
            "vectors": Buffer((vectors, plan.K)) if vectors else None,
            "o": Buffer((plan.K,)),
            "full": Barriers(arrivals=1, count=WARPGROUPS),
            "stored": Barriers(arrivals=1),
            "known": Barriers(arrivals=WARPGROUPS) if vectors else None,
            "whole": Barriers(arrivals=WARPGROUPS),
        }

    def row(self, smem: Any) -> Any:
        """s w, [D] float32 at least."""
        return smem.row

    def squares(self, smem: Any) -> Any:
        """Sums of squares of the lines of s."""
        return smem.squares

    def o(self, smem: Any) -> Any:
        """The head's output, [V] float32."""
        return smem.o

    def rows_of_output(self, smem: Any, rows: int, wg: Any, i: Any) -> Any:
        """Rows of W_o of a warpgroup, [rows, V]: its i-th piece."""
        return smem.rows.at[wg]

    def arrived(self, smem: Any, wg: Any, i: Any) -> Any:
        """The barrier at which that piece arrives."""
        return smem.full.at[wg]

    def ask_single(self, stage: Any) -> None:
        """When the first copies are on their way: asks for the row that is no part of a tile."""
        single, smem = stage.row_of_single(), stage.smem
        pl.when(stage.makes_single)(lambda: plgpu.copy_gmem_to_smem(single, smem.single, smem.asked))

    def single(self, stage: Any, layout: Any) -> Iterable[jax.Array]:
        """Reads that row in pieces."""
        plgpu.barrier_wait(stage.smem.asked)
        for i in range(stage.pieces):
            yield load(stage.smem.single.at[i], layout)

    def row_made(self, stage: Any, then: Any) -> None:
        """When this warpgroup has made its part of s w: asks for the state."""
        then.ask_state()

    def row_taken(self, stage: Any, then: Any) -> None:
        """When this warpgroup has s w in registers."""

    def slot_free(self, then: Any, last: Any, slot: Any) -> None:
        """When a slot's tile has been read, and, if `last`, no other tile comes to it."""

    def all_asked(self, then: Any, last: Any) -> None:
        """When, if `last`, all tiles of this warpgroup are on their way: asks for the rows of W_o."""
        pl.when(last)(lambda: then.ask_rows(0))


class Lent(Room):
    """Arrays that are not needed at the same time have the same bytes, see the module docstring."""

    reduction_bytes: ClassVar[int] = REDUCTION_BYTES // 2
    all_at_once: ClassVar[bool] = False
    reads_ahead: ClassVar[bool] = False
    pieces: ClassVar[int] = STAGES  # one for each slot
    single_after: ClassVar[int] = 0

    def fits(self, plan: Any) -> bool:
        """See `Room.fits`: rows of W_o in a slot, and s w in the state but for its last row."""
        K, D = plan.K, plan.D
        return D % K == 0 and plan.rows * K <= ROWS * D and D <= K * (K - 1)

    def memory(self, plan: Any) -> dict[str, Any]:
        """See `Room.memory`."""
        return super().memory(plan) | dict.fromkeys(("row", "squares", "rows"))

    def first(self, plan: Any) -> Memory:
        """See `Room.first`."""
        taken = Barriers(arrivals=WARPGROUPS)
        return {**super().first(plan), "single": None, "asked": None, "taken": taken}

    def second(self, plan: Any) -> Memory:
        """See `Room.second`: a piece of W_o for each slot, which arrives as the slot's tiles do."""
        rows = Buffer((WARPGROUPS, STAGES, plan.rows, plan.K), plan.dtype)
        arrived = Barriers(arrivals=1, count=WARPGROUPS * STAGES)
        return {**super().second(plan), "rows": rows, "o": None, "full": None, "arrived": arrived}

    def row(self, smem: Any) -> Any:
        """See `Room.row`."""
        if smem.row is not None:
            return smem.row
        return smem.state.reshape(smem.state.shape[0] * smem.state.shape[1])

    def squares(self, smem: Any) -> Any:
        """See `Room.squares`: the last row of the state, which s w does not reach."""
        return smem.state.at[smem.state.shape[0] - 1] if smem.squares is None else smem.squares

    def o(self, smem: Any) -> Any:
        """See `Room.o`."""
        return smem.state.at[0]

    def rows_of_output(self, smem: Any, rows: int, wg: Any, i: Any) -> Any:
        """See `Room.rows_of_output`: in a slot."""
        if smem.rows is not None:
            return smem.rows.at[wg, i]
        V, (*_, pieces, width) = smem.state.shape[1], smem.tiles.shape
        return smem.tiles.at[wg, i].reshape(ROWS * pieces * width // V, V).at[pl.ds(0, rows)]

    def arrived(self, smem: Any, wg: Any, i: Any) -> Any:
        """See `Room.arrived`: that of the slot."""
        return smem.arrived.at[wg * STAGES + i]

    def ask_single(self, stage: Any) -> None:
        """See `Room.ask_single`: there is no room for it."""

    def single(self, stage: Any, layout: Any) -> Iterable[jax.Array]:
        """See `Room.single`: out of global memory, all pieces at once."""
        return [load(stage.row_of_single().at[i], layout) for i in range(stage.pieces)]

    def row_made(self, stage: Any, then: Any) -> None:
        """See `Room.row_made`: its bytes are not free yet."""

    def row_taken(self, stage: Any, then: Any) -> None:
        """See `Room.row_taken`: the state is asked for when all warpgroups have the row."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(stage.smem.taken)
        then.ask_state(LAST, stage.smem.taken)  # it may have been the last one, with a row of its own

    def slot_free(self, then: Any, last: Any, slot: Any) -> None:
        """See `Room.slot_free`: rows of W_o come there."""
        pl.when(last)(lambda: then.ask_rows(slot))

    def all_asked(self, then: Any, last: Any) -> None:
        """See `Room.all_asked`: slots ask by themselves."""


APART, LENT = Room(), Lent()

ROOMS: tuple[Room, ...] = (APART, LENT)
"""All rooms, in the order in which a layer is tried with them."""
