"""Which kernels run on this device, and what a user is told where a GPU is left without some."""

import jax
import jax.numpy as jnp

from gdn_jax import supported_implementations
from gdn_jax.parts.kernels import SMALL, usable


def _supported_implementations() -> dict[str, str | None]:
    any_call = jnp.zeros((1, 1, 1, 16), jnp.bfloat16)
    return supported_implementations(any_call, any_call, any_call)


def device_reason() -> str | None:
    """Returns why the kernels of "mosaic_gpu" and of layers cannot run on this device; None if they can."""
    return _supported_implementations()["mosaic_gpu"]


def rule_implementation() -> str:
    """Returns the name of the implementation of the rule that runs unasked on this device, in 16 bits."""
    return next(name for name, reason in _supported_implementations().items() if reason is None)


def note() -> str | None:
    """Returns the line about a GPU that lacks kernels; None on any other device."""
    reason = device_reason() if jax.default_backend() == "gpu" else None
    if reason is None:
        return None
    if (name := rule_implementation()) == "chunked":
        return f"note: plain JAX, without kernels: {reason}"
    if usable(None):
        return f"note: the rule by the kernels of {name}, and no kernels by wgmma: {reason}"
    if usable(None, SMALL):
        fitting = "layers and single tokens by kernels that fit into 99 KB of shared memory"
        return f"note: the rule by the kernels of {name}, {fitting}: {reason}"
    return f"note: the rule by the kernels of {name}, all else in plain JAX: {reason}"
