"""The second stage of a layer of the delta rule: a token of a head from its channels to the output projection.

    S <- exp(g) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = K^(-1/2) q^T S            see `decode.tiles`
    y_h = W_h (o (mean(o^2) + eps)^(-1/2) w f(z))                                            for each head h
    y = sum_h y_h

The rule's decay says what g is, a number of the head or one of each key channel, see `delta_decays`. Some CTAs share
a value head. Each reads the head's state whole, makes o and its gated norm, and multiplies by its rows of the head's
columns of W: so none of them waits for a result of another one. All of them have read the state before one writes its
rows of it.

References (GMEM): channels [C] float32, in which q and k of all key heads, v, the raw input of the decay, that of the
strength and z of all value heads lie, see `Places`; A_log [HV], dt_bias [HV] or [HV, K]; w_o [V]; output [D, HV V];
seen_state and, in place, state [1, HV, K, V] float32, of which the first is what was there before; y_h [HV, D].
Shared memory: `Room.memory`.

| barrier | who arrives                                        | who waits      |
|---------|----------------------------------------------------|----------------|
| stored  | the copy of the state                              | all of the CTA |
| full    | a warpgroup's copy of its rows of W                | that warpgroup |
| known   | each warpgroup, with its part of q, k and exp(g),  | all of the CTA |
|         | where a decay has vectors                          |                |
| whole   | each warpgroup, with its part of o                 | all of the CTA |

Where the rows of W come to slots of the first stage, a slot's barrier is in the place of `full`.

Numerics: float32; o is not rounded.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.tiles import Sizes, Token, write_strength
from pallas_kernels.device import generations
from pallas_kernels.device.grid_barrier import GridBarrier
from pallas_kernels.device.lanes import WARP, lane_layout, load, spread, vector_layout
from pallas_kernels.device.launch import warpgroup_index
from pallas_kernels.device.memory import store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.gated_norm import ACTIVATIONS
from pallas_kernels.rows.delta_decays import Decay
from pallas_kernels.rows.delta_plan import Plan
from pallas_kernels.rows.delta_rooms import WARPGROUPS
from pallas_kernels.work.slots import Slots


class Places(NamedTuple):
    """First channel of each part of a token: [heads, width] of its own, or [heads]."""

    q: int
    k: int
    v: int
    decay: int
    strength: int
    gate: int


@dataclasses.dataclass(frozen=True)
class Rule:
    """The computation: static, and hashable."""

    decay: Decay
    allow_neg_eigval: bool
    eps: float
    """Is added under the root of the gated norm."""
    activation: str
    """The name of its gate, one of `gated_norm.ACTIVATIONS`."""


class Share(NamedTuple):
    """The work of a CTA."""

    key: jax.Array
    """Number of its key head."""
    rank: jax.Array
    """Its own among the CTAs of the key head."""
    head: jax.Array
    """Number of its value head."""
    part: jax.Array
    """Its own among the CTAs of the value head."""


class Head:
    """The stage, as a warpgroup knows it: its head, and its parts of the state and of W.

    Its methods are called in the order in which they stand here, each of which says what it needs: `_step`.
    """

    def __init__(self, gmem: Any, smem: Any, share: Share, places: Places, rule: Rule, plan: Plan) -> None:
        """Takes where the channels lie, what is computed, and how it is divided."""
        self.gmem, self.smem, self.share, self.places, self.rule = gmem, smem, share, places, rule
        self.plan, self.room, self.decay = plan, plan.room, rule.decay
        (_, HV, self.K, self.V), self.wg, self.head = gmem.state.shape, warpgroup_index(), share.head
        block, scale = self.V // WARPGROUPS, self.K**-0.5
        sizes = Sizes(
            plan.H, plan.H, HV, self.K, self.V, Slots(1, None, 1), scale, True, rule.allow_neg_eigval
        )
        self.tile = self.decay.tile(sizes, block, 4, across=True)
        self.own = pl.ds(self.wg * block, block)
        """Entries of V of the warpgroup."""
        self.first = (share.part * WARPGROUPS + self.wg) * (plan.rows * plan.room.pieces)
        """Its first row of W."""
        self.keys = pl.ds(jnp.minimum(self.wg, self.K // WARP - 1) * WARP, WARP)
        """Key channels of which it makes something for the others, if there are as many warpgroups of them."""
        self.layout = lane_layout(min(WARP, self.V // plan.access), plan.access)
        self._done: set[str] = set()

    def _step(self, name: str, *before: str) -> None:
        """Notes that a step is traced. An AssertionError where one that comes before it is not."""
        missing = [other for other in before if other not in self._done]
        assert not missing, f"{name} before {', '.join(missing)}"
        self._done.add(name)

    def ask_state(self, by: int = 0, after: Any = None) -> None:
        """Asks for the state.

        Args:
          by: the warpgroup that does.
          after: a barrier at which it waits before; None: none.
        """
        self._step("ask_state")
        gmem, smem = self.gmem, self.smem

        @pl.when(self.wg == by)
        def _():
            if after is not None:
                plgpu.barrier_wait(after)
            plgpu.copy_gmem_to_smem(gmem.seen_state.at[0, self.head], smem.state, smem.stored)

    def ask_rows(self, i: Any) -> None:
        """Asks for the i-th piece of this warpgroup's rows of W."""
        self._step("ask_rows")
        own = self.gmem.output.at[self.rows(i), pl.ds(self.head * self.V, self.V)]
        to = self.room.rows_of_output(self.smem, self.plan.rows, self.wg, i)
        plgpu.copy_gmem_to_smem(own, to, self.room.arrived(self.smem, self.wg, i))

    def rows(self, i: Any, first: int = 0, count: int | None = None) -> Any:
        """Rows of W of the i-th piece, or some of them."""
        begin = i * self.plan.rows + first
        is_first = isinstance(begin, int) and begin == 0
        return pl.ds(self.first if is_first else self.first + begin, count or self.plan.rows)

    def arrive(self, barrier: GridBarrier | None) -> None:
        """Waits until this CTA has read the state, and says so, and that its channels are made, to the head's others.

        Args:
          barrier: theirs; None where kernels are stages, one after the other.
        """
        self._step("arrive", "ask_state")
        plgpu.barrier_wait(self.smem.stored)
        if barrier is not None:
            barrier.arrive()

    def read(self) -> jax.Array:
        """Asks for this warpgroup's part of the state, and for what else does not depend on the token."""
        self._step("read", "arrive")
        self.known, self.w = self.decay.read(self), load(self.gmem.w_o, self.layout.reduce(0))
        self.scales = self.plan.weights.read(self)
        return load(self.smem.state.at[:, self.own], self.tile.layout)

    def meet(self, barrier: GridBarrier | None) -> None:
        """Waits until all CTAs of the head have arrived: before, channels are not made, and states not read."""
        self._step("meet", "arrive")
        if barrier is not None:
            barrier.wait()
            barrier.leave()

    def of_key(self, place: int, entries: Any = None) -> Any:
        """A reference to the channels of the key head, or to some of them."""
        return self._channels(place, self.share.key, self.K, entries)

    def of_head(self, place: int, entries: Any = None) -> Any:
        """The same of the value head."""
        return self._channels(place, self.head, self.V, entries)

    def _channels(self, place: int, head: jax.Array, width: int, entries: Any) -> Any:
        first, n = (0, width) if entries is None else (entries.start, entries.size)
        return self.gmem.channels.at[pl.ds(place + head * width + first, n)]

    def token(self, S: jax.Array) -> jax.Array:
        """The state after the token; o goes to shared memory, where it is whole after the barrier."""
        self._step("token", "read", "meet")
        smem, tile, places = self.smem, self.tile, self.places
        whole = vector_layout(self.K)
        q_whole, k_whole = (load(self.of_key(place), whole) for place in (places.q, places.k))
        v = load(self.of_head(places.v, self.own), tile.v_layout)
        self.z = load(self.of_head(places.gate), self.layout.reduce(0))
        b = self.gmem.channels[places.strength + self.head]
        q, k, alpha = self.decay.make(self, self.known)
        beta = write_strength(b, self.rule.allow_neg_eigval)
        norms = functools.cache(lambda: tile.norms(q_whole, k_whole))
        S, o = tile.update(S, Token(q, k, v, alpha, beta), norms)
        store_any(self.room.o(smem).at[self.own], o)
        generations.meet(smem.whole)
        return S

    def write(self, S: jax.Array) -> None:
        """This CTA's rows of the state, when all CTAs of the head have read it."""
        self._step("write", "meet", "token")
        each = self.K // self.plan.writers
        for n in range(self.plan.writers):

            @pl.when(self.share.part == n)
            def _(n=n):
                place = self.gmem.state.at[0, self.head, pl.ds(n * each, each), self.own]
                store_any(place, S[n * each : (n + 1) * each])

    def multiply(self) -> None:
        """The gated norm of the head, and its product with the rows."""
        self._step("multiply", "ask_rows", "token")
        smem, room, V, along = self.smem, self.room, self.V, self.layout.reduce(0)
        gate = self.w.astype(jnp.float32) * ACTIVATIONS[self.rule.activation].value(self.z, r.sigmoid(self.z))
        o, count = load(room.o(smem), vector_layout(V)), self.plan.rows_at_once
        scale = lax.rsqrt(jnp.sum(o * o) / V + self.rule.eps)
        v = spread(load(room.o(smem), along) * gate * scale, (count, V), 1, self.layout)
        for i in range(self.plan.room.pieces):
            plgpu.barrier_wait(room.arrived(smem, self.wg, i))
            rows = room.rows_of_output(smem, self.plan.rows, self.wg, i)
            for first in range(0, self.plan.rows, count):
                x = load(rows.at[pl.ds(first, count)], self.layout).astype(jnp.float32)
                sums = self.plan.weights.scaled(self, (i, first), jnp.sum(x * v, axis=1))
                sums = sums.astype(self.gmem.y_h.dtype)
                store_any(self.gmem.y_h.at[self.head, self.rows(i, first, count)], sums)
