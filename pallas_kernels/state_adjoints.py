"""The two chains of the backward: states forward and their adjoints backward, chunk by chunk, in one launch.

With states transposed, S and dS [V, K], and for one chunk (all of it float32 but the operands of products)

    states:    W = V^T - (S K^T) D           U = W T^T            S <- gl S + (U Dr) K
    adjoints:  Z = (dS K^T) Dr + dO^T P      dV = Z T             dS <- gl dS + scale (dO^T D) Q - (dV D) K

where P = scale (Q K^T) * Gamma, Gamma[i, j] = 2^(G_i - G_j) for i >= j and 0 above, D_i = 2^G_i,
Dr_i = 2^(G_last - G_i), gl = 2^G_last, G = g2_cum and T of tril_inverse.py. U and dV [V, C] are
transposed: U holds the corrected values of the chunk, dV is the gradient of v. The adjoint of T takes the place of
the adjoint of the inverse: T^T is applied to a matrix of V columns, and no product of three [C, C] matrices remains.

Work: one CTA takes `state_warpgroups` tiles of 64 rows of S or of dS (64 columns of V) of one head of one item. An
item is a sequence, or one of its segments, with S at its start and dS at its end given for each. All sequences lie on
one grid of chunks of 64 tokens. The item of a sequence of packed rows walks the chunks it touches; a chunk and a
sequence that touches it are a visit. In a chunk shared with another sequence the tokens of the others are replaced:
zeros in q, k, v, do and T, the nearest owned gate in g2_cum.

In float16, which ends at 2^-24, nothing that is rounded holds a factor that may be small: T stays 16 times as large,
D of the adjoints is taken from the first token on (dS <- 2^G_0 (..) with D_i = 2^(G_i - G_0)), and u and dv leave
divided by beta.

For the dS at the ends of segments, segment_adjoints runs the chain of adjoints alone and writes where it ends: from
ds1 for the last segment of a sequence, from zeros for the others.

Threads (warpgroups): the first ones hold S or dS in registers; the last one, the helper, loads everything by bulk
copies and makes P, D and Dr for the next chunk.

| barrier   | arrives                                  | waits                                             |
|-----------|------------------------------------------|---------------------------------------------------|
| loaded_k  | bulk copies of k and gates               | helper; state warpgroups unless rows are packed   |
| loaded_q  | bulk copy of q (adjoints only)           | helper                                            |
| loaded    | bulk copies of T, v or do, beta          | state warpgroups; the helper if rows are packed   |
| prepared  | helper: P, D and Dr are written          | state warpgroups                                  |
| consumed  | each state warpgroup: chunk read         | helper, before it loads to where the chunk was    |

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], v [B, T, HV, V], do [B, T, HO, V], g2_cum [B, HO, NT C] f32,
t [B, HO, NT C, C], beta [B, HO, NT C] f32 (float16), s0 and ds1 [N, HO, V, K] or [.., K, V], or [items, HO, V, K] f32
(optional), tables int32 (packed rows).
Outputs (GMEM): h, dh [visits, HO, V, K]: S before and dS after each chunk; u [visits, HO, C, V]; dv [B, T, HO, V];
ds0 [N, HO, V, K] or [.., K, V] f32 (optional). Of segment_adjoints: n [items, HO, V, K] f32.
Shared memory: Config.smem_bytes, 212 KB at K = V = 128 with two state warpgroups.
Hardware: compute capability 9.0. Limits: K and V multiples of 64; T a multiple of 8.
Registers: the sum of set_max_registers over the warpgroups must not exceed what they had at entry (504 for three,
512 for two), or the kernel waits for ever.
Source: Yang et al. 2024 (Gated DeltaNet), eq. 8 to 10; the adjoint is that of its triangular solve.
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
    ROW,
    SMEM_LIMIT,
    WGMMA,
    WGMMA_TRANSPOSED,
    along_columns,
    grid_index,
    inverse_log2,
    launch,
    load_state,
    store_any,
    take,
    tiling,
    transposed,
    zeros,
)
from pallas_kernels.device import Device
from pallas_kernels.recurrence import Split, Tables
from pallas_kernels.spans import (
    Span,
    VisitTables,
    dense_span,
    gamma_of,
    keep_owned_columns,
    keep_owned_gates,
    keep_owned_rows,
    owned_rows,
    packed_span,
    segment_of,
    store_rows,
)

ROWS = 64
"""Rows of S^T that one state warpgroup holds."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the chains run, not what they compute."""

    state_warpgroups: int = 2
    """1 or 2. Two share a head's q, k, T and gates; one gives twice the CTAs."""
    stages: int = 2
    """Chunks of v or do, T and what the helper makes of a chunk in flight."""
    key_stages: int = 3
    """Chunks of q, k and gates in flight. One more than the others, and P is made a chunk ahead of its use."""
    state_in_smem: bool = False
    """Whether S rounded is an operand in shared memory, not registers: needed for K > 128."""
    helper_registers: int = 72
    state_registers: int = 216
    auto_barriers: bool = False
    """Lets Pallas put a barrier around every access to shared memory: slower, never needed here."""

    def smem_bytes(self, K: int) -> int:
        """Shared memory of a CTA."""
        rows = ROWS * self.state_warpgroups
        keys, others = 2 * CHUNK * 2 * K + 4 * CHUNK, 2 * CHUNK * (rows + 2 * CHUNK) + 4 * 3 * CHUNK
        return self.key_stages * keys + self.stages * others + 2 * rows * (K + CHUNK) + 4096

    @classmethod
    def default(cls, K: int, state_warpgroups: int) -> "Config":
        """Most stages that fit beside the operands that K needs."""
        registers = {1: (208, 232 if K <= 128 else 240), 2: (72, 216)}[state_warpgroups]
        for stages, key_stages in ((4, 4), (4, 3), (3, 3), (2, 3), (2, 2), (1, 2), (1, 1)):
            config = cls(state_warpgroups, stages, key_stages, K > 128, *registers)
            if config.smem_bytes(K) <= SMEM_LIMIT:
                return config
        raise AssertionError("K > 256")


