"""Outputs and final states where each channel decays by itself: `forward.channel_walk`, which also reads the state.

    O^T = h qg^T + W P^T

The order of products is that of `forward.outputs`.

Inputs (GMEM): v [B, T, HV, V], beta [B, HO, NT C] f32, those of `chunks.pairs` (t, p, kg, qg, kr, gl), h_0 [items,
HO, V, K] or [.., K, V] f32 (optional), tables int32 (packed rows).
Outputs (GMEM), and a pool in place of h_0 and the final states: as of `forward.outputs`.
Shared memory: `_memory`, 179 KB at K = V = 128 with two state warpgroups.
Barriers, hardware, limits: `forward.channel_walk`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.chunks.channel_stages import Config, decayed, stages_of, strengths
from pallas_kernels.chunks.pairs import Pairs
from pallas_kernels.device.launch import launch
from pallas_kernels.device.layouts import CHUNK
from pallas_kernels.device.memory import Buffer, Memory, transposed
from pallas_kernels.forward.channel_walk import body, corrected_values, stages_memory, wait_for_chunk
from pallas_kernels.forward.outputs import state_role, store_o
from pallas_kernels.forward.walk import ROWS, Cta, Sizes
from pallas_kernels.work.halves import tokens_of
from pallas_kernels.work.slots import PoolStates, slot_inputs
from pallas_kernels.work.tables import Items, VisitTables, table_inputs


def default_config(K: int, state_warpgroups: int) -> Config:
    """The configuration of most stages that fit."""
    return Config.most_stages(state_warpgroups, lambda x: _memory(x, K, jnp.bfloat16))


def _memory(config: Config, K: int, dtype, *, packed: bool = False, tokens: int = CHUNK) -> Memory:
    """Shared memory of a CTA."""
    out = Buffer((config.state_warpgroups, tokens, ROWS), dtype, swizzle=128, also_flat=packed)
    return {**stages_memory(config, K, dtype, reads=True, tokens=tokens), "out": out}


def _step(cta: Cta, i, carry):
    """One chunk: the state after it, as numbers and as an operand, and its O."""
    h, h_operand, o_previous = carry
    smem, dev = cta.smem, cta.dev
    early, late = stages_of(cta, i)
    accumulator, read = (plgpu.ACC((ROWS, n), jnp.float32) for n in (CHUNK, cta.sizes.tokens))
    wait_for_chunk(cta, early)

    def store_previous():
        pl.when(i > 0)(lambda: store_o(cta, i - 1, o_previous))

    def solve(hk, hq):
        hk = dev.issue(hk, h_operand, transposed(smem.kg.at[early]))
        hq = dev.issue(hq, h_operand, transposed(smem.qg.at[early]))
        if cta.num_state == 2:
            store_previous()
        r = corrected_values(cta, i, early, hk, newer=1)

        def correct(w):
            """Makes W, and while it runs the arrays that the two last products add to."""
            w = dev.issue(w, r, transposed(smem.t.at[early]))
            beta = strengths(cta, i, early)
            starts = decayed(cta, early, h), dev.collect(hq, newer=1)
            return *lax.optimization_barrier(starts), dev.collect(w), beta

        return pl.run_scoped(correct, accumulator)

    start, read, w, beta = pl.run_scoped(solve, accumulator, read)
    written, rounded = (w * beta).astype(cta.dtype), w.astype(cta.dtype)
    plgpu.barrier_wait(smem.late.at[late])

    def write_and_read(add):
        add(0, written, smem.kr.at[late])
        add(1, rounded, transposed(smem.p.at[late]))
        dev.release(smem.early_read.at[early])
        if cta.num_state == 1:
            store_previous()

    h, o = dev.accumulate([start, read], write_and_read)
    o = o.astype(cta.dtype)
    h_operand = cta.operand(h)
    dev.release(smem.late_read.at[late])
    return h, h_operand, o


def channel_outputs(
    v: Float[Array, "B T HV V"],
    beta: Float[Array, "B HO T64"],
    pairs: Pairs,
    h_0: Float[Array, "items HO _ _"] | None,
    *,
    items: Items,
    visits: VisitTables | None,
    of_halves: bool = False,
    states: PoolStates | None = None,
    kv_layout: bool = False,
    h_0_kv_layout: bool = False,
    config: Config | None = None,
    interpret=None,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "_ HO _ _"]]:
    """o and the final states, or the pool that they are in; see the module docstring.

    Args:
      v: bfloat16 or float16, V a multiple of 64, T a multiple of 8.
      of_halves: whether tokens are two rows, of which v and o are the second ones', as for `channel_pairs`.
      beta: write strengths, head-major.
      pairs: of `channel_pairs`.
      visits: of packed rows, as for `channel_pairs`.
      h_0, items, states, kv_layout, h_0_kv_layout: as for `outputs`.
    """
    (B, T, HV, V), (HO, K), (split, tables) = v.shape, pairs.gl.shape[1:], items
    N = B if tables is None else tables.cu_seqlens.shape[0] - 1
    tokens = tokens_of(of_halves)
    config = config or default_config(K, 2 if V % (2 * ROWS) == 0 else 1)
    n = config.state_warpgroups
    if V % (ROWS * n):
        raise ValueError(f"config.state_warpgroups: expected a divisor of {V // ROWS} row tiles, got {n}")
    sizes = Sizes(
        T=T * (CHUNK // tokens),
        N=N,
        Hq=HO,
        Hk=HO,
        HV=HV,
        HO=HO,
        K=K,
        V=V,
        tiles=V // (ROWS * n),
        split=split,
        kv_layout=kv_layout,
        h_0_kv_layout=h_0_kv_layout,
        slots=None if states is None else states.slots,
        tokens=tokens,
    )
    # With h_0 all reading is done. Without, a sequence may write where another still has to read.
    in_place = states is not None and (states.write_slots is None or h_0 is not None)
    slots = slot_inputs(states)
    updated = {"pool": slots.pop("pool")} if in_place else {}
    final = (N, HO, K, V) if kv_layout else (N, HO, V, K)
    state = functools.partial(state_role, step=_step)
    results = launch(
        "channel_outputs",
        functools.partial(
            body,
            state=state,
            prepare=lambda cta: None,
            config=config,
            sizes=sizes,
            interpreted=interpret is not None,
        ),
        inputs={"v": v, "beta": beta, **pairs._asdict(), "h_0": h_0} | table_inputs(tables, visits) | slots,
        outputs={
            "o": jax.ShapeDtypeStruct((B, T, HO, V), v.dtype),
            "final": None if in_place else jax.ShapeDtypeStruct(final, jnp.float32),
        },
        updated=updated,
        memory=_memory(config, K, v.dtype, packed=tables is not None, tokens=tokens),
        ctas=split.num_items * HO * sizes.tiles,
        warpgroups=config.warpgroups,
        interpret=interpret,
    )
    if states is None:
        return results["o"], results["final"]
    return results["o"], results["pool"] if in_place else states.put(results["final"])
