"""Every gradient but that of the values where each channel decays by itself, all chunks in parallel, from the states
and their cotangents at the borders of chunks.

For one visit and one output head, with h [V, K] before it and dh [V, K] after it (both transposed), u and dv [C, V],
from_start_i = a_1 ... a_i and to_end_j = a_{j+1} ... a_C the decays of `chunks.pairs` [C, K]:

    dP = scale lower(dO u^T)              dL = -strictLower(dv u^T)
    dq = scale from_start (dO h) + dP . k        de = -from_start (dv h) + dL . k
    dk = late + dP^T . q + dL^T . e               late = to_end (u dh)

where "." sums over the other token of a pair with the decay between both, channel by channel: level by level, as
`channel_gradients_levels` says. Where the erase keys are the keys de is added to dk.

dg [C, K] has a term for everything that a token's decay multiplies, each with that decay in it, so that no two terms
cancel:

    dg_t = sum over i >= t of q_i . scale from_start (dO h) - e_i . from_start (dv h)
           + sum over j < t of k_j . to_end (u dh) + gl <h, dh> + the levels' terms

It is 0 at resets, below -104, where exp(g) is 0. Products of such sums have rounded operands, as the others have.

dbeta is found in two ways as in `backward.gradients`: dv . u, and k . dk with dk as above without de, which
`backward.channel_rule` joins.

Tokens that are two rows (`work.halves`) have dq in their second halves, dg in their first ones and dk in both, of
which the first ones' is de. Level 0 has no dg.

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], e [B, T, HO, K] (optional), g [B, T, HO, K] f32, gl of
`chunks.pairs` [visits, HO, K] f32, do and dv [B, T, HO, V], u [visits, HO, C, V], h and dh [visits, HO, V, K], tables
int32 (packed rows).
Outputs (GMEM): dq, dk, de (where e is given) [B, T, HO, K] in k's dtype, of every output head; dg [B, T, HO, K] f32;
dv . u, k . late and k . dk [visits, HO, C] f32.
Grid: persistent, one CTA per SM with independent warpgroups, each of which walks over (visit, output head), and over
16 channels of each at a time.
Shared memory: `channel_gradients_work.memory`.
Hardware: compute capability 9.0. Limits: bfloat16; K and V multiples of 64, V up to 256; T a multiple of 8.
Source: adjoint of Kimi Team, "Kimi Linear", section 3; fla's `chunk_kda_bwd_intra` has sub-chunks of 16 with one
anchor, and one sum of differences for dg.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.backward.channel_gradients_levels import write_gate_blocks
from pallas_kernels.backward.channel_gradients_step import (
    LANES,
    ChannelGradients,
    gradients_of_step,
    levels_of_step,
)
from pallas_kernels.backward.channel_gradients_work import (
    WIDTH,
    Config,
    Sizes,
    Warpgroup,
    clear_first_halves,
    clear_item,
    load_inputs,
    load_next,
    load_next_inputs,
    load_states,
    load_tokens,
    memory,
)
from pallas_kernels.chunks.pair_levels import Masks
from pallas_kernels.device.launch import launch, warpgroup_index
from pallas_kernels.device.layouts import CHUNK, COL, WGMMA, zeros
from pallas_kernels.device.memory import transposed
from pallas_kernels.work import halves
from pallas_kernels.work.foreign import mask_foreign
from pallas_kernels.work.tables import VisitTables, table_inputs
from pallas_kernels.work.workers import Place, VisitSizes


def _write_scores(own: Warpgroup, place: Place) -> jax.Array:
    """Makes the scores of dP and of dL, and returns the diagonal of dP in layout ROW. That of dv u^T leaves for
    memory."""
    dev, wg = own.dev, warpgroup_index()
    do, dv, u = (own.smem.x.at[wg, i] for i in range(3))

    def products(x, *accumulators) -> tuple[jax.Array, jax.Array]:
        issued = [
            dev.issue(y, *z)
            for y, z in zip(accumulators, ((x, transposed(u)), (u, transposed(x))), strict=True)
        ]
        return dev.collect(issued[0], 1), dev.collect(issued[1])

    of_halves, (read, erased) = own.sizes.halves, own.scores(wg)
    accumulators = [plgpu.ACC((CHUNK, CHUNK), jnp.float32)] * 2
    diagonal = read.write(
        pl.run_scoped(functools.partial(products, do), *accumulators), own.sizes.scale, of_halves
    )
    dv_u = erased.write(pl.run_scoped(functools.partial(products, dv), *accumulators), -1.0, of_halves)
    own.gmem.dv_u.at[place.visit, place.head][...] = -dv_u
    plgpu.commit_smem()
    return diagonal


def _over_states(own: Warpgroup, wg) -> list[jax.Array]:
    """dO h, dv h and u dh of a step, and the products of h and dh, summed over blocks of 64 rows."""
    smem, dev = own.smem, own.dev
    do, dv, u = (smem.x.at[wg, i] for i in range(3))
    h, dh = smem.h.at[wg, 0], smem.h.at[wg, 1]
    plgpu.barrier_wait(smem.loaded_h.at[wg])

    def products(*accumulators):
        operands = (do, h), (dv, h), (u, dh)
        issued = [dev.issue(x, a, b) for x, (a, b) in zip(accumulators, operands, strict=True)]
        return [dev.collect(x, 2 - n) for n, x in enumerate(issued)]

    results = pl.run_scoped(products, *[plgpu.ACC((CHUNK, WIDTH), jnp.float32)] * 3)
    inner = zeros((CHUNK, WIDTH), jnp.float32)
    for row in range(0, own.sizes.V, CHUNK):
        x, y = (dev.widen(plgpu.load(z.at[row : row + CHUNK], layout=WGMMA)) for z in (h, dh))
        inner = inner + x * y
    plgpu.commit_smem()
    return [*results, inner]


def _step(own: Warpgroup, place: Place, masks: Masks, diagonal, last_of_item, step, written):
    """16 channels: their gradients leave, and their parts of k . late and k . dk are added to `written`."""
    at, count, steps = own.at(step, place), own.num_items, own.sizes.steps
    plgpu.barrier_wait(own.smem.loaded.at[at.wg * own.stages + at.stage])
    sums, *ends = levels_of_step(own, at, masks)
    if own.stages == 2:
        load_next_inputs(own, step)
    gl = plgpu.load(own.smem.gl.at[at.wg, pl.ds(lax.rem(step, steps) * WIDTH, WIDTH)], layout=COL)
    products = _over_states(own, at.wg)  # after it nobody reads gl, or states
    load_next(own, step, load_states)
    pl.when(last_of_item)(lambda: load_next(own, lax.div(step, steps), load_tokens, count))
    results, written = gradients_of_step(own, at, masks, sums, ends, products, gl, diagonal, written)
    for name, target in own.gradients():
        own.store(name, at, results[name], target)
    if own.stages == 1:
        load_next_inputs(own, step)
    return written


def _item(own: Warpgroup, n, _):
    """One visit and output head."""
    place, steps, smem, wg = own.place(n), own.sizes.steps, own.smem, own.wg
    plgpu.barrier_wait(smem.loaded_x.at[wg])
    if place.span is not None:  # u is 0 there
        mask_foreign(place.span, place.span.first_chunk, [smem.x.at[wg, i] for i in range(2)])
    diagonal, masks = _write_scores(own, place), Masks(own.dev, WIDTH, own.sizes.halves)

    def step(j, written):
        return _step(own, place, masks, diagonal, j == steps - 1, n * steps + j, written)

    written = lax.fori_loop(0, steps, step, [zeros((CHUNK, LANES), jnp.float32)] * 2)
    for x, result in zip(written, (own.gmem.k_late, own.gmem.k_write), strict=True):
        result.at[place.visit, place.head][...] = jnp.sum(x, axis=1)
    return ()


def _body(gmem: Any, smem: Any, **static) -> None:
    own = Warpgroup(gmem, smem, **static)
    write_gate_blocks(own.dev, Masks(own.dev, WIDTH, own.sizes.halves), smem.gates.at[own.wg])

    if own.sizes.halves:
        clear_first_halves(own)

    @pl.when(own.num_items > 0)
    def _():
        for load in (load_tokens, load_inputs, load_states):
            load(own, jnp.int32(0))

    lax.fori_loop(0, own.num_items, functools.partial(_item, own), ())
    if own.packed:
        with_padding = own.items_of(gmem.first_visit[own.work.N + 1])
        lax.fori_loop(own.num_items, with_padding, functools.partial(clear_item, own), ())
    plgpu.wait_smem_to_gmem(0)


def channel_gradients(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    e: Float[Array, "B T He K"] | None,
    g: Float[Array, "B T HO K"],
    gl: Float[Array, "visits HO K"],
    do: Float[Array, "B T HO V"],
    dv: Float[Array, "B R HO V"],
    u: Float[Array, "visits HO C V"],
    h: Float[Array, "visits HO V K"],
    dh: Float[Array, "visits HO V K"],
    visits: VisitTables | None,
    *,
    of_halves: bool = False,
    scale: float,
    config: Config | None = None,
    interpret=None,
) -> ChannelGradients:
    """dq, dk, de, dg and the parts of dbeta; see the module docstring.

    Args:
      q, k, e, do: bfloat16; K and V multiples of 64, T a multiple of 8. e: erase keys, None for k.
      g, gl: as of `channel_pairs`.
      dv, u, h, dh: of `channel_chains`.
      visits: tables of packed rows (B = 1), None when every row of the batch is one sequence.
      of_halves: whether tokens are two rows, as for `channel_pairs`; do has the second ones, dv and u have both.
      scale: factor of the output.
    """
    (B, T, Hk, K), (num_visits, HO, V) = k.shape, h.shape[:3]
    He = HO if e is None else e.shape[2]
    tokens_of_chunk = halves.tokens_of(of_halves)
    given = dict[str, Any](erases=e is not None, packed=visits is not None)
    config = config or Config.default(K, V, **given)
    N = B if visits is None else visits.cu_seqlens.shape[0] - 1
    S = jax.ShapeDtypeStruct
    tokens, sums = S((B, T, HO, K), do.dtype), S((num_visits, HO, CHUNK), jnp.float32)
    inputs = {"q": q, "k": k, "e": e, "g": g, "gl": gl, "do": do, "dv": dv, "u": u, "h": h, "dh": dh}
    results: dict[str, Any] = launch(
        "channel_gradients",
        functools.partial(
            _body,
            config=config,
            sizes=Sizes(q.shape[2], Hk, He, HO, K, V, float(scale), of_halves),
            work=VisitSizes(HO, N, -(-T // tokens_of_chunk), num_visits, tokens_of_chunk),
            interpreted=interpret is not None,
        ),
        inputs=inputs | table_inputs(None, visits),
        outputs={
            "dq": tokens,
            "dk": tokens,
            "de": None if e is None else tokens,
            "dg": S(tokens.shape, jnp.float32),
            "dv_u": sums,
            "k_late": sums,
            "k_write": sums,
        },
        memory=memory(config, K, V, do.dtype, **given, tokens=tokens_of_chunk),
        ctas=config.ctas,
        warpgroups=config.warpgroups,
        reduction_bytes=0,  # every sum stays inside a warp
        auto_barriers=True,
        interpret=interpret,
    )
    return ChannelGradients._make(results.get(name) for name in ChannelGradients._fields)
