"""Checks of what the serving operations are given: shapes before the call, values where they are known.

Values are known where they come as NumPy arrays, and are then checked for free. The values of JAX arrays are looked
at only while `gdn_jax.debug_checks` is on.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.rule import arguments as values
from gdn_jax.shapes import (
    Dims,
    check_array,
    check_ascending,
    check_floating,
    check_integer,
    check_whole,
    real_number,
    rule_dims,
)


def token_dims(q: Any, k: Any, v: Any, *, letters: str, state_layout: str) -> Dims:
    """Checks queries, keys and values of decode or verify and returns their dimensions.

    Args:
      letters: the axes before the heads, "B" for q [B, Hk, K] or "N, T" for q [N, T, Hk, K].
    """
    leading = (None,) * len(letters.split(", "))
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(name, x, (*leading, None, None), f"{letters}, heads, width")
    tokens = [_with_token_axis(x) for x in (q, k, v)]
    return rule_dims(tokens[0], tokens[1], tokens[2], None, None, None, None, None, state_layout)


def _with_token_axis(x) -> jax.ShapeDtypeStruct:
    shape = (x.shape[0], 1, *x.shape[1:]) if len(x.shape) == 3 else x.shape
    return jax.ShapeDtypeStruct(shape, x.dtype)


def check_scale(scale: Any, dims: Dims) -> float:
    """The factor of the output: K ** -0.5, or the number that is given."""
    if scale is None:
        return dims.K**-0.5
    return real_number("scale", scale)


def check_pool(pool: Any, shape: tuple[int, ...], letters: str, layer: Any) -> None:
    """Raises ValueError unless the pool is floating and [slots, *shape], or with a layer [slots, layers, *shape]."""
    check_places("pool", pool, shape, letters, layer)
    check_floating("pool", pool)


def check_places(name: str, x: Any, shape: tuple[int, ...], letters: str, layer: Any) -> None:
    """Raises ValueError unless x is [slots, *shape], or with a layer [slots, layers, *shape]."""
    axes = "slots" if layer is None else "slots, layers"
    check_array(name, x, (*(None,) * (1 + (layer is not None)), *shape), f"{axes}, {letters}")
    if layer is not None:
        check_layer(layer, x.shape[1])


def check_layer(layer: Any, layers: int) -> None:
    """Raises ValueError unless layer is a whole number, or an integer array without dimensions, below `layers`."""
    if not hasattr(layer, "shape"):
        check_whole("layer", layer, 0, layers - 1)
        return
    check_integers("layer", layer, (), "")
    check_range("layer", np.asarray(layer) if isinstance(layer, np.generic) else layer, 0, layers - 1)


def check_null_slot(null_slot: Any, size: int) -> None:
    """Raises ValueError unless it is None, -1 or a slot of a pool of that size."""
    if null_slot is not None:
        check_whole("null_slot", null_slot, -1, size - 1)


def slot_count(pool: Any) -> int:
    """Slots of a pool, which all of its arrays have.

    Raises:
      ValueError: they do not.
    """
    for x in jax.tree.leaves(pool):
        if not getattr(x, "shape", ()):
            raise ValueError(f"pool: expected arrays [slots, ...], got {type(x).__name__}")
    sizes = {x.shape[0] for x in jax.tree.leaves(pool)}
    if len(sizes) != 1:
        raise ValueError(f"pool: expected arrays with one number of slots, got {sorted(sizes)}")
    return sizes.pop()


def capacity(pools: Any) -> int | None:
    """Tokens that a slot has room for: the least `capacity` among the nodes of a tree of pools; None for no bound."""
    found = jax.tree.leaves(pools, is_leaf=lambda x: hasattr(x, "capacity"))
    return min((x.capacity for x in found if hasattr(x, "capacity")), default=None)


def check_slots(
    name: str,
    slots: Any,
    shape: tuple[int | None, ...],
    letters: str,
    size: int,
    *,
    null_slot: int | None = None,
    unique: bool = False,
) -> None:
    """Raises ValueError for slots of a wrong shape or dtype, and for wrong numbers where they are known.

    Args:
      size: slots of the pool.
      null_slot: padding slot next to -1.
      unique: no slot may come twice.
    """
    check_null_slot(null_slot, size)
    check_integers(name, slots, shape, letters)
    check_values(partial(_check_slot_values, name, size, null_slot, unique), slots)


def check_integers(name: str, x: Any, shape: tuple[int | None, ...], letters: str) -> None:
    """Raises ValueError unless x is an integer array of that shape."""
    check_array(name, x, shape, letters)
    check_integer(name, x)


def check_values(check: Callable[..., None], *arrays: Any) -> None:
    """Runs a check of values on the host: of NumPy arrays always, of others in debug; see `check_known`."""
    if all(isinstance(x, np.ndarray) for x in arrays) or values.debug_checks_are_on():
        values.check_known(check, *arrays)


def _check_slot_values(name: str, size: int, null_slot: int | None, unique: bool, slots) -> None:
    slots = np.asarray(slots)
    inside = (slots >= 0) & (slots < size)
    slots = slots[inside | (slots != np.array(-1).astype(slots.dtype))]  # an unsigned -1 is padding too
    outside = slots[(slots < 0) | (slots >= size)]
    if outside.size:
        raise ValueError(
            f"{name}: expected slots from 0 to {size - 1}, or -1 for padding, got {int(outside[0])}"
        )
    if unique:
        found, counts = np.unique(
            slots[slots != null_slot] if null_slot is not None else slots, return_counts=True
        )
        if (counts > 1).any():
            raise ValueError(
                f"{name}: expected no slot twice, got {int(found[counts > 1][0])} more than once"
            )


def check_sequences(cu_seqlens: Any, T: int, has_initial_state: Any) -> None:
    """Raises ValueError for wrong offsets of T packed tokens, and for a wrong mask of their sequences."""
    check_integers("cu_seqlens", cu_seqlens, (None,), "N + 1")
    check_values(partial(check_ascending, T), cu_seqlens)
    if has_initial_state is not None:
        check_array("has_initial_state", has_initial_state, (cu_seqlens.shape[0] - 1,), "N")
        if has_initial_state.dtype != jnp.bool_:
            raise ValueError(f"has_initial_state: expected dtype bool, got {has_initial_state.dtype}")


def check_range(name: str, x: Any, least: int, most: int) -> None:
    """Raises ValueError for known numbers outside least to most."""
    check_values(partial(_check_range, name, least, most), x)


def _check_range(name: str, least: int, most: int, x) -> None:
    x = np.asarray(x)
    wrong = x[(x < least) | (x > most)]
    if wrong.size:
        raise ValueError(f"{name}: expected {least} to {most}, got {int(wrong[0])}")
