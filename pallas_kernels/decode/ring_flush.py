"""The first half of a step of drafts on rings: what was rejected is dropped, and rings without room become part of
their states.

    held  = min(before + accepted, count): without those of the last call's tokens that were not accepted
    S0 <- D S0 + sum_j D_j k_j u_j^T        where held + T > L
    before <- held, or 0 after a flush;     count <- before + tokens

Inputs (GMEM): ring_k [slots, Hk, L, K], ring_u [slots, HV, L, V] bfloat16 or float32; ring_g [slots, HV, L] float32;
read_slots [N], accepted [N] int32; optionally num_tokens [N] int32.
In place (GMEM): state [slots, HV, K, V], or [slots, HV, V, K], float32 or bfloat16; cursors [slots, HV, 2] int32.
Outputs: none.
Grid: a warpgroup for some heads of a request, one after the other: mostly it finds that there is nothing to do. It
reads and writes the cursors of its own heads alone.
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

from pallas_kernels.decode.ring import BEFORE, COUNT, LENGTH, Slot
from pallas_kernels.decode.ring_products import Ring, add_tokens
from pallas_kernels.decode.ring_step import Config
from pallas_kernels.decode.tiles import GRANULE, Rule, Tile
from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.memory import Buffer
from pallas_kernels.work.slots import one_for_all_layers

HEADS = 4
"""That a warpgroup takes one after the other, at most."""

PART_ROWS = 64
"""Of a state, in registers while tokens are added to them."""


def _body(gmem: Any, smem: Any, *, rule: Rule, block: int, T: int, heads: int) -> None:
    tile = Tile(rule, block, gmem.state.dtype.itemsize)
    ring = Ring(rule.K, block, gmem.ring_k.dtype.itemsize)
    parts = rule.V // block
    first = grid_index() * heads * parts
    row, first_head, _ = tile.where(first)
    slot = gmem.read_slots[row]
    total_rows, columns = tile.shape
    # Longer rows would need more registers than there are.
    rows = PART_ROWS if total_rows % PART_ROWS == 0 and columns <= 128 else GRANULE

    @pl.when(rule.is_slot(slot))
    def _():
        place = rule.place(slot, gmem.layer)
        # All heads of a slot have the same cursors.
        count, before = (gmem.cursors[place, first_head, which] for which in (COUNT, BEFORE))
        held = jnp.minimum(before + gmem.accepted[row], count)
        has_no_room = held + T > LENGTH

        def flush(i, _):
            _, head, entries = tile.where(first + i)
            here = Slot(gmem, tile, place, head, lax.div(head, rule.HV // rule.Hk), entries)
            tokens = ring.load(here, held)
            ring.spill(tokens, jnp.float32(0), smem.keys, smem.values)
            plgpu.commit_smem()
            decay = jnp.exp(tokens.total)

            def part(p, _):
                some = here.state.at[pl.ds(p * rows, rows)]
                add_tokens(some, some, p * rows, decay, smem.keys, smem.values, rule.kv_layout)

            lax.fori_loop(0, total_rows // rows, part, None)
            # All warps have read the tokens before the next ones take their place.
            plgpu.commit_smem()

        lax.fori_loop(0, jnp.where(has_no_room, heads * parts, 0), flush, None)
        start = jnp.where(has_no_room, 0, held)
        tokens = T if gmem.num_tokens is None else gmem.num_tokens[row]
        # All warps have read the cursors.
        plgpu.commit_smem()
        for i in range(heads):
            gmem.cursors[place, first_head + i, COUNT] = start + tokens
            gmem.cursors[place, first_head + i, BEFORE] = start


def ring_flush(
    state: Float[Array, "slots *layers HV rows columns"],
    ring_k: Float[Array, "slots *layers Hk L K"],
    ring_u: Float[Array, "slots *layers HV L V"],
    ring_g: Float[Array, "slots *layers HV L"],
    cursors: Int[Array, "slots *layers HV 2"],
    *,
    read_slots: Int[Array, " N"],
    accepted: Int[Array, " N"],
    T: int,
    num_tokens: Int[Array, " N"] | None = None,
    kv_layout: bool = True,
    null_slot: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    interpret=None,
) -> tuple[Float[Array, "slots *layers HV rows columns"], Int[Array, "slots *layers HV 2"]]:
    """States and cursors before a call of `ring_step` with T drafts. All other slots keep their bits.

    Args:
      state, ring_k, ring_u, ring_g, cursors, read_slots, kv_layout, null_slot, layer, interpret: as for `ring_step`.
      accepted: how many of the last call's tokens stay.
      T: drafts of every request, of which num_tokens are real; None for all.
    """
    (Hk, _, K), (HV, _, V) = ring_k.shape[-3:], ring_u.shape[-3:]
    slots, layers = state.shape[0], 1 if layer is None else state.shape[1]
    rule = Rule(Hk, Hk, HV, K, V, 1.0, kv_layout=kv_layout, slots=slots, null_slot=null_slot, layers=layers)
    block, heads = Config.default(V).block, math.gcd(HV, HEADS)
    in_place = [jax.new_ref(one_for_all_layers(x, layer)) for x in (state, cursors)]
    rings = {"ring_k": ring_k, "ring_u": ring_u, "ring_g": ring_g}
    inputs = {name: one_for_all_layers(x, layer) for name, x in rings.items()}
    at = {
        "read_slots": read_slots,
        "accepted": accepted,
        "num_tokens": num_tokens,
        "layer": layer if layer is None else jnp.asarray(layer, jnp.int32)[None],
    }
    launch(
        "ring_flush",
        functools.partial(_body, rule=rule, block=block, T=T, heads=heads),
        inputs=inputs | at | {"state": in_place[0], "cursors": in_place[1]},
        outputs={},
        memory={"keys": Buffer((LENGTH, K)), "values": Buffer((LENGTH, block))},
        ctas=read_slots.shape[0] * HV // heads,
        auto_barriers=False,
        interpret=interpret,
    )
    after = [jax.freeze(x) for x in in_place]
    return after[0].reshape(state.shape), after[1].reshape(cursors.shape)
