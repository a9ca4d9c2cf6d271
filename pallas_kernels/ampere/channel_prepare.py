"""Everything of a chunk that does not depend on the state, where each channel decays by itself.

The equations and the products of pairs by halving are those of `chunks.pairs`, from which T, P, kg, qg, kr and gl
come; products between blocks of 16 tokens are mma.sync here. There are no visits: every chunk is of one sequence.

Inputs (GMEM): q [places, Hq K], k [places, Hk K], e [places, HO K] (optional), g [places, HO K] f32, beta [chunks HO,
C] f32.
Outputs (GMEM): t = T and p = P [chunks HO C, C], kg, qg and kr [chunks HO C, K] in k's dtype, gl [chunks HO, K] f32.
Grid: one CTA of one warpgroup for each (chunk, output head). It walks over slices of 32 channels.
Shared memory: `_memory`, 48 KB at K = 128, 64 KB with erase keys.
Hardware: compute capability 8.0 and later. Limits: those of `chunks.pairs`; K 64 or 128.
Source: `chunks.pairs`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.chunks.merging import BLOCK, HALF, invert
from pallas_kernels.chunks.pair_levels import SLICE, Halves, Masks, Sums, products_within
from pallas_kernels.chunks.pairs import Pairs
from pallas_kernels.device import rows as block_rows
from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.layouts import CHUNK, COL, LOG2_E, RESET_G2, ROW, WGMMA, along_columns
from pallas_kernels.device.memory import Buffer, Memory
from pallas_kernels.device.mma import SWIZZLE, MmaDevice


def _memory(K: int, dtype, *, erases: bool) -> Memory:
    """Shared memory of a CTA."""
    tokens = Buffer((CHUNK, K), dtype, swizzle=SWIZZLE)
    return {
        "q": tokens,
        "k": tokens,
        "e": tokens if erases else None,
        "blocks": Buffer((3, block_rows.BLOCKS, SLICE)),
        "near": Buffer((CHUNK + BLOCK, HALF), jnp.float16, swizzle=64),
        "far": Buffer((CHUNK, HALF), jnp.float16, swizzle=64),
        "x_t": Buffer((CHUNK + BLOCK, BLOCK), jnp.float16, swizzle=32),
    }


class _Sizes(NamedTuple):
    """Static sizes of one kernel."""

    Hq: int
    Hk: int
    HO: int
    K: int
    scale: float


class _Cta:
    """All that the warpgroup knows."""

    def __init__(self, gmem: Any, smem: Any, *, sizes: _Sizes, interpreted: bool):
        self.gmem, self.smem, self.sizes, self.dev = gmem, smem, sizes, MmaDevice(interpreted)
        self.item = grid_index()
        """Number of the chunk and output head."""
        self.chunk, self.head = lax.div(self.item, sizes.HO), lax.rem(self.item, sizes.HO)
        self.rows = pl.ds(self.item * CHUNK, CHUNK)
        """The item's rows of the outputs."""

    def load(self) -> None:
        """Brings queries, keys and erase keys to shared memory."""
        for name, heads in (("q", self.sizes.Hq), ("k", self.sizes.Hk), ("e", self.sizes.HO)):
            if (tile := getattr(self.smem, name)) is not None:
                column = lax.div(self.head, self.sizes.HO // heads) * self.sizes.K
                self.dev.copy(getattr(self.gmem, name), self.chunk * CHUNK, column, tile)
        self.dev.arrived()

    def gates(self, j) -> jax.Array:
        """log2 of the decays of a slice."""
        channels = pl.ds(self.head * self.sizes.K + j * SLICE, SLICE)
        g = self.dev.vector(self.gmem.g.at[pl.ds(self.chunk * CHUNK, CHUNK), channels], WGMMA)
        return jnp.maximum(g * LOG2_E, RESET_G2)

    def tokens(self, j) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Erase keys, queries and keys of a slice. Loaded twice: they would take registers in between."""

        def load(tile):
            return plgpu.load(tile.at[:, pl.ds(j * SLICE, SLICE)], layout=WGMMA).astype(jnp.float32)

        q, k = load(self.smem.q), load(self.smem.k)
        return k if self.smem.e is None else load(self.smem.e), q, k


def _slice(cta: _Cta, masks: Masks, j, carry):
    """One slice of channels: its part of all sums of products, and its kg, qg, kr and gl."""
    gmem, smem, dev = cta.gmem, cta.smem, cta.dev
    erased, read, same = carry
    g2, (e, q, k) = cta.gates(j), cta.tokens(j)
    q_half, k_half = q.astype(jnp.float16), k.astype(jnp.float16)
    halves = Halves(k_half if smem.e is None else e.astype(jnp.float16), q_half, k_half)
    same = same + jnp.sum(q * k, axis=1)
    first, rest, sums = (smem.blocks.at[n] for n in range(3))
    block_rows.store_row_sums(dev, sums, g2)
    erased, read, decays = products_within(dev, masks, halves, jnp.exp2(g2), erased, read)
    block_rows.store_first_rows(dev, first, decays.first)
    block_rows.store_first_rows(dev, rest, decays.rest)
    dev.commit()
    between = block_rows.block_decays(dev, first, rest, SLICE)
    near = halves.scaled(jnp.where(masks.bits[4], decays.from_first, decays.to_end) * between.near)
    far = halves.scaled(jnp.where(masks.bits[5], decays.from_first, decays.to_end) * between.far)
    # Rows 0 to 63 of the tile then are the blocks before those of the warps.
    smem.near.at[BLOCK : CHUNK + BLOCK][...], smem.far[...] = near[2], far[2]
    dev.commit()
    erased, read = (_between_blocks(cta, x, near[n], far[n]) for n, x in enumerate((erased, read)))

    from_start, to_end = decays.from_first * decays.first * between.before, decays.to_end * between.after
    e, q, k = cta.tokens(j)
    place = cta.rows, pl.ds(j * SLICE, SLICE)
    results = (gmem.kg, e * from_start), (gmem.qg, q * (cta.sizes.scale * from_start)), (gmem.kr, k * to_end)
    for destination, x in results:
        dev.store(destination.at[place], x.astype(destination.dtype))
    blocks = [plgpu.load(sums.at[w], layout=COL) for w in range(block_rows.BLOCKS)]
    gl = jnp.exp2(blocks[0] + blocks[1] + blocks[2] + blocks[3])
    gmem.gl.at[cta.item, pl.ds(j * SLICE, SLICE)][...] = gl
    dev.commit()
    return erased, read, same


def _between_blocks(cta: _Cta, sums: Sums, near: jax.Array, far: jax.Array) -> Sums:
    """The sums with a slice's products of tokens of different blocks of 16. near and far are operands of rows."""
    dev, columns = cta.dev, plgpu.load(cta.smem.near.at[0:CHUNK], layout=WGMMA)
    (total,) = sums.near
    for part in (slice(0, BLOCK), slice(BLOCK, SLICE)):
        total = dev.blocks_multiply_add(total, near[:, part], columns[:, part])
    return sums._replace(
        near=(total,), far=dev.add_transposed(sums.far, dev.left(far), cta.smem.far.at[0:HALF])
    )


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = _Cta(gmem, smem, **static)
    dev, sizes = cta.dev, cta.sizes
    cta.load()
    masks = Masks(dev)
    start = Sums.of_nothing(1), Sums.of_nothing(1), plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), ROW)
    erased, read, same = lax.fori_loop(0, sizes.K // SLICE, functools.partial(_slice, cta, masks), start)
    beta = dev.vector(gmem.beta.at[cta.item], COL)
    strengths = along_columns(beta, CHUNK)
    parts = tuple(-x for x in erased.strictly_lower(masks))
    t = invert(dev, parts, None, beta, smem.near.at[0:CHUNK], smem.far, smem.x_t)
    p = read.lower(masks, same)
    for n in (0, 1):
        columns = slice(HALF * n, HALF * (n + 1))
        dev.store(gmem.t.at[cta.rows, columns], t[n].astype(gmem.t.dtype))
        half = p[n] * (strengths[:, columns] * sizes.scale)
        dev.store(gmem.p.at[cta.rows, columns], half.astype(gmem.p.dtype))


def channel_prepare(
    q: Float[Array, "places Hq K"],
    k: Float[Array, "places Hk K"],
    e: Float[Array, "places HO K"] | None,
    g: Float[Array, "places HO K"],
    beta: Float[Array, "chunks HO C"],
    *,
    scale: float,
    interpret: Any = None,
) -> Pairs:
    """T, P and the decayed queries and keys of every chunk; see the module docstring.

    Args:
      q, k, e: bfloat16 or float16, K 64 or 128. e: erase keys, None for k.
      g: log decays, natural logarithm, float32, <= 0, -inf for a reset.
      beta: write strengths, float32.
      scale: factor of the output.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    (places, Hk, K), (chunks, HO), f32 = k.shape, beta.shape[:2], jnp.float32
    sizes, S = _Sizes(q.shape[1], Hk, HO, K, float(scale)), jax.ShapeDtypeStruct
    square, tokens = (S((chunks * HO * CHUNK, width), k.dtype) for width in (CHUNK, K))
    arrays = {"q": q, "k": k, "e": e, "g": g}
    results = launch(
        "mma_channel_prepare",
        functools.partial(_body, sizes=sizes, interpreted=interpret is not None),
        inputs={name: None if y is None else y.reshape(places, -1) for name, y in arrays.items()}
        | {"beta": beta.reshape(-1, CHUNK)},
        outputs={"t": square, "p": square, "kg": tokens, "qg": tokens, "kr": tokens}
        | {"gl": S((chunks * HO, K), f32)},
        memory=_memory(K, k.dtype, erases=e is not None),
        ctas=chunks * HO,
        auto_barriers=True,
        interpret=interpret,
    )
    return Pairs(**{name: y.reshape(chunks, HO, *_shape(name, K)) for name, y in results.items()})


def _shape(name: str, K: int) -> tuple[int, ...]:
    """The shape of a result of one chunk and head."""
    return (K,) if name == "gl" else (CHUNK, CHUNK if name in ("t", "p") else K)
