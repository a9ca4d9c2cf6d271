"""Operations that GPUs below compute capability 9.0 do in another way, or not at all, for kernels of both.

Which one it is follows from what a kernel is lowered for: JAX's default device, or 9.0 where that is no GPU.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

HOPPER = (9, 0)
"""The first generation with bulk copies, and so with a fence between them and plain stores."""


def commit(interpreted: bool) -> None:
    """Waits for all of this warpgroup, and makes its stores to shared memory known to bulk copies where there are
    any."""
    if interpreted:
        plgpu.commit_smem()
    else:
        _commit()


@plgpu.inline_mgpu(arg_types=())
def _commit(ctx):
    if utils._infer_arch() >= HOPPER:
        utils.commit_shared()
    else:
        utils.warpgroup_barrier()


def prefetch(ref: Any) -> None:
    """Asks the L2 cache for a part of an array, where the GPU has an instruction for as much at once."""
    if utils._infer_arch() >= HOPPER:
        plgpu.async_prefetch(ref)
