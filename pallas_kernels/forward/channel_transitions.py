"""The effect of a segment on a state where each channel decays by itself: `forward.transitions` on the walk of
`forward.channel_walk`.

Inputs (GMEM): v [B, T, HV, V], beta [B, HO, NT C] f32, those of `chunks.pairs` (t, kg, kr, gl), tables int32 (packed
rows).
Outputs (GMEM): as of `forward.transitions`.
Shared memory: `_memory`. Barriers, hardware, limits: `forward.channel_walk`.
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
from pallas_kernels.forward.transitions import Transitions, of_e, skip_last, state_role
from pallas_kernels.forward.walk import ROWS, Cta, Sizes
from pallas_kernels.work.halves import tokens_of
from pallas_kernels.work.residuals import Transition
from pallas_kernels.work.tables import Items, VisitTables, table_inputs


def default_config(K: int, state_warpgroups: int) -> Config:
    """The configuration of most stages that fit."""
    return Config.most_stages(state_warpgroups, lambda x: _memory(x, K, jnp.bfloat16))


def _memory(config: Config, K: int, dtype, tokens: int = CHUNK) -> Memory:
    """Shared memory of a CTA."""
    out = Buffer((config.state_warpgroups, ROWS, K), dtype, swizzle=128)
    return {**stages_memory(config, K, dtype, reads=False, tokens=tokens), "out": out}


def _step(cta: Cta, i, carry):
    """One chunk: the state after it, as numbers and as an operand."""
    h, h_operand = carry
    smem, dev = cta.smem, cta.dev
    early, late = stages_of(cta, i)
    accumulator = plgpu.ACC((ROWS, CHUNK), jnp.float32)
    wait_for_chunk(cta, early)

    def values(v_t):
        return jnp.where(of_e(cta), v_t, jnp.zeros((), cta.dtype))

    def solve(hk):
        hk = dev.issue(hk, h_operand, transposed(smem.kg.at[early]))
        r = corrected_values(cta, i, early, hk, 0, values)

        def correct(w):
            """Makes W, and while it runs the array that the last product adds to."""
            w = dev.issue(w, r, transposed(smem.t.at[early]))
            beta = strengths(cta, i, early)
            return lax.optimization_barrier(decayed(cta, early, h)), dev.collect(w), beta

        return pl.run_scoped(correct, accumulator)

    start, w, beta = pl.run_scoped(solve, accumulator)
    written = (w * beta).astype(cta.dtype)
    plgpu.barrier_wait(smem.late.at[late])

    def write(add):
        add(0, written, smem.kr.at[late])
        dev.release(smem.early_read.at[early])

    (h,) = dev.accumulate([start], write)
    h_operand = cta.operand(h)
    dev.release(smem.late_read.at[late])
    return h, h_operand


def channel_transitions(
    v: Float[Array, "B T HV V"],
    beta: Float[Array, "B HO T64"],
    pairs: Pairs,
    *,
    items: Items,
    visits: VisitTables | None,
    of_halves: bool = False,
    config: Config | None = None,
    interpret=None,
) -> Transitions:
    """The effect on a state of every segment but a sequence's last; see the module docstring.

    Args: those of `channel_outputs`; items are segments.
    """
    (B, T, HV, V), (HO, K), (split, tables) = v.shape, pairs.gl.shape[1:], items
    N = B if tables is None else tables.cu_seqlens.shape[0] - 1
    all_rows = V + K
    config = config or default_config(K, 2 if V % (2 * ROWS) == 0 and all_rows % (2 * ROWS) == 0 else 1)
    n = config.state_warpgroups
    if V % (ROWS * n) or all_rows % (ROWS * n):
        raise ValueError(f"config.state_warpgroups: expected a divisor of {V // ROWS} row tiles, got {n}")
    tiles = all_rows // (ROWS * n)
    tokens, heads = tokens_of(of_halves), dict(Hq=HO, Hk=HO, HV=HV, HO=HO)
    sizes = Sizes(T * (CHUNK // tokens), N, **heads, K=K, V=V, tiles=tiles, split=split, tokens=tokens)
    inputs = {"v": v, "beta": beta, "t": pairs.t, "kg": pairs.kg, "kr": pairs.kr, "gl": pairs.gl}
    state = functools.partial(state_role, step=_step)
    results = launch(
        "channel_transitions",
        functools.partial(
            body,
            state=state,
            prepare=skip_last,
            config=config,
            sizes=sizes,
            interpreted=interpret is not None,
        ),
        inputs=inputs | table_inputs(tables, visits),
        outputs={
            "e": jax.ShapeDtypeStruct((split.num_items, HO, V, K), jnp.float32),
            "diagonal": jax.ShapeDtypeStruct((split.num_items, HO, K), jnp.float32),
            "rest": jax.ShapeDtypeStruct((split.num_items, HO, K, K), v.dtype),
        },
        memory=_memory(config, K, v.dtype, tokens),
        ctas=split.num_items * HO * tiles,
        warpgroups=config.warpgroups,
        reduction_bytes=0,  # the sum stays inside a warp
        interpret=interpret,
    )
    return Transitions(results["e"], Transition(results["diagonal"], results["rest"]))
