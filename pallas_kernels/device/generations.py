"""Operations that GPUs below compute capability 9.0 do in another way, or not at all, for kernels of both.

Which one it is follows from what a kernel is lowered for: JAX's default device, or 9.0 where that is no GPU.

Copies of whole rows are bulk copies, which arrive on a barrier each. Below 9.0 the threads of a warpgroup copy by
cp.async, and a thread can only wait until all of its copies but some number of younger ones have arrived. So a
warpgroup that waits for its copies in turn counts one in the place of each that it does without (`skip`).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

HOPPER = (9, 0)
"""The first generation with bulk copies, and so with a fence between them and plain stores."""


def commit() -> None:
    """Waits for all of this warpgroup, and makes its stores to shared memory known to bulk copies where there are
    any."""
    if has_bulk_copies():
        plgpu.commit_smem()
    else:
        _wait_for_warpgroup()


def meet(barrier: Any) -> None:
    """Waits for all warpgroups of the CTA, which arrive at a barrier; what they have stored to shared memory is known
    then, as after `commit`."""
    commit()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


@plgpu.inline_mgpu(arg_types=())
def _wait_for_warpgroup(ctx):
    utils.warpgroup_barrier()


def copy(source: Any, destination: Any, barrier: Any) -> None:
    """Starts a copy of numbers that lie one after the other in global memory, by one warpgroup.

    Args:
      source, destination: parts of arrays of one shape, the destination in shared memory.
      barrier: of one arrival, which `arrived` waits for.
    """
    if has_bulk_copies():
        plgpu.copy_gmem_to_smem(source, destination, barrier)
    else:
        plgpu.copy_gmem_to_smem(source, destination, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def skip(count: Callable[[], Any]) -> None:
    """Counts as many copies as `count()` says in the place of some that this warpgroup does without."""
    if not has_bulk_copies():
        lax.fori_loop(0, jnp.asarray(count(), jnp.int32), lambda *_: _no_copy(), None)


def arrived(barrier: Any, younger: int) -> None:
    """Waits for a copy of this warpgroup.

    Args:
      barrier: of the copy.
      younger: copies that the warpgroup has started, or skipped, after this one.
    """
    if has_bulk_copies():
        plgpu.barrier_wait(barrier)
    else:
        plgpu.wait_gmem_to_smem(younger)
        _wait_for_warpgroup()


def capability() -> str:
    """The compute capability that a kernel is lowered for, such as "8.9"."""
    return ".".join(map(str, utils._infer_arch()))


def has_bulk_copies() -> bool:
    """Whether what a kernel is lowered for has bulk copies."""
    return utils._infer_arch() >= HOPPER


@plgpu.inline_mgpu(arg_types=())
def _no_copy(ctx):
    nvvm.cp_async_commit_group()


def prefetch(ref: Any) -> None:
    """Asks the L2 cache for a part of an array, where the GPU has an instruction for as much at once."""
    if has_bulk_copies():
        plgpu.async_prefetch(ref)
