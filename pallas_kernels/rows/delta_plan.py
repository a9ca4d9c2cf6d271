"""How CTAs divide a layer of the delta rule for one token, see `delta_layer`.

The n CTAs of a KEY head share its q and k: they make all channels of the head, and of the R value heads that read it,
before they meet at a barrier. After it m = n / R of them share a VALUE head: its token, and its columns of W_o. The
more CTAs the better, at most one on a multiprocessor.

Rows of W_in are tiles of four. Those of a key head are numbered in one row, kind after kind, and dealt round to its
4 n warpgroups: the first ones are a warpgroup's own, among them all that pass through the convolution; the others are
claimed. Where n is large a turn has tiles of two kinds.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.device.grid_barrier import most_ctas
from pallas_kernels.device.lanes import WARP, WARPS
from pallas_kernels.device.memory import SMEM_LIMIT, smem_bytes
from pallas_kernels.rows.delta_decays import Decay
from pallas_kernels.rows.delta_rooms import ROOMS, ROWS, STAGES, WARPGROUPS, WIDEST, Room
from pallas_kernels.rows.delta_weights import Whole, of_dtype
from pallas_kernels.rows.stream import PART
from pallas_kernels.rows.weights import EACH

ACCESS = 16
"""Bytes that a thread reads at once, at most."""

PARTS = (16, 8, 4, 2, 1)
"""Numbers of CTAs of a value head that are tried."""


class Kind(NamedTuple):
    """Tiles of one kind of channels."""

    name: str
    """Field of `Places`."""
    heads: int
    """Value heads of it that belong to a key head; 1 for q and k."""
    begin: int
    """Number of its first tile."""
    end: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The division of a layer: static."""

    H: int
    """Key heads."""
    R: int
    """Value heads of a key head."""
    K: int
    """Width of keys and values."""
    D: int
    """Width of the stream."""
    E: int
    """Outputs."""
    m: int
    """CTAs of a value head."""
    dtype: Any
    """The dtype of both matrices."""
    results: Any
    """The dtype that results are rounded to."""
    decay: Decay
    room: Room

    @property
    def weights(self) -> Whole:
        """The kind of both matrices."""
        found = of_dtype(self.dtype)
        assert found is not None, self.dtype
        return found

    @property
    def n(self) -> int:
        """CTAs of a key head."""
        return self.m * self.R

    @property
    def ctas(self) -> int:
        """CTAs of the kernel."""
        return self.H * self.n

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a key head."""
        return self.n * WARPGROUPS

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of channels in the order of their tiles; the first three pass through the convolution."""
        heads = {"q": 1, "k": 1, "v": self.R} | dict.fromkeys((*self.decay.tiles, "gate"), self.R)
        ends = itertools.accumulate(n * self.K // ROWS for n in heads.values())
        return tuple(
            Kind(name, n, end - n * self.K // ROWS, end)
            for (name, n), end in zip(heads.items(), ends, strict=True)
        )

    @property
    def filtered(self) -> int:
        """Tiles of a key head that pass through the convolution."""
        return self.kinds[2].end

    @property
    def own(self) -> int:
        """Tiles of a warpgroup that it need not claim."""
        return max(STAGES, -(-self.filtered // self.warpgroups))

    @property
    def claimable(self) -> int:
        """Tiles of a key head that are claimed."""
        return self.kinds[-1].end - self.own * self.warpgroups

    @property
    def rows(self) -> int:
        """Rows of W_o of a warpgroup that come in one copy."""
        return self.E // (self.m * WARPGROUPS * self.room.pieces)

    @property
    def rows_at_once(self) -> int:
        """Rows of W_o that a warpgroup multiplies at once: as many as the room's registers hold."""
        units = () if self.room.all_at_once else self.weights.units_at_once
        return next((n * self._unit() for n in units if self.rows % (n * self._unit()) == 0), self.rows)

    @property
    def access(self) -> int:
        """Numbers of W_o that a thread reads at once."""
        return min(EACH, ACCESS // jnp.dtype(self.dtype).itemsize)

    @property
    def writers(self) -> int:
        """CTAs of a value head that write rows of its state."""
        return min(self.m, self.K * self.K * 4 // (WARP * WARPS * WARPGROUPS * ACCESS))

    def reason(self) -> str | None:
        """Why a layer cannot be divided so; None if it can."""
        what = f"{self.n} CTAs of a head of {self.K}, rows of {self.D} and {self.E} outputs"
        if self.D % PART or self.K % (ROWS * WARPGROUPS):
            return f"{what}; the kernel takes rows of a multiple of {PART}"
        if self.claimable < 0:
            return f"{what}; the kernel takes at most as many warpgroups as there are tiles"
        if len(self.decay.singles) * self.R > self.n:
            return (
                f"{what}; the kernel takes a CTA for each of {len(self.decay.singles) * self.R} single rows"
            )
        if self.E % (self.m * WARPGROUPS * self.room.pieces * self._unit()) or self.rows > WIDEST:
            return f"{what}; the kernel takes whole shares of a multiple of {self._unit()} outputs"
        if reason := self.weights.reason(self):
            return reason
        if not self.room.fits(self):
            return f"{what}; the kernel takes rows that fit the slots of tiles, and the state"
        memory = {**self.room.memory(self), **self.weights.memory(self)}
        taken = smem_bytes(memory, self.room.reduction_bytes)
        if taken > SMEM_LIMIT:
            return f"{what}: {taken} bytes of shared memory; a CTA has {SMEM_LIMIT}"
        return None

    def _unit(self) -> int:
        """Rows of W_o that a warpgroup takes a multiple of."""
        return WARPS * max(1, WARP * self.access // self.K)


def plan_of(H: int, R: int, K: int, D: int, E: int, dtypes: tuple[Any, Any], decay: Decay) -> Plan | str:
    """The plan with the most CTAs that are on a device at once; else why that with the most cannot be.

    Args:
      dtypes: of both matrices, and of results.
    """
    reason, most = None, most_ctas()
    for m, room in itertools.product(PARTS, ROOMS):
        plan = Plan(H, R, K, D, E, m, jnp.dtype(dtypes[0]), jnp.dtype(dtypes[1]), decay, room)
        if plan.ctas <= most:
            if (why := plan.reason()) is None:
                return plan
            reason = reason or why
    return reason or f"{H} heads of k, {R} of v to each; the kernel takes {most} CTAs at most"
