"""Products of rows with the weights of experts, a tile of rows with those of its own expert.

    y_t = x_t W_e,   or of a SwiGLU   y_t = silu(x_t A_e) * (x_t B_e)   with [A_e | B_e] = W_e,   e = experts[t]

A product may be one with W_e^T, as a gradient is, from weights [N, D] of an expert.

Only the experts that are named are read, each once for every tile of rows, and tiles beyond `used` are left out.
For few rows `rows.expert_swiglu` is faster.

Inputs (GMEM): x [tiles * rows, D]; w [E, D, N], of x's dtype, bfloat16 or float16; experts [tiles] int32, in
[0, E); used [1] int32. Output (GMEM), in x's dtype: y [tiles * rows, N], or N / 2 columns of a SwiGLU; what is behind
the used tiles is not written.
Grid: persistent, one CTA on each multiprocessor. An item is a tile of rows and a tile of columns, the items of one
tile of rows one after another. A CTA has `Config.warpgroups` warpgroups that multiply, `ROWS` rows each, and one that
loads: `layer.operand_ring`.
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

from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch, num_sms, warpgroup_index
from pallas_kernels.device.layouts import WGMMA
from pallas_kernels.device.memory import Buffer, Memory, transposed
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer.operand_ring import DEPTH, OUT, ROWS, Ring, barriers, roles, share, store

NEEDS = Needs.TMA | Needs.WGMMA


@dataclasses.dataclass(frozen=True)
class Config:
    """How the tiles are cut and walked over, not what is computed."""

    warpgroups: int = 2
    """Warpgroups that multiply, 1 or 2."""
    columns: int = 256
    """Columns of W in a tile, half of them of A and half of B in a SwiGLU; 128 or 256."""
    stages: int = 4
    """Slots of the ring."""
    ctas: int = dataclasses.field(default_factory=num_sms)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.warpgroups * ROWS


def check_supported(x: Shaped, w: Shaped) -> str | None:
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
        **barriers(1 + parts, config.warpgroups, config.stages),
    }


class _Cta:
    """The knowledge of every warpgroup of a CTA."""

    def __init__(
        self, gmem: Any, smem: Any, *, config: Config, parts: int, transpose: bool, interpreted: bool
    ):
        self.gmem, self.smem, self.config, self.parts = gmem, smem, config, parts
        self.transpose = transpose
        self.dev, self.ring = Device(interpreted), Ring(smem, config.stages)
        self.wg = warpgroup_index()
        self.width = config.columns // parts
        """Columns of y in a tile."""
        self.columns = pl.cdiv(gmem.y.shape[1], self.width)
        self.steps = gmem.x.shape[1] // DEPTH
        self.items = jnp.maximum(share(gmem.used[0] * self.columns, config.ctas), 0)
        """Items of this CTA."""

    def place(self, i) -> tuple[jax.Array, jax.Array]:
        """The tile of rows of the i-th item of this CTA, and its first column of y."""
        item = grid_index() + i * self.config.ctas
        return lax.div(item, self.columns), lax.rem(item, self.columns) * self.width


def _load(cta: _Cta) -> None:
    """The role of the loading warpgroup."""
    config, gmem, smem = cta.config, cta.gmem, cta.smem

    def item(i, _):
        tile, column = cta.place(i)
        expert, row = gmem.experts[tile], tile * config.rows

        def step(k, _):
            depth = pl.ds(k * DEPTH, DEPTH)
            slot, barrier = cta.ring.free(i * cta.steps + k)
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
    smem, dev, ring = cta.smem, cta.dev, cta.ring
    own = pl.ds(cta.wg * ROWS, ROWS)

    def products(i, *accs):
        def issue(_, slot):
            for part, acc in enumerate(accs):
                w = smem.w.at[slot, part]
                dev.issue(acc, smem.x.at[slot, own], transposed(w) if cta.transpose else w)

        return ring.sums(dev, i * cta.steps, cta.steps, accs, issue)

    def item(i, _):
        tile, column = cta.place(i)
        accs = [plgpu.ACC((ROWS, cta.width), jnp.float32)] * cta.parts
        y, *rest = pl.run_scoped(functools.partial(products, i), *accs)
        for branch in rest:
            y = y * dev.reciprocal(1.0 + jnp.exp(-y), WGMMA) * branch
        rows = pl.ds(tile * cta.config.rows + cta.wg * ROWS, ROWS)
        store(smem.out.at[cta.wg], y, lambda first: cta.gmem.y.at[rows, pl.ds(column + first, OUT)])
        return ()

    lax.fori_loop(0, cta.items, item, ())
    plgpu.wait_smem_to_gmem(0)


def _body(gmem: Any, smem: Any, **static: Any) -> None:
    cta = _Cta(gmem, smem, **static)
    roles(cta.wg, cta.config.warpgroups, lambda: _load(cta), lambda: _multiply(cta))


@kernel("config", "swiglu", "transpose")
def expert_product(
    x: Float[Array, "M D"],
    w: Float[Array, "E D1 N"],
    experts: Int[Array, " tiles"],
    used: Int[Array, "1"],
    *,
    config: Config,
    swiglu: bool = False,
    transpose: bool = False,
    interpret: Any = None,
) -> Float[Array, "M1 F"]:
    """The rows of every tile times the weights of its expert, where `check_supported` says so.

    Args:
      x: rows [tiles * config.rows, D].
      w: weights of all experts, [E, D, N].
      experts: the expert of each tile.
      used: how many tiles there are; those behind are not written.
      config: how the work is cut.
      swiglu: whether w holds both branches of a SwiGLU side by side, of whose product y is.
      transpose: whether w is [E, N, D].

    Returns:
      y [tiles * config.rows, N], N / 2 with swiglu, in x's dtype.
    """
    tiles, parts = experts.shape[0], 2 if swiglu else 1
    N = w.shape[1 if transpose else 2]
    assert x.shape[0] == tiles * config.rows, (x.shape, tiles)
    results = launch(
        "expert_product",
        functools.partial(
            _body,
            config=config,
            parts=parts,
            transpose=transpose,
            interpreted=interpret is not None,
        ),
        inputs={"x": x, "w": w, "experts": experts, "used": used},
        outputs={"y": jax.ShapeDtypeStruct((tiles * config.rows, N // parts), x.dtype)},
        memory=_memory(config, parts, transpose, x.dtype),
        ctas=config.ctas,
        warpgroups=config.warpgroups + 1,
        interpret=interpret,
    )
    return results["y"]
