"""Slots of a pool of states: which numbers name one, where it lies, and which a sequence reads and writes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.device.layouts import zeros
from pallas_kernels.device.memory import load_state, store_state
from pallas_kernels.work.spans import Span


@jax.tree_util.register_static  # arrays that lie in slots cross the borders of compiled functions with it
class Slots(NamedTuple):
    """The slot numbers of a pool, and where they lie."""

    slots: int
    """Slots of the pool. A slot number outside of it, or equal to null_slot, is padding."""
    null_slot: int | None
    layers: int
    """States of a slot, one for each layer of a model, where the pool serves them all."""

    def is_slot(self, slot: jax.Array) -> jax.Array:
        """Whether a slot number names a slot of the pool."""
        inside = (slot >= 0) & (slot < self.slots)
        return inside if self.null_slot is None else inside & (slot != self.null_slot)

    def place(self, slot: jax.Array, layer: Any) -> jax.Array:
        """The index of a slot's state of a layer in a pool [slots * layers, ...]; layer: a reference [1], or None."""
        return slot if layer is None else slot * self.layers + layer[0]


def one_for_all_layers(x: jax.Array, layer: Any) -> jax.Array:
    """An array [slots, layers, ...] of a pool that serves a whole model, as [slots * layers, ...]."""
    return x if layer is None else x.reshape(-1, *x.shape[2:])


def layer_input(layer: Any) -> Int[Array, "1"] | None:
    """The number of a layer as an input of a kernel, None where a pool has one layer."""
    return None if layer is None else jnp.asarray(layer, jnp.int32)[None]


class PoolStates(NamedTuple):
    """The states of sequences in a pool: where each begins, and where its last one goes.

    All are read before any is written.
    """

    slots: Slots
    pool: Float[Array, "places HO _ _"]
    """States in float32 or bfloat16, of all layers one after the other."""
    read_slots: Int[Array, " N"]
    """Slots of the initial states, int32. A sequence without one is padding: its outputs are 0, and nothing is read
    or written."""
    write_slots: Int[Array, " N"] | None
    """Slots of the final states, int32, none of them twice. None: those that are read, none of them twice either.
    A state without a slot is dropped."""
    has_initial_state: Int[Array, " N"] | None
    """0 for a sequence that starts from zeros, int32. None: all go on from what their slots hold."""
    layer: Int[Array, "1"] | None
    """Number of the layer whose states these are, where the pool has several."""

    @classmethod
    def of(
        cls,
        pool: Float[Array, "slots *layers HO _ _"],
        read_slots: Int[Array, " N"],
        write_slots: Int[Array, " N"] | None = None,
        has_initial_state: Bool[Array, " N"] | None = None,
        *,
        null_slot: int | None = None,
        layer: Any = None,
    ) -> "PoolStates":
        """Makes the states from a pool and slots as callers have them.

        Args:
          null_slot: a slot that is padding too.
          layer: index of the second axis of a pool that serves a whole model.
        """
        slots = Slots(pool.shape[0], null_slot, 1 if layer is None else pool.shape[1])
        return cls(
            slots,
            one_for_all_layers(pool, layer),
            read_slots,
            write_slots,
            None if has_initial_state is None else has_initial_state.astype(jnp.int32),
            layer_input(layer),
        )

    def put(self, final: Float[Array, "N HO _ _"]) -> Float[Array, "places HO _ _"]:
        """The pool with the final states in write_slots. Outside kernels, after all initial states were read."""
        assert self.write_slots is not None
        is_slot = self.slots.is_slot(self.read_slots) & self.slots.is_slot(self.write_slots)
        place = jnp.where(is_slot, self.slots.place(self.write_slots, self.layer), self.pool.shape[0])
        return self.pool.at[place].set(final.astype(self.pool.dtype), mode="drop")


def slot_inputs(states: PoolStates | None) -> dict[str, Any]:
    """The pool and the slots as inputs of a kernel, by the names that the functions below read."""
    names = ("pool", "read_slots", "write_slots", "has_initial_state", "layer")
    return {name: None if states is None else getattr(states, name) for name in names}


def padding_without_slot(span: Span, slots: Slots, gmem: Any) -> Span:
    """The span, which is padding too where its sequence has no slot."""
    return span._replace(
        is_padding=span.is_padding | jnp.logical_not(slots.is_slot(_read_slot(span.sequence, gmem)))
    )


def load_initial(
    sequence: jax.Array, head: jax.Array, rows: Any, kv_layout: bool, slots: Slots, gmem: Any
) -> jax.Array:
    """Rows of a sequence's initial state [V, K] in float32: zeros where it has none, and for the padding."""
    slot = _read_slot(sequence, gmem)
    starts = slots.is_slot(slot) & (sequence < gmem.read_slots.shape[0])
    if gmem.has_initial_state is not None:
        starts = starts & (gmem.has_initial_state[_clamped(sequence, gmem)] != 0)
    source = gmem.pool.at[slots.place(slot, gmem.layer), head]
    K = source.shape[0] if kv_layout else source.shape[1]
    nothing = zeros((rows.size, K), jnp.float32)
    return lax.cond(starts, lambda: load_state(source, rows, kv_layout), lambda: nothing)


def store_final(
    sequence: jax.Array, head: jax.Array, rows: Any, h: jax.Array, kv_layout: bool, slots: Slots, gmem: Any
) -> None:
    """Rows of a final state to its slot. The sequence is not padding."""
    numbers = gmem.read_slots if gmem.write_slots is None else gmem.write_slots
    slot = numbers[sequence]
    place = gmem.pool.at[slots.place(slot, gmem.layer), head]
    pl.when(slots.is_slot(slot))(lambda: store_state(place, rows, h, kv_layout))


def _read_slot(sequence: jax.Array, gmem: Any) -> jax.Array:
    return gmem.read_slots[_clamped(sequence, gmem)]


def _clamped(sequence: jax.Array, gmem: Any) -> jax.Array:
    """A sequence's number; the last one's for the padding."""
    return jnp.minimum(sequence, gmem.read_slots.shape[0] - 1)
