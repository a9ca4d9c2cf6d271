"""The walk that two kernels share, `chains` and `segment_adjoints`. Its helper is in `chain_helper`.

With the state h and its cotangent dh transposed, [V, K], and for one chunk (all of it float32 but the operands of
products)

    states:    R = V^T - (h K^T) D           W = R T^T            h <- gl h + (W Dr) K
    adjoints:  Z = (dh K^T) Dr + dO^T P      dV = Z T             dh <- gl dh + scale (dO^T D) Q - (dV D) K

where P = scale ((Q K^T) * Gamma) diag(beta), Gamma[i, j] = 2^(G_i - G_j) for i >= j and 0 above, D_i = 2^G_i,
Dr_i = beta_i 2^(G_last - G_i), gl = 2^G_last, G = g2_cum and T is the gated inverse of `chunks.inverse`. W and dV
[V, C] are transposed: beta_i times column i of W is what token i writes, and dV is the gradient of v. Through P and
Dr the write strengths are in Z, and so in dV. The adjoint of T takes the place of the adjoint of the inverse: T^T is
applied to a matrix of V columns, and no product of three [C, C] matrices remains.

Work: one CTA takes `state_warpgroups` tiles of 64 rows of h or of dh (64 columns of V) of one head of one item. The
item of a sequence of packed rows walks the chunks it touches; in a chunk shared with another sequence the tokens of
the others are masked.

In float16, which ends at 2^-24, D of the adjoints is taken from the first token on (dh <- 2^G_0 (..) with D_i =
2^(G_i - G_0)), and P and Z, which hold beta, are 16 times as large.

Threads (warpgroups): the first ones hold h or dh in registers; the last one, the helper, loads everything by bulk
copies and makes P, D and Dr for the next chunk.

| barrier   | arrives                                  | waits                                             |
|-----------|------------------------------------------|---------------------------------------------------|
| loaded_k  | bulk copies of k, gates and beta         | helper; state warpgroups unless rows are packed   |
| loaded_q  | bulk copy of q (adjoints only)           | helper                                            |
| loaded    | bulk copies of T, v or do                | state warpgroups; the helper if rows are packed:  |
|           |                                          | before P where it masks, else behind it           |
| prepared  | helper: P, D and Dr are written          | state warpgroups                                  |
| consumed  | each state warpgroup: chunk read         | helper, before it loads to where the chunk was    |

Hardware: compute capability 9.0. Limits: K and V multiples of 64; T a multiple of 8.
Registers: see `launch.check_registers`.
Source: Yang et al. 2024 (Gated DeltaNet), eq. 8 to 10; the adjoint is that of its triangular solve.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.launch import check_registers, grid_index, launch, warpgroup_index
from pallas_kernels.device.layouts import CHUNK, COL, WGMMA, along_columns
from pallas_kernels.device.memory import Barriers, Buffer, Memory, fitting, transposed
from pallas_kernels.device.operations import Device
from pallas_kernels.work.foreign import store_owned
from pallas_kernels.work.spans import item_of, owned_rows
from pallas_kernels.work.tables import Items, Split, VisitTables, table_inputs

ROWS = 64
"""Rows of the transposed state that one state warpgroup holds."""

FLOAT16_LOG2 = 4
"""In float16 P and Z are kept times 2^4, so that small write strengths keep their digits."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a walk backwards runs, not what it computes."""

    state_warpgroups: int = 2
    """1 or 2. Two share a head's q, k, T and gates; one gives twice the CTAs."""
    stages: int = 2
    """Chunks of v or do, T and what the helper makes of a chunk in flight."""
    key_stages: int = 3
    """Chunks of q, k and gates in flight. One more than the others, and P is made a chunk ahead of its use."""
    state_in_smem: bool = False
    """Whether the rounded state is an operand in shared memory, not registers: needed for K > 128."""
    helper_registers: int = 72
    state_registers: int = 216

    def __post_init__(self):
        check_registers(self.helper_registers, *(self.state_registers,) * self.state_warpgroups)

    @classmethod
    def default(cls, K: int, state_warpgroups: int) -> "Config":
        """Most stages that fit beside the operands that K needs."""
        registers = {1: (208, 232 if K <= 128 else 240), 2: (72, 216)}[state_warpgroups]
        stages = (4, 4), (4, 3), (3, 3), (2, 3), (2, 2), (1, 2), (1, 1)
        configs = (cls(state_warpgroups, *n, K > 128, *registers) for n in stages)
        return fitting(configs, lambda x: _memory(x, K, jnp.bfloat16))


