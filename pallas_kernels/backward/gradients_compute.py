"""The compute warpgroups of `gradients`: dP and dL, and from them dq, dk and the parts of dbeta and dg."""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backward.gradients_cta import WIDTH, Cta, Place
from pallas_kernels.device.layouts import CHUNK, COL, ROW, along_columns, along_rows, zeros
from pallas_kernels.device.memory import transposed
from pallas_kernels.work.foreign import store_owned


def _times(x, power):
    """x E."""
    return x if power is None else x * power


def _rows_times(x, power):
    """E x, of a tile."""
    return x if power is None else x * along_rows(power, WIDTH)


def _lifted(x, lift):
    return x if lift is None else x * jnp.exp2(lift)


def _lowered(x, lift):
    return x if lift is None else x * jnp.exp2(-lift)


def _write_ek(cta: Cta, k_tile):
    """E, and E K of the own columns of K in the tile that dq and dk leave through."""
    smem = cta.smem
    if cta.packed:  # the other warpgroup, too, has sent what it had in that tile
        plgpu.barrier_wait(smem.scores)
    plgpu.barrier_wait(smem.loaded_power)
    power = plgpu.load(cta.power, layout=ROW)
    tile = (smem.out[0] if cta.packed else smem.out).at[cta.own_number()]
    tile[...] = (cta.wide(k_tile) * along_rows(power, WIDTH)).astype(cta.dtype)
    plgpu.commit_smem()
    return power, tile


def _store(cta: Cta, place: Place, head, x, target) -> None:
    """The own columns of dq or dk to memory."""
    wg, own = cta.own_number(), cta.own_columns()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    x = x.astype(cta.dtype)
    tile, flat = cta.smem.out if cta.packed else (cta.smem.out, None)

    def destination(tokens):
        return target.at[place.span.row, tokens, head, own]

    plain = None if flat is None else (flat.at[wg], flat.at[wg])
    store_owned(place.span, place.chunk, x, (tile.at[wg], tile.at[wg]), plain, destination)


def _write_score(cta: Cta, place: Place, head, first_step, is_first, lift):
    """dP or dL of a head, for both warpgroups; G and the last gate."""
    smem, dev, sizes = cta.smem, cta.dev, cta.sizes
    wg = cta.own_number()
    makes_dp = wg == 0
    log2_scale = math.log2(abs(sizes.scale)) if sizes.scale else -math.inf
    sign = math.copysign(1.0, sizes.scale)

    def body(acc):
        for t in range(cta.v_tiles):
            stage = cta.token_stage(first_step + t)
            plgpu.barrier_wait((smem.masked if cta.packed else smem.loaded).at[stage])
            dev.issue(acc, smem.x.at[stage, wg], transposed(smem.x.at[stage, 2]))
        return dev.collect(acc)

    score = pl.run_scoped(body, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
    slot = cta.slot_of(first_step)
    if not cta.packed:
        plgpu.barrier_wait(smem.loaded_gates.at[slot])
    g_rows, g_columns = (plgpu.load(cta.g2.at[slot], layout=layout) for layout in (ROW, COL))
    g_last = cta.g2[slot, CHUNK - 1]
    diagonal = dev.diagonal(score)
    exponents = g_rows + jnp.where(makes_dp, log2_scale, 0.0)
    if lift is not None:
        exponents = exponents + lift
    gamma = jnp.exp2(along_rows(exponents, CHUNK) - along_columns(g_columns, CHUNK))
    score = score * jnp.where(dev.row_minus_column() > 0, gamma, 0.0)
    score = (score * jnp.where(makes_dp, sign, -1.0)).astype(cta.dtype)
    if sizes.float16:
        pl.when(is_first)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))  # from where E K goes
    pl.when(first_step > 0)(lambda: plgpu.barrier_wait(smem.scored))
    smem.score.at[wg][...] = score

    @pl.when(makes_dp)
    def _():
        cta.diagonal[...] = diagonal * sizes.scale

    @pl.when(jnp.logical_not(makes_dp))
    def _():
        cta.gmem.dv_u.at[place.visit, head][...] = diagonal

    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.scores)
    return g_rows, g_last


def _over_states(cta: Cta, first_step):
    """u dh, dO h and dv h."""
    smem, dev, own = cta.smem, cta.dev, cta.own_columns()

    def release(step):
        dev.release(smem.consumed.at[cta.state_stage(step)])

    def body(late, read_q, read_k):
        for t in range(cta.v_tiles):
            step = first_step + t
            token_stage, state_stage = cta.token_stage(step), cta.state_stage(step)
            plgpu.barrier_wait(smem.loaded_states.at[state_stage])
            do, dv, u = (smem.x.at[token_stage, i] for i in range(3))
            h, dh = (smem.h.at[state_stage, i, :, own] for i in range(2))
            dev.issue(late, u, dh)
            dev.issue(read_q, do, h)
            dev.issue(read_k, dv, h)
            if t > 0:
                dev.finish(3)
                release(step - 1)
        products = [dev.collect(x, newer) for newer, x in ((2, late), (1, read_q), (0, read_k))]
        release(first_step + cta.v_tiles - 1)
        return products

    return pl.run_scoped(body, *[plgpu.ACC((CHUNK, WIDTH), jnp.float32)] * 3)


