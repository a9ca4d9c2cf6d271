"""Rings that have no room for more tokens, made part of their states.

    S0 <- D S0 + sum_j D_j k_j u_j^T        where held + room > L

Inputs (GMEM): ring_k [slots, Hk, L, K], ring_u [slots, HV, L, V] bfloat16 or float32; ring_g [slots, HV, L] float32;
read_slots [N], held [N] int32.
In place (GMEM): state [slots, HV, K, V], or [slots, HV, V, K], float32 or bfloat16. The counts are the caller's to
set to 0: a kernel that read them while another part of it wrote them would read either.
Outputs: none.
Grid: a warpgroup for some heads of a request, one after the other: mostly it finds that there is nothing to do.
Numerics: sums in float32, rounded once. Hardware, limits: those of `ring_step`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from old_ring.ring import LENGTH, Slot
from old_ring.ring_products import Ring, add_tokens
from old_ring.ring_step import Config
from pallas_kernels.decode.tiles import Rule, Tile
from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.memory import Buffer
from pallas_kernels.work.slots import one_for_all_layers

HEADS = 4
"""That a warpgroup takes one after the other, at most."""


def _body(gmem: Any, smem: Any, *, rule: Rule, block: int, room: int, tiles: int) -> None:
    tile = Tile(rule, block, gmem.state.dtype.itemsize)
    ring = Ring(rule.K, block, gmem.ring_k.dtype.itemsize)
    first = grid_index() * tiles
    row = tile.where(first)[0]
    slot, count = gmem.read_slots[row], gmem.held[row]

    @pl.when(rule.is_slot(slot) & (count + room > LENGTH))
    def _():
        place = rule.place(slot, gmem.layer)

        def flush(i, _):
            _, head, entries = tile.where(first + i)
            here = Slot(gmem, tile, place, head, lax.div(head, rule.HV // rule.Hk), entries)
            held = ring.load(here, count)
            ring.spill(held, jnp.float32(0), smem.keys, smem.values)
            plgpu.commit_smem()
            add_tokens(here.state, jnp.exp(held.total), smem.keys, smem.values, rule.kv_layout)
            # All warps have read the tokens before the next ones take their place.
            plgpu.commit_smem()

        lax.fori_loop(0, tiles, flush, None)


def ring_flush(
    state: Float[Array, "slots *layers HV rows columns"],
    ring_k: Float[Array, "slots *layers Hk L K"],
    ring_u: Float[Array, "slots *layers HV L V"],
    ring_g: Float[Array, "slots *layers HV L"],
    *,
    read_slots: Int[Array, " N"],
    held: Int[Array, " N"],
    room: int,
    kv_layout: bool = True,
    null_slot: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    interpret=None,
) -> Float[Array, "slots *layers HV rows columns"]:
    """The states, where held + room > L with what the rings hold. All other slots keep their bits.

    Args:
      state, ring_k, ring_u, ring_g, read_slots, held, kv_layout, null_slot, layer, interpret: as for `ring_step`.
      room: tokens that must find room; L for every ring that is not empty.
    """
    (Hk, _, K), (HV, _, V) = ring_k.shape[-3:], ring_u.shape[-3:]
    slots, layers = state.shape[0], 1 if layer is None else state.shape[1]
    rule = Rule(Hk, Hk, HV, K, V, 1.0, kv_layout=kv_layout, slots=slots, null_slot=null_slot, layers=layers)
    block = Config.default(V).block
    tiles = math.gcd(HV, HEADS) * (V // block)
    in_place = jax.new_ref(one_for_all_layers(state, layer))
    rings = {"ring_k": ring_k, "ring_u": ring_u, "ring_g": ring_g}
    inputs = {name: one_for_all_layers(x, layer) for name, x in rings.items()}
    at = {
        "read_slots": read_slots,
        "held": held,
        "layer": layer if layer is None else jnp.asarray(layer, jnp.int32)[None],
    }
    launch(
        "ring_flush",
        functools.partial(_body, rule=rule, block=block, room=room, tiles=tiles),
        inputs=inputs | at | {"state": in_place},
        outputs={},
        memory={"keys": Buffer((LENGTH, K)), "values": Buffer((LENGTH, block))},
        ctas=read_slots.shape[0] * HV * (V // block) // tiles,
        auto_barriers=False,
        interpret=interpret,
    )
    return jax.freeze(in_place).reshape(state.shape)
