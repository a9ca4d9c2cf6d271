"""The walk over the chunks of a sequence where each channel decays by itself: `channel_outputs` and
`channel_transitions`.

It is the walk of `forward.walk` on what `chunks.pairs` made: with the state transposed, h [V, K], and for one visit

    R = V^T - h kg^T               W = R T^T              h <- h Diag(gl) + (W diag(beta)) kr

Tiles of keys hold the decays, so nothing is left to be made beside the chain of products: there is no helper, only a
loader. In packed rows the state warpgroups mask values and write strengths of other sequences where they read them;
the other tiles are those of a visit. Where tokens are two rows (`work.halves`), v, qg, P and O are those of second
halves, 32 of a chunk, and V^T is 0 in the columns of first ones.

Tiles are freed at two places of a step, so there are two rings of stages: the early one (kg, qg, v, T, gl, beta) is
read until W is there, the late one (kr, P) by the last products.

| barrier       | arrives                                | waits                              |
|---------------|----------------------------------------|------------------------------------|
| early, late   | each bulk copy of a stage              | state warpgroups                   |
| early_read,   | each state warpgroup: stage read       | loader, before it loads the stage  |
| late_read     |                                        | again                              |
| turn          | the other one of two state warpgroups  | as in `forward.walk`               |

Hardware: compute capability 9.0. Limits: K a multiple of 64 up to 128, V up to 256; T a multiple of 8.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks.channel_stages import Config, loader, owned_tokens
from pallas_kernels.device.layouts import CHUNK, WGMMA
from pallas_kernels.device.memory import Barriers, Buffer, Memory, transposed
from pallas_kernels.device.rows import in_rows
from pallas_kernels.forward.walk import ROWS, Cta


def stages_memory(config: Config, K: int, dtype, *, reads: bool, tokens: int) -> Memory:
    """The rings of stages.

    Args:
      reads: whether outputs are made.
      tokens: of a chunk, see `work.halves`.
    """
    n, early, late = config.state_warpgroups, config.early_stages, config.late_stages
    keys, square = (CHUNK, K), (CHUNK, CHUNK)
    return {
        "kg": Buffer((early, *keys), dtype, swizzle=128),
        "qg": Buffer((early, tokens, K), dtype, swizzle=128) if reads else None,
        "v": Buffer((early, tokens, ROWS * n), dtype, swizzle=128),
        "t": Buffer((early, *square), dtype, swizzle=128),
        "kr": Buffer((late, *keys), dtype, swizzle=128),
        "p": Buffer((late, tokens, CHUNK), dtype, swizzle=128) if reads else None,
        "gl": Buffer((early, K)),
        "beta": Buffer((early, CHUNK)),
        "early": Barriers(arrivals=5 + reads, count=early),
        "late": Barriers(arrivals=1 + reads, count=late),
        "early_read": Barriers(arrivals=n, count=early),
        "late_read": Barriers(arrivals=n, count=late),
        "turn": Barriers(arrivals=1, count=2) if n == 2 else None,
    }


def _load_early(cta: Cta, i, stage) -> None:
    """Starts the copies of what the i-th chunk's first products read."""
    gmem, smem, sizes, span = cta.gmem, cta.smem, cta.sizes, cta.span
    visit, chunk = span.first_visit + i, cta.chunk_of(i)
    tokens = pl.ds(chunk * sizes.tokens, sizes.tokens)
    columns = cta.num_state * ROWS
    # Transitions have rows past V, which use no values.
    v_columns = pl.ds(jnp.minimum(cta.tile * columns, sizes.V - columns), columns)

    def copy(source, destination):
        plgpu.copy_gmem_to_smem(source, destination.at[stage], smem.early.at[stage])

    copy(gmem.kg.at[visit, cta.head], smem.kg)
    if smem.qg is not None:
        copy(gmem.qg.at[visit, cta.head], smem.qg)
    copy(gmem.v.at[span.row, tokens, cta.head_of(sizes.HV), v_columns], smem.v)
    copy(gmem.t.at[visit, cta.head], smem.t)
    copy(gmem.gl.at[visit, cta.head], smem.gl)
    copy(gmem.beta.at[span.row, cta.head, pl.ds(chunk * CHUNK, CHUNK)], smem.beta)


def _load_late(cta: Cta, i, stage) -> None:
    """Starts the copies of what the i-th chunk's last products read."""
    gmem, smem, visit = cta.gmem, cta.smem, cta.span.first_visit + i
    plgpu.copy_gmem_to_smem(gmem.kr.at[visit, cta.head], smem.kr.at[stage], smem.late.at[stage])
    if smem.p is not None:
        plgpu.copy_gmem_to_smem(gmem.p.at[visit, cta.head], smem.p.at[stage], smem.late.at[stage])


def wait_for_chunk(cta: Cta, stage) -> None:
    """Waits until an early stage is loaded, and until it is this warpgroup's turn."""
    plgpu.barrier_wait(cta.smem.early.at[stage])
    if cta.num_state == 2:
        plgpu.barrier_wait(cta.smem.turn.at[cta.wg])


def corrected_values(cta: Cta, i, stage, hk, newer: int, values: Callable = lambda v_t: v_t) -> jax.Array:
    """R rounded, from the issued product h kg^T, after which `newer` others were issued.

    values: applied to the transposed values.
    """
    v_tile = cta.smem.v.at[stage, :, pl.ds(cta.wg * ROWS, ROWS)]
    v_t = values(plgpu.load(transposed(v_tile), layout=WGMMA))
    if cta.packed:
        v_t = jnp.where(owned_tokens(cta, i), v_t, jnp.zeros((), cta.dtype))
    r = (in_rows(cta.dev, v_t.astype(jnp.float32)) - cta.dev.collect(hk, newer=newer)).astype(cta.dtype)
    if cta.num_state == 2:
        plgpu.barrier_arrive(cta.smem.turn.at[1 - cta.wg])
    return r


def body(
    gmem: Any, smem: Any, state: Callable[[Cta], None], prepare: Callable[[Cta], None], **static
) -> None:
    """The body of a kernel: state warpgroups, which run state(cta), and the loader behind them.

    prepare: applied to what every warpgroup knows, first.
    """
    cta = Cta(gmem, smem, **static)
    prepare(cta)
    pl.when(cta.wg == cta.num_state)(lambda: loader(cta, _load_early, _load_late))
    pl.when(cta.wg < cta.num_state)(lambda: state(cta))