def _add_head(cta: Cta, place: Place, head, first_step, is_first, is_last, lift, dq, dk):
    """dq and dk with the parts of one output head; its sums for the helper."""
    smem, dev, sizes = cta.smem, cta.dev, cta.sizes
    g_rows, g_last = _write_score(cta, place, head, first_step, is_first, lift)
    late, read_q, read_k = _over_states(cta, first_step)
    wg, own = cta.own_number(), cta.own_columns()
    zero = lax.shift_right_logical(wg, 8)  # as wg itself: keeps the tiles' addresses out of registers
    p_tile, dl_tile = smem.score.at[zero], smem.score.at[zero + 1]
    q_tile, k_tile = smem.q.at[:, own], smem.k.at[:, own]
    pl.when(is_first)(lambda: plgpu.barrier_wait(smem.masked_qk if cta.packed else smem.loaded_qk))
    power, ek_tile = _write_ek(cta, k_tile) if sizes.float16 else (None, k_tile)
    decay, since = jnp.exp2(g_rows), jnp.exp2(g_last - g_rows)
    written = jnp.sum(cta.wide(k_tile) * late, axis=1) * since
    dk = dk + late * along_rows(_times(since, power), WIDTH)
    read_q = read_q * along_rows(_lifted(decay * sizes.scale, lift), WIDTH)
    read_k = read_k * along_rows(_lifted(-decay, lift), WIDTH)
    if not (cta.packed and sizes.float16):
        plgpu.barrier_wait(smem.scores)
    starts = [read_q, read_k, zeros((CHUNK, WIDTH), jnp.float32)]

    def products(add):
        add(0, p_tile, ek_tile)
        add(1, dl_tile, ek_tile)
        add(2, transposed(p_tile), q_tile)
        add(2, transposed(dl_tile), k_tile)

    read_q, read_k, inside = dev.accumulate(starts, products)
    k, diagonal = cta.wide(k_tile), plgpu.load(cta.diagonal, layout=ROW)
    within = _lowered(jnp.sum(k * inside, axis=1), lift)
    x = jnp.sum(k * read_k, axis=1)
    low_power = None if power is None else _lowered(power, lift)
    dk = dk + _lowered(read_k, lift) + _rows_times(inside, low_power)
    dq = dq + along_rows(_times(diagonal, power), WIDTH) * k
    q = cta.wide(q_tile)
    k_write = written + within + jnp.sum(k * q, axis=1) * diagonal
    dk = dk + along_rows(_times(diagonal, power), WIDTH) * q
    x = _lowered(x + jnp.sum(q * read_q, axis=1), lift) - _times(within, power)
    dq = dq + _lowered(read_q, lift)
    cta.x_sums.at[wg][...] = x
    cta.l_sums.at[wg][...] = _times(written, power)
    cta.gmem.k_write.at[wg, place.visit, head][...] = k_write
    plgpu.commit_smem()  # also for q, k and the diagonal, which may still be on their way into registers
    plgpu.barrier_arrive(smem.sums)
    is_last_head = first_step + cta.v_tiles == cta.items * cta.query_heads * cta.steps_per_pair
    pl.when(jnp.logical_not(is_last_head))(lambda: plgpu.barrier_arrive(smem.scored))
    pl.when(is_last)(lambda: plgpu.barrier_arrive(smem.consumed_qk))
    return dq, dk


def _wait_for_products(cta: Cta) -> None:
    """Waits until both warpgroups have multiplied by E K, if it lies in the tiles that dq and dk leave through.

    Rows that are stored one by one take both tiles as one plain array.
    """
    if cta.packed and cta.sizes.float16:
        plgpu.barrier_arrive(cta.smem.multiplied)
        plgpu.barrier_wait(cta.smem.multiplied)


def _stores(cta: Cta):
    """Runs a function where this warpgroup stores what it makes."""
    return pl.when(cta.own_number() == 0) if cta.sizes.K == WIDTH else lambda f: f()


def _add_item(cta: Cta, n, _):
    """dq and dk of the n-th item."""
    gmem, heads_per_query, query_heads = cta.gmem, cta.heads_per_query, cta.query_heads
    place, stores = cta.place_of(n), _stores(cta)

    def add_query(query, dk):
        def one(e, carry):
            first_step = (n * query_heads + query) * cta.steps_per_pair + e * cta.v_tiles
            head = cta.head_of(place, query, e)
            lift = gmem.lift[place.visit, head] if cta.sizes.float16 else None
            is_last = e == heads_per_query - 1
            return _add_head(cta, place, head, first_step, e == 0, is_last, lift, *carry)

        dq, dk = lax.fori_loop(0, heads_per_query, one, (zeros((CHUNK, WIDTH), jnp.float32), dk))
        _wait_for_products(cta)
        stores(lambda: _store(cta, place, place.key_head * query_heads + query, dq, gmem.dq))
        return dk

    dk = lax.fori_loop(0, query_heads, add_query, zeros((CHUNK, WIDTH), jnp.float32))
    stores(lambda: _store(cta, place, place.key_head, dk, gmem.dk))
    return ()


def _clear_item(cta: Cta, n, _):
    """Zeros for dq and dk of the n-th item, which is padding: behind the loop, whose instructions have to be few."""
    place, query_heads, nothing = cta.place_of(n), cta.query_heads, zeros((CHUNK, WIDTH), jnp.float32)

    def clear_query(query, _):
        _store(cta, place, place.key_head * query_heads + query, nothing, cta.gmem.dq)
        return ()

    def clear():
        lax.fori_loop(0, query_heads, clear_query, ())
        _store(cta, place, place.key_head, nothing, cta.gmem.dk)

    _stores(cta)(clear)
    return ()


def compute(cta: Cta) -> None:
    """The role of a compute warpgroup."""
    plgpu.set_max_registers(cta.config.compute_registers, action="increase")
    lax.fori_loop(0, cta.items, functools.partial(_add_item, cta), ())
    if cta.packed:
        _wait_for_products(cta)
        lax.fori_loop(cta.items, cta.items_with_padding(), functools.partial(_clear_item, cta), ())
    plgpu.wait_smem_to_gmem(0)
