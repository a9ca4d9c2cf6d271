"""Everything of a chunk that does not depend on the state, where each channel decays by itself.

With a_t = 2^g2_t [K] the decay of token t, g2 = max(LOG2_E g, RESET_G2), products over tokens of one visit, and
e the erase keys (the keys themselves where none are given):

    pairs(x, k)_ij = sum_c x_ic k_jc a_{j+1,c} ... a_{i,c}      i >= j
    T  = (I + strictLower(pairs(e, k)) diag(beta))^-1           P = scale pairs(q, k) diag(beta)
    kg = e a_1 ... a_i       qg = scale q a_1 ... a_i       kr = k a_{j+1} ... a_C       gl = a_1 ... a_C

A visit is a chunk and a sequence that has tokens in it (see `work.spans`): tokens of others count as zeros without
decay. So what reads the results needs no mask for them.

Pairs. The decay of a pair cannot leave the sum over channels, and its usual split into 2^G_i and 2^-G_j overflows.
Here a pair belongs to the smallest aligned block of 2, 4, .. 64 tokens whose halves separate it. Its anchor is the
first token of the later half: the later token's factor is the decay from the anchor to it, the earlier one's that
from it to the anchor. Each token has one factor a level, in [0, 1], so k f is the operand of rows and of columns, and
nothing overflows for any gate. Factors are running products: those of a block of 2 n tokens are those of its halves,
times one number. No number depends on a gate of a later token. gl is 2 to a sum, for products lose decays near 1.

Levels of 1 to 8 tokens are warp-level mma on the diagonal 16x16 blocks, whose fragments are operands as they lie. For
levels of 16 and 32 the columns go through shared memory, and the decays of whole blocks with them.

Tokens that are two rows (`work.halves`): e [B, T, He, K] are the keys of first halves, which decay; k and q those of
second ones, which do not. Level 0 has no decay, and the other levels have one factor for both rows of a token: no
number but the products is computed twice. First halves are not read: P and qg have the rows of second ones alone.

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], e [B, T, HO, K] (optional), g [B, T, HO, K] float32, beta [B, HO,
NT C] float32, tables of visits int32 (packed rows).
Outputs (GMEM): t, p [visits, HO, C, C], kg, qg, kr [visits, HO, C, K] in k's dtype, gl [visits, HO, K] float32; p and
qg have 32 rows where tokens are two. What belongs to the padding is not written.
Grid: persistent, one CTA per SM with independent warpgroups; each walks over (visit, output head).
Shared memory: `_memory`, 109 KB a warpgroup at K = 128. kg, qg and kr overwrite the slices of e, q and k.
Hardware: compute capability 9.0. Limits: K a multiple of 64 up to 256. Products of tokens have float16 operands: keys
and queries within its range, |k|^2 beta at most about 2 for the inverse.
Source: Kimi Team, "Kimi Linear", section 3; fla's `chunk_kda_fwd_intra` has sub-chunks of 16 with one anchor.
"""

