"""A few tokens of every running request, on states that are written once in many tokens.

A slot holds a checkpoint S0 and a ring of the tokens since: normalised keys k_j, written values u_j, log decays g_j.
With D_j the decay since token j and D that since the checkpoint, both with the new token's gate,

    u = beta (v - (D k^T S0 + sum_j D_j (k . k_j) u_j))
    o = scale (D q^T S0 + sum_j D_j (q . k_j) u_j + (q . k) u)

and (k, u, g) is appended to the ring. All tokens of a call share one reading of S0: their products with it are taken
first, and what they say to each other is worked out on vectors afterwards.

A decoded token that fills the ring is not appended: the ring and it become part of the checkpoint, in a second
passage of the state through shared memory, which begins with the chunks that are still there. Drafts find

    held = min(before + accepted, count)

tokens, without those of the last call that were not accepted. Where they have no room behind these, the ring becomes
part of the checkpoint first, chunk by chunk as the state passes: S0 <- D S0 + sum_j D_j k_j u_j^T.

Inputs (GMEM): q [N, T, Hq, K], k [N, T, Hk, K], v [N, T, HV, V] bfloat16, float16 or float32; a, b [N, T, HV] of any
floating dtype; A_log, dt_bias [HV]; read_slots [N] int32; optionally accepted [N], num_tokens [N] int32.
In place (GMEM): state [slots, HV, K, V], or [slots, HV, V, K], float32 or bfloat16; ring_k [slots, Hk, L, K],
ring_u [slots, HV, L, V] bfloat16 or float32; ring_g [slots, HV, L] float32; cursors [slots, HV, 2] int32.
Outputs (GMEM): o [N, T, HV, V] in v's dtype.
Grid: one CTA to an SM, whose warpgroups each take value head after value head, and of it `block` entries of V after
the others, by themselves: what belongs to a value head alone is read and written by one warpgroup. Of drafts it takes
all value heads of a key head, and writes their keys with the last, as a flush needs those that they replace. A state
passes through shared memory in chunks; the copies of the next chunks, also of the next state, are on their way while
one is worked on and while a state's tokens are finished. With a decoded token's inputs it loads what the states after
it need first, so that it does not wait for that later: the slot after the next one, and the next one's cursors. The
ring's values, which are needed last, come by a copy of their own.
Barriers: arrived [warpgroups * stages]: the copy of a chunk arrives; its warpgroup waits. Of a decoded token also
u_arrived [warpgroups]: the values of its ring arrive.
Numerics: as in `step`; keys and values meet later tokens as the ring stores them.
Hardware: compute capability 9.0. Limits: those of `step`; V a multiple of 32 up to 256 for each tile; L = 16; T at
most 4.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.decode import step
from pallas_kernels.decode.ring import BEFORE, COUNT, LENGTH, Results, Slot, launch_in_place
from pallas_kernels.decode.ring_products import (
    Held,
    Products,
    Ring,
    Shape,
    add_tokens,
    column_layout,
    row_slices,
)
from pallas_kernels.decode.tiles import (
    GRANULE,
    Rule,
    Tile,
    load,
    log_decay,
    vector_layout,
    write_strength,
)
from pallas_kernels.device.launch import NUM_SMS, grid_index, warpgroup_index
from pallas_kernels.device.memory import (
    ALIGNMENT,
    REDUCTION_BYTES,
    SMEM_LIMIT,
    Barriers,
    Buffer,
    Memory,
    smem_bytes,
    store_any,
)
from pallas_kernels.device.operations import Device

MAX_TOKENS = 4
"""T: products of two vectors of each token with a state are summed in registers."""


FLUSHED_ROWS = 8
"""Of a chunk, at least, that take a ring at once before drafts. With more, registers spill (ptxas of 2026-11-23)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs, not what it computes."""

    block: int
    """Entries of V that a warpgroup takes at once."""
    warpgroups: int = 4
    """Of a CTA."""
    stages: int = 5
    """Chunks of a state in shared memory, for each warpgroup; at most all of one state."""
    chunk_bytes: int = 8192
    """At most, of a chunk."""


class Drafts(NamedTuple):
    """Which of a request's drafts a call has: with several calls, each but the last has `MAX_TOKENS`."""

    tokens: int
    """Of all calls."""
    offset: int = 0
    """Those of the calls before."""