def _memory(config: Config, K: int, dtype, *, packed: bool = False) -> Memory:
    """Shared memory of a CTA."""
    n, stages, key_stages = config.state_warpgroups, config.stages, config.key_stages
    return {
        "q": Buffer((key_stages, CHUNK, K), dtype, swizzle=128),
        "k": Buffer((key_stages, CHUNK, K), dtype, swizzle=128),
        "x": Buffer((stages, CHUNK, ROWS * n), dtype, swizzle=128),
        "t": Buffer((stages, CHUNK, CHUNK), dtype, swizzle=128),
        "p": Buffer((stages, CHUNK, CHUNK), dtype, swizzle=128),
        "h": Buffer((ROWS * n, K), dtype, swizzle=128),
        "out": Buffer((n, CHUNK, ROWS), dtype, swizzle=128, also_flat=packed),
        "g2": Buffer((key_stages, CHUNK)),
        "beta": Buffer((key_stages, CHUNK)),
        "d": Buffer((stages, CHUNK)),
        "dr": Buffer((stages, CHUNK)),
        "mantissa": Buffer((stages, CHUNK)),
        "loaded": Barriers(arrivals=2, count=stages),
        "loaded_k": Barriers(arrivals=3, count=key_stages),
        "loaded_q": Barriers(arrivals=1, count=key_stages),
        "prepared": Barriers(arrivals=1, count=stages),
        "consumed": Barriers(arrivals=n, count=stages),
    }


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
    scale: float
    kv_layout: bool
    float16: bool
    tokens: int = CHUNK
    """Tokens of a chunk, see `work.halves`."""


class Cta:
    """All that every warpgroup of a CTA knows.

    config: of this walk, or of `backward.channel_chain`.
    """

    def __init__(self, gmem: Any, smem: Any, *, config: Any, sizes: Sizes, interpreted: bool):
        self.gmem, self.smem, self.config, self.sizes = gmem, smem, config, sizes
        self.dev = Device(interpreted)
        self.dtype = gmem.do.dtype
        self.packed = gmem.cu_seqlens is not None
        self.waits_for_helper = self.packed and (config.state_in_smem or sizes.float16)
        """Whether the state warpgroups wait for the helper alone, and the helper waits for all of a chunk. Otherwise
        the helper waits only for what it masks, and makes P of the other chunks before their T, v or do have come.
        That takes a register more, which K > 128 and float16 lack."""
        self.num_state = config.state_warpgroups
        # The adjoints come first: their chunks take longer.
        adjoints = sizes.split.num_items * sizes.HO * sizes.tiles
        self.adjoint = grid_index() < adjoints
        """Whether this CTA walks backwards, with the cotangent."""
        cta = jnp.where(self.adjoint, grid_index(), grid_index() - adjoints)
        self.wg = warpgroup_index()
        self.tile = lax.rem(cta, sizes.tiles)
        self.head = lax.rem(lax.div(cta, sizes.tiles), sizes.HO)
        index = lax.div(cta, sizes.tiles * sizes.HO)
        self.item = item_of(index, sizes.split, sizes.T, sizes.N, gmem)
        self.span = self.item.span
        self.chunks = self.span.work_chunks
        """Chunks to walk over."""
        self.rows = pl.ds((self.tile * self.num_state + self.wg) * ROWS, ROWS)
        """Rows of the state that this warpgroup holds."""
        self.h_tile = smem.h.at[pl.ds(self.wg * ROWS, ROWS)]

    def head_of(self, count: int) -> jax.Array:
        """The head of an input with `count` heads that the CTA's output head reads."""
        return lax.div(self.head, self.sizes.HO // count)

    def chunk_of(self, i) -> jax.Array:
        """Number in its row of the i-th chunk of the walk."""
        return self.span.first_chunk + jnp.where(self.adjoint, self.chunks - 1 - i, i)

    def visit_of(self, i) -> jax.Array:
        """Visit of the i-th chunk of the walk."""
        return self.span.first_visit + jnp.where(self.adjoint, self.chunks - 1 - i, i)

    def first_gate(self, i, key_stage) -> jax.Array:
        """Gate of the item's first token in a chunk."""
        first = owned_rows(self.span, self.chunk_of(i))[0] if self.packed else 0
        return self.smem.g2[key_stage, first]

    def vector(self, ref: Any, stage) -> jax.Array:
        """A vector of a stage repeated over the rows of the state."""
        return along_columns(plgpu.load(ref.at[stage], layout=COL), ROWS)

    def x_tile(self, stage) -> Any:
        """This warpgroup's columns of v or do, transposed."""
        return transposed(self.smem.x.at[stage, :, pl.ds(self.wg * ROWS, ROWS)])


def store_h(cta: Cta, i, rounded, destination) -> None:
    """A rounded state to memory, through the tile that is also an operand with state_in_smem. The last output of the
    step before may still be on its way: only the state of that step must have left."""
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    cta.h_tile[...] = rounded
    plgpu.commit_smem()
    if destination is not None:
        plgpu.copy_smem_to_gmem(cta.h_tile, destination.at[cta.visit_of(i), cta.head, cta.rows])


def store_output(cta: Cta, x_t, destination) -> None:
    """x_t transposed, [C, 64 columns of V], to memory."""
    tile = (cta.smem.out[0] if cta.packed else cta.smem.out).at[cta.wg]
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    transposed(tile)[...] = x_t
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, destination.at[:, cta.rows])


