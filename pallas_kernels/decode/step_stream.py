"""A few tokens of every running request, each state read once from its slot of a pool and written after each token.

The equations are those of `step`. Here all products of the tokens with the state that is read come first, what the
tokens say to each other is worked out on vectors, and one more pass over the state applies all tokens and writes.

Inputs, in place, outputs, numerics: those of `step`.
Grid: one CTA to an SM, whose warpgroups each take state after state (`block` entries of V of a value head), by
themselves. A state lies in shared memory as a whole; where the second pass has left a chunk of it, the same chunk of
the next state is copied there.
Barriers: arrived [warpgroups * chunks]: the copy of a chunk arrives; its warpgroup waits.
Hardware: compute capability 9.0. Limits: those of `step`; T at most 4.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.ring_step import (
    Config,
    Products,
    Shape,
    column_layout,
    memory,
    row_slices,
    spread,
)
from pallas_kernels.decode.tiles import (
    Rule,
    Tile,
    load,
    log_decay,
    one_for_all_layers,
    vector_layout,
    write_strength,
)
from pallas_kernels.device.launch import NUM_SMS, grid_index, launch, warpgroup_index
from pallas_kernels.device.memory import Buffer, store_any


def _body(gmem: Any, smem: Any, *, rule: Rule, config: Config, T: int, ctas: int) -> None:
    shape = Shape.of(rule, config, gmem.pool.dtype.itemsize)
    tile = Tile(rule, config.block, gmem.pool.dtype.itemsize)
    wg, C = warpgroup_index(), shape.chunks
    chunks, vectors = smem.state.at[wg], smem.vectors.at[wg]
    whole, v_layout = vector_layout(rule.K), column_layout(config.block)
    products = Products(rule, shape, smem.sums.at[wg], vectors, 2 * T, v_layout)
    N = gmem.read_slots.shape[0]
    units = N * rule.HV * (rule.V // config.block)
    first, stride = wg * ctas + grid_index(), config.warpgroups * ctas
    number = lax.div(units - first + stride - 1, stride)

    def unit(i):
        return tile.where(first + i * stride)

    def slot_of(i):
        return jnp.where(i < number, gmem.read_slots[jnp.minimum(unit(i)[0], N - 1)], -1)

    def rows_of(place, head, entries, c):
        return tile.state(gmem.pool, place, head, entries).at[pl.ds(c * shape.rows, shape.rows)]

    def copy(i, c, slot):
        @pl.when(rule.is_slot(slot))
        def _():
            _, head, entries = unit(i)
            source = rows_of(rule.place(slot, gmem.layer), head, entries, c)
            plgpu.copy_gmem_to_smem(source, chunks.at[c], smem.arrived.at[wg * C + c])

    def work(i, next_slot):
        row, head, entries = unit(i)
        q_head, k_head = lax.div(head, rule.HV // rule.Hq), lax.div(head, rule.HV // rule.Hk)
        present = T if gmem.num_tokens is None else jnp.clip(gmem.num_tokens[row], 0, T)
        writes = [gmem.write_slots[row, t] for t in range(T)]
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
        tokens = []
        for t, (q, k, v, a, b) in enumerate(raw):
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            rq, rk, _ = tile.norms(q, k)
            g = log_decay(a, A_log, dt_bias)
            beta = write_strength(b, rule.allow_neg_eigval)
            store_any(vectors.at[2 * t], k * rk)
            store_any(vectors.at[2 * t + 1], q * rq)
            tokens.append((q * rq, k * rk, v, jnp.exp(g), beta))
        plgpu.commit_smem()

        def chunk(c, carry):
            plgpu.barrier_wait(smem.arrived.at[wg * C + c])
            return products.add(chunks.at[c], c * shape.rows, carry)

        carry = lax.fori_loop(0, C, chunk, products.start())
        total, since, us = jnp.float32(1), [], []
        for t, (q, k, v, alpha, beta) in enumerate(tokens):
            total, since = total * alpha, [x * alpha for x in since]
            y, z = products.of_token(t, carry)
            found, read = total * y, total * z
            for s in range(t):
                earlier = tokens[s][1]
                found = found + (since[s] * jnp.sum(k * earlier)) * us[s]
                read = read + (since[s] * jnp.sum(q * earlier)) * us[s]
            u = beta * (v - found)
            us.append(u)
            since.append(jnp.float32(1))
            o = jnp.where(t < present, rule.scale * (read + jnp.sum(q * k) * u), jnp.zeros_like(u))
            store_any(gmem.o.at[row, t, head, entries], o.astype(gmem.o.dtype))
            store_any(smem.u.at[wg, t], u)
        plgpu.commit_smem()
        rows, layout = row_slices(shape.columns)
        along_rows, along_columns = layout.reduce(1), layout.reduce(0)
        by_column = [
            load(smem.u.at[wg, t] if rule.kv_layout else vectors.at[2 * t], along_columns) for t in range(T)
        ]

        def update(c, _):
            for r in range(0, shape.rows, rows):
                here = pl.ds(c * shape.rows + r, rows)
                S = load(chunks.at[c, pl.ds(r, rows)], layout).astype(jnp.float32)
                for t in range(T):
                    x = load((vectors.at[2 * t] if rule.kv_layout else smem.u.at[wg, t]).at[here], along_rows)
                    written = spread(x, S.shape, 0, layout) * spread(by_column[t], S.shape, 1, layout)
                    S = S * tokens[t][3] + written

                    @pl.when(rule.is_slot(writes[t]) & (t < present))
                    def _(S=S, t=t, here=here):
                        place = rule.place(writes[t], gmem.layer)
                        store_any(
                            tile.state(gmem.pool, place, head, entries).at[here], S.astype(gmem.pool.dtype)
                        )

            # All warps have read the chunk.
            plgpu.commit_smem()
            copy(i + 1, c, next_slot)

        lax.fori_loop(0, C, update, None)

    def padding(i, next_slot):
        row, head, entries = unit(i)
        zeros = plgpu.layout_cast(jnp.zeros((config.block,), gmem.o.dtype), v_layout.reduce(0))
        for t in range(T):
            store_any(gmem.o.at[row, t, head, entries], zeros)
        lax.fori_loop(0, C, lambda c, _: copy(i + 1, c, next_slot), None)

    def turn(i, slot):
        next_slot = slot_of(i + 1)
        lax.cond(rule.is_slot(slot), lambda: work(i, next_slot), lambda: padding(i, next_slot))
        return next_slot

    slot = slot_of(jnp.int32(0))
    lax.fori_loop(0, C, lambda c, _: copy(jnp.int32(0), c, slot), None)
    lax.fori_loop(0, number, turn, slot)


def step_stream(
    q,
    k,
    v,
    a,
    b,
    pool,
    *,
    A_log,
    dt_bias,
    read_slots,
    write_slots,
    num_tokens=None,
    scale: float,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    kv_layout: bool = True,
    null_slot: int | None = None,
    layer=None,
    config: Config | None = None,
    interpret=None,
):
    """As `step`, whose arguments these are."""
    N, T, Hq, K = q.shape
    HV, V = v.shape[2:]
    slots, layers = pool.shape[0], 1 if layer is None else pool.shape[1]
    norm, span = (use_qk_l2norm, allow_neg_eigval), (slots, null_slot, layers)
    rule = Rule(Hq, k.shape[2], HV, K, V, scale, *norm, kv_layout, *span)
    config = config or Config.default(V)
    in_place = jax.new_ref(one_for_all_layers(pool, layer))
    ctas = min(NUM_SMS, N * HV * (V // config.block))
    space = dict(memory(rule, config, T, pool.dtype)) | {"u": Buffer((config.warpgroups, T, config.block))}
    state, chunks = space["state"], Shape.of(rule, config, pool.dtype.itemsize).chunks
    assert isinstance(state, Buffer) and state.shape[1] == chunks, "no room for a whole state"
    results = launch(
        "decode_step",
        functools.partial(_body, rule=rule, config=config, T=T, ctas=ctas),
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "a": a,
            "b": b,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "read_slots": read_slots,
            "write_slots": write_slots,
            "num_tokens": num_tokens,
            "layer": layer if layer is None else jnp.asarray(layer, jnp.int32)[None],
            "pool": in_place,
        },
        outputs={"o": jax.ShapeDtypeStruct(v.shape, v.dtype)},
        memory=space,
        ctas=ctas,
        warpgroups=config.warpgroups,
        auto_barriers=False,
        interpret=interpret,
    )
    return results["o"], jax.freeze(in_place).reshape(pool.shape)
