"""The helper of `gradients`: it loads ahead, masks the tokens of other sequences, and makes <h, dh> and dg."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backward.gradients_cta import COMPUTE, WIDTH, Cta, Place
from pallas_kernels.device.launch import release_registers
from pallas_kernels.device.layouts import CHUNK, COL, ROW, along_columns, zeros
from pallas_kernels.device.memory import transposed
from pallas_kernels.work.foreign import mask_foreign


def _load_qk(cta: Cta, pair, place=None) -> None:
    """Starts the copies of a pair. place: of its item, if known."""
    gmem, smem, sizes = cta.gmem, cta.smem, cta.sizes
    place = cta.place_of(lax.div(pair, cta.query_heads)) if place is None else place
    query = lax.rem(pair, cta.query_heads)
    q_head = lax.div(cta.head_of(place, query, 0), sizes.HO // sizes.Hq)
    row = place.span.row
    plgpu.copy_gmem_to_smem(cta.columns_of(gmem.q.at[row, place.tokens, q_head]), smem.q, smem.loaded_qk)
    plgpu.copy_gmem_to_smem(
        cta.columns_of(gmem.k.at[row, place.tokens, place.key_head]), smem.k, smem.loaded_qk
    )


def _load_tokens(cta: Cta, step, parts=None) -> None:
    """Starts the copies of do, dv and u of a step, and of the gates of its head. parts: of the step, if known."""
    gmem, smem = cta.gmem, cta.smem
    stage = cta.token_stage(step)
    place, head, columns = cta.parts_of(step) if parts is None else parts
    row = place.span.row
    for source, destination in (
        (gmem.do.at[row, place.tokens, head, columns], smem.x.at[stage, 0]),
        (gmem.dv.at[row, place.tokens, head, columns], smem.x.at[stage, 1]),
        (gmem.u.at[place.visit, head, :, columns], smem.x.at[stage, 2]),
    ):
        plgpu.copy_gmem_to_smem(source, destination, smem.loaded.at[stage])

    @pl.when(lax.rem(step, cta.v_tiles) == 0)
    def _():
        slot = cta.slot_of(step)
        source = gmem.g2_cum.at[row, head, place.tokens]
        plgpu.copy_gmem_to_smem(source, cta.g2.at[slot], smem.loaded_gates.at[slot])


def _load_states(cta: Cta, step, parts=None) -> None:
    """Starts the copies of h and dh of a step. parts: of the step, if known."""
    stage = cta.state_stage(step)
    place, head, columns = cta.parts_of(step) if parts is None else parts
    for i, source in enumerate((cta.gmem.h, cta.gmem.dh)):
        source = cta.columns_of(source.at[place.visit, head, columns])
        plgpu.copy_gmem_to_smem(source, cta.smem.h.at[stage, i], cta.smem.loaded_states.at[stage])


def _load_power(cta: Cta, n) -> None:
    """Starts the copy of E of the n-th head."""
    place, head, _ = cta.parts_of(n * cta.v_tiles)
    source = cta.gmem.power.at[place.span.row, head, place.tokens]
    plgpu.copy_gmem_to_smem(source, cta.power, cta.smem.loaded_power)


def _mask_head(cta: Cta, first_step, place: Place) -> None:
    """Masks what the steps of a head hold of other sequences' tokens."""
    smem, slot = cta.smem, cta.slot_of(first_step)
    stages = [cta.token_stage(first_step + t) for t in range(cta.v_tiles)]
    plgpu.barrier_wait(smem.loaded_gates.at[slot])
    for stage in stages:
        plgpu.barrier_wait(smem.loaded.at[stage])
    tiles = [smem.x.at[stage, i] for stage in stages for i in range(2)]  # do and dv
    mask_foreign(place.span, place.chunk, tiles, gates=cta.g2.at[slot])
    for stage in stages:
        plgpu.barrier_arrive(smem.masked.at[stage])


def _mask_qk(cta: Cta, place: Place) -> None:
    """Masks what a pair holds of other sequences' tokens."""
    plgpu.barrier_wait(cta.smem.loaded_qk)
    mask_foreign(place.span, place.chunk, (cta.smem.q, cta.smem.k))
    plgpu.barrier_arrive(cta.smem.masked_qk)


def _last_gate(cta: Cta, step) -> jax.Array:
    """The last gate of a step's head."""
    slot = cta.slot_of(step)
    if not cta.packed:  # else waited for by the mask
        plgpu.barrier_wait(cta.smem.loaded_gates.at[slot])
    return cta.g2[slot, CHUNK - 1]


def _inner_product(cta: Cta, step) -> jax.Array:
    """Sums of h dh over the columns of K, for the rows of a step."""
    stage = cta.state_stage(step)
    plgpu.barrier_wait(cta.smem.loaded_states.at[stage])
    product = cta.dev.product(cta.smem.h.at[stage, 0], transposed(cta.smem.h.at[stage, 1]))
    plgpu.commit_smem()  # every warp's product has ended before one of them loads the stage again
    return cta.dev.diagonal(product)


