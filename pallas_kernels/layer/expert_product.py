"""Products of rows with the weights of experts, a tile of rows with those of its own expert.

    y_t = x_t W_e,   or of a SwiGLU   y_t = silu(x_t A_e) * (x_t B_e)   with [A_e | B_e] = W_e,   e = experts[t]

A product may be one with W_e^T, as a gradient is, from weights [N, D] of an expert.

Only the experts that are named are read, each once for every tile of rows, and tiles beyond `used` are left out.

Inputs (GMEM): x [tiles * rows, D], or up to [rows, D] that all tiles share; w [E, D, N], of x's dtype, bfloat16 or
float16; experts [tiles] int32, in [0, E); used [1] int32. Output (GMEM), in x's dtype: y [tiles * rows, N], or N / 2
columns of a SwiGLU; what is behind the used tiles is not written.
Grid: persistent, one CTA on each multiprocessor. An item is a tile of rows and a tile of columns, the items of one
tile of rows one after another. A CTA has `Config.warpgroups` warpgroups that multiply, `ROWS` rows each, and one that
loads. Operands pass through a ring of slots, `DEPTH` numbers of the sum at a time.

Barriers:

    barrier       who arrives                              who waits
    full[slot]    every copy into the slot                 the multiplying warpgroups
    empty[slot]   the multiplying warpgroups               the loading warpgroup

Shared memory: `_memory`.
Numerics: float32 sums. Branches of a SwiGLU and their product are float32, rounded once. The same bits in every call.
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

from pallas_kernels.device.launch import (
    NUM_SMS,
    check_registers,
    compiled,
    grid_index,
    launch,
    release_registers,
    warpgroup_index,
)
from pallas_kernels.device.layouts import WGMMA
from pallas_kernels.device.memory import SMEM_LIMIT, Barriers, Buffer, Memory, smem_bytes, transposed
from pallas_kernels.device.operations import Device

ROWS = 64
"""Rows of a tile that a warpgroup multiplies."""

DEPTH = 64
"""Numbers of the sum in a slot: 128 bytes, over which rows are swizzled."""

OUT = 64
"""Columns that are stored at once: 128 bytes, over which rows are swizzled."""

LOADING_REGISTERS, MULTIPLYING_REGISTERS = 24, 240

check_registers(LOADING_REGISTERS, MULTIPLYING_REGISTERS, MULTIPLYING_REGISTERS)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the tiles are cut and walked over, not what is computed."""

    warpgroups: int
    """Warpgroups that multiply, 1 or 2."""
    columns: int
    """Columns of W in a tile, half of them of A and half of B in a SwiGLU; 128 or 256."""
    stages: int
    """Slots of the ring."""
    ctas: int = NUM_SMS

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.warpgroups * ROWS

    @classmethod
    def few(cls, rows: int) -> "Config":
        """For tiles whose time is that of reading weights, of up to so many rows that all tiles share.

        The ring holds 128 KB of weights on their way. (H100, 2026-11-26, 8 experts of 1536 x 512 and one row, calls
        in one program with a sum between them: branches with 64, 128 and 256 columns 23.6, 17.9 and 24.3 us, down
        12.3, 14.0 and 13.5; 109 experts and 32 rows, branches 169, 131 and 134, down with 128 and 256 76.0 and 78.0.)
        """
        return cls(1, 128, 8) if rows <= ROWS else cls(2, 128, 6)

    @classmethod
    def many(cls) -> "Config":
        """For rows whose time is that of multiplying."""
        return cls(2, 256, 4)


