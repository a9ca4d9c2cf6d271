"""Drafts of every running request, on states that are written once in many tokens: a few tokens as vectors.

What is computed is in `vectors`: the tokens behind those of a request's ring, to which they are appended. Drafts find

    held = min(before + accepted, count)

tokens, without those of the last call that were not accepted. Where they have no room behind these, the ring becomes
part of the checkpoint first, chunk by chunk as the state passes: S0 <- D S0 + sum_j D_j k_j u_j^T.

Inputs (GMEM): q [N, T, Hq, K], k [N, T, Hk, K], v [N, T, HV, V] bfloat16, float16 or float32; a, b [N, T, HV] of any
floating dtype; A_log, dt_bias [HV]; read_slots [N] int32; optionally accepted [N], num_tokens [N] int32.
In place (GMEM): as `deferred`.
Outputs (GMEM): o [N, T, HV, V] in v's dtype.
Grid: `walk`, the value heads of a key head to a warpgroup. It writes their keys with the last one, as a flush needs
the keys that they replace.
Shared memory: `memory`.

| barrier | arrives                                    | waits                                     |
|---------|--------------------------------------------|-------------------------------------------|
| arrived | the copy of a chunk of a warpgroup's state | that warpgroup, before it reads the chunk |

Numerics: as in `step`; keys and values meet later tokens as the ring stores them.
Hardware: `NEEDS`. Limits: those of `deferred`; T at most 4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.decode import vectors
from pallas_kernels.decode.ring import BEFORE, COUNT, LENGTH, ChannelTokens, Rings, Tokens
from pallas_kernels.decode.ring_products import Decay, add_tokens, row_slices
from pallas_kernels.decode.tiles import Sizes
from pallas_kernels.decode.vectors import Config
from pallas_kernels.decode.walk import Here, Unit, accepted_count, launch_walk, walk
from pallas_kernels.device.memory import Buffer, Memory, store_any
from pallas_kernels.device.needs import Needs

NEEDS = Needs.TMA | Needs.LARGE

MAX_TOKENS = 4
"""T: products of two vectors of each token with a state are summed in registers."""

FLUSHED_ROWS = 8
"""Rows of a chunk, at least, that take a ring at once. With more, registers spill (ptxas of 2026-11-23)."""


class Drafts(NamedTuple):
    """Which of a request's drafts a call has: with several calls, each but the last has `MAX_TOKENS`."""

    tokens: int
    """Drafts of all calls."""
    offset: int = 0
    """Drafts of the calls before."""


def memory(
    sizes: Sizes, config: Config, T: int, drafts: Drafts, state_dtype: Any, kind: type["Cta"]
) -> Memory:
    """Shared memory of a CTA: everything once for each warpgroup. The first call has room for a ring to flush."""
    W, begins = config.warpgroups, drafts.offset == 0
    others = vectors.vector_memory(sizes, config, T) | {
        "sums": Buffer((W, vectors.rows_of_sums(sizes, config, T), config.block)),
        "keys": Buffer((W, LENGTH, sizes.K)) if begins else None,
        "values": Buffer((W, LENGTH, config.block)) if begins else None,
        **kind.gate_memory(sizes, W, T),
    }
    return others | vectors.state_memory(sizes, config, others, state_dtype)


class Cta(vectors.Cta):
    """The knowledge of a warpgroup, with the drafts of the call."""

    def __init__(self, gmem: Any, smem: Any, *, drafts: Drafts, **static: Any):
        super().__init__(gmem, smem, sums=smem.sums, tall=False, **static)
        self.drafts, self.begins = drafts, drafts.offset == 0


def _count(cta: Cta, i: jax.Array, slot: jax.Array) -> jax.Array:
    """Tokens that stay in the ring of the i-th unit, which is no padding."""
    if cta.begins:
        return accepted_count(cta, i, slot)
    return cta.cursors(i, slot)[1][BEFORE] + cta.drafts.offset


