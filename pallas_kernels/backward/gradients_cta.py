"""The ground that the warpgroups of `gradients` share: shared memory, where an item lies, and who waits for whom.

Threads (warpgroups): two compute warpgroups run the same code. Number 0 makes dP and number 1 makes dL, for both;
then each makes the gradients of its own 64 columns of K. The helper makes <h, dh> and dg, and loads by bulk copies,
tokens (do, dv, u) further ahead than states (h, dh), since dP and dL need tokens only.

Instructions: an SM keeps 2048 of them (32 KB). Past that an instruction takes 2.8 cycles instead of one, in all
warpgroups, so the loops of compute warpgroups and helper together must stay below (now 1807, in float16 1977; with
many items the loads that a step starts come to that, 170 more, and in packed rows what looks up and checks). That is
why the compute warpgroups share their code and hold 64 columns each, why <h, dh> is a trace, and why masks and
diagonals come from `Device`. Spills of 600 bytes doubled the time. And variants alike in size and spills took 0.58 to
0.97 ms, for a reason not found (the log has them): time every change.

| barrier       | arrives                                             | waits                                     |
|---------------|-----------------------------------------------------|-------------------------------------------|
| loaded        | bulk copies of do, dv and u of a step               | compute; helper first if rows are packed  |
| loaded_gates  | bulk copy of g2_cum of a head                       | compute and helper; helper if packed      |
| loaded_states | bulk copies of h and dh of a step                   | compute and helper                        |
| loaded_qk     | bulk copies of q and k                              | compute; helper first if rows are packed  |
| loaded_power  | bulk copy of E of a head (float16)                  | compute                                   |
| masked,       | helper: foreign tokens of a step, or of q and k,    | compute (packed rows only)                |
| masked_qk     | are zeros                                           |                                           |
| consumed      | compute: step read                                  | helper, before it loads its stages again  |
| consumed_qk   | compute: q and k read                               | helper, before it loads the next q and k  |
| scores        | compute: dP, dL and the diagonal of dP are written  | compute                                   |
| sums          | compute: x and l are written                        | helper                                    |
| multiplied    | compute: products of a pair with E K have ended     | compute, before it stores (float16 and    |
|               |                                                     | packed rows)                              |
| scored        | compute: dP and dL read; helper: sums read          | compute, before it writes the next head's |

Shared memory: `memory`, 227 KB at K = 128 and above.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.launch import check_registers, num_sms, warpgroup_index
from pallas_kernels.device.layouts import CHUNK, WGMMA
from pallas_kernels.device.memory import Barriers, Buffer, Memory, fitting
from pallas_kernels.device.operations import Device
from pallas_kernels.work.spans import Span, dense_span, visit_span

WIDTH = 64
"""Columns of V of one step, and of a tile."""

COMPUTE = 2
"""Compute warpgroups; the helper comes after them."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the gradients run, not what they compute."""

    token_stages: int = 4
    """Steps of do, dv and u in flight: at least those of a head."""
    state_stages: int = 2
    """Steps of h and dh in flight."""
    helper_registers: int = 72
    compute_registers: int = 216
    ctas: int = dataclasses.field(default_factory=num_sms)

    def __post_init__(self):
        check_registers(self.helper_registers, *(self.compute_registers,) * COMPUTE)

    def heads(self, V: int) -> int:
        """Heads whose tokens are in flight."""
        return -(-self.token_stages // (V // WIDTH))

    @classmethod
    def default(cls, K: int, V: int) -> "Config":
        """Most stages that fit, for K columns in a launch."""
        tokens = V // WIDTH * (2 if V <= 128 else 1)
        return fitting((cls(tokens, n) for n in (4, 3, 2)), lambda x: memory(x, K, V, jnp.bfloat16))


def memory(config: Config, K: int, V: int, dtype, *, packed: bool = False, float16: bool = True) -> Memory:
    """Shared memory of a CTA, for K columns in a launch."""
    tokens, states, heads = config.token_stages, config.state_stages, config.heads(V)
    return {
        "q": Buffer((CHUNK, K), dtype, swizzle=128),
        "k": Buffer((CHUNK, K), dtype, swizzle=128),
        "x": Buffer((tokens, 3, CHUNK, WIDTH), dtype, swizzle=128),  # do, dv and u of a step
        "h": Buffer((states, 2, WIDTH, K), dtype, swizzle=128),  # h and dh of a step
        "score": Buffer((COMPUTE, CHUNK, CHUNK), dtype, swizzle=128),  # dP and dL
        # In float16 E K, of each warpgroup's columns, until a tile of dq or dk takes its place.
        "out": Buffer((COMPUTE, CHUNK, WIDTH), dtype, swizzle=128, also_flat=packed),
        "vectors": Buffer((6 + heads, CHUNK)),  # see Cta: buffers of their own would not fit
        "loaded_power": Barriers(1) if float16 else None,
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
        "multiplied": Barriers(COMPUTE) if packed and float16 else None,
        "scored": Barriers(COMPUTE + 1),
    }


class Sizes(NamedTuple):
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


class Place(NamedTuple):
    """The place of an item."""

    span: Span
    visit: jax.Array
    chunk: jax.Array
    key_head: jax.Array

    @property
    def tokens(self):
        """The item's tokens in the row."""
        return pl.ds(self.chunk * CHUNK, CHUNK)


class Cta:
    """All that every warpgroup of a CTA knows.

    A pair is q and k of one query head; a step is 64 columns of V of one output head. Items, pairs and steps are
    counted from 0 in every CTA.
    """

    def __init__(self, gmem: Any, smem: Any, *, config: Config, sizes: Sizes, interpreted: bool):
        self.gmem, self.smem, self.config, self.sizes = gmem, smem, config, sizes
        self.dev = Device(interpreted)
        self.dtype = gmem.k.dtype
        self.packed = gmem.cu_seqlens is not None
        vectors = smem.vectors
        self.x_sums, self.l_sums = vectors.at[slice(2)], vectors.at[slice(2, 4)]
        self.diagonal, self.power, self.g2 = vectors.at[4], vectors.at[5], vectors.at[slice(6, None)]
        self.v_tiles = sizes.V // WIDTH
        self.query_heads = sizes.dq_heads // sizes.Hk
        """Query heads of one key head."""
        self.heads_per_query = sizes.HO // sizes.dq_heads
        self.steps_per_pair = self.heads_per_query * self.v_tiles
        self.wg = warpgroup_index()
        self.worker = lax.axis_index("cta").astype(jnp.int32)
        self.items = self._items_of(gmem.first_visit[sizes.N] if self.packed else jnp.int32(sizes.visits))
        """Items of this CTA. Those of the padding of packed rows come after them."""

    def _items_of(self, visits):
        """The number of this CTA's items that belong to the first visits."""
        rounds = jnp.maximum(visits * self.sizes.Hk + self.config.ctas - 1 - self.worker, 0)
        return lax.div(rounds, self.config.ctas)

    def items_with_padding(self):
        """Items of this CTA and of the padding of packed rows."""
        return self._items_of(self.gmem.first_visit[self.sizes.N + 1])

    def place_of(self, n) -> Place:
        """The place of the n-th item."""
        sizes, gmem = self.sizes, self.gmem
        item = self.worker + n * self.config.ctas
        visit, key_head = lax.div(item, sizes.Hk), lax.rem(item, sizes.Hk)
        if self.packed:
            span = visit_span(visit, gmem)
            return Place(span, visit, span.first_chunk, key_head)
        num_chunks = -(-sizes.T // CHUNK)
        span = dense_span(lax.div(visit, num_chunks), sizes.T)
        return Place(span, visit, lax.rem(visit, num_chunks), key_head)

    def columns_of(self, ref):
        """The columns of K of this launch, of a reference whose last dimension is K."""
        K = self.sizes.K
        if ref.shape[-1] == K:
            return ref
        return ref.at[(slice(None),) * (len(ref.shape) - 1) + (pl.ds(self.sizes.first_column, K),)]

    def head_of(self, place: Place, query, e):
        """Output head of the e-th head of the query-th query head of an item."""
        return place.key_head * (self.sizes.HO // self.sizes.Hk) + query * self.heads_per_query + e

    def parts_of(self, step):
        """Item, head and columns of V of a step."""
        pair, rest = lax.div(step, self.steps_per_pair), lax.rem(step, self.steps_per_pair)
        place, query = self.place_of(lax.div(pair, self.query_heads)), lax.rem(pair, self.query_heads)
        head = self.head_of(place, query, lax.div(rest, self.v_tiles))
        return place, head, pl.ds(lax.rem(rest, self.v_tiles) * WIDTH, WIDTH)

    def token_stage(self, step):
        """References to do, dv and u of a step."""
        return lax.rem(step, self.config.token_stages)

    def state_stage(self, step):
        """References to h and dh of a step."""
        return lax.rem(step, self.config.state_stages)

    def slot_of(self, step):
        """A reference to the gates of a step's head."""
        return lax.rem(lax.div(step, self.v_tiles), self.config.heads(self.sizes.V))

    def own_number(self):
        """Number of this warpgroup, asked for inside the loop: addresses made of it then do not wait in registers."""
        return warpgroup_index()

    def own_columns(self):
        """This compute warpgroup's columns of K. With 64 of them both warpgroups make them, and one stores."""
        return pl.ds(jnp.minimum(self.own_number(), self.sizes.K // WIDTH - 1) * WIDTH, WIDTH)

    def wide(self, tile):
        """A tile in shared memory as float32."""
        return self.dev.widen(plgpu.load(tile, layout=WGMMA))