class _Sizes(NamedTuple):
    """Static sizes and switches of one kernel."""

    T: int
    N: int
    Hq: int
    Hk: int
    HV: int
    HO: int
    K: int
    V: int
    tiles: int
    """Tiles of state_warpgroups x 64 rows of a head."""
    split: Split
    scale: float
    packed: bool
    has_s0: bool
    has_ds1: bool
    has_ds0: bool
    kv_layout: bool
    float16: bool
    both: bool
    """Both chains with all their outputs; else the end of the chain of adjoints of every segment."""

    @property
    def segmented(self) -> bool:
        return self.split.segment_chunks is not None


class _Item(NamedTuple):
    """What a CTA walks over."""

    index: jax.Array
    span: Span
    is_first: jax.Array | bool
    is_last: jax.Array | bool
    """Whether the sequence begins or ends here."""


def _dense_item(index: jax.Array, sizes: _Sizes) -> _Item:
    """Item of a batch whose rows are one sequence each."""
    length = sizes.split.segment_chunks
    if length is None:
        return _Item(index, dense_span(index, sizes.T), True, True)
    per_row = sizes.split.num_items // sizes.N
    row, segment = lax.div(index, per_row), lax.rem(index, per_row)
    span = segment_of(dense_span(row, sizes.T), segment, length)
    return _Item(index, span, segment == 0, segment == per_row - 1)


def _packed_item(index: jax.Array, sizes: _Sizes, cu, first_visit, *segments) -> _Item:
    """Item of packed rows. The padding past the last sequence is one too."""
    if not segments:
        return _Item(index, packed_span(index, sizes.T, sizes.N, cu, first_visit), True, True)
    sequence_of, first_item = segments
    n = sequence_of[index]
    span = packed_span(n, sizes.T, sizes.N, cu, first_visit)
    segment = index - first_item[jnp.minimum(n, sizes.N)]
    is_last = index + 1 == first_item[jnp.minimum(n + 1, sizes.N + 1)]
    length: Any = sizes.split.segment_chunks
    length = jnp.where(span.is_padding, span.num_chunks, length)
    return _Item(index, segment_of(span, segment, length), segment == 0, is_last)


