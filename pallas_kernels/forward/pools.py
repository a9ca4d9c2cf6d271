"""Refusals of calls whose states lie in slots of a pool, see `work.slots.PoolStates`."""

from typing import Any

import jax.numpy as jnp

from gdn_jax.shapes import Dims
from pallas_kernels.device.layouts import GRANULE
from pallas_kernels.forward.rule import FOLDED_SCALES


def check_supported(dims: Dims, pool: Any, scale: float) -> str | None:
    """Why the kernels of `forward.rule` cannot read and write states in a pool themselves; None if they can.

    Args:
      dims, scale: of a call.
      pool: of states, or its shape and dtype.
    """
    if pool.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the pool is {pool.dtype.name}; the kernels take float32 and bfloat16"
    if not pool.shape[0]:
        return "there are no slots"
    if dims.K % GRANULE or dims.V % GRANULE:
        return f"K = {dims.K}, V = {dims.V}; the kernels take states whose widths are multiples of {GRANULE}"
    if not FOLDED_SCALES[0] <= scale <= FOLDED_SCALES[1]:
        return f"scale is {scale}; the kernels take {FOLDED_SCALES[0]} to {FOLDED_SCALES[1]}"
    return None
