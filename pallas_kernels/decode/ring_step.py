"""A few tokens of every running request, on states that are written once in many tokens.

A slot holds a checkpoint S0 and a ring of the tokens since: normalised keys k_j, written values u_j, log decays g_j.
With D_j the decay since token j and D that since the checkpoint, both with the new token's gate,

    u = beta (v - (D k^T S0 + sum_j D_j (k . k_j) u_j))
    o = scale (D q^T S0 + sum_j D_j (q . k_j) u_j + (q . k) u)

and (k, u, g) is appended to the ring. With `deferred`, a token that fills the ring is not appended: the ring and it
become part of the checkpoint. Otherwise the caller sees to it that all tokens find room (`ring_flush`).

Inputs (GMEM): q [N, T, Hq, K], k [N, T, Hk, K], v [N, T, HV, V] bfloat16, float16 or float32; a, b [N, T, HV] of any
floating dtype; A_log, dt_bias [HV]; read_slots [N], count [slots] int32, the tokens in each ring; optionally
num_tokens [N] int32.
In place (GMEM): state [slots, HV, K, V], or [slots, HV, V, K], float32 or bfloat16; ring_k [slots, Hk, L, K],
ring_u [slots, HV, L, V] bfloat16 or float32; ring_g [slots, HV, L] float32. The counts are the caller's to advance.
Outputs (GMEM): o [N, T, HV, V] in v's dtype.
Grid: as in `step`. A warpgroup has the whole ring in registers too, one row in a few lanes of one warp: there the
sums over it are taken, and there the new tokens are appended for those that follow.
Numerics: as in `step`; keys and values meet later tokens as the ring stores them.
Hardware: compute capability 9.0. Limits: those of `step`; L = 16; T at most L.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.decode import step
from pallas_kernels.decode.ring import (
    LENGTH,
    Slot,
    default_block,
    divided,
    norm,
    relabelled,
    rows_layout,
    split_k,
    spread,
    tile_index,
    total,
    warpgroups,
)
from pallas_kernels.decode.tiles import WARPS, Rule, load, log_decay, one_for_all_layers, write_strength
from pallas_kernels.device.launch import launch
from pallas_kernels.device.memory import Buffer, store_any

GROUP = 4
"""Tokens for which the state is read once."""


def check_supported(q, k, v, state, ring_k, ring_u) -> str | None:
    """Why the kernel cannot take a call, from its arrays or their shapes; None if it can."""
    length = ring_u.shape[-2]
    if length != LENGTH:
        return f"the ring holds {length} tokens; the kernel is written for {LENGTH}"
    if ring_k.dtype != ring_u.dtype or jnp.dtype(ring_u.dtype).name not in step.POOL_DTYPES:
        return f"the ring is {ring_k.dtype} and {ring_u.dtype}; the kernel takes {' and '.join(step.POOL_DTYPES)}"
    if q.ndim == 4 and q.shape[1] > LENGTH:
        return f"{q.shape[1]} tokens; the ring holds {LENGTH}"
    return step.check_supported(q, k, v, state)


class _Token(NamedTuple):
    """A token of one head in float32: q and k along K as they came, one over their norms, and v along V."""

    q: jax.Array
    k: jax.Array
    rq: Any
    rk: Any
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class _Past(NamedTuple):
    """An earlier token of the call as the ring stores it, and the decay since."""

    k: jax.Array
    u: jax.Array
    decay: Any


def _sums(
    slot: Slot, partial: Any, count: jax.Array, refs: list, vectors: list[jax.Array], interpreted: bool
) -> list[jax.Array]:
    """x^T S along V, where S is the state with its ring, for vectors x along K in memory (refs) and in registers."""
    ahead = slot.start()
    since, decay = slot.decays(count)
    keys, values = load(slot.k, slot.keys).astype(jnp.float32), load(slot.u, slot.columns).astype(jnp.float32)
    values = jnp.where(spread(since, values.shape, (0, 1), slot.columns) > 0.0, values, 0.0)
    sums = []
    for x in vectors:
        products = jnp.sum(jnp.sum(keys * spread(x, keys.shape, (2, 3), slot.keys), axis=3), axis=2)
        products = relabelled(products, slot.keys.reduce(3).reduce(2), slot.columns.reduce(2), interpreted)
        weights = jnp.where(since > 0.0, since * products, 0.0)
        sums.append(jnp.sum(values * spread(weights, values.shape, (0, 1), slot.columns), axis=1))
    # What was read of it before is used by now.
    plgpu.commit_smem()
    for i, S in enumerate(slot.chunks(ahead)):
        for n, ref in enumerate(refs):
            x = spread(slot.k_of_chunk(i, ref), slot.shape, slot.k_axes, slot.layout)
            if slot.rule.kv_layout:
                sums[n] = sums[n] + decay * jnp.sum(S * x, axis=1)
            else:
                slot.v_of_chunk(i, partial.at[n, WARPS])[...] = decay * jnp.sum(S * x, axis=1)
    for n, y in enumerate(sums):
        partial.at[n, pl.ds(0, WARPS)][...] = y
    plgpu.commit_smem()
    rows = range(WARPS if slot.rule.kv_layout else WARPS + 1)
    return [
        functools.reduce(jnp.add, [load(partial.at[n, w], slot.along_v) for w in rows])
        for n in range(len(refs))
    ]


def _body(
    gmem: Any, smem: Any, *, rule: Rule, block: int, W: int, T: int, deferred: bool, interpreted: bool
) -> None:
    parts = rule.V // block
    tile, wg = tile_index(W)
    number, first = lax.div(tile, parts), lax.rem(tile, parts) * block
    partial = smem.partial.at[wg]
    row, head = lax.div(number, rule.HV), lax.rem(number, rule.HV)
    q_head, k_head = lax.div(head, rule.HV // rule.Hq), lax.div(head, rule.HV // rule.Hk)
    slot_number = gmem.read_slots[row]
    tokens = T if gmem.num_tokens is None else jnp.clip(gmem.num_tokens[row], 0, T)
    # One warpgroup of those that share a key, or a gate, writes it.
    writes_g = first == 0
    writes_k = writes_g & (lax.rem(head, rule.HV // rule.Hk) == 0)

    def o_ref(t):
        return gmem.o.at[row, t, head, pl.ds(first, block)]

    def along_k(t):
        return gmem.q.at[row, t, q_head], gmem.k.at[row, t, k_head]

    @pl.when(rule.is_slot(slot_number))
    def _():
        place = rule.place(slot_number, gmem.layer)
        slot, count = Slot(gmem, rule, place, head, k_head, first, block), gmem.count[place]

        def token(t):
            q, k = (load(ref, slot.whole_k).astype(jnp.float32) for ref in along_k(t))
            rq, rk = (norm(x) if rule.use_qk_l2norm else 1.0 for x in (q, k))
            v = load(gmem.v.at[row, t, head, pl.ds(first, block)], slot.along_v).astype(jnp.float32)
            g = log_decay(gmem.a[row, t, head], gmem.A_log[head], gmem.dt_bias[head])
            return _Token(q, k, rq, rk, v, g, write_strength(gmem.b[row, t, head], rule.allow_neg_eigval))

        past: list[_Past] = []
        decay: Any = 1.0
        for start in range(0, T, GROUP):
            group = [token(t) for t in range(start, min(start + GROUP, T))]
            refs = [ref for t in range(start, start + len(group)) for ref in along_k(t)]
            sums = _sums(slot, partial, count, refs, [y for x in group for y in (x.q, x.k)], interpreted)
            for n, x in enumerate(group):
                t, now = start + n, jnp.exp(x.g)
                decay, past = decay * now, [p._replace(decay=p.decay * now) for p in past]
                read, found = (decay * x.rq) * sums[2 * n], (decay * x.rk) * sums[2 * n + 1]
                for p in past:
                    read = read + (p.decay * x.rq * total(x.q * p.k)) * p.u
                    found = found + (p.decay * x.rk * total(x.k * p.k)) * p.u
                u = x.beta * (x.v - found)
                o = rule.scale * (read + (x.rq * x.rk * total(x.q * x.k)) * u)
                new_k, new_u = (x.k * x.rk).astype(gmem.ring_k.dtype), u.astype(gmem.ring_u.dtype)
                past = [*past, _Past(new_k.astype(jnp.float32), new_u.astype(jnp.float32), 1.0)]
                position, is_token = count + t, jnp.int32(t) < tokens
                pl.when(is_token)(functools.partial(store_any, o_ref(t), o.astype(gmem.o.dtype)))
                fits = position < (LENGTH - 1 if deferred else LENGTH)
                pl.when(fits & is_token)(
                    functools.partial(_append, slot, position, new_k, new_u, x.g, writes_k, writes_g)
                )
                if deferred:
                    pl.when(~fits)(functools.partial(_flush_with, slot, partial, count, x, u, along_k(t)[1]))

    padding_from = jnp.where(rule.is_slot(slot_number), tokens, 0)
    zeros = plgpu.layout_cast(jnp.zeros((block,), gmem.o.dtype), rows_layout(block).reduce(1).reduce(0))
    lax.fori_loop(padding_from, T, lambda t, _: store_any(o_ref(t), zeros), None)


def _append(
    slot: Slot, position: jax.Array, k: jax.Array, u: jax.Array, g: jax.Array, writes_k, writes_g
) -> None:
    """Writes a token to the ring."""
    store_any(slot.value(position), u)
    pl.when(writes_k)(functools.partial(store_any, slot.key(position), k))

    @pl.when(writes_g)
    def _():
        slot.g[position] = g


def _flush_with(slot: Slot, exchange: Any, count: jax.Array, x: _Token, u: jax.Array, k: Any) -> None:
    """Writes the state with its ring and one token more, with value u and key k in memory."""
    plgpu.commit_smem()
    exchange.at[0, 0][...] = u
    plgpu.commit_smem()
    decay = slot.decays(count)[1] * jnp.exp(x.g)
    for i in range(slot.number):
        S = load(slot.chunk(i), slot.layout).astype(jnp.float32)
        new = load(slot.v_of_chunk(i, exchange.at[0, 0]), slot.chunk_v)
        slot.store(i, slot.folded(i, S, count, decay, x.g) + slot.outer(slot.k_of_chunk(i, k) * x.rk, new))


class Results(NamedTuple):
    """Outputs, and states and rings after them."""

    o: Float[Array, "N T HV V"]
    state: Float[Array, "slots *layers HV rows columns"]
    ring_k: Float[Array, "slots *layers Hk L K"]
    ring_u: Float[Array, "slots *layers HV L V"]
    ring_g: Float[Array, "slots *layers HV L"]


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
    *,
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    read_slots: Int[Array, " N"],
    count: Int[Array, "slots *layers"],
    deferred: bool,
    num_tokens: Int[Array, " N"] | None = None,
    scale: float,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    kv_layout: bool = True,
    null_slot: int | None = None,
    layer: int | Int[Array, ""] | None = None,
    interpret=None,
) -> Results:
    """T tokens of N requests: o, and the states and rings after them. All other slots keep their bits.

    Args:
      q, k, v, a, b, state: inputs that `check_supported` accepts.
      ring_k, ring_u, ring_g: keys, values and log decays since the states, oldest first.
      A_log, dt_bias, scale, use_qk_l2norm, allow_neg_eigval, kv_layout, null_slot, layer, interpret: as for
        `step`.
      read_slots: where each request's state and ring are, no slot twice; padding as for `step`.
      count: how many entries of each ring are tokens. It is not advanced.
      deferred: decodes one token; one that fills the ring is flushed with it. The count after it is count + 1, or 0.
        Else all tokens are appended; what finds no room is lost.
      num_tokens: tokens that each request has; the others are padding. None for all.
    """
    N, T, Hq, K = q.shape
    HV, V = v.shape[2:]
    assert T == 1 or not deferred
    slots, layers = state.shape[0], 1 if layer is None else state.shape[1]
    norm, span = (use_qk_l2norm, allow_neg_eigval), (slots, null_slot, layers)
    rule = Rule(Hq, k.shape[2], HV, K, V, scale, *norm, kv_layout, *span)
    block, pool = default_block(V), (state, ring_k, ring_u, ring_g)
    flat = [one_for_all_layers(x, layer) for x in pool]
    tiles = N * HV * (V // block)
    W = warpgroups(tiles, T)
    in_place = [jax.new_ref(x) for x in divided(*flat, kv_layout=kv_layout)]
    results = launch(
        "decode_deferred" if deferred else "verify_ring",
        functools.partial(
            _body, rule=rule, block=block, W=W, T=T, deferred=deferred, interpreted=interpret is not None
        ),
        inputs={
            "q": split_k(q, kv_layout),
            "k": split_k(k, kv_layout),
            "v": v,
            "a": a,
            "b": b,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "read_slots": read_slots,
            "count": one_for_all_layers(count, layer),
            "num_tokens": num_tokens,
            "layer": layer if layer is None else jnp.asarray(layer, jnp.int32)[None],
        }
        | dict(zip(("state", "ring_k", "ring_u", "ring_g"), in_place, strict=True)),
        outputs={"o": jax.ShapeDtypeStruct(v.shape, v.dtype)},
        memory={"partial": Buffer((W, 2 * min(T, GROUP), WARPS + 1, block))},
        ctas=tiles // W,
        warpgroups=W,
        auto_barriers=False,
        interpret=interpret,
    )
    after = (jax.freeze(x).reshape(y.shape) for x, y in zip(in_place, pool, strict=True))
    return Results(results["o"], *after)