def _gate_gradient(cta: Cta, place: Place, head, inner, is_last) -> None:
    """dg of a head to memory."""
    plgpu.barrier_wait(cta.smem.sums)
    cta.diagonal[...] = inner  # in place of what has been read
    plgpu.commit_smem()
    inner = plgpu.load(cta.diagonal, layout=COL)
    halves = range(cta.sizes.K // WIDTH)
    parts = ([plgpu.load(y.at[i], layout=COL) for i in halves] for y in (cta.x_sums, cta.l_sums))
    not_before, before = (along_columns(sum(part, inner), CHUNK) for part in parts)
    dg = jnp.sum(jnp.where(cta.dev.row_minus_column() <= 0, not_before, before), axis=1)
    plgpu.commit_smem()  # all loads have arrived
    pl.when(jnp.logical_not(is_last))(lambda: plgpu.barrier_arrive(cta.smem.scored))
    cta.gmem.dg.at[place.visit, head][...] = dg


def helper(cta: Cta) -> None:
    """The role of the last warpgroup."""
    config, smem, v_tiles, steps_per_pair = cta.config, cta.smem, cta.v_tiles, cta.steps_per_pair
    token_stages, state_stages, float16 = config.token_stages, config.state_stages, cta.sizes.float16
    release_registers(config.helper_registers, COMPUTE + 1)
    pairs = cta.items * cta.query_heads
    steps = pairs * steps_per_pair

    pl.when(pairs > 0)(lambda: _load_qk(cta, jnp.int32(0)))
    if float16:
        pl.when(pairs > 0)(lambda: _load_power(cta, jnp.int32(0)))
    for j in range(max(token_stages, state_stages)):
        if j < token_stages:
            pl.when(j < steps)(functools.partial(_load_tokens, cta, jnp.int32(j)))
        if j < state_stages:
            pl.when(j < steps)(functools.partial(_load_states, cta, jnp.int32(j)))
    if cta.packed:

        @pl.when(pairs > 0)
        def _():
            first = cta.place_of(jnp.int32(0))
            _mask_head(cta, jnp.int32(0), first)
            _mask_qk(cta, first)

    def step(i, carry):
        inner, decay = carry
        parts = None, None
        if cta.packed:
            # Looked up in tables before anything waits, so that the loads follow their waits at once.
            parts = [cta.parts_of(jnp.minimum(i + n, steps - 1)) for n in (state_stages, token_stages)]
        is_first = lax.rem(i, v_tiles) == 0
        decay = lax.cond(is_first, lambda: jnp.exp2(_last_gate(cta, i)), lambda: decay)
        inner = jnp.where(is_first, 0.0, inner) + _inner_product(cta, i)
        plgpu.barrier_wait(smem.consumed.at[cta.state_stage(i)])
        pl.when(i + state_stages < steps)(lambda: _load_states(cta, i + state_stages, parts[0]))
        pl.when(i + token_stages < steps)(lambda: _load_tokens(cta, i + token_stages, parts[1]))

        def following() -> Place:
            """Place of the next step."""
            return cta.parts_of(jnp.minimum(i + 1, steps - 1))[0]

        @pl.when(lax.rem(i + 1, steps_per_pair) == 0)
        def _():
            place = following() if cta.packed else None
            plgpu.barrier_wait(smem.consumed_qk)
            pair = lax.div(i, steps_per_pair) + 1
            pl.when(pair < pairs)(lambda: _load_qk(cta, pair, place))

        @pl.when(lax.rem(i + 1, v_tiles) == 0)
        def _():
            # The next head's tokens, where they were loaded a head ago; else they are waited for behind dg.
            masks_first = token_stages >= 2 * v_tiles

            def mask_head():
                if cta.packed:
                    pl.when(i + 1 < steps)(lambda: _mask_head(cta, i + 1, following()))

            if masks_first:
                mask_head()
            _gate_gradient(cta, *cta.parts_of(i)[:2], inner * decay, i + 1 == steps)
            if float16:
                pl.when(i + 1 < steps)(lambda: _load_power(cta, lax.div(i + 1, v_tiles)))
            if not masks_first:
                mask_head()

        if cta.packed:
            # Behind dg, which the compute warpgroups wait for first, while q and k are on their way.
            is_new = (lax.rem(i + 1, steps_per_pair) == 0) & (i + 1 < steps)
            pl.when(is_new)(lambda: _mask_qk(cta, following()))
        return inner, decay

    lax.fori_loop(0, steps, step, (zeros((WIDTH,), jnp.float32, ROW), jnp.float32(0.0)))
