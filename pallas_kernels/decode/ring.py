"""A ring of tokens beside a state: in memory, and in the registers of a warpgroup that streams the state past it.

A slot of a pool holds a checkpoint S0 and L entries (k_j, u_j, g_j), of which the first `count` are tokens:
normalised keys, written values, log decays. They stand for the state

    S = D S0 + sum_j D_j k_j u_j^T

where D_j = exp(g_j+1 + ... + g_count) is the decay since token j, and D that since the checkpoint.

A state that is only read need not stay in registers: it passes in chunks, and x^T S0 is added up on the way. A warp
has a fourth of the rows of what is summed over, of S0 = [4, K / 4, V] and of the ring [4, L / 4, ...] alike, and all
columns; the four sums meet in shared memory.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.tiles import ACCESS_BYTES, WARP, WARPS, Rule, lane_layout, load
from pallas_kernels.device.launch import grid_index, warpgroup_index
from pallas_kernels.device.layouts import L2NORM_EPS
from pallas_kernels.device.memory import store_any

LENGTH = 16
"""L: entries of a ring."""

CHUNK_ROWS = 8
"""Rows of K that a warp has of a chunk [K, V], at most."""

CHUNK_ENTRIES = 32
"""Entries of V of a chunk [V, K]."""

AHEAD = 2
"""Chunks that are on their way while one is worked on."""


def rows_layout(columns: int) -> Any:
    """Of [4, rows, columns]: a warp has one of the four, its threads lie along the columns."""
    width = math.gcd(columns // WARP, 4)
    tiling = plgpu.Tiling(((WARPS, 1, WARP * width), (width,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)


def keys_layout(parts: int, columns: int) -> Any:
    """Of keys [4, rows, parts, columns]: a warp has one of the four, its threads lie along parts and columns."""
    lanes = WARP // parts
    width = math.gcd(columns // lanes, 4)
    tiling = plgpu.Tiling(((WARPS, 1, parts, lanes * width), (width,)))
    lane_dims = (-2,) if parts == 1 else (-3, -2)
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=lane_dims, vector_dim=-1)


@functools.cache
def _relabelled(shape: tuple[int, ...], layout: Any, other: Any) -> Any:
    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), other)
    )
    def relabel(ctx, x):
        target = other.to_mgpu()
        registers = x.registers.reshape(target.registers_shape(shape))
        return fragmented_array.FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    return relabel


def relabelled(x: jax.Array, layout: Any, other: Any, interpreted: bool) -> jax.Array:
    """x in a layout that puts the same numbers into the same registers, in other words."""
    return x if interpreted else _relabelled(x.shape, layout, other)(x)


def total(x: jax.Array) -> jax.Array:
    """Sum of a matrix."""
    return jnp.sum(jnp.sum(x, axis=1))


def spread(x: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...], layout: Any) -> jax.Array:
    """x along some axes of a shape, repeated along the others."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), layout)


def parts_of_k(kv_layout: bool) -> int:
    """Parts in which vectors along K lie in memory."""
    return WARPS if kv_layout else 1


