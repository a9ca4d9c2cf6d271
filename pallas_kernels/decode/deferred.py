"""One token of every running request, on states that are written once in many tokens.

What is computed is in `vectors`: the token behind those of a request's ring. It is appended to the ring. A token that
fills the ring is not appended: the ring and it become part of the checkpoint,

    S0 <- D S0 + sum_j D_j k_j u_j^T

in a second passage of the state through shared memory, which begins with the chunks that are still there.

Inputs (GMEM): q [N, 1, Hq, K], k [N, 1, Hk, K], v [N, 1, HV, V] bfloat16, float16 or float32; a, b [N, 1, HV] of any
floating dtype; A_log, dt_bias [HV]; read_slots [N] int32.
In place (GMEM): state [slots, HV, K, V], or [slots, HV, V, K], float32 or bfloat16, or codes of 8 bits with scale
[slots, HV, rows] float32, see `codes`; ring_k [slots, Hk, L, K],
ring_u [slots, HV, L, V] bfloat16 or float32; ring_g [slots, HV, L] float32; cursors [slots, HV, 2] int32.
Outputs (GMEM): o [N, 1, HV, V] in v's dtype.
Grid: `walk`, a value head to a warpgroup. With a token's inputs it loads what the states after it need first, so that
it does not wait for that later: the slot after the next one, and the next one's cursors. The ring's values, which are
needed last, come by a copy of their own.
Shared memory: `memory`.

| barrier   | arrives                                    | waits                                     |
|-----------|--------------------------------------------|-------------------------------------------|
| arrived   | the copy of a chunk of a warpgroup's state | that warpgroup, before it reads the chunk |
| u_arrived | the copy of the values of a unit's ring    | that warpgroup, before it reads them      |

Numerics: as in `step`; keys and values meet later tokens as the ring stores them.
Hardware: `NEEDS`. Limits: those of `step`; V a multiple of 32; L = 16. Rows of codes are taken whole:
with [K, V] V is 32, 64, 96 or 128.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.decode import vectors
from pallas_kernels.decode.ring import BEFORE, COUNT, LENGTH, ChannelTokens, Rings, Tokens
from pallas_kernels.decode.ring_products import Held, add_tokens
from pallas_kernels.decode.tiles import Sizes
from pallas_kernels.decode.vectors import Config, Cta
from pallas_kernels.decode.walk import Here, Unit, launch_walk, walk
from pallas_kernels.device.memory import Barriers, Buffer, Memory, store_any
from pallas_kernels.device.needs import Needs

NEEDS = Needs.TMA | Needs.LARGE


def memory(sizes: Sizes, config: Config, state_dtype: Any, ring_dtype: Any, kind: type[Cta] = Cta) -> Memory:
    """Shared memory of a CTA: everything once for each warpgroup."""
    W, flushed = config.warpgroups, LENGTH + 1
    others = vectors.vector_memory(sizes, config, 1) | {
        **kind.gate_memory(sizes, W, 1),
        "keys": Buffer((W, flushed, sizes.K)),
        # Sums have been read when values are written: one buffer for both.
        "values": Buffer((W, max(flushed, vectors.rows_of_sums(sizes, config, 1)), config.block)),
        "ring_u": Buffer((W, LENGTH, config.block), ring_dtype),
    }
    return others | vectors.state_memory(sizes, config, others, state_dtype) | {"u_arrived": Barriers(1, W)}


def default_config(sizes: Sizes, state_dtype: Any, ring_dtype: Any, kind: type[Cta] = Cta) -> Config:
    """Two chunks of 16 KB where both find room."""
    config = Config.default(sizes.V)
    large = dataclasses.replace(config, stages=2, chunk_bytes=16384)
    state: Any = memory(sizes, large, state_dtype, ring_dtype, kind)["state"]
    return large if state.shape[1] == large.stages else config


def _count(cta: Cta, i: jax.Array, slot: jax.Array) -> jax.Array:
    """Tokens in the ring of the i-th unit, which is no padding."""
    return cta.cursors(i, slot)[1][COUNT]


def _next_count(cta: Cta, i: jax.Array, slot: jax.Array, next_slot: jax.Array) -> jax.Array:
    """Tokens in the ring of unit i + 1; for padding any number. It has no branch, behind which a warpgroup would
    wait."""
    is_slot = cta.is_slot(next_slot)
    return _count(cta, jnp.where(is_slot, i + 1, i), jnp.where(is_slot, next_slot, slot))


def _fold(
    cta: Cta, i: jax.Array, here: Here, at: Unit, held: Held, token: Any, u: jax.Array, next_slot: jax.Array
) -> None:
    """Writes the state with the ring and a token in it, which passes once more."""
    (keys, values), shape, stages = cta.spilled(), cta.shape, cta.stages
    plgpu.commit_smem()  # all warps have read the sums, which lie where the values will
    cta.spill(held, token.g)
    store_any(keys.at[LENGTH], token.k)
    store_any(values.at[LENGTH], u)
    plgpu.commit_smem()
    decay, missing = cta.decay_of_state(held, token.g), shape.chunks - stages
    copies = here.copies

    def one(p, _):
        # The last chunks are still there; the first ones come again.
        c, n = lax.rem(missing + p, shape.chunks), copies + missing + p

        @pl.when(p >= stages)
        def _():
            cta.wait_for_copy(n)

        row = c * shape.rows
        target, chunk = at.state.some(row, shape.rows), cta.chunk(lax.rem(n, stages))
        tokens = decay, keys, values, cta.sizes.kv_layout, cta.dev
        add_tokens(cta.numbers, chunk, (target,), row, *tokens, tall=True)
        # All warps have read the chunk, and after the last one the tokens.
        plgpu.commit_smem()
        comes_again = p < missing
        cta.copy_chunk(i, p, n + stages, jnp.where(comes_again, here.slot, -1))
        cta.copy_chunk(i + 1, p - missing, n + stages, jnp.where(comes_again, -1, next_slot))

    lax.fori_loop(0, shape.chunks, one, None)


def _work(cta: Cta, i: jax.Array, here: Here, next_slot: jax.Array) -> Here:
    """The token of the i-th unit."""
    slot_after_next = cta.slot_of(i + 2)
    at = Unit(cta, i, here.slot)
    is_full = here.count + 1 >= LENGTH
    # All loads come before the first use of one.
    raw = cta.load_tokens(at)
    next_count = _next_count(cta, i, here.slot, next_slot)
    ring_u, u_arrived = cta.smem.ring_u.at[cta.wg], cta.smem.u_arrived.at[cta.wg]
    plgpu.copy_gmem_to_smem(at.ring_u, ring_u, u_arrived)
    held = cta.load_ring(at, here.count, with_u=False)
    tokens = cta.prepare_tokens(raw, held)
    carry = vectors.take_state(cta, i, here, next_slot, stays=is_full)
    ends = at.ends()
    plgpu.barrier_wait(u_arrived)
    held = cta.ring.with_values(held, ring_u)
    ((o, u, stored_u),) = cta.answers(held, tokens, carry)
    store_any(cta.gmem.o.at[at.row, 0, at.head, at.entries], o.astype(cta.gmem.o.dtype))
    cta.append(at, ends, here.count, tokens[0], stored_u, here.count + 1 < LENGTH)
    pl.when(is_full)(lambda: _fold(cta, i, here, at, held, tokens[0], u, next_slot))

    @pl.when(ends.head)
    def _():
        at.cursors[COUNT] = jnp.where(is_full, 0, here.count + 1)
        at.cursors[BEFORE] = jnp.where(is_full, -1, here.count)

    # A state that is flushed passes twice, but for the chunks that are still there after the first time.
    chunks = cta.shape.chunks
    copies = here.copies + chunks + jnp.where(is_full, chunks - cta.stages, 0)
    return Here(next_slot, next_count, slot_after_next, copies)


def _padding(cta: Cta, i: jax.Array, here: Here, next_slot: jax.Array) -> Here:
    return vectors.pass_by(cta, i, here, next_slot, _count)._replace(next_slot=cta.slot_of(i + 2))


def _body(gmem: Any, smem: Any, kind: type[Cta], **static: Any) -> None:
    cta = kind(gmem, smem, sums=smem.values, tall=True, **static)
    start = vectors.begin(cta, _count)
    walk(cta, start._replace(next_slot=cta.slot_of(jnp.int32(1))), _work, _padding)


def deferred(
    x: Tokens | ChannelTokens,
    rings: Rings,
    *,
    read_slots: Int[Array, " N"],
    layer: int | Int[Array, ""] | None = None,
    config: Config | None = None,
    kind: type[Cta] = Cta,
    settings: dict[str, Any] | None = None,
    interpret=None,
    **options: Any,
) -> tuple[Float[Array, "N 1 HV V"], Rings]:
    """A token of N requests: o, and the states and rings after it. All other slots keep their bits.

    The cursors after it are (count + 1, count), or (0, -1) where it filled the ring.

    Args:
      x, rings: tokens, T = 1, and rings that `vectors.check_supported` accepts.
      read_slots: where each request's state and ring are, no slot twice; padding as for `step_of_channels`.
      layer, config, interpret: as for `step_of_channels`.
      kind, settings: the `Cta` that knows the gates, and what it is made with.
      options: as for `Sizes.of`.
    """
    sizes = Sizes.of(x.heads, rings.state, layer, **options)
    state_dtype, ring_dtype = rings.state.dtype, rings.ring_u.dtype
    config = config or default_config(sizes, state_dtype, ring_dtype, kind)
    return launch_walk(
        "decode_deferred",
        functools.partial(_body, kind=kind, **(settings or {})),
        x,
        dict(read_slots=read_slots),
        rings,
        sizes,
        config=config,
        heads=1,
        layer=layer,
        memory=memory(sizes, config, state_dtype, ring_dtype, kind),
        interpret=interpret,
    )
