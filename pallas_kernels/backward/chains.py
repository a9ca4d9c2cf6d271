"""The two chains of the backward, chunk by chunk, in one launch: states forward and their cotangents backward.

Both walks are those of `backward.chain`. An item is a sequence, or one of its segments, with h at its start and dh at
its end given for each.

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], v [B, T, HV, V], do [B, T, HO, V], g2_cum and beta [B, HO, NT C] f32,
t [B, HO, NT C, C], h_0 and dh_T [N, HO, V, K] or [.., K, V], or [items, HO, V, K] f32 (optional), tables int32
(packed rows).
Outputs (GMEM): h, dh [visits, HO, V, K]: the state before and the cotangent after each chunk; u [visits, HO, C, V];
dv [B, T, HO, V]; dh_0 [N, HO, V, K] or [.., K, V] f32 (optional).
Shared memory: `backward.chain`, 212 KB at K = V = 128 with two state warpgroups. Barriers, hardware, limits, source:
there too.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.backward.chain import (
    ROWS,
    Config,
    Cta,
    Sizes,
    adjoint_step,
    start,
    store_dv,
    store_output,
    times_keys,
    wait_loaded,
    walk,
)
from pallas_kernels.backward.chain_helper import helper
from pallas_kernels.device.layouts import CHUNK, WGMMA, zeros
from pallas_kernels.device.memory import load_state, store_state, transposed
from pallas_kernels.work.tables import Items, VisitTables


def _state_step(cta: Cta, i, stage, key_stage, h) -> jax.Array:
    """The state after a chunk from the one before it. h and u leave for memory."""
    gmem, smem, dev = cta.gmem, cta.smem, cta.dev
    k_tile = smem.k.at[key_stage]
    accumulator = plgpu.ACC((ROWS, CHUNK), jnp.float32)
    wait_loaded(cta, stage, key_stage)

    def solve(read):
        read = times_keys(cta, read, i, k_tile, h, gmem.h)
        v_t = plgpu.load(cta.x_tile(stage), layout=WGMMA)
        if not cta.packed:
            plgpu.barrier_wait(smem.prepared.at[stage])
        d = cta.vector(smem.d, stage)
        return (v_t.astype(jnp.float32) - d * dev.collect(read)).astype(cta.dtype)

    r = pl.run_scoped(solve, accumulator)

    def correct(w):
        w = dev.issue(w, r, transposed(smem.t.at[stage]))
        dr = cta.vector(smem.dr, stage)
        decayed = lax.optimization_barrier(h * jnp.exp2(smem.g2[key_stage, CHUNK - 1]))
        return dev.collect(w), dr, decayed

    w, dr, decayed = pl.run_scoped(correct, accumulator)

    def write(add):
        add(0, (w * dr).astype(cta.dtype), k_tile)
        u = (w * cta.vector(smem.mantissa, stage)).astype(cta.dtype)
        store_output(cta, u, gmem.u.at[cta.visit_of(i), cta.head])

    return dev.accumulate([decayed], write)[0]


def read_state(cta: Cta, source: Any) -> jax.Array:
    """This warpgroup's rows of a state in memory, [V, K] of an item, or [V, K] or [K, V] of a sequence; else
    zeros."""
    if source is None:
        return zeros((ROWS, cta.sizes.K), jnp.float32)
    of_items = cta.sizes.split.segment_chunks is not None
    n = cta.item.index if of_items else cta.span.sequence
    source = source.at[jnp.minimum(n, source.shape[0] - 1), cta.head]  # the padding reads any
    return load_state(source, cta.rows, cta.sizes.kv_layout and not of_items)


def states_role(cta: Cta, walk: Callable) -> None:
    """The role of a state warpgroup that walks forward: walk(start) from the state before the item."""
    plgpu.set_max_registers(cta.config.state_registers, action="increase")
    walk(read_state(cta, cta.gmem.h_0))
    plgpu.wait_smem_to_gmem(0)


def adjoints_role(cta: Cta, walk: Callable) -> None:
    """The role of a state warpgroup that walks backward: walk(end) from the cotangent after the item."""
    plgpu.set_max_registers(cta.config.state_registers, action="increase")
    dh = walk(read_state(cta, cta.gmem.dh_T))
    if cta.gmem.dh_0 is not None:
        writes = cta.item.is_first
        if cta.packed:
            writes = writes & jnp.logical_not(cta.span.is_padding)
        dh_0 = cta.gmem.dh_0.at[cta.span.sequence, cta.head]
        pl.when(writes)(lambda: store_state(dh_0, cta.rows, dh, cta.sizes.kv_layout))
    if cta.packed:
        pl.when(cta.span.is_padding)(lambda: _clear_padding(cta))
    plgpu.wait_smem_to_gmem(0)


def _clear_padding(cta: Cta) -> None:
    def clear(i, _):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # no state is stored between
        store_dv(cta, cta.span.first_chunk + i, zeros((ROWS, CHUNK), cta.dtype))
        return ()

    lax.fori_loop(0, cta.span.num_chunks, clear, ())


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = Cta(gmem, smem, **static)
    pl.when(cta.wg == cta.num_state)(lambda: helper(cta))
    forward, backward = (functools.partial(walk, cta, step=step) for step in (_state_step, adjoint_step))
    pl.when((cta.wg < cta.num_state) & jnp.logical_not(cta.adjoint))(lambda: states_role(cta, forward))
    pl.when((cta.wg < cta.num_state) & cta.adjoint)(lambda: adjoints_role(cta, backward))


class Chains(NamedTuple):
    """The arrays that the gradients are made of."""

    h: Float[Array, "visits HO V K"]
    u: Float[Array, "visits HO C V"]
    """W times the mantissas of the write strengths."""
    dh: Float[Array, "visits HO V K"]
    dv: Float[Array, "B R HO V"]
    """R is T, or twice that where tokens are two rows."""
    dh_0: Float[Array, "N HO _ _"] | None


def results_of(sizes: Sizes, *, do: Any, num_visits: int, with_dh_0: bool) -> dict[str, Any]:
    """Shapes and dtypes of the results by name, None for dh_0 where it is not asked for."""
    N, HO, K, V, S = sizes.N, sizes.HO, sizes.K, sizes.V, jax.ShapeDtypeStruct
    states = S((num_visits, HO, V, K), do.dtype)
    dh_0 = S((N, HO, *((K, V) if sizes.kv_layout else (V, K))), jnp.float32)
    return {
        "h": states,
        "u": S((num_visits, HO, CHUNK, V), do.dtype),
        "dh": states,
        "dv": S((do.shape[0], CHUNK // sizes.tokens * do.shape[1], *do.shape[2:]), do.dtype),
        "dh_0": dh_0 if with_dh_0 else None,
    }


def chains(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    do: Float[Array, "B T HO V"],
    g2_cum: Float[Array, "B HO T64"],
    beta: Float[Array, "B HO T64"],
    t: Float[Array, "B HO T64 C"],
    h_0: Float[Array, "starts HO _ _"] | None,
    dh_T: Float[Array, "ends HO _ _"] | None,
    visits: VisitTables | None,
    *,
    scale: float,
    kv_layout: bool = False,
    with_dh_0: bool = True,
    items: Items | None = None,
    config: Config | None = None,
    interpret=None,
) -> Chains:
    """Both chains over all chunks; see the module docstring.

    Args:
      q, k, v, do: bfloat16 or float16, K and V multiples of 64, T a multiple of 8.
      g2_cum, beta, t: of `chunk_gates` and `gated_inverse`.
      h_0: initial states, float32, None for zeros; with items the states before each, [V, K].
      dh_T: cotangents of the final states, float32, None for zeros; with items those after each item, [V, K].
      visits: tables of packed rows (B = 1), None when every row of the batch is one sequence.
      scale: factor of the output.
      kv_layout: whether h_0, dh_T and dh_0 of sequences are [K, V]; else [V, K].
      with_dh_0: whether the cotangents of the initial states are written.
      items: segments, None for whole sequences.
    """
    inputs = {"q": q, "k": k, "v": v, "do": do, "g2_cum": g2_cum, "beta": beta, "t": t}
    inputs |= {"h_0": h_0, "dh_T": dh_T}
    num_visits = q.shape[0] * -(-q.shape[1] // CHUNK) if visits is None else visits.chunk.shape[0]
    outputs = functools.partial(results_of, do=do, num_visits=num_visits, with_dh_0=with_dh_0)
    options: dict[str, Any] = dict(scale=scale, kv_layout=kv_layout, config=config, interpret=interpret)
    results: dict[str, Any] = start("chains", _body, inputs, outputs, items, visits, chains=2, **options)
    return Chains._make(results.get(name) for name in Chains._fields)