import dataclasses
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
from pallas_kernels.device import rows as block_rows
from pallas_kernels.device.launch import launch, num_sms
from pallas_kernels.device.layouts import (
    CHUNK,
    COL,
    L2NORM_EPS,
    LOG2_E,
    RESET_G2,
    ROW,
    WGMMA,
    along_columns,
    along_rows,
    zeros,
)
from pallas_kernels.device.memory import Barriers, Buffer, Memory, fitting, transposed
from pallas_kernels.work import halves
from pallas_kernels.work.foreign import mask_foreign
from pallas_kernels.work.spans import Span
from pallas_kernels.work.tables import VisitTables, table_inputs
from pallas_kernels.work.workers import VisitSizes, Worker, owned


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs, not what it computes."""

    warpgroups: int = 2
    """Independent warpgroups of a CTA."""
    ctas: int = dataclasses.field(default_factory=num_sms)

    @classmethod
    def default(cls, K: int, erases: bool) -> "Config":
        """The configuration of most warpgroups that fit."""
        return fitting((cls(2), cls(1)), lambda x: _memory(x, K, jnp.bfloat16, erases=erases))


def _memory(config: Config, K: int, dtype, *, erases: bool, tokens: int = CHUNK) -> Memory:
    """Shared memory of a CTA. Tiles lie in slices of channels.

    Args:
      tokens: of a chunk.
    """
    n, slices = config.warpgroups, K // SLICE
    rows = Buffer((n, slices, CHUNK, SLICE), dtype, swizzle=64)
    return {
        "q": Buffer((n, slices, tokens, SLICE), dtype, swizzle=64),
        "k": rows,
        "e": rows,
        "g": Buffer((n, slices, tokens, SLICE), swizzle=128),
        "beta": Buffer((n, CHUNK)),
        "gl": Buffer((n, slices, SLICE)),
        "blocks": Buffer((n, 3, block_rows.BLOCKS, SLICE)),
        "near": Buffer((n, CHUNK, HALF), jnp.float16, swizzle=64),
        "far": Buffer((n, CHUNK, HALF), jnp.float16, swizzle=64),
        "x_t": Buffer((n, CHUNK + BLOCK, BLOCK), jnp.float16, swizzle=32),
        "out": Buffer((n, 4, CHUNK, HALF), dtype, swizzle=64),
        "loaded": Barriers(arrivals=(3 + erases) * slices + 1, count=n),
    }


class _Sizes(NamedTuple):
    """Static sizes and switches of one kernel."""

    Hq: int
    Hk: int
    He: int
    HO: int
    K: int
    scale: float
    normalize: bool
    halves: bool

    @property
    def slices(self) -> int:
        """Slices of the channels."""
        return self.K // SLICE


class _Warpgroup(Worker):
    """One of the independent warpgroups."""

    def __init__(self, gmem: Any, smem: Any, *, sizes: _Sizes, **static):
        super().__init__(gmem, smem, **static)
        self.sizes = sizes
        self.erases = gmem.e is not None and not sizes.halves


def _load(own: _Warpgroup, n) -> None:
    """Starts the copies of the n-th item."""
    gmem, smem, sizes, wg = own.gmem, own.smem, own.sizes, own.wg
    place = own.place(n)
    loaded, tokens = smem.loaded.at[wg], pl.ds(0, own.work.tokens)
    for j in range(sizes.slices):
        channels = pl.ds(j * SLICE, SLICE)
        for name, heads in (("q", sizes.Hq), ("k", sizes.Hk), ("e", sizes.He), ("g", sizes.HO)):
            source, tile = getattr(gmem, name), getattr(smem, name).at[wg, j]
            if source is not None:
                head = place.head if name == "g" else lax.div(place.head, sizes.HO // heads)
                tile = tile.at[tokens] if sizes.halves else tile
                plgpu.copy_gmem_to_smem(source.at[place.row, place.tokens, head, channels], tile, loaded)
    plgpu.copy_gmem_to_smem(gmem.beta.at[place.row, place.head, own.rows(place)], smem.beta.at[wg], loaded)


def _reciprocal_norms(own: _Warpgroup, tile: Any) -> jax.Array:
    """1 / |x| of every token of a tile, in layout ROW."""

    def add(j, squares):
        x = plgpu.load(tile.at[own.wg, j], layout=WGMMA).astype(jnp.float32)
        return squares + x * x

    squares = lax.fori_loop(0, own.sizes.slices, add, zeros((CHUNK, SLICE), jnp.float32))
    return lax.rsqrt(jnp.sum(squares, axis=1) + L2NORM_EPS)


def _slice(own: _Warpgroup, span: Span | None, rstd, masks: Masks, j, carry):
    """One slice of channels: its part of all sums of products, and what it leaves of kg, qg, kr and gl."""
    smem, dev, wg = own.smem, own.dev, own.wg
    erased, read, same = carry
    erases = own.erases

    def half(tile):
        tokens = tile.at[wg, j, pl.ds(0, halves.TOKENS)]
        return plgpu.load(tokens, layout=block_rows.HALF).astype(jnp.float32)

    def load(tile, factors=None):
        x = plgpu.load(tile.at[wg, j], layout=WGMMA).astype(jnp.float32)
        if span is not None:
            x = jnp.where(owned(span, 0, (CHUNK, SLICE)), x, 0.0)
        return x if factors is None else x * along_rows(factors, SLICE)

    g2 = jnp.maximum((half if masks.halves else load)(smem.g) * LOG2_E, RESET_G2)
    alpha = functools.partial(jnp.exp2, g2)
    if masks.halves:
        g2, alpha = masks.of_first(g2, 0.0), functools.partial(masks.of_first, alpha(), 1.0)

    def tokens():
        """Queries, keys and erase keys. They are loaded twice, for they would take registers in between."""
        if masks.halves:
            k = block_rows.joined(dev, half(smem.e), half(smem.k))
            return masks.of_second(half(smem.q)), k, k
        k = load(smem.k, rstd[1])
        return load(smem.q, rstd[0]), k, load(smem.e) if erases else k

    q, k, e = tokens()
    q_half, k_half = q.astype(jnp.float16), k.astype(jnp.float16)
    e_half = e.astype(jnp.float16) if erases else k_half
    same = same + jnp.sum(q * k, axis=1)
    block_rows.store_row_sums(dev, smem.blocks.at[wg, 2], g2, masks.halves)

    operands = Halves(e_half, q_half, k_half)
    erased, read, decays = products_within(dev, masks, operands, alpha(), erased, read)
    block_rows.store_first_rows(dev, smem.blocks.at[wg, 0], decays.first)
    block_rows.store_first_rows(dev, smem.blocks.at[wg, 1], decays.rest)
    plgpu.commit_smem()
    between = block_rows.block_decays(dev, smem.blocks.at[wg, 0], smem.blocks.at[wg, 1], SLICE)
    near = operands.scaled(jnp.where(masks.bits[4], decays.from_first, decays.to_end) * between.near)
    far = operands.scaled(jnp.where(masks.bits[5], decays.from_first, decays.to_end) * between.far)
    erased, read = _between_blocks(own, erased, read, near, far)

    from_start, to_end = decays.from_first * decays.first * between.before, decays.to_end * between.after
    q, k, e = tokens()
    dtype = smem.k.dtype
    smem.e.at[wg, j][...] = (e * from_start).astype(dtype)
    smem.q.at[wg, j][...] = _read(own, q * (own.sizes.scale * from_start)).astype(dtype)
    smem.k.at[wg, j][...] = (k * to_end).astype(dtype)
    sums = [plgpu.load(smem.blocks.at[wg, 2, w], layout=COL) for w in range(block_rows.BLOCKS)]
    smem.gl.at[wg, j][...] = jnp.exp2(sums[0] + sums[1] + sums[2] + sums[3])
    plgpu.commit_smem()
    return erased, read, same


def _between_blocks(own: _Warpgroup, erased: Sums, read: Sums, near, far) -> tuple[Sums, Sums]:
    """The sums with a slice's products of tokens of different blocks of 16. near and far are operands of the rows of
    erase keys, of those of queries, and of the columns."""
    tiles = [tile.at[own.wg] for tile in (own.smem.near, own.smem.far)]
    tiles[0][...], tiles[1][...] = near[2], far[2]
    plgpu.commit_smem()

    def products(add):
        for n, (x, y) in enumerate(((near[0], far[0]), (near[1], far[1]))):
            add(3 * n, x, transposed(tiles[0].at[0:BLOCK]))
            add(3 * n + 1, x, transposed(tiles[0].at[HALF : HALF + BLOCK]))
            add(3 * n + 2, y, transposed(tiles[1].at[0:HALF]))

    starts = [y for x in (erased, read) for y in (*x.near, x.far)]
    a = own.dev.accumulate(starts, products)
    return erased._replace(near=(a[0], a[1]), far=a[2]), read._replace(near=(a[3], a[4]), far=a[5])


def _matrices(own: _Warpgroup, masks: Masks, erased: Sums, read: Sums, same) -> None:
    """T and P from the sums, to shared memory, in halves."""
    smem, wg, sizes = own.smem, own.wg, own.sizes
    beta = plgpu.load(smem.beta.at[wg], layout=COL)
    strengths = along_columns(beta, CHUNK)
    parts = tuple(-x for x in erased.strictly_lower(masks))
    tiles = smem.near.at[wg], smem.far.at[wg], smem.x_t.at[wg]
    t = invert(own.dev, parts, None, beta, *tiles, level=masks.level if masks.halves else None)

    p = read.lower(masks, same)
    p = p[0] * strengths[:, 0:HALF], p[1] * strengths[:, HALF:CHUNK]
    for n, x in enumerate(t):
        smem.out.at[wg, n][...] = x.astype(smem.out.dtype)
    for n, x in enumerate(p, 2):
        smem.out.at[wg, n, pl.ds(0, own.work.tokens)][...] = _read(own, sizes.scale * x).astype(
            smem.out.dtype
        )


def _read(own: _Warpgroup, x: jax.Array) -> jax.Array:
    """The rows of x that are read: second halves, where tokens are two rows."""
    return block_rows.half_of(own.dev, x, 1) if own.sizes.halves else x


def _store(own: _Warpgroup, visit, head) -> None:
    """Starts the copies of an item's results."""
    gmem, smem, wg, tokens = own.gmem, own.smem, own.wg, pl.ds(0, own.work.tokens)
    for n, destination in enumerate((gmem.t, gmem.t, gmem.p, gmem.p)):
        tile = smem.out.at[wg, n] if n < 2 else smem.out.at[wg, n, tokens]
        plgpu.copy_smem_to_gmem(tile, destination.at[visit, head, :, pl.ds(n % 2 * HALF, HALF)])
    for j in range(own.sizes.slices):
        channels = pl.ds(j * SLICE, SLICE)
        for tile, destination in ((smem.e, gmem.kg), (smem.q, gmem.qg), (smem.k, gmem.kr)):
            plgpu.copy_smem_to_gmem(tile.at[wg, j], destination.at[visit, head, :, channels])
        plgpu.copy_smem_to_gmem(smem.gl.at[wg, j], gmem.gl.at[visit, head, channels])


