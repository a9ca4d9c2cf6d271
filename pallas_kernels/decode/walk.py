"""The walk over states in a pool that the kernels on rings share: `deferred`, `drafts` and `drafts_mma`.

Work: there is one CTA to an SM, or fewer. Its warpgroups work by themselves: each takes a value head, or all that
share a key head, then the next ones. A unit is what it takes at once: one value head of a request, and `block`
entries of V. What belongs to a value head alone is read and written by one warpgroup.

A unit's state passes through shared memory. Its copy starts while the warpgroup works on units before it, and so the
walk looks ahead: it knows the slot and the count of the ring of a unit before that unit begins. A unit whose request
has no slot is padding: its output is 0, and nothing else is read or written.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.decode.codes import NUMBERS, Rows
from pallas_kernels.decode.ring import BEFORE, COUNT, ChannelTokens, Rings, Tokens
from pallas_kernels.decode.tiles import Sizes, Tile, column_layout
from pallas_kernels.device.launch import grid_index, launch, num_sms, warpgroup_index
from pallas_kernels.device.memory import Memory, store_any
from pallas_kernels.device.operations import Device
from pallas_kernels.work.slots import layer_input, one_for_all_layers


class Cta:
    """The knowledge of a warpgroup about the units that it takes.

    Args:
      config: its `block` and `warpgroups` are read.
      T: tokens of a request.
      heads: value heads of a request that a warpgroup takes one after the other.
      ctas: CTAs that are launched.
    """

    def __init__(
        self,
        gmem: Any,
        smem: Any,
        *,
        sizes: Sizes,
        config: Any,
        T: int,
        heads: int,
        ctas: int,
        interpreted: bool,
    ):
        self.gmem, self.smem, self.sizes, self.config, self.T = gmem, smem, sizes, config, T
        self.dev = Device(interpreted)
        self.wg = warpgroup_index()
        self.chunks, self.stages = smem.state.at[self.wg], smem.state.shape[1]
        self.numbers = NUMBERS[jnp.dtype(gmem.state.dtype).name]
        self.tile = Tile(sizes, config.block, gmem.state.dtype.itemsize)
        self.along_v = column_layout(config.block).reduce(0)
        self.N = gmem.read_slots.shape[0]
        parts = sizes.V // config.block
        self.together = parts * heads
        self.first, self.stride = self.wg * ctas + grid_index(), config.warpgroups * ctas
        groups = self.N * sizes.HV * parts // self.together
        self.number = lax.div(groups - self.first + self.stride - 1, self.stride) * self.together
        """Units of this warpgroup."""

    def where(self, i: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """Row, value head and entries of V of the i-th unit."""
        group = self.first + lax.div(i, self.together) * self.stride
        return self.tile.where(group * self.together + lax.rem(i, self.together))

    def is_slot(self, slot: jax.Array) -> jax.Array:
        """Whether a slot number names a slot of the pool."""
        return self.sizes.slots.is_slot(slot)

    def place(self, slot: jax.Array) -> jax.Array:
        """The index of a slot in the pool."""
        return self.sizes.slots.place(slot, self.gmem.layer)

    def slot_of(self, i: jax.Array) -> jax.Array:
        """The slot of the i-th unit; padding behind the last one."""
        row = jnp.minimum(self.where(i)[0], self.N - 1)
        return jnp.where(i < self.number, self.gmem.read_slots[row], -1)

    def count_of(self, i: jax.Array, slot: jax.Array, read: Callable) -> jax.Array:
        """Tokens that stay in the ring of the i-th unit, by read(cta, i, slot); 0 for padding."""
        return lax.cond(self.is_slot(slot), lambda: read(self, i, slot), lambda: jnp.int32(0))

    def cursors(self, i: jax.Array, slot: jax.Array) -> tuple[jax.Array, Any]:
        """Row of the i-th unit, and a reference to its cursors."""
        row, head, _ = self.where(i)
        return row, self.gmem.cursors.at[self.place(slot), head]

    def copy(self, i: jax.Array, slot: jax.Array, chunks: Iterable[Any], stage_of: Callable) -> None:
        """Starts the copies of chunks of the i-th unit's state, each to its stage; none where that is padding."""
        size = self.smem.state.shape[2]

        @pl.when(self.is_slot(slot))
        def _():
            _, head, entries = self.where(i)
            pairs = [(c, stage_of(c)) for c in chunks]
            state = self.rows_of(self.place(slot), head, entries)
            for c, stage in pairs:
                rows = state.some(c * size, size)
                arrived = self.smem.arrived.at[self.wg * self.stages + stage]
                self.numbers.copy(rows, self.chunk(stage), arrived)

    def rows_of(self, place: jax.Array, head: jax.Array, entries: Any) -> Rows:
        """The tile of a head in the pool."""
        state, scale = self.tile.state(self.gmem.state, place, head, entries), self.gmem.scale
        if scale is None:
            return Rows(state)
        return Rows(state, scale.at[place, head] if self.sizes.kv_layout else scale.at[place, head, entries])

    def chunk(self, stage: jax.Array) -> Rows:
        """The chunk in a stage."""
        scale = getattr(self.smem, "scale", None)
        return Rows(self.chunks.at[stage], None if scale is None else scale.at[self.wg, stage])

    def wait(self, stage: jax.Array) -> Rows:
        """The chunk in a stage, once it has arrived."""
        plgpu.barrier_wait(self.smem.arrived.at[self.wg * self.stages + stage])
        return self.chunk(stage)

    def present(self, row: jax.Array) -> Any:
        """How many of a row's T tokens are real."""
        return self.T if self.gmem.num_tokens is None else jnp.clip(self.gmem.num_tokens[row], 0, self.T)

    def clear(self, i: jax.Array) -> None:
        """Makes the outputs of the i-th unit, which is padding, 0."""
        row, head, entries = self.where(i)
        zeros = plgpu.layout_cast(jnp.zeros((self.config.block,), self.gmem.o.dtype), self.along_v)
        for t in range(self.T):
            store_any(self.gmem.o.at[row, t, head, entries], zeros)