def store_dv(cta: Cta, chunk, dv_t) -> None:
    """dv_t transposed to the tokens of a chunk that are the item's."""
    swizzled, plain = cta.smem.out if cta.packed else (cta.smem.out, None)

    def views(ref):
        return ref.at[cta.wg], transposed(ref.at[cta.wg])

    def destination(tokens):
        return cta.gmem.dv.at[cta.span.row, tokens, cta.head, cta.rows]

    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    flat = None if plain is None else views(plain)
    store_owned(cta.span, chunk, dv_t, views(swizzled), flat, destination, waits_for_rows=True)


def wait_loaded(cta: Cta, stage, key_stage) -> None:
    """Waits until a chunk has come, and in packed rows until it is masked."""
    if cta.packed:
        if not cta.waits_for_helper:
            plgpu.barrier_wait(cta.smem.loaded.at[stage])
        return plgpu.barrier_wait(cta.smem.prepared.at[stage])
    plgpu.barrier_wait(cta.smem.loaded_k.at[key_stage])
    plgpu.barrier_wait(cta.smem.loaded.at[stage])


def times_keys(cta: Cta, product, i, k_tile, h, destination) -> Any:
    """h K^T, issued; h leaves for memory, unless destination is None."""
    rounded = h.astype(cta.dtype)
    if cta.config.state_in_smem:
        store_h(cta, i, rounded, destination)
        return cta.dev.issue(product, cta.h_tile, transposed(k_tile))
    product = cta.dev.issue(product, rounded, transposed(k_tile))
    if destination is not None:
        store_h(cta, i, rounded, destination)
    return product


def adjoint_step(cta: Cta, i, stage, key_stage, dh) -> jax.Array:
    """The cotangent before a chunk from the one after it. dh and dv leave for memory where the kernel has them."""
    gmem, smem, dev, sizes = cta.gmem, cta.smem, cta.dev, cta.sizes
    k_tile, q_tile = smem.k.at[key_stage], smem.q.at[key_stage]
    wait_loaded(cta, stage, key_stage)
    if not cta.packed:
        plgpu.barrier_wait(smem.prepared.at[stage])

    def solve(attended, late, dv):
        attended = dev.issue(attended, cta.x_tile(stage), smem.p.at[stage])
        late = times_keys(cta, late, i, k_tile, dh, gmem.dh)
        d, dr = lax.optimization_barrier((cta.vector(smem.d, stage), cta.vector(smem.dr, stage)))
        do_t = plgpu.load(cta.x_tile(stage), layout=WGMMA).astype(jnp.float32)
        do_scaled = (do_t * (d * sizes.scale)).astype(cta.dtype)
        first = cta.first_gate(i, key_stage) if sizes.float16 else None
        g_last = smem.g2[key_stage, CHUNK - 1]
        decay = jnp.exp2(g_last if first is None else g_last - first)
        z = dev.collect(late) * dr + dev.collect(attended)
        dv = dev.issue(dv, z.astype(cta.dtype), smem.t.at[stage])

        def write(add):
            add(0, do_scaled, q_tile)
            dv_t = dev.collect(dv, 1)
            if sizes.float16:
                dv_t = dv_t * 2.0**-FLOAT16_LOG2
            add(0, (dv_t * -d).astype(cta.dtype), k_tile)
            if gmem.dv is not None:
                store_dv(cta, cta.chunk_of(i), dv_t.astype(cta.dtype))

        (before,) = dev.accumulate([lax.optimization_barrier(dh * decay)], write)
        return before if first is None else before * jnp.exp2(first)

    return pl.run_scoped(solve, *[plgpu.ACC((ROWS, CHUNK), jnp.float32)] * 3)


