"""Slots of a pool: reading, writing and copying those that are named, and nothing else.

A pool is an array, or a pytree of arrays, whose leading axis counts slots. A slot holds what one request is
remembered by. A slot number outside the pool, -1 above all, is padding: it is read as zeros and never written. One
more number, a `null_slot` that a caller keeps free, may be padding too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from gdn_jax.serving.arguments import check_slots, slot_count
from gdn_jax.shapes import check_array, widened

BEYOND = np.iinfo(np.int32).max
"""The slot or row number that no pool has: reading there gives zeros, writing does nothing."""

FEW_PAIRS = 65 * 32_768
"""Up to here a GPU compares every token with all offsets in less time than the steps of a search take to start, which
is also a loop on the host. Worked out, not measured: each head of a token is compared by itself, 68 million times
for 65 offsets, 32,768 tokens and 32 heads."""

Indices = Integer[Array, "..."] | Integer[np.ndarray, "..."]
"""Slot numbers as callers give them: of any integer dtype. The largest unsigned number is -1 where the pool has
no such slot."""


class Address(NamedTuple):
    """Where in a pool the slots of a call lie; padding is `BEYOND`."""

    slot: Int[Array, "..."]
    layer: Any
    is_slot: Bool[Array, "..."]
    """False at padding."""

    @classmethod
    def of(cls, slots: Indices, pool: Any, null_slot: int | None = None, layer: Any = None) -> "Address":
        """Address of slots, and of a layer, by numbers of any integer dtype."""
        layer = widened(layer) if hasattr(layer, "dtype") else layer
        slots, size = widened(jnp.asarray(slots)), slot_count(pool)
        is_slot = (slots >= 0) & (slots < size)
        if null_slot is not None:
            is_slot = is_slot & (slots != null_slot)
        return cls(jnp.where(is_slot, slots.astype(jnp.int32), BEYOND), layer, is_slot)

    def only(self, wanted: Bool[Array, "..."]) -> "Address":
        """The same with padding where a slot is not wanted."""
        return Address(jnp.where(wanted, self.slot, BEYOND), self.layer, self.is_slot & wanted)

    def rows(self, rows: Int[Array, "..."]) -> "Address":
        """The slots of some rows of the call; a row that the call does not have is padding."""
        return Address(rows_of(self.slot, rows, BEYOND), self.layer, rows_of(self.is_slot, rows))

    @property
    def where(self) -> tuple:
        """Index of the slots in an array of the pool."""
        return (self.slot,) if self.layer is None else (self.slot, self.layer)


def is_real(cu_seqlens: Int[Array, " N1"], at: Address, T: int) -> Bool[Array, " T"]:
    """Which tokens of packed sequences belong to one that has a slot."""
    # To compare with every offset is one operation, to search one after the other.
    method = "compare_all" if cu_seqlens.shape[0] * T <= FEW_PAIRS else "scan"
    owner = jnp.searchsorted(widened(cu_seqlens), jnp.arange(T), side="right", method=method) - 1
    return rows_of(at.is_slot, jnp.where(owner < 0, BEYOND, owner), False)


def rows_of(x: Array, rows: Int[Array, "..."], fill: Any = 0) -> Array:
    """x[rows], with `fill` for rows that x does not have."""
    return x.at[rows].get(mode="fill", fill_value=fill)


def take(pool: Any, at: Address) -> Any:
    """Reads slots, zeros for padding: the pool's arrays with the slots' shape in place of the slot axis."""

    def read(x: Any) -> Array:
        if not x.shape[0]:  # JAX gathers nothing from an axis of no length
            return jnp.zeros_like(x, shape=(*at.slot.shape, *x.shape[len(at.where) :]))
        return jnp.asarray(x).at[at.where].get(mode="fill", fill_value=0)

    return jax.tree.map(read, pool)


def put(pool: Any, at: Address, rows: Any) -> Any:
    """The pool with rows written to the slots, in the pool's dtypes."""
    return jax.tree.map(lambda x, y: x.at[at.where].set(y.astype(x.dtype), mode="drop"), pool, rows)


