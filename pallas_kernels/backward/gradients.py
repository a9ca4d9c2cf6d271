"""Every gradient but that of v, all chunks in parallel, from the states and their cotangents at the chunks' borders.

For one chunk and one head, with h [V, K] before the chunk, dh [V, K] after it (both transposed), u and dv [C, V]:

    dP = scale Gamma * (dO u^T)                 dL = -Gamma * (dv u^T), strictly lower
    dq = scale D (dO h) + dP K
    read = -D (dv h) + dL K                     late = Dr (u dh)
    dk = read + late + dP^T Q + dL^T K          dbeta = rowsum(dv * u) / beta^2

dg needs one more product, whose trace is <h, dh>. With x_i = q_i . dq_i + k_i . (read - dP^T Q - dL^T K)_i and
l_i = k_i . late_i

    dg_t = sum over i >= t of x_i + sum over i < t of l_i + gl <h, dh>

The diagonal of dP is left out of x: its two parts cancel, and so every term of dg carries the decay that dg is
proportional to; what cancels between pairs of tokens is the same rounded dP and dL. Gamma, D, Dr, gl as in
`backward.chain`. A head's q and k are shared by the heads of its group: dq and dk are summed in registers.

In float16 u and dv come divided by beta: Gamma, D and Dr take beta in, and dbeta = rowsum(dv * u). dP and dL are kept
times 2^lift, which leaves their largest entry as it would be without decay; what the products with them give is
multiplied by 2^-lift in float32.

K > 128: a launch for each 128 columns of K, each of which makes dP and dL again. The columns of dq and dk do not
meet, and dg is a sum over columns.

Work: persistent CTAs walk over items, an item being one visit (a chunk, or what a sequence of packed rows owns of
it) of one key head. An item has a step for each 64 columns of V of each of its output heads.

Threads (warpgroups): two compute warpgroups run the same code. Number 0 makes dP and number 1 makes dL, for both;
then each makes the gradients of its own 64 columns of K. The helper makes <h, dh> and dg, and loads by bulk copies,
tokens (do, dv, u) further ahead than states (h, dh), since dP and dL need tokens only.

Instructions: an SM keeps 2048 of them (32 KB). Past that an instruction takes 2.8 cycles instead of one, in all
warpgroups, so the loops of compute warpgroups and helper together must stay below (now 1720). That is why the compute
warpgroups share their code and hold 64 columns each, why <h, dh> is a trace, and why masks and diagonals come from
`Device`. Spills of 600 bytes doubled the time. And variants alike in size and spills took 0.58 to 0.97 ms, for a
reason not found (the log has them): time every change.

| barrier       | arrives                                             | waits                                     |
|---------------|-----------------------------------------------------|-------------------------------------------|
| loaded        | bulk copies of do, dv and u of a step               | compute; helper first if rows are packed  |
| loaded_gates  | bulk copy of g2_cum of a head                       | compute and helper; helper if packed      |
| loaded_states | bulk copies of h and dh of a step                   | compute and helper                        |
| loaded_qk     | bulk copies of q and k                              | compute; helper first if rows are packed  |
| loaded_beta   | bulk copy of beta of a head (float16)               | compute                                   |
| masked,       | helper: foreign tokens of a step, or of q and k,    | compute (packed rows only)                |
| masked_qk     | are zeros                                           |                                           |
| consumed      | compute: step read                                  | helper, before it loads its stages again  |
| consumed_qk   | compute: q and k read                               | helper, before it loads the next q and k  |
| scores        | compute: dP, dL and the diagonal of dP are written  | compute                                   |
| sums          | compute: x and l are written                        | helper                                    |
| scored        | compute: dP and dL read; helper: sums read          | compute, before it writes the next head's |

Inputs (GMEM): q [B, T, Hq, K], k [B, T, Hk, K], do [B, T, HO, V], u [visits, HO, C, V], dv [B, T, HO, V],
h and dh [visits, HO, V, K], g2_cum [B, HO, NT C] f32, beta [B, HO, NT C] and lift [visits, HO] f32 (float16), tables
int32 (packed rows).
Outputs (GMEM): dq [B, T, Hq or HO, K], dk [B, T, Hk, K], dg and rowsum(dv * u) [visits, HO, C] f32.
Shared memory: `_memory`, 227 KB at K = 128 and above.
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

from pallas_kernels.device.launch import NUM_SMS, check_registers, launch, warpgroup_index
from pallas_kernels.device.layouts import CHUNK, COL, ROW, WGMMA, along_columns, along_rows, zeros
from pallas_kernels.device.memory import SMEM_LIMIT, Barriers, Buffer, Memory, smem_bytes, transposed
from pallas_kernels.device.operations import Device
from pallas_kernels.work.foreign import mask_foreign, store_owned
from pallas_kernels.work.spans import Span, dense_span, packed_span
from pallas_kernels.work.tables import VisitTables, table_inputs

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
    """Steps of h and dh in flight."""
    helper_registers: int = 72
    compute_registers: int = 216
    ctas: int = NUM_SMS

    def __post_init__(self):
        check_registers(self.helper_registers, *(self.compute_registers,) * COMPUTE)

    def heads(self, V: int) -> int:
        """Heads whose tokens are in flight."""
        return -(-self.token_stages // (V // WIDTH))

    @classmethod
    def default(cls, K: int, V: int) -> "Config":
        """Most stages that fit, for K columns in a launch."""
        tokens = V // WIDTH * (2 if V <= 128 else 1)
        for states in (4, 3, 2):
            config = cls(tokens, states)
            if smem_bytes(_memory(config, K, V, jnp.bfloat16)) <= SMEM_LIMIT:
                return config
        raise AssertionError("more than MAX_COLUMNS columns of K, or V > 256")


def _memory(config: Config, K: int, V: int, dtype, *, packed: bool = False, float16: bool = True) -> Memory:
    """Shared memory of a CTA, for K columns in a launch."""
    tokens, states, heads = config.token_stages, config.state_stages, config.heads(V)
    return {
        "q": Buffer((CHUNK, K), dtype, swizzle=128),
        "k": Buffer((CHUNK, K), dtype, swizzle=128),
        "x": Buffer((tokens, 3, CHUNK, WIDTH), dtype, swizzle=128),  # do, dv and u of a step
        "h": Buffer((states, 2, WIDTH, K), dtype, swizzle=128),  # h and dh of a step
        "score": Buffer((COMPUTE, CHUNK, CHUNK), dtype, swizzle=128),  # dP and dL
        "out": Buffer((COMPUTE, CHUNK, WIDTH), dtype, swizzle=128, also_flat=packed),
        "vectors": Buffer((6 + heads, CHUNK)),  # see _Cta: buffers of their own would not fit
        "loaded_beta": Barriers(1) if float16 else None,
        "loaded": Barriers(3, tokens),
        "loaded_gates": Barriers(1, heads),
        "loaded_states": Barriers(2, states),
        "loaded_qk": Barriers(2),
        "masked": Barriers(1, tokens),
        "masked_qk": Barriers(1),
        "consumed": Barriers(COMPUTE, states),
        "consumed_qk": Barriers(COMPUTE),
        "scores": Barriers(COMPUTE),
        "sums": Barriers(COMPUTE),
        "scored": Barriers(COMPUTE + 1),
    }


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
    """Columns of q, k, h and dh that one launch works on."""
    first_column: int
    V: int
    visits: int
    scale: float
    float16: bool


class _Place(NamedTuple):
    """Where an item lies."""

    span: Span
    visit: jax.Array
    chunk: jax.Array
    key_head: jax.Array

    @property
    def tokens(self):
        """Its tokens in the row."""
        return pl.ds(self.chunk * CHUNK, CHUNK)


class _Cta:
    """What every warpgroup of a CTA knows.

    A pair is q and k of one query head; a step is 64 columns of V of one output head. Items, pairs and steps are
    counted from 0 in every CTA.
    """

    def __init__(self, gmem: Any, smem: Any, *, config: Config, sizes: _Sizes, interpreted: bool):
        self.gmem, self.smem, self.config, self.sizes = gmem, smem, config, sizes
        self.dev = Device(interpreted)
        self.dtype = gmem.k.dtype
        self.packed = gmem.cu_seqlens is not None
        vectors = smem.vectors
        self.x_sums, self.l_sums = vectors.at[slice(2)], vectors.at[slice(2, 4)]
        self.diagonal, self.beta, self.g2 = vectors.at[4], vectors.at[5], vectors.at[slice(6, None)]
        self.v_tiles = sizes.V // WIDTH
        self.query_heads = sizes.dq_heads // sizes.Hk
        """Query heads of one key head."""
        self.heads_per_query = sizes.HO // sizes.dq_heads
        self.steps_per_pair = self.heads_per_query * self.v_tiles
        self.wg = warpgroup_index()
        self.worker = lax.axis_index("cta").astype(jnp.int32)
        visits = gmem.first_visit[sizes.N + 1] if self.packed else jnp.int32(sizes.visits)
        rounds = jnp.maximum(visits * sizes.Hk + config.ctas - 1 - self.worker, 0)
        self.items = lax.div(rounds, config.ctas)

    def place_of(self, n) -> _Place:
        """Where the n-th item lies."""
        sizes, gmem = self.sizes, self.gmem
        item = self.worker + n * self.config.ctas
        visit, key_head = lax.div(item, sizes.Hk), lax.rem(item, sizes.Hk)
        if self.packed:
            span = packed_span(gmem.visit_sequence[visit], sizes.T, sizes.N, gmem)
            return _Place(span, visit, span.first_chunk + visit - span.first_visit, key_head)
        num_chunks = -(-sizes.T // CHUNK)
        span = dense_span(lax.div(visit, num_chunks), sizes.T)
        return _Place(span, visit, lax.rem(visit, num_chunks), key_head)

    def columns_of(self, ref):
        """The columns of K of this launch, of a reference whose last dimension is K."""
        K = self.sizes.K
        if ref.shape[-1] == K:
            return ref
        return ref.at[(slice(None),) * (len(ref.shape) - 1) + (pl.ds(self.sizes.first_column, K),)]

    def head_of(self, place: _Place, query, e):
        """Output head of the e-th head of the query-th query head of an item."""
        return place.key_head * (self.sizes.HO // self.sizes.Hk) + query * self.heads_per_query + e

    def parts_of(self, step):
        """Item, head and columns of V of a step."""
        pair, rest = lax.div(step, self.steps_per_pair), lax.rem(step, self.steps_per_pair)
        place, query = self.place_of(lax.div(pair, self.query_heads)), lax.rem(pair, self.query_heads)
        head = self.head_of(place, query, lax.div(rest, self.v_tiles))
        return place, head, pl.ds(lax.rem(rest, self.v_tiles) * WIDTH, WIDTH)

    def token_stage(self, step):
        """Where do, dv and u of a step are."""
        return lax.rem(step, self.config.token_stages)

    def state_stage(self, step):
        """Where h and dh of a step are."""
        return lax.rem(step, self.config.state_stages)

    def slot_of(self, step):
        """Where the gates of a step's head are."""
        return lax.rem(lax.div(step, self.v_tiles), self.config.heads(self.sizes.V))

    def own_number(self):
        """Number of this warpgroup, asked for inside the loop: addresses made of it then do not wait in registers."""
        return warpgroup_index()

    def own_columns(self):
        """This compute warpgroup's columns of K. With 64 of them both warpgroups make them, and one stores."""
        return pl.ds(jnp.minimum(self.own_number(), self.sizes.K // WIDTH - 1) * WIDTH, WIDTH)

    def times_beta(self, x):
        """A vector along the rows times beta, in float16."""
        return x * plgpu.load(self.beta, layout=ROW) if self.sizes.float16 else x

    def wide(self, tile):
        """A tile in shared memory as float32."""
        return self.dev.widen(plgpu.load(tile, layout=WGMMA))


# The helper


def _load_qk(cta: _Cta, pair) -> None:
    """Starts the copies of a pair."""
    gmem, smem, sizes = cta.gmem, cta.smem, cta.sizes
    place, query = cta.place_of(lax.div(pair, cta.query_heads)), lax.rem(pair, cta.query_heads)
    q_head = lax.div(cta.head_of(place, query, 0), sizes.HO // sizes.Hq)
    row = place.span.row
    plgpu.copy_gmem_to_smem(cta.columns_of(gmem.q.at[row, place.tokens, q_head]), smem.q, smem.loaded_qk)
    plgpu.copy_gmem_to_smem(
        cta.columns_of(gmem.k.at[row, place.tokens, place.key_head]), smem.k, smem.loaded_qk
    )


def _load_tokens(cta: _Cta, step) -> None:
    """Starts the copies of do, dv and u of a step, and of the gates of its head."""
    gmem, smem = cta.gmem, cta.smem
    stage = cta.token_stage(step)
    place, head, columns = cta.parts_of(step)
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


def _load_states(cta: _Cta, step) -> None:
    """Starts the copies of h and dh of a step."""
    stage = cta.state_stage(step)
    place, head, columns = cta.parts_of(step)
    for i, source in enumerate((cta.gmem.h, cta.gmem.dh)):
        source = cta.columns_of(source.at[place.visit, head, columns])
        plgpu.copy_gmem_to_smem(source, cta.smem.h.at[stage, i], cta.smem.loaded_states.at[stage])


def _load_beta(cta: _Cta, n) -> None:
    """Starts the copy of beta of the n-th head."""
    place, head, _ = cta.parts_of(n * cta.v_tiles)
    source = cta.gmem.beta.at[place.span.row, head, place.tokens]
    plgpu.copy_gmem_to_smem(source, cta.beta, cta.smem.loaded_beta)


def _mask_tokens(cta: _Cta, step) -> None:
    """Masks what a step holds of other sequences' tokens."""
    smem = cta.smem
    stage, slot, place = cta.token_stage(step), cta.slot_of(step), cta.parts_of(step)[0]
    plgpu.barrier_wait(smem.loaded.at[stage])

    @pl.when(lax.rem(step, cta.v_tiles) == 0)
    def _():
        plgpu.barrier_wait(smem.loaded_gates.at[slot])
        mask_foreign(place.span, place.chunk, (), gates=cta.g2.at[slot])

    mask_foreign(place.span, place.chunk, (smem.x.at[stage, 0], smem.x.at[stage, 1]))
    plgpu.barrier_arrive(smem.masked.at[stage])


def _mask_qk(cta: _Cta, pair) -> None:
    """Masks what a pair holds of other sequences' tokens."""
    plgpu.barrier_wait(cta.smem.loaded_qk)
    place = cta.place_of(lax.div(pair, cta.query_heads))
    mask_foreign(place.span, place.chunk, (cta.smem.q, cta.smem.k))
    plgpu.barrier_arrive(cta.smem.masked_qk)


def _last_gate(cta: _Cta, step) -> jax.Array:
    """The last gate of a step's head."""
    slot = cta.slot_of(step)
    if not cta.packed:  # else waited for by the mask
        plgpu.barrier_wait(cta.smem.loaded_gates.at[slot])
    return cta.g2[slot, CHUNK - 1]


def _inner_product(cta: _Cta, step) -> jax.Array:
    """Sums of h dh over the columns of K, for the rows of a step."""
    stage = cta.state_stage(step)
    plgpu.barrier_wait(cta.smem.loaded_states.at[stage])
    product = cta.dev.product(cta.smem.h.at[stage, 0], transposed(cta.smem.h.at[stage, 1]))
    plgpu.commit_smem()  # every warp's product has ended before one of them loads the stage again
    return cta.dev.diagonal(product)


def _gate_gradient(cta: _Cta, place: _Place, head, inner, is_last) -> None:
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


def _helper(cta: _Cta) -> None:
    """The role of the last warpgroup."""
    config, smem, v_tiles, steps_per_pair = cta.config, cta.smem, cta.v_tiles, cta.steps_per_pair
    token_stages, state_stages, float16 = config.token_stages, config.state_stages, cta.sizes.float16
    plgpu.set_max_registers(config.helper_registers, action="decrease")
    pairs = cta.items * cta.query_heads
    steps = pairs * steps_per_pair
    # A compute warpgroup reads the tokens of all steps of a head before it releases the first: masks run ahead.
    ahead = min(token_stages - 1, v_tiles)

    pl.when(pairs > 0)(lambda: _load_qk(cta, jnp.int32(0)))
    if float16:
        pl.when(pairs > 0)(lambda: _load_beta(cta, jnp.int32(0)))
    for j in range(max(token_stages, state_stages)):
        if j < token_stages:
            pl.when(j < steps)(functools.partial(_load_tokens, cta, jnp.int32(j)))
        if j < state_stages:
            pl.when(j < steps)(functools.partial(_load_states, cta, jnp.int32(j)))
    if cta.packed:
        for j in range(ahead):
            pl.when(j < steps)(functools.partial(_mask_tokens, cta, jnp.int32(j)))
        pl.when(pairs > 0)(lambda: _mask_qk(cta, jnp.int32(0)))

    def step(i, carry):
        inner, decay = carry
        if cta.packed:
            pl.when(i + ahead < steps)(lambda: _mask_tokens(cta, i + ahead))
        is_first = lax.rem(i, v_tiles) == 0
        decay = lax.cond(is_first, lambda: jnp.exp2(_last_gate(cta, i)), lambda: decay)
        inner = jnp.where(is_first, 0.0, inner) + _inner_product(cta, i)
        plgpu.barrier_wait(smem.consumed.at[cta.state_stage(i)])
        pl.when(i + state_stages < steps)(lambda: _load_states(cta, i + state_stages))
        pl.when(i + token_stages < steps)(lambda: _load_tokens(cta, i + token_stages))

        @pl.when(lax.rem(i + 1, steps_per_pair) == 0)
        def _():
            plgpu.barrier_wait(smem.consumed_qk)
            pair = lax.div(i, steps_per_pair) + 1

            @pl.when(pair < pairs)
            def _():
                _load_qk(cta, pair)
                if cta.packed:
                    _mask_qk(cta, pair)

        @pl.when(lax.rem(i + 1, v_tiles) == 0)
        def _():
            _gate_gradient(cta, *cta.parts_of(i)[:2], inner * decay, i + 1 == steps)
            if float16:
                pl.when(i + 1 < steps)(lambda: _load_beta(cta, lax.div(i + 1, v_tiles)))

        return inner, decay

    lax.fori_loop(0, steps, step, (zeros((WIDTH,), jnp.float32, ROW), jnp.float32(0.0)))


# The compute warpgroups


def _lifted(x, lift):
    return x if lift is None else x * jnp.exp2(lift)


def _lowered(x, lift):
    return x if lift is None else x * jnp.exp2(-lift)


def _store(cta: _Cta, place: _Place, head, x, target) -> None:
    """The own columns of dq or dk to memory."""
    wg, own = cta.own_number(), cta.own_columns()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    x = jnp.where(place.span.is_padding, 0.0, x).astype(cta.dtype) if cta.packed else x.astype(cta.dtype)
    tile, flat = cta.smem.out if cta.packed else (cta.smem.out, None)

    def destination(tokens):
        return target.at[place.span.row, tokens, head, own]

    plain = None if flat is None else (flat.at[wg], flat.at[wg])
    store_owned(place.span, place.chunk, x, (tile.at[wg], tile.at[wg]), plain, destination)


def _write_score(cta: _Cta, place: _Place, head, first_step, lift):
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
    if sizes.float16:
        plgpu.barrier_wait(smem.loaded_beta)
    diagonal = dev.diagonal(score)
    exponents = g_rows + jnp.where(makes_dp, log2_scale, 0.0)
    if lift is not None:
        exponents = exponents + lift
    gamma = jnp.exp2(along_rows(exponents, CHUNK) - along_columns(g_columns, CHUNK))
    score = score * jnp.where(dev.row_minus_column() > 0, gamma, 0.0)
    if sizes.float16:
        factors = jnp.where(makes_dp, sign, -plgpu.load(cta.beta, layout=ROW))
        beta_columns = along_columns(plgpu.load(cta.beta, layout=COL), CHUNK)
        score = score * along_rows(factors, CHUNK) * beta_columns
    else:
        score = score * jnp.where(makes_dp, sign, -1.0)
    score = score.astype(cta.dtype)
    pl.when(first_step > 0)(lambda: plgpu.barrier_wait(smem.scored))
    smem.score.at[wg][...] = score

    @pl.when(makes_dp)
    def _():
        cta.diagonal[...] = cta.times_beta(diagonal * sizes.scale)

    @pl.when(jnp.logical_not(makes_dp))
    def _():
        cta.gmem.dbeta.at[place.visit, head][...] = diagonal

    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.scores)
    return g_rows, g_last


def _over_states(cta: _Cta, first_step):
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


def _add_head(cta: _Cta, place: _Place, head, first_step, is_first, is_last, lift, dq, dk):
    """dq and dk with the parts of one output head; its sums for the helper."""
    smem, dev, sizes = cta.smem, cta.dev, cta.sizes
    g_rows, g_last = _write_score(cta, place, head, first_step, lift)
    late, read_q, read_k = _over_states(cta, first_step)
    wg, own = cta.own_number(), cta.own_columns()
    zero = lax.shift_right_logical(wg, 8)  # as wg itself: keeps the tiles' addresses out of registers
    p_tile, dl_tile = smem.score.at[zero], smem.score.at[zero + 1]
    q_tile, k_tile = smem.q.at[:, own], smem.k.at[:, own]
    pl.when(is_first)(lambda: plgpu.barrier_wait(smem.masked_qk if cta.packed else smem.loaded_qk))
    decay, since = jnp.exp2(g_rows), cta.times_beta(jnp.exp2(g_last - g_rows))
    written = jnp.sum(cta.wide(k_tile) * late, axis=1) * since
    dk = dk + late * along_rows(since, WIDTH)
    read_q = read_q * along_rows(_lifted(decay * sizes.scale, lift), WIDTH)
    read_k = read_k * along_rows(cta.times_beta(_lifted(-decay, lift)), WIDTH)
    plgpu.barrier_wait(smem.scores)
    starts = [read_q, read_k, zeros((CHUNK, WIDTH), jnp.float32)]

    def products(add):
        add(0, p_tile, k_tile)
        add(1, dl_tile, k_tile)
        add(2, transposed(p_tile), q_tile)
        add(2, transposed(dl_tile), k_tile)

    read_q, read_k, write = (_lowered(x, lift) for x in dev.accumulate(starts, products))
    diagonal = along_rows(plgpu.load(cta.diagonal, layout=ROW), WIDTH)
    x = jnp.sum(cta.wide(k_tile) * (read_k - write), axis=1)
    dq, dk = dq + read_q + diagonal * cta.wide(k_tile), dk + read_k + write
    x, dk = x + jnp.sum(cta.wide(q_tile) * read_q, axis=1), dk + diagonal * cta.wide(q_tile)
    cta.x_sums.at[wg][...] = x
    cta.l_sums.at[wg][...] = written
    plgpu.commit_smem()  # also for q, k and the diagonal, which may still be on their way into registers
    plgpu.barrier_arrive(smem.sums)
    is_last_head = first_step + cta.v_tiles == cta.items * cta.query_heads * cta.steps_per_pair
    pl.when(jnp.logical_not(is_last_head))(lambda: plgpu.barrier_arrive(smem.scored))
    pl.when(is_last)(lambda: plgpu.barrier_arrive(smem.consumed_qk))
    return dq, dk


def _add_item(cta: _Cta, n, _):
    """dq and dk of the n-th item."""
    gmem, heads_per_query, query_heads = cta.gmem, cta.heads_per_query, cta.query_heads
    place = cta.place_of(n)
    stores = pl.when(cta.own_number() == 0) if cta.sizes.K == WIDTH else lambda f: f()

    def add_query(query, dk):
        def one(e, carry):
            first_step = (n * query_heads + query) * cta.steps_per_pair + e * cta.v_tiles
            head = cta.head_of(place, query, e)
            lift = gmem.lift[place.visit, head] if cta.sizes.float16 else None
            is_last = e == heads_per_query - 1
            return _add_head(cta, place, head, first_step, e == 0, is_last, lift, *carry)

        dq, dk = lax.fori_loop(0, heads_per_query, one, (zeros((CHUNK, WIDTH), jnp.float32), dk))
        stores(lambda: _store(cta, place, place.key_head * query_heads + query, dq, gmem.dq))
        return dk

    dk = lax.fori_loop(0, query_heads, add_query, zeros((CHUNK, WIDTH), jnp.float32))
    stores(lambda: _store(cta, place, place.key_head, dk, gmem.dk))
    return ()


def _compute(cta: _Cta) -> None:
    """The role of a compute warpgroup."""
    plgpu.set_max_registers(cta.config.compute_registers, action="increase")
    lax.fori_loop(0, cta.items, functools.partial(_add_item, cta), ())
    plgpu.wait_smem_to_gmem(0)


def _body(gmem: Any, smem: Any, **static) -> None:
    cta = _Cta(gmem, smem, **static)
    pl.when(cta.wg == COMPUTE)(lambda: _helper(cta))
    pl.when(cta.wg < COMPUTE)(lambda: _compute(cta))


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
    visits: VisitTables | None,
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
      u, dv, h, dh: of `chains`.
      g2_cum: of `chunk_gates`.
      visits: tables of packed rows (B = 1), None when every row of the batch is one sequence.
      beta, lift: given for float16 and for nothing else: beta of `chains`, and -log2 of the largest entry of
        Gamma below its diagonal, from 0 to MAX_LIFT.
      scale: factor of the output.
    """
    if (beta is None or lift is None) == (k.dtype == jnp.float16):
        got = [type(x).__name__ for x in (beta, lift)]
        raise ValueError(f"beta and lift: expected for float16 only, got {got} for {k.dtype}")
    inputs = {"q": q, "k": k, "do": do, "u": u, "dv": dv, "h": h, "dh": dh, "g2_cum": g2_cum}
    inputs |= {"beta": beta, "lift": lift}
    call = functools.partial(_call, inputs, visits, scale=scale, config=config, interpret=interpret)
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
    inputs: dict[str, Any],
    visits: VisitTables | None,
    first_column: int,
    K: int,
    *,
    scale: float,
    config: Config | None,
    interpret: Any,
) -> Gradients:
    """The kernel, for the K columns of q and k from first_column on."""
    q, k, h = (inputs[name] for name in ("q", "k", "h"))
    (B, T, Hk), Hq, (num_visits, HO, V) = k.shape[:3], q.shape[2], h.shape[:3]
    packed, float16 = visits is not None, inputs["beta"] is not None
    config = config or Config.default(K, V)
    if V > WIDTH * config.token_stages:
        raise ValueError(f"config.token_stages: expected at least {V // WIDTH}, got {config.token_stages}")
    sizes = _Sizes(
        T=T,
        N=B if visits is None else visits.cu_seqlens.shape[0] - 1,
        Hq=Hq,
        Hk=Hk,
        HO=HO,
        dq_heads=Hq if Hq % Hk == 0 else HO,
        K=K,
        first_column=first_column,
        V=V,
        visits=num_visits,
        scale=scale,
        float16=float16,
    )
    sums = jax.ShapeDtypeStruct((num_visits, HO, CHUNK), jnp.float32)
    results = launch(
        "gradients",
        functools.partial(_body, config=config, sizes=sizes, interpreted=interpret is not None),
        inputs=inputs | table_inputs(None, visits),
        outputs={
            "dq": jax.ShapeDtypeStruct((B, T, sizes.dq_heads, K), k.dtype),
            "dk": jax.ShapeDtypeStruct((B, T, Hk, K), k.dtype),
            "dg": sums,
            "dbeta": sums,
        },
        memory=_memory(config, K, V, k.dtype, packed=packed, float16=float16),
        ctas=config.ctas,
        warpgroups=COMPUTE + 1,
        auto_barriers=False,
        reduction_bytes=0,  # every sum stays inside a warp
        interpret=interpret,
    )
    return Gradients(**results)
