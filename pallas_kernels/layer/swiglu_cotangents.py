"""The cotangents of a SwiGLU's branches, made where the cotangent of their product is multiplied.

    dh = dy W^T,   da = dh b silu'(a),   db = dh silu(a)

dh stays in registers: it is neither rounded nor written.

Inputs (GMEM): dy [M, D], weight W [F, D], ab [M, 2 F], `GROUP` columns of a, as many of b, and so on; bfloat16 or
float16. Output (GMEM): dab like ab.
Grid, roles of the warpgroups, barriers of the ring: `layer.tiles`. The loading warpgroup also loads the tile's
branches, in `_STEPS` steps after those of the product: so they are there when dh is. Their cotangents replace them in
their slot, from which bulk stores write them; the slot is free when these have read it, the last one of a tile in the
next tile.
Shared memory: `_memory`, 192 KB.
Numerics: float32 inside. The same bits in every call.
Hardware: compute capability 9.0. Limits: `check_supported`.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.launch import Shaped, kernel
from pallas_kernels.device.layouts import WGMMA
from pallas_kernels.device.memory import Buffer, Memory, transposed
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import tiles
from pallas_kernels.layer.operand_ring import roles
from pallas_kernels.layer.swiglu_product import GROUP, silu_parts
from pallas_kernels.layer.tiles import COLUMNS, DEPTH, TILE_ROWS, Config, Cta

NEEDS = Needs.TMA | Needs.WGMMA

_PARTS = 1 + COLUMNS // TILE_ROWS
"""Parts [TILE_ROWS, DEPTH] of a slot, each of which one copy fills: of dy, and the others of W or of branches."""

_PIECES = COLUMNS // GROUP
"""Pieces of a tile's branches, [TILE_ROWS, 2 GROUP] each: as large as a part."""

_STEPS = pl.cdiv(_PIECES, _PARTS)
"""Steps in which slots hold branches."""

CONFIG = Config()
"""Default, found like that of `layer.swiglu_product`. A lead costs 2 % here."""


def check_supported(dy: Shaped, F: int) -> str | None:
    """Why the kernel cannot make cotangents of branches of F columns from dy [.., D]; None if it can."""
    reason = tiles.check_supported(dy)
    if reason is not None:
        return f"dy: {reason}"
    return f"{F} columns; the kernel takes a multiple of {GROUP}" if F % GROUP or not F else None


def _memory(config: Config, dtype: Any) -> Memory:
    ring = Buffer((config.stages, _PARTS * TILE_ROWS, DEPTH), dtype, swizzle=128)
    return {"ring": ring, **tiles.barriers(config, copies=_PARTS)}


def _part(n: int) -> slice:
    """Rows of a slot."""
    return slice(n * TILE_ROWS, (n + 1) * TILE_ROWS)


def _pieces(n: int) -> range:
    """The pieces of the branches that the n-th step after the product has."""
    return range(n * _PARTS, min(_PIECES, (n + 1) * _PARTS))


def _load(cta: Cta, row, column, depth, slot) -> None:
    gmem, smem, along = cta.gmem, cta.smem, pl.ds(depth, DEPTH)
    barrier = smem.full.at[slot]
    plgpu.copy_gmem_to_smem(gmem.dy.at[pl.ds(row, TILE_ROWS), along], smem.ring.at[slot, _part(0)], barrier)
    for n in range(1, _PARTS):
        source = gmem.w.at[pl.ds(column + (n - 1) * TILE_ROWS, TILE_ROWS), along]
        tiles.copy_shared(source, smem.ring.at[slot, _part(n)], barrier)


def _load_branches(cta: Cta, row, column, n: int, slot) -> None:
    barrier = cta.smem.full.at[slot]
    for part, piece in enumerate(_pieces(n)):
        source = cta.gmem.ab.at[pl.ds(row, TILE_ROWS), pl.ds(2 * (column + piece * GROUP), 2 * GROUP)]
        plgpu.copy_gmem_to_smem(source, cta.smem.ring.at[slot, _part(part)], barrier)
    for _ in range(_PARTS - len(_pieces(n))):
        plgpu.barrier_arrive(barrier)


def _store(cta: Cta, i, row, column, dh) -> None:
    """Writes the cotangents of a tile's branches over the branches, and from there to memory."""
    gmem, first = cta.gmem, i * cta.steps + cta.depth_steps
    for n in range(_STEPS):
        slot = cta.ring.filled(first + n)
        parts = [cta.smem.ring.at[slot, cta.own_rows(part * TILE_ROWS)] for part in range(len(_pieces(n)))]
        for piece, part in zip(_pieces(n), parts, strict=True):
            a, b, gate = silu_parts(cta.dev, plgpu.load(part, layout=WGMMA))
            silu, dproduct = a * gate, dh[:, piece * GROUP : (piece + 1) * GROUP]
            da, db = dproduct * b * (gate + silu * (1.0 - gate)), dproduct * silu
            if cta.dev.interpreted:
                plgpu.commit_smem()  # the interpreter asks for one between reading and writing
            part[...] = lax.concatenate([da, db], 1).astype(gmem.dab.dtype)
        plgpu.commit_smem()
        for piece, part in zip(_pieces(n), parts, strict=True):
            columns = pl.ds(2 * (column + piece * GROUP), 2 * GROUP)
            destination = gmem.dab.at[cta.own_rows(row), columns]
            plgpu.copy_smem_to_gmem(part, destination, commit_group=piece == _pieces(n)[-1])
        if n:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            cta.ring.release(first + n - 1)


def _release_last(cta: Cta, i) -> None:
    """Releases the last slot of the tile before the i-th."""

    @pl.when(i > 0)
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        cta.ring.release(i * cta.steps - 1)


def _work(cta: Cta) -> None:
    """The roles of all warpgroups."""
    ring = cta.smem.ring

    def load():
        tiles.load_tiles(cta, functools.partial(_load, cta), functools.partial(_load_branches, cta))

    def operands(slot):
        return ring.at[slot, cta.own_rows(0)], transposed(ring.at[slot, TILE_ROWS : _PARTS * TILE_ROWS])

    def multiply():
        finish, release = functools.partial(_store, cta), functools.partial(_release_last, cta)
        tiles.multiply_tiles(cta, operands, finish, release)
        release(cta.tiles)
        plgpu.wait_smem_to_gmem(0)

    roles(cta.wg, 2, load, multiply)


@kernel("config")
def swiglu_cotangents(
    dy: Float[Array, "M D"],
    weight: Float[Array, "F D"],
    ab: Float[Array, "M F2"],
    *,
    config: Config = CONFIG,
    interpret: Any = None,
) -> Float[Array, "M F2"]:
    """Gradient of <dy, h W> with respect to ab, h = silu(a) b, where `check_supported` says so."""
    return tiles.start(
        "swiglu_cotangents",
        _work,
        (dy.shape[0], *weight.shape),
        inputs={"dy": dy, "w": weight, "ab": ab},
        outputs={"dab": jax.ShapeDtypeStruct(ab.shape, ab.dtype)},
        memory=_memory(config, dy.dtype),
        config=config,
        more_steps=_STEPS,
        interpret=interpret,
    )["dab"]