def memory(
    rule: Rule, config: Config, T: int, drafts: Drafts | None, state_dtype: Any, ring_dtype: Any
) -> Memory:
    """Shared memory of a CTA: everything once for each warpgroup, and as many stages as there is room for.

    Args:
      drafts: as for `ring_step`: None for a decoded token.
    """
    shape, W = (
        Shape.of(rule, config.block, config.chunk_bytes, jnp.dtype(state_dtype).itemsize),
        config.warpgroups,
    )
    deferred, sums = drafts is None, 2 * row_slices(config.block).rows if rule.kv_layout else 2 * T
    # What may become part of a state at once: a ring and the token that fills it; the ring, before the first drafts.
    flushed = LENGTH + 1 if drafts is None else 0 if drafts.offset else LENGTH
    others = {
        "vectors": Buffer((W, 2 * T, rule.K)),
        "weights": Buffer((W, 2 * T, LENGTH)),
        "sums": None if deferred else Buffer((W, sums, config.block)),
        "keys": Buffer((W, flushed, rule.K)) if flushed else None,
        "values": Buffer((W, flushed, config.block)) if flushed else None,
    }
    if deferred:
        # Sums have been read when values are written: one buffer for both.
        others["values"] = Buffer((W, max(flushed, sums), config.block))
        others["ring_u"] = Buffer((W, LENGTH, config.block), ring_dtype)
    stage = Buffer((W, shape.rows, shape.columns), state_dtype)
    room = (SMEM_LIMIT - ALIGNMENT - smem_bytes(others, REDUCTION_BYTES)) // stage.bytes
    stages = min(config.stages, shape.chunks, room)
    state = Buffer((W, stages, *stage.shape[1:]), state_dtype)
    barriers = {"u_arrived": Barriers(1, W)} if deferred else {}
    return others | {"state": state, "arrived": Barriers(1, W * stages)} | barriers


def default_config(rule: Rule, T: int, drafts: Drafts | None, state_dtype: Any, ring_dtype: Any) -> Config:
    """Whole heads where V allows it; for a decoded token two chunks of 16 KB where both find room."""
    config = Config(next(n for n in (128, 96, 64, GRANULE) if rule.V % n == 0))
    large = dataclasses.replace(config, stages=2, chunk_bytes=16384)
    state: Any = memory(rule, large, T, drafts, state_dtype, ring_dtype)["state"]
    return large if drafts is None and state.shape[1] == large.stages else config


RING_DTYPES = ("float32", "bfloat16")
"""Of keys and values in a ring."""


def check_supported(q, k, v, state, ring_k, ring_u, ring_g) -> str | None:
    """Why the kernel cannot take a call, from its arrays or their shapes; None if it can."""
    length = ring_u.shape[-2]
    if length != LENGTH:
        return f"the ring holds {length} tokens; the kernel is written for {LENGTH}"
    if ring_k.dtype != ring_u.dtype or jnp.dtype(ring_u.dtype).name not in RING_DTYPES:
        return f"the ring is {ring_k.dtype} and {ring_u.dtype}; the kernel takes {' and '.join(RING_DTYPES)}"
    if ring_g.dtype != jnp.float32:
        return f"the ring's log decays are {ring_g.dtype}; the kernel takes float32"
    if q.ndim == 4 and q.shape[1] > LENGTH:
        return f"{q.shape[1]} tokens; the ring holds {LENGTH}"
    return step.check_supported(q, k, v, state)


class Token(NamedTuple):
    """What is known of a token before the state is."""

    q: jax.Array
    """Normalised, whole in every warp, as k."""
    k: jax.Array
    stored_k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class Place(NamedTuple):
    """Where a warpgroup is."""

    slot: jax.Array
    """Of its next state."""
    count: jax.Array
    """Tokens in that one's ring."""
    n: jax.Array
    """Copies of chunks before the first one of that state."""
    next_slot: jax.Array | None
    """Of the state after it; None for drafts, which ask for it later."""


