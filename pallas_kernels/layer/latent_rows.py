"""Latent attention of a token of each row over a cache that is read once.

    s_hj = (q_h . c_j + r_h . k_j) scale,   o_h = sum_{j < length} softmax_j(s_h) c_j

Every head reads the same c and k. So a tile of tokens is the M of the tensor cores and the heads are their N: a tile
gives the scores of all heads, and then its part of all o, [c, heads], which stay in registers.

Inputs (GMEM): q [B, H, C], r [B, H, R]; the cache, c [B, S, C] and k [B, S, R], bfloat16 or float16, all of one
dtype; length [B] int32, tokens of each row, at least 1: what the slots after them hold does not matter. Outputs
(GMEM), for each part of a row's tokens: o [B, parts, H, C], not divided by the sum of its weights; maxima and sums
[B, parts, H], float32, of scores in base 2.
Grid: persistent, one CTA on each multiprocessor. An item is a part of a row's tiles of tokens. A CTA has a warpgroup
that multiplies and one that loads. The cache passes through a ring of slots [`TOKENS`, 64], a tile in C / 64 + R / 64
of them, which are free once the tile has been multiplied twice: `layer.expert_ring`.

Barriers:

    barrier     who arrives                                  who waits
    full        the copies of a row's queries                the multiplying warpgroup
    empty       the multiplying warpgroup, after the item    the loading warpgroup

Shared memory: `_memory`.
Numerics: float32 scores and sums; weights are rounded before they are multiplied with c. The same bits in every call.
Hardware: compute capability 9.0. Limits: `check_supported`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.launch import compiled, grid_index, launch, num_sms, warpgroup_index
from pallas_kernels.device.layouts import COL, LOG2_E, WGMMA, WGMMA_TRANSPOSED, along_columns, iota, zeros
from pallas_kernels.device.memory import (
    SMEM_LIMIT,
    Barriers,
    Buffer,
    Memory,
    smem_bytes,
    store_any,
    transposed,
)
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer.expert_ring import Ring, barriers, roles, share

NEEDS = Needs.TMA | Needs.WGMMA

TOKENS = 64
"""Tokens of a tile, the M of a product."""

PIECE = 64
"""Numbers of a token in a slot: 128 bytes, over which rows are swizzled."""

SUMS = 64
"""Registers of a thread that hold sums of o, at most."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut, not what is computed."""

    parts: int
    """Parts of a row's tokens."""
    stages: int = 22
    """Slots of the ring."""
    ctas: int = dataclasses.field(default_factory=num_sms)

    @classmethod
    def default(cls, rows: int, slots: int) -> "Config":
        """Takes as many parts as need the least time. One costs about two more tiles: its o is written and read."""
        tiles = pl.cdiv(slots, TOKENS)

        def time(parts: int) -> float:
            return pl.cdiv(rows * parts, num_sms()) * (tiles / parts + 2)

        return cls(min(range(1, max(1, min(num_sms(), tiles // 2)) + 1), key=time))


def check_supported(q: Any, r: Any, c: Any) -> str | None:
    """Why the kernel cannot take queries q [B, H, C] and r [B, H, R] and a cache c [B, S, C]; None if it can."""
    (_, H, C), R, S = q.shape, r.shape[2], c.shape[1]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or c.dtype != q.dtype:
        return f"queries are {q.dtype}, the cache {c.dtype}; the kernel takes bfloat16 or float16"
    if H % 8 or C % PIECE or R % PIECE or H * C > SUMS * 128:
        return f"{H} heads, widths {C} and {R}; the kernel takes multiples of 8 and {PIECE}, H C up to {SUMS * 128}"
    return f"{S} slots; the kernel takes multiples of 8" if S % 8 or not S else None


def _memory(config: Config, heads: int, pieces: int, dtype: Any) -> Memory:
    return {
        "tiles": Buffer((config.stages, TOKENS, PIECE), dtype, swizzle=128),
        "q": Buffer((pieces, heads, PIECE), dtype, swizzle=128),
        "p": Buffer((heads, TOKENS), dtype, swizzle=128),
        "q_full": Barriers(arrivals=pieces),
        "q_empty": Barriers(arrivals=1),
        **barriers(1, 1, config.stages),
    }


class _Cta:
    """The knowledge of every warpgroup of a CTA."""

    def __init__(self, gmem: Any, smem: Any, *, config: Config, scale: float, interpreted: bool):
        self.gmem, self.smem, self.config, self.scale = gmem, smem, config, scale
        self.dev, self.ring, self.wg = Device(interpreted), Ring(smem, config.stages), warpgroup_index()
        rows, self.H, self.C = gmem.q.shape
        self.wide, self.pieces = self.C // PIECE, smem.q.shape[0]
        self.items = share(rows * config.parts, config.ctas)

    def place(self, i) -> tuple[Any, Any, Any, Any, Any]:
        """Row, part, length, first tile and the one behind the last of the i-th item of this CTA."""
        item, parts = grid_index() + i * self.config.ctas, jnp.int32(self.config.parts)
        row, part = lax.div(item, parts), lax.rem(item, parts)
        length = jnp.minimum(self.gmem.length[row], self.gmem.c.shape[1])
        tiles = lax.div(length + (TOKENS - 1), jnp.int32(TOKENS))
        return row, part, length, lax.div(tiles * part, parts), lax.div(tiles * (part + 1), parts)

    def walk(self, item: Any) -> None:
        """item(i, first) for all items of this CTA, with the number of the item's first slot."""

        def body(i, first):
            begin, end = self.place(i)[3:]
            item(i, first)
            return first + (end - begin) * self.pieces

        lax.fori_loop(0, self.items, body, jnp.int32(0))


def _load(cta: _Cta) -> None:
    """The role of the loading warpgroup."""
    gmem, smem = cta.gmem, cta.smem

    def copies(n, of_c, of_r):
        """of_c(columns) of the n-th piece, or of_r(columns)."""
        return of_c(pl.ds(n * PIECE, PIECE)) if n < cta.wide else of_r(pl.ds((n - cta.wide) * PIECE, PIECE))

    def item(i, first):
        row, _, _, begin, end = cta.place(i)
        pl.when(i > 0)(lambda: plgpu.barrier_wait(smem.q_empty))
        for n in range(cta.pieces):
            source = copies(n, lambda own: gmem.q.at[row, :, own], lambda own: gmem.r.at[row, :, own])
            plgpu.copy_gmem_to_smem(source, smem.q.at[n], smem.q_full)

        def tile(t, _):
            tokens = pl.ds(t * TOKENS, TOKENS)
            for n in range(cta.pieces):
                slot, barrier = cta.ring.free(first + (t - begin) * cta.pieces + n)
                source = copies(
                    n, lambda own: gmem.c.at[row, tokens, own], lambda own: gmem.k.at[row, tokens, own]
                )
                plgpu.copy_gmem_to_smem(source, smem.tiles.at[slot], barrier)
            return ()

        lax.fori_loop(begin, end, tile, ())

    cta.walk(item)


def _multiply(cta: _Cta) -> None:
    """The role of the multiplying warpgroup."""
    smem, dev, ring, H = cta.smem, cta.dev, cta.ring, cta.H
    shape = TOKENS, H

    def scores(first, acc):
        for n in range(cta.pieces):
            dev.issue(acc, smem.tiles.at[ring.filled(first + n)], transposed(smem.q.at[n]))
        dev.finish(0)
        return dev.collect(acc)

    def item(i, first):
        row, part, length, begin, end = cta.place(i)
        plgpu.barrier_wait(smem.q_full)

        def tile(t, carry):
            largest, total, *sums = carry
            slots = first + (t - begin) * cta.pieces
            s = pl.run_scoped(functools.partial(scores, slots), plgpu.ACC(shape, jnp.float32))
            token = iota(shape, 0) + t * TOKENS
            s = jnp.where(token < length, s * (cta.scale * LOG2_E), -jnp.inf)
            new = jnp.maximum(largest, jnp.max(s, axis=0))
            p, factor = (
                jnp.exp2(s - along_columns(new, TOKENS)),
                along_columns(jnp.exp2(largest - new), TOKENS),
            )
            transposed(smem.p)[...] = p.astype(smem.p.dtype)

            @pl.when(length < (t + 1) * TOKENS)
            def _():
                # A weight of 0 is not enough: the slots after the tokens may hold NaN, of a request before this one.
                for n in range(cta.wide):
                    c = smem.tiles.at[ring.slot(slots + n)]
                    x = plgpu.load(c, layout=WGMMA, optimized=False)
                    is_token = iota((TOKENS, PIECE), 0) + t * TOKENS < length
                    store_any(c, jnp.where(is_token, x, jnp.zeros_like(x)))

            dev.commit()

            def add(add):
                for n in range(cta.wide):
                    c = smem.tiles.at[ring.slot(slots + n)]
                    add(n, transposed(c), transposed(smem.p))

            sums = dev.accumulate([x * factor for x in sums], add)
            for n in range(cta.pieces):
                ring.release(slots + n)
            return new, total * factor + p, *sums

        start = zeros((H,), jnp.float32, COL) - jnp.inf
        largest, total, *sums = lax.fori_loop(
            begin, end, tile, (start, *[zeros(shape, jnp.float32)] * (1 + cta.wide))
        )
        plgpu.barrier_arrive(smem.q_empty)
        for n, x in enumerate(sums):
            target = cta.gmem.o.at[row, part, :, pl.ds(n * PIECE, PIECE)]
            store_any(transposed(target), plgpu.layout_cast(x, WGMMA_TRANSPOSED))
        store_any(cta.gmem.largest.at[row, part], largest)
        store_any(cta.gmem.total.at[row, part], jnp.sum(total, axis=0))

    cta.walk(item)


def _body(gmem: Any, smem: Any, **static: Any) -> None:
    cta = _Cta(gmem, smem, **static)
    roles(cta.wg, 1, lambda: _load(cta), lambda: _multiply(cta))


def latent_rows(
    q: Float[Array, "B H C"],
    r: Float[Array, "B H R"],
    c: Float[Array, "B S C"],
    k: Float[Array, "B S R"],
    length: Int[Array, " B"],
    *,
    scale: float,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "B H C"]:
    """Mixed latents of a query of each row, where `check_supported` says so.

    Args:
      q, r: queries of the heads as they meet c, and as they meet k.
      c, k: the cache.
      length: tokens of each row, at least 1; more than there are slots count as all slots.
      scale: factor of the scores.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      o in q's dtype.
    """
    config = config or Config.default(q.shape[0], c.shape[1])
    return compiled(_run, interpret, static=3)(config, scale, interpret, q, r, c, k, length)


def _run(config, scale, interpret, q, r, c, k, length):
    (B, H, C), parts, wide = q.shape, config.parts, jnp.float32
    memory = _memory(config, H, (C + r.shape[2]) // PIECE, q.dtype)
    assert smem_bytes(memory) <= SMEM_LIMIT, f"{config}: {smem_bytes(memory)} bytes of shared memory"
    found = launch(
        "latent_rows",
        functools.partial(_body, config=config, scale=scale, interpreted=interpret is not None),
        inputs={"q": q, "r": r, "c": c, "k": k, "length": length},
        outputs={
            "o": jax.ShapeDtypeStruct((B, parts, H, C), wide),
            "largest": jax.ShapeDtypeStruct((B, parts, H), wide),
            "total": jax.ShapeDtypeStruct((B, parts, H), wide),
        },
        memory=memory,
        auto_barriers=False,
        ctas=config.ctas,
        warpgroups=2,
        interpret=interpret,
    )
    factor = jnp.exp2(found["largest"] - jnp.max(found["largest"], axis=1, keepdims=True))
    total = jnp.sum(factor * found["total"], axis=1)
    o = jnp.sum(factor[..., None] * found["o"], axis=1)
    return (o / total[..., None]).astype(q.dtype)