def _body(*refs, config: Config, sizes: _Sizes, interpreted: bool):
    refs = list(refs)
    both = sizes.both
    q_gmem, k_gmem, v_gmem, do_gmem = take(refs), take(refs), take(refs, both), take(refs)
    g_gmem, t_gmem, beta_gmem = take(refs), take(refs), take(refs, both and sizes.float16)
    s0_gmem, ds1_gmem = take(refs, sizes.has_s0), take(refs, sizes.has_ds1)
    tables = [take(refs) for _ in range(sizes.packed * (4 if sizes.segmented else 2))]
    h_gmem, u_gmem, dh_gmem, dv_gmem = (take(refs, both) for _ in range(4))
    ds0_gmem = take(refs, sizes.has_ds0)
    q_smem, k_smem, x_smem, t_smem, p_smem, s_smem, out_smem = refs[:7]
    g_smem, d_smem, dr_smem = refs[7:10]
    beta_smem: Any = None if beta_gmem is None else refs[10]
    loaded, loaded_k, loaded_q, prepared, consumed = refs[-5:]

    dev, dtype, f32 = Device(interpreted), k_gmem.dtype, jnp.float32
    stages, key_stages, num_state, K = config.stages, config.key_stages, config.state_warpgroups, sizes.K
    columns = num_state * ROWS

    # The adjoints come first: their chunks take longer.
    ctas = sizes.split.num_items * sizes.HO * sizes.tiles
    adjoint = grid_index() < ctas
    cta = jnp.where(adjoint, grid_index(), grid_index() - ctas)
    wg = lax.axis_index("wg").astype(jnp.int32)
    tile = lax.rem(cta, sizes.tiles)
    head = lax.rem(lax.div(cta, sizes.tiles), sizes.HO)
    index = lax.div(cta, sizes.tiles * sizes.HO)
    item = _packed_item(index, sizes, *tables) if sizes.packed else _dense_item(index, sizes)
    span = item.span
    chunks = jnp.where(span.is_padding, 0, span.num_chunks) if sizes.packed else span.num_chunks
    if not both:  # nothing comes before the first segment
        chunks = jnp.where(item.is_first, 0, chunks)

    def head_of(count):
        return lax.div(head, sizes.HO // count)

    def chunk_of(i):
        return span.first_chunk + jnp.where(adjoint, chunks - 1 - i, i)

    def visit_of(i):
        return span.first_visit + jnp.where(adjoint, chunks - 1 - i, i)

    def first_gate(i, key_stage):
        """Gate of the item's first token in a chunk."""
        return g_smem[key_stage, owned_rows(span, chunk_of(i))[0] if sizes.packed else 0]

    # Helper

    def load_keys(i):
        """q, k and gates of a chunk."""
        tokens, stage = pl.ds(chunk_of(i) * CHUNK, CHUNK), lax.rem(i, key_stages)
        k_source = k_gmem.at[span.row, tokens, head_of(sizes.Hk)]
        plgpu.copy_gmem_to_smem(k_source, k_smem.at[stage], loaded_k.at[stage])
        plgpu.copy_gmem_to_smem(g_gmem.at[span.row, head, tokens], g_smem.at[stage], loaded_k.at[stage])

        @pl.when(adjoint)
        def _():
            q_source = q_gmem.at[span.row, tokens, head_of(sizes.Hq)]
            plgpu.copy_gmem_to_smem(q_source, q_smem.at[stage], loaded_q.at[stage])

    def load_others(i):
        """v or do, T and beta of a chunk."""
        tokens, stage = pl.ds(chunk_of(i) * CHUNK, CHUNK), lax.rem(i, stages)
        own_columns = pl.ds(tile * columns, columns)

        def copy(source, destination):
            plgpu.copy_gmem_to_smem(source, destination, loaded.at[stage])

        copy(t_gmem.at[span.row, head, tokens], t_smem.at[stage])
        if beta_gmem is not None:
            copy(beta_gmem.at[span.row, head, tokens], beta_smem.at[stage])

        @pl.when(adjoint)
        def _():
            copy(do_gmem.at[span.row, tokens, head, own_columns], x_smem.at[stage])

        @pl.when(jnp.logical_not(adjoint) if both else False)
        def _():
            copy(v_gmem.at[span.row, tokens, head_of(sizes.HV), own_columns], x_smem.at[stage])

    def replace_foreign_tokens(i, stage, key_stage):
        begin, end, is_shared = owned_rows(span, chunk_of(i))

        @pl.when(is_shared)
        def _():
            for tile in (k_smem.at[key_stage], x_smem.at[stage], t_smem.at[stage]):
                keep_owned_rows(tile, begin, end)
            pl.when(adjoint)(lambda: keep_owned_rows(q_smem.at[key_stage], begin, end))
            keep_owned_columns(t_smem.at[stage], begin, end)
            keep_owned_gates(g_smem.at[key_stage], begin, end)
            plgpu.commit_smem()

    def prepare(i, stage, key_stage):
        gates = g_smem.at[key_stage]
        g_rows = plgpu.load(gates, layout=ROW)
        exponents = g_rows
        if sizes.float16:  # 0 before the first token, which may not be the item's
            exponents = jnp.minimum(g_rows - jnp.where(adjoint, first_gate(i, key_stage), 0.0), 0.0)
        d_smem.at[stage][...] = jnp.exp2(exponents)
        dr_smem.at[stage][...] = jnp.exp2(gates[CHUNK - 1] - g_rows)

        def scores(acc):
            acc = dev.issue(acc, q_smem.at[key_stage], transposed(k_smem.at[key_stage]))
            _, gamma = gamma_of(dev, gates, math.log2(sizes.scale))
            return (dev.collect(acc) * lax.optimization_barrier(gamma)).astype(dtype)

        @pl.when(adjoint)
        def _():
            p_smem.at[stage][...] = pl.run_scoped(scores, plgpu.ACC((CHUNK, CHUNK), f32))

    @pl.when(wg == num_state)
    def helper():
        plgpu.set_max_registers(config.helper_registers, action="decrease")
        for count, load in ((key_stages, load_keys), (stages, load_others)):
            for j in range(count):
                pl.when(j < chunks)(functools.partial(load, jnp.int32(j)))
        # With one stage it waits for the chunk that it has prepared, else for the one before.
        lag = int(stages > 1)

        def step(i, _):
            stage, key_stage = lax.rem(i, stages), lax.rem(i, key_stages)
            plgpu.barrier_wait(loaded_k.at[key_stage])
            pl.when(adjoint)(lambda: plgpu.barrier_wait(loaded_q.at[key_stage]))
            if sizes.packed:
                plgpu.barrier_wait(loaded.at[stage])
                replace_foreign_tokens(i, stage, key_stage)
            prepare(i, stage, key_stage)
            plgpu.commit_smem()
            plgpu.barrier_arrive(prepared.at[stage])

            @pl.when(i >= lag)
            def _():
                done = i - lag
                plgpu.barrier_wait(consumed.at[lax.rem(done, stages)])
                pl.when(done + key_stages < chunks)(lambda: load_keys(done + key_stages))
                pl.when(done + stages < chunks)(lambda: load_others(done + stages))

            return ()

        lax.fori_loop(0, chunks, step, ())
        if lag:
            pl.when(chunks > 0)(lambda: plgpu.barrier_wait(consumed.at[lax.rem(chunks - 1, stages)]))

    # State warpgroups

    row_tile = tile * num_state + wg
    rows = pl.ds(row_tile * ROWS, ROWS)
    s_tile = s_smem.at[pl.ds(wg * ROWS, ROWS)]
    # The flat one is for packed rows only.
    out_tile, out_flat = out_smem if sizes.packed else (out_smem, out_smem)

    def read_state(source):
        """Rows of a state in memory, [V, K] of an item, or [V, K] or [K, V] of a sequence."""
        of_items = both and sizes.segmented
        n = item.index if of_items else span.sequence
        source = source.at[jnp.minimum(n, source.shape[0] - 1), head]  # the padding reads any
        return load_state(source, rows, sizes.kv_layout and not of_items)

    def write_ds0(s):
        assert ds0_gmem is not None
        target = ds0_gmem.at[span.sequence if both else item.index, head]
        if both and sizes.kv_layout:
            transposed(target.at[:, rows])[...] = plgpu.layout_cast(s, WGMMA_TRANSPOSED)
        else:
            target.at[rows][...] = s

    def store_state(i, rounded, destination):
        """S rounded to memory, through the tile that is also an operand with state_in_smem. The last output of the
        step before may still be on its way: only the state of that step must have left."""
        plgpu.wait_smem_to_gmem(0 if sizes.packed else 1, wait_read_only=True)
        s_tile[...] = rounded
        plgpu.commit_smem()
        if both:
            plgpu.copy_smem_to_gmem(s_tile, destination.at[visit_of(i), head, rows])

    def store_output(x_t, destination):
        """x_t transposed, [C, 64 columns of V], to memory."""
        plgpu.wait_smem_to_gmem(0 if sizes.packed else 1, wait_read_only=True)
        transposed(out_tile.at[wg])[...] = x_t
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile.at[wg], destination.at[:, rows])

    def store_dv(chunk, dv_t):
        target = dv_gmem.at[span.row, pl.ds(chunk * CHUNK, CHUNK), head]
        if not sizes.packed:
            return store_output(dv_t, target)
        begin, end, is_shared = owned_rows(span, chunk)

        @pl.when(is_shared)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store_any(transposed(out_flat.at[wg]), dv_t)
            plgpu.commit_smem()
            token = chunk * CHUNK
            store_rows(out_flat.at[wg], lambda t: dv_gmem.at[span.row, token + t, head, rows], begin, end)

        pl.when(jnp.logical_not(is_shared))(lambda: store_output(dv_t, target))

    def clear_padding():
        def clear(i, _):
            store_dv(span.first_chunk + i, zeros((ROWS, CHUNK), dtype))
            return ()

        lax.fori_loop(0, span.num_chunks, clear, ())

    def walk(start, step):
        """Repeats s <- step(i, stage, key_stage, s) over the chunks."""

        def one(i, s):
            stage = lax.rem(i, stages)
            s = step(i, stage, lax.rem(i, key_stages), s)
            dev.release(consumed.at[stage])
            return s

        return lax.fori_loop(0, chunks, one, start)

    def vector(smem, stage):
        return along_columns(plgpu.load(smem.at[stage], layout=COL), ROWS)

    def over_t_factor(x):
        """A product with T as it is kept, made one with T."""
        return x * 2.0 ** -inverse_log2(dtype) if sizes.float16 else x

    def over_beta(x, stage):
        return x if beta_smem is None else x / vector(beta_smem, stage)

    def x_tile(stage):
        return transposed(x_smem.at[stage, :, pl.ds(wg * ROWS, ROWS)])

    accumulator = plgpu.ACC((ROWS, CHUNK), f32)

    def wait_loaded(stage, key_stage):
        if sizes.packed:
            return plgpu.barrier_wait(prepared.at[stage])
        plgpu.barrier_wait(loaded_k.at[key_stage])
        plgpu.barrier_wait(loaded.at[stage])

    def times_keys(product, i, k_tile, s, destination):
        """S K^T, issued; S leaves for memory."""
        rounded = s.astype(dtype)
        if config.state_in_smem:
            store_state(i, rounded, destination)
            return dev.issue(product, s_tile, transposed(k_tile))
        product = dev.issue(product, rounded, transposed(k_tile))
        if both:
            store_state(i, rounded, destination)
        return product

    def state_step(i, stage, key_stage, s):
        k_tile = k_smem.at[key_stage]
        wait_loaded(stage, key_stage)

        def solve(read):
            read = times_keys(read, i, k_tile, s, h_gmem)
            v_t = plgpu.load(x_tile(stage), layout=WGMMA)
            if not sizes.packed:
                plgpu.barrier_wait(prepared.at[stage])
            d = vector(d_smem, stage)
            return (v_t.astype(f32) - d * dev.collect(read)).astype(dtype)

        w = pl.run_scoped(solve, accumulator)

        def correct(u):
            u = dev.issue(u, w, transposed(t_smem.at[stage]))
            dr = vector(dr_smem, stage)
            decayed = lax.optimization_barrier(s * jnp.exp2(g_smem[key_stage, CHUNK - 1]))
            return over_t_factor(dev.collect(u)), dr, decayed

        u, dr, decayed = pl.run_scoped(correct, accumulator)

        def write(add):
            add(0, (u * dr).astype(dtype), k_tile)
            store_output(over_beta(u, stage).astype(dtype), u_gmem.at[visit_of(i), head])

        return dev.accumulate([decayed], write)[0]

    def adjoint_step(i, stage, key_stage, s):
        k_tile, q_tile = k_smem.at[key_stage], q_smem.at[key_stage]
        wait_loaded(stage, key_stage)
        if not sizes.packed:
            plgpu.barrier_wait(prepared.at[stage])

        def solve(attended, late, dv):
            attended = dev.issue(attended, x_tile(stage), p_smem.at[stage])
            late = times_keys(late, i, k_tile, s, dh_gmem)
            d, dr = lax.optimization_barrier((vector(d_smem, stage), vector(dr_smem, stage)))
            do_t = plgpu.load(x_tile(stage), layout=WGMMA).astype(f32)
            do_scaled = (do_t * (d * sizes.scale)).astype(dtype)
            first = first_gate(i, key_stage) if sizes.float16 else None
            g_last = g_smem[key_stage, CHUNK - 1]
            decay = jnp.exp2(g_last if first is None else g_last - first)
            z = dev.collect(late) * dr + dev.collect(attended)
            dv = dev.issue(dv, z.astype(dtype), t_smem.at[stage])

            def write(add):
                add(0, do_scaled, q_tile)
                dv_t = over_t_factor(dev.collect(dv, 1))
                add(0, (dv_t * -d).astype(dtype), k_tile)
                if both:
                    store_dv(chunk_of(i), over_beta(dv_t, stage).astype(dtype))

            (before,) = dev.accumulate([lax.optimization_barrier(s * decay)], write)
            return before if first is None else before * jnp.exp2(first)

        return pl.run_scoped(solve, *[accumulator] * 3)

    @pl.when((wg < num_state) & jnp.logical_not(adjoint) if both else False)
    def states():
        plgpu.set_max_registers(config.state_registers, action="increase")
        start = read_state(s0_gmem) if sizes.has_s0 else zeros((ROWS, K), f32)
        walk(start, state_step)
        plgpu.wait_smem_to_gmem(0)

    @pl.when((wg < num_state) & adjoint)
    def adjoints():
        plgpu.set_max_registers(config.state_registers, action="increase")
        start = read_state(ds1_gmem) if sizes.has_ds1 else zeros((ROWS, K), f32)
        if not both:
            start = jnp.where(item.is_last, start, 0.0)
        ds0 = walk(start, adjoint_step)
        if sizes.has_ds0:
            writes = item.is_first if both else jnp.logical_not(item.is_first)
            if sizes.packed:
                writes = writes & jnp.logical_not(span.is_padding)
            pl.when(writes)(lambda: write_ds0(ds0))
        if both and sizes.packed:
            pl.when(span.is_padding)(clear_padding)
        plgpu.wait_smem_to_gmem(0)


