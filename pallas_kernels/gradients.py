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

Work: persistent CTAs walk over items, an item being one visit (a chunk, or what a sequence of packed rows owns of
it) of one key head. An item has a step for each 64 columns of V of each of its output heads.

Threads (warpgroups): K / 64 compute warpgroups, each with 64 columns of dq and dk; the first one makes dP, the last
one N, exchanged through shared memory. The helper, after them, loads by bulk copies.

| barrier   | arrives                                          | waits                                         |
|-----------|--------------------------------------------------|-----------------------------------------------|
| loaded    | bulk copies of a step                            | compute; helper first if rows are packed      |
| loaded_qk | bulk copies of q and k                           | the same                                      |
| masked    | helper: foreign tokens of a step are zeros       | compute (packed rows only)                    |
| consumed  | compute: step read                               | helper, before it loads that stage again      |
| used_qk   | compute: q and k read                            | helper, before it loads the next q and k      |
| exchanged | compute: dP, N and the diagonal are written      | compute                                       |
| finished  | compute: dP and N are read, sums are written     | compute                                       |

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], do [B, T, HO, V], u [visits, HO, C, V], dv [B, T, HO, V],
h and dh [visits, HO, V, K], g2_cum and beta_t [B, HO, NT C] f32, tables int32 (packed rows).
Outputs (GMEM): dq [B, T, Hq or HO, K], dk [B, T, Hk, K], dg and dbeta [visits, HO, C] f32.
Shared memory: Config.smem_bytes, 225 KB at K = 128.
Hardware: compute capability 9.0. Limits: K and V multiples of 64, K up to 128; T a multiple of 8.
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
    store_any,
    tiling,
    transposed,
    zeros,
)
from pallas_kernels.state_adjoints import (
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
"""Columns of K of one compute warpgroup, and of V of one step."""

BETA_FLOOR = 2.0**-20
"""Least beta that dbeta is divided by: u and dv are proportional to beta, and the forward writes no less."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the gradients run, not what they compute."""

    stages: int = 3
    """Steps in flight."""
    helper_registers: int = 40
    compute_registers: int = 232
    ctas: int = NUM_SMS
    auto_barriers: bool = False
    """Lets Pallas put a barrier around every access to shared memory."""

    def smem_bytes(self, K: int) -> int:
        """Shared memory of a CTA."""
        warpgroups = K // WIDTH
        stage = 2 * (3 * CHUNK * WIDTH + 2 * WIDTH * K) + 2 * 4 * CHUNK
        once = 2 * 2 * CHUNK * K + 2 * CHUNK**2 * max(2, warpgroups) + 4 * CHUNK * (3 * warpgroups + 3)
        return self.stages * stage + once + 1024

    @classmethod
    def default(cls, K: int, packed: bool = False) -> "Config":
        """Most stages that fit."""
        registers = {1: (208, 232), 2: (40, 232)}[K // WIDTH]
        if packed and K > WIDTH:
            registers = 72, 216
        for stages in (4, 3, 2, 1):
            config = cls(stages, *registers)
            if config.smem_bytes(K) <= SMEM_LIMIT:
                return config
        raise AssertionError("K > 128")


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
    V: int
    visits: int
    scale: float
    packed: bool


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
    q_gmem, k_gmem, do_gmem, u_gmem, dv_gmem, h_gmem, dh_gmem, g_gmem, beta_gmem = (
        refs.pop(0) for _ in range(9)
    )
    tables = [refs.pop(0) for _ in range(3 * sizes.packed)]
    dq_gmem, dk_gmem, dg_gmem, dbeta_gmem = (refs.pop(0) for _ in range(4))
    q_smem, k_smem, x_smem, u_smem, h_smem, dh_smem, pn_smem = refs[:7]
    g_smem, beta_smem, sums_smem, diagonal_smem, dg_smem, dbeta_smem = refs[7:13]
    loaded, loaded_qk, masked, masked_qk, consumed, used_qk, exchanged, finished = refs[13:]

    dev, dtype, f32 = Device(interpreted), k_gmem.dtype, jnp.float32
    stages, num_compute = config.stages, sizes.K // WIDTH
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

    def head_of(place, query, e):
        """Output head of the e-th head of the query-th query head of an item."""
        return place.key_head * (sizes.HO // sizes.Hk) + query * heads_per_query + e

    # Helper

    def load_qk(load):
        """q and k of the load-th pair."""
        place, query = place_of(lax.div(load, query_heads)), lax.rem(load, query_heads)
        q_head = lax.div(head_of(place, query, 0), sizes.HO // sizes.Hq)
        row = place.span.row
        plgpu.copy_gmem_to_smem(q_gmem.at[row, place.tokens, q_head], q_smem, loaded_qk)
        plgpu.copy_gmem_to_smem(k_gmem.at[row, place.tokens, place.key_head], k_smem, loaded_qk)

    def parts_of(step):
        """Item, query head, head and columns of V of a step of this CTA."""
        load, rest = lax.div(step, steps_per_load), lax.rem(step, steps_per_load)
        place, query = place_of(lax.div(load, query_heads)), lax.rem(load, query_heads)
        head = head_of(place, query, lax.div(rest, v_tiles))
        return place, head, pl.ds(lax.rem(rest, v_tiles) * WIDTH, WIDTH)

    def load_step(step):
        stage = lax.rem(step, stages)
        place, head, columns = parts_of(step)
        row, tokens, visit = place.span.row, place.tokens, place.visit
        for source, destination in (
            (do_gmem.at[row, tokens, head, columns], x_smem.at[stage, 0]),
            (dv_gmem.at[row, tokens, head, columns], x_smem.at[stage, 1]),
            (u_gmem.at[visit, head, :, columns], u_smem.at[stage]),
            (h_gmem.at[visit, head, columns], h_smem.at[stage]),
            (dh_gmem.at[visit, head, columns], dh_smem.at[stage]),
            (g_gmem.at[row, head, tokens], g_smem.at[stage]),
            (beta_gmem.at[row, head, tokens], beta_smem.at[stage]),
        ):
            plgpu.copy_gmem_to_smem(source, destination, loaded.at[stage])

    def mask(place, tiles, gates=None):
        begin, end, is_shared = owned_rows(place.span, place.chunk)

        @pl.when(is_shared)
        def _():
            for tile in tiles:
                keep_owned_rows(tile, begin, end)
            if gates is not None:
                keep_owned_gates(gates, begin, end)
            plgpu.commit_smem()

    @pl.when(wg == num_compute)
    def helper():
        plgpu.set_max_registers(config.helper_registers, action="decrease")
        loads = items * query_heads
        steps = loads * steps_per_load
        pl.when(loads > 0)(lambda: load_qk(jnp.int32(0)))
        for j in range(stages):
            pl.when(j < steps)(functools.partial(load_step, jnp.int32(j)))

        def step(i, _):
            stage, load = lax.rem(i, stages), lax.div(i, steps_per_load)
            if sizes.packed:
                place = parts_of(i)[0]

                @pl.when(lax.rem(i, steps_per_load) == 0)
                def _():
                    plgpu.barrier_wait(loaded_qk)
                    mask(place, (q_smem, k_smem))
                    plgpu.barrier_arrive(masked_qk)

                plgpu.barrier_wait(loaded.at[stage])
                mask(place, (x_smem.at[stage, 0], x_smem.at[stage, 1]), g_smem.at[stage])
                plgpu.barrier_arrive(masked.at[stage])
            plgpu.barrier_wait(consumed.at[stage])
            pl.when(i + stages < steps)(lambda: load_step(i + stages))

            @pl.when(lax.rem(i + 1, steps_per_load) == 0)
            def _():
                plgpu.barrier_wait(used_qk)
                pl.when(load + 1 < loads)(lambda: load_qk(load + 1))

            return ()

        lax.fori_loop(0, steps, step, ())

    # Compute warpgroups

    own = pl.ds(wg * WIDTH, WIDTH)
    pn_tiles, pn_flat = pn_smem if sizes.packed else (pn_smem, pn_smem)  # the second one for packed rows only
    if num_compute == 1:
        makes = ((0, sizes.scale), (1, -1.0))
    else:
        makes = ((jnp.minimum(wg, 1), jnp.where(wg == 0, sizes.scale, -1.0)),)

    def store(place, head, x, target):
        """64 columns of dq or dk to memory, through the tile that this warpgroup wrote dP or N to."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile = pn_tiles.at[wg]

        def whole():
            tile[...] = x.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, target.at[place.span.row, place.tokens, head, own])

        if not sizes.packed:
            return whole()
        begin, end, is_shared = owned_rows(place.span, place.chunk)

        @pl.when(is_shared)
        def _():
            flat, token = pn_flat.at[wg], place.chunk * CHUNK
            store_any(flat, x.astype(dtype))
            plgpu.commit_smem()
            store_rows(flat, lambda t: target.at[place.span.row, token + t, head, own], begin, end)

        pl.when(jnp.logical_not(is_shared))(whole)

    def store_vector(smem, x, target):
        """[C] in layout ROW to memory."""
        smem[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, target)

    def over_v(first_step):
        """The products with a contraction over V, and <S, dS> as a vector over rows of S."""

        def body(*accs):
            *scores, dq_read, dk_read, late = accs
            inner = zeros((WIDTH,), f32, ROW)
            for t in range(v_tiles):
                stage = lax.rem(first_step + t, stages)
                plgpu.barrier_wait(masked.at[stage] if sizes.packed else loaded.at[stage])
                do, dv, u = x_smem.at[stage, 0], x_smem.at[stage, 1], u_smem.at[stage]
                h, dh = h_smem.at[stage, :, own], dh_smem.at[stage, :, own]
                for score, (which, _) in zip(scores, makes, strict=True):
                    dev.issue(score, x_smem.at[stage, which], transposed(u))
                dev.issue(dq_read, do, h)
                dev.issue(dk_read, dv, h)
                dev.issue(late, u, dh)
                both = plgpu.load(h, layout=WGMMA).astype(f32) * plgpu.load(dh, layout=WGMMA).astype(f32)
                inner = inner + jnp.sum(both, axis=1)
                if t > 0:
                    if not interpreted:
                        plgpu.wgmma_wait(len(accs))  # the products of the stage before are done
                    dev.release(consumed.at[lax.rem(first_step + t - 1, stages)])
            return [dev.collect(acc) for acc in accs], inner

        accumulator = plgpu.ACC((CHUNK, WIDTH), f32)
        return pl.run_scoped(body, *[accumulator] * (len(makes) + 3))

    def one_head(place, head, first_step, dq, dk, is_first, is_last):
        """dq and dk with the part of one output head; its dg and dbeta to memory.

        is_first, is_last: whether q and k are read for the first and for the last time.
        """
        (*scores, dq_read, dk_read, late), inner = over_v(first_step)
        stage = lax.rem(first_step + v_tiles - 1, stages)
        g_rows, g_last = plgpu.load(g_smem.at[stage], layout=ROW), g_smem[stage, CHUNK - 1]
        pl.when(is_first)(lambda: plgpu.barrier_wait(masked_qk if sizes.packed else loaded_qk))
        q_tile, k_tile = q_smem.at[:, own], k_smem.at[:, own]
        late = late * along_rows(jnp.exp2(g_last - g_rows), WIDTH)
        written = jnp.sum(plgpu.load(k_tile, layout=WGMMA).astype(f32) * late, axis=1)
        dk = dk + late
        _, gamma = gamma_of(g_smem.at[stage])
        beta = jnp.maximum(plgpu.load(beta_smem.at[stage], layout=ROW), BETA_FLOOR)
        dev.release(consumed.at[stage])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        strictly_lower = iota((CHUNK, CHUNK), 0) > iota((CHUNK, CHUNK), 1)

        def exchange(score, which, factor):
            """dP or N to its tile, and what their diagonals are for."""
            tile, diagonal = pn_tiles.at[which], _diagonal(score)
            tile[...] = jnp.where(strictly_lower, score * gamma * factor, 0.0).astype(dtype)

            @pl.when(which == 0)
            def _():
                diagonal_smem[...] = diagonal * sizes.scale

            @pl.when(which == 1)
            def _():
                store_vector(dbeta_smem, diagonal / (beta * beta), dbeta_gmem.at[place.visit, head])

        for score, made in zip(scores, makes, strict=True):
            exchange(score, *made)
        plgpu.commit_smem()
        plgpu.barrier_arrive(exchanged)

        d = along_rows(jnp.exp2(g_rows), WIDTH)
        starts = [dq_read * (d * sizes.scale), dk_read * -d, zeros((CHUNK, WIDTH), f32)]
        plgpu.barrier_wait(exchanged)
        p_tile, n_tile = pn_tiles.at[0], pn_tiles.at[1]
        products = [
            (0, p_tile, k_tile),
            (1, n_tile, k_tile),
            (2, transposed(p_tile), q_tile),
            (2, transposed(n_tile), k_tile),
        ]
        dq_part, read, write = _accumulate(dev, starts, products)

        diagonal = along_rows(plgpu.load(diagonal_smem, layout=ROW), WIDTH)
        q = plgpu.load(q_tile, layout=WGMMA).astype(f32)
        x = jnp.sum(q * dq_part, axis=1)
        dk = dk + read + write + diagonal * q
        k = plgpu.load(k_tile, layout=WGMMA).astype(f32)
        x = x + jnp.sum(k * (read - write), axis=1)
        dq = dq + dq_part + diagonal * k
        for n, vector in enumerate((x, written, inner)):
            sums_smem.at[wg, n][...] = vector
        plgpu.commit_smem()
        plgpu.barrier_arrive(finished)
        pl.when(is_last)(lambda: dev.release(used_qk))
        plgpu.barrier_wait(finished)

        @pl.when(wg == 0)
        def _():
            def total(n):
                vectors = [plgpu.load(sums_smem.at[w, n], layout=COL) for w in range(num_compute)]
                return along_columns(functools.reduce(jnp.add, vectors), CHUNK)

            not_before = iota((CHUNK, CHUNK), 1) >= iota((CHUNK, CHUNK), 0)
            terms = jnp.where(not_before, total(0), total(1)) + total(2) * jnp.exp2(g_last)
            store_vector(dg_smem, jnp.sum(terms, axis=1), dg_gmem.at[place.visit, head])

        return dq, dk

    def one_item(n, _):
        place = place_of(n)

        def nothing_for_padding(x):
            return jnp.where(place.span.is_padding, 0.0, x) if sizes.packed else x

        def one_query(query, dk):
            load = n * query_heads + query

            def one(e, carry):
                first_step = load * steps_per_load + e * v_tiles
                is_first, is_last = e == 0, e == heads_per_query - 1
                dq, dk = carry
                return one_head(place, head_of(place, query, e), first_step, dq, dk, is_first, is_last)

            dq, dk = lax.fori_loop(0, heads_per_query, one, (zeros((CHUNK, WIDTH), f32), dk))
            store(place, place.key_head * query_heads + query, nothing_for_padding(dq), dq_gmem)
            return dk

        dk = lax.fori_loop(0, query_heads, one_query, zeros((CHUNK, WIDTH), f32))
        store(place, place.key_head, nothing_for_padding(dk), dk_gmem)
        return ()

    @pl.when(wg < num_compute)
    def compute():
        plgpu.set_max_registers(config.compute_registers, action="increase")
        lax.fori_loop(0, items, one_item, ())
        plgpu.wait_smem_to_gmem(0)


class Gradients(NamedTuple):
    """Gradients with padded widths; dg of every in-chunk cumulative gate summed up, that is of each token's gate."""

    dq: Float[Array, "B T Hdq K"]
    """Of each query head, or of each output head where key heads share query heads."""
    dk: Float[Array, "B T Hk K"]
    dg: Float[Array, "visits HO C"]
    dbeta: Float[Array, "visits HO C"]


def gradients(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    do: Float[Array, "B T HO V"],
    u: Float[Array, "visits HO C V"],
    dv: Float[Array, "B T HO V"],
    h: Float[Array, "visits HO V K"],
    dh: Float[Array, "visits HO V K"],
    g2_cum: Float[Array, "B HO T64"],
    beta_t: Float[Array, "B HO T64"],
    tables: VisitTables | None,
    *,
    scale: float,
    config: Config | None = None,
    interpret=None,
) -> Gradients:
    """dq, dk, dg and dbeta; see the module docstring.

    Args:
      q, k, do: bfloat16; K 64 or 128, V a multiple of 64, T a multiple of 8.
      u, dv, h, dh: of state_adjoints.
      g2_cum, beta_t: of chunk_gates.
      tables: of packed rows (B = 1), None when every row of the batch is one sequence.
      scale: factor of the output.
    """
    B, T, Hk, K = k.shape
    Hq, (visits, HO, V) = q.shape[2], h.shape[:3]
    packed = tables is not None
    config = config or Config.default(K, packed)
    sizes = _Sizes(
        T=T,
        N=B if tables is None else tables.cu_seqlens.shape[0] - 1,
        Hq=Hq,
        Hk=Hk,
        HO=HO,
        dq_heads=Hq if Hq % Hk == 0 else HO,
        K=K,
        V=V,
        visits=visits,
        scale=scale,
        packed=packed,
    )
    n, stages = K // WIDTH, config.stages
    dtype, f32 = k.dtype, jnp.float32

    def tiles(*shape):
        return plgpu.SMEM(shape, dtype, transforms=tiling(128))

    pn_tiles = tiles(max(2, n), CHUNK, CHUNK)
    if packed:
        pn_tiles = plgpu.RefUnion(pn_tiles, plgpu.SMEM((max(2, n), CHUNK, CHUNK), dtype))
    vector = plgpu.SMEM((CHUNK,), f32)
    vectors = jax.ShapeDtypeStruct((visits, HO, CHUNK), f32)
    each, one = plgpu.Barrier(num_arrivals=n, num_barriers=stages), plgpu.Barrier(num_arrivals=n)
    return Gradients(
        *plgpu.kernel(
            functools.partial(_body, config=config, sizes=sizes, interpreted=interpret is not None),
            out_type=(
                jax.ShapeDtypeStruct((B, T, sizes.dq_heads, K), dtype),
                jax.ShapeDtypeStruct((B, T, Hk, K), dtype),
                vectors,
                vectors,
            ),
            scratch_types=(
                tiles(CHUNK, K),
                tiles(CHUNK, K),
                tiles(stages, 2, CHUNK, WIDTH),
                tiles(stages, CHUNK, WIDTH),
                tiles(stages, WIDTH, K),
                tiles(stages, WIDTH, K),
                pn_tiles,
                plgpu.SMEM((stages, CHUNK), f32),
                plgpu.SMEM((stages, CHUNK), f32),
                plgpu.SMEM((n, 3, CHUNK), f32),
                vector,
                vector,
                vector,
                plgpu.Barrier(num_arrivals=7, num_barriers=stages),
                plgpu.Barrier(num_arrivals=2),
                plgpu.Barrier(num_arrivals=1, num_barriers=stages),
                plgpu.Barrier(num_arrivals=1),
                each,
                one,
                one,
                one,
            ),
            grid=(config.ctas,),
            grid_names=("cta",),
            num_threads=n + 1,
            thread_name="wg",
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                **COMPILER_PARAMS, unsafe_no_auto_barriers=not config.auto_barriers
            ),
        )(q, k, do, u, dv, h, dh, g2_cum, beta_t, *(tables or ()))
    )