class Unit:
    """Where the i-th unit, which is in a slot, lies in memory."""

    def __init__(self, cta: Cta, i: jax.Array, slot: jax.Array):
        gmem, self.sizes, self.block = cta.gmem, cta.sizes, cta.config.block
        self.row, self.head, self.entries = cta.where(i)
        self.q_head = lax.div(self.head, self.sizes.HV // self.sizes.Hq)
        self.k_head = lax.div(self.head, self.sizes.HV // self.sizes.Hk)
        place = cta.place(slot)
        self.state = cta.rows_of(place, self.head, self.entries)
        self.ring_k, self.ring_g = gmem.ring_k.at[place, self.k_head], gmem.ring_g.at[place, self.head]
        self.ring_u = gmem.ring_u.at[place, self.head, :, self.entries]
        self.cursors = gmem.cursors.at[place, self.head]

    def ends(self) -> "Ends":
        """Whether it is the last one of its heads, which writes what the units of a head share."""
        share = self.sizes.HV // self.sizes.Hk
        head = jnp.asarray(self.entries.start + self.block == self.sizes.V)
        return Ends(head, head & (lax.rem(self.head, share) == share - 1))


class Ends(NamedTuple):
    """Whether a unit is the last one of its heads."""

    head: jax.Array
    """Whether it is the last one of its value head."""
    key_head: jax.Array
    """Whether it is the last one of all value heads that share its key head."""


class Here(NamedTuple):
    """The carry of the walk at the beginning of a unit."""

    slot: jax.Array
    """Slot of the unit."""
    count: jax.Array
    """Tokens that stay in its ring."""
    next_slot: jax.Array | None = None
    """Slot of the unit after it, in a kernel that asks for slots that early."""
    copies: Any = None
    """Copies of chunks before the first one of its state, in a kernel that counts them."""


def accepted_count(cta: Cta, i: jax.Array, slot: jax.Array) -> jax.Array:
    """Tokens in the ring of the i-th unit without those of the last call that were not accepted."""
    row, cursors = cta.cursors(i, slot)
    return jnp.minimum(cursors[BEFORE] + cta.gmem.accepted[row], cursors[COUNT])


def walk(cta: Cta, start: Here, work: Callable, padding: Callable) -> None:
    """Goes from unit to unit by here <- work(cta, i, here, next_slot), or by padding(cta, i, here, next_slot)."""

    def turn(i: jax.Array, here: Here) -> Here:
        next_slot = cta.slot_of(i + 1) if here.next_slot is None else here.next_slot
        return lax.cond(
            cta.is_slot(here.slot),
            lambda: work(cta, i, here, next_slot),
            lambda: padding(cta, i, here, next_slot),
        )

    lax.fori_loop(0, cta.number, turn, start)


def launch_walk(
    name: str,
    body: Callable[..., None],
    tokens: Tokens | ChannelTokens,
    spans: dict[str, Array | None],
    rings: Rings,
    sizes: Sizes,
    *,
    config: Any,
    heads: int,
    layer: Any,
    memory: Memory,
    interpret: Any,
) -> tuple[Float[Array, "N T HV V"], Rings]:
    """Runs a kernel that writes outputs, and states and rings in place: both are returned.

    Args:
      name, memory, interpret: as for `launch`.
      body: body(gmem, smem, **static) with the static arguments of `Cta`.
      spans: where the tokens of each request begin and end, by name.
      sizes, config, heads: as for `Cta`.
      layer: index of the second axis of a pool that serves a whole model, or None.
    """
    v = tokens.v
    ctas = min(num_sms(), v.shape[0] * (sizes.HV // heads))
    static: Any = dict(sizes=sizes, config=config, T=v.shape[1], heads=heads, ctas=ctas)
    results = launch(
        name,
        functools.partial(body, **static, interpreted=interpret is not None),
        inputs=tokens._asdict() | spans | dict(layer=layer_input(layer)),
        outputs={"o": jax.ShapeDtypeStruct(v.shape, v.dtype)},
        updated={
            key: None if x is None else one_for_all_layers(x, layer) for key, x in rings._asdict().items()
        },
        memory=memory,
        ctas=ctas,
        warpgroups=config.warpgroups,
        interpret=interpret,
    )
    after = (None if x is None else results[key].reshape(x.shape) for key, x in rings._asdict().items())
    return results["o"], Rings._make(after)
