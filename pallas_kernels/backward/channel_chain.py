"""The walk that two kernels share where each channel decays by itself, `channel_chains` and
`channel_segment_adjoints`.

It is the walk of `backward.chain` on what `chunks.pairs` made: with the state h and its cotangent dh transposed,
[V, K], and for one visit

    states:    R = V^T - h kg^T                       W = R T^T       h <- h Diag(gl) + (W diag(beta)) kr
    adjoints:  Z = (dh kr^T) diag(beta) + dO^T P      dV = Z T        dh <- dh Diag(gl) + dO^T qg - dV kg

P holds scale and beta, qg holds scale. beta_i times column i of W is what token i writes, and dV is the gradient of
the values. The tiles hold the decays, so there is no helper, only a loader, and two rings of stages as in
`forward.channel_walk`. The early one holds what the first products read, the late one what the last ones read:

| ring  | states                | adjoints               |
|-------|-----------------------|------------------------|
| early | kg, v, T, gl, beta    | kr, do, T, gl, beta, P |
| late  | kr                    | kg, qg                 |

do is read into registers once, and so its stage is free before the last products. In packed rows values, cotangents
of outputs and write strengths of other sequences are replaced there; all other tiles are those of a visit. Tokens
that are two rows are as in `forward.channel_walk`; do has second halves alone, dV both.

| barrier       | arrives                                | waits                                    |
|---------------|----------------------------------------|------------------------------------------|
| early, late   | each bulk copy of a stage that both    | state warpgroups                         |
|               | walks have                             |                                          |
| early_p,      | bulk copy of P, and of qg              | state warpgroups of the adjoints         |
| late_qg       |                                        |                                          |
| early_read,   | each state warpgroup: stage read       | loader, before it loads the stage again  |
| late_read     |                                        |                                          |

Work: as of `backward.chain`. Hardware: compute capability 9.0. Limits: bfloat16; K a multiple of 64 up to 128, V a
multiple of 64; T a multiple of 8.
Source: Kimi Team, "Kimi Linear", section 3; the adjoint is that of its triangular solve.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backward.chain import ROWS, Cta, Sizes, start_walk, store_dv, store_h
from pallas_kernels.chunks.channel_stages import (
    Config,
    decayed,
    loader,
    owned_tokens,
    stages_of,
    strengths,
)
from pallas_kernels.chunks.pairs import Pairs
from pallas_kernels.device.layouts import CHUNK, WGMMA
from pallas_kernels.device.memory import Barriers, Buffer, Memory, transposed
from pallas_kernels.work.tables import Items, VisitTables


def default_config(K: int, state_warpgroups: int) -> Config:
    """The configuration of most stages."""
    return Config.most_stages(state_warpgroups, lambda config: _memory(config, K, jnp.bfloat16))


def _memory(config: Config, K: int, dtype, *, packed: bool = False, tokens: int = CHUNK) -> Memory:
    """Shared memory of a CTA: 210 KB at K = 128 with two state warpgroups.

    tokens: of a chunk; those of qg and P are what products sum over.
    """
    n, early, late = config.state_warpgroups, config.early_stages, config.late_stages
    keys, square = (CHUNK, K), (CHUNK, CHUNK)
    return {
        "first_keys": Buffer((early, *keys), dtype, swizzle=128),  # kg or kr
        "x": Buffer((early, tokens, ROWS * n), dtype, swizzle=128),  # v or do
        "t": Buffer((early, *square), dtype, swizzle=128),
        "p": Buffer((early, tokens, CHUNK), dtype, swizzle=2 * tokens),
        "last_keys": Buffer((late, *keys), dtype, swizzle=128),  # kr or kg
        "qg": Buffer((late, tokens, K), dtype, swizzle=2 * tokens),
        "h": Buffer((ROWS * n, K), dtype, swizzle=128),
        "out": Buffer((n, CHUNK, ROWS), dtype, swizzle=128, also_flat=packed),
        "gl": Buffer((early, K)),
        "beta": Buffer((early, CHUNK)),
        "early": Barriers(arrivals=5, count=early),
        "early_p": Barriers(arrivals=1, count=early),
        "late": Barriers(arrivals=1, count=late),
        "late_qg": Barriers(arrivals=1, count=late),
        "early_read": Barriers(arrivals=n, count=early),
        "late_read": Barriers(arrivals=n, count=late),
    }


def _load_early(cta: Cta, i, stage) -> None:
    """Starts the copies of what the i-th chunk's first products read."""
    gmem, smem, span, head = cta.gmem, cta.smem, cta.span, cta.head
    visit, chunk, count = cta.visit_of(i), cta.chunk_of(i), cta.sizes.tokens
    tokens, rows = pl.ds(chunk * count, count), pl.ds(chunk * CHUNK, CHUNK)
    columns = pl.ds(cta.tile * cta.num_state * ROWS, cta.num_state * ROWS)

    def copy(source, destination):
        plgpu.copy_gmem_to_smem(source, destination.at[stage], smem.early.at[stage])

    @pl.when(cta.adjoint)
    def _():
        copy(gmem.kr.at[visit, head], smem.first_keys)
        copy(gmem.do.at[span.row, tokens, head, columns], smem.x)
        plgpu.copy_gmem_to_smem(gmem.p.at[visit, head], smem.p.at[stage], smem.early_p.at[stage])

    if gmem.v is not None:

        @pl.when(jnp.logical_not(cta.adjoint))
        def _():
            copy(gmem.kg.at[visit, head], smem.first_keys)
            copy(gmem.v.at[span.row, tokens, cta.head_of(cta.sizes.HV), columns], smem.x)

    copy(gmem.t.at[visit, head], smem.t)
    copy(gmem.gl.at[visit, head], smem.gl)
    copy(gmem.beta.at[span.row, head, rows], smem.beta)