def take_slots(pool: Any, slots: Indices, *, null_slot: int | None = None) -> Any:
    """Reads some slots, for instance to keep a request elsewhere while its slot serves another.

    Args:
      pool: an array or a pytree of arrays [slots, ...], also a `RingPool`.
      slots: [N] integers; -1 and null_slot are padding and read as zeros.
      null_slot: a slot that is never read.

    Returns:
      The arrays [N, ...], which `put_slots` takes.

    Raises:
      ValueError: slots has another shape or dtype; or known slots lie outside the pool.
    """
    check_slots("slots", slots, (None,), "N", slot_count(pool), null_slot=null_slot)
    return take(pool, Address.of(slots, pool, null_slot))


def put_slots(pool: Any, slots: Indices, rows: Any, *, null_slot: int | None = None) -> Any:
    """The pool with some slots holding what `take_slots` gave; all others keep their bits. The pool is donated.

    Args:
      pool: an array or a pytree of arrays [slots, ...], also a `RingPool`.
      slots: [N] integers, no slot twice; -1 and null_slot are padding.
      rows: the same pytree of arrays [N, ...], in the pool's dtypes.
      null_slot: a slot that is never written.

    Raises:
      ValueError: slots or rows have another shape or dtype, or rows are another tree; or known slots lie outside the
        pool or come twice.
    """
    check_slots("slots", slots, (None,), "N", slot_count(pool), null_slot=null_slot, unique=True)
    _check_rows(pool, rows, slots.shape[0])
    return _put_slots(pool, jnp.asarray(slots), rows, null_slot)


def copy_slots(pool: Any, from_slots: Indices, to_slots: Indices, *, null_slot: int | None = None) -> Any:
    """The pool with copies of slots in other slots, as when requests share a prefix. The pool is donated.

    Every slot is read before any is written. A pair with padding on either side copies nothing.

    Args:
      pool: an array or a pytree of arrays [slots, ...], also a `RingPool`.
      from_slots, to_slots: [N] integers; no slot twice among to_slots.
      null_slot: a slot that is never read or written.

    Raises:
      ValueError: slots have another shape or dtype; or known slots lie outside the pool or come twice.
    """
    check_slots("from_slots", from_slots, (None,), "N", slot_count(pool), null_slot=null_slot)
    shape = tuple(from_slots.shape)
    check_slots("to_slots", to_slots, shape, "N", slot_count(pool), null_slot=null_slot, unique=True)
    return _copy_slots(pool, jnp.asarray(from_slots), jnp.asarray(to_slots), null_slot)


def _check_rows(pool, rows, N: int) -> None:
    arrays, got = jax.tree.structure(pool), jax.tree.structure(rows)
    if arrays != got:
        raise ValueError(f"rows: expected the pool's tree {arrays}, got {got}")
    for (path, x), y in zip(jax.tree.leaves_with_path(pool), jax.tree.leaves(rows), strict=True):
        name = f"rows{jax.tree_util.keystr(path)}"
        check_array(name, y, (N, *x.shape[1:]), "N, ...")
        want, got = (jax.dtypes.canonicalize_dtype(z.dtype) for z in (x, y))
        if want != got:
            raise ValueError(f"{name}: expected the pool's dtype {want}, got {got}")


def _put(pool, slots, rows, null_slot):
    return put(pool, Address.of(slots, pool, null_slot), rows)


def _copy(pool, from_slots, to_slots, null_slot):
    source = Address.of(from_slots, pool, null_slot)
    return put(pool, Address.of(to_slots, pool, null_slot).only(source.is_slot), take(pool, source))


_put_slots = jax.jit(_put, static_argnums=3, donate_argnums=0, inline=True)
_copy_slots = jax.jit(_copy, static_argnums=3, donate_argnums=0, inline=True)
