"""Drafts of every running request on bfloat16 states that are written once in many tokens, by tensor cores.

What is computed is that of `ring_step` with drafts, for up to as many tokens as a ring holds, in one reading of the
state. With X the keys and queries [2 T, K] of the tokens of a head, K0 and U0 the keys [L, K] and values [L, V] in
its ring, and S0 its checkpoint,

    G = [K0; K] X^T,   W_jt = D_jt G_jt,   Y = D_t (S0^T X^T) + U0^T W

are products of tensor cores; D_jt is the decay from token j of the ring, or of the call, to token t, and D_t that
since the checkpoint. What is left is, on vectors along V,

    u_t = beta_t (v_t - Y_t - sum_{s < t} W_st u_s),   o_t = scale (Y'_t + sum_{s < t} W'_st u_s + (q_t . k_t) u_t)

with ' the columns of queries. Where the tokens are a tree, D_st is 0 for a token s that is no ancestor of t. Where
drafts find no room, the ring becomes part of the checkpoint first, by tensor cores too: S0 <- D S0 + K0^T (D_j U0).

Inputs (GMEM): q [N, T, Hq, K], k [N, T, Hk, K], v [N, T, HV, V] bfloat16, float16 or float32; a, b [N, T, HV] of any
floating dtype; A_log, dt_bias [HV]; read_slots, accepted [N] int32; optionally num_tokens [N] and parents [N, T]
int32.
In place (GMEM): state [slots, HV, K, V] bfloat16; ring_k [slots, Hk, L, K], ring_u [slots, HV, L, V] bfloat16; ring_g
[slots, HV, L] float32; cursors [slots, HV, 2] int32.
Outputs (GMEM): o [N, T, HV, V] in v's dtype.
Grid: one CTA to an SM, whose warpgroups each take the value heads of a key head, one key head after another, and of
them `block` entries of V after the others, by themselves. A state lies in shared memory as a whole; it is on its way
while the state before is finished.
Barriers: arrived [warpgroups * chunks]: the copy of a chunk arrives; its warpgroup waits.
Numerics: states, keys and values of the ring are factors as they are stored. What is float32 (keys and queries of the
call, weights W, decayed values D_j U0) is the sum of two bfloat16 numbers, which have 16 of its 24 bits. Sums are
float32. Differences of log decays are those of numbers of at least `LOG_FLOOR`, where a decay is 0.
Hardware: compute capability 9.0. Limits: K and V multiples of 64, K at most 256; L = 16; T at most 16.
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

from pallas_kernels.decode.ring import BEFORE, COUNT, LENGTH, Results, Slot, launch_in_place
from pallas_kernels.decode.ring_products import column_layout, spread
from pallas_kernels.decode.tiles import (
    WARP,
    WARPS,
    Rule,
    Tile,
    across_layout,
    lane_layout,
    load,
    log_decay,
    vector_layout,
    write_strength,
)
from pallas_kernels.device.launch import NUM_SMS, grid_index, warpgroup_index
from pallas_kernels.device.layouts import (
    COL,
    L2NORM_EPS,
    ROW,
    WGMMA,
    along_columns,
    along_rows,
    iota,
    round_up,
)
from pallas_kernels.device.memory import (
    ALIGNMENT,
    REDUCTION_BYTES,
    SMEM_LIMIT,
    Barriers,
    Buffer,
    Memory,
    smem_bytes,
    store_any,
    transposed,
)
from pallas_kernels.device.operations import Device

GRANULE = 64
"""Rows of a wgmma and of a chunk, columns of a swizzled tile: K and V are multiples of it."""

BLOCKS = (128, GRANULE)
"""Entries of V that a warpgroup may take at once."""

LOG_FLOOR = -104.0
"""exp of it is 0 in float32."""

PADDED = 2
"""Columns behind the sums of a row, so that few threads meet in a bank."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs, not what it computes."""

    block: int
    """Entries of V that a warpgroup takes at once."""
    warpgroups: int
    """Of a CTA."""
    states: int
    """In shared memory, for each warpgroup."""

    @classmethod
    def default(cls, K: int, V: int, T: int) -> "Config":
        """Two states for each of two warpgroups, which was fastest on an H200 with K = V = 128 and four tokens
        (docs/log/decode.md), or what there is room for."""
        block = next(n for n in BLOCKS if V % n == 0)
        choices = (cls(block, *n) for n in ((2, 2), (2, 1), (1, 2)))
        return next((x for x in choices if _bytes(x, K, T) <= SMEM_LIMIT - ALIGNMENT), cls(block, 1, 1))


