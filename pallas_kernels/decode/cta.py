"""A CTA of `decode.step`: its warpgroup's tile, where the tokens lie, and how the gates of a head enter."""

import copy
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.decode.tiles import GRANULE, Sizes, Tile, load, log_decay, write_strength
from pallas_kernels.device.launch import grid_index, num_sms
from pallas_kernels.device.memory import Memory, store_any
from pallas_kernels.device.operations import Device

MAX_TILE = 128 * 128
"""Entries of a tile by default: registers do not hold a larger one in float32."""


TURNS = {4: 256, 2: 64}
"""Tiles of a head that a warpgroup of one token takes, from so many heads of all requests on: the fastest on an H200
from a bfloat16 pool with states [V, K] (docs/log/decode.md). Fewer heads give too few warpgroups for them."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs, not what it computes."""

    block: int
    """Entries of V in a tile."""
    across: bool = False
    """Whether warps lie beside each other along V, with states [K, V]: sums over K then need no other warp."""
    narrow: bool = False
    """Whether the tile of one token from a bfloat16 pool waits in 16 bits while sums are taken, and is widened twice.
    Registers then hold more tiles."""
    ahead: int = 0
    """How many warpgroups later the tile is needed that the warpgroup of one token brings into the L2 cache, the
    first of its turns; 0: it brings none."""
    turns: int = 1
    """Tiles of a head that the warpgroup of one token takes one after the other, each on its way while the one before
    is worked on. They divide those of a head."""

    @classmethod
    def default(cls, K: int, V: int, pool_dtype: Any, kv_layout: bool, T: int = 1) -> "Config":
        """The fastest on an H200 with K = V = 128 (docs/log/decode.md), where V and registers allow it."""
        is_half, most = jnp.dtype(pool_dtype).itemsize == 2, 32
        if kv_layout:
            most = 128 if is_half else 64
        block = next(n for n in (128, 64, GRANULE) if n <= most and V % n == 0 and K * n <= MAX_TILE)
        if T > 1:
            return cls(block)
        # In warpgroups of every SM. What comes too early takes room in the cache: [K, V] was slower with 3 of them.
        if not kv_layout:
            return cls(block, ahead=8 * num_sms() if is_half else 0)
        return cls(block, across=is_half, narrow=is_half, ahead=(2 if is_half else 1) * num_sms())

    def for_heads(self, heads: int, V: int) -> "Config":
        """The default for one token of so many heads of all requests, from a bfloat16 pool with states [V, K].

        The bits do not depend on it.
        """
        most = V // self.block
        turns = next((n for n, least in TURNS.items() if heads >= least and most % n == 0), 1)
        return dataclasses.replace(self, turns=turns, ahead=2 * num_sms()) if turns > 1 else self


class Channels(NamedTuple):
    """Where the first head of each input of a token lies in its array."""

    q: int = 0
    k: int = 0
    v: int = 0
    a: int = 0
    b: int = 0


ALONE = Channels()
"""Where the heads begin if each input is an array of its own."""


