"""The walk over the chunks of a sequence that both kernels of the forward share: `outputs` and `transitions`.

With the state transposed, h [V, K], and for one chunk (all of it float32 but the operands of products)

    R = V^T - (h K^T) D              W = R T^T              h <- gl h + (W Dr) K

where D_i = 2^G_i, Dr_i = beta_i 2^(G_last - G_i), gl = 2^G_last, G = g2_cum and T is the gated inverse of
`chunks.inverse`. What a token writes is beta_i times its column of W: the write strengths are in Dr and in whatever
else W is multiplied by along its tokens, which the helper makes, and so the products of a chunk do not wait for them.
Where keys are to be normalised, their reciprocal norms are in the rows of T and go into D: no tile of k is rewritten.

Work: one CTA takes `state_warpgroups` tiles of 64 rows of h (64 columns of V) of one head of one item. An item of
packed rows walks the chunks it touches, and in a chunk that it shares with another sequence the tokens it does not
own are masked. That leaves the state and the item's own outputs exact.

Threads (warpgroups). The state warpgroups hold h in registers, each its 64 rows, and run the chain of products, whose
left operands stay in registers (an accumulator rounded to bf16 is an operand already). The helper loads everything by
bulk copies, and one chunk ahead makes what does not depend on the state. Two state warpgroups take turns: one starts
a chunk's products when the other has its R, so that the products of one run while the other computes between them (2
% on an H200). Where `Config.loader` says so, one more warpgroup, the loader, issues the bulk copies in the helper's
place. The helper then goes ahead as far as stages are free, because it does not wait for a chunk to be read before
it makes the next one ready.

| barrier  | arrives                                  | waits                                               |
|----------|------------------------------------------|-----------------------------------------------------|
| loaded   | each bulk copy of a stage                | helper, state warpgroups; packed rows: helper only  |
| prepared | helper: what it makes is written         | state warpgroups                                    |
| consumed | each state warpgroup: stage read         | helper, before it loads or writes the stage again;  |
|          |                                          | loader, before it loads the stage again             |
| turn     | the other one of two state warpgroups    | state warpgroup, before its first products          |

Hardware: compute capability 9.0. Limits: K and V multiples of 64 up to 256; T a multiple of 8.
Registers: see `launch.check_registers`.
Source: Yang et al. 2024 (Gated DeltaNet), eq. 8 to 10, transposed; FlashInfer's `delta_rule_sm90` (roles of
warpgroups).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.launch import (
    LOADER_REGISTERS,
    check_registers,
    grid_index,
    release_registers,
    warpgroup_index,
)
from pallas_kernels.device.layouts import CHUNK, COL, ROW, WGMMA, along_columns
from pallas_kernels.device.memory import Memory, fitting, transposed
from pallas_kernels.device.operations import Device
from pallas_kernels.work.foreign import mask_foreign
from pallas_kernels.work.slots import Slots, padding_without_slot
from pallas_kernels.work.spans import item_of
from pallas_kernels.work.tables import Split

ROWS = 64
"""Rows of the transposed state that one state warpgroup holds."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a walk runs, not what it computes."""

    state_warpgroups: int = 2
    """1 or 2. Two share a head's q, k, T and gates; one gives twice the CTAs."""
    stages: int = 3
    """Chunks in flight. Two cost 20 % (H200, 2026-11-21, K = V = 128)."""
    ahead: int = 1
    """Chunks that the helper may have ready before their turn. With two, what it makes is not waited for, but a chunk
    has to be there a chunk earlier: that takes four stages. Beside a loader it may have all stages ready."""
    state_in_smem: bool = False
    """Whether the rounded state is an operand in shared memory, not registers: needed for K > 128."""
    helper_registers: int = 88
    state_registers: int = 208
    loader: bool = False
    """Whether a warpgroup of its own issues the loads. It takes registers from the helper, which two state warpgroups
    leave too few, and pays where the helper is late."""

    def __post_init__(self):
        loader = (LOADER_REGISTERS,) * self.loader
        check_registers(*loader, self.helper_registers, *(self.state_registers,) * self.state_warpgroups)

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a CTA."""
        return self.state_warpgroups + 1 + self.loader

    @classmethod
    def most_stages(
        cls,
        state_warpgroups: int,
        state_in_smem: bool,
        memory: Callable[["Config"], Memory],
        loader: bool = False,
    ) -> "Config":
        """The configuration of most stages that fit into the memory that a kernel then declares."""
        registers = {1: (208, 248), 2: (88, 208)}[state_warpgroups]
        others = state_in_smem, *registers, loader
        return fitting((cls(state_warpgroups, n, max(n - 2, 1), *others) for n in (4, 3, 2)), memory)


class Sizes(NamedTuple):
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
    scale: float = 1.0
    kv_layout: bool = False
    h_0_kv_layout: bool = False
    slots: Slots | None = None
    """Slots of a pool that the states lie in."""
    tokens: int = CHUNK
    """Tokens of a chunk, see `work.halves`."""


class Cta:
    """All that every warpgroup of a CTA knows.

    config: of this walk, or of `forward.channel_walk`.
    """

    def __init__(self, gmem: Any, smem: Any, *, config: Any, sizes: Sizes, interpreted: bool):
        self.gmem, self.smem, self.config, self.sizes = gmem, smem, config, sizes
        self.dev = Device(interpreted)
        self.dtype = gmem.v.dtype
        self.packed = gmem.cu_seqlens is not None
        self.num_state = config.state_warpgroups
        self.wg = warpgroup_index()
        self.tile = lax.rem(grid_index(), sizes.tiles)
        self.head = lax.rem(lax.div(grid_index(), sizes.tiles), sizes.HO)
        index = lax.div(grid_index(), sizes.tiles * sizes.HO)
        self.item = item_of(index, sizes.split, sizes.T, sizes.N, gmem)
        self.span = self.item.span
        if sizes.slots is not None:
            self.span = padding_without_slot(self.span, sizes.slots, gmem)
        self.chunks = self.span.work_chunks
        """Chunks to walk over."""
        self.row_tile = self.tile * self.num_state + self.wg
        self.rows = pl.ds(self.row_tile * ROWS, ROWS)
        """Rows of the state that this warpgroup holds."""

    def head_of(self, count: int) -> jax.Array:
        """The head of an input with `count` heads that the CTA's output head reads."""
        return lax.div(self.head, self.sizes.HO // count)

    def chunk_of(self, i) -> jax.Array:
        """Number in its row of the i-th chunk of the walk."""
        return self.span.first_chunk + i

    def vector(self, ref: Any, stage) -> jax.Array:
        """A vector of a stage repeated over the rows of the state."""
        return along_columns(plgpu.load(ref.at[stage], layout=COL), ROWS)

    def factors(self, ref: Any, stage) -> Any:
        """Reciprocal norms of a stage, in layout ROW; 1 where nothing is normalised."""
        return 1.0 if ref is None else plgpu.load(ref.at[stage], layout=ROW)

    def operand(self, h: jax.Array) -> Any:
        """The state rounded, as the left operand of the next chunk's products."""
        if not self.config.state_in_smem:
            return h.astype(self.dtype)
        self.smem.h.at[self.wg][...] = h.astype(self.dtype)
        plgpu.commit_smem()
        return ()


def load(cta: Cta, i, stage) -> None:
    """Starts the copies of the i-th chunk."""
    gmem, smem, sizes, row = cta.gmem, cta.smem, cta.sizes, cta.span.row
    tokens = pl.ds(cta.chunk_of(i) * CHUNK, CHUNK)
    columns = cta.num_state * ROWS

    def copy(source, destination):
        plgpu.copy_gmem_to_smem(source, destination, smem.loaded.at[stage])

    copy(gmem.k.at[row, tokens, cta.head_of(sizes.Hk)], smem.k.at[stage])
    if gmem.q is not None:
        copy(gmem.q.at[row, tokens, cta.head_of(sizes.Hq)], smem.q.at[stage])
    # Transitions have rows past V, which use no values.
    v_columns = pl.ds(jnp.minimum(cta.tile * columns, sizes.V - columns), columns)
    copy(gmem.v.at[row, tokens, cta.head_of(sizes.HV), v_columns], smem.v.at[stage])
    copy(gmem.t.at[row, cta.head, tokens], smem.t.at[stage])
    copy(gmem.g2_cum.at[row, cta.head, tokens], smem.g2.at[stage])
    copy(gmem.beta.at[row, cta.head, tokens], smem.beta.at[stage])
    if gmem.k_rstd is not None:
        copy(gmem.k_rstd.at[row, cta.head_of(sizes.Hk), tokens], smem.k_rstd.at[stage])
    if gmem.q_rstd is not None:
        copy(gmem.q_rstd.at[row, cta.head_of(sizes.Hq), tokens], smem.q_rstd.at[stage])


def mask(cta: Cta, i, stage) -> None:
    """Masks what the i-th chunk holds of other sequences."""
    smem = cta.smem
    tiles = [smem.k.at[stage], smem.v.at[stage], smem.t.at[stage]]
    if cta.gmem.q is not None:
        tiles.append(smem.q.at[stage])
    vectors = [ref.at[stage] for ref in (smem.beta, smem.k_rstd, smem.q_rstd) if ref is not None]
    chunk, t, gates = cta.chunk_of(i), smem.t.at[stage], smem.g2.at[stage]
    mask_foreign(cta.span, chunk, tiles, square=t, gates=gates, vectors=vectors)


def prepare_vectors(cta: Cta, stage, g_rows) -> None:
    """D, scale D where outputs are made, and Dr of a stage, from its gates in layout ROW."""
    smem = cta.smem
    smem.d.at[stage][...] = jnp.exp2(g_rows) * cta.factors(smem.k_rstd, stage)
    if smem.d_scaled is not None:
        d_scaled = jnp.exp2(g_rows + math.log2(cta.sizes.scale))
        smem.d_scaled.at[stage][...] = d_scaled * cta.factors(smem.q_rstd, stage)
    beta = plgpu.load(smem.beta.at[stage], layout=ROW)
    smem.dr.at[stage][...] = jnp.exp2(smem.g2[stage, CHUNK - 1] - g_rows) * beta


def helpers(cta: Cta, prepare: Callable[[Cta, Any], None]) -> None:
    """The roles of the warpgroups behind the state warpgroups, of which the helper runs prepare(cta, stage) on each
    chunk."""
    run = _prepare_loaded if cta.config.loader else _load_and_prepare
    pl.when(cta.wg == cta.num_state)(lambda: run(cta, prepare))
    if cta.config.loader:
        pl.when(cta.wg == cta.num_state + 1)(lambda: _load_chunks(cta))


def _prepare(cta: Cta, i, stage, prepare: Callable[[Cta, Any], None]) -> None:
    """Makes the i-th chunk ready, as soon as it has come."""
    plgpu.barrier_wait(cta.smem.loaded.at[stage])
    if cta.packed:
        mask(cta, i, stage)
    prepare(cta, stage)
    plgpu.commit_smem()
    plgpu.barrier_arrive(cta.smem.prepared.at[stage])


def _drain(cta: Cta, count: int) -> None:
    """Waits until the last `count` chunks are read, as every chunk before them was waited for."""
    chunks, stages = cta.chunks, cta.config.stages

    def wait(n):
        pl.when(chunks > n)(lambda: plgpu.barrier_wait(cta.smem.consumed.at[lax.rem(chunks - 1 - n, stages)]))

    for n in reversed(range(count)):
        wait(n)


def _load_and_prepare(cta: Cta, prepare: Callable[[Cta, Any], None]) -> None:
    """The role of a helper that loads chunks ahead itself."""
    smem, stages, ahead, chunks = cta.smem, cta.config.stages, cta.config.ahead, cta.chunks
    release_registers(cta.config.helper_registers, cta.config.warpgroups)
    for j in range(stages - ahead):
        pl.when(j < chunks)(functools.partial(load, cta, jnp.int32(j), j))

    def step(i, _):
        stage, previous = lax.rem(i, stages), lax.rem(i + stages - ahead, stages)
        _prepare(cta, i, stage, prepare)
        pl.when(i >= ahead)(lambda: plgpu.barrier_wait(smem.consumed.at[previous]))
        pl.when(i + stages - ahead < chunks)(lambda: load(cta, i + stages - ahead, previous))
        return ()

    lax.fori_loop(0, chunks, step, ())
    _drain(cta, ahead)


def _prepare_loaded(cta: Cta, prepare: Callable[[Cta, Any], None]) -> None:
    """The role of a helper beside a loader."""
    smem, stages, chunks = cta.smem, cta.config.stages, cta.chunks
    plgpu.set_max_registers(cta.config.helper_registers, action="increase")  # three warpgroups begin with 168

    def step(i, _):
        stage = lax.rem(i, stages)
        pl.when(i >= stages)(lambda: plgpu.barrier_wait(smem.consumed.at[stage]))
        _prepare(cta, i, stage, prepare)
        return ()

    lax.fori_loop(0, chunks, step, ())
    _drain(cta, stages)


def _load_chunks(cta: Cta) -> None:
    """The role of the loader: a chunk into every stage, and into each that has been read the next one."""
    smem, stages, chunks = cta.smem, cta.config.stages, cta.chunks
    release_registers(LOADER_REGISTERS, cta.config.warpgroups)
    for j in range(stages):
        pl.when(j < chunks)(functools.partial(load, cta, jnp.int32(j), j))

    def step(i, _):
        stage = lax.rem(i, stages)
        plgpu.barrier_wait(smem.consumed.at[stage])
        pl.when(i + stages < chunks)(lambda: load(cta, i + stages, stage))
        return ()

    lax.fori_loop(0, chunks, step, ())


def wait_for_chunk(cta: Cta, stage) -> None:
    """Waits until a stage holds what the first products read, and until it is this warpgroup's turn."""
    plgpu.barrier_wait((cta.smem.prepared if cta.packed else cta.smem.loaded).at[stage])
    if cta.num_state == 2:
        plgpu.barrier_wait(cta.smem.turn.at[cta.wg])


def corrected_values(cta: Cta, stage, hk, newer: int, values: Callable = lambda v_t: v_t) -> jax.Array:
    """R rounded, from the issued product h K^T, after which `newer` others were issued.

    values: applied to the transposed values.
    """
    v_tile = cta.smem.v.at[stage, :, pl.ds(cta.wg * ROWS, ROWS)]
    v_t = values(plgpu.load(transposed(v_tile), layout=WGMMA))
    if not cta.packed:
        plgpu.barrier_wait(cta.smem.prepared.at[stage])
    d = cta.vector(cta.smem.d, stage)
    r = (v_t.astype(jnp.float32) - d * cta.dev.collect(hk, newer=newer)).astype(cta.dtype)
    if cta.num_state == 2:
        plgpu.barrier_arrive(cta.smem.turn.at[1 - cta.wg])
    return r


def walk(cta: Cta, step: Callable, start: Any) -> Any:
    """Repeats carry <- step(cta, i, carry) over the chunks, two state warpgroups in turns."""
    if cta.num_state == 2:
        pl.when(cta.wg == 1)(lambda: plgpu.barrier_arrive(cta.smem.turn.at[0]))
    carry = lax.fori_loop(0, cta.chunks, functools.partial(step, cta), start)
    if cta.num_state == 2:
        pl.when(cta.wg == 0)(lambda: plgpu.barrier_wait(cta.smem.turn.at[0]))
    return carry
