"""Calls on rings besides those of tokens: rejected drafts are dropped, rings flushed, and present states shown."""

from typing import Any

from jaxtyping import Array, Float

from gdn_jax.serving import shards
from gdn_jax.serving.arguments import check_integers, check_layer, check_range
from gdn_jax.serving.call import At, Spans
from gdn_jax.serving.deferred_pool import DeferredPool
from gdn_jax.serving.ring_arrays import RingPool
from gdn_jax.serving.slots import Indices
from gdn_jax.shapes import STATE_LAYOUTS, check_array, check_choice


def _rings(pool: Any, layout: str, null_slot: int | None, layer: Any) -> DeferredPool:
    check_choice("state_layout", layout, STATE_LAYOUTS)
    if not isinstance(pool, RingPool):
        raise ValueError(f"pool: expected a RingPool, see make_ring_pool, got {type(pool).__name__}")
    rings = DeferredPool(pool, layout, null_slot)
    check_array(
        "pool.state", rings.states, (None,) * (4 + (layer is not None)), "slots, layers if any, HO, _, _"
    )
    if layer is not None:
        check_layer(layer, rings.states.shape[1])
    return rings


def accept(
    pool: RingPool,
    read_slots: Indices,
    num_accepted_tokens: Indices,
    *,
    null_slot: int | None = None,
    layer: Any = None,
) -> RingPool:
    """The pool with those tokens of the last call dropped that were not accepted. The pool is donated.

    `verify` does this itself. It is for whoever goes on otherwise after a `verify`: with `decode`, `flush`,
    `snapshot` or `take_slots`. A `verify` that comes after it is given 1.

    Args:
      pool: the pool.
      read_slots: [N] integers; no slot twice; -1 is padding.
      num_accepted_tokens: [N] integers from 1 to L: how many of the tokens that the last call appended stay. After a
        tree it is 1 + the last accepted token's index, as for `verify`.
      null_slot, layer: as for `decode`.

    Raises:
      ValueError: an argument is wrong.
    """
    rings = _rings(pool, STATE_LAYOUTS[0], null_slot, layer)
    At(read_slots).check(rings, "N", None)
    check_integers("num_accepted_tokens", num_accepted_tokens, tuple(read_slots.shape), "N")
    check_range("num_accepted_tokens", num_accepted_tokens, 1, pool.length)
    spans = Spans(read_slots, num_accepted_tokens, layer=layer)
    return shards.change((DeferredPool.accept,), rings.axes(spans), rings, spans).arrays


def flush(
    pool: RingPool,
    read_slots: Indices,
    *,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
) -> RingPool:
    """The pool with the rings of some slots made part of their checkpoints. The pool is donated.

    Args:
      pool: the pool.
      read_slots: [N] integers; no slot twice; -1 is padding.
      state_layout: of pool.state.
      null_slot, layer: as for `decode`.

    Raises:
      ValueError: an argument is wrong.
    """
    rings, at = _rings(pool, state_layout, null_slot, layer), At(read_slots, layer=layer)
    at.check(rings, "N", None)
    return shards.change((DeferredPool.flush,), rings.axes(at), rings, at).arrays


def snapshot(
    pool: RingPool,
    read_slots: Indices,
    *,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
) -> Float[Array, "N HO _ _"]:
    """The present states of some slots: what a flush would make their checkpoints. The pool stays as it is.

    Args:
      pool, state_layout, null_slot, layer: as for `flush`.
      read_slots: [N] integers; -1 is padding.

    Returns:
      [N, HO, K, V], or [N, HO, V, K] with state_layout "vk", in float32 (float64 for a pool in it); 0 for padding.

    Raises:
      ValueError: an argument is wrong.
    """
    rings, at = _rings(pool, state_layout, null_slot, layer), At(read_slots, layer=layer)
    at.check(rings, "N", None, unique=False)
    return shards.look((DeferredPool.snapshot,), "n h . .", rings, at)