class Chains(NamedTuple):
    """What the gradients are made of. In float16 u and dv are divided by beta."""

    h: Float[Array, "visits HO V K"]
    u: Float[Array, "visits HO C V"]
    dh: Float[Array, "visits HO V K"]
    dv: Float[Array, "B T HO V"]
    ds0: Float[Array, "N HO _ _"] | None


class Items(NamedTuple):
    """Segments that the sequences are cut into."""

    split: Split
    tables: Tables | None
    """Of packed rows."""


def state_adjoints(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    do: Float[Array, "B T HO V"],
    g2_cum: Float[Array, "B HO T64"],
    t: Float[Array, "B HO T64 C"],
    s0: Float[Array, "starts HO _ _"] | None,
    ds1: Float[Array, "ends HO _ _"] | None,
    tables: VisitTables | None,
    *,
    beta: Float[Array, "B HO T64"] | None = None,
    scale: float,
    kv_layout: bool = False,
    with_ds0: bool = True,
    items: Items | None = None,
    config: Config | None = None,
    interpret=None,
) -> Chains:
    """Both chains over all chunks; see the module docstring.

    Args:
      q, k, v, do: bfloat16 or float16, K and V multiples of 64, T a multiple of 8.
      g2_cum, t: of chunk_gates and tril_inverse.
      s0: initial states, float32, None for zeros; with items the states before each, [V, K].
      ds1: cotangents of the final states, float32, None for zeros; with items the adjoints after each, [V, K].
      tables: of packed rows (B = 1), None when every row of the batch is one sequence.
      beta: what t was made of, positive also past the last token; given for float16 and for nothing else.
      scale: factor of the output.
      kv_layout: whether s0, ds1 and ds0 of sequences are [K, V]; else [V, K].
      with_ds0: whether the cotangents of the initial states are written.
      items: segments, None for whole sequences.
    """
    inputs = (q, k, v, do, g2_cum, t, beta, s0, ds1)
    switches = dict(kv_layout=kv_layout, has_ds0=with_ds0, both=True)
    outputs = _call(inputs, tables, items, scale, config, interpret, **switches)
    return Chains._make(outputs if with_ds0 else (*outputs, None))