class Sizes(NamedTuple):
    """Of the products of T tokens."""

    half: int
    """Columns of keys and queries, those of keys first."""

    @property
    def columns(self) -> int:
        """With those of the second terms of their sums behind them."""
        return 2 * self.half

    @property
    def operands(self) -> int:
        """Rows: keys of the ring, and the columns."""
        return max(GRANULE, LENGTH + self.columns)

    @classmethod
    def of(cls, T: int) -> "Sizes":
        """A tile of wgmma has eight columns."""
        return cls(round_up(2 * T, 8))


def memory(K: int, config: Config, T: int, is_tree: bool) -> Memory:
    """Shared memory of a CTA: everything once for each warpgroup."""
    W, sizes, stages = config.warpgroups, Sizes.of(T), config.states * (K // GRANULE)
    return {
        "state": Buffer((W, stages, GRANULE, config.block), jnp.bfloat16, swizzle=128),
        "operands": Buffer((W, sizes.operands, K), jnp.bfloat16, swizzle=128),
        "values": Buffer((W, 2 * LENGTH, config.block), jnp.bfloat16, swizzle=32),
        "weights": Buffer((W, GRANULE, sizes.columns), jnp.bfloat16, swizzle=32),
        "vectors": Buffer((W, sizes.half, K)),
        "between": Buffer((W, GRANULE, sizes.half)),
        "sums": Buffer((W, config.block, sizes.half + PADDED)),
        "logs": Buffer((W, GRANULE)),
        "decayed": Buffer((W, sizes.half)),
        "own": Buffer((W, round_up(T, WARPS))),
        "ancestors": Buffer((W, sizes.half), jnp.int32) if is_tree else None,
        "arrived": Barriers(1, W * stages),
    }


def _bytes(config: Config, K: int, T: int) -> int:
    return smem_bytes(memory(K, config, T, is_tree=True), REDUCTION_BYTES)


def check_supported(q, k, v, state, ring_k, ring_u, *, kv_layout: bool) -> str | None:
    """Why the kernel cannot take a call that `ring_step` takes; None if it can."""
    if not kv_layout:
        return "states are [V, K]; the kernel takes [K, V]"
    for name, x in (("states", state), ("keys of the ring", ring_k), ("values of the ring", ring_u)):
        if x.dtype != jnp.bfloat16:
            return f"the {name} are {x.dtype}; the kernel takes bfloat16"
    if q.shape[-1] % GRANULE or v.shape[-1] % GRANULE:
        return f"K = {q.shape[-1]}, V = {v.shape[-1]}; the kernel takes multiples of {GRANULE}"
    return None


def _two_terms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 numbers whose sum is x, but for its last bits."""
    first = x.astype(jnp.bfloat16)
    return first, (x - first.astype(jnp.float32)).astype(jnp.bfloat16)


class Held(NamedTuple):
    """What is known of a ring before the state is there."""

    total: jax.Array
    """Log decay since the checkpoint; 0 after a flush."""
    decay: jax.Array
    """exp of it before the flush."""
    count: jax.Array
    """Tokens after it."""


def _body(gmem: Any, smem: Any, *, rule: Rule, config: Config, T: int, ctas: int, device: Device) -> None:
    K, block, C = rule.K, config.block, rule.K // GRANULE
    sizes, wg = Sizes.of(T), warpgroup_index()
    half, N = sizes.half, sizes.columns
    tile = Tile(rule, block, gmem.state.dtype.itemsize)
    chunks, operands, values = smem.state.at[wg], smem.operands.at[wg], smem.values.at[wg]
    weights, vectors, between = smem.weights.at[wg], smem.vectors.at[wg], smem.between.at[wg]
    sums, logs, decayed, own = smem.sums.at[wg], smem.logs.at[wg], smem.decayed.at[wg], smem.own.at[wg]
    ancestors: Any = None if smem.ancestors is None else smem.ancestors.at[wg]
    along_v = column_layout(block).reduce(0)
    # Entries of a ring, 8 neighbours to a thread, so that those of a warp fill whole tiles of shared memory.
    key_layout, value_layout = lane_layout(8, 8), across_layout(GRANULE, 2)
    g_layout = lane_layout(8, LENGTH // 8)
    some_layout = lane_layout(WARP, 4 if K % 128 == 0 else 2)
    parts, share = rule.V // block, rule.HV // rule.Hk
    together = parts * share
    rows_in_call = gmem.read_slots.shape[0]
    first, stride = wg * ctas + grid_index(), config.warpgroups * ctas
    number = lax.div(rows_in_call * rule.HV * parts // together - first + stride - 1, stride) * together

    def unit(i):
        """Row, value head and entries of V of this warpgroup's i-th state."""
        return tile.where((first + lax.div(i, together) * stride) * together + lax.rem(i, together))

    def slot_of(i):
        """Of the i-th unit; padding after the last one."""
        row = jnp.minimum(unit(i)[0], rows_in_call - 1)
        return jnp.where(i < number, gmem.read_slots[row], -1)

    def count_of(i, slot):
        """Tokens that stay in the i-th unit's ring; 0 for padding."""

        def read():
            row, head, _ = unit(i)
            cursors = gmem.cursors.at[rule.place(slot, gmem.layer), head]
            return jnp.minimum(cursors[BEFORE] + gmem.accepted[row], cursors[COUNT])

        return lax.cond(rule.is_slot(slot), read, lambda: jnp.int32(0))

    def stage_of(n, c):
        """Of chunk c of the warpgroup's n-th state."""
        return lax.rem(n, config.states) * C + c

    def rows_of(c):
        return pl.ds(c * GRANULE, GRANULE)

    def copy(i, n, slot):
        """Starts the copies of the i-th unit's state, the n-th of this warpgroup."""

        @pl.when(rule.is_slot(slot))
        def _():
            _, head, entries = unit(i)
            state = tile.state(gmem.state, rule.place(slot, gmem.layer), head, entries)
            for c in range(C):
                stage = stage_of(n, c)
                plgpu.copy_gmem_to_smem(
                    state.at[rows_of(c)], chunks.at[stage], smem.arrived.at[wg * C * config.states + stage]
                )

    def groups():
        """The tokens, each a warp's where there are as many; where and in which layout. The others one by one."""
        whole = vector_layout(K)
        for t in range(0, T, WARPS):
            if t + WARPS <= T:
                yield pl.ds(t, WARPS), pl.ds(T + t, WARPS), some_layout
            else:
                yield from ((s, T + s, whole) for s in range(t, T))

    def take_tokens(row, head):
        """Normalised keys and queries in shared memory, float32."""
        q_head, k_head = lax.div(head, rule.HV // rule.Hq), lax.div(head, rule.HV // rule.Hk)
        found = [
            (load(gmem.q.at[row, at, q_head], layout), load(gmem.k.at[row, at, k_head], layout))
            for at, _, layout in groups()
        ]

        def finish():
            for (of_k, of_q, layout), raw in zip(groups(), found, strict=True):
                q, k = (x.astype(jnp.float32) for x in raw)
                if rule.use_qk_l2norm:
                    q, k = (_normalised(x, layout) for x in (q, k))
                store_any(vectors.at[of_k], k)
                store_any(vectors.at[of_q], q)
                if q.ndim == 1:
                    own[of_k] = jnp.sum(q * k)
                else:
                    store_any(own.at[of_k], jnp.sum(q * k, axis=1))

        return finish

    def take_ring(at: Slot, count, has_no_room):
        """A ring in shared memory: first its log decays, then keys, and values as they are or, before a flush,
        decayed."""
        keys, u, g = load(at.k, key_layout), load(at.u, value_layout), load(at.g, g_layout.reduce(0))

        def of_tokens(x, layout):
            """0 behind the tokens."""
            entry = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=layout.reduce(1))
            return jnp.where(spread(entry < count, x.shape, 0, layout), x, jnp.zeros_like(x))

        def log_decays() -> jax.Array:
            entry = plgpu.broadcasted_iota(jnp.int32, (LENGTH,), 0, layout=g_layout.reduce(0))
            gates = jnp.where(entry < count, g, 0.0)
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, (LENGTH, LENGTH), i, layout=g_layout) for i in range(2)
            )
            later = jnp.where(column > row, spread(gates, (LENGTH, LENGTH), 1, g_layout), 0.0)
            store_any(logs.at[pl.ds(0, LENGTH)], jnp.sum(later, axis=1))
            return jnp.sum(gates)

        def tokens(total: jax.Array) -> Held:
            store_any(operands.at[pl.ds(0, LENGTH)], of_tokens(keys, key_layout))
            since = load(logs.at[pl.ds(0, LENGTH)], value_layout.reduce(1))
            factor = jnp.where(has_no_room, jnp.exp(since), 1.0)
            decayed_u = of_tokens(u, value_layout).astype(jnp.float32)
            decayed_u = decayed_u * spread(factor, u.shape, 0, value_layout)
            for i, term in enumerate(_two_terms(decayed_u)):
                store_any(values.at[pl.ds(i * LENGTH, LENGTH)], term)
            left = jnp.where(has_no_room, 0, count)
            return Held(jnp.where(has_no_room, 0.0, total), jnp.exp(total), left)

        return log_decays, tokens

    def make_operands():
        """Keys and queries as sums of two terms, behind the keys of the ring."""
        layout = lane_layout(16, 4)
        for r in range(0, half, 8):
            x = load(vectors.at[pl.ds(r, 8)], layout)
            for i, term in enumerate(_two_terms(x)):
                store_any(operands.at[pl.ds(LENGTH + i * half + r, 8)], term)

    def follow(row, t):
        """The log decay until the token that token t of a tree follows. Notes the ancestors of t, as bits."""
        parent = gmem.parents[row, t]
        has_one, at = (parent >= 0) & (parent < t), jnp.clip(parent, 0, T - 1)
        bits = jnp.where(has_one, ancestors[at] | lax.shift_left(jnp.int32(1), at), 0) if t else jnp.int32(0)
        ancestors[t] = bits
        ancestors[T + t] = bits
        return jnp.where(has_one, decayed[at], 0.0) if t else jnp.float32(0)

    def halves(x):
        """Sums of the two terms of columns."""
        return x[:, :half] + x[:, half:]

    def weigh(held: Held):
        """Weights of the ring's values, and what the tokens say to each other, in shared memory."""
        product = device.product(operands.at[pl.ds(0, GRANULE)], transposed(operands.at[pl.ds(LENGTH, N)]))
        shape = (GRANULE, half)
        since = along_rows(load(logs, ROW), half) + along_columns(load(decayed, COL), GRANULE)
        row, column = iota(shape, 0), iota(shape, 1)
        # Rows of the ring have their number, rows of tokens LENGTH more.
        if gmem.parents is None:
            is_earlier = row - LENGTH < jnp.where(column < T, column, column - T)
        else:
            bits = along_columns(load(ancestors, COL), GRANULE)
            is_earlier = lax.shift_right_logical(bits, jnp.maximum(row - LENGTH, 0)) & 1 == 1
        counts = (row < held.count) | ((row >= LENGTH) & (row < LENGTH + T) & is_earlier)
        weight = jnp.where(counts, jnp.exp(since) * halves(product), 0.0)
        store_any(between, weight)
        store_any(weights, jnp.concatenate(_two_terms(weight), axis=1))

    def flush(at: Slot, n, held: Held):
        """Makes the ring part of the state, in shared memory and in its slot."""
        for c in range(C):
            keys = load(transposed(operands.at[pl.ds(0, LENGTH), rows_of(c)]), WGMMA)
            keys = jnp.concatenate([keys, keys], axis=1)
            for i in range(block // GRANULE):  # a part at once, as many as registers hold
                part = chunks.at[stage_of(n, c), :, rows_of(i)]
                added = device.product(keys, values.at[:, rows_of(i)])
                new = load(part, WGMMA).astype(jnp.float32) * held.decay + added
                store_any(part, new.astype(part.dtype))
        plgpu.commit_smem()
        for c in range(C):
            plgpu.copy_smem_to_gmem(chunks.at[stage_of(n, c)], at.state.at[rows_of(c)])

    def read_state(n):
        """X S0 as [GRANULE, N] arrays, entries of V below each other."""

        def body(*accs):
            for c in range(C):
                x = transposed(operands.at[pl.ds(LENGTH, N), rows_of(c)])
                for i, acc in enumerate(accs):
                    part = chunks.at[stage_of(n, c), :, rows_of(i)]
                    plgpu.wgmma(acc, transposed(part), x)
            return [device.collect(acc) for acc in accs]

        return pl.run_scoped(body, *[plgpu.ACC((GRANULE, N), jnp.float32)] * (block // GRANULE))

    def work(i, slot, count, n, next_slot):
        row, head, entries = unit(i)
        k_head = lax.div(head, rule.HV // rule.Hk)
        place = rule.place(slot, gmem.layer)
        at = Slot(gmem, tile, place, head, k_head, entries)
        has_no_room = count + T > LENGTH
        # All loads come before the first use of one.
        A_log, dt_bias = gmem.A_log[head], gmem.dt_bias[head]
        finish_tokens = take_tokens(row, head)
        log_decays, tokens_of_ring = take_ring(at, count, has_no_room)
        raw = [
            (
                load(gmem.v.at[row, t, head, entries], along_v),
                gmem.a[row, t, head],
                gmem.b[row, t, head],
            )
            for t in range(T)
        ]
        finish_tokens()
        total = log_decays()
        plgpu.commit_smem()
        held = tokens_of_ring(total)
        make_operands()
        log, gates, betas = jnp.float32(0), [], []
        for t, (_, a, b) in enumerate(raw):
            gates.append(log_decay(a, A_log, dt_bias))
            betas.append(write_strength(b, rule.allow_neg_eigval))
            if gmem.parents is not None:
                log = follow(row, t)
            log = log + jnp.maximum(gates[-1], LOG_FLOOR)
            decayed[t] = log
            decayed[T + t] = log
            logs[LENGTH + t] = -log
        plgpu.commit_smem()
        weigh(held)
        for c in range(C):
            plgpu.barrier_wait(smem.arrived.at[wg * C * config.states + stage_of(n, c)])
        pl.when(has_no_room)(lambda: flush(at, n, held))
        plgpu.commit_smem()
        of_state = read_state(n)
        decay = along_columns(jnp.exp(load(decayed, COL) + held.total), GRANULE)
        for j, product in enumerate(of_state):
            u = load(transposed(values.at[pl.ds(0, LENGTH), rows_of(j)]), WGMMA)
            of_ring = device.product(u, weights.at[pl.ds(0, LENGTH)])
            store_any(sums.at[rows_of(j), pl.ds(0, half)], decay * halves(product) + halves(of_ring))

        @pl.when(has_no_room)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        # All warps have read the state, and their sums are there.
        plgpu.commit_smem()
        copy(i + config.states, n + config.states, slot_of(i + config.states))
        next_count = count_of(i + 1, next_slot)
        finish(row, head, entries, at, held, gates, betas, [v for v, *_ in raw])
        return next_count

    def finish(row, head, entries, at: Slot, held: Held, gates, betas, vs):
        """Writes outputs, and what is appended to the ring."""
        present = T if gmem.num_tokens is None else jnp.clip(gmem.num_tokens[row], 0, T)
        # What units share is written by the last of them.
        is_last = jnp.asarray(entries.start + block == rule.V)
        writes_k = is_last & (lax.rem(head, share) == share - 1)
        us = []
        for t in range(T):
            found, read = load(sums.at[:, t], along_v), load(sums.at[:, T + t], along_v)
            for s, u in enumerate(us):
                found = found + between[LENGTH + s, t] * u
                read = read + between[LENGTH + s, T + t] * u
            u = betas[t] * (vs[t].astype(jnp.float32) - found)
            o = rule.scale * (read + own[t] * u)
            stored_u = u.astype(gmem.ring_u.dtype)
            us.append(stored_u.astype(jnp.float32))
            o = jnp.where(t < present, o, jnp.zeros_like(o))
            store_any(gmem.o.at[row, t, head, entries], o.astype(gmem.o.dtype))
            # Behind the tokens a ring may hold anything, and padding does.
            store_any(at.u.at[held.count + t], stored_u)

        @pl.when(is_last)
        def _():
            for t, g in enumerate(gates):
                at.g[held.count + t] = g
            place = gmem.cursors.at[rule.place(gmem.read_slots[row], gmem.layer), head]
            place[BEFORE] = held.count
            place[COUNT] = held.count + (T if gmem.num_tokens is None else gmem.num_tokens[row])

        @pl.when(writes_k)
        def _():
            for at_k, _, layout in groups():
                start = at_k if isinstance(at_k, int) else at_k.start
                to = held.count + start if isinstance(at_k, int) else pl.ds(held.count + start, WARPS)
                store_any(at.k.at[to], load(vectors.at[at_k], layout).astype(gmem.ring_k.dtype))

        # The next unit writes where this one reads.
        plgpu.commit_smem()

    def padding(i, n, next_slot):
        row, head, entries = unit(i)
        zeros = plgpu.layout_cast(jnp.zeros((block,), gmem.o.dtype), along_v)
        for t in range(T):
            store_any(gmem.o.at[row, t, head, entries], zeros)
        copy(i + config.states, n + config.states, slot_of(i + config.states))
        return count_of(i + 1, next_slot)

    def turn(i, here):
        slot, count = here
        next_slot = slot_of(i + 1)
        next_count = lax.cond(
            rule.is_slot(slot),
            lambda: work(i, slot, count, i, next_slot),
            lambda: padding(i, i, next_slot),
        )
        return next_slot, next_count

    for s in range(config.states):
        copy(jnp.int32(s), jnp.int32(s), slot_of(jnp.int32(s)))
    slot = slot_of(jnp.int32(0))
    lax.fori_loop(0, number, turn, (slot, count_of(jnp.int32(0), slot)))


def _normalised(x: jax.Array, layout: Any) -> jax.Array:
    """x / |x| of rows, or of one vector."""
    if x.ndim == 1:
        return x * lax.rsqrt(jnp.sum(x * x) + L2NORM_EPS)
    return x * spread(lax.rsqrt(jnp.sum(x * x, axis=1) + L2NORM_EPS), x.shape, 0, layout)


def ring_drafts(
    q: Float[Array, "N T Hq K"],
    k: Float[Array, "N T Hk K"],
    v: Float[Array, "N T HV V"],
    a: Float[Array, "N T HV"],
    b: Float[Array, "N T HV"],
    state: Float[Array, "slots *layers HV K V"],
    ring_k: Float[Array, "slots *layers Hk L K"],
    ring_u: Float[Array, "slots *layers HV L V"],
    ring_g: Float[Array, "slots *layers HV L"],
    cursors: Int[Array, "slots *layers HV 2"],
    *,
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    read_slots: Int[Array, " N"],
    accepted: Int[Array, " N"],
    num_tokens: Int[Array, " N"] | None = None,
    parents: Int[Array, "N T"] | None = None,
    scale: float,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    null_slot: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    config: Config | None = None,
    interpret=None,
) -> Results:
    """T drafts of N requests: o, and the states and rings after them. All other slots keep their bits.

    Args:
      q, k, v, a, b, state, ring_k, ring_u, ring_g: inputs that `ring_step.check_supported` and `check_supported`
        accept.
      A_log, dt_bias, scale, use_qk_l2norm, allow_neg_eigval, null_slot, layer, config, interpret: as for `step`.
      read_slots, cursors: as for `ring_step`.
      accepted: how many of the last call's tokens stay.
      num_tokens: real tokens of each request; the others are padding. None for all.
      parents: of tokens that are a tree, those that each one follows, which come before it; -1 for the last one in
        the ring. None: each follows the one before.
    """
    N, T, Hq, K = q.shape
    HV, V = v.shape[2:]
    assert T <= LENGTH
    slots, layers = state.shape[0], 1 if layer is None else state.shape[1]
    norm, span = (use_qk_l2norm, allow_neg_eigval), (slots, null_slot, layers)
    rule = Rule(Hq, k.shape[2], HV, K, V, scale, *norm, True, *span)
    config = config or Config.default(K, V, T)
    ctas = min(NUM_SMS, N * rule.Hk)
    device = Device(interpret is not None)
    return launch_in_place(
        "verify_ring",
        functools.partial(_body, rule=rule, config=config, T=T, ctas=ctas, device=device),
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
            "parents": parents,
        },
        pool=(state, ring_k, ring_u, ring_g, cursors),
        layer=layer,
        memory=memory(K, config, T, parents is not None),
        ctas=ctas,
        warpgroups=config.warpgroups,
        interpret=interpret,
    )
