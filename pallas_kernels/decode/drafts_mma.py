"""Drafts of every running request on bfloat16 states that are written once in many tokens, by tensor cores.

It computes what `drafts` computes, for up to as many tokens as a ring holds, in one reading of the state. With X the
keys and queries [2 T, K] of the tokens of a head, K0 and U0 the keys [L, K] and values [L, V] in its ring, and S0 its
checkpoint,

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
Grid: `walk`, the value heads of a key head to a warpgroup. A state lies in shared memory as a whole; it is on its way
while the state before is finished.
Shared memory: `drafts_mma_cta.memory`.

| barrier | arrives                                    | waits                                     |
|---------|--------------------------------------------|-------------------------------------------|
| arrived | the copy of a chunk of a warpgroup's state | that warpgroup, before it reads the state |

Numerics: states, keys and values of the ring are factors as they are stored. What is float32 (keys and queries of the
call, weights W, decayed values D_j U0) is the sum of two bfloat16 numbers: see `drafts_mma_operands`. Sums are
float32.
Hardware: compute capability 9.0. Limits: K and V multiples of 64, K at most 256; L = 16; T at most 16.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.decode import drafts_mma_operands as operands
from pallas_kernels.decode.drafts_mma_cta import GRANULE, Config, Cta, memory, rows_of
from pallas_kernels.decode.drafts_mma_operands import Held, halves
from pallas_kernels.decode.ring import BEFORE, COUNT, LENGTH, Rings, Tokens
from pallas_kernels.decode.tiles import WARPS, Sizes, load
from pallas_kernels.decode.walk import Here, Unit, accepted_count, launch_walk, walk
from pallas_kernels.device.layouts import COL, WGMMA, along_columns
from pallas_kernels.device.memory import store_any, transposed
from pallas_kernels.device.needs import Needs

NEEDS = Needs.TMA | Needs.WGMMA


def check_supported(q, v, rings: Rings, *, kv_layout: bool) -> str | None:
    """Why the kernel cannot take a call that `drafts` takes; None if it can."""
    if not kv_layout:
        return "states are [V, K]; the kernel takes [K, V]"
    for name, x in zip(("states", "keys of the ring", "values of the ring"), rings[:3], strict=True):
        if x.dtype != jnp.bfloat16:
            return f"the {name} are {x.dtype}; the kernel takes bfloat16"
    if q.shape[-1] % GRANULE or v.shape[-1] % GRANULE:
        return f"K = {q.shape[-1]}, V = {v.shape[-1]}; the kernel takes multiples of {GRANULE}"
    return None


def _flush(cta: Cta, i: jax.Array, at: Unit, held: Held) -> None:
    """Makes the ring part of the state, in shared memory and in its slot."""
    for c in range(cta.num_chunks):
        keys = load(transposed(cta.operands.at[pl.ds(0, LENGTH), rows_of(c)]), WGMMA)
        keys = jnp.concatenate([keys, keys], axis=1)
        for j in range(cta.config.block // GRANULE):  # a part at once, as many as registers hold
            part = cta.chunks.at[cta.stage_of(i, c), :, rows_of(j)]
            added = cta.dev.product(keys, cta.values.at[:, rows_of(j)])
            new = load(part, WGMMA).astype(jnp.float32) * held.decay + added
            store_any(part, new.astype(part.dtype))
    plgpu.commit_smem()
    for c in range(cta.num_chunks):
        plgpu.copy_smem_to_gmem(cta.chunks.at[cta.stage_of(i, c)], at.state.numbers.at[rows_of(c)])


def _read_state(cta: Cta, i: jax.Array) -> list[jax.Array]:
    """X S0 as [GRANULE, columns] arrays, entries of V below each other."""
    columns, parts = cta.columns.all, cta.config.block // GRANULE

    def body(*accs):
        for c in range(cta.num_chunks):
            x = transposed(cta.operands.at[pl.ds(LENGTH, columns), rows_of(c)])
            for j, acc in enumerate(accs):
                part = cta.chunks.at[cta.stage_of(i, c), :, rows_of(j)]
                plgpu.wgmma(acc, transposed(part), x)
        return [cta.dev.collect(acc) for acc in accs]

    return pl.run_scoped(body, *[plgpu.ACC((GRANULE, columns), jnp.float32)] * parts)


def _sum(cta: Cta, of_state: list[jax.Array], held: Held) -> None:
    """Stores Y, from what the state and the ring give to it."""
    decay = along_columns(jnp.exp(load(cta.decayed, COL) + held.total), GRANULE)
    for j, product in enumerate(of_state):
        u = load(transposed(cta.values.at[pl.ds(0, LENGTH), rows_of(j)]), WGMMA)
        of_ring = cta.dev.product(u, cta.weights.at[pl.ds(0, LENGTH)])
        y = decay * halves(cta, product) + halves(cta, of_ring)
        store_any(cta.sums.at[rows_of(j), pl.ds(0, cta.columns.half)], y)


def _work(cta: Cta, i: jax.Array, here: Here, next_slot: jax.Array) -> Here:
    """The drafts of the i-th unit."""
    at = Unit(cta, i, here.slot)
    flushes = here.count + cta.T > LENGTH
    # All loads come before the first use of one.
    raw = operands.load_raw(cta, at)
    operands.store_vectors(cta, raw)
    total = operands.store_log_decays(cta, raw, here.count)
    plgpu.commit_smem()
    held = operands.store_ring(cta, raw, here.count, total, flushes)
    operands.store_operands(cta)
    gates, betas = operands.store_gates(cta, raw, at.row)
    plgpu.commit_smem()
    operands.store_weights(cta, held)
    for c in range(cta.num_chunks):
        cta.wait(cta.stage_of(i, c))
    pl.when(flushes)(lambda: _flush(cta, i, at, held))
    plgpu.commit_smem()
    _sum(cta, _read_state(cta, i), held)

    @pl.when(flushes)
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # All warps have read the state, and their sums are there.
    plgpu.commit_smem()
    cta.copy_state(i + cta.config.states)
    next_count = cta.count_of(i + 1, next_slot, accepted_count)
    _finish(cta, at, held, gates, betas, [v for v, *_ in raw.tokens])
    return Here(next_slot, next_count)


def _finish(
    cta: Cta, at: Unit, held: Held, gates: list[jax.Array], betas: list[jax.Array], vs: list[jax.Array]
) -> None:
    """Writes outputs, and what is appended to the ring."""
    gmem, T, row, us = cta.gmem, cta.T, at.row, []
    present, ends = cta.present(row), at.ends()
    for t in range(T):
        found, read = load(cta.sums.at[:, t], cta.along_v), load(cta.sums.at[:, T + t], cta.along_v)
        for s, u in enumerate(us):
            found = found + cta.between[LENGTH + s, t] * u
            read = read + cta.between[LENGTH + s, T + t] * u
        u = betas[t] * (vs[t].astype(jnp.float32) - found)
        o = cta.sizes.scale * (read + cta.own[t] * u)
        stored_u = u.astype(gmem.ring_u.dtype)
        us.append(stored_u.astype(jnp.float32))
        o = jnp.where(t < present, o, jnp.zeros_like(o))
        store_any(gmem.o.at[row, t, at.head, at.entries], o.astype(gmem.o.dtype))
        # Behind the tokens a ring may hold anything, and padding does.
        store_any(at.ring_u.at[held.count + t], stored_u)

    @pl.when(ends.head)
    def _():
        for t, g in enumerate(gates):
            at.ring_g[held.count + t] = g
        cursors = gmem.cursors.at[cta.place(gmem.read_slots[row]), at.head]
        cursors[BEFORE] = held.count
        cursors[COUNT] = held.count + (T if gmem.num_tokens is None else gmem.num_tokens[row])

    @pl.when(ends.key_head)
    def _():
        for some, _, layout in cta.groups():
            start = some if isinstance(some, int) else some.start
            to = held.count + start if isinstance(some, int) else pl.ds(held.count + start, WARPS)
            store_any(at.ring_k.at[to], load(cta.vectors.at[some], layout).astype(gmem.ring_k.dtype))

    # The next unit writes where this one reads.
    plgpu.commit_smem()


def _padding(cta: Cta, i: jax.Array, here: Here, next_slot: jax.Array) -> Here:
    cta.clear(i)
    cta.copy_state(i + cta.config.states)
    return Here(next_slot, cta.count_of(i + 1, next_slot, accepted_count))


def _body(gmem: Any, smem: Any, **static: Any) -> None:
    cta, first = Cta(gmem, smem, **static), jnp.int32(0)
    for s in range(cta.config.states):
        cta.copy_state(jnp.int32(s))
    slot = cta.slot_of(first)
    walk(cta, Here(slot, cta.count_of(first, slot, accepted_count)), _work, _padding)


def drafts_mma(
    x: Tokens,
    rings: Rings,
    *,
    read_slots: Int[Array, " N"],
    accepted: Int[Array, " N"],
    num_tokens: Int[Array, " N"] | None = None,
    parents: Int[Array, "N T"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    config: Config | None = None,
    interpret=None,
    **options: Any,
) -> tuple[Float[Array, "N T HV V"], Rings]:
    """T drafts of N requests: o, and the states and rings after them. All other slots keep their bits.

    Args:
      x, rings: tokens and rings that `vectors.check_supported` and `check_supported` accept.
      read_slots, layer, config, interpret, options: as for `deferred`.
      accepted: how many of the last call's tokens stay.
      num_tokens: real tokens of each request; the others are padding. None for all.
      parents: of tokens that are a tree, those that each one follows, which come before it; -1 for the last one in
        the ring. None: each follows the one before.
    """
    T = x.q.shape[1]
    assert T <= LENGTH
    sizes = Sizes.of(x.heads, rings.state, layer, **options)
    config = config or Config.default(sizes.K, sizes.V, T)
    return launch_walk(
        "verify_ring",
        _body,
        x,
        dict(read_slots=read_slots, accepted=accepted, num_tokens=num_tokens, parents=parents),
        rings,
        sizes,
        config=config,
        heads=sizes.HV // sizes.Hk,
        layer=layer,
        memory=memory(sizes.K, config, T, parents is not None),
        interpret=interpret,
    )