class Slot:
    """What belongs to a slot and to `block` entries of V of one head.

    In memory [4, 4, parts, K / parts], [4, 4, V] and [16] are the ring, [4, K / 4, V] or [V, K] is the state. Vectors
    along K are [parts, K / parts]: the four warps' rows of [K, V], or one part.
    """

    def __init__(
        self,
        gmem: Any,
        rule: Rule,
        place: jax.Array,
        head: jax.Array,
        k_head: jax.Array,
        first: Any,
        block: int,
    ):
        self.rule, self.block, self.first = rule, block, first
        entries = pl.ds(first, block)
        self.k, self.g = gmem.ring_k.at[place, k_head], gmem.ring_g.at[place, head]
        self.u = gmem.ring_u.at[place, head, :, :, entries]
        state = gmem.state.at[place, head]
        self.state = state.at[:, :, entries] if rule.kv_layout else state.at[entries]
        self.columns = rows_layout(block)
        """Layout of [4, rows, block]."""
        self.along_v = self.columns.reduce(1).reduce(0)
        self.parts = parts_of_k(rule.kv_layout)
        self.keys = keys_layout(self.parts, rule.K // self.parts)
        self.whole_k = self.keys.reduce(1).reduce(0)
        """Layout of a vector along K, all of it in every warp."""
        if rule.kv_layout:
            self.size = math.gcd(CHUNK_ROWS, rule.K // WARPS)
            self.number, self.shape = rule.K // WARPS // self.size, (WARPS, self.size, block)
            self.layout, self.k_axes, self.v_axes = self.columns, (0, 1), (2,)
            self.chunk_k, self.chunk_v = self.layout.reduce(2), self.along_v
        else:
            width = ACCESS_BYTES // gmem.state.dtype.itemsize
            self.size = CHUNK_ENTRIES
            self.number, self.shape = block // self.size, (self.size, rule.K)
            self.layout, self.k_axes, self.v_axes = (
                lane_layout(math.gcd(16, rule.K // width), width),
                (1,),
                (0,),
            )
            self.chunk_k, self.chunk_v = self.layout.reduce(0), self.layout.reduce(1)

    def chunk(self, i: int) -> Any:
        """A chunk of the state in memory."""
        part = pl.ds(i * self.size, self.size)
        return self.state.at[:, part] if self.rule.kv_layout else self.state.at[part]

    def start(self) -> list[jax.Array]:
        """Loads of the first chunks."""
        return [load(self.chunk(i), self.layout) for i in range(min(AHEAD, self.number))]

    def chunks(self, ahead: list[jax.Array]) -> Iterator[jax.Array]:
        """All chunks, of which the first are on their way, in float32."""
        for i in range(self.number):
            if i + AHEAD < self.number:
                ahead.append(load(self.chunk(i + AHEAD), self.layout))
            yield ahead.pop(0).astype(jnp.float32)

    def k_of_chunk(self, i: int, x: Any) -> jax.Array:
        """What a chunk needs of a vector along K in memory."""
        x = x.at[:, pl.ds(i * self.size, self.size)] if self.rule.kv_layout else x.at[0]
        return load(x, self.chunk_k).astype(jnp.float32)

    def key(self, j: jax.Array) -> Any:
        """A key of the ring in memory."""
        return self.k.at[lax.div(j, WARPS), lax.rem(j, WARPS)]

    def value(self, j: jax.Array) -> Any:
        """A value of the ring in memory."""
        return self.u.at[lax.div(j, WARPS), lax.rem(j, WARPS)]

    def decays(self, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Decay since each entry [4, L / 4], 0 for what is left over, and since the checkpoint."""
        tiling = plgpu.Tiling(((WARPS, 1, LENGTH),))
        layout = plgpu.Layout.TILED(
            tiling, warp_dims=(-3,), lane_dims=(plgpu.Replicated(WARP),), vector_dim=-1
        )
        shape, in_row = (WARPS, LENGTH // WARPS, LENGTH), layout.reduce(0).reduce(0)
        g = load(self.g, in_row)
        g = jnp.where(plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=in_row) < count, g, 0.0)
        warp, row, column = (plgpu.broadcasted_iota(jnp.int32, shape, n, layout=layout) for n in range(3))
        entry = warp * (LENGTH // WARPS) + row
        since = jnp.sum(jnp.where(column > entry, spread(g, shape, (2,), layout), 0.0), axis=2)
        is_token = jnp.sum(jnp.where((column == entry) & (column < count), 1.0, 0.0), axis=2)
        return jnp.where(is_token > 0.0, jnp.exp(since), 0.0), jnp.exp(jnp.sum(g))

    def folded(self, i: int, S: jax.Array, count: jax.Array, total: jax.Array, last: Any) -> jax.Array:
        """A chunk of D S + sum_j D_j k_j u_j^T, where D is `total`, and `last` the log decay after the last token."""

        def entry(j):
            return (
                self.k_of_chunk(i, self.key(j)),
                load(self.v_of_chunk(i, self.value(j)), self.chunk_v),
                self.g[j],
            )

        def add(n, carry):
            S, since, (k, u, g) = carry
            # The entry before is on its way while this one is added.
            following = entry(jnp.maximum(count - 2 - n, 0))
            return S + self.outer(k * jnp.exp(since), u.astype(jnp.float32)), since + g, following

        carry = (S * total, jnp.float32(0) + last, entry(jnp.maximum(count - 1, 0)))
        return lax.fori_loop(0, count, add, carry)[0]

    def v_of_chunk(self, i: int, x: Any) -> Any:
        """What a chunk needs of a vector along V in memory."""
        return x if self.rule.kv_layout else x.at[pl.ds(i * self.size, self.size)]

    def outer(self, k: jax.Array, u: jax.Array) -> jax.Array:
        """k u^T of a chunk."""
        return spread(k, self.shape, self.k_axes, self.layout) * spread(
            u, self.shape, self.v_axes, self.layout
        )

    def store(self, i: int, S: jax.Array) -> None:
        """Writes a chunk."""
        ref = self.chunk(i)
        store_any(ref, S.astype(ref.dtype))


def norm(x: jax.Array) -> jax.Array:
    """1 / |x|, of a vector along K in every warp."""
    return lax.rsqrt(total(x * x) + L2NORM_EPS)


def warpgroups(tiles: int, tokens: int = 1) -> int:
    """Warpgroups of a CTA, each with a tile of its own: four leave a thread 128 registers, one more."""
    return 4 if tiles % 4 == 0 and tokens == 1 else 1


def tile_index(W: int) -> tuple[jax.Array, jax.Array]:
    """Number of a warpgroup's tile, and of the warpgroup in its CTA."""
    wg = warpgroup_index()
    return grid_index() * W + wg, wg


def default_block(V: int) -> int:
    """Entries of V that a warpgroup has: a state of a head, or what V allows."""
    return next(block for block in (128, 64, 32) if V % block == 0)


def split_k(x: jax.Array, kv_layout: bool) -> jax.Array:
    """[..., K] as [..., parts, K / parts]."""
    parts = parts_of_k(kv_layout)
    return x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts)


def divided(
    state: jax.Array, k: jax.Array, u: jax.Array, g: jax.Array, *, kv_layout: bool
) -> list[jax.Array]:
    """States and rings with rows that are summed over as [4, rows / 4]."""
    if kv_layout:
        state = state.reshape(*state.shape[:2], WARPS, -1, state.shape[-1])
    k, u = (x.reshape(*x.shape[:2], WARPS, LENGTH // WARPS, x.shape[-1]) for x in (k, u))
    return [state, split_k(k, kv_layout), u, g]