def segment_adjoints(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B T Hk K"],
    do: Float[Array, "B T HO V"],
    g2_cum: Float[Array, "B HO T64"],
    t: Float[Array, "B HO T64 C"],
    ds1: Float[Array, "N HO _ _"] | None,
    tables: VisitTables | None,
    *,
    scale: float,
    kv_layout: bool = False,
    items: Items,
    config: Config | None = None,
    interpret=None,
) -> Float[Array, "items HO V K"]:
    """The adjoint at the start of every segment but a sequence's first, from zeros or ds1 at its end.

    Args: those of state_adjoints; ds1 always of sequences.

    Returns:
      n of segment_states(backwards=True), float32; items that are a sequence's first are not written.
    """
    inputs = (q, k, None, do, g2_cum, t, None, None, ds1)
    switches = dict(kv_layout=kv_layout, has_ds0=True, both=False)
    return _call(inputs, tables, items, scale, config, interpret, **switches)[0]


def _call(inputs, tables: VisitTables | None, items: Items | None, scale, config, interpret, **switches):
    """The kernel, with both chains or one."""
    q, k, v, do, _, _, beta, s0, ds1 = inputs
    (B, T, Hk, K), (HO, V), both = k.shape, do.shape[2:], switches["both"]
    packed = tables is not None
    N = B if tables is None else tables.cu_seqlens.shape[0] - 1
    visits = B * -(-T // CHUNK) if tables is None else tables.sequence.shape[0]
    config = config or Config.default(K, 1)
    n, stages, key_stages = config.state_warpgroups, config.stages, config.key_stages
    if both and (beta is None) == (k.dtype == jnp.float16):
        raise ValueError(f"beta: expected for float16 only, got {type(beta).__name__} for {k.dtype}")
    if V % (ROWS * n):
        raise ValueError(f"config.state_warpgroups: expected a divisor of {V // ROWS} row tiles, got {n}")
    sizes = _Sizes(
        T=T,
        N=N,
        Hq=q.shape[2],
        Hk=Hk,
        HV=HO if v is None else v.shape[2],
        HO=HO,
        K=K,
        V=V,
        tiles=V // (ROWS * n),
        split=Split(N + packed, None) if items is None else items.split,
        scale=scale,
        packed=packed,
        has_s0=s0 is not None,
        has_ds1=ds1 is not None,
        float16=k.dtype == jnp.float16,
        **switches,
    )
    dtype, f32, has_beta = k.dtype, jnp.float32, beta is not None
    state = jax.ShapeDtypeStruct((visits, HO, V, K), dtype)
    out_type: list[Any] = []
    if both:
        values = jax.ShapeDtypeStruct((visits, HO, CHUNK, V), dtype)
        out_type = [state, values, state, jax.ShapeDtypeStruct((B, T, HO, V), dtype)]
    if sizes.has_ds0:
        count, kv = (N, sizes.kv_layout) if both else (sizes.split.num_items, False)
        out_type.append(jax.ShapeDtypeStruct((count, HO, K, V) if kv else (count, HO, V, K), f32))

    def tiles(*shape):
        return plgpu.SMEM(shape, dtype, transforms=tiling(128))

    out_tile = tiles(n, CHUNK, ROWS)
    if packed:
        out_tile = plgpu.RefUnion(out_tile, plgpu.SMEM((n, CHUNK, ROWS), dtype))
    vectors = plgpu.SMEM((stages, CHUNK), f32)
    arrays = [*inputs, *(() if tables is None else tables[:2])]
    if items is not None and items.tables is not None:
        arrays += [items.tables.sequence, items.tables.first_item]
    return launch(
        functools.partial(_body, config=config, sizes=sizes, interpreted=interpret is not None),
        *arrays,
        out_type=tuple(out_type),
        scratch_types=(
            tiles(key_stages, CHUNK, K),
            tiles(key_stages, CHUNK, K),
            tiles(stages, CHUNK, ROWS * n),
            tiles(stages, CHUNK, CHUNK),
            tiles(stages, CHUNK, CHUNK),
            tiles(ROWS * n, K),
            out_tile,
            plgpu.SMEM((key_stages, CHUNK), f32),
            *[vectors] * (2 + has_beta),
            plgpu.Barrier(num_arrivals=2 + has_beta, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=key_stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=key_stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=n, num_barriers=stages),
        ),
        grid=((1 + both) * sizes.split.num_items * HO * sizes.tiles,),
        grid_names=("cta",),
        num_threads=n + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            **COMPILER_PARAMS, unsafe_no_auto_barriers=not config.auto_barriers
        ),
    )