def _body(
    gmem: Any,
    smem: Any,
    *,
    rule: Rule,
    config: Config,
    T: int,
    drafts: Drafts | None,
    ctas: int,
    device: Device,
) -> None:
    deferred, begins = drafts is None, drafts is not None and drafts.offset == 0
    shape = Shape.of(rule, config.block, config.chunk_bytes, gmem.state.dtype.itemsize)
    tile = Tile(rule, config.block, gmem.state.dtype.itemsize)
    ring = Ring(rule.K, config.block, gmem.ring_k.dtype.itemsize)
    wg, C, stages = warpgroup_index(), shape.chunks, smem.state.shape[1]
    chunks, vectors, weights = smem.state.at[wg], smem.vectors.at[wg], smem.weights.at[wg]
    whole, v_layout = vector_layout(rule.K), column_layout(config.block)
    sums = smem.values.at[wg] if deferred else smem.sums.at[wg]
    products = Products(rule, shape, sums, vectors, 2 * T, v_layout, device, tall=deferred)
    N, parts = gmem.read_slots.shape[0], rule.V // config.block
    share, some_rows = rule.HV // rule.Hk, max(FLUSHED_ROWS, row_slices(shape.columns).rows)
    # Tiles of one head, or of all that share a key.
    together = parts if deferred else parts * share
    first, stride = wg * ctas + grid_index(), config.warpgroups * ctas
    number = lax.div(N * rule.HV * parts // together - first + stride - 1, stride) * together

    def unit(i: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """Row, value head and entries of V of this warpgroup's i-th state."""
        return tile.where((first + lax.div(i, together) * stride) * together + lax.rem(i, together))

    def slot_of(i: jax.Array) -> jax.Array:
        """Of the i-th unit; padding after the last one."""
        row = jnp.minimum(unit(i)[0], N - 1)
        return jnp.where(i < number, gmem.read_slots[row], -1)

    def read_count(i: jax.Array, slot: jax.Array) -> jax.Array:
        """Tokens that the i-th unit, which is no padding, finds in its ring."""
        row, head, _ = unit(i)
        cursors = gmem.cursors.at[rule.place(slot, gmem.layer), head]
        if drafts is None:
            return cursors[COUNT]
        if begins:
            return jnp.minimum(cursors[BEFORE] + gmem.accepted[row], cursors[COUNT])
        return cursors[BEFORE] + drafts.offset

    def count_of(i: jax.Array, slot: jax.Array) -> jax.Array:
        """Tokens that the i-th unit finds in its ring; 0 for padding."""
        return lax.cond(rule.is_slot(slot), lambda: read_count(i, slot), lambda: jnp.int32(0))

    def early_count(i: jax.Array, slot: jax.Array, next_slot: jax.Array) -> jax.Array:
        """That of the unit after the i-th, without a branch, behind which one waits: for padding any number."""
        is_slot = rule.is_slot(next_slot)
        return read_count(jnp.where(is_slot, i + 1, i), jnp.where(is_slot, next_slot, slot))

    def slot_after(i: jax.Array) -> jax.Array | None:
        """Of the unit after the next one, as far as it is asked for now."""
        return slot_of(i + 2) if deferred else None

    def copy(i: jax.Array, c: jax.Array, n: jax.Array, slot: jax.Array) -> None:
        """Starts the copy of chunk c of the i-th unit's state, the n-th copy of this warpgroup."""

        @pl.when(rule.is_slot(slot))
        def _():
            (_, head, entries), stage = unit(i), lax.rem(n, stages)
            state = tile.state(gmem.state, rule.place(slot, gmem.layer), head, entries)
            rows = state.at[pl.ds(c * shape.rows, shape.rows)]
            plgpu.copy_gmem_to_smem(rows, chunks.at[stage], smem.arrived.at[wg * stages + stage])

    def in_smem() -> tuple[Any, Any]:
        """Keys and values of a ring that becomes part of its state."""
        return smem.keys.at[wg], smem.values.at[wg]

    def is_last(entries: Any) -> jax.Array:
        """Of a value head."""
        return jnp.asarray(entries.start + config.block == rule.V)

    def wait(n: jax.Array) -> Any:
        """The chunk of the n-th copy, which has arrived."""
        stage = lax.rem(n, stages)
        plgpu.barrier_wait(smem.arrived.at[wg * stages + stage])
        return chunks.at[stage]

    def work(i: jax.Array, here: Place, next_slot: jax.Array) -> Place:
        slot, count, n, _ = here
        second = slot_after(i)
        row, head, entries = unit(i)
        q_head, k_head = lax.div(head, rule.HV // rule.Hq), lax.div(head, rule.HV // rule.Hk)
        place = rule.place(slot, gmem.layer)
        at = Slot(gmem, tile, place, head, k_head, entries)
        is_full = count + 1 >= LENGTH if deferred else jnp.bool_(False)
        has_no_room = count + drafts.tokens > LENGTH if drafts and begins else jnp.bool_(False)
        # All loads come before the first use of one.
        A_log, dt_bias = gmem.A_log[head], gmem.dt_bias[head]
        raw = [
            (
                load(gmem.q.at[row, t, q_head], whole),
                load(gmem.k.at[row, t, k_head], whole),
                load(gmem.v.at[row, t, head, entries], v_layout.reduce(0)),
                gmem.a[row, t, head],
                gmem.b[row, t, head],
            )
            for t in range(T)
        ]
        next_count = early_count(i, slot, next_slot) if deferred else jnp.int32(0)
        if deferred:
            plgpu.copy_gmem_to_smem(at.u, smem.ring_u.at[wg], smem.u_arrived.at[wg])
        held = ring.load(at, count, with_u=not deferred)
        decay = jnp.exp(held.total)
        if begins:
            spill = functools.partial(ring.spill, held, jnp.float32(0), *in_smem())
            pl.when(has_no_room)(spill)
            held = held.emptied(has_no_room)
        tokens = []
        for t, (q, k, v, a, b) in enumerate(raw):
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            rq, rk, _ = tile.norms(q, k)
            g = log_decay(a, A_log, dt_bias)
            beta = write_strength(b, rule.allow_neg_eigval)
            stored_k = (k * rk).astype(gmem.ring_k.dtype)
            tokens.append(Token(q * rq, k * rk, stored_k, v, g, beta))
            # The state's products are with q and k as they lie here; every warp writes the same.
            store_any(vectors.at[2 * t], k * rk)
            store_any(vectors.at[2 * t + 1], q * rq)
        plgpu.commit_smem()
        decayed = jnp.float32(0)
        for t, token in enumerate(tokens):
            decayed = decayed + token.g
            for j in (2 * t, 2 * t + 1):
                x = load(vectors.at[j], ring.k_layout.reduce(0))
                store_any(weights.at[j], ring.weights(held, x, decayed))

        def chunk(c, carry):
            s, row = wait(n + c), c * shape.rows
            if begins:

                @pl.when(has_no_room)
                def _():
                    # A few rows at once, as the sums of products are in registers, too.
                    for r in range(0, shape.rows, some_rows):
                        some = s.at[pl.ds(r, some_rows)]
                        new = add_tokens(some, row + r, decay, *in_smem(), rule.kv_layout, device)
                        store_any(at.state.at[pl.ds(row + r, some_rows)], new)
                        store_any(some, new)
                    plgpu.commit_smem()

            carry = products.add(s, row, carry)
            # All warps have read the chunk.
            plgpu.commit_smem()
            later = c + stages
            copy(i, later, n + later, jnp.where(later < C, slot, -1))
            copy(i + 1, later - C, n + later, jnp.where((later < C) | is_full, -1, next_slot))
            return carry

        carry = lax.fori_loop(0, C, chunk, products.start())
        if not deferred:  # it is on its way while this unit is finished
            next_count = count_of(i + 1, next_slot)
        held, last, u = finish(row, head, entries, at, held, tokens, carry)
        if deferred:
            pl.when(is_full)(lambda: fold(i, here, at, held, last, u, next_slot))
        if deferred or begins:

            @pl.when(is_last(entries))
            def _():
                if drafts is None:
                    after = jnp.where(is_full, 0, count + 1), jnp.where(is_full, -1, count)
                else:
                    added = drafts.tokens if gmem.num_tokens is None else gmem.num_tokens[row]
                    after = held.count + added, held.count
                gmem.cursors[place, head, COUNT], gmem.cursors[place, head, BEFORE] = after

        # A state that is flushed passes twice, but for the chunks that are still there after the first time.
        return Place(next_slot, next_count, n + C + jnp.where(is_full, C - stages, 0), second)

    def finish(
        row, head, entries, at: Slot, held: Held, tokens: list[Token], carry
    ) -> tuple[Held, Token, jax.Array]:
        """Writes outputs, and what is appended to the ring. Returns it, the last token and what that one wrote."""
        present = T if gmem.num_tokens is None else jnp.clip(gmem.num_tokens[row], 0, T)
        # What units share is written by the last of them.
        writes_g = is_last(entries)
        writes_k = writes_g & (lax.rem(head, share) == share - 1)
        total, since, us, exact = held.total, [], [], []
        if deferred:
            plgpu.barrier_wait(smem.u_arrived.at[wg])
            held = ring.with_values(held, smem.ring_u.at[wg])
        for t, token in enumerate(tokens):
            total, since = total + token.g, [x + token.g for x in since]
            decay = jnp.exp(total)
            y, z = products.of_token(t, carry)
            found = decay * y + ring.recall(held, weights.at[2 * t])
            read = decay * z + ring.recall(held, weights.at[2 * t + 1])
            for s, earlier in enumerate(tokens[:t]):
                k = earlier.stored_k.astype(jnp.float32)
                D = jnp.exp(since[s])
                found = found + (D * jnp.sum(token.k * k)) * us[s]
                read = read + (D * jnp.sum(token.q * k)) * us[s]
            u = token.beta * (token.v - found)
            o = rule.scale * (read + jnp.sum(token.q * token.k) * u)
            stored_u = u.astype(gmem.ring_u.dtype)
            exact.append(u)
            us.append(stored_u.astype(jnp.float32))
            since.append(jnp.float32(0))
            is_real, position = t < present, held.count + t
            o = jnp.where(is_real, o, jnp.zeros_like(o))
            store_any(gmem.o.at[row, t, head, entries], o.astype(gmem.o.dtype))
            room = position + deferred < LENGTH

            @pl.when(is_real & room)
            def _(token=token, position=position, stored_u=stored_u):
                store_any(at.u.at[position], stored_u)

                @pl.when(writes_g)
                def _():
                    at.g[position] = token.g

                @pl.when(writes_k)
                def _():
                    store_any(at.k.at[position], token.stored_k)

        return held, tokens[-1], exact[-1]

    def fold(i, here: Place, at: Slot, held: Held, token: Token, u: jax.Array, next_slot: jax.Array) -> None:
        """Writes the state with the ring and a token in it, which passes once more."""
        keys, values = in_smem()
        plgpu.commit_smem()  # all warps have read the sums, which lie where the values will
        ring.spill(held, token.g, keys, values)
        store_any(keys.at[LENGTH], token.k)
        store_any(values.at[LENGTH], u)
        plgpu.commit_smem()
        decay, missing = jnp.exp(held.total + token.g), C - stages

        def chunk(p, _):
            # The last chunks are still there; the first ones come again.
            c, n = lax.rem(missing + p, C), here.n + missing + p

            @pl.when(p >= stages)
            def _():
                wait(n)

            row = c * shape.rows
            target = at.state.at[pl.ds(row, shape.rows)]
            chunk = chunks.at[lax.rem(n, stages)]
            store_any(target, add_tokens(chunk, row, decay, keys, values, rule.kv_layout, device, tall=True))
            # All warps have read the chunk, and after the last one the tokens.
            plgpu.commit_smem()
            comes_again = p < missing
            copy(i, p, n + stages, jnp.where(comes_again, here.slot, -1))
            copy(i + 1, p - missing, n + stages, jnp.where(comes_again, -1, next_slot))

        lax.fori_loop(0, C, chunk, None)

    def padding(i: jax.Array, here: Place, next_slot: jax.Array) -> Place:
        row, head, entries = unit(i)
        zeros = plgpu.layout_cast(jnp.zeros((config.block,), gmem.o.dtype), v_layout.reduce(0))
        for t in range(T):
            store_any(gmem.o.at[row, t, head, entries], zeros)
        for c in range(stages):
            copy(i + 1, jnp.int32(c), here.n + c, next_slot)
        return Place(next_slot, count_of(i + 1, next_slot), here.n, slot_after(i))

    def turn(i, here):
        next_slot = here.next_slot if deferred else slot_of(i + 1)
        return lax.cond(
            rule.is_slot(here.slot),
            lambda: work(i, here, next_slot),
            lambda: padding(i, here, next_slot),
        )

    slot = slot_of(jnp.int32(0))
    for c in range(stages):
        copy(jnp.int32(0), jnp.int32(c), jnp.int32(c), slot)
    count = count_of(jnp.int32(0), slot)
    lax.fori_loop(0, number, turn, Place(slot, count, jnp.int32(0), slot_after(jnp.int32(-1))))


def ring_step(
    q: Float[Array, "N T Hq K"],
    k: Float[Array, "N T Hk K"],
    v: Float[Array, "N T HV V"],
    a: Float[Array, "N T HV"],
    b: Float[Array, "N T HV"],
    state: Float[Array, "slots *layers HV rows columns"],
    ring_k: Float[Array, "slots *layers Hk L K"],
    ring_u: Float[Array, "slots *layers HV L V"],
    ring_g: Float[Array, "slots *layers HV L"],
    cursors: Int[Array, "slots *layers HV 2"],
    *,
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    read_slots: Int[Array, " N"],
    drafts: Drafts | None,
    accepted: Int[Array, " N"] | None = None,
    num_tokens: Int[Array, " N"] | None = None,
    scale: float,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    kv_layout: bool = True,
    null_slot: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    config: Config | None = None,
    interpret=None,
) -> Results:
    """T tokens of N requests: o, and the states and rings after them. All other slots keep their bits.

    Args:
      q, k, v, a, b, state: inputs that `check_supported` accepts.
      ring_k, ring_u, ring_g: keys, values and log decays since the states, oldest first.
      A_log, dt_bias, scale, use_qk_l2norm, allow_neg_eigval, kv_layout, null_slot, layer, config, interpret: as for
        `step`.
      read_slots: where each request's state and ring are, no slot twice; padding as for `step`.
      cursors: count and before of every ring, each value head's its slot's.
      drafts: None for one token, which is decoded: the cursors after it are (count + 1, count), or (0, -1) where it
        filled the ring. Else what the T tokens are of. The first call drops what was not accepted, flushes a ring
        without room for the drafts of all calls, and sets the cursors to what they are after the last call.
      accepted: with the first drafts, how many of the last call's tokens stay.
      num_tokens: real tokens of each request from the first of the call on; the others are padding. None for all.
    """
    N, T, Hq, K = q.shape
    HV, V = v.shape[2:]
    assert T == 1 or drafts is not None
    slots, layers = state.shape[0], 1 if layer is None else state.shape[1]
    norm, span = (use_qk_l2norm, allow_neg_eigval), (slots, null_slot, layers)
    rule = Rule(Hq, k.shape[2], HV, K, V, scale, *norm, kv_layout, *span)
    ctas = min(NUM_SMS, N * (HV if drafts is None else rule.Hk))
    sizes = T, drafts, state.dtype, ring_u.dtype
    config, device = config or default_config(rule, *sizes), Device(interpret is not None)
    return launch_in_place(
        "decode_deferred" if drafts is None else "verify_ring",
        functools.partial(_body, rule=rule, config=config, T=T, drafts=drafts, ctas=ctas, device=device),
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "a": a,
            "b": b,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "read_slots": read_slots,
            "accepted": accepted,
            "num_tokens": num_tokens,
        },
        pool=(state, ring_k, ring_u, ring_g, cursors),
        layer=layer,
        memory=memory(rule, config, *sizes),
        ctas=ctas,
        warpgroups=config.warpgroups,
        interpret=interpret,
    )
