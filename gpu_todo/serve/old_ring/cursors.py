"""The cursors of rings: how many tokens each request finds, and how many there are after its call.

    held = count, or with drafts min(before + accepted, count): the last call's tokens that were accepted
    decoding:  count <- held + 1, before <- held; with the token that fills the ring count <- 0, before <- -1
    drafts:    start = held if held + T <= L else 0;  count <- start + tokens, before <- start

Inputs (GMEM): read_slots [N]; optionally accepted [N], num_tokens [N] int32.
In place (GMEM): count, before [slots] int32.
Outputs (GMEM): held [N] and, with drafts, start [N] int32, 0 for padding. What follows reads these: the counts are
those of the end already.
Grid: a warpgroup for each request. Hardware: compute capability 9.0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from old_ring.ring import LENGTH
from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.work.slots import Slots, one_for_all_layers


def _body(gmem: Any, _: Any, *, slots: Slots, T: int | None) -> None:
    row = grid_index()
    slot = gmem.read_slots[row]
    is_slot = slots.is_slot(slot)

    @pl.when(~is_slot)
    def _():
        gmem.held[row] = jnp.int32(0)
        if T is not None:
            gmem.start[row] = jnp.int32(0)

    @pl.when(is_slot)
    def _():
        place = slots.place(slot, gmem.layer)
        held = gmem.count[place]
        if T is None:
            is_full = held + 1 >= LENGTH
            count, before = jnp.where(is_full, 0, held + 1), jnp.where(is_full, -1, held)
        else:
            held = jnp.minimum(gmem.before[place] + gmem.accepted[row], held)
            before = jnp.where(held + T > LENGTH, 0, held)
            count = before + (T if gmem.num_tokens is None else gmem.num_tokens[row])
            gmem.start[row] = before
        gmem.held[row] = held
        gmem.count[place] = count
        gmem.before[place] = before


def advance(
    count: Int[Array, "slots *layers"],
    before: Int[Array, "slots *layers"],
    read_slots: Int[Array, " N"],
    *,
    T: int | None = None,
    accepted: Int[Array, " N"] | None = None,
    num_tokens: Int[Array, " N"] | None = None,
    null_slot: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    interpret=None,
) -> tuple[Array, ...]:
    """count and before after a call, held, and with T start.

    Args:
      count, before: of every slot.
      read_slots, null_slot, layer, interpret: as for `ring_step`.
      T: drafts of every request, of which num_tokens are real; None for decoding.
      accepted: with T, how many of the last call's tokens stay.
    """
    layers = 1 if layer is None else count.shape[1]
    slots = Slots(count.shape[0], null_slot, layers)
    in_place = [jax.new_ref(one_for_all_layers(x, layer)) for x in (count, before)]
    N = read_slots.shape[0]
    numbers = jax.ShapeDtypeStruct((N,), jnp.int32)
    found = launch(
        "ring_cursors",
        functools.partial(_body, slots=slots, T=T),
        inputs={
            "read_slots": read_slots,
            "accepted": accepted,
            "num_tokens": num_tokens,
            "layer": layer if layer is None else jnp.asarray(layer, jnp.int32)[None],
            "count": in_place[0],
            "before": in_place[1],
        },
        outputs={"held": numbers, "start": None if T is None else numbers},
        memory={},
        ctas=N,
        auto_barriers=False,
        interpret=interpret,
    )
    return *(jax.freeze(x).reshape(count.shape) for x in in_place), *found.values()