def check_supported(x: jax.ShapeDtypeStruct | jax.Array, w: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernel cannot multiply rows x [.., D] by experts w [E, D, N]; None if it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {jnp.dtype(x.dtype).name}; the kernel takes bfloat16 and float16"
    if w.dtype != x.dtype:
        return f"the experts are {jnp.dtype(w.dtype).name}; the kernel takes those of x's dtype, {x.dtype}"
    if x.shape[-1] % DEPTH or w.shape[-1] % OUT or not w.size:
        return f"experts [{w.shape[1]}, {w.shape[2]}]; the kernel takes multiples of {DEPTH}"
    return None


def _memory(config: Config, parts: int, transpose: bool, dtype: Any) -> Memory:
    own = config.columns // parts
    return {
        "x": Buffer((config.stages, config.rows, DEPTH), dtype, swizzle=128),
        "w": Buffer(
            (config.stages, parts, *((own, DEPTH) if transpose else (DEPTH, own))), dtype, swizzle=128
        ),
        "out": Buffer((config.warpgroups, ROWS, OUT), dtype, swizzle=128),
        "full": Barriers(arrivals=1 + parts, count=config.stages),
        "empty": Barriers(arrivals=config.warpgroups, count=config.stages),
    }


class _Cta:
    """The knowledge of every warpgroup of a CTA."""

    def __init__(
        self,
        gmem: Any,
        smem: Any,
        *,
        config: Config,
        parts: int,
        shared: bool,
        transpose: bool,
        interpreted: bool,
    ):
        self.gmem, self.smem, self.config, self.parts, self.shared = gmem, smem, config, parts, shared
        self.transpose = transpose
        self.dev = Device(interpreted)
        self.wg = warpgroup_index()
        self.width = config.columns // parts
        """Columns of y in a tile."""
        self.columns = pl.cdiv(gmem.y.shape[1], self.width)
        self.steps = gmem.x.shape[1] // DEPTH
        items = gmem.used[0] * self.columns
        self.items = jnp.maximum(lax.div(items + config.ctas - 1 - grid_index(), jnp.int32(config.ctas)), 0)
        """Items of this CTA."""

    def place(self, i) -> tuple[jax.Array, jax.Array]:
        """The tile of rows of the i-th item of this CTA, and its first column of y."""
        item = grid_index() + i * self.config.ctas
        return lax.div(item, self.columns), lax.rem(item, self.columns) * self.width

    def slot(self, step) -> jax.Array:
        """The place of a step's operands."""
        return lax.rem(step, self.config.stages)

    def release(self, step) -> None:
        """Tells the loading warpgroup that this one is done with the slot of a step."""
        plgpu.barrier_arrive(self.smem.empty.at[self.slot(step)])


def _load(cta: _Cta) -> None:
    """The role of the loading warpgroup."""
    config, gmem, smem = cta.config, cta.gmem, cta.smem
    if config.warpgroups > 1:
        release_registers(LOADING_REGISTERS, config.warpgroups + 1)

    def item(i, _):
        tile, column = cta.place(i)
        expert, row = gmem.experts[tile], tile * (0 if cta.shared else config.rows)

        def step(k, _):
            n = i * cta.steps + k
            slot, depth = cta.slot(n), pl.ds(k * DEPTH, DEPTH)
            pl.when(n >= config.stages)(lambda: plgpu.barrier_wait(smem.empty.at[slot]))
            barrier = smem.full.at[slot]
            plgpu.copy_gmem_to_smem(gmem.x.at[pl.ds(row, config.rows), depth], smem.x.at[slot], barrier)
            for part in range(cta.parts):
                columns = pl.ds(part * gmem.y.shape[1] + column, cta.width)
                own = (expert, columns, depth) if cta.transpose else (expert, depth, columns)
                plgpu.copy_gmem_to_smem(gmem.w.at[own], smem.w.at[slot, part], barrier)
            return ()

        lax.fori_loop(0, cta.steps, step, ())
        return ()

    lax.fori_loop(0, cta.items, item, ())


def _multiply(cta: _Cta) -> None:
    """The role of a multiplying warpgroup."""
    smem, dev = cta.smem, cta.dev
    if cta.config.warpgroups > 1:
        plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
    own = pl.ds(cta.wg * ROWS, ROWS)

    def products(i, *accs):
        first = i * cta.steps

        def step(k, carry):
            slot = cta.slot(first + k)
            plgpu.barrier_wait(smem.full.at[slot])
            for part, acc in enumerate(accs):
                w = smem.w.at[slot, part]
                dev.issue(acc, smem.x.at[slot, own], transposed(w) if cta.transpose else w)
            dev.finish(cta.parts)
            pl.when(k > 0)(lambda: cta.release(first + k - 1))
            return carry

        lax.fori_loop(0, cta.steps, step, ())
        dev.finish(0)
        results = [dev.collect(acc) for acc in accs]
        cta.release(first + cta.steps - 1)
        return results

    def item(i, _):
        tile, column = cta.place(i)
        accs = [plgpu.ACC((ROWS, cta.width), jnp.float32)] * cta.parts
        y, *rest = pl.run_scoped(functools.partial(products, i), *accs)
        for branch in rest:
            y = y * dev.reciprocal(1.0 + jnp.exp(-y), WGMMA) * branch
        _store(cta, tile * cta.config.rows + cta.wg * ROWS, column, y)
        return ()

    lax.fori_loop(0, cta.items, item, ())
    plgpu.wait_smem_to_gmem(0)


def _store(cta: _Cta, row, column, y) -> None:
    """Writes the rows of a warpgroup."""
    out, rounded = cta.smem.out.at[cta.wg], y.astype(cta.gmem.y.dtype)
    for first in range(0, cta.width, OUT):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[...] = rounded[:, first : first + OUT]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, cta.gmem.y.at[pl.ds(row, ROWS), pl.ds(column + first, OUT)])


