"""The state at the start of every segment, or the adjoint state at its end, from what each segment does to them.

    S_0 = s0;       S_{i+1} = S_i M_i^T + N_i             with S and dS [V, K] transposed as in recurrence.py
    dS_last = s0;   dS_{last-1} = N_last,  dS_{i-1} = dS_i M_i + N_i   (backwards)

Backwards N is what a segment adds to the adjoint at its start; that of the last segment holds s0's part already, so
that its M, which the forward does not need, is not needed here either.

Inputs (GMEM): n [items, HO, V, K] float32, m_t [items, HO, K, K] bfloat16 or float16, s0 [N, HO, V, K] or [.., K, V]
float32 (optional), first_item int32 (packed rows only): sequence i owns items first_item[i] to first_item[i + 1] - 1.
Outputs (GMEM): start (or end) [items, HO, V, K] float32. Items of no sequence are not written.
Grid: one CTA of one warpgroup for each (sequence, head, 64 rows of S); it walks over the segments.
Shared memory: `stages` x (2 K^2 + 256 K) bytes.
Numerics: S and N float32; S is rounded to the operand dtype for the product, as between chunks.
Hardware: compute capability 9.0. Limits: K a multiple of 64 up to 256.
Source: the look-back of chunked scans; FlashInfer's and FlashQLA's context-parallel fix-up.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import (
    COMPILER_PARAMS,
    SMEM_LIMIT,
    WGMMA,
    grid_index,
    launch,
    load_state,
    take,
    tiling,
    transposed,
    zeros,
)
from pallas_kernels.device import Device

ROWS = 64


def _stages(K: int) -> int:
    return max(1, min(3, (SMEM_LIMIT - 1024) // (2 * K * K + 4 * ROWS * K)))


def _body(*refs, HO, V, K, per_row, has_s0, kv_layout, backwards, stages, interpreted):
    inputs = list(refs)
    n_gmem, m_gmem = take(inputs), take(inputs)
    s0_gmem, first_gmem = take(inputs, has_s0), take(inputs, per_row is None)
    start_gmem, n_smem, m_smem, loaded = inputs
    dev = Device(interpreted)
    row_tile = lax.rem(grid_index(), V // ROWS)
    head = lax.rem(lax.div(grid_index(), V // ROWS), HO)
    sequence = lax.div(grid_index(), HO * (V // ROWS))
    rows = pl.ds(row_tile * ROWS, ROWS)
    if per_row is None:
        first, count = first_gmem[sequence], first_gmem[sequence + 1] - first_gmem[sequence]
    else:
        first, count = sequence * per_row, jnp.int32(per_row)

    def item(i):
        """The i-th item that is walked over."""
        return first + (count - 1 - i if backwards else i)

    def load(i):
        stage = lax.rem(i, stages)
        plgpu.copy_gmem_to_smem(n_gmem.at[item(i), head, rows], n_smem.at[stage], loaded.at[stage])
        plgpu.copy_gmem_to_smem(m_gmem.at[item(i), head], m_smem.at[stage], loaded.at[stage])

    for j in range(stages):
        pl.when(j < count - 1)(functools.partial(load, jnp.int32(j)))
    if not has_s0:
        s = zeros((ROWS, K), jnp.float32)
    else:
        s = load_state(s0_gmem.at[sequence, head], rows, kv_layout)

    def store(i, s):
        """Leaves through the tile of N, which has been read, while the product runs."""
        tile = n_smem.at[lax.rem(i, stages)]
        tile[...] = s
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, start_gmem.at[item(i), head, rows])

    def step(i, s, multiply=True):
        stage = lax.rem(i, stages)
        plgpu.barrier_wait(loaded.at[stage])
        n = plgpu.load(n_smem.at[stage], layout=WGMMA)
        if multiply:
            m_tile = transposed(m_smem.at[stage]) if backwards else m_smem.at[stage]
            rounded, start = s.astype(m_gmem.dtype), s

            def walk(add):
                add(0, rounded, m_tile)
                store(i, start)

            (s,) = dev.accumulate([n], walk)
        else:
            store(i, s)
            s = n
        newest = min(stages - 1, 1)  # stores that may still read their tiles, where there are others to load
        plgpu.wait_smem_to_gmem(newest, wait_read_only=True)
        done = i - newest
        pl.when((done >= 0) & (done + stages < count - 1))(lambda: load(done + stages))
        return s

    begin = 0
    if backwards:  # not through M; a loop of one step, for there may be none
        begin = jnp.clip(count - 1, 0, 1)
        s = lax.fori_loop(0, begin, functools.partial(step, multiply=False), s)
    s = lax.fori_loop(begin, count - 1, step, s)
    store(count - 1, s)
    plgpu.wait_smem_to_gmem(0)


def segment_states(
    n: Float[Array, "items HO V K"],
    m_t: Float[Array, "items HO K K"],
    s0: Float[Array, "N HO _ _"] | None,
    first_item: Int[Array, " N2"] | None,
    *,
    num_sequences: int,
    kv_layout: bool = False,
    backwards: bool = False,
    interpret=None,
) -> Float[Array, "items HO V K"]:
    """State before each segment, or adjoint state after it; see the module docstring.

    Args:
      n, m_t: of `recurrence(write_transition=True)`; those of a sequence's last segment are not used.
      s0: initial states, [K, V] with kv_layout else [V, K]; None for zeros.
      backwards: n is of `segment_adjoints` (that of a first segment is not used), and s0 are cotangents of the final
        states.
      first_item: first item of each sequence (packed rows), None when all sequences have equally many.
      num_sequences: N.
    """
    items, HO, V, K = n.shape
    stages = _stages(K)
    body = functools.partial(
        _body,
        HO=HO,
        V=V,
        K=K,
        per_row=None if first_item is not None else items // num_sequences,
        has_s0=s0 is not None,
        kv_layout=kv_layout,
        backwards=backwards,
        stages=stages,
        interpreted=interpret is not None,
    )
    return launch(
        body,
        n,
        m_t,
        s0,
        first_item,
        out_type=jax.ShapeDtypeStruct(n.shape, jnp.float32),
        scratch_types=(
            plgpu.SMEM((stages, ROWS, K), jnp.float32, transforms=tiling(128, 4)),
            plgpu.SMEM((stages, K, K), m_t.dtype, transforms=tiling(128)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ),
        grid=(num_sequences * HO * (V // ROWS),),
        grid_names=("cta",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(**COMPILER_PARAMS, unsafe_no_auto_barriers=True),
    )
