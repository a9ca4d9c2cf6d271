"""The effect of a segment on a state: the walk of `forward.walk` without outputs, from zeros and from the identity.

The state after a segment is h M^T + E, where h [V, K] is the (transposed) state before it. E is the state that a walk
from zeros ends with. M^T [K, K] is what a walk from the identity ends with, all of whose values are zeros: its rows
lie after those of E, as rows V to V + K of one state. Its diagonal leaves in float32, apart from the rest.

Inputs (GMEM): k [B, T, Hk, K], v [B, T, HV, V], g2_cum and beta [B, HO, NT C] f32, t [B, HO, NT C, C], k_rstd [B,
Hk, NT C] f32 (optional), tables int32 (packed rows).
Outputs (GMEM): e [items, HO, V, K] f32; of M^T its diagonal [items, HO, K] f32 and the rest [items, HO, K, K]; those
of a sequence's last segment are not written.
Shared memory: `_memory`. Barriers, hardware, limits, source: `forward.walk`.
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

from pallas_kernels.device.launch import launch
from pallas_kernels.device.layouts import CHUNK, ROW, iota, zeros
from pallas_kernels.device.memory import Barriers, Buffer, Memory, transposed
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
from pallas_kernels.work.residuals import Transition
from pallas_kernels.work.tables import Items, table_inputs


def default_config(K: int, state_warpgroups: int) -> Config:
    """Most stages that fit beside the operands that K needs."""
    return Config.most_stages(state_warpgroups, K > 128, lambda config: _memory(config, K, jnp.bfloat16))


def _memory(config: Config, K: int, dtype, *, normalize: bool = True) -> Memory:
    """Shared memory of a CTA."""
    n, stages = config.state_warpgroups, config.stages
    vector = Buffer((stages, CHUNK))
    return {
        "k": Buffer((stages, CHUNK, K), dtype, swizzle=128),
        "v": Buffer((stages, CHUNK, ROWS * n), dtype, swizzle=128),
        "t": Buffer((stages, CHUNK, CHUNK), dtype, swizzle=128),
        "out": Buffer((n, ROWS, K), dtype, swizzle=128),
        "h": Buffer((n, ROWS, K), dtype, swizzle=128) if config.state_in_smem else None,
        "g2": vector,
        "beta": vector,
        "d": vector,
        "d_scaled": None,
        "dr": vector,
        "q_rstd": None,
        "k_rstd": vector if normalize else None,
        "loaded": Barriers(arrivals=6 if normalize else 5, count=stages),
        "prepared": Barriers(arrivals=1, count=stages),
        "consumed": Barriers(arrivals=n, count=stages),
        "turn": Barriers(arrivals=1, count=2) if n == 2 else None,
    }


def _prepare(cta: Cta, stage) -> None:
    prepare_vectors(cta, stage, plgpu.load(cta.smem.g2.at[stage], layout=ROW))


def of_e(cta: Cta) -> jax.Array:
    """Whether this warpgroup's rows are rows of E, and not of M^T."""
    return cta.row_tile < cta.sizes.V // ROWS


def _on_diagonal(cta: Cta) -> jax.Array:
    """A mask of the entries of this warpgroup's rows on the diagonal of M^T, whose row r is row V + r."""
    shape = (ROWS, cta.sizes.K)
    return iota(shape, 0) + cta.row_tile * ROWS - cta.sizes.V == iota(shape, 1)


def _start(cta: Cta) -> jax.Array:
    """Rows of [0 | I]."""
    return jnp.where(_on_diagonal(cta), 1.0, zeros((ROWS, cta.sizes.K), jnp.float32))


def _step(cta: Cta, i, carry):
    """One chunk: the state after it, as numbers and as an operand."""
    h, h_operand = carry
    smem, dev = cta.smem, cta.dev
    stage = lax.rem(i, cta.config.stages)
    k_tile = smem.k.at[stage]
    left = smem.h.at[cta.wg] if cta.config.state_in_smem else h_operand
    accumulator = plgpu.ACC((ROWS, CHUNK), jnp.float32)
    wait_for_chunk(cta, stage)

    def values(v_t):
        return jnp.where(of_e(cta), v_t, jnp.zeros((), cta.dtype))

    def solve(hk):
        hk = dev.issue(hk, left, transposed(k_tile))
        r = corrected_values(cta, stage, hk, 0, values)

        def correct(w):
            """Makes W, and while it runs the array that the last product adds to."""
            w = dev.issue(w, r, transposed(smem.t.at[stage]))
            dr = cta.vector(smem.dr, stage)
            decayed = h * jnp.exp2(smem.g2[stage, CHUNK - 1])
            return lax.optimization_barrier(decayed), dev.collect(w), dr

        return pl.run_scoped(correct, accumulator)

    decayed, w, dr = pl.run_scoped(solve, accumulator)
    written = (w * dr).astype(cta.dtype)
    (h,) = dev.accumulate([decayed], lambda add: add(0, written, k_tile))
    h_operand = cta.operand(h)
    dev.release(smem.consumed.at[stage])
    return h, h_operand


