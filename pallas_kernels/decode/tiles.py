"""A tile of a state in the registers of a warpgroup, and one token of the rule on it.

A tile is all of K by `block` entries of V. It lies in registers as in memory: [K, block] of a pool with states
[K, V], [block, K] of one with states [V, K]. The entries of V are independent of each other, so a tile needs its own
of v and u, and all of q and k. Sums over K go over registers and lanes, and with [K, V] over warps.

The L2 norm of q and k only scales sums, so the tile meets q and k as they came:

    y = S^T k,  z = S^T q,  rk = 1 / |k|,  rq = 1 / |q|
    u = beta (v - alpha rk y),  S <- alpha S + k (rk u)^T,  o = scale rq (alpha z + rk (q . k) u)

with alpha = exp(g): both sums are taken of the state that was read, one beside the other.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.gates import softplus
from pallas_kernels.device.lanes import WARP, WARPS, lane_layout, load, spread, vector_layout
from pallas_kernels.device.layouts import L2NORM_EPS
from pallas_kernels.work.slots import Slots

ACCESS_BYTES = 16
"""Bytes that a thread loads or stores at once."""

GRANULE = 32
"""K is a multiple of this, and so is `block`."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes and switches of one kernel."""

    Hq: int
    Hk: int
    HV: int
    K: int
    V: int
    slots: Slots
    """Slots of the pool that the states lie in."""
    scale: float
    """Factor of the output."""
    use_qk_l2norm: bool = True
    """Whether q and k are normalised."""
    allow_neg_eigval: bool = False
    """Whether beta is 2 sigmoid(b)."""
    kv_layout: bool = True
    """Whether states are [K, V]; else [V, K]."""

    @classmethod
    def of(
        cls,
        heads: tuple[int, int, int],
        states: jax.Array,
        layer: Any,
        *,
        null_slot: int | None = None,
        **switches: Any,
    ) -> "Sizes":
        """The sizes of a call.

        Args:
          heads: Hq, Hk and HV.
          states: a pool [slots, HV, K, V], or [slots, layers, HV, K, V] where a layer is given.
          layer: index of the pool's second axis where it serves a whole model, else None.
          null_slot: a slot that is padding too.
          switches: fields from scale on.
        """
        K, V = states.shape[-2:] if switches.get("kv_layout", True) else states.shape[:-3:-1]
        slots = Slots(states.shape[0], null_slot, 1 if layer is None else states.shape[1])
        return cls(*heads, K, V, slots, **switches)


