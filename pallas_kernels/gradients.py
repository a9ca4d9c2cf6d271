"""Every gradient but that of v, all chunks in parallel, from the states and adjoints at their borders.

For one chunk and one head, with S [V, K] before the chunk, dS [V, K] after it (both transposed), u and dv [C, V]:

    dP = scale Gamma * (dO u^T)                 N = -Gamma * (dv u^T), strictly lower
    dq = scale D (dO S) + dP K
    read = -D (dv S) + N K                      late = Dr (u dS)
    dk = read + late + dP^T Q + N^T K           dbeta = rowsum(dv * u) / beta^2

dg needs one more product, whose trace is <S, dS>. With x_i = q_i . dq_i + k_i . (read - dP^T Q - N^T K)_i and
l_i = k_i . late_i

    dg_t = sum over i >= t of x_i + sum over i < t of l_i + gl <S, dS>

The diagonal of dP is left out of x: its two parts cancel, and so every term of dg carries the decay that dg is
proportional to; what cancels between pairs of tokens is the same rounded dP and N. Gamma, D, Dr, gl as in
state_adjoints.py. A head's q and k are shared by the heads of its group: dq and dk are summed in registers.

In float16 u and dv come divided by beta: Gamma, D and Dr take beta in, and dbeta = rowsum(dv * u). dP and N are kept
times 2^lift, which leaves their largest entry as it would be without decay; what the products with them give is
multiplied by 2^-lift in float32.

K > 128: a launch for each 128 columns of K, each of which makes dP and N again. The columns of dq and dk do not meet,
and dg is a sum over columns.

Work: persistent CTAs walk over items, an item being one visit (a chunk, or what a sequence of packed rows owns of
it) of one key head. An item has a step for each 64 columns of V of each of its output heads.

Threads (warpgroups): two compute warpgroups run the same code. Number 0 makes dP and number 1 makes N, for both; then
each makes the gradients of its own 64 columns of K. The helper makes <S, dS> and dg, and loads by bulk copies, tokens
(do, dv, u) further ahead than states (S, dS), since dP and N need tokens only.

Instructions: an SM keeps 2048 of them (32 KB). Past that an instruction takes 2.8 cycles instead of one, in all
warpgroups, so the loops of compute warpgroups and helper together must stay below (now 1720). That is why the compute
warpgroups share their code and hold 64 columns each, why <S, dS> is a trace, and why masks and diagonals come from
`Device`. Spills of 600 bytes doubled the time. And variants alike in size and spills took 0.58 to 0.97 ms, for a
reason not found (the log has them): time every change.

| barrier   | arrives                                             | waits                                        |
|-----------|-----------------------------------------------------|----------------------------------------------|
| tokens    | bulk copies of do, dv and u of a step               | compute; helper first if rows are packed     |
| gates     | bulk copy of g2_cum of a head                       | compute and helper; helper if rows are packed|
| states    | bulk copies of S and dS of a step                   | compute and helper                           |
| qk        | bulk copies of q and k                              | compute; helper first if rows are packed     |
| masked,   | helper: foreign tokens of a step, or of q and k,    | compute (packed rows only)                   |
| masked_qk | are zeros                                           |                                              |
| consumed  | compute: step read                                  | helper, before it loads these stages again   |
| used_qk   | compute: q and k read                               | helper, before it loads the next q and k     |
| strengths | bulk copy of beta of a head (float16)               | compute                                      |
| scores    | compute: dP, N and the diagonal of dP are written   | compute                                      |
| sums      | compute: x and l are written                        | helper                                       |
| scored    | compute: dP and N read; helper: sums read           | compute, before it writes those of a next    |
|           |                                                     | head                                         |

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], do [B, T, HO, V], u [visits, HO, C, V], dv [B, T, HO, V],
h and dh [visits, HO, V, K], g2_cum [B, HO, NT C] f32, beta [B, HO, NT C] and lift [visits, HO] f32 (float16), tables
int32 (packed rows).
Outputs (GMEM): dq [B, T, Hq or HO, K], dk [B, T, Hk, K], dg and rowsum(dv * u) [visits, HO, C] f32.
Shared memory: Config.smem_bytes, 227 KB at K = 128 and above.
Hardware: compute capability 9.0. Limits: K and V multiples of 64, V up to 64 token_stages; T a multiple of 8.
Source: adjoint of Yang et al. 2024 (Gated DeltaNet), eq. 8 to 10.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.common import (
    CHUNK,
    COL,
    COMPILER_PARAMS,
    NUM_SMS,
    ROW,
    SMEM_LIMIT,
    WGMMA,
    along_columns,
    along_rows,
    launch,
    round_up,
    store_any,
    take,
    tiling,
    transposed,
    zeros,
)
from pallas_kernels.device import Device
from pallas_kernels.spans import (
    Span,
    VisitTables,
    dense_span,
    keep_owned_gates,
    keep_owned_rows,
    owned_rows,
    packed_span,
    store_rows,
)

WIDTH = 64
"""Columns of V of one step, and of a tile."""

COMPUTE = 2
"""Compute warpgroups; the helper comes after them."""

MAX_COLUMNS = 128
"""Columns of K of one launch, as many as fit into shared memory and registers."""

MAX_LIFT = 64.0
"""log2 of the largest factor that the scores are stored times in float16. float32 has room for a state times it."""

BETA_FLOOR = 2.0**-20
"""Least beta that u and dv, which are proportional to it, or dbeta are divided by; the forward writes no less. The
inverse has rows proportional to beta in float16: with 2^-40, dbeta is 8 % off."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the gradients run, not what they compute."""

    token_stages: int = 4
    """Steps of do, dv and u in flight: at least those of a head."""
    state_stages: int = 2
    """Steps of S and dS in flight."""
    helper_registers: int = 72
    compute_registers: int = 216
    ctas: int = NUM_SMS
    auto_barriers: bool = False
    """Lets Pallas put a barrier around every access to shared memory."""

    def heads(self, V: int) -> int:
        """Heads whose tokens are in flight."""
        return -(-self.token_stages // (V // WIDTH))

    def smem_bytes(self, K: int, V: int) -> int:
        """Shared memory of a CTA, for K columns in a launch."""
        steps = self.token_stages * 3 * 2 * CHUNK * WIDTH + self.state_stages * 2 * 2 * WIDTH * K
        vectors = round_up(4 * CHUNK * (6 + self.heads(V)), 1024)
        return steps + 2 * 2 * CHUNK * (K + COMPUTE * CHUNK) + vectors + 256

    @classmethod
    def default(cls, K: int, V: int) -> "Config":
        """Most stages that fit."""
        tokens = V // WIDTH * (2 if V <= 128 else 1)
        for states in (4, 3, 2):
            config = cls(tokens, states)
            if config.smem_bytes(K, V) <= SMEM_LIMIT:
                return config
        raise AssertionError("more than MAX_COLUMNS columns of K, or V > 256")


class _Sizes(NamedTuple):
    """Static sizes and switches of one kernel."""

    T: int
    N: int
    Hq: int
    Hk: int
    HO: int
    dq_heads: int
    """Heads of dq: Hq where a key head's queries are its own, else HO."""
    K: int
    """Columns of q, k, S and dS that one launch works on."""
    first_column: int
    V: int
    visits: int
    scale: float
    packed: bool
    float16: bool


def _body(*refs, config: Config, sizes: _Sizes, interpreted: bool):
    refs = list(refs)
    q_gmem, k_gmem, do_gmem, u_gmem, dv_gmem, h_gmem, dh_gmem, g_gmem = (refs.pop(0) for _ in range(8))
    beta_gmem, lift_gmem = (take(refs, sizes.float16) for _ in range(2))
    tables = [refs.pop(0) for _ in range(3 * sizes.packed)]
    dq_gmem, dk_gmem, dg_gmem, dbeta_gmem = (refs.pop(0) for _ in range(4))
    q_smem, k_smem, x_smem, s_smem, score_smem, out_smem, vectors = refs[:7]
    x_sums, l_sums, diagonal_smem, beta_smem, g_smem = (
        vectors.at[part] for part in (slice(2), slice(2, 4), 4, 5, slice(6, None))
    )
    strengths: Any = refs[7] if sizes.float16 else None
    tokens, gates, states, qk, masked, masked_qk, consumed, used_qk, scores, sums, scored = refs[-11:]

    dev, dtype, f32 = Device(interpreted), k_gmem.dtype, jnp.float32
    token_stages, state_stages, K = config.token_stages, config.state_stages, sizes.K
    num_chunks, v_tiles = -(-sizes.T // CHUNK), sizes.V // WIDTH
    query_heads = sizes.dq_heads // sizes.Hk  # of one key head
    heads_per_query = sizes.HO // sizes.dq_heads
    steps_per_load = heads_per_query * v_tiles
    heads_in_flight = config.heads(sizes.V)

    wg = lax.axis_index("wg").astype(jnp.int32)
    worker = lax.axis_index("cta").astype(jnp.int32)
    visits = tables[1][sizes.N + 1] if sizes.packed else jnp.int32(sizes.visits)
    items = lax.div(jnp.maximum(visits * sizes.Hk + config.ctas - 1 - worker, 0), config.ctas)

    class Place(NamedTuple):
        """Where the n-th item of this CTA lies."""

        span: Span
        visit: jax.Array
        chunk: jax.Array
        key_head: jax.Array

        @property
        def tokens(self):
            return pl.ds(self.chunk * CHUNK, CHUNK)

    def place_of(n) -> Place:
        item = worker + n * config.ctas
        visit, key_head = lax.div(item, sizes.Hk), lax.rem(item, sizes.Hk)
        if sizes.packed:
            span = packed_span(tables[2][visit], sizes.T, sizes.N, tables[0], tables[1])
            return Place(span, visit, span.first_chunk + visit - span.first_visit, key_head)
        span = dense_span(lax.div(visit, num_chunks), sizes.T)
        return Place(span, visit, lax.rem(visit, num_chunks), key_head)

    def columns_of(ref):
        """The columns of K of this launch, of a reference whose last dimension is K."""
        if ref.shape[-1] == K:
            return ref
        return ref.at[(slice(None),) * (len(ref.shape) - 1) + (pl.ds(sizes.first_column, K),)]

    def head_of(place, query, e):
        """Output head of the e-th head of the query-th query head of an item."""
        return place.key_head * (sizes.HO // sizes.Hk) + query * heads_per_query + e

    # Helper

    def load_qk(load):
        """q and k of the load-th pair."""
        place, query = place_of(lax.div(load, query_heads)), lax.rem(load, query_heads)
        q_head = lax.div(head_of(place, query, 0), sizes.HO // sizes.Hq)
        row = place.span.row
        plgpu.copy_gmem_to_smem(columns_of(q_gmem.at[row, place.tokens, q_head]), q_smem, qk)
        plgpu.copy_gmem_to_smem(columns_of(k_gmem.at[row, place.tokens, place.key_head]), k_smem, qk)

    def parts_of(step):
        """Item, head and columns of V of a step of this CTA."""
        load, rest = lax.div(step, steps_per_load), lax.rem(step, steps_per_load)
        place, query = place_of(lax.div(load, query_heads)), lax.rem(load, query_heads)
        head = head_of(place, query, lax.div(rest, v_tiles))
        return place, head, pl.ds(lax.rem(rest, v_tiles) * WIDTH, WIDTH)

    def slot_of(step):
        """Where the gates of a step's head are."""
        return lax.rem(lax.div(step, v_tiles), heads_in_flight)

    def load_tokens(step):
        stage = lax.rem(step, token_stages)
        place, head, columns = parts_of(step)
        row = place.span.row
        for source, destination in (
            (do_gmem.at[row, place.tokens, head, columns], x_smem.at[stage, 0]),
            (dv_gmem.at[row, place.tokens, head, columns], x_smem.at[stage, 1]),
            (u_gmem.at[place.visit, head, :, columns], x_smem.at[stage, 2]),
        ):
            plgpu.copy_gmem_to_smem(source, destination, tokens.at[stage])

        @pl.when(lax.rem(step, v_tiles) == 0)
        def _():
            slot = slot_of(step)
            plgpu.copy_gmem_to_smem(g_gmem.at[row, head, place.tokens], g_smem.at[slot], gates.at[slot])

    def load_states(step):
        stage = lax.rem(step, state_stages)
        place, head, columns = parts_of(step)
        for i, source in enumerate((h_gmem, dh_gmem)):
            source = columns_of(source.at[place.visit, head, columns])
            plgpu.copy_gmem_to_smem(source, s_smem.at[stage, i], states.at[stage])

    def mask(place, tiles, g=None):
        begin, end, is_shared = owned_rows(place.span, place.chunk)

        @pl.when(is_shared)
        def _():
            for tile in tiles:
                keep_owned_rows(tile, begin, end)
            if g is not None:
                keep_owned_gates(g, begin, end)
            plgpu.commit_smem()

    def mask_tokens(step):
        stage, slot, place = lax.rem(step, token_stages), slot_of(step), parts_of(step)[0]
        plgpu.barrier_wait(tokens.at[stage])

        @pl.when(lax.rem(step, v_tiles) == 0)
        def _():
            plgpu.barrier_wait(gates.at[slot])
            mask(place, (), g_smem.at[slot])

        mask(place, (x_smem.at[stage, 0], x_smem.at[stage, 1]))
        plgpu.barrier_arrive(masked.at[stage])

    def mask_qk(load):
        plgpu.barrier_wait(qk)
        mask(place_of(lax.div(load, query_heads)), (q_smem, k_smem))
        plgpu.barrier_arrive(masked_qk)

    def load_beta(n):
        """beta of the n-th head of this CTA."""
        place, head, _ = parts_of(n * v_tiles)
        plgpu.copy_gmem_to_smem(beta_gmem.at[place.span.row, head, place.tokens], beta_smem, strengths)

    def last_gate(step):
        """That of a step's head."""
        slot = slot_of(step)
        if not sizes.packed:  # else waited for by the mask
            plgpu.barrier_wait(gates.at[slot])
        return g_smem[slot, CHUNK - 1]

    def inner_product(step):
        """Sums of S dS over the columns of K, for the rows of a step."""
        stage = lax.rem(step, state_stages)
        plgpu.barrier_wait(states.at[stage])
        product = dev.product(s_smem.at[stage, 0], transposed(s_smem.at[stage, 1]))
        plgpu.commit_smem()  # every warp's product has ended before one of them loads the stage again
        return dev.diagonal(product)

    def gate_gradient(place, head, inner, is_last):
        """dg of a head to memory."""
        plgpu.barrier_wait(sums)
        diagonal_smem[...] = inner  # in place of what has been read
        plgpu.commit_smem()
        inner = plgpu.load(diagonal_smem, layout=COL)
        parts = ([plgpu.load(y.at[i], layout=COL) for i in range(K // WIDTH)] for y in (x_sums, l_sums))
        not_before, before = (along_columns(sum(part, inner), CHUNK) for part in parts)
        dg = jnp.sum(jnp.where(dev.row_minus_column() <= 0, not_before, before), axis=1)
        plgpu.commit_smem()  # all loads have arrived
        pl.when(jnp.logical_not(is_last))(lambda: plgpu.barrier_arrive(scored))
        dg_gmem.at[place.visit, head][...] = dg

    @pl.when(wg == COMPUTE)
    def helper():
        plgpu.set_max_registers(config.helper_registers, action="decrease")
        loads = items * query_heads
        steps = loads * steps_per_load
        # A compute warpgroup reads the tokens of all steps of a head before it releases the first: masks run ahead.
        ahead = min(token_stages - 1, v_tiles)

        pl.when(loads > 0)(lambda: load_qk(jnp.int32(0)))
        if sizes.float16:
            pl.when(loads > 0)(lambda: load_beta(jnp.int32(0)))
        for j in range(max(token_stages, state_stages)):
            if j < token_stages:
                pl.when(j < steps)(functools.partial(load_tokens, jnp.int32(j)))
            if j < state_stages:
                pl.when(j < steps)(functools.partial(load_states, jnp.int32(j)))
        if sizes.packed:
            for j in range(ahead):
                pl.when(j < steps)(functools.partial(mask_tokens, jnp.int32(j)))
            pl.when(loads > 0)(lambda: mask_qk(jnp.int32(0)))

        def step(i, carry):
            inner, decay = carry
            if sizes.packed:
                pl.when(i + ahead < steps)(lambda: mask_tokens(i + ahead))
            is_first = lax.rem(i, v_tiles) == 0
            decay = lax.cond(is_first, lambda: jnp.exp2(last_gate(i)), lambda: decay)
            inner = jnp.where(is_first, 0.0, inner) + inner_product(i)
            plgpu.barrier_wait(consumed.at[lax.rem(i, state_stages)])
            pl.when(i + state_stages < steps)(lambda: load_states(i + state_stages))
            pl.when(i + token_stages < steps)(lambda: load_tokens(i + token_stages))

            @pl.when(lax.rem(i + 1, steps_per_load) == 0)
            def _():
                plgpu.barrier_wait(used_qk)
                load = lax.div(i, steps_per_load) + 1

                @pl.when(load < loads)
                def _():
                    load_qk(load)
                    if sizes.packed:
                        mask_qk(load)

            @pl.when(lax.rem(i + 1, v_tiles) == 0)
            def _():
                gate_gradient(*parts_of(i)[:2], inner * decay, i + 1 == steps)
                if sizes.float16:
                    pl.when(i + 1 < steps)(lambda: load_beta(lax.div(i + 1, v_tiles)))

            return inner, decay

        lax.fori_loop(0, steps, step, (zeros((WIDTH,), f32, ROW), jnp.float32(0.0)))

    # Compute warpgroups

    # The flat one is for packed rows only.
    out_tiles, out_flat = out_smem if sizes.packed else (out_smem, out_smem)

    def own_number():
        """Number of this warpgroup, asked for inside the loop: addresses made of it then do not wait in registers."""
        return lax.axis_index("wg").astype(jnp.int32)

    def own_columns():
        """Its columns of K. With 64 of them both warpgroups make them, and one stores."""
        return pl.ds(jnp.minimum(own_number(), K // WIDTH - 1) * WIDTH, WIDTH)

    def lifted(x, lift):
        return x if lift is None else x * jnp.exp2(lift)

    def lowered(x, lift):
        return x if lift is None else x * jnp.exp2(-lift)

    def times_beta(x):
        """A vector along the rows times beta."""
        return x * plgpu.load(beta_smem, layout=ROW) if sizes.float16 else x

    def load(tile):
        return dev.widen(plgpu.load(tile, layout=WGMMA))

    def release(step):
        dev.release(consumed.at[lax.rem(step, state_stages)])

    def store(place, head, x, target):
        """The own columns of dq or dk to memory."""
        wg, own = own_number(), own_columns()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        x = jnp.where(place.span.is_padding, 0.0, x).astype(dtype) if sizes.packed else x.astype(dtype)
        row, tile = place.span.row, out_tiles.at[wg]

        def whole():
            tile[...] = x
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, target.at[row, place.tokens, head, own])

        if not sizes.packed:
            return whole()
        begin, end, is_shared = owned_rows(place.span, place.chunk)

        @pl.when(is_shared)
        def _():
            flat, token = out_flat.at[wg], place.chunk * CHUNK
            store_any(flat, x)
            plgpu.commit_smem()
            store_rows(flat, lambda r: target.at[row, token + r, head, own], begin, end)

        pl.when(jnp.logical_not(is_shared))(whole)

    def write_score(place, head, first_step, lift):
        """dP or N of a head, for both warpgroups; G and the last gate."""
        wg = own_number()
        makes_dp = wg == 0
        log2_scale = math.log2(abs(sizes.scale)) if sizes.scale else -math.inf
        sign = math.copysign(1.0, sizes.scale)

        def body(acc):
            for t in range(v_tiles):
                stage = lax.rem(first_step + t, token_stages)
                plgpu.barrier_wait((masked if sizes.packed else tokens).at[stage])
                dev.issue(acc, x_smem.at[stage, wg], transposed(x_smem.at[stage, 2]))
            return dev.collect(acc)

        score = pl.run_scoped(body, plgpu.ACC((CHUNK, CHUNK), f32))
        slot = slot_of(first_step)
        if not sizes.packed:
            plgpu.barrier_wait(gates.at[slot])
        g_rows, g_columns = (plgpu.load(g_smem.at[slot], layout=layout) for layout in (ROW, COL))
        g_last = g_smem[slot, CHUNK - 1]
        if sizes.float16:
            plgpu.barrier_wait(strengths)
        diagonal = dev.diagonal(score)
        exponents = g_rows + jnp.where(makes_dp, log2_scale, 0.0)
        if lift is not None:
            exponents = exponents + lift
        gamma = jnp.exp2(along_rows(exponents, CHUNK) - along_columns(g_columns, CHUNK))
        score = score * jnp.where(dev.row_minus_column() > 0, gamma, 0.0)
        if sizes.float16:
            factors = jnp.where(makes_dp, sign, -plgpu.load(beta_smem, layout=ROW))
            score = (
                score * along_rows(factors, CHUNK) * along_columns(plgpu.load(beta_smem, layout=COL), CHUNK)
            )
        else:
            score = score * jnp.where(makes_dp, sign, -1.0)
        score = score.astype(dtype)
        pl.when(first_step > 0)(lambda: plgpu.barrier_wait(scored))
        score_smem.at[wg][...] = score

        @pl.when(makes_dp)
        def _():
            diagonal_smem[...] = times_beta(diagonal * sizes.scale)

        @pl.when(jnp.logical_not(makes_dp))
        def _():
            dbeta_gmem.at[place.visit, head][...] = diagonal

        plgpu.commit_smem()
        plgpu.barrier_arrive(scores)
        return g_rows, g_last

    def over_states(first_step):
        """u dS, dO S and dv S."""
        own = own_columns()

        def body(late, read_q, read_k):
            for t in range(v_tiles):
                step = first_step + t
                token_stage, state_stage = lax.rem(step, token_stages), lax.rem(step, state_stages)
                plgpu.barrier_wait(states.at[state_stage])
                do, dv, u = (x_smem.at[token_stage, i] for i in range(3))
                h, dh = (s_smem.at[state_stage, i, :, own] for i in range(2))
                dev.issue(late, u, dh)
                dev.issue(read_q, do, h)
                dev.issue(read_k, dv, h)
                if t > 0:
                    dev.finish(3)
                    release(step - 1)
            products = [dev.collect(x, newer) for newer, x in ((2, late), (1, read_q), (0, read_k))]
            release(first_step + v_tiles - 1)
            return products

        return pl.run_scoped(body, *[plgpu.ACC((CHUNK, WIDTH), f32)] * 3)

    def add_head(place, head, first_step, is_first, is_last, lift, dq, dk):
        """dq and dk with the parts of one output head; its sums for the helper."""
        g_rows, g_last = write_score(place, head, first_step, lift)
        late, read_q, read_k = over_states(first_step)
        wg, own = own_number(), own_columns()
        zero = lax.shift_right_logical(wg, 8)  # as wg itself: keeps the tiles' addresses out of registers
        p_tile, n_tile = score_smem.at[zero], score_smem.at[zero + 1]
        q_tile, k_tile = q_smem.at[:, own], k_smem.at[:, own]
        pl.when(is_first)(lambda: plgpu.barrier_wait(masked_qk if sizes.packed else qk))
        decay, since = jnp.exp2(g_rows), times_beta(jnp.exp2(g_last - g_rows))
        written = jnp.sum(load(k_tile) * late, axis=1) * since
        dk = dk + late * along_rows(since, WIDTH)
        read_q = read_q * along_rows(lifted(decay * sizes.scale, lift), WIDTH)
        read_k = read_k * along_rows(times_beta(lifted(-decay, lift)), WIDTH)
        plgpu.barrier_wait(scores)
        starts = [read_q, read_k, zeros((CHUNK, WIDTH), f32)]

        def products(add):
            add(0, p_tile, k_tile)
            add(1, n_tile, k_tile)
            add(2, transposed(p_tile), q_tile)
            add(2, transposed(n_tile), k_tile)

        read_q, read_k, write = (lowered(x, lift) for x in dev.accumulate(starts, products))
        diagonal = along_rows(plgpu.load(diagonal_smem, layout=ROW), WIDTH)
        x = jnp.sum(load(k_tile) * (read_k - write), axis=1)
        dq, dk = dq + read_q + diagonal * load(k_tile), dk + read_k + write
        x, dk = x + jnp.sum(load(q_tile) * read_q, axis=1), dk + diagonal * load(q_tile)
        x_sums.at[wg][...] = x
        l_sums.at[wg][...] = written
        plgpu.commit_smem()  # also for q, k and the diagonal, which may still be on their way into registers
        plgpu.barrier_arrive(sums)
        is_last_head = first_step + v_tiles == items * query_heads * steps_per_load
        pl.when(jnp.logical_not(is_last_head))(lambda: plgpu.barrier_arrive(scored))
        pl.when(is_last)(lambda: plgpu.barrier_arrive(used_qk))
        return dq, dk

    def add_item(n, _):
        place = place_of(n)
        stores = pl.when(own_number() == 0) if K == WIDTH else lambda f: f()

        def add_query(query, dk):
            def one(e, carry):
                first_step = (n * query_heads + query) * steps_per_load + e * v_tiles
                head = head_of(place, query, e)
                lift = lift_gmem[place.visit, head] if sizes.float16 else None
                return add_head(place, head, first_step, e == 0, e == heads_per_query - 1, lift, *carry)

            dq, dk = lax.fori_loop(0, heads_per_query, one, (zeros((CHUNK, WIDTH), f32), dk))
            stores(lambda: store(place, place.key_head * query_heads + query, dq, dq_gmem))
            return dk

        dk = lax.fori_loop(0, query_heads, add_query, zeros((CHUNK, WIDTH), f32))
        stores(lambda: store(place, place.key_head, dk, dk_gmem))
        return ()

    @pl.when(wg < COMPUTE)
    def compute():
        plgpu.set_max_registers(config.compute_registers, action="increase")
        lax.fori_loop(0, items, add_item, ())
        plgpu.wait_smem_to_gmem(0)


class Gradients(NamedTuple):
    """Gradients with padded widths; dg of every in-chunk cumulative gate summed up, that is of each token's gate."""

    dq: Float[Array, "B T Hdq K"]
    """Of each query head, or of each output head where key heads share query heads."""
    dk: Float[Array, "B T Hk K"]
    dg: Float[Array, "visits HO C"]
    dbeta: Float[Array, "visits HO C"]
    """beta^2 dbeta; in float16 dbeta itself."""


def gradients(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    do: Float[Array, "B T HO V"],
    u: Float[Array, "visits HO C V"],
    dv: Float[Array, "B T HO V"],
    h: Float[Array, "visits HO V K"],
    dh: Float[Array, "visits HO V K"],
    g2_cum: Float[Array, "B HO T64"],
    tables: VisitTables | None,
    *,
    beta: Float[Array, "B HO T64"] | None = None,
    lift: Float[Array, "visits HO"] | None = None,
    scale: float,
    config: Config | None = None,
    interpret=None,
) -> Gradients:
    """dq, dk, dg and dbeta; see the module docstring.

    Args:
      q, k, do: bfloat16 or float16; K and V multiples of 64, T a multiple of 8.
      u, dv, h, dh: of state_adjoints.
      g2_cum: of chunk_gates.
      tables: of packed rows (B = 1), None when every row of the batch is one sequence.
      beta, lift: given for float16 and for nothing else: beta of state_adjoints, and -log2 of the largest entry of
        Gamma below its diagonal, from 0 to MAX_LIFT.
      scale: factor of the output.
    """
    if (beta is None or lift is None) == (k.dtype == jnp.float16):
        got = [type(x).__name__ for x in (beta, lift)]
        raise ValueError(f"beta and lift: expected for float16 only, got {got} for {k.dtype}")
    inputs = (q, k, do, u, dv, h, dh, g2_cum, beta, lift)
    call = functools.partial(_call, inputs, tables, scale=scale, config=config, interpret=interpret)
    K = k.shape[3]
    parts = [call(first, min(MAX_COLUMNS, K - first)) for first in range(0, K, MAX_COLUMNS)]
    if len(parts) == 1:
        return parts[0]
    return Gradients(
        jnp.concatenate([x.dq for x in parts], axis=3),
        jnp.concatenate([x.dk for x in parts], axis=3),
        functools.reduce(jnp.add, [x.dg for x in parts]),
        parts[0].dbeta,  # every launch has all of it
    )


def _call(
    inputs, tables: VisitTables | None, first_column: int, K: int, *, scale, config: Config | None, interpret
) -> Gradients:
    """The kernel, for the K columns of q and k from first_column on."""
    q, k, _, _, _, h, _, _, beta, _ = inputs
    (B, T, Hk), Hq, (visits, HO, V) = k.shape[:3], q.shape[2], h.shape[:3]
    packed, float16 = tables is not None, beta is not None
    config = config or Config.default(K, V)
    if V > WIDTH * config.token_stages:
        raise ValueError(f"config.token_stages: expected at least {V // WIDTH}, got {config.token_stages}")
    sizes = _Sizes(
        T=T,
        N=B if tables is None else tables.cu_seqlens.shape[0] - 1,
        Hq=Hq,
        Hk=Hk,
        HO=HO,
        dq_heads=Hq if Hq % Hk == 0 else HO,
        K=K,
        first_column=first_column,
        V=V,
        visits=visits,
        scale=scale,
        packed=packed,
        float16=float16,
    )
    dtype, f32 = k.dtype, jnp.float32

    def tiles(*shape, flat=False):
        tile = plgpu.SMEM(shape, dtype, transforms=tiling(128))
        return plgpu.RefUnion(tile, plgpu.SMEM(shape, dtype)) if flat and packed else tile

    def barriers(arrivals, count=1):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    sums = jax.ShapeDtypeStruct((visits, HO, CHUNK), f32)
    return Gradients(
        *launch(
            functools.partial(_body, config=config, sizes=sizes, interpreted=interpret is not None),
            *inputs,
            *(tables or ()),
            out_type=(
                jax.ShapeDtypeStruct((B, T, sizes.dq_heads, K), dtype),
                jax.ShapeDtypeStruct((B, T, Hk, K), dtype),
                sums,
                sums,
            ),
            scratch_types=(
                tiles(CHUNK, K),
                tiles(CHUNK, K),
                tiles(config.token_stages, 3, CHUNK, WIDTH),
                tiles(config.state_stages, 2, WIDTH, K),
                tiles(COMPUTE, CHUNK, CHUNK),
                tiles(COMPUTE, CHUNK, WIDTH, flat=True),
                plgpu.SMEM((6 + config.heads(V), CHUNK), f32),
                *([barriers(1)] * float16),
                barriers(3, config.token_stages),
                barriers(1, config.heads(V)),
                barriers(2, config.state_stages),
                barriers(2),
                barriers(1, config.token_stages),
                barriers(1),
                barriers(COMPUTE, config.state_stages),
                barriers(COMPUTE),
                barriers(COMPUTE),
                barriers(COMPUTE),
                barriers(COMPUTE + 1),
            ),
            grid=(config.ctas,),
            grid_names=("cta",),
            num_threads=COMPUTE + 1,
            thread_name="wg",
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                **COMPILER_PARAMS,
                unsafe_no_auto_barriers=not config.auto_barriers,
                reduction_scratch_bytes=0,  # every sum stays inside a warp
            ),
        )
    )
