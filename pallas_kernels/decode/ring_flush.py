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

from pallas_kernels.decode.ring import LENGTH, Ring, Slot
from pallas_kernels.decode.step import Config
from pallas_kernels.decode.tiles import Rule, Tile, load
from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.memory import store_any


def _body(gmem: Any, _: Any, *, rule: Rule, config: Config, room: int) -> None:
    tile = Tile(rule, config.block, gmem.state.dtype.itemsize)
    ring = Ring(tile, gmem.ring_k.dtype.itemsize, None)
    row, head, entries = tile.where(grid_index())
    slot = gmem.read_slots[row]

    @pl.when(rule.is_slot(slot))
    def _():
        count = gmem.count[slot]

        @pl.when(count + room > LENGTH)
        def _():
            here = Slot(gmem, tile, slot, head, lax.div(head, rule.HV // rule.Hk), entries)
            S = load(here.state, tile.layout)
            total = jnp.sum(ring.decays(here.g, count))
            store_any(here.state, here.folded(tile, S, count, total, 0.0).astype(S.dtype))


def ring_flush(
    state: Float[Array, "slots HV rows columns"],
    ring_k: Float[Array, "slots Hk L K"],
    ring_u: Float[Array, "slots HV L V"],
    ring_g: Float[Array, "slots HV L"],
    *,
    read_slots: Int[Array, " N"],
    count: Int[Array, " slots"],
    room: int,
    kv_layout: bool = True,
    null_slot: int | None = None,
    config: Config | None = None,
    interpret=None,
) -> Float[Array, "slots HV rows columns"]:
    """The states, where count + room > L with what the rings hold. All other slots keep their bits.

    Args:
      state, ring_k, ring_u, ring_g, read_slots, count, kv_layout, null_slot, config, interpret: as for `ring_step`.
      room: tokens that must find room; L for every ring that is not empty.
    """
    slots, Hk, _, K = ring_k.shape
    HV, V = ring_u.shape[1], ring_u.shape[3]
    rule = Rule(Hk, Hk, HV, K, V, 1.0, kv_layout=kv_layout, slots=slots, null_slot=null_slot)
    config = config or Config.default(V, state.dtype)
    in_place = jax.new_ref(state)
    inputs = {"ring_k": ring_k, "ring_u": ring_u, "ring_g": ring_g, "read_slots": read_slots, "count": count}
    launch(
        "ring_flush",
        functools.partial(_body, rule=rule, config=config, room=room),
        inputs=inputs | {"state": in_place},
        outputs={},
        memory={},
        ctas=read_slots.shape[0] * HV * (V // config.block),
        auto_barriers=False,
        interpret=interpret,
    )
    return jax.freeze(in_place)