def across_layout(columns: int, itemsize: int) -> Any:
    """Layout of [rows, columns] whose warps lie beside each other, so that sums over rows need no other warp."""
    width = ACCESS_BYTES // itemsize
    lanes = columns // (WARPS * width)
    if lanes == 1:
        tiling = plgpu.Tiling(((WARP, WARPS * width), (width,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-2,), lane_dims=(-3,), vector_dim=-1)
    tiling = plgpu.Tiling(((WARP // lanes, WARPS * lanes * width), (lanes * width,), (width,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1)


def column_layout(columns: int) -> Any:
    """Layout of [rows, columns] with a column to a thread where there are enough: sums over rows stay in a warp."""
    lanes = math.gcd(columns // WARPS, WARP)
    if lanes == WARP:
        tiling = plgpu.Tiling(((1, WARPS * WARP), (WARP,), (1,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((WARP // lanes, WARPS * lanes), (lanes,), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1)


class Vectors(NamedTuple):
    """A token of one head as it lies in memory.

    q and k are there twice: along the K of the tile, and whole in every warp.
    """

    q: jax.Array
    k: jax.Array
    q_whole: jax.Array
    k_whole: jax.Array
    v: jax.Array


class Token(NamedTuple):
    """A token along the tile, float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    alpha: jax.Array
    """exp(g): a number, or where each key channel decays by itself a vector as k."""
    beta: jax.Array


class Norms(NamedTuple):
    """Lengths and product of a token's q and k."""

    q: Any
    """1 / |q|; 1 without normalisation."""
    k: Any
    """1 / |k|, likewise."""
    qk: jax.Array
    """q . k of the vectors as they came."""


class Tile:
    """Where a tile lies, and how its registers are laid out."""

    def __init__(self, sizes: Sizes, block: int, itemsize: int, across: bool = False):
        self.sizes, self.block = sizes, block
        self.k_axis = 0 if sizes.kv_layout else 1
        self.shape = (sizes.K, block) if sizes.kv_layout else (block, sizes.K)
        self.width, self.lanes = threads_of_row(sizes.kv_layout, self.shape[1], itemsize)
        self.layout = (
            across_layout(self.shape[1], itemsize) if across else lane_layout(self.lanes, self.width)
        )
        self.k_layout, self.v_layout = self.layout.reduce(1 - self.k_axis), self.layout.reduce(self.k_axis)

    def where(self, number: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """Row of the batch, value head and entries of V of a tile; neighbours in number lie side by side."""
        parts = self.sizes.V // self.block
        head, part = lax.div(number, parts), lax.rem(number, parts)
        return (
            lax.div(head, self.sizes.HV),
            lax.rem(head, self.sizes.HV),
            pl.ds(part * self.block, self.block),
        )

    def state(self, pool: Any, place: jax.Array, head: jax.Array, entries: Any) -> Any:
        """The tile in the pool."""
        return pool.at[place, head, :, entries] if self.sizes.kv_layout else pool.at[place, head, entries]

    def vectors(self, q: Any, k: Any, v: Any) -> Vectors:
        """Loads q [K], k [K] and the tile's entries of v."""
        along_k, whole = self.k_layout, vector_layout(self.sizes.K)
        return Vectors(
            load(q, along_k), load(k, along_k), load(q, whole), load(k, whole), load(v, self.v_layout)
        )

    def over_v(self, x: jax.Array) -> jax.Array:
        """A vector along K, repeated along V."""
        return spread(x, self.shape, self.k_axis, self.layout)

    def over_k(self, x: jax.Array) -> jax.Array:
        """A vector along V, repeated along K."""
        return spread(x, self.shape, 1 - self.k_axis, self.layout)

    def zeros(self) -> jax.Array:
        """Zeros along V."""
        return plgpu.layout_cast(jnp.zeros((self.block,), jnp.float32), self.v_layout)

    def products(self, S: jax.Array, vectors: list[jax.Array]) -> list[jax.Array]:
        """x^T S of vectors x along K."""
        return [jnp.sum(S * self.over_v(x), axis=self.k_axis) for x in vectors]

    def update(
        self,
        S: jax.Array,
        token: Token,
        norms: Callable[[], Norms],
        again: Callable[[jax.Array], jax.Array] = lambda S: S,
        add: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The state after a token, and its output along V; all float32.

        Args:
          norms: computes the norms, after the sums.
          again: makes the S that is changed from the S that sums are taken of.
          add: a scalar times a vector along V and another vector, where how it is rounded is to be known; None: the
            compiler chooses.
        """
        q, k, v, alpha, beta = token
        y, z = self.products(S.astype(jnp.float32), [k, q])
        rq, rk, qk = norms()
        u = beta * (v - (alpha * rk) * y)
        if add is None:
            o = (self.sizes.scale * rq) * (alpha * z + (rk * qk) * u)
        else:
            o = (self.sizes.scale * rq) * add(alpha, z, (rk * qk) * u)
        return again(S).astype(jnp.float32) * alpha + self.over_v(k) * self.over_k(rk * u), o

    def follow(
        self, S: jax.Array, k: jax.Array, v: jax.Array, alpha: jax.Array, beta: jax.Array, rk: jax.Array
    ) -> jax.Array:
        """The state of `update` after a token whose output is not asked for."""
        (y,) = self.products(S, [k])
        u = beta * (v - (alpha * rk) * y)
        return S * alpha + self.over_v(k) * self.over_k(rk * u)

    def norms(self, q: jax.Array, k: jax.Array) -> Norms:
        """The norms of vectors that every warp has whole."""
        qk = jnp.sum(q * k)
        if not self.sizes.use_qk_l2norm:
            return Norms(1.0, 1.0, qk)
        return Norms(lax.rsqrt(jnp.sum(q * q) + L2NORM_EPS), lax.rsqrt(jnp.sum(k * k) + L2NORM_EPS), qk)


def threads_of_row(kv_layout: bool, columns: int, itemsize: int) -> tuple[int, int]:
    """Neighbours that a thread has of a row of a tile, and threads along the row.

    Rows of V are short: one access covers them. A warp has only a part of a row of K at once, so that few steps of a
    sum go from thread to thread; the parts are those that were fastest.
    """
    width = ACCESS_BYTES // itemsize
    if not kv_layout:
        return width, math.gcd(16 if itemsize == 4 else 8, columns // width)
    # Sums over warps take at most four numbers of a thread.
    width = min(width, 4)
    return width, min(columns // width, WARP)


def log_decay(a: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """g = -exp(A_log) softplus(a + dt_bias) of one head, in float32 from scalars of any floating dtype."""
    a, A_log, dt_bias = (x.astype(jnp.float32) for x in (a, A_log, dt_bias))
    x = a + dt_bias
    return -jnp.exp(A_log) * softplus(x)


def write_strength(b: jax.Array, allow_neg_eigval: bool) -> jax.Array:
    """beta = sigmoid(b), or twice that, in float32 from a scalar of any floating dtype."""
    beta = 1.0 / (1.0 + jnp.exp(-b.astype(jnp.float32)))
    return 2.0 * beta if allow_neg_eigval else beta