def _write(cta: Cta, h) -> None:
    """Rows of E as they are, rows of M^T without the diagonal rounded and through shared memory."""
    gmem, item, out = cta.gmem, cta.item.index, cta.smem.out.at[cta.wg]

    @pl.when(of_e(cta))
    def _():
        gmem.e.at[item, cta.head, cta.rows][...] = h

    @pl.when(cta.row_tile >= cta.sizes.V // ROWS)
    def _():
        m_rows, on_diagonal = pl.ds(cta.row_tile * ROWS - cta.sizes.V, ROWS), _on_diagonal(cta)
        gmem.diagonal.at[item, cta.head, m_rows][...] = jnp.sum(jnp.where(on_diagonal, h, 0.0), axis=1)
        out[...] = jnp.where(on_diagonal, 0.0, h).astype(cta.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, gmem.rest.at[item, cta.head, m_rows])


def state_role(cta: Cta, step: Callable) -> None:
    """The role of a state warpgroup, which repeats `step` over the chunks."""
    plgpu.set_max_registers(cta.config.state_registers, action="increase")
    h = _start(cta)
    h, _ = walk(cta, step, (h, cta.operand(h)))
    writes = jnp.logical_not(cta.item.is_last)
    if cta.packed:
        writes = writes & jnp.logical_not(cta.span.is_padding)
    pl.when(writes)(lambda: _write(cta, h))
    plgpu.wait_smem_to_gmem(0)


def skip_last(cta: Cta) -> None:
    """Leaves a sequence's last segment out: nothing follows it."""
    cta.chunks = jnp.where(cta.item.is_last, 0, cta.chunks)


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = Cta(gmem, smem, **static)
    skip_last(cta)
    helpers(cta, _prepare)
    pl.when(cta.wg < cta.num_state)(lambda: state_role(cta, _step))


class Transitions(NamedTuple):
    """The effect of every segment on a state; see the module docstring."""

    e: Float[Array, "items HO V K"]
    m_t: Transition


def segment_transitions(
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g2_cum: Float[Array, "B HO T64"],
    beta: Float[Array, "B HO T64"],
    t: Float[Array, "B HO T64 C"],
    *,
    items: Items,
    k_rstd: Float[Array, "B Hk T64"] | None = None,
    config: Config | None = None,
    interpret=None,
) -> Transitions:
    """The effect on a state of every segment but a sequence's last; see the module docstring.

    Args: those of `outputs`; items are segments.
    """
    (B, T, Hk, K), (HV, V), HO = k.shape, v.shape[2:], t.shape[1]
    split, tables = items
    N = B if tables is None else tables.cu_seqlens.shape[0] - 1
    all_rows = V + K
    if config is None:
        pairs = V % (2 * ROWS) == 0 and all_rows % (2 * ROWS) == 0 and K <= 128
        config = default_config(K, 2 if pairs else 1)
    n = config.state_warpgroups
    if V % (ROWS * n) or all_rows % (ROWS * n):
        raise ValueError(f"config.state_warpgroups: expected a divisor of {V // ROWS} row tiles, got {n}")
    tiles = all_rows // (ROWS * n)
    sizes = Sizes(T=T, N=N, Hq=HO, Hk=Hk, HV=HV, HO=HO, K=K, V=V, tiles=tiles, split=split)
    inputs = {"q": None, "k": k, "v": v, "g2_cum": g2_cum, "beta": beta, "t": t}
    inputs |= {"q_rstd": None, "k_rstd": k_rstd}
    results = launch(
        "segment_transitions",
        functools.partial(_body, config=config, sizes=sizes, interpreted=interpret is not None),
        inputs=inputs | table_inputs(tables),
        outputs={
            "e": jax.ShapeDtypeStruct((split.num_items, HO, V, K), jnp.float32),
            "diagonal": jax.ShapeDtypeStruct((split.num_items, HO, K), jnp.float32),
            "rest": jax.ShapeDtypeStruct((split.num_items, HO, K, K), k.dtype),
        },
        memory=_memory(config, K, k.dtype, normalize=k_rstd is not None),
        ctas=split.num_items * HO * tiles,
        warpgroups=config.warpgroups,
        reduction_bytes=0,  # the sum stays inside a warp
        interpret=interpret,
    )
    return Transitions(results["e"], Transition(results["diagonal"], results["rest"]))
