"""Triangular inverse of every chunk, with gates.

    L = strictly lower part of K K^T diag(beta)        [C, C]
    A = (I + L)^-1,   T = A * Gamma,   Gamma[i, j] = 2^(G_i - G_j) for i >= j, 0 above

What the tokens of a chunk write is diag(beta) T R with R = V - exp(G) K S, the errors of the state before the chunk.
That is the papers' (I + diag(beta) L')^-1 diag(beta) R = diag(beta) (I + L' diag(beta))^-1 R, L' = K K^T below the
diagonal. Outside of T, whose diagonal is 1, the write strengths make nothing small that is rounded, and a token with
beta = 0 writes exactly nothing. They cost nothing there: what reads T R along its tokens takes them in.

The gates factor out of the inverse: Gamma comes last, element by element, with G = g2_cum. So nothing here
overflows, whatever the decay, and all chunks are independent.

Inputs (GMEM): k [B, T, Hk, K], beta_t and g2_cum [B, HO, NT C] float32, first [NT C] int32 (packed rows only): L is
taken between tokens of one sequence, and every product of what joins tokens is cleared between sequences: zeros times
a NaN of a neighbour would be NaN.
Outputs (GMEM): t = T [B, HO, NT C, C] in k's dtype. For keys to be normalised, with rstd = (|k|^2 + 1e-6)^(-1/2) from
the diagonal of K K^T: A is that of the normalised keys, t = diag(rstd) T, and rstd [B, Hk, NT C] float32.
Grid: persistent, one CTA per SM with `warpgroups` independent warpgroups; each walks over (chunk, key head) and
computes K K^T once for all output heads of the key head, or, where that would leave warpgroups idle, for some of
them. A chunk of packed rows that one sequence fills takes the same way as in rows that are not packed: L is masked
only in a chunk that holds tokens of several, or of the padding.

How: recursive merging of diagonal blocks, exact in exact arithmetic and stable, unlike powers of L. Blocks of 2
are I - L; then X <- X - X L' X with L' the part of L that joins two blocks, up to 64. Operands are float16 and
sums float32. Blocks up to 16 live as a [64, 16] array (warp w holds the w-th diagonal block) and are merged by
warp-level mma without leaving the registers; 16 -> 32 exchanges one tile through shared memory; 32 -> 64 is two
wgmmas.

Shared memory: `_memory`, 54 KB a warpgroup at K = 128.
Hardware: compute capability 9.0. Limits: K a multiple of 64; |k|^2 beta at most about 2, or entries of L and
of A leave the range and accuracy of float16.
Numerics: before it is rounded to k's dtype, rms error 4e-4 for random unit keys, 1.4e-3 at cosine 0.9 with beta = 1.
Source: Yang et al. 2024 (DeltaNet), eq. 10 and 11, with the gate factored out; FlashInfer's `collective_inverse`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.chunks.merging import BLOCK, HALF, invert, parts_of
from pallas_kernels.device.launch import launch, num_sms, warpgroup_index
from pallas_kernels.device.layouts import CHUNK, COL, L2NORM_EPS, ROW, along_columns, along_rows, iota
from pallas_kernels.device.memory import REDUCTION_BYTES, Barriers, Buffer, Memory, fitting, transposed
from pallas_kernels.device.operations import Device

KEY_INSTRUCTIONS, HEAD_INSTRUCTIONS = 163, 499
"""Instructions of an item, once and for each output head (SASS, K = 128, bfloat16). The split of the work goes by
them."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the inverse runs, not what it computes."""

    warpgroups: int = 4
    """Independent warpgroups of a CTA; 5 spill, 3 hide less latency."""
    output_slots: int = 2
    """Output tiles being stored while the next is computed."""
    ctas: int = dataclasses.field(default_factory=num_sms)

    @classmethod
    def default(cls, K: int, group: int) -> "Config":
        """The largest of the tried configurations that fits, for `group` output heads per key head."""
        configs = cls(4, 2), cls(4, 1), cls(3, 1), cls(2, 1), cls(1, 1)
        return fitting(configs, lambda x: _memory(x, K, group, jnp.bfloat16), REDUCTION_BYTES)


def _memory(config: Config, K: int, group: int, dtype, *, normalize: bool = True) -> Memory:
    """Shared memory of a CTA. Vectors have two slots: they are read until the end of an item, after the loads of the
    next one have started."""
    n, f16 = config.warpgroups, jnp.float16
    return {
        "k": Buffer((n, CHUNK, K), dtype, swizzle=128),
        "beta": Buffer((n, 2, group, CHUNK)),
        "g2": Buffer((n, 2, group, CHUNK)),
        "rstd": Buffer((n, 2, CHUNK)) if normalize else None,
        "l": Buffer((n, CHUNK, HALF), f16, swizzle=64),
        "x": Buffer((n, CHUNK, HALF), f16, swizzle=64),
        "x_t": Buffer((n, CHUNK + BLOCK, BLOCK), f16, swizzle=32),
        "out": Buffer((n, config.output_slots, CHUNK, CHUNK), dtype, swizzle=64),
        "loaded": Barriers(arrivals=3, count=n),
    }


