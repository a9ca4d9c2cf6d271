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
from jaxtyping import Array, Float, Int

from pallas_kernels.decode import step
from pallas_kernels.decode.ring import LENGTH, Ring, Slot, default_config
from pallas_kernels.decode.step import REDUCTION_BYTES, Config
from pallas_kernels.decode.tiles import Rule, Tile, load, log_decay, one_for_all_layers, write_strength
from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.device.memory import Buffer, store_any

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


def _body(gmem: Any, smem: Any, *, rule: Rule, config: Config, T: int, deferred: bool) -> None:
    tile = Tile(rule, config.block, gmem.state.dtype.itemsize)
    ring = Ring(tile, gmem.ring_k.dtype.itemsize, smem.exchange)
    row, head, entries = tile.where(grid_index())
    q_head, k_head = lax.div(head, rule.HV // rule.Hq), lax.div(head, rule.HV // rule.Hk)
    slot = gmem.read_slots[row]
    tokens = T if gmem.num_tokens is None else jnp.clip(gmem.num_tokens[row], 0, T)
    # One warpgroup of those that share a key, or a gate, writes it.
    writes_g = entries.start == 0
    writes_k = writes_g & (lax.rem(head, rule.HV // rule.Hk) == 0)

    def store_o(t, o):
        store_any(gmem.o.at[row, t, head, entries], o.astype(gmem.o.dtype))

    @pl.when(rule.is_slot(slot))
    def _():
        place = rule.place(slot, gmem.layer)
        here = Slot(gmem, tile, place, head, k_head, entries)
        S = load(here.state, tile.layout)
        count = gmem.count[place]
        held = ring.load(here.k, here.u, here.g, count)

        def token(t, held):
            q_ref, k_ref = gmem.q.at[row, t, q_head], gmem.k.at[row, t, k_head]
            v = load(gmem.v.at[row, t, head, entries], tile.v_layout)
            q_column, k_column = (
                load(ref, ring.k_layout.reduce(0)).astype(jnp.float32) for ref in (q_ref, k_ref)
            )
            g = log_decay(gmem.a[row, t, head], gmem.A_log[head], gmem.dt_bias[head])
            beta = write_strength(gmem.b[row, t, head], rule.allow_neg_eigval)
            rq, rk, qk = tile.norms(q_column, k_column)
            held = held._replace(since=held.since + g, total=held.total + g)
            decay = jnp.exp(held.since)
            found, read = ring.recall(held, decay, k_column, rk), ring.recall(held, decay, q_column, rq)
            stored_k = (k_column * rk).astype(gmem.ring_k.dtype)
            # Loaded again, in the other layout: registers are what limits the bytes in flight.
            q, k = (load(ref, tile.k_layout).astype(jnp.float32) for ref in (q_ref, k_ref))
            y, z = tile.products(S.astype(jnp.float32), [k, q])
            total = jnp.exp(held.total)
            u = beta * (v.astype(jnp.float32) - ((total * rk) * y + found))
            store_o(t, rule.scale * ((total * rq) * z + read + (rq * rk * qk) * u))
            stored_u = u.astype(gmem.ring_u.dtype)
            is_full = held.count + 1 >= LENGTH if deferred else held.count >= LENGTH

            @pl.when(~is_full)
            def _():
                store_any(here.u.at[held.count], stored_u)

                @pl.when(writes_g)
                def _():
                    here.g[held.count] = g

                @pl.when(writes_k)
                def _():
                    store_any(here.k.at[held.count], stored_k)

            if deferred:

                @pl.when(is_full)
                def _():
                    h = here.folded(tile, S, held.count, held.total, g)
                    h = h + tile.over_v(k * rk) * tile.over_k(u)
                    store_any(here.state, h.astype(gmem.state.dtype))

                return held
            return ring.append(held, stored_k, u)

        if T == 1:
            token(0, held)
        else:
            lax.fori_loop(0, tokens, token, held)

    lax.fori_loop(jnp.where(rule.is_slot(slot), tokens, 0), T, lambda t, _: store_o(t, tile.zeros()), None)


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
    config = config or default_config(V, state.dtype, kv_layout)
    pool = (state, ring_k, ring_u, ring_g)
    in_place = [jax.new_ref(one_for_all_layers(x, layer)) for x in pool]
    exchange = None if kv_layout else Buffer((config.block,))
    results = launch(
        "decode_deferred" if deferred else "verify_ring",
        functools.partial(_body, rule=rule, config=config, T=T, deferred=deferred),
        inputs={
            "q": q,
            "k": k,
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
        memory={"exchange": exchange},
        ctas=N * HV * (V // config.block),
        auto_barriers=False,
        reduction_bytes=REDUCTION_BYTES,
        interpret=interpret,
    )
    after = (jax.freeze(x).reshape(y.shape) for x, y in zip(in_place, pool, strict=True))
    return Results(results["o"], *after)
