"""Whether the kernels run on this device, and what a user is told where a GPU is left without them."""

import jax
import jax.numpy as jnp

from gdn_jax import supported_implementations


def no_kernels() -> str | None:
    """Returns why the kernels cannot run on this device; None if they can."""
    any_call = jnp.zeros((1, 1, 1, 16), jnp.bfloat16)
    return supported_implementations(any_call, any_call, any_call)["mosaic_gpu"]


def note() -> str | None:
    """Returns the line about a GPU that the kernels do not run on; None on any other device."""
    reason = no_kernels() if jax.default_backend() == "gpu" else None
    return None if reason is None else f"note: plain JAX, without kernels: {reason}"
