"""A ring of tokens beside a state: in memory, and how a kernel is launched on a pool of them.

A slot of a pool holds a checkpoint S0 and L entries (k_j, u_j, g_j), of which the first `count` are tokens:
normalised keys, written values, log decays. They stand for the state

    S = D S0 + sum_j D_j k_j u_j^T

where D_j = exp(g_j+1 + ... + g_count) is the decay since token j, and D that since the checkpoint.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.decode.tiles import Tile
from pallas_kernels.device.launch import launch
from pallas_kernels.device.memory import Memory
from pallas_kernels.work.slots import layer_input, one_for_all_layers

LENGTH = 16
"""L: entries of a ring."""


class Slot:
    """What belongs to a slot and a tile."""

    def __init__(
        self, gmem: Any, tile: Tile, place: jax.Array, head: jax.Array, k_head: jax.Array, entries: Any
    ):
        self.state = tile.state(gmem.state, place, head, entries)
        self.k, self.g = gmem.ring_k.at[place, k_head], gmem.ring_g.at[place, head]
        self.u = gmem.ring_u.at[place, head, :, entries]


COUNT, BEFORE = 0, 1
"""Cursors of a ring: how many entries are tokens, and how many were before the last call's. Each value head has those
of its slot, as the warpgroup that works on the head reads and writes them: no other one reads what it writes."""


class Results(NamedTuple):
    """Outputs, and states and rings after them."""

    o: Float[Array, "N T HV V"]
    state: Float[Array, "slots *layers HV rows columns"]
    ring_k: Float[Array, "slots *layers Hk L K"]
    ring_u: Float[Array, "slots *layers HV L V"]
    ring_g: Float[Array, "slots *layers HV L"]
    cursors: Int[Array, "slots *layers HV 2"]


def launch_in_place(
    name: str,
    body: Callable[..., None],
    *,
    inputs: Mapping[str, Any],
    pool: tuple[jax.Array, ...],
    layer: Any,
    memory: Memory,
    ctas: int,
    warpgroups: int,
    interpret: Any,
) -> Results:
    """Runs body(gmem, smem), which writes outputs, and states and rings in place.

    Args:
      name, body, memory, ctas, warpgroups, interpret: of `launch`.
      inputs: the other inputs by name, `v` among them.
      pool: state, ring_k, ring_u, ring_g and cursors.
      layer: index of the second axis of a pool that serves a whole model, or None.
    """
    v, names = inputs["v"], Results._fields[1:]
    results = launch(
        name,
        body,
        inputs={**inputs, "layer": layer_input(layer)},
        outputs={"o": jax.ShapeDtypeStruct(v.shape, v.dtype)},
        updated={name: one_for_all_layers(x, layer) for name, x in zip(names, pool, strict=True)},
        memory=memory,
        ctas=ctas,
        warpgroups=warpgroups,
        auto_barriers=False,
        interpret=interpret,
    )
    after = (results[name].reshape(x.shape) for name, x in zip(names, pool, strict=True))
    return Results(results["o"], *after)
