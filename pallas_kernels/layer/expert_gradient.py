"""Gradients of the weights of experts: for each, the product of its rows with the cotangents of its results.

    dW_e = sum_{t of e} x_t dy_t^T

The rows of an expert lie side by side, in tiles as `layer.expert_product` takes them; an expert may have none.

Inputs (GMEM): x [tiles * rows, M], dy [tiles * rows, N], bfloat16 or float16, of which one is 0 in rows that fill
a tile up; first and count [E] int32, the first tile of each expert, and how many it has. Output (GMEM): dW
[E, M, N] of x's dtype.
Grid: persistent, one CTA on each multiprocessor. An item is a tile [`TILE`, `COLUMNS`] of a dW, those of an expert
one after another, so that its rows stay in the L2 cache. Two warpgroups multiply, `ROWS` rows of dW each, one loads,
`DEPTH` rows at a time: `layer.operand_ring`.
Shared memory: `_memory`, 208 KB.
Numerics: float32 sums, rounded once. The same bits in every call. Hardware: compute capability 9.0. Limits:
`check_supported`.
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
from pallas_kernels.device.memory import Buffer, Memory, transposed
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer.operand_ring import DEPTH, OUT, ROWS, Ring, barriers, roles, share, store

NEEDS = Needs.TMA | Needs.WGMMA

MULTIPLYING = 2
"""Warpgroups that multiply."""

TILE = MULTIPLYING * ROWS
"""Rows of dW in an item."""

COLUMNS = 256
"""Columns of an item, as many as a wgmma takes."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the items are walked over, not what is computed."""

    stages: int = 4
    """Slots of the ring."""
    ctas: int = dataclasses.field(default_factory=num_sms)


def check_supported(x: Shaped, N: int) -> str | None:
    """Why the kernel cannot make gradients from rows x [.., M] and N cotangents of each; None if it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {jnp.dtype(x.dtype).name}; the kernel takes bfloat16 and float16"
    if x.shape[-1] % OUT or N % OUT:
        return f"weights [{x.shape[-1]}, {N}]; the kernel takes multiples of {OUT}"
    return None


def _memory(config: Config, dtype: Any) -> Memory:
    return {
        "x": Buffer((config.stages, DEPTH, TILE), dtype, swizzle=128),
        "dy": Buffer((config.stages, DEPTH, COLUMNS), dtype, swizzle=128),
        "out": Buffer((MULTIPLYING, ROWS, OUT), dtype, swizzle=128),
        **barriers(2, MULTIPLYING, config.stages),
    }


class _Cta:
    """The knowledge of every warpgroup of a CTA."""

    def __init__(self, gmem: Any, smem: Any, *, config: Config, rows: int, interpreted: bool):
        self.gmem, self.smem, self.config, self.rows = gmem, smem, config, rows
        self.dev, self.wg, self.ring = Device(interpreted), warpgroup_index(), Ring(smem, config.stages)
        E, M, N = gmem.dw.shape
        self.columns = pl.cdiv(N, COLUMNS)
        self.of_expert = pl.cdiv(M, TILE) * self.columns
        """Items of an expert."""
        self.items = share(E * self.of_expert, config.ctas)
        """Items of this CTA."""

    def place(self, i) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Expert, first row and first column of the i-th item of this CTA."""
        item = grid_index() + i * self.config.ctas
        expert, tile = lax.div(item, self.of_expert), lax.rem(item, self.of_expert)
        return expert, lax.div(tile, self.columns) * TILE, lax.rem(tile, self.columns) * COLUMNS

    def steps(self, i) -> jax.Array:
        """Steps of the i-th item."""
        return self.gmem.count[self.place(i)[0]] * (self.rows // DEPTH)

    def walk(self, item: Any) -> None:
        """item(i, first) for all items of this CTA, with the number of the item's first step."""

        def body(i, first):
            item(i, first)
            return first + self.steps(i)

        lax.fori_loop(0, self.items, body, jnp.int32(0))


def _load(cta: _Cta) -> None:
    """The role of the loading warpgroup."""
    gmem, smem = cta.gmem, cta.smem

    def item(i, first):
        expert, row, column = cta.place(i)
        begin = gmem.first[expert] * cta.rows

        def step(k, _):
            slot, barrier = cta.ring.free(first + k)
            rows = pl.ds(begin + k * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(gmem.x.at[rows, pl.ds(row, TILE)], smem.x.at[slot], barrier)
            plgpu.copy_gmem_to_smem(gmem.dy.at[rows, pl.ds(column, COLUMNS)], smem.dy.at[slot], barrier)
            return ()

        lax.fori_loop(0, cta.steps(i), step, ())

    cta.walk(item)


def _multiply(cta: _Cta) -> None:
    """The role of a multiplying warpgroup."""
    smem, dev, ring, own = cta.smem, cta.dev, cta.ring, pl.ds(cta.wg * ROWS, ROWS)

    def product(first, steps, acc):
        def issue(_, slot):
            dev.issue(acc, transposed(smem.x.at[slot, :, own]), smem.dy.at[slot])

        return ring.sums(dev, first, steps, [acc], issue)

    def item(i, first):
        expert, row, column = cta.place(i)
        steps = cta.steps(i)
        (dw,) = pl.run_scoped(lambda acc: product(first, steps, acc), plgpu.ACC((ROWS, COLUMNS), jnp.float32))

        def target(at):
            return cta.gmem.dw.at[expert, pl.ds(row + cta.wg * ROWS, ROWS), pl.ds(column + at, OUT)]

        store(smem.out.at[cta.wg], dw, target)

    cta.walk(item)
    plgpu.wait_smem_to_gmem(0)


def _body(gmem: Any, smem: Any, **static: Any) -> None:
    cta = _Cta(gmem, smem, **static)
    roles(cta.wg, MULTIPLYING, lambda: _load(cta), lambda: _multiply(cta))


@kernel("rows", "config", chosen=lambda x: dict(config=x.config or Config()))
def expert_gradient(
    x: Float[Array, "T M"],
    dy: Float[Array, "T N"],
    first: Int[Array, " E"],
    count: Int[Array, " E"],
    *,
    rows: int,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "E M N"]:
    """The gradients of the weights of all experts, where `check_supported` says so.

    Args:
      x: rows in tiles.
      dy: their cotangents.
      first: first tile of each expert.
      count: how many tiles it has.
      rows: rows of a tile, a multiple of `DEPTH`.
      config: None for the default.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      dW in x's dtype, 0 for an expert without a tile.
    """
    assert config is not None
    return launch(
        "expert_gradient",
        functools.partial(_body, config=config, rows=rows, interpreted=interpret is not None),
        inputs={"x": x, "dy": dy, "first": first, "count": count},
        outputs={"dw": jax.ShapeDtypeStruct((first.shape[0], x.shape[1], dy.shape[1]), x.dtype)},
        memory=_memory(config, x.dtype),
        ctas=config.ctas,
        warpgroups=MULTIPLYING + 1,
        interpret=interpret,
    )["dw"]
