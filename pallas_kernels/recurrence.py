"""The recurrence over the chunks of a sequence: outputs and final state, or what a segment does to a state.

With the state transposed, S [V, K], and for one chunk (all of it float32 but the operands of products)

    W = V^T - (S K^T) D              N = W T^T
    O^T = scale (S Q^T) D + N P^T    S <- gl S + (N Dr) K

where P = scale (Q K^T) * Gamma, Gamma[i, j] = 2^(G_i - G_j) for i >= j and 0 above, D_i = 2^G_i, Dr_i =
2^(G_last - G_i), gl = 2^G_last, G = g2_cum and T of tril_inverse.py. (In float16 T and N are 16 times as large, and
P and Dr that much smaller.) Where q and k are to be normalised, the reciprocal norms of k are in the rows of T and go
into D, those of q into the rows of P and scale D: no tile of q or k is rewritten.

Work: one CTA takes `state_warpgroups` tiles of 64 rows of S (64 columns of V) of one head of one item. An item is
a sequence, or a segment of `segment_chunks` chunks of one. All sequences lie on one grid of chunks of 64 tokens. An
item of packed rows walks the chunks it touches, and in a chunk that it shares with another sequence the tokens it
does not own are replaced: zeros in q, k, v and T, the nearest owned gate in g2_cum. That leaves the state and its
own outputs exact.

Threads (warpgroups). The state warpgroups hold S in registers, each its 64 rows, and run the chain of products,
whose left operands stay in registers (an accumulator rounded to bf16 is an operand already). S K^T and S Q^T run
together, then N, then S and O. A warpgroup can run ahead of its products by about two instructions only, so what it
does beside them is not free: O of a chunk is stored while the next chunk's last products drain, or, where two state
warpgroups would lack the registers, its first ones. The helper loads everything by bulk copies, and one chunk ahead
makes D, scale D, Dr and P. Two state warpgroups take turns: one starts a chunk's products when the other has its W,
so that the products of one run while the other computes between them (2 % on an H200).

| barrier  | arrives                                  | waits                                               |
|----------|------------------------------------------|-----------------------------------------------------|
| loaded   | each bulk copy of a stage                | helper, state warpgroups; packed rows: helper only  |
| prepared | helper: P and the vectors are written    | state warpgroups                                    |
| consumed | each state warpgroup: stage read         | helper, before it loads the stage again             |
| turn     | the other one of two state warpgroups    | state warpgroup, before its first products          |

With write_transition the same walk, without outputs, turns a segment into N and M, such that the state after the
segment is S M + N: rows of N start from zero; the rows after them start from the identity with V = 0.

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], v [B, T, HV, V], g2_cum [B, HO, NT C] f32, t [B, HO, NT C, C],
s0 [items, HO, V, K] or [.., K, V] f32 (optional), tables int32 (packed rows).
Outputs (GMEM): o [B, T, HO, V], final state [N, HO, V, K] or [.., K, V] f32; or N [items, HO, V, K] f32 and M^T
[items, HO, K, K].
Shared memory: Config.smem_bytes, 212 KB at K = V = 128 with two state warpgroups and three stages.
Hardware: compute capability 9.0. Limits: K and V multiples of 64 up to 256; T a multiple of 8.
Registers: the sum of set_max_registers over the warpgroups must not exceed what they had at entry (504 for three,
512 for two), or the kernel waits for ever.
Source: Yang et al. 2024 (Gated DeltaNet), eq. 8 to 10, transposed; FlashInfer's `delta_rule_sm90` (roles of
warpgroups).
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
from jaxtyping import Array, Float, Int

from pallas_kernels.common import (
    CHUNK,
    COL,
    COMPILER_PARAMS,
    ROW,
    SMEM_LIMIT,
    WGMMA,
    WGMMA_TRANSPOSED,
    along_columns,
    along_rows,
    grid_index,
    inverse_log2,
    iota,
    launch,
    load_state,
    store_any,
    take,
    tiling,
    transposed,
    zeros,
)
from pallas_kernels.device import Device
from pallas_kernels.spans import (
    gamma_of,
    keep_owned_columns,
    keep_owned_factors,
    keep_owned_gates,
    keep_owned_rows,
)

ROWS = 64
"""Rows of S^T that one state warpgroup holds."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the recurrence runs, not what it computes."""

    state_warpgroups: int = 2
    """1 or 2. Two share a head's q, k, a and gates; one gives twice the CTAs."""
    stages: int = 3
    """Chunks in flight. Two cost 20 % (H200, 2026-11-21, K = V = 128)."""
    state_in_smem: bool = False
    """Whether S rounded to bf16 is an operand in shared memory, not registers: needed for K > 128."""
    helper_registers: int = 88
    state_registers: int = 208

    def smem_bytes(self, K: int, outputs: bool) -> int:
        """Shared memory of a CTA."""
        rows = ROWS * self.state_warpgroups
        stage = 2 * CHUNK * (K * (1 + outputs) + rows + CHUNK * (1 + outputs)) + 6 * 4 * CHUNK
        once = 2 * rows * (CHUNK if outputs else K) + 2 * rows * K * self.state_in_smem
        return self.stages * stage + once + 1024

    @classmethod
    def default(cls, K: int, V: int, outputs: bool, state_warpgroups: int) -> "Config":
        """Most stages that fit beside the operands that K and V need."""
        registers = {1: (208, 248), 2: (88, 208)}
        for stages in (4, 3, 2) if state_warpgroups == 1 else (3, 2):
            config = cls(state_warpgroups, stages, K > 128, *registers[state_warpgroups])
            if config.smem_bytes(K, outputs) <= SMEM_LIMIT:
                return config
        raise AssertionError("K > 256")


