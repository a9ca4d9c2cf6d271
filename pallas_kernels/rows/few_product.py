"""The product of a few rows and a weight, whose rows are the M of the tensor cores and whose columns lie together.

    y = x W^T

Inputs (GMEM): x [N, D], W [F, D]. Output (GMEM): y [N, F]; all bfloat16 or float16.
Grid: a CTA for each `M` rows of W, of one warpgroup that multiplies and one that loads. Both operands pass through a
ring of slots, for `DEPTH` numbers of the sum (`layer.operand_ring`): where D allows, all of a CTA's weights are on
their way at once.
Shared memory: the ring, and the CTA's columns of y.
Numerics: float32 sums, rounded once. The same bits in every call. Hardware: compute capability 9.0. Limits:
`check_supported`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch, num_sms, warpgroup_index
from pallas_kernels.device.memory import SMEM_LIMIT, Buffer, transposed
from pallas_kernels.device.needs import Needs
from pallas_kernels.device.operations import Device
from pallas_kernels.layer.operand_ring import DEPTH, Ring, barriers, roles

NEEDS = Needs.TMA | Needs.WGMMA

M = 64
"""Rows of W of a CTA."""

GROUP = 8
"""Rows of x come in multiples of it."""

MOST_ROWS = 32
"""It is compared with XLA's products up to here, and for weights of up to `M` rows for each multiprocessor."""


def check_supported(x: Shaped, weight: Shaped) -> str | None:
    """Why the kernel cannot take rows x [.., D] and a weight [F, D]; None if it can."""
    (F, D), rows = weight.shape, x.size // x.shape[-1]
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        return f"rows of {x.dtype}, a weight of {weight.dtype}; the kernel takes bfloat16 or float16"
    if rows % GROUP or not 0 < rows <= MOST_ROWS:
        return f"{rows} rows; the kernel takes multiples of {GROUP} up to {MOST_ROWS}"
    if D % DEPTH or F % M or F // M > num_sms():
        return f"a weight [{F}, {D}]; the kernel takes multiples of {M} up to {M * num_sms()}, and of {DEPTH}"
    return None


def _stages(N: int, D: int) -> int:
    """Slots of the ring: as many as there is room for."""
    return min(D // DEPTH, (SMEM_LIMIT - 4096 - 2 * N * M) // (2 * DEPTH * (M + N)))


def _body(gmem: Any, smem: Any, *, stages: int, interpreted: bool) -> None:
    dev, ring, steps = Device(interpreted), Ring(smem, stages), gmem.x.shape[1] // DEPTH
    own = pl.ds(grid_index() * M, M)

    def load():
        def step(k, _):
            (slot, barrier), depth = ring.free(k), pl.ds(k * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(gmem.weight.at[own, depth], smem.w.at[slot], barrier)
            plgpu.copy_gmem_to_smem(gmem.x.at[:, depth], smem.x.at[slot], barrier)
            return ()

        lax.fori_loop(0, steps, step, ())

    def multiply():
        def sums(acc):
            def issue(k, slot):
                del k
                dev.issue(acc, smem.w.at[slot], transposed(smem.x.at[slot]))

            (y,) = ring.sums(dev, 0, steps, (acc,), issue)
            transposed(smem.y)[...] = y.astype(gmem.y.dtype)
            dev.commit()
            plgpu.copy_smem_to_gmem(smem.y, gmem.y.at[:, own])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(sums, plgpu.ACC((M, gmem.x.shape[0]), jnp.float32))

    roles(warpgroup_index(), 1, load, multiply)


@kernel()
def few_product(
    x: Float[Array, "N D"], weight: Float[Array, "F D"], *, interpret: Any = None
) -> Float[Array, "N F"]:
    """x @ weight.T.

    Args:
      x: rows that `check_supported` accepts.
      weight: the weight.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    (N, D), F = x.shape, weight.shape[0]
    stages = _stages(N, D)
    return launch(
        "few_product",
        functools.partial(_body, stages=stages, interpreted=interpret is not None),
        inputs={"x": x, "weight": weight},
        outputs={"y": jax.ShapeDtypeStruct((N, F), x.dtype)},
        memory={
            "w": Buffer((stages, M, DEPTH), x.dtype, swizzle=128),
            "x": Buffer((stages, N, DEPTH), x.dtype, swizzle=128),
            "y": Buffer((N, M), x.dtype, swizzle=128),
            **barriers(2, 1, stages),
        },
        ctas=F // M,
        warpgroups=2,
        interpret=interpret,
    )["y"]
