"""The decay of a layer of the delta rule: what the stages of a token have to know of its kind.

    HeadDecay       g [HV]     = -exp(A_log) softplus(a + dt_bias)                    Gated DeltaNet
    ChannelDecay    g [HV, K]  = -exp(A_log) softplus(f + dt_bias), or                Kimi Delta Attention
                                 lower_bound sigmoid(exp(A_log) (f + dt_bias))

A decay says which rows of W_in it needs, which tile of the state it scales, what it reads before the token is there,
and how exp(g) is made of its channels.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.decode.channel_step import ChannelTile
from pallas_kernels.decode.tiles import Tile, log_decay
from pallas_kernels.device import generations
from pallas_kernels.device.gates import log_decays
from pallas_kernels.device.lanes import WARP, load, vector_layout
from pallas_kernels.device.memory import store_any


@dataclasses.dataclass(frozen=True)
class HeadDecay:
    """A decay of each value head, a number."""

    tile: ClassVar[type[Tile]] = Tile
    """A warpgroup's part of the state."""
    tiles: ClassVar[tuple[str, ...]] = ()
    """Parts of `Places` that are K rows of W_in for each value head, and so tiles, next to q, k, v and the gate."""
    singles: ClassVar[tuple[str, ...]] = ("strength", "decay")
    """Parts of `Places` that are one row of W_in for each value head."""
    vectors: ClassVar[int] = 0
    """Vectors [K] that warpgroups make for each other."""

    def read(self, head: Any) -> Any:
        """Reads, before the token is there, what `make` needs: A_log and dt_bias."""
        return head.gmem.A_log[head.head], head.gmem.dt_bias[head.head]

    def make(self, head: Any, known: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q and k along the tile, and exp(g) as the tile's `update` takes it: every warpgroup by itself."""
        q, k = (load(head.of_key(place), head.tile.k_layout) for place in (head.places.q, head.places.k))
        a = head.gmem.channels[head.places.decay + head.head]
        return q, k, jnp.exp(log_decay(a, *known))


@dataclasses.dataclass(frozen=True)
class ChannelDecay:
    """A decay of each key channel, a vector: warpgroups make a part of it each, and of q and k."""

    lower_bound: float | None
    """The strongest log decay of the bounded gate; None for the other gate."""

    tile: ClassVar[type[Tile]] = ChannelTile
    tiles: ClassVar[tuple[str, ...]] = ("decay",)
    singles: ClassVar[tuple[str, ...]] = ("strength",)
    vectors: ClassVar[int] = 3

    def read(self, head: Any) -> Any:
        """See `HeadDecay.read`: A_log, and dt_bias of the channels that this warpgroup makes."""
        dt_bias = load(head.gmem.dt_bias.at[head.head, head.keys], vector_layout(WARP))
        return head.gmem.A_log[head.head], dt_bias

    def make(self, head: Any, known: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `HeadDecay.make`: this warpgroup's part of q, k and the decay for all of them."""
        smem, own, layout = head.smem, head.keys, vector_layout(WARP)

        @pl.when(head.wg < head.K // WARP)
        def _():
            places, (A_log, dt_bias) = head.places, known
            parts = (head.of_key, places.q), (head.of_key, places.k), (head.of_head, places.decay)
            q, k, f = (load(of(place, own), layout) for of, place in parts)
            x, A_log = f + dt_bias.astype(jnp.float32), A_log.astype(jnp.float32)
            alpha = jnp.exp(log_decays(x, A_log, self.lower_bound))
            for n, y in enumerate((q, k, alpha)):
                store_any(smem.vectors.at[n, own], y)

        generations.meet(smem.known)
        q, k, alpha = (load(smem.vectors.at[n], head.tile.k_layout) for n in range(self.vectors))
        return q, k, alpha


Decay = HeadDecay | ChannelDecay
"""A decay, as `Plan` and `Head` ask it."""
