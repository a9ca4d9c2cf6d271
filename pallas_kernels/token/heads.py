"""The second stage of a layer of the delta rule: a token of a head from its channels to the output projection.

    S <- Diag(exp(g)) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = K^(-1/2) q^T S      see `decode.channel_step`
    y_h = W_h (o (mean(o^2) + eps)^(-1/2) w f(z))                                            for each head h
    y = sum_h y_h

Some CTAs share a head. Each reads the head's state whole, makes o and its gated norm, and multiplies by its rows of
the head's columns of W: so none of them waits for a result of another one. All of them have read the state before one
writes its rows of it.

References (GMEM): channels [C] float32, in which q and k of all heads, v, the raw input of the decay, that of the
strength and z lie, see `Places`; A_log [HV], dt_bias [HV, K]; w_o [V]; output [D, HV V]; seen_state and, in place,
state [1, HV, K, V] float32, of which the first is what was there before; y_h [HV, D]. Shared memory: `memory`.

| barrier | who arrives                                   | who waits      |
|---------|-----------------------------------------------|----------------|
| stored  | the copy of the state                         | all of the CTA |
| full    | a warpgroup's copy of its rows of W           | that warpgroup |
| known   | each warpgroup, with its part of q, k, alpha  | all of the CTA |
| whole   | each warpgroup, with its part of o            | all of the CTA |

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

from pallas_kernels.decode.channel_step import ChannelTile
from pallas_kernels.decode.tiles import Sizes, write_strength
from pallas_kernels.device.gates import log_decays
from pallas_kernels.device.grid_barrier import GridBarrier
from pallas_kernels.device.lanes import WARP, WARPS, lane_layout, load, vector_layout
from pallas_kernels.device.launch import warpgroup_index
from pallas_kernels.device.memory import Barriers, Buffer, Memory, store_any
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.gated_norm import ACTIVATIONS
from pallas_kernels.work.slots import Slots

WARPGROUPS = 4
"""Warpgroups of a CTA, which have a quarter of V and of the CTA's rows of W each."""

ACCESS = 16
"""Bytes that a thread reads at once."""


class Places(NamedTuple):
    """First channel of each part of a token, [heads, width] of its own."""

    q: int
    k: int
    v: int
    decay: int
    strength: int
    gate: int


@dataclasses.dataclass(frozen=True)
class Rule:
    """The computation: static, and hashable."""

    lower_bound: float | None
    """The strongest log decay of the bounded gate; None for the other gate."""
    allow_neg_eigval: bool
    eps: float
    """Is added under the root of the gated norm."""
    activation: str
    """The name of its gate, one of `gated_norm.ACTIVATIONS`."""


class Share(NamedTuple):
    """The work of a CTA."""

    head: jax.Array
    """Number of its head."""
    rank: jax.Array
    """Its own among the CTAs of the head."""
    ctas: int
    """How many these are."""


def memory(rows: int, V: int, dtype: Any) -> Memory:
    """Shared memory of a CTA that has so many rows of W for each warpgroup."""
    return {
        "rows": Buffer((WARPGROUPS, rows, V), dtype),
        "state": Buffer((V, V)),
        "vectors": Buffer((3, V)),
        "o": Buffer((V,)),
        "full": Barriers(arrivals=1, count=WARPGROUPS),
        "stored": Barriers(arrivals=1),
        "known": Barriers(arrivals=WARPGROUPS),
        "whole": Barriers(arrivals=WARPGROUPS),
    }