class Split(NamedTuple):
    """Static shape of the work."""

    num_items: int
    """Items, that is sequences or segments; for packed rows one more than needed, which zeroes the padding."""
    segment_chunks: int | None
    """Chunks of a segment, None when sequences are not cut."""


class Tables(NamedTuple):
    """Where the items of packed rows lie. Without segments items are sequences, and the last table is None."""

    cu_seqlens: Int[Array, " N1"]
    sequence: Int[Array, " items"] | None
    """Sequence of each item; N for the padding past the last sequence. Without segments the order in which the
    sequences are started, or None for theirs."""
    first_item: Int[Array, " N2"] | None
    """First item of each sequence, of the padding, and the number of items used."""


class _Item(NamedTuple):
    """The part of a row that a CTA works on."""

    index: jax.Array
    row: jax.Array
    """Row of the batch."""
    sequence: jax.Array
    begin: jax.Array
    end: jax.Array
    """First token, and the one after the last."""
    first_chunk: jax.Array
    num_chunks: jax.Array
    is_last: jax.Array | bool
    """Whether the sequence ends here."""
    is_padding: jax.Array | bool


def _dense_item(index, split: Split, T: int) -> _Item:
    """Item of a batch whose rows are one sequence each: all have the same segments."""
    num_chunks = -(-T // CHUNK)
    length = split.segment_chunks or num_chunks
    per_row = -(-num_chunks // length)
    row, segment = lax.div(index, per_row), lax.rem(index, per_row)
    first = segment * length
    chunks = jnp.minimum(length, num_chunks - first)
    begin, end = first * CHUNK, (first + chunks) * CHUNK
    return _Item(index, row, row, begin, end, first, chunks, segment == per_row - 1, False)


def _packed_item(index, split: Split, T: int, N: int, tables) -> _Item:
    """Item of packed rows. The padding past the last sequence is an item too, of sequence N."""
    cu = tables[0]
    n = index if len(tables) == 1 else tables[1][index]
    is_padding = n >= N
    begin = cu[jnp.minimum(n, N)]
    end = jnp.where(is_padding, T, cu[jnp.minimum(n + 1, N)])
    last = True
    if split.segment_chunks is not None:
        segment = index - tables[2][jnp.minimum(n, N)]
        last = index + 1 == tables[2][jnp.minimum(n + 1, N + 1)]
        start = (lax.div(begin, CHUNK) + segment * split.segment_chunks) * CHUNK
        cut = start + split.segment_chunks * CHUNK
        begin, end = jnp.maximum(begin, start), jnp.where(is_padding, end, jnp.minimum(end, cut))
        end = jnp.where(n > N, begin, end)
    first = lax.div(begin, CHUNK)
    chunks = jnp.where(end > begin, lax.div(end + CHUNK - 1, CHUNK) - first, 0)
    return _Item(index, jnp.int32(0), n, begin, end, first, chunks, last, is_padding)


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
    scale: float
    packed: bool
    num_tables: int
    has_s0: bool
    normalize: bool
    write_transition: bool
    kv_layout: bool
    s0_kv_layout: bool

    @property
    def outputs(self) -> bool:
        return not self.write_transition


def _body(*refs, config: Config, split: Split, sizes: _Sizes, interpreted: bool):
    refs = list(refs)
    q_gmem = take(refs, sizes.outputs)
    k_gmem, v_gmem, g_gmem, t_gmem = (take(refs) for _ in range(4))
    q_rstd_gmem, k_rstd_gmem = take(refs, sizes.normalize and sizes.outputs), take(refs, sizes.normalize)
    s0_gmem = take(refs, sizes.has_s0)
    tables = [take(refs) for _ in range(sizes.num_tables)]
    out_gmem, final_gmem = take(refs), take(refs)
    kq_smem, v_smem, t_smem, p_smem, out_smem, s_smem = refs[:6]
    g_smem, d_smem, d_scaled_smem, dr_smem, q_rstd_smem, k_rstd_smem = refs[6:12]
    loaded, prepared, consumed, turn = refs[12:]

    dev, dtype, f32 = Device(interpreted), k_gmem.dtype, jnp.float32
    outputs, stages, num_state = sizes.outputs, config.stages, config.state_warpgroups
    K, columns, t_log2 = sizes.K, num_state * ROWS, inverse_log2(dtype)

    wg = lax.axis_index("wg").astype(jnp.int32)
    tile = lax.rem(grid_index(), sizes.tiles)
    head = lax.rem(lax.div(grid_index(), sizes.tiles), sizes.HO)
    index = lax.div(grid_index(), sizes.tiles * sizes.HO)
    if sizes.packed:
        item = _packed_item(index, split, sizes.T, sizes.N, tables)
    else:
        item = _dense_item(index, split, sizes.T)
    chunks = jnp.where(item.is_padding, 0, item.num_chunks) if sizes.packed else item.num_chunks
    if sizes.write_transition:  # nothing follows the last segment
        chunks = jnp.where(item.is_last, 0, chunks)

    def head_of(count):
        return lax.div(head, sizes.HO // count)

    def tokens_of(i):
        return pl.ds((item.first_chunk + i) * CHUNK, CHUNK)

    def shared(i):
        """Rows [begin, end) of chunk i are owned; whether that is not all of them."""
        start = (item.first_chunk + i) * CHUNK
        begin, end = jnp.maximum(item.begin - start, 0), jnp.minimum(item.end - start, CHUNK)
        return begin, end, (begin > 0) | (end < CHUNK)

    # Helper

    def load(i, stage):
        tokens = tokens_of(i)

        def copy(source, destination):
            plgpu.copy_gmem_to_smem(source, destination, loaded.at[stage])

        copy(k_gmem.at[item.row, tokens, head_of(sizes.Hk)], kq_smem.at[stage, 0:CHUNK])
        if outputs:
            copy(q_gmem.at[item.row, tokens, head_of(sizes.Hq)], kq_smem.at[stage, CHUNK : 2 * CHUNK])
        v_columns = pl.ds(
            jnp.minimum(tile * columns, sizes.V - columns), columns
        )  # transitions: not used past V
        copy(v_gmem.at[item.row, tokens, head_of(sizes.HV), v_columns], v_smem.at[stage])
        copy(t_gmem.at[item.row, head, tokens], t_smem.at[stage])
        copy(g_gmem.at[item.row, head, tokens], g_smem.at[stage])
        if sizes.normalize:
            copy(k_rstd_gmem.at[item.row, head_of(sizes.Hk), tokens], k_rstd_smem.at[stage])
            if outputs:
                copy(q_rstd_gmem.at[item.row, head_of(sizes.Hq), tokens], q_rstd_smem.at[stage])

    def replace_foreign_tokens(i, stage):
        begin, end, is_shared = shared(i)

        @pl.when(is_shared)
        def _():
            tiles = [kq_smem.at[stage, 0:CHUNK], v_smem.at[stage], t_smem.at[stage]]
            if outputs:
                tiles.append(kq_smem.at[stage, CHUNK : 2 * CHUNK])
            for ref in tiles:
                keep_owned_rows(ref, begin, end)
            keep_owned_columns(t_smem.at[stage], begin, end)
            keep_owned_gates(g_smem.at[stage], begin, end)
            for ref in [k_rstd_smem, q_rstd_smem][: sizes.normalize * (1 + outputs)]:
                keep_owned_factors(ref.at[stage], begin, end)
            plgpu.commit_smem()

    def factors(smem, stage) -> Any:
        return plgpu.load(smem.at[stage], layout=ROW) if sizes.normalize else 1.0

    def prepare(stage):
        """P and the vectors of a stage; Q K^T runs meanwhile."""
        g = g_smem.at[stage]
        if not outputs:
            return prepare_vectors(stage, plgpu.load(g, layout=ROW))

        def prepare_p(qk):
            q_tile, k_tile = kq_smem.at[stage, CHUNK : 2 * CHUNK], kq_smem.at[stage, 0:CHUNK]
            qk = dev.issue(qk, q_tile, transposed(k_tile))
            g_rows, gamma = gamma_of(dev, g, math.log2(sizes.scale) - t_log2)
            prepare_vectors(stage, g_rows)
            p = dev.collect(qk) * gamma
            if sizes.normalize:
                p = p * along_rows(factors(q_rstd_smem, stage), CHUNK)
            p_smem.at[stage][...] = p.astype(dtype)

        pl.run_scoped(prepare_p, plgpu.ACC((CHUNK, CHUNK), f32))

    def prepare_vectors(stage, g_rows):
        d_smem.at[stage][...] = jnp.exp2(g_rows) * factors(k_rstd_smem, stage)
        if outputs:
            d_scaled = jnp.exp2(g_rows + math.log2(sizes.scale))
            d_scaled_smem.at[stage][...] = d_scaled * factors(q_rstd_smem, stage)
        dr_smem.at[stage][...] = jnp.exp2(g_smem[stage, CHUNK - 1] - t_log2 - g_rows)

    @pl.when(wg == num_state)
    def helper():
        plgpu.set_max_registers(config.helper_registers, action="decrease")
        for j in range(stages - 1):
            pl.when(j < chunks)(functools.partial(load, jnp.int32(j), j))

        def step(i, _):
            stage, previous = lax.rem(i, stages), lax.rem(i + stages - 1, stages)
            plgpu.barrier_wait(loaded.at[stage])
            if sizes.packed:
                replace_foreign_tokens(i, stage)
            prepare(stage)
            plgpu.commit_smem()
            plgpu.barrier_arrive(prepared.at[stage])
            pl.when(i >= 1)(lambda: plgpu.barrier_wait(consumed.at[previous]))
            pl.when(i + stages - 1 < chunks)(lambda: load(i + stages - 1, previous))
            return ()

        lax.fori_loop(0, chunks, step, ())
        pl.when(chunks > 0)(lambda: plgpu.barrier_wait(consumed.at[lax.rem(chunks - 1, stages)]))

    # State warpgroups

    row_tile = tile * num_state + wg
    rows = pl.ds(row_tile * ROWS, ROWS)

    def store_o(i, o):
        """o [64 columns of V, C] of chunk i to memory; only owned rows, one by one, in a shared chunk."""
        parts_smem: Any = out_smem if sizes.packed else (out_smem, None)
        tile_smem, flat_smem = parts_smem
        tokens = tokens_of(i)

        def whole():
            transposed(tile_smem.at[wg])[...] = o
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile_smem.at[wg], out_gmem.at[item.row, tokens, head, rows])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if not sizes.packed:
            return whole()
        begin, end, is_shared = shared(i)

        @pl.when(is_shared)
        def _():
            store_any(transposed(flat_smem.at[wg]), o)
            plgpu.commit_smem()

            def token(t, _):
                position = (item.first_chunk + i) * CHUNK + t
                plgpu.copy_smem_to_gmem(flat_smem.at[wg, t], out_gmem.at[item.row, position, head, rows])
                return ()

            lax.fori_loop(begin, end, token, ())

        pl.when(jnp.logical_not(is_shared))(whole)

    def clear_padding():
        def clear(i, _):
            store_o(i, zeros((ROWS, CHUNK), dtype))
            return ()

        @pl.when(item.is_padding)
        def _():
            lax.fori_loop(0, item.num_chunks, clear, ())

    def read_state():
        if sizes.write_transition:  # [0 | I]: row r of M^T is row V + r
            diagonal = iota((ROWS, K), 0) + row_tile * ROWS - sizes.V == iota((ROWS, K), 1)
            return jnp.where(diagonal, 1.0, zeros((ROWS, K), f32))
        if not sizes.has_s0:
            return zeros((ROWS, K), f32)
        n = item.sequence if split.segment_chunks is None else item.index
        s0 = s0_gmem.at[jnp.minimum(n, s0_gmem.shape[0] - 1), head]  # the padding reads any state
        return load_state(s0, rows, sizes.s0_kv_layout)

    def write_state(s):
        if sizes.write_transition:

            @pl.when(row_tile < sizes.V // ROWS)
            def _():
                out_gmem.at[item.index, head, rows][...] = s

            @pl.when(row_tile >= sizes.V // ROWS)
            def _():
                out_smem.at[wg][...] = s.astype(dtype)
                plgpu.commit_smem()
                m_rows = pl.ds(row_tile * ROWS - sizes.V, ROWS)
                plgpu.copy_smem_to_gmem(out_smem.at[wg], final_gmem.at[item.index, head, m_rows])

        else:
            final = final_gmem.at[item.sequence, head]
            if sizes.kv_layout:
                transposed(final.at[:, rows])[...] = plgpu.layout_cast(s, WGMMA_TRANSPOSED)
            else:
                final.at[rows][...] = s

    def operand(s):
        """S rounded, as the left operand of the next chunk's products."""
        if not config.state_in_smem:
            return s.astype(dtype)
        s_smem.at[wg][...] = s.astype(dtype)
        plgpu.commit_smem()
        return ()

    def step(i, carry):
        s, s_operand, o_previous = carry
        stage = lax.rem(i, stages)
        k_tile = kq_smem.at[stage, 0:CHUNK]
        q_tile = kq_smem.at[stage, CHUNK : 2 * CHUNK] if outputs else None
        left = s_smem.at[wg] if config.state_in_smem else s_operand
        plgpu.barrier_wait(prepared.at[stage] if sizes.packed else loaded.at[stage])
        if num_state == 2:
            plgpu.barrier_wait(turn.at[wg])

        def vector(smem):
            return along_columns(plgpu.load(smem.at[stage], layout=COL), ROWS)

        def store_previous():
            pl.when(i > 0)(lambda: store_o(i - 1, o_previous))

        def solve(sk, *sq):
            sk = dev.issue(sk, left, transposed(k_tile))
            if outputs:
                sq = dev.issue(sq[0], left, transposed(q_tile))
                if num_state == 2:
                    store_previous()
            v_t = plgpu.load(transposed(v_smem.at[stage, :, pl.ds(wg * ROWS, ROWS)]), layout=WGMMA)
            if sizes.write_transition:
                v_t = jnp.where(row_tile < sizes.V // ROWS, v_t, jnp.zeros((), dtype))
            if not sizes.packed:
                plgpu.barrier_wait(prepared.at[stage])
            d = vector(d_smem)
            w = (v_t.astype(f32) - d * dev.collect(sk, newer=1 if outputs else 0)).astype(dtype)
            if num_state == 2:
                plgpu.barrier_arrive(turn.at[1 - wg])

            def correct(n):
                """N, and in its shadow what the two last products start from."""
                n = dev.issue(n, w, transposed(t_smem.at[stage]))
                dr = vector(dr_smem)
                decayed = s * jnp.exp2(g_smem[stage, CHUNK - 1])
                if not outputs:
                    return lax.optimization_barrier(decayed), None, dev.collect(n), dr
                read = dev.collect(sq, newer=1) * vector(d_scaled_smem)
                return *lax.optimization_barrier((decayed, read)), dev.collect(n), dr

            return pl.run_scoped(correct, plgpu.ACC((ROWS, CHUNK), f32))

        accumulators = [plgpu.ACC((ROWS, CHUNK), f32)] * (1 + outputs)
        decayed, read, n, dr = pl.run_scoped(solve, *accumulators)
        o, written = (), (n * dr).astype(dtype)
        if outputs:
            rounded = n.astype(dtype)

            def write_and_read(add):
                add(0, written, k_tile)
                add(1, rounded, transposed(p_smem.at[stage]))
                if num_state == 1:
                    store_previous()

            s, o = dev.accumulate([decayed, read], write_and_read)
            o = o.astype(dtype)
        else:
            (s,) = dev.accumulate([decayed], lambda add: add(0, written, k_tile))
        s_operand = operand(s)
        dev.release(consumed.at[stage])
        return s, s_operand, o

    @pl.when(wg < num_state)
    def state():
        plgpu.set_max_registers(config.state_registers, action="increase")
        s = read_state()
        start = (s, operand(s), zeros((ROWS, CHUNK), dtype) if outputs else ())
        if num_state == 2:
            pl.when(wg == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        s, _, o = lax.fori_loop(0, chunks, step, start)
        if num_state == 2:
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
        if outputs:
            pl.when(chunks > 0)(lambda: store_o(chunks - 1, o))
        if outputs and sizes.packed:
            clear_padding()

        writes = jnp.logical_not(item.is_last) if sizes.write_transition else item.is_last
        if sizes.packed:
            writes = writes & jnp.logical_not(item.is_padding)
        pl.when(writes)(lambda: write_state(s))
        plgpu.wait_smem_to_gmem(0)


def recurrence(
    q: Float[Array, "B T Hq K"] | None,
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T HV V"],
    g2_cum: Float[Array, "B HO T64"],
    t: Float[Array, "B HO T64 C"],
    s0: Float[Array, "items HO _ _"] | None,
    tables: Tables | None,
    *,
    split: Split,
    rstd: tuple[Float[Array, "B Hq T64"] | None, Float[Array, "B Hk T64"]] | None = None,
    scale: float = 1.0,
    kv_layout: bool = False,
    s0_kv_layout: bool = False,
    write_transition: bool = False,
    config: Config | None = None,
    interpret=None,
):
    """o and the final states, or N and M^T of every segment (write_transition); see the module docstring.

    Args:
      q, k, v: bfloat16 or float16, K and V multiples of 64, T a multiple of 8; q is not read for transitions.
      g2_cum, t: of chunk_gates and tril_inverse.
      s0: state before each item, float32, None for zeros.
      kv_layout, s0_kv_layout: whether the final states and s0 are [K, V]; else [V, K].
      tables: of packed rows (B = 1), None when every row of the batch is one sequence.
      split: items; segments need s0 for every item unless transitions are written.
      rstd: reciprocal norms of q (not read for transitions) and k, which the rule then takes normalised; t is that of
        tril_inverse(normalize=True). None to take q and k as they are.
      scale: factor of the output, positive; 1 for transitions.
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    B, T, Hk, K = k.shape
    HV, V = v.shape[2:]
    HO = t.shape[1]
    N = B if tables is None else tables.cu_seqlens.shape[0] - 1
    all_rows = V + K if write_transition else V
    if config is None:
        pairs = V % (2 * ROWS) == 0 and all_rows % (2 * ROWS) == 0 and K <= 128
        config = Config.default(K, V, not write_transition, 2 if pairs else 1)
    n, stages = config.state_warpgroups, config.stages
    if V % (ROWS * n) or all_rows % (ROWS * n):
        raise ValueError(f"config.state_warpgroups: expected a divisor of {V // ROWS} row tiles, got {n}")
    sizes = _Sizes(
        T=T,
        N=N,
        Hq=HO if q is None else q.shape[2],
        Hk=Hk,
        HV=HV,
        HO=HO,
        K=K,
        V=V,
        tiles=all_rows // (ROWS * n),
        scale=scale,
        packed=tables is not None,
        num_tables=sum(table is not None for table in tables or ()),
        has_s0=s0 is not None and not write_transition,
        normalize=rstd is not None,
        write_transition=write_transition,
        kv_layout=kv_layout,
        s0_kv_layout=s0_kv_layout,
    )
    outputs = sizes.outputs
    dtype, f32 = k.dtype, jnp.float32

    def tiles(count, rows, columns, used=True):
        if not used:
            return plgpu.SMEM((8, 128), f32)
        return plgpu.SMEM((count, rows, columns), dtype, transforms=tiling(128))

    out_tile = tiles(n, ROWS, CHUNK if outputs else K)
    if sizes.packed and outputs:
        out_tile = plgpu.RefUnion(out_tile, plgpu.SMEM((n, CHUNK, ROWS), dtype))
    vectors = plgpu.SMEM((stages, CHUNK), f32)
    if write_transition:
        out_type = (
            jax.ShapeDtypeStruct((split.num_items, HO, V, K), f32),
            jax.ShapeDtypeStruct((split.num_items, HO, K, K), dtype),
        )
    else:
        final = (N, HO, K, V) if kv_layout else (N, HO, V, K)
        out_type = (jax.ShapeDtypeStruct((B, T, HO, V), dtype), jax.ShapeDtypeStruct(final, f32))
    inputs = [q if outputs else None, k, v, g2_cum, t]
    q_rstd, k_rstd = rstd or (None, None)
    inputs += [q_rstd if outputs else None, k_rstd, s0 if sizes.has_s0 else None, *(tables or ())]
    return launch(
        functools.partial(_body, config=config, split=split, sizes=sizes, interpreted=interpret is not None),
        *inputs,
        out_type=out_type,
        scratch_types=(
            tiles(stages, CHUNK * (1 + outputs), K),
            tiles(stages, CHUNK, ROWS * n),
            tiles(stages, CHUNK, CHUNK),
            tiles(stages, CHUNK, CHUNK, outputs),
            out_tile,
            tiles(n, ROWS, K, config.state_in_smem),
            *[vectors] * 6,
            plgpu.Barrier(num_arrivals=(4 + outputs) + (1 + outputs) * sizes.normalize, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=n, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
        ),
        grid=(split.num_items * HO * sizes.tiles,),
        grid_names=("cta",),
        num_threads=n + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(**COMPILER_PARAMS, unsafe_no_auto_barriers=True),
    )