def parts_of_keys(kk):
    """The products that all output heads of a key head share: the parts of -K K^T, diagonal blocks strictly lower."""
    diagonal, left, half = parts_of(-kk)
    i, j = iota((CHUNK, BLOCK), 0) % BLOCK, iota((CHUNK, BLOCK), 1)
    return jnp.where(i > j, diagonal, 0.0), left, half


def _normalized(kk, rstd_smem):
    """K K^T of the keys divided by their norms, whose reciprocals come from its diagonal and stay in rstd_smem."""
    diagonal = jnp.where(iota(kk.shape, 0) == iota(kk.shape, 1), kk, 0.0)
    rstd = lax.rsqrt(jnp.sum(diagonal, axis=1) + L2NORM_EPS)
    rstd_smem[...] = rstd
    plgpu.commit_smem()
    columns = plgpu.load(rstd_smem, layout=COL)
    return kk * along_rows(rstd, CHUNK) * along_columns(columns, CHUNK)


class _Sizes(NamedTuple):
    """Static sizes of one kernel."""

    B: int
    num_chunks: int
    Hk: int
    parts: int
    """Items of a chunk and a key head, each with some of its output heads."""
    group: int
    """Output heads of an item."""

    @classmethod
    def of(cls, B: int, num_chunks: int, Hk: int, group: int, workers: int) -> "_Sizes":
        """The key heads' `group` output heads split so that the warpgroups are busy for the shortest time."""

        def time(parts: int) -> int:
            rounds = -(-B * num_chunks * Hk * parts // workers)
            return rounds * (KEY_INSTRUCTIONS + HEAD_INSTRUCTIONS * group // parts)

        parts = min((n for n in range(1, group + 1) if group % n == 0), key=time)
        return cls(B, num_chunks, Hk, parts, group // parts)


class _Warpgroup:
    """All that one of the independent warpgroups knows."""

    def __init__(self, gmem: Any, smem: Any, *, config: Config, sizes: _Sizes, interpreted: bool):
        self.gmem, self.smem, self.config, self.sizes = gmem, smem, config, sizes
        self.dev = Device(interpreted)
        self.wg = warpgroup_index()
        # Neighbours run on different SMs, so that few items, or the last ones, are spread over all of them.
        self.worker = self.wg * config.ctas + lax.axis_index("cta").astype(jnp.int32)
        self.workers = config.ctas * config.warpgroups
        items = sizes.B * sizes.num_chunks * sizes.Hk * sizes.parts
        self.num_items = lax.div(jnp.int32(items + self.workers - 1) - self.worker, jnp.int32(self.workers))

    def place(self, n):
        """Row of the batch, tokens, key head and first output head of the n-th item."""
        item, num_chunks = self.worker + n * self.workers, self.sizes.num_chunks
        parts = self.sizes.Hk * self.sizes.parts
        chunk, part = lax.rem(lax.div(item, parts), num_chunks), lax.rem(item, parts)
        key_head = part if self.sizes.parts == 1 else lax.div(part, self.sizes.parts)
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        return lax.div(item, parts * num_chunks), tokens, key_head, part * self.sizes.group

    def once_a_key_head(self, first_head, do) -> None:
        """Does what items that share a key head must not all do."""
        if self.sizes.parts == 1:
            return do()
        pl.when(lax.rem(first_head, self.sizes.group * self.sizes.parts) == 0)(do)


def _load(own: _Warpgroup, n):
    """Starts the copies of the n-th item."""
    gmem, smem, wg, group = own.gmem, own.smem, own.wg, own.sizes.group
    b, tokens, h, first_head = own.place(n)
    slot, loaded = lax.rem(n, 2), smem.loaded.at[wg]
    plgpu.copy_gmem_to_smem(gmem.k.at[b, tokens, h], smem.k.at[wg], loaded)
    heads = pl.ds(first_head, group)
    plgpu.copy_gmem_to_smem(gmem.beta.at[b, heads, tokens], smem.beta.at[wg, slot], loaded)
    plgpu.copy_gmem_to_smem(gmem.g2_cum.at[b, heads, tokens], smem.g2.at[wg, slot], loaded)


def _gated(first, halves, gates):
    """T of A, in halves. Exponents above the diagonal are kept from overflow: A is 0 there."""
    g_rows = along_rows(plgpu.load(gates, layout=ROW), HALF)
    g_columns = along_columns(plgpu.load(gates, layout=COL), CHUNK)

    def half(x, n):
        part = slice(n * HALF, (n + 1) * HALF)
        y = x * jnp.exp2(jnp.minimum(g_rows - g_columns[:, part], 0.0))
        # Where A joins no tokens it is 0 and stays it, whatever the padding holds.
        return y if first is None else jnp.where(x == 0.0, 0.0, y)

    return half(halves[0], 0), half(halves[1], 1)


def _store(own: _Warpgroup, slot, halves, destination):
    """T to memory, through an output tile that an earlier store has left."""
    tile = own.smem.out.at[own.wg, slot]
    plgpu.wait_smem_to_gmem(own.config.output_slots - 1, wait_read_only=True)
    tile[:, 0:HALF], tile[:, HALF:CHUNK] = (x.astype(tile.dtype) for x in halves)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, destination)


def _item(own: _Warpgroup, n, _):
    """T of one chunk, for the output heads of one key head, or some of them."""
    gmem, smem, wg, group = own.gmem, own.smem, own.wg, own.sizes.group
    b, tokens, h, first_head = own.place(n)
    slot = lax.rem(n, 2)
    # A chunk of one sequence takes the way without masks, as all do where rows are not packed.
    is_shared = False if gmem.first is None else gmem.first[tokens.start + CHUNK - 1] > 0
    plgpu.barrier_wait(smem.loaded.at[wg])
    kk = own.dev.product(smem.k.at[wg], transposed(smem.k.at[wg]))
    pl.when(n + 1 < own.num_items)(lambda: _load(own, n + 1))
    if gmem.rstd is not None:
        kk = _normalized(kk, smem.rstd.at[wg, slot])
        own.once_a_key_head(
            first_head,
            lambda: plgpu.copy_smem_to_gmem(smem.rstd.at[wg, slot], gmem.rstd.at[b, h, tokens]),
        )
    parts = parts_of_keys(kk)

    def head(first, e, _):
        beta = plgpu.load(smem.beta.at[wg, slot, e], layout=COL)
        halves = invert(own.dev, parts, first, beta, smem.l.at[wg], smem.x.at[wg], smem.x_t.at[wg])
        halves = _gated(first, halves, smem.g2.at[wg, slot, e])
        if gmem.rstd is not None:
            rows = along_rows(plgpu.load(smem.rstd.at[wg, slot], layout=ROW), HALF)
            halves = tuple(x * rows for x in halves)
        out_slot = lax.rem(n * group + e, own.config.output_slots)
        _store(own, out_slot, halves, gmem.t.at[b, first_head + e, tokens])
        return ()

    def heads(first):
        lax.fori_loop(0, group, functools.partial(head, first), ())

    if gmem.first is None:
        heads(None)
    else:
        first = gmem.first.at[tokens]
        pl.when(is_shared)(lambda: heads(plgpu.load(first, layout=ROW, optimized=False)))
        pl.when(jnp.logical_not(is_shared))(lambda: heads(None))
    return ()


def _body(gmem: Any, smem: Any, **static):
    own = _Warpgroup(gmem, smem, **static)
    pl.when(own.num_items > 0)(lambda: _load(own, jnp.int32(0)))
    lax.fori_loop(0, own.num_items, functools.partial(_item, own), ())
    plgpu.wait_smem_to_gmem(0)


class Inverse(NamedTuple):
    """Results of `gated_inverse`; see the module docstring."""

    t: Float[Array, "B HO T64 C"]
    rstd: Float[Array, "B Hk T64"] | None
    """Reciprocal norms of the keys, where they are to be normalised."""


def gated_inverse(
    k: Float[Array, "B T Hk K"],
    beta_t: Float[Array, "B HO T64"],
    g2_cum: Float[Array, "B HO T64"],
    first: Int[Array, " T64"] | None = None,
    *,
    normalize: bool = False,
    config: Config | None = None,
    interpret=None,
) -> Inverse:
    """T of every chunk; with normalize that of normalised keys, and their reciprocal norms.

    Args:
      k: bfloat16 or float16; K a multiple of 64, T a multiple of 8.
      beta_t: write strengths, head-major, float32, T rounded up to chunks.
      g2_cum: cumulative log2 decays, likewise.
      first: row of the chunk at which each token's sequence starts (packed rows), or None.
      normalize: whether A is that of keys divided by their norms.
    """
    B, T, Hk, K = k.shape
    HO, group, num_chunks = beta_t.shape[1], beta_t.shape[1] // Hk, -(-T // CHUNK)
    config = config or Config.default(K, group)
    rstd = jax.ShapeDtypeStruct((B, Hk, num_chunks * CHUNK), jnp.float32) if normalize else None
    sizes = _Sizes.of(B, num_chunks, Hk, group, config.ctas * config.warpgroups)
    static = dict(config=config, sizes=sizes, interpreted=interpret is not None)
    results = launch(
        "gated_inverse",
        functools.partial(_body, **static),
        inputs={"k": k, "beta": beta_t, "g2_cum": g2_cum, "first": first},
        outputs={"t": jax.ShapeDtypeStruct((B, HO, num_chunks * CHUNK, CHUNK), k.dtype), "rstd": rstd},
        memory=_memory(config, K, sizes.group, k.dtype, normalize=normalize),
        ctas=config.ctas,
        warpgroups=config.warpgroups,
        auto_barriers=True,
        interpret=interpret,
    )
    return Inverse(results["t"], results.get("rstd"))
