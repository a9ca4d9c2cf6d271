"""Every gradient but that of v, all chunks in parallel, from the states and their cotangents at the chunks' borders.

The equations are those of `backward.gradients`. For one chunk and one output head, with h [V, K] before the chunk, dh
[V, K] behind it (both transposed), w and dv [C, V], and write strengths diag(beta) = M E (`backward.strengths`):

    dP = scale Gamma * (dO w^T) M                    dL = -Gamma * (dv w^T) M, strictly lower
    dq = scale D (dO h) + dP E K
    read = -D (dv h) + dL E K                        late = Dr M (w dh)
    inside = dP^T Q + dL^T K                         dk = read + E (late + inside)

Gamma and D are those of `prepare`, and Dr_i = 2^(G_last - G_i). The gates' gradient is a sum over the tokens of the
chunk, which is left to `backward`: with x_i = q_i . dq_i + k_i . (read - E inside)_i and l_i = k_i . (E late)_i

    dg_t = sum over i >= t of x_i + sum over i < t of l_i + 2^G_last <h, dh>

The diagonal of dP is left out of x, for its two parts cancel. In bfloat16 E is 1 and not there. In float16 E K is a
tile of its own, and dP and dL are kept times 2^lift, by which what the products with them give is divided in float32.

Work: one CTA of two warpgroups for each (chunk, output head). It adds up over 64 columns of V at a time. Warpgroup 0
makes dP and number 1 dL, for both; then each makes its half of the columns of K.

Inputs (GMEM): q [places, Hq K], k [places, Hk K], do, w and dv [places, HO V], h and dh [chunks HO V, K], g2_cum, M
and E (float16) [chunks HO, C] f32, lift [chunks HO] f32 (float16).
Outputs (GMEM): dq and dk [places, HO K] of each output head; dv . w, [chunks HO, C] f32; and of each warpgroup x
and k . (late + inside) in two parts [chunks HO, 4, C] f32, l and sums of h dh [chunks HO, 2, C] f32.
Shared memory: `_memory`, 89 KB at K = 128.
Hardware: compute capability 8.0 and later. Limits: K 64 or 128, V a multiple of 64.
Source: adjoint of Yang et al. 2024 (Gated DeltaNet), eq. 8 to 10.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.launch import grid_index, launch, warpgroup_index
from pallas_kernels.device.layouts import CHUNK, COL, ROW, WGMMA, along_columns, along_rows, zeros
from pallas_kernels.device.memory import Barriers, Buffer, Memory, transposed
from pallas_kernels.device.mma import STEP, SWIZZLE, MmaDevice

WARPGROUPS = 2
"""Warpgroups of a CTA."""

WIDTH = 64
"""Columns of V of a step."""

DO, DV, W = range(3)
"""Places of the tiles of values. Those of do and dv hold dP and dL afterwards."""


def _memory(K: int, dtype, *, interpreted: bool = False) -> Memory:
    """Shared memory of a CTA."""
    return {
        "q": Buffer((CHUNK, K), dtype, swizzle=SWIZZLE),
        "k": Buffer((CHUNK, K), dtype, swizzle=SWIZZLE),
        "x": Buffer((3, CHUNK, WIDTH), dtype, swizzle=SWIZZLE),
        "h": Buffer((2, WIDTH, K), dtype, swizzle=SWIZZLE),  # h and dh, then E K in place of h
        "diagonal": Buffer((CHUNK,)),
        "met": Barriers(arrivals=WARPGROUPS) if interpreted else None,
    }


class Sizes(NamedTuple):
    """Static sizes of the kernels of gradients."""

    Hq: int
    Hk: int
    HO: int
    K: int
    V: int
    scale: float


class _Cta:
    """All that a warpgroup knows."""

    def __init__(self, gmem: Any, smem: Any, *, sizes: Sizes, interpreted: bool):
        self.gmem, self.smem, self.sizes, self.dev = gmem, smem, sizes, MmaDevice(interpreted)
        self.dtype, self.wg = gmem.k.dtype, warpgroup_index()
        self.item = grid_index()
        """Number of the chunk and output head."""
        self.chunk, self.head = lax.div(self.item, sizes.HO), lax.rem(self.item, sizes.HO)
        self.width = sizes.K // WARPGROUPS
        self.own = pl.ds(self.wg * self.width, self.width)
        """Columns of K of this warpgroup."""

    def meet(self) -> None:
        """Waits for all warpgroups."""
        self.dev.meet(self.smem.met)

    def _copy(self, source: Any, row: Any, column: Any, tile: Any) -> None:
        """Starts the copy of this warpgroup's part of a tile."""
        share = CHUNK // WARPGROUPS
        mine = self.wg * share
        self.dev.copy(source, row + mine, column, tile.at[pl.ds(mine, share)])

    def load_tokens(self) -> None:
        """Starts the copies of q and k."""
        for name, heads in (("q", self.sizes.Hq), ("k", self.sizes.Hk)):
            column = lax.div(self.head, self.sizes.HO // heads) * self.sizes.K
            self._copy(getattr(self.gmem, name), self.chunk * CHUNK, column, getattr(self.smem, name))

    def load_values(self, tile: int) -> None:
        """Starts the copies of 64 columns of V."""
        gmem, column = self.gmem, self.head * self.sizes.V + tile * WIDTH
        for place, source in ((DO, gmem.do), (DV, gmem.dv), (W, gmem.w)):
            self._copy(source, self.chunk * CHUNK, column, self.smem.x.at[place])
        for place, source in enumerate((gmem.h, gmem.dh)):
            self._copy(source, self.item * self.sizes.V + tile * WIDTH, 0, self.smem.h.at[place])

    def wide(self, tile: Any) -> jax.Array:
        """This warpgroup's columns of a tile, in float32."""
        return plgpu.load(tile.at[:, self.own], layout=WGMMA).astype(jnp.float32)

    def vector(self, ref: Any, layout: Any) -> jax.Array:
        """The vector of the item."""
        return self.dev.vector(ref.at[self.item], layout)


def _over_values(cta: _Cta):
    """dO w^T or dv w^T, w dh, dO h, dv h, and sums of h dh over this warpgroup's columns of K."""
    dev, smem, f32 = cta.dev, cta.smem, jnp.float32
    score, late, read_q, read_k = zeros((CHUNK, CHUNK), f32), *[zeros((CHUNK, cta.width), f32)] * 3
    inner = plgpu.layout_cast(jnp.zeros((WIDTH,), f32), ROW)
    for tile in range(cta.sizes.V // WIDTH):
        if tile:
            cta.meet()  # the tiles before are read
        cta.load_values(tile)
        dev.arrived()
        cta.meet()
        w_tile = smem.x.at[W]
        for column in range(0, WIDTH, STEP):
            part = slice(column, column + STEP)
            left = dev.operand(smem.x.at[cta.wg, :, part])
            score = dev.add_transposed(score, left, w_tile.at[:, part])
        h, dh = (smem.h.at[place, :, cta.own] for place in (0, 1))
        late = dev.add(late, dev.operand(w_tile), dh)
        read_q = dev.add(read_q, dev.operand(smem.x.at[DO]), h)
        read_k = dev.add(read_k, dev.operand(smem.x.at[DV]), h)
        inner = inner + jnp.sum(cta.wide(smem.h.at[0]) * cta.wide(smem.h.at[1]), axis=1)
    cta.meet()
    return score, late, read_q, read_k, inner


def _write_score(cta: _Cta, score, g_rows, lift) -> None:
    """dP or dL in place of do or dv, and the diagonal of dP."""
    dev, smem, gmem, scale = cta.dev, cta.smem, cta.gmem, cta.sizes.scale
    makes_dp = cta.wg == 0
    g_columns, mantissa = cta.vector(gmem.g2_cum, COL), cta.vector(gmem.mantissa, COL)
    # Exponents above the diagonal are kept from overflow: there the scores are 0.
    difference = jnp.minimum(along_rows(g_rows, CHUNK) - along_columns(g_columns, CHUNK), 0.0)
    factor = jnp.where(makes_dp, jnp.float32(math.log2(scale)), jnp.float32(0.0))
    exponents = difference + (factor if lift is None else factor + lift)
    gamma = jnp.exp2(exponents) * jnp.where(makes_dp, jnp.float32(1.0), jnp.float32(-1.0))
    below = dev.row_minus_column() > 0
    weighted = jnp.where(below, score * gamma, 0.0) * along_columns(mantissa, CHUNK)
    smem.x.at[cta.wg][...] = weighted.astype(cta.dtype)
    diagonal = dev.diagonal(score)

    @pl.when(makes_dp)
    def _():
        smem.diagonal[...] = diagonal * cta.vector(gmem.mantissa, ROW) * scale

    @pl.when(jnp.logical_not(makes_dp))
    def _():
        gmem.dv_w.at[cta.item][...] = diagonal


def _write_ek(cta: _Cta) -> Any:
    """E K in place of h; E."""
    power = cta.vector(cta.gmem.power, ROW)
    scaled = cta.wide(cta.smem.k) * along_rows(power, cta.width)
    cta.smem.h.at[0, :, cta.own][...] = scaled.astype(cta.dtype)
    return power


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = _Cta(gmem, smem, **static)
    dev, sizes, item, wg = cta.dev, cta.sizes, cta.item, cta.wg
    cta.load_tokens()
    score, late, read_q, read_k, inner = _over_values(cta)
    gmem.inner.at[item, wg][...] = inner
    g_rows, lift = cta.vector(gmem.g2_cum, ROW), None if gmem.lift is None else gmem.lift[item]
    _write_score(cta, score, g_rows, lift)
    power = None if gmem.power is None else _write_ek(cta)
    cta.meet()

    def times(x, factor):
        return x if factor is None else x * factor

    raised, lowered = (None, None) if lift is None else (jnp.exp2(lift), jnp.exp2(-lift))
    decay, since = jnp.exp2(g_rows), jnp.exp2(gmem.g2_cum[item, CHUNK - 1] - g_rows)
    k_tile, q_tile = smem.k.at[:, cta.own], smem.q.at[:, cta.own]
    ek_tile = k_tile if power is None else smem.h.at[0, :, cta.own]
    diagonal = plgpu.load(smem.diagonal, layout=ROW)
    on_diagonal = along_rows(times(diagonal, power), cta.width)
    place = pl.ds(cta.chunk * CHUNK, CHUNK), pl.ds(cta.head * sizes.K + wg * cta.width, cta.width)

    # dq first and as a whole: it leaves its registers to what follows. So sums go to memory in parts.
    read_q = read_q * along_rows(times(decay * sizes.scale, raised), cta.width)
    read_q = times(dev.add(read_q, dev.operand(smem.x.at[0]), ek_tile), lowered)
    q, k = cta.wide(smem.q), cta.wide(smem.k)
    gmem.x.at[item, wg][...] = jnp.sum(q * read_q, axis=1)
    gmem.k_write.at[item, wg][...] = jnp.sum(k * q, axis=1) * diagonal
    dev.store(gmem.dq.at[place], (read_q + on_diagonal * k).astype(cta.dtype))

    late = late * along_rows(since * cta.vector(gmem.mantissa, ROW), cta.width)
    written = jnp.sum(cta.wide(smem.k) * late, axis=1)
    gmem.l.at[item, wg][...] = times(written, power)
    read_k = read_k * along_rows(times(-decay, raised), cta.width)
    read_k = times(dev.add(read_k, dev.operand(smem.x.at[1]), ek_tile), lowered)
    inside = dev.add(zeros((CHUNK, cta.width), jnp.float32), dev.operand(transposed(smem.x.at[0])), q_tile)
    inside = times(dev.add(inside, dev.operand(transposed(smem.x.at[1])), k_tile), lowered)
    k = cta.wide(smem.k)
    within = jnp.sum(k * inside, axis=1)
    gmem.x.at[item, WARPGROUPS + wg][...] = jnp.sum(k * read_k, axis=1) - times(within, power)
    gmem.k_write.at[item, WARPGROUPS + wg][...] = written + within
    behind = late + inside
    behind = behind if power is None else behind * along_rows(power, cta.width)
    dk = read_k + behind + on_diagonal * cta.wide(smem.q)
    dev.store(gmem.dk.at[place], dk.astype(cta.dtype))


class Gradients(NamedTuple):
    """Results of `gradients`, with padded widths; see the module docstring."""

    dq: Float[Array, "places HO K"]
    dk: Float[Array, "places HO K"]
    dv_w: Float[Array, "chunks HO C"]
    x: Float[Array, "chunks HO C"]
    l: Float[Array, "chunks HO C"]
    k_write: Float[Array, "chunks HO C"]
    inner: Float[Array, "chunks HO"]
    """<h, dh>."""


def gradients(
    q: Float[Array, "places Hq K"],
    k: Float[Array, "places Hk K"],
    do: Float[Array, "places HO V"],
    w: Float[Array, "places HO V"],
    dv: Float[Array, "places HO V"],
    h: Float[Array, "chunks HO V K"],
    dh: Float[Array, "chunks HO V K"],
    g2_cum: Float[Array, "chunks HO C"],
    mantissa: Float[Array, "chunks HO C"],
    *,
    power: Float[Array, "chunks HO C"] | None = None,
    lift: Float[Array, "chunks HO"] | None = None,
    scale: float,
    interpret: Any = None,
) -> Gradients:
    """dq, dk and what the gradients of gates and write strengths are made of; see the module docstring.

    Args:
      q, k, do: bfloat16 or float16, of `Rows.spread`.
      w, h: of `states`; dv, dh: of `adjoints`.
      mantissa, power: of the write strengths; power and lift in float16 only.
      scale: factor of the output, positive.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    (places, HO, V), (chunks, Hk, K) = do.shape, (h.shape[0], *k.shape[1:])
    sizes, f32, S = Sizes(q.shape[1], Hk, HO, K, V, scale), jnp.float32, jax.ShapeDtypeStruct
    tokens = {"q": q, "k": k, "do": do, "w": w, "dv": dv}
    vectors = {"g2_cum": g2_cum, "mantissa": mantissa, "power": power}
    part, parts = (S((chunks * HO, n * WARPGROUPS, CHUNK), f32) for n in (1, 2))
    results = launch(
        "mma_gradients",
        functools.partial(_body, sizes=sizes, interpreted=interpret is not None),
        inputs={name: y.reshape(places, -1) for name, y in tokens.items()}
        | {"h": h.reshape(-1, K), "dh": dh.reshape(-1, K)}
        | {name: None if y is None else y.reshape(-1, CHUNK) for name, y in vectors.items()}
        | {"lift": None if lift is None else lift.reshape(-1)},
        outputs={"dq": S((places, HO * K), k.dtype), "dk": S((places, HO * K), k.dtype)}
        | {"dv_w": S((chunks * HO, CHUNK), f32)}
        | {"x": parts, "k_write": parts, "l": part, "inner": part},
        memory=_memory(K, k.dtype, interpreted=interpret is not None),
        ctas=chunks * HO,
        warpgroups=WARPGROUPS,
        interpret=interpret,
    )
    sums = {name: jnp.sum(results[name], axis=1).reshape(chunks, HO, CHUNK) for name in ("x", "l", "k_write")}
    return Gradients(
        dq=results["dq"].reshape(places, HO, K),
        dk=results["dk"].reshape(places, HO, K),
        dv_w=results["dv_w"].reshape(chunks, HO, CHUNK),
        inner=jnp.sum(results["inner"], axis=(1, 2)).reshape(chunks, HO),
        **sums,
    )
