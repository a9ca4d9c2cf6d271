"""Arrays of NumPy as JAX has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def put(x: Any, dtype: Any = None) -> jax.Array:
    """The array on JAX's default device, in memory of its own, which may be donated. `jnp.asarray` and `jnp.array` do
    the same by a program that is compiled for each shape. What is traced stays traced."""
    if isinstance(x, jax.core.Tracer):
        return jnp.asarray(x, dtype)
    return jax.device_put(np.array(x) if dtype is None else np.asarray(x).astype(jnp.dtype(dtype)))