def _load_late(cta: Cta, i, stage) -> None:
    """Starts the copies of what the i-th chunk's last products read."""
    gmem, smem, visit, head = cta.gmem, cta.smem, cta.visit_of(i), cta.head

    def copy(source, destination, loaded):
        plgpu.copy_gmem_to_smem(source.at[visit, head], destination.at[stage], loaded.at[stage])

    @pl.when(cta.adjoint)
    def _():
        copy(gmem.qg, smem.qg, smem.late_qg)
        copy(gmem.kg, smem.last_keys, smem.late)

    if gmem.v is not None:
        pl.when(jnp.logical_not(cta.adjoint))(lambda: copy(gmem.kr, smem.last_keys, smem.late))


def values(cta: Cta, i, stage) -> jax.Array:
    """This warpgroup's columns of v or do, transposed [ROWS, tokens], 0 at tokens of other sequences."""
    x_t = plgpu.load(cta.x_tile(stage), layout=WGMMA)
    return jnp.where(owned_tokens(cta, i), x_t, jnp.zeros((), cta.dtype)) if cta.packed else x_t


def times_keys(cta: Cta, product, i, keys, h, destination) -> Any:
    """h keys^T, issued; h leaves for memory, unless destination is None."""
    rounded = h.astype(cta.dtype)
    product = cta.dev.issue(product, rounded, transposed(keys))
    if destination is not None:
        store_h(cta, i, rounded, destination)
    return product


def adjoint_step(cta: Cta, i, dh) -> jax.Array:
    """The cotangent before a chunk from the one after it. dh and dv leave for memory where the kernel has them."""
    gmem, smem, dev = cta.gmem, cta.smem, cta.dev
    early, late = stages_of(cta, i)
    plgpu.barrier_wait(smem.early.at[early])
    plgpu.barrier_wait(smem.early_p.at[early])

    def solve(attended, written, dv):
        do_t = values(cta, i, early)
        attended = dev.issue(attended, do_t, smem.p.at[early])
        written = times_keys(cta, written, i, smem.first_keys.at[early], dh, gmem.dh)
        beta = lax.optimization_barrier(strengths(cta, i, early))
        z = dev.collect(written) * beta + dev.collect(attended)
        dv = dev.issue(dv, z.astype(cta.dtype), smem.t.at[early])
        start = lax.optimization_barrier(decayed(cta, early, dh))
        plgpu.barrier_wait(smem.late_qg.at[late])
        plgpu.barrier_wait(smem.late.at[late])

        def write(add):
            add(0, do_t, smem.qg.at[late])
            dv_t = dev.collect(dv, 1)
            dev.release(smem.early_read.at[early])
            add(0, (-dv_t).astype(cta.dtype), smem.last_keys.at[late])
            if gmem.dv is not None:
                store_dv(cta, cta.chunk_of(i), dv_t.astype(cta.dtype))

        (before,) = dev.accumulate([start], write)
        dev.release(smem.late_read.at[late])
        return before

    return pl.run_scoped(solve, *[plgpu.ACC((ROWS, CHUNK), jnp.float32)] * 3)


def walk(cta: Cta, start: jax.Array, step: Callable) -> jax.Array:
    """Repeats h <- step(cta, i, h) over the chunks."""
    return lax.fori_loop(0, cta.chunks, functools.partial(step, cta), start)


def load_chunks(cta: Cta) -> None:
    """The role of the loader."""
    loader(cta, _load_early, _load_late)


def start(
    name: str,
    body: Callable[..., None],
    pairs: Pairs,
    inputs: dict[str, Any],
    outputs: Callable[[Sizes], dict[str, Any]],
    items: Items | None,
    visits: VisitTables | None,
    *,
    tokens: int,
    config: Config | None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Launches one of the two kernels.

    Args:
      inputs: by name: v, do, beta, h_0 and dh_T; v, h_0 and dh_T may be None.
      tokens: of a chunk, see `work.halves`.
      config: None for the default.
      options: those of `start_walk` that are its caller's.
    """
    do, K = inputs["do"], pairs.gl.shape[-1]
    config = config or default_config(K, 1)
    memory = _memory(config, K, do.dtype, packed=visits is not None, tokens=tokens)
    options |= dict(tokens=tokens, config=config, memory=memory)
    return start_walk(
        name,
        body,
        inputs | pairs._asdict(),
        outputs,
        items,
        visits,
        heads=do.shape[2:3] * 2,  # q and k have no part here
        K=K,
        scale=1.0,  # it is in P and qg
        float16=False,
        **options,
    )