def _item(own: _Warpgroup, n, _):
    """One visit and output head."""
    smem, wg, sizes = own.smem, own.wg, own.sizes
    visit, head, _, _, span = own.place(n)
    plgpu.barrier_wait(smem.loaded.at[wg])
    if span is not None:
        mask_foreign(span, span.first_chunk, [], vectors=[smem.beta.at[wg]])
    rstd = (None, None)
    if sizes.normalize:
        rstd = _reciprocal_norms(own, smem.q), _reciprocal_norms(own, smem.k)
    masks = Masks(own.dev, halves=sizes.halves)
    start = Sums.of_nothing(), Sums.of_nothing(), plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), ROW)
    step = functools.partial(_slice, own, span, rstd, masks)
    erased, read, same = lax.fori_loop(0, sizes.slices, step, start)
    _matrices(own, masks, erased, read, same)
    plgpu.commit_smem()
    _store(own, visit, head)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    pl.when(n + 1 < own.num_items)(lambda: _load(own, n + 1))
    return ()


def _body(gmem: Any, smem: Any, **static) -> None:
    own = _Warpgroup(gmem, smem, **static)
    pl.when(own.num_items > 0)(lambda: _load(own, jnp.int32(0)))
    lax.fori_loop(0, own.num_items, functools.partial(_item, own), ())
    plgpu.wait_smem_to_gmem(0)