def walk(cta: Cta, start: jax.Array, step: Callable) -> jax.Array:
    """Repeats h <- step(cta, i, stage, key_stage, h) over the chunks."""
    stages, key_stages = cta.config.stages, cta.config.key_stages

    def one(i, h):
        stage = lax.rem(i, stages)
        h = step(cta, i, stage, lax.rem(i, key_stages), h)
        cta.dev.release(cta.smem.consumed.at[stage])
        return h

    return lax.fori_loop(0, cta.chunks, one, start)


def start(
    name: str,
    body: Callable[..., None],
    inputs: dict[str, Any],
    outputs: Callable[[Sizes], dict[str, Any]],
    items: Items | None,
    visits: VisitTables | None,
    *,
    config: Config | None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Launches one of the two kernels.

    Args:
      inputs: by name; v, h_0 and dh_T may be None.
      config: None for the default.
      options: scale, and those of `start_walk` that are its caller's.
    """
    (K, dtype), heads = (
        (inputs["k"].shape[3], inputs["k"].dtype),
        (inputs["q"].shape[2], inputs["k"].shape[2]),
    )
    config = config or Config.default(K, 1)
    options |= dict(config=config, memory=_memory(config, K, dtype, packed=visits is not None))
    return start_walk(
        name, body, inputs, outputs, items, visits, heads=heads, K=K, float16=dtype == jnp.float16, **options
    )


def start_walk(
    name: str,
    body: Callable[..., None],
    inputs: dict[str, Any],
    outputs: Callable[[Sizes], dict[str, Any]],
    items: Items | None,
    visits: VisitTables | None,
    *,
    heads: tuple[int, int],
    K: int,
    scale: float,
    float16: bool,
    kv_layout: bool,
    config: Any,
    memory: Memory,
    interpret: Any,
    chains: int,
    tokens: int = CHUNK,
) -> dict[str, jax.Array]:
    """Launches a kernel that walks backwards, this one or that of `backward.channel_chain`.

    Args:
      inputs: by name, of them do and v, which may be None.
      outputs: from sizes to outputs by name.
      items: what the sequences are cut into, None for whole ones.
      heads: of q and of k.
      config: has state_warpgroups.
      chains: CTAs for each item, head and tile.
      tokens: of a chunk, see `work.halves`.
    """
    v, packed, n = inputs["v"], visits is not None, config.state_warpgroups
    B, T, HO, V = inputs["do"].shape
    N = B if visits is None else visits.cu_seqlens.shape[0] - 1
    if V % (ROWS * n):
        raise ValueError(f"config.state_warpgroups: expected a divisor of {V // ROWS} row tiles, got {n}")
    sizes = Sizes(
        T=T * (CHUNK // tokens),
        N=N,
        Hq=heads[0],
        Hk=heads[1],
        HV=HO if v is None else v.shape[2],
        HO=HO,
        K=K,
        V=V,
        tiles=V // (ROWS * n),
        split=Split(N + packed, None) if items is None else items.split,
        scale=scale,
        kv_layout=kv_layout,
        float16=float16,
        tokens=tokens,
    )
    tables = table_inputs(None if items is None else items.tables, visits)
    tables |= {"visit_chunk": None, "visit_rows": None}
    return launch(
        name,
        functools.partial(body, config=config, sizes=sizes, interpreted=interpret is not None),
        inputs=inputs | tables,
        outputs=outputs(sizes),
        memory=memory,
        ctas=chains * sizes.split.num_items * HO * sizes.tiles,
        warpgroups=n + 1,
        interpret=interpret,
    )