class Cta:
    """The knowledge of a CTA's warpgroup: its tile, and where the tokens lie."""

    tile_type: type[Tile] = Tile

    def __init__(
        self, gmem: Any, smem: Any, *, sizes: Sizes, config: Config, first: Channels, interpreted: bool
    ):
        self.gmem, self.smem, self.sizes, self.config = gmem, smem, sizes, config
        N, self.T = gmem.o.shape[:2]
        self.tiles = N * sizes.HV * (sizes.V // config.block)
        self.warpgroups = self.tiles // config.turns
        self.first, self.dev = first, Device(interpreted)
        self.tile = self.tile_type(sizes, config.block, gmem.pool.dtype.itemsize, config.across)
        self.row, self.head, self.entries = self.tile.where(grid_index() * config.turns)
        self.q_head = lax.div(self.head, sizes.HV // sizes.Hq)
        self.k_head = lax.div(self.head, sizes.HV // sizes.Hk)
        self.slot = self.read_slot(self.row)
        self.count: Any = self.T
        if gmem.num_tokens is not None:
            self.count = jnp.clip(gmem.num_tokens[self.row], 0, self.T)

    def read_slot(self, row: jax.Array) -> jax.Array:
        """The slot that a row's state is read from."""
        return row if self.gmem.read_slots is None else self.gmem.read_slots[row]

    def write_slot(self, t: Any) -> jax.Array:
        """The slot that the state after token t goes to."""
        return self.row if self.gmem.write_slots is None else self.gmem.write_slots[self.row, t]

    def q(self, t: Any) -> Any:
        """A reference to q of token t."""
        return self.gmem.q.at[self.row, t, pl.ds(self.first.q + self.q_head * self.sizes.K, self.sizes.K)]

    def k(self, t: Any) -> Any:
        """A reference to k of token t."""
        return self.gmem.k.at[self.row, t, pl.ds(self.first.k + self.k_head * self.sizes.K, self.sizes.K)]

    def v(self, t: Any) -> Any:
        """A reference to the tile's entries of v of token t."""
        channel = self.first.v + self.head * self.sizes.V + self.entries.start
        return self.gmem.v.at[self.row, t, pl.ds(channel, self.config.block)]

    def turn(self, i: int) -> "Cta":
        """The same with the i-th tile after this one, of the same head."""
        other = copy.copy(self)
        other.entries = pl.ds(self.entries.start + i * self.config.block, self.config.block)
        return other

    def written(self, t: Any, v: jax.Array) -> jax.Array:
        """v of token t times the part of its write strength that `gates` leaves out."""
        return v

    @classmethod
    def default_config(cls, sizes: Sizes, pool_dtype: Any, T: int, alone: int) -> Config:
        """How the kernel runs for T tokens of each request.

        Args:
          alone: how many requests there are, if each has one token; else 0.
        """
        config = Config.default(sizes.K, sizes.V, pool_dtype, sizes.kv_layout, T)
        if not alone or sizes.kv_layout or sizes.K > 128 or jnp.dtype(pool_dtype).itemsize == 4:
            return config
        return config.for_heads(alone * sizes.HV, sizes.V)

    @classmethod
    def gate_memory(cls, sizes: Sizes, T: int) -> Memory:
        """Shared memory for the gates of several tokens, beside their scalars."""
        return {}

    def keep_gates(self, t: Any, alpha: jax.Array, beta: jax.Array) -> None:
        """Stores `gates_to_keep` of token t in shared memory."""
        self.smem.scalars[t, 0] = jnp.float32(alpha)
        self.smem.scalars[t, 1] = jnp.float32(beta)

    def kept_gates(self, t: Any) -> tuple[jax.Array, jax.Array]:
        """`gates` of token t from shared memory."""
        return self.smem.scalars[t, 0], self.smem.scalars[t, 1]

    def gates_to_keep(self, t: Any) -> tuple[jax.Array, jax.Array]:
        """`gates`, for shared memory."""
        return self.gates(t)

    def gates(self, t: Any) -> tuple[jax.Array, jax.Array]:
        """exp(g) and beta of token t."""
        gmem, first, row, head = self.gmem, self.first, self.row, self.head
        alpha = jnp.exp(log_decay(gmem.a[row, t, first.a + head], gmem.A_log[head], gmem.dt_bias[head]))
        return alpha, write_strength(gmem.b[row, t, first.b + head], self.sizes.allow_neg_eigval)

    def state(self, slot: jax.Array, head: jax.Array, entries: Any) -> Any:
        """A reference to a tile of a slot's state."""
        return self.tile.state(self.gmem.pool, self.sizes.slots.place(slot, self.gmem.layer), head, entries)

    def read(self) -> jax.Array:
        """The tile of the state at the start of the call, in the pool's dtype."""
        return load(self.state(self.slot, self.head, self.entries), self.tile.layout)

    def write(self, to: jax.Array, S: jax.Array) -> None:
        """Writes the tile to a slot; drops it where that is padding."""

        @pl.when(self.sizes.slots.is_slot(to))
        def _():
            store_any(self.state(to, self.head, self.entries), S.astype(self.gmem.pool.dtype))

    def write_output(self, t: Any, o: jax.Array) -> None:
        """Writes the output of token t."""
        store_any(self.gmem.o.at[self.row, t, self.head, self.entries], o.astype(self.gmem.o.dtype))
