"""Outputs and final states: the walk of `forward.walk`, which also reads the state with the queries.

    O^T = scale (h Q^T) D + W P^T,    P = scale ((Q K^T) * Gamma) diag(beta)

with Gamma[i, j] = 2^(G_i - G_j) for i >= j, 0 above. Where q and k are to be normalised, the reciprocal norms of q go
into the rows of P and scale D.

h K^T and h Q^T run together, then W, then h and O. A warpgroup can run ahead of its products by about two
instructions only, so what it does beside them is not free: O of a chunk is stored while the next chunk's last
products drain, or, where two state warpgroups would lack the registers, its first ones. The helper makes D, scale D,
Dr and P.

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], v [B, T, HV, V], g2_cum and beta [B, HO, NT C] f32, t [B, HO, NT C,
C], q_rstd and k_rstd [B, H, NT C] f32 (optional), h_0 [items, HO, V, K] or [.., K, V] f32 (optional), tables int32
(packed rows).
Outputs (GMEM): o [B, T, HO, V], final state [N, HO, V, K] or [.., K, V] f32.
In place of h_0 and the final states (GMEM): a pool of states in f32 or bf16, and slots of it (see `work.slots`).
Shared memory: `_memory`, 214 KB at K = V = 128 with two state warpgroups and three stages.
Barriers, hardware, limits, source: `forward.walk`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.chunks.gates import gamma_of
from pallas_kernels.device.launch import launch
from pallas_kernels.device.layouts import CHUNK, along_rows, zeros
from pallas_kernels.device.memory import Barriers, Buffer, Memory, load_state, store_state, transposed
from pallas_kernels.forward.walk import (
    ROWS,
    Config,
    Cta,
    Sizes,
    corrected_values,
    helpers,
    prepare_vectors,
    wait_for_chunk,
    walk,
)
from pallas_kernels.work.foreign import store_owned
from pallas_kernels.work.slots import PoolStates, load_initial, slot_inputs, store_final
from pallas_kernels.work.tables import Items, table_inputs


def default_config(K: int, state_warpgroups: int) -> Config:
    """Most stages that fit beside the operands that K needs. One state warpgroup has a loader (-3 % on an H200)."""
    loader = state_warpgroups == 1 and K <= 128
    return Config.most_stages(state_warpgroups, K > 128, lambda x: _memory(x, K, jnp.bfloat16), loader)


def _memory(config: Config, K: int, dtype, *, packed: bool = False, normalize: bool = True) -> Memory:
    """Shared memory of a CTA."""
    n, stages = config.state_warpgroups, config.stages
    vector = Buffer((stages, CHUNK))
    return {
        "q": Buffer((stages, CHUNK, K), dtype, swizzle=128),
        "k": Buffer((stages, CHUNK, K), dtype, swizzle=128),
        "v": Buffer((stages, CHUNK, ROWS * n), dtype, swizzle=128),
        "t": Buffer((stages, CHUNK, CHUNK), dtype, swizzle=128),
        "p": Buffer((stages, CHUNK, CHUNK), dtype, swizzle=128),
        "out": Buffer((n, CHUNK, ROWS), dtype, swizzle=128, also_flat=packed),
        "h": Buffer((n, ROWS, K), dtype, swizzle=128) if config.state_in_smem else None,
        "g2": vector,
        "beta": vector,
        "d": vector,
        "d_scaled": vector,
        "dr": vector,
        "q_rstd": vector if normalize else None,
        "k_rstd": vector if normalize else None,
        "loaded": Barriers(arrivals=8 if normalize else 6, count=stages),
        "prepared": Barriers(arrivals=1, count=stages),
        "consumed": Barriers(arrivals=n, count=stages),
        "turn": Barriers(arrivals=1, count=2) if n == 2 else None,
    }


def _prepare(cta: Cta, stage) -> None:
    """P and the vectors of a stage, which are made while Q K^T runs."""
    smem, dev, scale = cta.smem, cta.dev, cta.sizes.scale

    def scores(qk):
        qk = dev.issue(qk, smem.q.at[stage], transposed(smem.k.at[stage]))
        g_rows, gamma = gamma_of(dev, smem.g2.at[stage], math.log2(scale))
        prepare_vectors(cta, stage, g_rows)
        p = dev.collect(qk) * gamma * cta.vector(smem.beta, stage)
        if smem.q_rstd is not None:
            p = p * along_rows(cta.factors(smem.q_rstd, stage), CHUNK)
        smem.p.at[stage][...] = p.astype(cta.dtype)

    pl.run_scoped(scores, plgpu.ACC((CHUNK, CHUNK), jnp.float32))


def store_o(cta: Cta, i, o) -> None:
    """O [64 columns of V, C] of the i-th chunk to memory."""
    swizzled, plain = cta.smem.out if cta.packed else (cta.smem.out, None)
    chunk = cta.chunk_of(i)

    def views(ref):
        return ref.at[cta.wg], transposed(ref.at[cta.wg])

    def destination(tokens):
        return cta.gmem.o.at[cta.span.row, tokens, cta.head, cta.rows]

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    flat = None if plain is None else views(plain)
    store_owned(cta.span, chunk, o, views(swizzled), flat, destination, tokens=cta.sizes.tokens)


def _read_h_0(cta: Cta) -> jax.Array:
    h_0, slots = cta.gmem.h_0, cta.sizes.slots
    if h_0 is None and slots is not None:
        return load_initial(cta.span.sequence, cta.head, cta.rows, cta.sizes.kv_layout, slots, cta.gmem)
    if h_0 is None:
        return zeros((ROWS, cta.sizes.K), jnp.float32)
    n = cta.span.sequence if cta.sizes.split.segment_chunks is None else cta.item.index
    source = h_0.at[jnp.minimum(n, h_0.shape[0] - 1), cta.head]  # the padding reads any state
    return load_state(source, cta.rows, cta.sizes.h_0_kv_layout)


def _step(cta: Cta, i, carry):
    """One chunk: the state after it, as numbers and as an operand, and its O."""
    h, h_operand, o_previous = carry
    smem, dev, f32 = cta.smem, cta.dev, jnp.float32
    stage = lax.rem(i, cta.config.stages)
    k_tile, q_tile = smem.k.at[stage], smem.q.at[stage]
    left = smem.h.at[cta.wg] if cta.config.state_in_smem else h_operand
    accumulator = plgpu.ACC((ROWS, CHUNK), f32)
    wait_for_chunk(cta, stage)

    def store_previous():
        pl.when(i > 0)(lambda: store_o(cta, i - 1, o_previous))

    def solve(hk, hq):
        hk = dev.issue(hk, left, transposed(k_tile))
        hq = dev.issue(hq, left, transposed(q_tile))
        if cta.num_state == 2:
            store_previous()
        r = corrected_values(cta, stage, hk, newer=1)

        def correct(w):
            """Makes W, and while it runs the arrays that the two last products add to."""
            w = dev.issue(w, r, transposed(smem.t.at[stage]))
            dr = cta.vector(smem.dr, stage)
            decayed = h * jnp.exp2(smem.g2[stage, CHUNK - 1])
            read = dev.collect(hq, newer=1) * cta.vector(smem.d_scaled, stage)
            return *lax.optimization_barrier((decayed, read)), dev.collect(w), dr

        return pl.run_scoped(correct, accumulator)

    decayed, read, w, dr = pl.run_scoped(solve, accumulator, accumulator)
    written, rounded = (w * dr).astype(cta.dtype), w.astype(cta.dtype)

    def write_and_read(add):
        add(0, written, k_tile)
        add(1, rounded, transposed(smem.p.at[stage]))
        if cta.num_state == 1:
            store_previous()

    h, o = dev.accumulate([decayed, read], write_and_read)
    o = o.astype(cta.dtype)
    h_operand = cta.operand(h)
    dev.release(smem.consumed.at[stage])
    return h, h_operand, o


def state_role(cta: Cta, step: Callable) -> None:
    """The role of a state warpgroup, which repeats `step` over the chunks."""
    plgpu.set_max_registers(cta.config.state_registers, action="increase")
    h = _read_h_0(cta)
    nothing = zeros((ROWS, cta.sizes.tokens), cta.dtype)
    h, _, o = walk(cta, step, (h, cta.operand(h), nothing))
    pl.when(cta.chunks > 0)(lambda: store_o(cta, cta.chunks - 1, o))
    writes = cta.item.is_last
    if cta.span.is_padding is not False:
        pl.when(cta.span.is_padding)(lambda: _clear_padding(cta))
        writes = writes & jnp.logical_not(cta.span.is_padding)
    pl.when(writes)(lambda: _store_final(cta, h))
    plgpu.wait_smem_to_gmem(0)


def _store_final(cta: Cta, h) -> None:
    where, sizes = (cta.span.sequence, cta.head), cta.sizes
    if cta.gmem.final is not None:
        return store_state(cta.gmem.final.at[where], cta.rows, h, sizes.kv_layout)
    assert sizes.slots is not None
    return store_final(*where, cta.rows, h, sizes.kv_layout, sizes.slots, cta.gmem)


def _clear_padding(cta: Cta) -> None:
    def clear(i, _):
        store_o(cta, i, zeros((ROWS, CHUNK), cta.dtype))
        return ()

    lax.fori_loop(0, cta.span.num_chunks, clear, ())


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = Cta(gmem, smem, **static)
    helpers(cta, _prepare)
    pl.when(cta.wg < cta.num_state)(lambda: state_role(cta, _step))


def outputs(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g2_cum: Float[Array, "B HO T64"],
    beta: Float[Array, "B HO T64"],
    t: Float[Array, "B HO T64 C"],
    h_0: Float[Array, "items HO _ _"] | None,
    *,
    items: Items,
    states: PoolStates | None = None,
    rstd: tuple[Float[Array, "B Hq T64"], Float[Array, "B Hk T64"]] | None = None,
    scale: float = 1.0,
    kv_layout: bool = False,
    h_0_kv_layout: bool = False,
    config: Config | None = None,
    interpret=None,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "_ HO _ _"]]:
    """o and the final states, or the pool that they are in; see the module docstring.

    Args:
      q, k, v: bfloat16 or float16, K and V multiples of 64, T a multiple of 8.
      g2_cum, beta, t: of `chunk_gates` and `gated_inverse`.
      h_0: state before each item, float32, None for zeros.
      kv_layout, h_0_kv_layout: whether the final states and h_0 are [K, V]; else [V, K].
      items: what the sequences are cut into; segments need h_0 for every item.
      states: a pool and slots in which the final states go, and from which the initial ones come without h_0.
      rstd: reciprocal norms of q and k, which the rule then takes normalised; t is that of
        gated_inverse(normalize=True). None to take q and k as they are.
      scale: factor of the output, positive.
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    (B, T, Hk, K), (HV, V), HO = k.shape, v.shape[2:], t.shape[1]
    split, tables = items
    N = B if tables is None else tables.cu_seqlens.shape[0] - 1
    config = config or default_config(K, 2 if V % (2 * ROWS) == 0 and K <= 128 else 1)
    n = config.state_warpgroups
    if V % (ROWS * n):
        raise ValueError(f"config.state_warpgroups: expected a divisor of {V // ROWS} row tiles, got {n}")
    sizes = Sizes(
        T=T,
        N=N,
        Hq=q.shape[2],
        Hk=Hk,
        HV=HV,
        HO=HO,
        K=K,
        V=V,
        tiles=V // (ROWS * n),
        split=split,
        scale=scale,
        kv_layout=kv_layout,
        h_0_kv_layout=h_0_kv_layout,
        slots=None if states is None else states.slots,
    )
    q_rstd, k_rstd = rstd or (None, None)
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "g2_cum": g2_cum,
        "beta": beta,
        "t": t,
        "q_rstd": q_rstd,
        "k_rstd": k_rstd,
        "h_0": h_0,
    }
    # With h_0 all reading is done. Without, a sequence may write where another still has to read.
    in_place = states is not None and (states.write_slots is None or h_0 is not None)
    slots = slot_inputs(states)
    updated = {"pool": slots.pop("pool")} if in_place else {}
    final = (N, HO, K, V) if kv_layout else (N, HO, V, K)
    results = launch(
        "outputs",
        functools.partial(_body, config=config, sizes=sizes, interpreted=interpret is not None),
        inputs=inputs | table_inputs(tables) | slots,
        outputs={
            "o": jax.ShapeDtypeStruct((B, T, HO, V), k.dtype),
            "final": None if in_place else jax.ShapeDtypeStruct(final, jnp.float32),
        },
        updated=updated,
        memory=_memory(config, K, k.dtype, packed=tables is not None, normalize=rstd is not None),
        ctas=split.num_items * HO * sizes.tiles,
        warpgroups=config.warpgroups,
        interpret=interpret,
    )
    if states is None:
        return results["o"], results["final"]
    return results["o"], results["pool"] if in_place else states.put(results["final"])
