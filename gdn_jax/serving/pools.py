"""Which object stands for the arrays of a caller's pool, in plain JAX and by kernels, and a call of tokens on it."""

from typing import Any

from jaxtyping import Array, Float

from gdn_jax.serving import kinds, shards
from gdn_jax.serving.byte_states import ByteStates
from gdn_jax.serving.call import Call
from gdn_jax.serving.kernels import DeferredKernels, StateKernels, WindowKernels
from gdn_jax.serving.ring import DeferredPool
from gdn_jax.serving.ring_arrays import RingPool
from gdn_jax.serving.slots import Indices
from gdn_jax.serving.states import StatePool
from gdn_jax.serving.tokens import Raw
from gdn_jax.serving.windows import WindowPool
from gdn_jax.shapes import STATE_LAYOUTS, check_choice

Arrays = Float[Array, "slots *state"] | ByteStates | RingPool
"""Types of a caller's pool of states."""

KINDS = kinds.KINDS
"""Kinds of pools by the type of their arrays; anything else is an array of states."""

KINDS |= {RingPool: DeferredPool}

BY_KERNELS: dict[type[StatePool], type[StatePool]] = {
    StatePool: StateKernels,
    DeferredPool: DeferredKernels,
    WindowPool: WindowKernels,
}
"""Kinds of pools whose operations kernels have too."""

IMPLEMENTATIONS = ("mosaic_gpu", "xla")
"""Names of the implementations of decode and verify, fastest first."""


def opened(arrays: Any, layout: str, null_slot: int | None = None) -> StatePool:
    """The pool that a caller's arrays are, in plain JAX.

    Raises:
      ValueError: there is no such layout.
    """
    check_choice("state_layout", layout, STATE_LAYOUTS)
    return kinds.opened(arrays, layout, null_slot)


def by_kernels(pool: StatePool) -> StatePool:
    """The same pool with its operations by kernels; one that has none stays as it is."""
    kind = BY_KERNELS.get(type(pool), type(pool))
    return kind(pool.arrays, pool.layout, pool.null_slot)


def choose(pool: StatePool, implementation: str | None, tokens: Any, where: Any) -> StatePool:
    """The pool with the operations of the implementation that is named; else by kernels where they can run the call.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the kernels are named and cannot run, with the reason.
    """
    check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))
    if implementation == "xla":
        return pool
    fast = by_kernels(pool)
    reason = fast.unsupported(tokens, where)
    if implementation == "mosaic_gpu" and reason:
        raise NotImplementedError(f"implementation 'mosaic_gpu': {reason}")
    return pool if reason else fast


def serve(method: str, call: Call, raw: Raw, pool: StatePool, where: Any) -> tuple[Array, Arrays]:
    """`decode` or `verify` of arguments that are not checked yet: outputs, and the caller's arrays."""
    letters = "B" if method == "decode" else "N, T"
    dims = raw.check(letters=letters, state_layout=pool.layout)
    pool.check_tokens(raw)
    pool.check(dims, where.layer)
    where.check(pool, letters, *raw.q.shape[:-2])
    call = call.checked(dims)
    pool = choose(pool, call.implementation, raw, where)
    o, pool = shards.by_heads((method, call), pool, raw, where)
    return o, pool.arrays


def draft_slots(arrays: Any, state_slots: Indices) -> Indices:
    """The slots [N, T] of a step's drafts as `verify` takes them for a pool: [N] where a request has one slot."""
    return state_slots if KINDS.get(type(arrays), StatePool).slot_per_token else state_slots[:, 0]
