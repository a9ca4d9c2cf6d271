"""Kinds of pools by the type of their arrays. A ring's checkpoints are such a pool, too: any kind but a ring."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.serving.byte_states import CODES, BytePool, ByteStates, make_byte_states
from gdn_jax.serving.states import StatePool

KINDS: dict[type, type[StatePool]] = {ByteStates: BytePool}
"""Anything that is not here is an array of states. `pools` has the entries of rings."""


def opened(arrays: Any, layout: str, null_slot: int | None = None) -> StatePool:
    """The pool that a caller's arrays are, in plain JAX."""
    return KINDS.get(type(arrays), StatePool)(arrays, layout, null_slot)


def of_dtype(states: Float[Array, "slots *state"], dtype: DTypeLike) -> Array | ByteStates:
    """The arrays of a pool that holds states in a dtype: floating, or of 8 bits with scales.

    Raises:
      ValueError: there are no states of that dtype.
    """
    if jnp.dtype(dtype).name in CODES:
        return make_byte_states(states, dtype=dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize == 1:
        raise ValueError(
            f"dtype: expected a floating dtype of 16 bits or more, or {' or '.join(CODES)}, got {dtype!r}"
        )
    return states.astype(dtype)
