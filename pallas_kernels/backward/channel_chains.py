"""The two chains of the backward where each channel decays by itself, chunk by chunk, in one launch: states forward
and their cotangents backward.

Both walks are those of `backward.channel_chain`, the roles those of `backward.chains`.

Inputs (GMEM): v [B, T, HV, V], do [B, T, HO, V], beta [B, HO, NT C] f32, those of `chunks.pairs`, h_0 and dh_T
[N, HO, V, K] or [.., K, V], or [items, HO, V, K] f32 (optional), tables int32 (packed rows).
Outputs (GMEM): as of `backward.chains`.
Shared memory, barriers, hardware, limits, source: `backward.channel_chain`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.backward.chain import ROWS, Cta, store_output
from pallas_kernels.backward.chains import Chains, adjoints_role, results_of, states_role
from pallas_kernels.backward.channel_chain import (
    adjoint_step,
    load_chunks,
    start,
    times_keys,
    values,
    walk,
)
from pallas_kernels.backward.strengths import mantissa
from pallas_kernels.chunks.channel_stages import Config, decayed, stages_of, strengths
from pallas_kernels.chunks.pairs import Pairs
from pallas_kernels.device.layouts import CHUNK
from pallas_kernels.device.memory import transposed
from pallas_kernels.device.rows import in_rows
from pallas_kernels.work.halves import tokens_of
from pallas_kernels.work.tables import Items, VisitTables


def _state_step(cta: Cta, i, h) -> jax.Array:
    """The state after a chunk from the one before it. h and u leave for memory."""
    gmem, smem, dev = cta.gmem, cta.smem, cta.dev
    early, late = stages_of(cta, i)
    accumulator = plgpu.ACC((ROWS, CHUNK), jnp.float32)
    plgpu.barrier_wait(smem.early.at[early])

    def solve(read):
        read = times_keys(cta, read, i, smem.first_keys.at[early], h, gmem.h)
        v_t = in_rows(dev, values(cta, i, early).astype(jnp.float32))
        return (v_t - dev.collect(read)).astype(cta.dtype)

    r = pl.run_scoped(solve, accumulator)

    def correct(w):
        w = dev.issue(w, r, transposed(smem.t.at[early]))
        beta = strengths(cta, i, early)
        start = lax.optimization_barrier(decayed(cta, early, h))
        return dev.collect(w), beta, start

    w, beta, start = pl.run_scoped(correct, accumulator)
    plgpu.barrier_wait(smem.late.at[late])

    def write(add):
        add(0, (w * beta).astype(cta.dtype), smem.last_keys.at[late])
        dev.release(smem.early_read.at[early])
        u = (w * mantissa(beta, cta.dtype)).astype(cta.dtype)
        store_output(cta, u, gmem.u.at[cta.visit_of(i), cta.head])

    (after,) = dev.accumulate([start], write)
    dev.release(smem.late_read.at[late])
    return after


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = Cta(gmem, smem, **static)
    forward, backward = (functools.partial(walk, cta, step=step) for step in (_state_step, adjoint_step))
    pl.when(cta.wg == cta.num_state)(lambda: load_chunks(cta))
    pl.when((cta.wg < cta.num_state) & jnp.logical_not(cta.adjoint))(lambda: states_role(cta, forward))
    pl.when((cta.wg < cta.num_state) & cta.adjoint)(lambda: adjoints_role(cta, backward))


def channel_chains(
    v: Float[Array, "B T HV V"],
    do: Float[Array, "B T HO V"],
    beta: Float[Array, "B HO T64"],
    pairs: Pairs,
    h_0: Float[Array, "starts HO _ _"] | None,
    dh_T: Float[Array, "ends HO _ _"] | None,
    visits: VisitTables | None,
    *,
    kv_layout: bool = False,
    with_dh_0: bool = True,
    items: Items | None = None,
    of_halves: bool = False,
    config: Config | None = None,
    interpret=None,
) -> Chains:
    """Both chains over all chunks; see the module docstring.

    Args:
      v, do: bfloat16, V a multiple of 64, T a multiple of 8. v are the values that beta multiplies.
      beta: write strengths, head-major.
      pairs: of `channel_pairs`.
      h_0, dh_T, visits, kv_layout, with_dh_0, items: as for `chains`.
      of_halves: whether tokens are two rows, of which v and do are the second ones', as for `channel_pairs`; dv has
        both.
    """
    inputs = {"v": v, "do": do, "beta": beta, "h_0": h_0, "dh_T": dh_T}
    outputs = functools.partial(results_of, do=do, num_visits=pairs.gl.shape[0], with_dh_0=with_dh_0)
    options: dict[str, Any] = dict(kv_layout=kv_layout, config=config, interpret=interpret, chains=2)
    options |= dict(tokens=tokens_of(of_halves))
    results: dict[str, Any] = start("channel_chains", _body, pairs, inputs, outputs, items, visits, **options)
    return Chains._make(results.get(name) for name in Chains._fields)