def rows_at_once(V: int, dtype: Any) -> int:
    """Rows of W that a warpgroup takes a multiple of."""
    return WARPS * max(1, WARP * ACCESS // jnp.dtype(dtype).itemsize // V)


def state_rows(V: int) -> int:
    """Rows of a state that a CTA writes a multiple of."""
    return WARP * WARPS * WARPGROUPS * ACCESS // 4 // V


class Head:
    """The stage, as a warpgroup knows it: its head, and its parts of the state and of W.

    Its methods are called in the order in which they stand here, each of which says what it needs: `_step`.
    """

    def __init__(self, gmem: Any, smem: Any, share: Share, places: Places, rule: Rule) -> None:
        """Takes where the channels lie, and what is computed."""
        self.gmem, self.smem, self.share, self.places, self.rule = gmem, smem, share, places, rule
        (_, HV, self.K, self.V), self.wg, self.head = gmem.state.shape, warpgroup_index(), share.head
        block, scale = self.V // WARPGROUPS, self.K**-0.5
        sizes = Sizes(HV, HV, HV, self.K, self.V, Slots(1, None, 1), scale, True, rule.allow_neg_eigval)
        self.tile = ChannelTile(sizes, block, 4, across=True)
        self.own = pl.ds(self.wg * block, block)
        """Entries of V of the warpgroup."""
        rows, itemsize = smem.rows.shape[1], jnp.dtype(smem.rows.dtype).itemsize
        self.rows = pl.ds((share.rank * WARPGROUPS + self.wg) * rows, rows)
        """Its rows of W."""
        self.keys = pl.ds(jnp.minimum(self.wg, self.K // WARP - 1) * WARP, WARP)
        """Key channels whose decay it makes, if there are as many warpgroups of them."""
        width = ACCESS // itemsize
        self.layout = lane_layout(min(WARP, self.V // width), width)
        self._done: set[str] = set()

    def _step(self, name: str, *before: str) -> None:
        """Notes that a step is traced. An AssertionError where one that comes before it is not."""
        missing = [other for other in before if other not in self._done]
        assert not missing, f"{name} before {', '.join(missing)}"
        self._done.add(name)

    def ask_state(self) -> None:
        """Asks for the state."""
        self._step("ask_state")
        gmem, smem = self.gmem, self.smem

        @pl.when(self.wg == 0)
        def _():
            plgpu.copy_gmem_to_smem(gmem.seen_state.at[0, self.head], smem.state, smem.stored)

    def ask_weight(self) -> None:
        """Asks for the rows of W."""
        self._step("ask_weight")
        own = self.gmem.output.at[self.rows, pl.ds(self.head * self.V, self.V)]
        plgpu.copy_gmem_to_smem(own, self.smem.rows.at[self.wg], self.smem.full.at[self.wg])

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
        gmem = self.gmem
        self.dt_bias = load(gmem.dt_bias.at[self.head, self.keys], vector_layout(WARP))
        self.A_log, self.w = gmem.A_log[self.head], load(gmem.w_o, self.layout.reduce(0))
        return load(self.smem.state.at[:, self.own], self.tile.layout)

    def meet(self, barrier: GridBarrier | None) -> None:
        """Waits until all CTAs of the head have arrived: before, channels are not made, and states not read."""
        self._step("meet", "arrive")
        if barrier is not None:
            barrier.wait()
            barrier.leave()

    def _channels(self, place: int, width: int, entries: Any = None) -> Any:
        """A reference to the head's part of the channels."""
        first, n = (0, width) if entries is None else (entries.start, entries.size)
        return self.gmem.channels.at[pl.ds(place + self.head * width + first, n)]

    def _make_vectors(self) -> None:
        """This warpgroup's part of q, k and the decay, for all of them."""
        smem, places, layout = self.smem, self.places, vector_layout(WARP)
        q, k, f = (
            load(self._channels(place, self.K, self.keys), layout)
            for place in (places.q, places.k, places.decay)
        )
        x, A_log = f + self.dt_bias.astype(jnp.float32), self.A_log.astype(jnp.float32)
        alpha = jnp.exp(log_decays(x, A_log, self.rule.lower_bound))
        for n, y in enumerate((q, k, alpha)):
            store_any(smem.vectors.at[n, self.keys], y)

    def token(self, S: jax.Array) -> jax.Array:
        """The state after the token; o goes to shared memory, where it is whole behind the barrier."""
        self._step("token", "read", "meet")
        smem, tile, places, K = self.smem, self.tile, self.places, self.K
        along, whole = tile.k_layout, vector_layout(K)
        q_whole, k_whole = (load(self._channels(place, K), whole) for place in (places.q, places.k))
        v = load(self._channels(places.v, self.V, self.own), tile.v_layout)
        self.z = load(self._channels(places.gate, self.V), self.layout.reduce(0))
        b = self.gmem.channels[places.strength + self.head]
        pl.when(self.wg < K // WARP)(self._make_vectors)
        _meet(smem.known)
        q, k, alpha = (load(smem.vectors.at[n], along) for n in range(3))
        beta = write_strength(b, self.rule.allow_neg_eigval)
        norms = functools.cache(lambda: tile.norms(q_whole, k_whole))
        S, o = tile.update(S, q, k, v, alpha, beta, norms)
        store_any(smem.o.at[self.own], o)
        _meet(smem.whole)
        return S

    def write(self, S: jax.Array) -> None:
        """This CTA's rows of the state, when all CTAs of the head have read it."""
        self._step("write", "meet", "token")
        each = self.K // self.share.ctas
        for n in range(self.share.ctas):

            @pl.when(self.share.rank == n)
            def _(n=n):
                place = self.gmem.state.at[0, self.head, pl.ds(n * each, each), self.own]
                store_any(place, S[n * each : (n + 1) * each])

    def multiply(self) -> None:
        """The gated norm of the head, and its product with the rows."""
        self._step("multiply", "ask_weight", "token")
        smem, V, rows, along = self.smem, self.V, self.smem.rows.shape[1], self.layout.reduce(0)
        gate = self.w.astype(jnp.float32) * ACTIVATIONS[self.rule.activation].value(self.z, r.sigmoid(self.z))
        o = load(smem.o, vector_layout(V))
        scale = lax.rsqrt(jnp.sum(o * o) / V + self.rule.eps)
        v = load(smem.o, along) * gate * scale
        v = plgpu.layout_cast(lax.broadcast_in_dim(v, (rows, V), [1]), self.layout)
        plgpu.barrier_wait(smem.full.at[self.wg])
        sums = jnp.sum(load(smem.rows.at[self.wg], self.layout).astype(jnp.float32) * v, axis=1)
        store_any(self.gmem.y_h.at[self.head, self.rows], sums.astype(self.gmem.y_h.dtype))


def _meet(barrier: Any) -> None:
    """A barrier of the CTA, behind which what was stored to shared memory is known."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
