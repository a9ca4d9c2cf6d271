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

from pallas_kernels.device.layouts import L2NORM_EPS
from pallas_kernels.work.slots import Slots

WARP = 32
"""Threads of a warp."""

WARPS = 4
"""Warps of a warpgroup."""

ACCESS_BYTES = 16
"""Bytes that a thread loads or stores at once."""

GRANULE = 32
"""K is a multiple of this, and so is `block`."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is computed: heads, widths and options of the rule."""

    Hq: int
    Hk: int
    HV: int
    K: int
    V: int
    scale: float
    use_qk_l2norm: bool = True
    allow_neg_eigval: bool = False
    kv_layout: bool = True
    """Whether states are [K, V]; else [V, K]."""
    slots: int = 1
    null_slot: int | None = None
    layers: int = 1

    def is_slot(self, slot: jax.Array) -> jax.Array:
        """As of `Slots`."""
        return self._pool.is_slot(slot)

    def place(self, slot: jax.Array, layer: Any) -> jax.Array:
        """As of `Slots`."""
        return self._pool.place(slot, layer)

    @property
    def _pool(self) -> Slots:
        return Slots(self.slots, self.null_slot, self.layers)


def lane_layout(lanes: int, width: int) -> Any:
    """Of an array [rows, columns]: a thread has `width` neighbours of a row, `lanes` threads lie along it, the other
    threads of a warp in the rows below, and the warps below each other."""
    rows = WARP // lanes
    if rows == 1:
        tiling = plgpu.Tiling(((WARPS, WARP * width), (width,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((WARPS * rows, lanes * width), (rows, width)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)


def _across_layout(columns: int, itemsize: int) -> Any:
    """Of an array [rows, columns]: the warps lie beside each other, so that sums over rows need no other warp."""
    width = ACCESS_BYTES // itemsize
    lanes = columns // (WARPS * width)
    if lanes == 1:
        tiling = plgpu.Tiling(((WARP, WARPS * width), (width,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-2,), lane_dims=(-3,), vector_dim=-1)
    tiling = plgpu.Tiling(((WARP // lanes, WARPS * lanes * width), (lanes * width,), (width,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1)


def vector_layout(n: int) -> Any:
    """Of [n]: all of it in every warp, so that sums need no other warp."""
    return lane_layout(WARP, math.gcd(n // WARP, 4)).reduce(0)


def load(ref: Any, layout: Any) -> jax.Array:
    """What lies in memory, in registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def _log1p(z: jax.Array) -> jax.Array:
    """log(1 + z) of z in [0, 1] with float32's relative accuracy, which log(1 + z) loses for small z."""
    # 2 artanh(s), s <= 1/3: the first term that is left out is 2^-29 of the sum.
    s = z / (2.0 + z)
    power, total = s * s, 1.0 / 17
    for n in (15, 13, 11, 9, 7, 5, 3, 1):
        total = total * power + 1.0 / n
    return 2.0 * s * total


class Vectors(NamedTuple):
    """A token of one head as it lies in memory: q and k along the tile's K, again whole in every warp, and v."""

    q: jax.Array
    k: jax.Array
    q_whole: jax.Array
    k_whole: jax.Array
    v: jax.Array


class Norms(NamedTuple):
    """Of a token's q and k."""

    q: Any
    """1 / |q|, 1 without normalisation, as k."""
    k: Any
    qk: jax.Array
    """q . k of the vectors as they came."""


class Tile:
    """Where a tile lies, and how its registers are laid out."""

    def __init__(self, rule: Rule, block: int, itemsize: int, across: bool = False):
        self.rule, self.block = rule, block
        self.k_axis = 0 if rule.kv_layout else 1
        self.shape = (rule.K, block) if rule.kv_layout else (block, rule.K)
        self.width, self.lanes = threads_of_row(rule.kv_layout, self.shape[1], itemsize)
        self.layout = (
            _across_layout(self.shape[1], itemsize) if across else lane_layout(self.lanes, self.width)
        )
        self.k_layout, self.v_layout = self.layout.reduce(1 - self.k_axis), self.layout.reduce(self.k_axis)

    def where(self, number: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """Row of the batch, value head and entries of V of a tile; neighbours in number lie side by side."""
        parts = self.rule.V // self.block
        head, part = lax.div(number, parts), lax.rem(number, parts)
        return lax.div(head, self.rule.HV), lax.rem(head, self.rule.HV), pl.ds(part * self.block, self.block)

    def state(self, pool: Any, place: jax.Array, head: jax.Array, entries: Any) -> Any:
        """The tile in the pool."""
        return pool.at[place, head, :, entries] if self.rule.kv_layout else pool.at[place, head, entries]

    def vectors(self, q: Any, k: Any, v: Any) -> Vectors:
        """Loads q [K], k [K] and the tile's entries of v."""
        along_k, whole = self.k_layout, vector_layout(self.rule.K)
        return Vectors(
            load(q, along_k), load(k, along_k), load(q, whole), load(k, whole), load(v, self.v_layout)
        )

    def over_v(self, x: jax.Array) -> jax.Array:
        """A vector along K, repeated along V."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, [self.k_axis]), self.layout)

    def over_k(self, x: jax.Array) -> jax.Array:
        """A vector along V, repeated along K."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, [1 - self.k_axis]), self.layout)

    def zeros(self) -> jax.Array:
        """Zeros along V."""
        return plgpu.layout_cast(jnp.zeros((self.block,), jnp.float32), self.v_layout)

    def products(self, S: jax.Array, vectors: list[jax.Array]) -> list[jax.Array]:
        """x^T S of vectors x along K."""
        return [jnp.sum(S * self.over_v(x), axis=self.k_axis) for x in vectors]

    def token(
        self,
        S: jax.Array,
        x: Vectors,
        alpha: jax.Array,
        beta: jax.Array,
        again: Callable[[jax.Array], jax.Array] = lambda S: S,
    ) -> tuple[jax.Array, jax.Array]:
        """The state after a token, and its output along V; all float32. again(S) is the S that is changed."""
        q, k, q_whole, k_whole, v = (y.astype(jnp.float32) for y in x)
        return self.update(S, q, k, v, alpha, beta, lambda: self.norms(q_whole, k_whole), again)

    def update(
        self,
        S: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        alpha: jax.Array,
        beta: jax.Array,
        norms: Callable[[], Norms],
        again: Callable[[jax.Array], jax.Array] = lambda S: S,
    ) -> tuple[jax.Array, jax.Array]:
        """The same from float32 vectors along the tile, and their norms."""
        y, z = self.products(S.astype(jnp.float32), [k, q])
        rq, rk, qk = norms()
        u = beta * (v - (alpha * rk) * y)
        o = (self.rule.scale * rq) * (alpha * z + (rk * qk) * u)
        return again(S).astype(jnp.float32) * alpha + self.over_v(k) * self.over_k(rk * u), o

    def follow(
        self, S: jax.Array, k: jax.Array, v: jax.Array, alpha: jax.Array, beta: jax.Array, rk: jax.Array
    ) -> jax.Array:
        """The state after a token whose output is not asked for, as of `update`."""
        (y,) = self.products(S, [k])
        u = beta * (v - (alpha * rk) * y)
        return S * alpha + self.over_v(k) * self.over_k(rk * u)

    def norms(self, q: jax.Array, k: jax.Array) -> Norms:
        """Of whole vectors."""
        qk = jnp.sum(q * k)
        if not self.rule.use_qk_l2norm:
            return Norms(1.0, 1.0, qk)
        return Norms(lax.rsqrt(jnp.sum(q * q) + L2NORM_EPS), lax.rsqrt(jnp.sum(k * k) + L2NORM_EPS), qk)


def threads_of_row(kv_layout: bool, columns: int, itemsize: int) -> tuple[int, int]:
    """Neighbours that a thread has of a row of a tile, and threads along the row.

    Rows of V are short: one access covers them. Of a row of K a warp has a part at once, so that few steps of a sum
    go from thread to thread; the parts are those that were fastest.
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
    return -jnp.exp(A_log) * (jnp.maximum(x, 0.0) + _log1p(jnp.exp(-jnp.abs(x))))


def write_strength(b: jax.Array, allow_neg_eigval: bool) -> jax.Array:
    """beta = sigmoid(b), or twice that, likewise."""
    beta = 1.0 / (1.0 + jnp.exp(-b.astype(jnp.float32)))
    return 2.0 * beta if allow_neg_eigval else beta