class Pairs(NamedTuple):
    """Results of `channel_pairs`; see the module docstring."""

    t: Float[Array, "visits HO C C"]
    p: Float[Array, "visits HO read C"]
    kg: Float[Array, "visits HO C K"]
    qg: Float[Array, "visits HO read K"]
    kr: Float[Array, "visits HO C K"]
    gl: Float[Array, "visits HO K"]


def channel_pairs(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    g: Float[Array, "B T HO K"],
    beta: Float[Array, "B HO T64"],
    e: Float[Array, "B T He K"] | None = None,
    *,
    of_halves: bool = False,
    scale: float = 1.0,
    normalize: bool = False,
    visits: VisitTables | None = None,
    config: Config | None = None,
    interpret=None,
) -> Pairs:
    """T, P and the decayed queries and keys of every visit; see the module docstring.

    Args:
      q, k, e: bfloat16 or float16; K a multiple of 64, T a multiple of 8. e: erase keys, None for k.
      g: log decays, natural logarithm, float32, <= 0, -inf for a reset.
      beta: write strengths, head-major, float32, T rounded up to chunks.
      of_halves: whether tokens are two rows, of which e and g are the first ones' and q and k the second ones'; beta
        has both. T is then a multiple of 32, e has as many heads as it wants, and there are no visits.
      scale: factor of the output.
      normalize: whether q and k are divided by their norms; not together with e.
      visits: of packed rows.
    """
    (B, T, Hk, K), HO, He = k.shape, g.shape[2], g.shape[2] if e is None else e.shape[2]
    if of_halves:
        T = 2 * T
    if normalize and e is not None:
        raise ValueError("normalize: expected False where erase keys are given, got True")
    num_chunks = -(-T // CHUNK)
    N = B if visits is None else visits.cu_seqlens.shape[0] - 1
    count = B * num_chunks if visits is None else visits.chunk.shape[0]
    config = config or Config.default(K, e is not None)
    read = halves.tokens_of(of_halves)
    sizes = _Sizes(q.shape[2], Hk, He, HO, K, float(scale), normalize, of_halves)
    work = VisitSizes(HO, N, num_chunks, count, read)
    assert e is not None or not of_halves
    S = jax.ShapeDtypeStruct
    keys = S((count, HO, CHUNK, K), k.dtype)
    tables = table_inputs(None, visits)
    results = launch(
        "channel_pairs",
        functools.partial(_body, config=config, sizes=sizes, work=work, interpreted=interpret is not None),
        inputs={"q": q, "k": k, "e": e, "g": g, "beta": beta} | tables,
        outputs={
            "t": S((count, HO, CHUNK, CHUNK), k.dtype),
            "p": S((count, HO, read, CHUNK), k.dtype),
            "kg": keys,
            "qg": S((count, HO, read, K), k.dtype),
            "kr": keys,
            "gl": S((count, HO, K), jnp.float32),
        },
        memory=_memory(config, K, k.dtype, erases=e is not None, tokens=read),
        ctas=config.ctas,
        warpgroups=config.warpgroups,
        auto_barriers=True,
        interpret=interpret,
    )
    return Pairs(**results)
