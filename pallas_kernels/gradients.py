"""Every gradient but that of v, all chunks in parallel, from the states and adjoints at their borders.

For one chunk and one head, with S [V, K] before the chunk, dS [V, K] after it (both transposed), u and dv [C, V]:

    dP = scale Gamma * (dO u^T)                 N = -Gamma * (dv u^T), strictly lower
    dq = scale D (dO S) + dP K
    read = -D (dv S) + N K                      late = Dr (u dS)
    dk = read + late + dP^T Q + N^T K           dbeta = rowsum(dv * u) / beta^2

dg needs no more products. With x_i = q_i . dq_i + k_i . (read - dP^T Q - N^T K)_i and l_i = k_i . late_i

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

Threads (warpgroups): the query warpgroup makes dP, N, dq and <S, dS>; the key warpgroup makes dk; the helper puts dg
together, and loads by bulk copies, tokens (do, dv, u) further ahead than states (S, dS), since dP and N need tokens
only. What a warpgroup waits for binds this kernel, not its instructions: keep the longest chain short.

| barrier   | arrives                                             | waits                                        |
|-----------|-----------------------------------------------------|----------------------------------------------|
| tokens    | bulk copies of do, dv, u and g2_cum of a step       | query, key; helper first if rows are packed  |
| states    | bulk copies of S and dS of a step                   | query, key                                   |
| qk        | bulk copies of q and k                              | query, key; helper first if rows are packed  |
| masked,   | helper: foreign tokens of a step, or of q and k,    | query, key (packed rows only)                |
| masked_qk | are zeros                                           |                                              |
| consumed  | query, key: step read                               | helper, before it loads these stages again   |
| used_qk   | query, key: q and k read                            | helper, before it loads the next q and k     |
| scores    | query: dP, N and the diagonal of dP are written     | key                                          |
| strengths | bulk copy of beta of a head (float16), to where x   | query, key                                   |
|           | of the key warpgroup is written later               |                                              |
| sums      | query, key: x, l and <S, dS> are written            | helper                                       |
| attended  | query: dq of a query head done, and P read with it  | key, before dk leaves through the tile of P  |
| scored    | key: scores read, dk has left; helper: sums read    | query, before it writes those of a next head |

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
    Device,
    along_columns,
    along_rows,
    iota,
    round_up,
    store_any,
    take,
    tiling,
    transposed,
    zeros,
)
from pallas_kernels.spans import (
    Span,
    VisitTables,
    dense_span,
    gamma_of,
    keep_owned_gates,
    keep_owned_rows,
    owned_rows,
    packed_span,
    store_rows,
)

WIDTH = 64
"""Columns of V of one step, and of a tile."""

QUERY, KEY, HELPER = range(3)
"""Warpgroups."""

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
    helper_registers: int = 56
    query_registers: int = 216
    key_registers: int = 232
    """40, 224 and 240 take 4 % more time; 64, 208 and 232 1 % less (H200, 2026-11-21, K = V = 128)."""
    ctas: int = NUM_SMS
    auto_barriers: bool = False
    """Lets Pallas put a barrier around every access to shared memory."""

    def smem_bytes(self, K: int) -> int:
        """Shared memory of a CTA, for K columns in a launch."""
        steps = self.token_stages * 3 * 2 * CHUNK * WIDTH + self.state_stages * 2 * 2 * WIDTH * K
        vectors = round_up(4 * CHUNK * (4 + self.token_stages), 1024)
        return steps + 2 * 3 * CHUNK * K + 2 * 2 * CHUNK**2 + vectors + 256

    @classmethod
    def default(cls, K: int, V: int, packed: bool = False) -> "Config":
        """Most stages that fit."""
        registers = (72, 216, 216) if packed else (56, 216, 232)
        for states in (4, 3, 2):
            config = cls(max(4, V // WIDTH), states, *registers)
            if config.smem_bytes(K) <= SMEM_LIMIT:
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


def _accumulate(dev: Device, starts: list[jax.Array], products: list[tuple]) -> Any:
    """starts, with a @ b added to number n for each (n, a, b)."""
    if dev.interpreted:
        sums = list(starts)
        for n, a, b in products:
            sums[n] = sums[n] + dev.product(a, b)
        return sums

    def body(accs):
        for n, a, b in products:
            plgpu.wgmma(accs[n], a, b)

    return pl.run_state(body)([plgpu.ACC.init(x) for x in starts])


def _diagonal(x: jax.Array) -> jax.Array:
    """Diagonal of [C, C] in layout ROW."""
    on_diagonal = iota((CHUNK, CHUNK), 0) == iota((CHUNK, CHUNK), 1)
    return jnp.sum(jnp.where(on_diagonal, x, 0.0), axis=1)


def _body(*refs, config: Config, sizes: _Sizes, interpreted: bool):
    refs = list(refs)
    q_gmem, k_gmem, do_gmem, u_gmem, dv_gmem, h_gmem, dh_gmem, g_gmem = (refs.pop(0) for _ in range(8))
    beta_gmem, lift_gmem = (take(refs, sizes.float16) for _ in range(2))
    tables = [refs.pop(0) for _ in range(3 * sizes.packed)]
    dq_gmem, dk_gmem, dg_gmem, dbeta_gmem = (refs.pop(0) for _ in range(4))
    q_smem, k_smem, x_smem, s_smem, pn_smem, dq_smem, vectors = refs[:7]
    # Rows with two uses: the first has been read, or has left, when the second is written.
    x_dg_smem, dbeta_inner_smem, x_key_smem, diagonal_written_smem = (vectors.at[i] for i in range(4))
    g_smem = vectors.at[4:]
    beta_smem: Any = x_key_smem if sizes.float16 else None
    strengths: Any = refs[7] if sizes.float16 else None
    tokens, states, qk, masked, masked_qk, consumed, used_qk, scores, sums, attended, scored = refs[-11:]

    dev, dtype, f32 = Device(interpreted), k_gmem.dtype, jnp.float32
    token_stages, state_stages, K = config.token_stages, config.state_stages, sizes.K
    num_chunks, v_tiles = -(-sizes.T // CHUNK), sizes.V // WIDTH
    query_heads = sizes.dq_heads // sizes.Hk  # of one key head
    heads_per_query = sizes.HO // sizes.dq_heads
    steps_per_load = heads_per_query * v_tiles

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

    def load_tokens(step):
        stage = lax.rem(step, token_stages)
        place, head, columns = parts_of(step)
        row = place.span.row
        for source, destination in (
            (do_gmem.at[row, place.tokens, head, columns], x_smem.at[stage, 0]),
            (dv_gmem.at[row, place.tokens, head, columns], x_smem.at[stage, 1]),
            (u_gmem.at[place.visit, head, :, columns], x_smem.at[stage, 2]),
            (g_gmem.at[row, head, place.tokens], g_smem.at[stage]),
        ):
            plgpu.copy_gmem_to_smem(source, destination, tokens.at[stage])

    def load_states(step):
        stage = lax.rem(step, state_stages)
        place, head, columns = parts_of(step)
        for i, source in enumerate((h_gmem, dh_gmem)):
            source = columns_of(source.at[place.visit, head, columns])
            plgpu.copy_gmem_to_smem(source, s_smem.at[stage, i], states.at[stage])

    def mask(place, tiles, gates=None):
        begin, end, is_shared = owned_rows(place.span, place.chunk)

        @pl.when(is_shared)
        def _():
            for tile in tiles:
                keep_owned_rows(tile, begin, end)
            if gates is not None:
                keep_owned_gates(gates, begin, end)
            plgpu.commit_smem()

    def mask_tokens(step):
        stage = lax.rem(step, token_stages)
        plgpu.barrier_wait(tokens.at[stage])
        mask(parts_of(step)[0], (x_smem.at[stage, 0], x_smem.at[stage, 1]), g_smem.at[stage])
        plgpu.barrier_arrive(masked.at[stage])

    def mask_qk(load):
        plgpu.barrier_wait(qk)
        mask(place_of(lax.div(load, query_heads)), (q_smem, k_smem))
        plgpu.barrier_arrive(masked_qk)

    def load_beta(n):
        """beta of the n-th head of this CTA."""
        place, head, _ = parts_of(n * v_tiles)
        plgpu.copy_gmem_to_smem(beta_gmem.at[place.span.row, head, place.tokens], beta_smem, strengths)

    def store_vector(smem, x, target):
        """[C] in layout ROW to memory."""
        smem[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, target)

    def gate_gradient(place, head, is_last):
        """dg of a head to memory."""
        plgpu.barrier_wait(sums)
        x_query, x_key, written, inner = (
            plgpu.load(v, layout=COL)
            for v in (x_dg_smem, x_key_smem, diagonal_written_smem, dbeta_inner_smem)
        )
        x, written = (along_columns(y + inner, CHUNK) for y in (x_query + x_key, written))
        not_before = iota((CHUNK, CHUNK), 1) >= iota((CHUNK, CHUNK), 0)
        dg = jnp.sum(jnp.where(not_before, x, written), axis=1)
        plgpu.commit_smem()  # all threads have read x before one writes dg in its place
        store_vector(x_dg_smem, dg, dg_gmem.at[place.visit, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(jnp.logical_not(is_last))(lambda: plgpu.barrier_arrive(scored))

    @pl.when(wg == HELPER)
    def helper():
        plgpu.set_max_registers(config.helper_registers, action="decrease")
        loads = items * query_heads
        steps = loads * steps_per_load
        # The query warpgroup reads the tokens of all steps of a head before it releases the first: masks run ahead.
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

        def step(i, _):
            if sizes.packed:
                pl.when(i + ahead < steps)(lambda: mask_tokens(i + ahead))
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

            pl.when(lax.rem(i + 1, v_tiles) == 0)(lambda: gate_gradient(*parts_of(i)[:2], i + 1 == steps))
            if sizes.float16:  # the row is free: x has been read
                is_next = (lax.rem(i + 1, v_tiles) == 0) & (i + 1 < steps)
                pl.when(is_next)(lambda: load_beta(lax.div(i + 1, v_tiles)))
            return ()

        lax.fori_loop(0, steps, step, ())
        plgpu.wait_smem_to_gmem(0)

    # Both compute warpgroups

    pn_tiles, pn_flat = pn_smem if sizes.packed else (pn_smem, None)  # the flat one for packed rows only
    dq_tiles, dq_flat = dq_smem if sizes.packed else (dq_smem, None)
    p_tile, n_tile = pn_tiles.at[0], pn_tiles.at[1]

    def wait_tokens(step):
        plgpu.barrier_wait((masked if sizes.packed else tokens).at[lax.rem(step, token_stages)])

    def wait_states(step):
        plgpu.barrier_wait(states.at[lax.rem(step, state_stages)])

    def wait_qk(is_first):
        pl.when(is_first)(lambda: plgpu.barrier_wait(masked_qk if sizes.packed else qk))

    def x_tiles(step):
        """do, dv, u of a step."""
        stage = lax.rem(step, token_stages)
        return (x_smem.at[stage, i] for i in range(3))

    def s_tiles(step):
        """S, dS of a step."""
        stage = lax.rem(step, state_stages)
        return (s_smem.at[stage, i] for i in range(2))

    def lift_of(place, query, e):
        """None, or the exponent by which the scores of a head are lifted."""
        return lift_gmem[place.visit, head_of(place, query, e)] if sizes.float16 else None

    def lifted(x, lift):
        return x if lift is None else x * jnp.exp2(lift)

    def lowered(x, lift):
        return x if lift is None else x * jnp.exp2(-lift)

    def times_beta(x, layout=ROW):
        """A vector along the rows, or a matrix by its rows (ROW) or columns (COL), times beta."""
        if beta_smem is None:
            return x
        beta = plgpu.load(beta_smem, layout=layout)
        if x.ndim == 2:
            beta = along_rows(beta, x.shape[1]) if layout == ROW else along_columns(beta, x.shape[0])
        return x * beta

    def wait_beta():
        if strengths is not None:
            plgpu.barrier_wait(strengths)

    def release(step):
        dev.release(consumed.at[lax.rem(step, state_stages)])

    def release_qk():
        plgpu.commit_smem()  # q and k may still be on their way into registers
        dev.release(used_qk)

    def finish(running):
        """Waits for all but the youngest products."""
        if not interpreted:
            plgpu.wgmma_wait(running)

    def rowsum(tile, x):
        """Sums over the columns of a tile times x."""
        return jnp.sum(plgpu.load(tile, layout=WGMMA).astype(f32) * x, axis=1)

    def store(place, head, x, target, tiles, flat):
        """dq or dk to memory, 64 columns at a time."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        x = jnp.where(place.span.is_padding, 0.0, x).astype(dtype) if sizes.packed else x.astype(dtype)
        parts = [(t, x[:, t * WIDTH : (t + 1) * WIDTH], pl.ds(t * WIDTH, WIDTH)) for t in range(K // WIDTH)]
        row = place.span.row

        def whole():
            for t, part, _ in parts:
                tiles.at[t][...] = part
            plgpu.commit_smem()
            for t, _, columns in parts:
                plgpu.copy_smem_to_gmem(tiles.at[t], target.at[row, place.tokens, head, columns])

        if not sizes.packed:
            return whole()
        begin, end, is_shared = owned_rows(place.span, place.chunk)

        @pl.when(is_shared)
        def _():
            for t, part, _ in parts:
                store_any(flat.at[t], part)
            plgpu.commit_smem()
            token = place.chunk * CHUNK
            for t, _, columns in parts:
                destination = lambda r, columns=columns: target.at[row, token + r, head, columns]  # noqa: E731
                store_rows(flat.at[t], destination, begin, end)

        pl.when(jnp.logical_not(is_shared))(whole)

    # Query warpgroup

    def make_scores(first_step):
        """dO u^T and dv u^T; G, Gamma and gl."""

        def body(p, n):
            for t in range(v_tiles):
                wait_tokens(first_step + t)
                do, dv, u = x_tiles(first_step + t)
                dev.issue(p, do, transposed(u))
                dev.issue(n, dv, transposed(u))
            gates = g_smem.at[lax.rem(first_step, token_stages)]
            g_rows, gamma = gamma_of(gates)
            return dev.collect(p), dev.collect(n), g_rows, gamma, jnp.exp2(gates[CHUNK - 1])

        accumulator = plgpu.ACC((CHUNK, CHUNK), f32)
        return pl.run_scoped(body, accumulator, accumulator)

    def read_states(first_step):
        """dO S, and the sums of S dS over K and over tiles of V."""

        def body(acc):
            inner = zeros((WIDTH,), f32, ROW)
            for t in range(v_tiles):
                step = first_step + t
                wait_states(step)
                do, _, _ = x_tiles(step)
                h, dh = s_tiles(step)
                dev.issue(acc, do, h)
                for column in range(0, K, WIDTH):
                    part = (slice(None), slice(column, column + WIDTH))
                    inner = inner + rowsum(h.at[part], plgpu.load(dh.at[part], layout=WGMMA).astype(f32))
                finish(0)
                plgpu.commit_smem()  # h and dh may still be on their way into registers
                release(step)
            return dev.collect(acc), inner

        return pl.run_scoped(body, plgpu.ACC((CHUNK, K), f32))

    def query_step(place, head, first_step, dq, lift, is_first, is_last):
        """dq with the part of one output head; its scores and sums for the others."""
        p, n, g_rows, gamma, decay = make_scores(first_step)
        wait_beta()
        diagonal = times_beta(_diagonal(p) * sizes.scale)
        write_strengths = _diagonal(n)
        strictly_lower = iota((CHUNK, CHUNK), 0) > iota((CHUNK, CHUNK), 1)
        gamma = times_beta(lifted(jnp.where(strictly_lower, gamma, 0.0), lift), COL)
        n = times_beta(n)
        p, n = (p * (gamma * sizes.scale)).astype(dtype), (n * -gamma).astype(dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(first_step > 0)(lambda: plgpu.barrier_wait(scored))
        p_tile[...] = p
        n_tile[...] = n
        diagonal_written_smem[...] = diagonal
        store_vector(dbeta_inner_smem, write_strengths, dbeta_gmem.at[place.visit, head])
        plgpu.barrier_arrive(scores)

        read, inner = read_states(first_step)
        wait_qk(is_first)
        start = read * along_rows(lifted(jnp.exp2(g_rows) * sizes.scale, lift), K)
        (part,) = _accumulate(dev, [start], [(0, p_tile, k_smem)])
        part = lowered(part, lift)
        x_dg_smem[...] = rowsum(q_smem, part)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dbeta_inner_smem[...] = inner * decay
        plgpu.commit_smem()
        plgpu.barrier_arrive(sums)
        dq = dq + part + along_rows(diagonal, K) * plgpu.load(k_smem, layout=WGMMA).astype(f32)

        @pl.when(is_last)
        def _():
            release_qk()
            plgpu.barrier_arrive(attended)

        return dq

    def query_item(n, _):
        place = place_of(n)

        def one_query(query, _):
            load = n * query_heads + query

            def one(e, dq):
                first_step = load * steps_per_load + e * v_tiles
                is_first, is_last = e == 0, e == heads_per_query - 1
                head, lift = head_of(place, query, e), lift_of(place, query, e)
                return query_step(place, head, first_step, dq, lift, is_first, is_last)

            dq = lax.fori_loop(0, heads_per_query, one, zeros((CHUNK, K), f32))
            store(place, place.key_head * query_heads + query, dq, dq_gmem, dq_tiles, dq_flat)
            return ()

        return lax.fori_loop(0, query_heads, one_query, ())

    # Key warpgroup

    def over_v(first_step, dk, lift, is_first):
        """dk + late, l, and lifted -D (dv S)."""

        def body(late, read):
            for t in range(v_tiles):
                step = first_step + t
                wait_tokens(step)
                wait_states(step)
                _, dv, u = x_tiles(step)
                h, dh = s_tiles(step)
                dev.issue(late, u, dh)
                dev.issue(read, dv, h)
                if t == min(state_stages, v_tiles) - 1:  # later tiles wait for the query warpgroup
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    pl.when(first_step > 0)(lambda: plgpu.barrier_arrive(scored))
                if t > 0:
                    finish(2)
                    release(step - 1)
            gates = g_smem.at[lax.rem(first_step + v_tiles - 1, token_stages)]
            g_rows, g_last = plgpu.load(gates, layout=ROW), gates[CHUNK - 1]
            wait_beta()
            decay = times_beta(lifted(-jnp.exp2(g_rows), lift))
            wait_qk(is_first)
            late = dev.collect(late, newer=1)
            late = late * along_rows(times_beta(jnp.exp2(g_last - g_rows)), K)
            written, with_late = rowsum(k_smem, late), dk + late
            read = dev.collect(read) * along_rows(decay, K)
            release(first_step + v_tiles - 1)
            return with_late, written, read

        accumulator = plgpu.ACC((CHUNK, K), f32)
        return pl.run_scoped(body, accumulator, accumulator)

    def key_step(first_step, dk, lift, is_first, is_last):
        """dk with the part of one output head; its parts of x and l for the helper."""
        dk, written, read = over_v(first_step, dk, lift, is_first)
        plgpu.barrier_wait(scores)
        (read,) = _accumulate(dev, [read], [(0, n_tile, k_smem)])
        read = lowered(read, lift)
        x, dk = rowsum(k_smem, read), dk + read
        diagonal = along_rows(plgpu.load(diagonal_written_smem, layout=ROW), K)
        dk = dk + diagonal * plgpu.load(q_smem, layout=WGMMA).astype(f32)
        products = [(0, transposed(p_tile), q_smem), (0, transposed(n_tile), k_smem)]
        (write,) = _accumulate(dev, [zeros((CHUNK, K), f32)], products)
        write = lowered(write, lift)
        x, dk = x - rowsum(k_smem, write), dk + write
        pl.when(is_last)(release_qk)

        x_key_smem[...] = x
        diagonal_written_smem[...] = written
        plgpu.commit_smem()
        plgpu.barrier_arrive(sums)
        pl.when(is_last)(lambda: plgpu.barrier_wait(attended))
        return dk

    def key_item(n, _):
        place = place_of(n)

        def one(e, dk):
            rest = lax.rem(e, heads_per_query)
            first_step = (n * query_heads * heads_per_query + e) * v_tiles
            is_first, is_last = rest == 0, rest == heads_per_query - 1
            return key_step(first_step, dk, lift_of(place, 0, e), is_first, is_last)

        dk = lax.fori_loop(0, query_heads * heads_per_query, one, zeros((CHUNK, K), f32))
        store(place, place.key_head, dk, dk_gmem, pn_tiles, pn_flat)
        return ()

    @pl.when(wg == QUERY)
    def query():
        plgpu.set_max_registers(config.query_registers, action="increase")
        lax.fori_loop(0, items, query_item, ())
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == KEY)
    def key():
        plgpu.set_max_registers(config.key_registers, action="increase")
        lax.fori_loop(0, items, key_item, ())
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
    config = config or Config.default(K, V, packed)
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
        *plgpu.kernel(
            functools.partial(_body, config=config, sizes=sizes, interpreted=interpret is not None),
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
                tiles(2, CHUNK, CHUNK, flat=True),
                tiles(K // WIDTH, CHUNK, WIDTH, flat=True),
                plgpu.SMEM((4 + config.token_stages, CHUNK), f32),
                *([barriers(1)] * float16),
                barriers(4, config.token_stages),
                barriers(2, config.state_stages),
                barriers(2),
                barriers(1, config.token_stages),
                barriers(1),
                barriers(2, config.state_stages),
                barriers(2),
                barriers(1),
                barriers(2),
                barriers(1),
                barriers(2),
            ),
            grid=(config.ctas,),
            grid_names=("cta",),
            num_threads=3,
            thread_name="wg",
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                **COMPILER_PARAMS,
                unsafe_no_auto_barriers=not config.auto_barriers,
                reduction_scratch_bytes=0,  # every sum stays inside a warp
            ),
        )(*(x for x in (*inputs, *(tables or ())) if x is not None))
    )