def _flush(cta: Cta, at: Unit, decay: Decay, chunk: Any, row: jax.Array) -> None:
    """Makes the spilled ring part of a chunk, in shared memory and in the slot."""
    keys, values = cta.spilled()
    # A few rows at once, as the sums of products are in registers, too.
    rows = max(FLUSHED_ROWS, row_slices(cta.shape.columns).rows)
    for r in range(0, cta.shape.rows, rows):
        some, tokens = chunk.some(r, rows), (decay, keys, values, cta.sizes.kv_layout, cta.dev)
        add_tokens(cta.numbers, some, (at.state.some(row + r, rows), some), row + r, *tokens)
    plgpu.commit_smem()


def _work(cta: Cta, i: jax.Array, here: Here, next_slot: jax.Array) -> Here:
    """The drafts of the i-th unit."""
    gmem, at, change = cta.gmem, Unit(cta, i, here.slot), None
    has_no_room = here.count + cta.drafts.tokens > LENGTH
    # All loads come before the first use of one.
    raw = cta.load_tokens(at)
    held = cta.load_ring(at, here.count, with_u=True)
    if cta.begins:
        before, decay = held, cta.decay_of_state(held)
        pl.when(has_no_room)(lambda: cta.spill(before))
        held = held.emptied(has_no_room)

        def change(chunk, row):
            pl.when(has_no_room)(lambda: _flush(cta, at, decay, chunk, row))

    tokens = cta.prepare_tokens(raw, held)
    carry = vectors.take_state(cta, i, here, next_slot, change=change)
    # The next count is on its way while this unit is finished.
    next_count = cta.count_of(i + 1, next_slot, _count)
    present, ends = cta.present(at.row), at.ends()
    for t, (o, _, stored_u) in enumerate(cta.answers(held, tokens, carry)):
        is_real, position = t < present, held.count + t
        o = jnp.where(is_real, o, jnp.zeros_like(o))
        store_any(gmem.o.at[at.row, t, at.head, at.entries], o.astype(gmem.o.dtype))
        cta.append(at, ends, position, tokens[t], stored_u, is_real & (position < LENGTH))
    if cta.begins:

        @pl.when(ends.head)
        def _():
            added = cta.drafts.tokens if gmem.num_tokens is None else gmem.num_tokens[at.row]
            at.cursors[COUNT] = held.count + added
            at.cursors[BEFORE] = held.count

    return Here(next_slot, next_count, copies=here.copies + cta.shape.chunks)


def _padding(cta: Cta, i: jax.Array, here: Here, next_slot: jax.Array) -> Here:
    return vectors.pass_by(cta, i, here, next_slot, _count)


def _body(gmem: Any, smem: Any, kind: type[Cta], **static: Any) -> None:
    cta = kind(gmem, smem, **static)
    walk(cta, vectors.begin(cta, _count), _work, _padding)


def drafts(
    x: Tokens | ChannelTokens,
    rings: Rings,
    *,
    read_slots: Int[Array, " N"],
    drafts: Drafts,
    accepted: Int[Array, " N"] | None = None,
    num_tokens: Int[Array, " N"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    config: Config | None = None,
    kind: type[Cta] = Cta,
    settings: dict[str, Any] | None = None,
    interpret=None,
    **options: Any,
) -> tuple[Float[Array, "N T HV V"], Rings]:
    """T drafts of N requests: o, and the states and rings after them. All other slots keep their bits.

    Args:
      x, rings, read_slots, layer, config, kind, settings, interpret, options: as for `deferred`.
      drafts: what the T tokens are of. The first call drops what was not accepted, flushes a ring without room for
        the drafts of all calls, and sets the cursors to what they are after the last call.
      accepted: in the first call, how many of the last drafts stay.
      num_tokens: real tokens of each request from the first of the call on; the others are padding. None for all.
    """
    sizes = Sizes.of(x.heads, rings.state, layer, **options)
    config = config or Config.default(sizes.V)
    return launch_walk(
        "verify_ring",
        functools.partial(_body, drafts=drafts, kind=kind, **(settings or {})),
        x,
        dict(read_slots=read_slots, accepted=accepted, num_tokens=num_tokens),
        rings,
        sizes,
        config=config,
        heads=sizes.HV // sizes.Hk,
        layer=layer,
        memory=memory(sizes, config, x.q.shape[1], drafts, rings.state.dtype, kind),
        interpret=interpret,
    )
