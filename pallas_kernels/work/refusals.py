"""Refusals that all kernels of the rule share."""

import jax.numpy as jnp

from gdn_jax.shapes import Dims
from pallas_kernels.device.layouts import CHUNK


def check_supported(dims: Dims, dtype, chunk_size: int) -> str | None:
    """Why no kernel runs a call of the rule, whatever its widths are; None if one may.

    Args:
      dims: of gdn_jax.shapes.
      dtype: of q, k and v.
      chunk_size: as asked for.
    """
    if not isinstance(dims.B, int):
        return f"B is the symbol {dims.B} of jax.export; the kernels are made for a number"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"q, k and v are {jnp.dtype(dtype).name}; the kernels take bfloat16 and float16"
    if chunk_size != CHUNK:
        return f"chunk_size is {chunk_size}; the kernels are written for {CHUNK}"
    if not dims.B * dims.T * dims.N:
        return "there are no tokens"
    return None