def _body(gmem: Any, smem: Any, **static: Any) -> None:
    cta = _Cta(gmem, smem, **static)
    pl.when(cta.wg == cta.config.warpgroups)(lambda: _load(cta))
    pl.when(cta.wg < cta.config.warpgroups)(lambda: _multiply(cta))


def expert_product(
    x: Float[Array, "M D"],
    w: Float[Array, "E D1 N"],
    experts: Int[Array, " tiles"],
    used: Int[Array, "1"],
    *,
    config: Config,
    shared: bool = False,
    swiglu: bool = False,
    transpose: bool = False,
    interpret: Any = None,
) -> Float[Array, "M1 F"]:
    """The rows of every tile times the weights of its expert, where `check_supported` says so.

    Args:
      x: rows [tiles * config.rows, D], or with shared up to config.rows of them, those of every tile.
      w: weights of all experts, [E, D, N].
      experts: the expert of each tile.
      used: how many tiles there are; those behind are not written.
      config: how the work is cut.
      shared: whether all tiles have the same rows.
      swiglu: whether w holds both branches of a SwiGLU side by side, of whose product y is.
      transpose: whether w is [E, N, D].

    Returns:
      y [tiles * config.rows, N], N / 2 with swiglu, in x's dtype.
    """
    static = config, shared, swiglu, transpose, interpret
    return compiled(_run, interpret, static=5)(*static, x, w, experts, used)


def _run(config, shared, swiglu, transpose, interpret, x, w, experts, used):
    tiles, parts = experts.shape[0], 2 if swiglu else 1
    memory, N = _memory(config, parts, transpose, x.dtype), w.shape[1 if transpose else 2]
    assert smem_bytes(memory) <= SMEM_LIMIT, f"{config}: {smem_bytes(memory)} bytes of shared memory"
    assert x.shape[0] <= config.rows if shared else x.shape[0] == tiles * config.rows, (x.shape, tiles)
    results = launch(
        "expert_product",
        functools.partial(
            _body,
            config=config,
            parts=parts,
            shared=shared,
            transpose=transpose,
            interpreted=interpret is not None,
        ),
        inputs={"x": x, "w": w, "experts": experts, "used": used},
        outputs={"y": jax.ShapeDtypeStruct((tiles * config.rows, N // parts), x.dtype)},
        memory=memory,
        auto_barriers=False,
        ctas=config.ctas,
        warpgroups=config.warpgroups + 1,
        interpret=interpret,
    )
    return results["y"]
