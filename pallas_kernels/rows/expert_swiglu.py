"""SwiGLUs of experts for tiles of few rows, in one kernel that reads weights once, at the speed of the memory.

    y_t = (silu(x_t A_e) * (x_t B_e)) W_e   with [A_e | B_e] = gate_up[e], e = experts[t], for the rows of tile t

The rows of a tile are few (`Config.rows`), so that the weights' columns are the M of the tensor cores and the rows
their N. An item is a tile and `M` inner columns: of these it needs their branches and their rows of W_e, and gives a
part of y. The items, those of a tile one after another, are cut into as many spans of one length as there
are CTAs. A CTA keeps the sum over its items of a tile in registers, and writes it as a piece. Between its first byte
and its last one it waits for nothing but memory: h lives in shared memory.

Inputs (GMEM): x [tiles * rows, D]; gate_up [E, D, 2 F]; down [E, F, D], bfloat16 or float16, all of one dtype;
experts [tiles] int32, in [0, E), and counts [tiles] int32, rows that each tile has; used [1] int32, tiles that there
are. Output (GMEM): pieces [tiles + ctas - 1, rows, D] float32, that of CTA c of tile t at c + t; `Span` says which
there are. Groups of `GROUP` rows that a tile has none of are neither read nor written.
Grid: persistent, one CTA or two on each multiprocessor, of `Config.warpgroups` warpgroups that multiply, each some
rows of a tile, and one that loads. The rows of a tile stay in shared memory. Weights pass through a ring of slots,
for `DEPTH` numbers of the sum of both branches, then the rows of W for 128 columns of y: `layer.operand_ring`.

Barriers:

    barrier     who arrives                                             who waits
    x_full      the copies of a tile's rows                             the multiplying warpgroups
    x_empty     the multiplying warpgroups, behind the last branches    the loading warpgroup

Shared memory: `_memory`.
Numerics: float32 sums; h is float32 until it is rounded once. The same bits in every call. Hardware: compute
capability 9.0. Limits: `check_supported`.
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

from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch, num_sms, warpgroup_index
from pallas_kernels.device.layouts import WGMMA, WGMMA_TRANSPOSED
from pallas_kernels.device.memory import SMEM_LIMIT, Barriers, Buffer, Memory, store_any, transposed
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer.operand_ring import DEPTH, Ring, barriers, roles

NEEDS = Needs.TMA | Needs.WGMMA

M = 64
"""Columns of weights that a product of the tensor cores has."""

GROUP = 8
"""Rows that are read and written together, where a tile has them."""

SUMS = 192
"""Registers of a thread that hold sums of y, at most."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut, not what is computed."""

    rows: int
    """Rows of a tile, 8 or 16 for each warpgroup."""
    warpgroups: int
    """Warpgroups that multiply, 1 or 2."""
    stages: int
    """Slots of the ring."""
    ctas: int = dataclasses.field(default_factory=num_sms)

    @property
    def own(self) -> int:
        """Rows of a warpgroup."""
        return self.rows // self.warpgroups

    @classmethod
    def default(cls, rows: int, D: int) -> "Config":
        """For tiles of 8, 16 or 32 rows of width D."""
        stages = min(10, (SMEM_LIMIT - 4096 - 2 * rows * (D + M)) // (4 * DEPTH * M))
        # Multiprocessors are not all as fast, and those that are take more of the CTAs. Each has a piece more.
        return cls(8, 1, stages, 2 * num_sms()) if rows == 8 else cls(rows, 2, stages)


def check_supported(x: Shaped, gate_up: Any, rows: int) -> str | None:
    """Why the kernel cannot take rows x [.., D] in tiles of `rows`, and experts gate_up [E, D, 2 F]; None if it
    can."""
    D, F = x.shape[-1], gate_up.shape[2] // 2
    if x.dtype not in (jnp.bfloat16, jnp.float16) or gate_up.dtype != x.dtype:
        return f"x is {x.dtype}, the experts {gate_up.dtype}; the kernel takes bfloat16 or float16"
    if D % 128 or F % M or not gate_up.size:
        return f"experts [{D}, {2 * F}]; the kernel takes multiples of 128"
    config = Config.default(rows, D)
    if config.own * D > SUMS * 128 or config.stages < 4:
        return f"tiles [{rows}, {D}], which are too large for the registers or the shared memory"
    return None


def _memory(config: Config, D: int, dtype: Any) -> Memory:
    return {
        "x": Buffer((D // DEPTH, config.rows, DEPTH), dtype, swizzle=128),
        "w": Buffer((config.stages, 2, DEPTH, M), dtype, swizzle=128),
        "h": Buffer((config.warpgroups, config.own, M), dtype, swizzle=128),
        "x_full": Barriers(arrivals=D // DEPTH * (config.rows // GROUP)),
        "x_empty": Barriers(arrivals=config.warpgroups),
        **barriers(2, config.warpgroups, config.stages),
    }


class Span:
    """The items of a CTA, and whose a tile's are.

    Args:
      used: tiles.
      of_tile: items of a tile.
      ctas: CTAs among which they are shared.
    """

    def __init__(self, used: Any, of_tile: int, ctas: int):
        self.total, self.of_tile = used * of_tile, of_tile
        self.each = jnp.maximum(lax.div(self.total + (ctas - 1), jnp.int32(ctas)), 1)

    def bounds(self, cta) -> tuple[jax.Array, jax.Array]:
        """First item of a CTA, and the one behind its last."""
        first = jnp.minimum(cta * self.each, self.total)
        return first, jnp.minimum(first + self.each, self.total)

    def ctas_of(self, tile) -> tuple[jax.Array, jax.Array]:
        """The first and the last CTA that has an item of a tile."""
        first = tile * self.of_tile
        return lax.div(first, self.each), lax.div(first + (self.of_tile - 1), self.each)


class _Cta:
    """The knowledge of every warpgroup of a CTA."""

    def __init__(self, gmem: Any, smem: Any, *, config: Config, interpreted: bool):
        self.gmem, self.smem, self.config = gmem, smem, config
        self.dev, self.wg, self.ring = Device(interpreted), warpgroup_index(), Ring(smem, config.stages)
        self.D, self.F = gmem.x.shape[1], gmem.down.shape[1]
        self.of_tile = self.F // M
        self.deep, self.wide = self.D // DEPTH, self.D // (2 * M)
        self.steps = self.deep + self.wide
        """Slots of an item: those of the branches, and those of the projection down."""
        self.first, self.end = Span(gmem.used[0], self.of_tile, config.ctas).bounds(grid_index())

    def walk(self, tile: Any) -> None:
        """tile(t, begin, end) for all tiles of this CTA, with its items of each."""
        of_tile = jnp.int32(self.of_tile)

        def body(t, _):
            tile(t, jnp.maximum(self.first, t * of_tile), jnp.minimum(self.end, (t + 1) * of_tile))
            return ()

        lax.fori_loop(lax.div(self.first, of_tile), lax.div(self.end + (of_tile - 1), of_tile), body, ())


def _load(cta: _Cta) -> None:
    """The role of the loading warpgroup."""
    config, gmem, smem = cta.config, cta.gmem, cta.smem

    def copy(source, step, n):
        slot, barrier = step
        plgpu.copy_gmem_to_smem(source, smem.w.at[slot, n], barrier)

    def tile(t, begin, end):
        expert, count = gmem.experts[t], gmem.counts[t]
        pl.when(begin > cta.first)(lambda: plgpu.barrier_wait(smem.x_empty))

        def rows(k, _):
            for n in range(0, config.rows, GROUP):

                @pl.when(n < count)
                def _(n=n):
                    source = gmem.x.at[pl.ds(t * config.rows + n, GROUP), pl.ds(k * DEPTH, DEPTH)]
                    plgpu.copy_gmem_to_smem(source, smem.x.at[k, n : n + GROUP], smem.x_full)

                pl.when(n >= count)(lambda: plgpu.barrier_arrive(smem.x_full))
            return ()

        lax.fori_loop(0, cta.deep, rows, ())

        def item(i, _):
            own, first = pl.ds((i - t * cta.of_tile) * M, M), (i - cta.first) * cta.steps

            def branches(k, _):
                step, depth = cta.ring.free(first + k), pl.ds(k * DEPTH, DEPTH)
                copy(gmem.gate_up.at[expert, depth, own], step, 0)
                other = pl.ds(cta.F + (i - t * cta.of_tile) * M, M)
                copy(gmem.gate_up.at[expert, depth, other], step, 1)
                return ()

            def down(k, _):
                step = cta.ring.free(first + cta.deep + k)
                for n in range(2):
                    copy(gmem.down.at[expert, own, pl.ds((2 * k + n) * M, M)], step, n)
                return ()

            lax.fori_loop(0, cta.deep, branches, ())
            lax.fori_loop(0, cta.wide, down, ())
            return ()

        lax.fori_loop(begin, end, item, ())

    cta.walk(tile)


def _multiply(cta: _Cta) -> None:
    """The role of a multiplying warpgroup."""
    config, smem, dev, ring = cta.config, cta.smem, cta.dev, cta.ring
    acc, rows = plgpu.ACC((M, config.own), jnp.float32), pl.ds(cta.wg * config.own, config.own)
    h_smem = smem.h.at[cta.wg]

    def branches(first, is_last, *accs):
        """h of an item, to shared memory."""

        def issue(k, slot):
            for n, acc in enumerate(accs):
                dev.issue(acc, transposed(smem.w.at[slot, n]), transposed(smem.x.at[k, rows]))

        a, b = ring.sums(dev, first, cta.deep, accs, issue)
        pl.when(is_last)(lambda: plgpu.barrier_arrive(smem.x_empty))
        h = a * dev.reciprocal(1.0 + jnp.exp(-a), WGMMA) * b
        transposed(h_smem)[...] = h.astype(cta.gmem.x.dtype)
        dev.commit()

    def down(first, sums):
        """Adds what h makes of the rows of W to the sums of y."""
        for k in range(cta.wide):
            slot = ring.filled(first + k)
            for n in range(2):
                dev.issue(sums[2 * k + n], transposed(smem.w.at[slot, n]), transposed(h_smem))
            dev.finish(2)
            if k:
                ring.release(first + k - 1)
        dev.finish(0)
        ring.release(first + cta.wide - 1)

    def tile(t, begin, end):
        plgpu.barrier_wait(smem.x_full)

        def body(*sums):
            def item(i, _):
                first = (i - cta.first) * cta.steps
                pl.run_scoped(functools.partial(branches, first, i == end - 1), acc, acc)
                down(first + cta.deep, sums)
                return ()

            lax.fori_loop(begin, end, item, ())
            results = [dev.collect(part) for part in sums]
            for row in range(0, config.own, GROUP):
                first = cta.wg * config.own + row

                @pl.when(first < cta.gmem.counts[t])
                def _(row=row, first=first):
                    for n, y in enumerate(results):
                        piece = cta.gmem.pieces.at[grid_index() + t, pl.ds(first, GROUP), pl.ds(n * M, M)]
                        some = plgpu.layout_cast(y[:, row : row + GROUP], WGMMA_TRANSPOSED)
                        store_any(transposed(piece), some)

        pl.run_scoped(body, *[acc] * (2 * cta.wide))

    cta.walk(tile)


def _body(gmem: Any, smem: Any, **static: Any) -> None:
    cta = _Cta(gmem, smem, **static)

    @pl.when(cta.first < cta.end)
    def _():
        roles(cta.wg, cta.config.warpgroups, lambda: _load(cta), lambda: _multiply(cta))


WIDTH = 512
"""Columns of the sum of a row in a CTA."""


def _width(D: int) -> int:
    return next(w for w in (WIDTH, 256, 128) if D % w == 0)


def _sum(gmem: Any, smem: Any, *, rows: int, of_tile: int, ctas: int) -> None:
    """The second kernel: a row's weighted sum over its experts, of their pieces."""
    k, D = gmem.weights.shape[1], gmem.y.shape[1]
    width = _width(D)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)
    n, column = lax.div(grid_index(), jnp.int32(D // width)), lax.rem(grid_index(), jnp.int32(D // width))
    columns, span = pl.ds(column * width, width), Span(gmem.used[0], of_tile, ctas)

    def piece(cta, tile, row):
        source = gmem.pieces.at[cta + tile, row, columns]
        return plgpu.load(source, layout=layout, optimized=False)

    found = []
    for j in range(k):
        place = jnp.minimum(gmem.places[n, j], gmem.used[0] * rows - 1)  # it may not have been written
        tile, row = (f(jnp.maximum(place, 0), jnp.int32(rows)) for f in (lax.div, lax.rem))
        first, last = span.ctas_of(tile)
        # Most tiles have one piece or two: these loads do not wait for each other.
        y = piece(first, tile, row), piece(jnp.minimum(first + 1, last), tile, row)
        found.append((place, tile, row, first, last, *y))
    total = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
    for j, (place, tile, row, first, last, y, more) in enumerate(found):

        def add(cta, y, tile=tile, row=row):
            return y + piece(cta, tile, row)

        y = lax.fori_loop(first + 2, last + 1, add, jnp.where(last > first, y + more, y))
        total = jnp.where(place >= 0, total + gmem.weights[n, j] * y, total)
    store_any(gmem.y.at[n, columns], total)


@kernel("config")
def expert_swiglu(
    x: Float[Array, "M D"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
    experts: Int[Array, " tiles"],
    counts: Int[Array, " tiles"],
    used: Int[Array, "1"],
    weights: Float[Array, "N k"],
    places: Int[Array, "P k"],
    *,
    config: Config,
    interpret: Any = None,
) -> Float[Array, "N D"]:
    """The weighted sums over the experts of rows, which lie in tiles, where `check_supported` says so.

    Args:
      x: rows [tiles * config.rows, D].
      gate_up, down: weights of all experts.
      experts: the expert of each tile.
      counts: how many rows it has, or more.
      used: how many tiles there are; those behind are not read.
      weights: of the choices of each row, float32.
      places: where each choice lies in x; -1 for one that counts nothing. There may be more rows.
      config: how the work is cut.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      [N, D] float32.
    """
    tiles, D, F = experts.shape[0], x.shape[1], down.shape[1]
    assert x.shape[0] == tiles * config.rows, (x.shape, tiles)
    pieces = jax.ShapeDtypeStruct((tiles + config.ctas - 1, config.rows, D), jnp.float32)
    made = launch(
        "expert_swiglu",
        functools.partial(_body, config=config, interpreted=interpret is not None),
        inputs={"x": x, "gate_up": gate_up, "down": down, "experts": experts, "counts": counts, "used": used},
        outputs={"pieces": pieces},
        memory=_memory(config, D, x.dtype),
        ctas=config.ctas,
        warpgroups=config.warpgroups + 1,
        interpret=interpret,
    )["pieces"]
    N, width = weights.shape[0], _width(D)
    return launch(
        "expert_swiglu_sum",
        functools.partial(_sum, rows=config.rows, of_tile=F // M, ctas=config.ctas),
        inputs={"pieces": made, "used": used, "weights": weights, "places": places},
        outputs={"y": jax.ShapeDtypeStruct((N, D), jnp.float32)},
        ctas=N * D // width,
        auto_barriers=True,
        interpret=interpret,
    )["y"]
