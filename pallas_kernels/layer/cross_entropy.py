"""Logits of many words and their exponentials, made where they are multiplied: no logits are written.

    l = x W^T;   for each tile c of `COLUMNS` words
    m_c = max_v l[v],   u[v] = exp(l[v] - m_c),   s_c = sum_v u[v],   best_c = the first v with l[v] = m_c,
    l_c = l[target] where the tile has it, else 0

The softmax is then u[v] exp(m_c - m) / s with m = max_c m_c and s = sum_c s_c exp(m_c - m).

Inputs (GMEM): x [T, D] bfloat16, W [V, D] bfloat16, targets [T'] int32. Outputs (GMEM): u [T, V] bfloat16; m, s and l
[tiles, T'] float32, best [tiles, T'] int32; T' is T filled up to whole tiles of rows.
Grid, roles of the warpgroups, barriers of the ring: `layer.tiles`; one tile of rows after another with the same
words, because x fits into the GPU's cache and W does not. A multiplying warpgroup hands `OUT` words of its tile at a
time to bulk stores, which run beside what follows, also the products of its next tile.
Shared memory: `_memory`, 208 KB.
Numerics: float32; only what is written of u is rounded. The same bits in every call.
Hardware: compute capability 9.0. Limits: `check_supported`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.launch import Shaped, kernel
from pallas_kernels.device.layouts import ROW, along_rows, iota, round_up
from pallas_kernels.device.memory import Buffer, Memory, store_any, transposed
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import tiles
from pallas_kernels.layer.tiles import CLUSTER_CTAS, COLUMNS, DEPTH, ROWS, TILE_ROWS, Config, Cta

NEEDS = Needs.TMA | Needs.WGMMA

OUT = 64
"""Words that are stored at once: 128 bytes, over which rows are swizzled."""

CONFIG = Config(lead=2, down=True)

_PARTS = COLUMNS // TILE_ROWS
"""Parts [TILE_ROWS, DEPTH] of the words' slot, each of which one copy fills."""


class Exponentials(NamedTuple):
    """Exponentials of logits, and the numbers of every tile of words; see the module docstring."""

    u: Float[Array, "T V"]
    m: Float[Array, "tiles T"]
    s: Float[Array, "tiles T"]
    best: Int[Array, "tiles T"]
    of_target: Float[Array, "tiles T"]


def check_supported(x: Shaped, V: int) -> str | None:
    """Why the kernel cannot make logits of V words from x [T, D]; None if it can."""
    if x.dtype != jnp.bfloat16:
        return f"x is {jnp.dtype(x.dtype).name}; the kernel takes bfloat16"
    reason = tiles.check_supported(x)
    if reason is not None:
        return f"x: {reason}"
    return f"{V} words; the kernel takes a multiple of {OUT}" if V % OUT or not V else None


def _memory(config: Config) -> Memory:
    dtype = jnp.bfloat16
    return {
        "x": Buffer((config.stages, TILE_ROWS, DEPTH), dtype, swizzle=128),
        "w": Buffer((config.stages, COLUMNS, DEPTH), dtype, swizzle=128),
        "u": Buffer((2, ROWS, OUT), dtype, swizzle=128),
        **tiles.barriers(config, copies=1 + _PARTS),
    }


def _load(cta: Cta, row, column, depth, slot) -> None:
    gmem, smem, part = cta.gmem, cta.smem, pl.ds(depth, DEPTH)
    barrier = smem.full.at[slot]
    plgpu.copy_gmem_to_smem(gmem.x.at[pl.ds(row, TILE_ROWS), part], smem.x.at[slot], barrier)
    for n in range(_PARTS):
        rows = slice(n * TILE_ROWS, (n + 1) * TILE_ROWS)
        source = gmem.w.at[pl.ds(column + n * TILE_ROWS, TILE_ROWS), part]
        tiles.copy_shared(source, smem.w.at[slot, rows], barrier)


def _store(cta: Cta, i, row, column, x) -> None:
    """Writes the exponentials of a tile of logits, and the numbers of that tile."""
    gmem, rows = cta.gmem, cta.own_rows(row)
    u, V = cta.smem.u.at[cta.wg], gmem.u.shape[1]
    target = plgpu.load(gmem.targets.at[rows], layout=ROW, optimized=False)
    word = iota((ROWS, OUT), 1)

    def part(first):
        """`OUT` words of the tile; those behind the last one are never the largest."""
        logits = x[:, first : first + OUT]
        return jnp.where(word < V - column - first, logits, -jnp.inf) if V % COLUMNS else logits

    firsts = range(0, COLUMNS, OUT)
    m = functools.reduce(jnp.maximum, (jnp.max(part(first), axis=1) for first in firsts))
    sums, found, best = [], [], []
    for first in firsts:
        logits = part(first)
        exps = jnp.exp(logits - along_rows(m, OUT))
        sums.append(jnp.sum(exps, axis=1))
        is_target = word == along_rows(target - column - first, OUT)
        found.append(jnp.sum(jnp.where(is_target, logits, 0.0), axis=1))
        largest = jnp.where(logits == along_rows(m, OUT), word + first, COLUMNS)
        best.append(jnp.min(largest, axis=1))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        u[...] = exps.astype(gmem.u.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(u, gmem.u.at[rows, pl.ds(column + first, OUT)])
    tile = lax.div(column, COLUMNS)
    of_rows = {
        "m": m,
        "s": functools.reduce(jnp.add, sums),
        "best": functools.reduce(jnp.minimum, best) + column,
        "of_target": functools.reduce(jnp.add, found),
    }
    for name, value in of_rows.items():
        store_any(getattr(gmem, name).at[tile, rows], value)


def _operands(cta: Cta, slot) -> tuple[Any, Any]:
    return cta.smem.x.at[slot, cta.own_rows(0)], transposed(cta.smem.w.at[slot])


@kernel("config")
def cross_entropy(
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " T"],
    *,
    config: Config = CONFIG,
    interpret: Any = None,
) -> Exponentials:
    """The parts of the cross entropies of logits x W^T, where `check_supported` accepts them."""
    T, V = x.shape[0], weight.shape[0]
    rows = round_up(T, CLUSTER_CTAS * TILE_ROWS)
    of_tiles = {"m": jnp.float32, "s": jnp.float32, "best": jnp.int32, "of_target": jnp.float32}
    shape = pl.cdiv(V, COLUMNS), rows
    results = tiles.start(
        "cross_entropy",
        functools.partial(tiles.work, load=_load, operands=_operands, finish=_store),
        (T, V, x.shape[1]),
        inputs={"x": x, "w": weight, "targets": jnp.pad(targets.astype(jnp.int32), (0, rows - T))},
        outputs={"u": jax.ShapeDtypeStruct((T, V), x.dtype)}
        | {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in of_tiles.items()},
        memory=_memory(config),
        config=config,
        reduction_bytes=0,  # sums and maxima stay inside a warp
        interpret=interpret,
    )
    return Exponentials(results["u"], *(results[name][:, :T] for name in of_tiles))
