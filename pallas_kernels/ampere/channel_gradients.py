"""Every gradient except dv where each channel decays by itself, all chunks in parallel.

The equations, and what a step of 16 channels makes of the products with the states, are those of
`backward.channel_gradients`; the products are mma.sync here. There are no visits: every chunk is of one sequence.

Inputs (GMEM): q [places, Hq K], k [places, Hk K], e [places, HO K] (optional), g [places, HO K] f32, gl [chunks HO,
K] f32, do, dv and u [places, HO V], h and dh [chunks HO V, K].
Outputs (GMEM): dq, dk, de (where e is given) [places, HO K] in k's dtype, of each output head; dg [places, HO K] f32;
dv . u, k . late and k . dk [chunks HO, C] f32.
Grid: one CTA of one warpgroup for each (chunk, output head). It walks over its channels, 16 at a time.
Shared memory: `_memory`, 98 KB at K = V = 128.
Hardware: compute capability 8.0 and later. Limits: bfloat16; K and V 64 or 128.
Source: `backward.channel_gradients`.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.ampere.gradients import Sizes
from pallas_kernels.backward.channel_gradients_levels import TOTALS, Score, write_gate_blocks
from pallas_kernels.backward.channel_gradients_step import (
    LANES,
    WIDTH,
    ChannelGradients,
    gradients_of_step,
    levels_of_step,
)
from pallas_kernels.chunks.merging import BLOCK, HALF
from pallas_kernels.chunks.pair_levels import Masks
from pallas_kernels.device import rows as block_rows
from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.layouts import CHUNK, COL, WGMMA, zeros
from pallas_kernels.device.memory import Buffer, Memory
from pallas_kernels.device.mma import STEP, SWIZZLE, MmaDevice

DO, DV, U = range(3)
"""Places of the tiles of values."""

DECAYS = 2
"""Arrays of decays of blocks of 16 tokens."""

NARROW = 2 * WIDTH
"""Bytes over which tiles of a step are swizzled."""


def _memory(V: int, dtype) -> Memory:
    """Shared memory of a CTA. `channel_gradients_step` has warpgroups in front, of which there is one."""
    tokens = Buffer((CHUNK, WIDTH), dtype, swizzle=NARROW)
    return {
        "x": Buffer((3, CHUNK, V), dtype, swizzle=SWIZZLE),  # do, dv and u
        "h": Buffer((2, V, WIDTH), dtype, swizzle=NARROW),  # h and dh of a step
        "q": tokens,
        "k": tokens,
        "squares": Buffer((2, 2, CHUNK, BLOCK), dtype, swizzle=NARROW),
        "far": Buffer((2, CHUNK, HALF), dtype, swizzle=64),
        "gates": Buffer((1, 8, CHUNK, BLOCK), dtype, swizzle=NARROW),
        "operands": Buffer((1, 2, CHUNK, WIDTH), dtype, swizzle=NARROW),
        "of_blocks": Buffer((1, DECAYS + TOTALS, block_rows.BLOCKS, WIDTH)),
    }


class _At(NamedTuple):
    """A step."""

    step: Any
    wg: int = 0


class _Cta:
    """All that the warpgroup knows."""

    def __init__(self, gmem: Any, smem: Any, *, sizes: Sizes, interpreted: bool):
        self.gmem, self.sizes, self.dev = gmem, sizes, MmaDevice(interpreted)
        decays, totals = smem.of_blocks.at[:, 0:DECAYS], smem.of_blocks.at[:, DECAYS : DECAYS + TOTALS]
        self.smem = SimpleNamespace(**vars(smem), decays=decays, totals=totals)
        self.dtype, self.erases = gmem.k.dtype, gmem.e is not None
        self.item = grid_index()
        """Number of the chunk and output head."""
        self.chunk, self.head = lax.div(self.item, sizes.HO), lax.rem(self.item, sizes.HO)

    def scores(self, wg) -> tuple[Score, Score]:
        """The scores of dP and of dL."""
        del wg
        squares, far = self.smem.squares, self.smem.far
        read, erased = (Score(squares.at[n, 0], squares.at[n, 1], far.at[n]) for n in range(2))
        return read, erased

    def load(self, name: str, at: _At) -> jax.Array:
        """An input of a step. Those that several uses load are in shared memory."""
        if name in ("q", "k"):
            return plgpu.load(getattr(self.smem, name), layout=WGMMA)
        return self.dev.vector(getattr(self.gmem, name).at[self.tokens(at, self.sizes.HO)], WGMMA)

    def tokens(self, at: _At, heads: int) -> tuple[Any, Any]:
        """Rows and columns of a step in an array of tokens with a number of heads."""
        head = lax.div(self.head, self.sizes.HO // heads)
        return pl.ds(self.chunk * CHUNK, CHUNK), pl.ds(head * self.sizes.K + at.step * WIDTH, WIDTH)

    def load_values(self) -> None:
        """Starts the copies of do, dv and u."""
        column = self.head * self.sizes.V
        for place, name in ((DO, "do"), (DV, "dv"), (U, "u")):
            self.dev.copy(getattr(self.gmem, name), self.chunk * CHUNK, column, self.smem.x.at[place])

    def load_step(self, at: _At) -> None:
        """Starts the copies of queries, keys and states of a step."""
        for name, heads in (("q", self.sizes.Hq), ("k", self.sizes.Hk)):
            rows, columns = self.tokens(at, heads)
            tile = getattr(self.smem, name)
            self.dev.copy(getattr(self.gmem, name), rows.start, columns.start, tile, swizzle=NARROW)
        for place, source in enumerate((self.gmem.h, self.gmem.dh)):
            row, tile = self.item * self.sizes.V, self.smem.h.at[place]
            self.dev.copy(source, row, at.step * WIDTH, tile, swizzle=NARROW)


def _write_scores(cta: _Cta) -> jax.Array:
    """Makes the scores of dP and of dL, and returns the diagonal of dP in layout ROW. That of dv u^T leaves."""
    dev, (do, dv, u) = cta.dev, (cta.smem.x.at[n] for n in range(3))
    read, erased = cta.scores(0)
    diagonal = read.write((dev.product_transposed(do, u), dev.product_transposed(u, do)), cta.sizes.scale)
    dv_u = erased.write((dev.product_transposed(dv, u), dev.product_transposed(u, dv)), -1.0)
    cta.gmem.dv_u.at[cta.item][...] = -dv_u
    dev.commit()
    return diagonal


def _over_states(cta: _Cta) -> list[jax.Array]:
    """dO h, dv h and u dh of a step, and the products of h and dh, summed over blocks of 64 rows."""
    dev, smem = cta.dev, cta.smem
    h, dh = (smem.h.at[n] for n in (0, 1))
    results = []
    for place, states in ((DO, h), (DV, h), (U, dh)):
        total = zeros((CHUNK, WIDTH), jnp.float32)
        for row in range(0, cta.sizes.V, STEP):
            part = slice(row, row + STEP)
            total = dev.add(total, dev.operand(smem.x.at[place, :, part]), states.at[part])
        results.append(total)
    inner = zeros((CHUNK, WIDTH), jnp.float32)
    for row in range(0, cta.sizes.V, CHUNK):
        x, y = (dev.widen(plgpu.load(z.at[row : row + CHUNK], layout=WGMMA)) for z in (h, dh))
        inner = inner + x * y
    return [*results, inner]


def _step(cta: _Cta, diagonal, step, written):
    """16 channels: their gradients leave, and their parts of k . late and k . dk are added to `written`."""
    dev, gmem, at = cta.dev, cta.gmem, _At(step)
    masks = Masks(dev, WIDTH)
    masks.level = lax.optimization_barrier(masks.level)
    cta.load_step(at)
    dev.arrived()
    sums, *ends = levels_of_step(cta, at, masks)
    gl = dev.vector(gmem.gl.at[cta.item, pl.ds(step * WIDTH, WIDTH)], COL)
    products = _over_states(cta)
    results, written = gradients_of_step(cta, at, masks, sums, ends, products, gl, diagonal, written)
    place = cta.tokens(at, cta.sizes.HO)
    for name, target in (("q", gmem.dq), ("k", gmem.dk), ("e", gmem.de), ("g", gmem.dg)):
        if target is not None:
            dev.store(target.at[place], results[name].astype(target.dtype))
    dev.commit()  # nobody reads the step's tiles any more
    return written


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = _Cta(gmem, smem, **static)
    cta.load_values()
    write_gate_blocks(cta.dev, Masks(cta.dev, WIDTH), smem.gates.at[0])
    cta.dev.arrived()
    diagonal = _write_scores(cta)
    step = functools.partial(_step, cta, diagonal)
    start = [zeros((CHUNK, LANES), jnp.float32)] * 2
    written = lax.fori_loop(0, cta.sizes.K // WIDTH, step, start)
    for x, result in zip(written, (gmem.k_late, gmem.k_write), strict=True):
        result.at[cta.item][...] = jnp.sum(x, axis=1)


def channel_gradients(
    q: Float[Array, "places Hq K"],
    k: Float[Array, "places Hk K"],
    e: Float[Array, "places HO K"] | None,
    g: Float[Array, "places HO K"],
    gl: Float[Array, "chunks HO K"],
    do: Float[Array, "places HO V"],
    dv: Float[Array, "places HO V"],
    u: Float[Array, "places HO V"],
    h: Float[Array, "chunks HO V K"],
    dh: Float[Array, "chunks HO V K"],
    *,
    scale: float,
    interpret: Any = None,
) -> ChannelGradients:
    """dq, dk, de, dg and the parts of dbeta; see the module docstring.

    Args:
      q, k, e, do: bfloat16, of `Rows.spread`. e: erase keys, None for k.
      g, gl: as of `channel_prepare`.
      u: w of `states` times the mantissas of the write strengths; h: of `states`; dv, dh: of `adjoints`.
      scale: factor of the output.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    (places, HO, V), (chunks, Hk, K) = do.shape, (h.shape[0], *k.shape[1:])
    S, f32 = jax.ShapeDtypeStruct, jnp.float32
    tokens = {"q": q, "k": k, "e": e, "g": g, "do": do, "dv": dv, "u": u}
    given, sums = S((places, HO * K), k.dtype), S((chunks * HO, CHUNK), f32)
    results: dict[str, Any] = launch(
        "mma_channel_gradients",
        functools.partial(
            _body,
            sizes=Sizes(q.shape[1], Hk, HO, K, V, float(scale)),
            interpreted=interpret is not None,
        ),
        inputs={name: None if y is None else y.reshape(places, -1) for name, y in tokens.items()}
        | {"gl": gl.reshape(-1, K), "h": h.reshape(-1, K), "dh": dh.reshape(-1, K)},
        outputs={"dq": given, "dk": given, "de": None if e is None else given}
        | {"dg": S(given.shape, f32), "dv_u": sums, "k_late": sums, "k_write": sums},
        memory=_memory(V, k.dtype),
        ctas=chunks * HO,
        reduction_bytes=0,  # every sum stays inside a warp
        auto_barriers=True,
        interpret=interpret,
    )
    of_tokens: dict[str, Any] = {
        name: results[name].reshape(places, HO, K) for name in ("dq", "dk", "de", "dg") if name in results
    }
    of_chunks: dict[str, Any] = {
        name: results[name].reshape(chunks, HO, CHUNK) for name in ("dv_u", "k_late", "k_write")
    }
    made = of_tokens | of_chunks
    return ChannelGradients._make(made.get(name) for name in ChannelGradients._fields)
