"""The helper of the walk in `chain`: it loads chunks, masks the tokens of other sequences, and makes P, D and Dr.

Equations and barriers are those of `chain`.
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backward.chain import FLOAT16_LOG2, ROWS, Cta
from pallas_kernels.backward.strengths import mantissa
from pallas_kernels.chunks.gates import gamma_of
from pallas_kernels.device.launch import release_registers
from pallas_kernels.device.layouts import CHUNK, ROW
from pallas_kernels.device.memory import transposed
from pallas_kernels.work.foreign import mask_foreign
from pallas_kernels.work.spans import owned_rows


def _load_keys(cta: Cta, i) -> None:
    """Starts the copies of q, k, gates and beta of a chunk."""
    gmem, smem, row = cta.gmem, cta.smem, cta.span.row
    tokens, stage = pl.ds(cta.chunk_of(i) * CHUNK, CHUNK), lax.rem(i, cta.config.key_stages)
    k_source = gmem.k.at[row, tokens, cta.head_of(cta.sizes.Hk)]
    plgpu.copy_gmem_to_smem(k_source, smem.k.at[stage], smem.loaded_k.at[stage])
    g_source = gmem.g2_cum.at[row, cta.head, tokens]
    plgpu.copy_gmem_to_smem(g_source, smem.g2.at[stage], smem.loaded_k.at[stage])
    beta_source = gmem.beta.at[row, cta.head, tokens]
    plgpu.copy_gmem_to_smem(beta_source, smem.beta.at[stage], smem.loaded_k.at[stage])

    @pl.when(cta.adjoint)
    def _():
        q_source = gmem.q.at[row, tokens, cta.head_of(cta.sizes.Hq)]
        plgpu.copy_gmem_to_smem(q_source, smem.q.at[stage], smem.loaded_q.at[stage])


def _load_others(cta: Cta, i) -> None:
    """Starts the copies of v or do and of T of a chunk."""
    gmem, smem, row = cta.gmem, cta.smem, cta.span.row
    tokens, stage = pl.ds(cta.chunk_of(i) * CHUNK, CHUNK), lax.rem(i, cta.config.stages)
    own_columns = pl.ds(cta.tile * cta.num_state * ROWS, cta.num_state * ROWS)

    def copy(source, destination):
        plgpu.copy_gmem_to_smem(source, destination, smem.loaded.at[stage])

    copy(gmem.t.at[row, cta.head, tokens], smem.t.at[stage])
    pl.when(cta.adjoint)(lambda: copy(gmem.do.at[row, tokens, cta.head, own_columns], smem.x.at[stage]))
    if gmem.v is not None:

        @pl.when(jnp.logical_not(cta.adjoint))
        def _():
            copy(gmem.v.at[row, tokens, cta.head_of(cta.sizes.HV), own_columns], smem.x.at[stage])


def _mask(cta: Cta, i, stage, key_stage) -> None:
    """Masks what the i-th chunk holds of other sequences."""
    smem = cta.smem
    mask_foreign(
        cta.span,
        cta.chunk_of(i),
        (smem.k.at[key_stage], smem.x.at[stage], smem.t.at[stage]),
        tiles_if=(cta.adjoint, smem.q.at[key_stage]),
        square=smem.t.at[stage],
        gates=smem.g2.at[key_stage],
        vectors=(smem.beta.at[key_stage],),
    )


def _prepare(cta: Cta, i, stage, key_stage) -> None:
    """D, Dr and mantissas of a chunk, and P for the adjoints."""
    smem, dev = cta.smem, cta.dev
    gates, beta = smem.g2.at[key_stage], smem.beta.at[key_stage]
    g_rows, g_last = plgpu.load(gates, layout=ROW), gates[CHUNK - 1]
    beta_rows = plgpu.load(beta, layout=ROW)
    exponents, log2_factor = g_rows, math.log2(cta.sizes.scale)
    if cta.sizes.float16:  # 0 before the first token, which may not be the item's
        exponents = jnp.minimum(g_rows - jnp.where(cta.adjoint, cta.first_gate(i, key_stage), 0.0), 0.0)
        g_last = g_last + jnp.where(cta.adjoint, float(FLOAT16_LOG2), 0.0)
        log2_factor += FLOAT16_LOG2
    smem.d.at[stage][...] = jnp.exp2(exponents)
    smem.dr.at[stage][...] = jnp.exp2(g_last - g_rows) * beta_rows
    smem.mantissa.at[stage][...] = mantissa(beta_rows, cta.dtype)

    def scores(acc):
        acc = dev.issue(acc, smem.q.at[key_stage], transposed(smem.k.at[key_stage]))
        _, gamma = gamma_of(dev, gates, log2_factor)
        p = dev.collect(acc) * lax.optimization_barrier(gamma)
        return (p * cta.vector(smem.beta, key_stage)).astype(cta.dtype)  # not before: it would take registers

    @pl.when(cta.adjoint)
    def _():
        smem.p.at[stage][...] = pl.run_scoped(scores, plgpu.ACC((CHUNK, CHUNK), jnp.float32))


def helper(cta: Cta) -> None:
    """The role of the last warpgroup: it loads chunks ahead and prepares them."""
    smem, config, chunks = cta.smem, cta.config, cta.chunks
    stages, key_stages = config.stages, config.key_stages
    release_registers(config.helper_registers, config.state_warpgroups + 1)
    for count, load in ((key_stages, _load_keys), (stages, _load_others)):
        for j in range(count):
            pl.when(j < chunks)(functools.partial(load, cta, jnp.int32(j)))
    # With one stage it waits for the chunk that it has prepared, else for the one before.
    lag = int(stages > 1)

    def is_shared(i):
        return owned_rows(cta.span, cta.chunk_of(i))[2]

    def step(i, _):
        stage, key_stage = lax.rem(i, stages), lax.rem(i, key_stages)
        plgpu.barrier_wait(smem.loaded_k.at[key_stage])
        pl.when(cta.adjoint)(lambda: plgpu.barrier_wait(smem.loaded_q.at[key_stage]))
        if cta.packed:
            waits = (lambda f: f()) if cta.waits_for_helper else pl.when(is_shared(i))

            @waits
            def _():
                plgpu.barrier_wait(smem.loaded.at[stage])
                _mask(cta, i, stage, key_stage)

        _prepare(cta, i, stage, key_stage)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.prepared.at[stage])
        if cta.packed and not cta.waits_for_helper:  # every phase of a barrier has to be waited for
            pl.when(jnp.logical_not(is_shared(i)))(lambda: plgpu.barrier_wait(smem.loaded.at[stage]))

        @pl.when(i >= lag)
        def _():
            done = i - lag
            plgpu.barrier_wait(smem.consumed.at[lax.rem(done, stages)])
            pl.when(done + key_stages < chunks)(lambda: _load_keys(cta, done + key_stages))
            pl.when(done + stages < chunks)(lambda: _load_others(cta, done + stages))

        return ()

    lax.fori_loop(0, chunks, step, ())
    if lag:
        pl.when(chunks > 0)(lambda: plgpu.barrier_wait(smem.consumed.at[lax.rem(chunks - 1, stages)]))
