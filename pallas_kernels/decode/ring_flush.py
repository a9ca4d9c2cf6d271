"""Rings that have no room for more tokens, made part of their states.

    S0 <- D S0 + sum_j D_j k_j u_j^T        where count + room > L

Inputs (GMEM): ring_k [slots, Hk, L, K], ring_u [slots, HV, L, V] bfloat16 or float32; ring_g [slots, HV, L] float32;
read_slots [N], count [slots] int32.
In place (GMEM): state [slots, HV, K, V], or [slots, HV, V, K], float32 or bfloat16. The counts are the caller's to
set to 0: a kernel that read them while another part of it wrote them would read either.
Outputs: none.
Grid: as in `step`.
Numerics: sums in float32, rounded once. Hardware, limits: those of `ring_step`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.decode.ring import LENGTH, Slot, default_block, divided, tile_index, warpgroups
from pallas_kernels.decode.tiles import Rule, one_for_all_layers
from pallas_kernels.device.launch import launch


def _body(gmem: Any, _: Any, *, rule: Rule, block: int, W: int, room: int) -> None:
    parts = rule.V // block
    tile, _ = tile_index(W)
    number, first = lax.div(tile, parts), lax.rem(tile, parts) * block
    row, head = lax.div(number, rule.HV), lax.rem(number, rule.HV)
    slot_number = gmem.read_slots[row]

    @pl.when(rule.is_slot(slot_number))
    def _():
        place = rule.place(slot_number, gmem.layer)
        count = gmem.count[place]

        @pl.when(count + room > LENGTH)
        def _():
            slot = Slot(gmem, rule, place, head, lax.div(head, rule.HV // rule.Hk), first, block)
            total = slot.decays(count)[1]
            for i, S in enumerate(slot.chunks(slot.start())):
                slot.store(i, slot.folded(i, S, count, total, 0.0))


def ring_flush(
    state: Float[Array, "slots *layers HV rows columns"],
    ring_k: Float[Array, "slots *layers Hk L K"],
    ring_u: Float[Array, "slots *layers HV L V"],
    ring_g: Float[Array, "slots *layers HV L"],
    *,
    read_slots: Int[Array, " N"],
    count: Int[Array, "slots *layers"],
    room: int,
    kv_layout: bool = True,
    null_slot: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    interpret=None,
) -> Float[Array, "slots *layers HV rows columns"]:
    """The states, where count + room > L with what the rings hold. All other slots keep their bits.

    Args:
      state, ring_k, ring_u, ring_g, read_slots, count, kv_layout, null_slot, layer, interpret: as for
        `ring_step`.
      room: tokens that must find room; L for every ring that is not empty.
    """
    (Hk, _, K), (HV, _, V) = ring_k.shape[-3:], ring_u.shape[-3:]
    slots, layers = state.shape[0], 1 if layer is None else state.shape[1]
    rule = Rule(Hk, Hk, HV, K, V, 1.0, kv_layout=kv_layout, slots=slots, null_slot=null_slot, layers=layers)
    block, flat = default_block(V), [one_for_all_layers(x, layer) for x in (state, ring_k, ring_u, ring_g)]
    tiles = read_slots.shape[0] * HV * (V // block)
    W = warpgroups(tiles)
    states, *rings = divided(*flat, kv_layout=kv_layout)
    in_place = jax.new_ref(states)
    inputs = dict(zip(("ring_k", "ring_u", "ring_g"), rings, strict=True))
    inputs["count"] = one_for_all_layers(count, layer)
    at = {"read_slots": read_slots, "layer": layer if layer is None else jnp.asarray(layer, jnp.int32)[None]}
    launch(
        "ring_flush",
        functools.partial(_body, rule=rule, block=block, W=W, room=room),
        inputs=inputs | at | {"state": in_place},
        outputs={},
        memory={},
        ctas=tiles // W,
        warpgroups=W,
        auto_barriers=False,
        interpret=interpret,
    )
    return jax.freeze(in_place).reshape(state.shape)
