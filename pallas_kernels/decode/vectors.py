"""Tokens as vectors beside a state that passes in chunks: what `deferred` and `drafts` share.

For the tokens t of a call, behind the count tokens j of a ring on a checkpoint S0,

    u = beta (v - (D k^T S0 + sum_j D_j (k . k_j) u_j))
    o = scale (D q^T S0 + sum_j D_j (q . k_j) u_j + (q . k) u)

where D_j is the decay since token j, and D that since the checkpoint, both with the new token's gate. All tokens of a
call share one reading of S0: their products with it are taken first, and what they say to each other is worked out on
vectors afterwards.

A state passes through shared memory in chunks. The copies of the next chunks, also of the next state, are on their
way while one is worked on and while a state's tokens are finished.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode import step, walk
from pallas_kernels.decode.codes import NUMBERS
from pallas_kernels.decode.ring import LENGTH, Rings
from pallas_kernels.decode.ring_products import Decay, Held, Products, Ring, Shape, row_slices
from pallas_kernels.decode.tiles import (
    GRANULE,
    Sizes,
    column_layout,
    load,
    log_decay,
    vector_layout,
    write_strength,
)
from pallas_kernels.decode.walk import Ends, Here, Unit
from pallas_kernels.device.memory import (
    ALIGNMENT,
    REDUCTION_BYTES,
    SMEM_LIMIT,
    Barriers,
    Buffer,
    Memory,
    smem_bytes,
    store_any,
)

STATE_DTYPES = step.POOL_DTYPES
"""Dtypes of states without scales."""

CODE_DTYPES = tuple(name for name in NUMBERS if name not in STATE_DTYPES)
"""Dtypes of states in 8 bits, which have a scale for each row."""

RING_DTYPES = ("float32", "bfloat16")
"""Dtypes of keys and values in a ring."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel runs, not what it computes."""

    block: int
    """Entries of V that a warpgroup takes at once."""
    warpgroups: int = 4
    """Warpgroups of a CTA."""
    stages: int = 5
    """Chunks of a state in shared memory, for each warpgroup; at most all of one state."""
    chunk_bytes: int = 8192
    """Bytes of a chunk at most."""

    @classmethod
    def default(cls, V: int) -> "Config":
        """Whole heads where V allows it."""
        return cls(next(n for n in (128, 96, 64, GRANULE) if V % n == 0))


def check_supported(q, k, v, rings: Rings, *, kv_layout: bool = True) -> str | None:
    """Why the kernels cannot take a call, from its arrays or their shapes; None if they can.

    Args:
      kv_layout: whether states are [K, V]. It matters for codes alone, whose rows are taken whole.
    """
    state, ring_k, ring_u, ring_g, _, scale = rings
    length = ring_u.shape[-2]
    if length != LENGTH:
        return f"the ring holds {length} tokens; the kernel is written for {LENGTH}"
    if ring_k.dtype != ring_u.dtype or jnp.dtype(ring_u.dtype).name not in RING_DTYPES:
        return f"the ring is {ring_k.dtype} and {ring_u.dtype}; the kernel takes {' and '.join(RING_DTYPES)}"
    if ring_g.dtype != jnp.float32:
        return f"the ring's log decays are {ring_g.dtype}; the kernel takes float32"
    if q.ndim == 4 and q.shape[1] > LENGTH:
        return f"{q.shape[1]} tokens; the ring holds {LENGTH}"
    V, dtypes = v.shape[-1], STATE_DTYPES if scale is None else CODE_DTYPES
    if scale is not None and kv_layout and V % GRANULE == 0 and Config.default(V).block != V:
        return f"rows of states in 8 bits have V = {V} numbers; the kernel takes 32, 64, 96 or 128, whole"
    return step.check_supported(q, k, v, state, dtypes=dtypes)


def rows_of_sums(sizes: Sizes, config: Config, T: int) -> int:
    """Rows of the buffer in which `Products` sums."""
    return 2 * row_slices(config.block).rows if sizes.kv_layout else 2 * T


def vector_memory(sizes: Sizes, config: Config, T: int) -> dict[str, Any]:
    """Shared memory for the vectors of the tokens."""
    W = config.warpgroups
    return {"vectors": Buffer((W, 2 * T, sizes.K)), "weights": Buffer((W, 2 * T, LENGTH))}


def state_memory(sizes: Sizes, config: Config, others: Memory, dtype: Any) -> dict[str, Any]:
    """Shared memory for chunks of states: as many stages as there is room for beside the others."""
    W, shape = config.warpgroups, Shape.of(sizes, config.block, config.chunk_bytes, jnp.dtype(dtype).itemsize)
    numbers = NUMBERS[jnp.dtype(dtype).name]
    stage = Buffer((W, shape.rows, shape.columns), dtype)
    beside = sum(part.bytes for part in numbers.memory(W, 1, shape.rows).values() if part is not None)
    room = (SMEM_LIMIT - ALIGNMENT - smem_bytes(others, REDUCTION_BYTES)) // (stage.bytes + beside)
    stages = min(config.stages, shape.chunks, room)
    return {
        "state": Buffer((W, stages, shape.rows, shape.columns), dtype),
        "arrived": Barriers(numbers.copies, W * stages),
        **numbers.memory(W, stages, shape.rows),
    }


class Token(NamedTuple):
    """A token before the state is there."""

    q: jax.Array
    """q, normalised, whole in every warp."""
    k: jax.Array
    """k, likewise."""
    stored_k: jax.Array
    """k as the ring has it."""
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class Raw(NamedTuple):
    """A unit's tokens as they were loaded."""

    A_log: jax.Array
    dt_bias: jax.Array
    tokens: list[tuple[Any, ...]]
    """q, k, v, a and b of each."""


class Answer(NamedTuple):
    """A token's output and its written value, along V."""

    o: jax.Array
    u: jax.Array
    stored_u: jax.Array
    """u as the ring has it."""


class Cta(walk.Cta):
    """The knowledge of a warpgroup, with the layouts of tokens, ring and chunks.

    Args:
      sums: shared memory of `rows_of_sums` rows for each warpgroup.
      tall: whether rows of a state lie below each other in a thread, as of `Products`.
    """

    def __init__(self, gmem: Any, smem: Any, *, sums: Any, tall: bool, **static: Any):
        super().__init__(gmem, smem, **static)
        sizes, block, T = self.sizes, self.config.block, self.T
        self.shape = Shape.of(sizes, block, self.config.chunk_bytes, gmem.state.dtype.itemsize)
        self.ring = Ring(sizes.K, block, gmem.ring_k.dtype.itemsize)
        self.vectors, self.weights = smem.vectors.at[self.wg], smem.weights.at[self.wg]
        layout = column_layout(block)
        self.products = Products(
            self.numbers, sizes, self.shape, sums.at[self.wg], self.vectors, 2 * T, layout, self.dev, tall
        )

    def copy_chunk(self, i: jax.Array, c: jax.Array, copies: jax.Array, slot: jax.Array) -> None:
        """Starts the copy of chunk c of the i-th unit's state, behind `copies` others of this warpgroup."""
        self.copy(i, slot, (c,), lambda _: lax.rem(copies, self.stages))

    def wait_for_copy(self, n: jax.Array) -> Any:
        """The chunk of the n-th copy, which has arrived."""
        return self.wait(lax.rem(n, self.stages))

    def spilled(self) -> tuple[Any, Any]:
        """Keys and values in shared memory that become part of a state."""
        return self.smem.keys.at[self.wg], self.smem.values.at[self.wg]

    @classmethod
    def gate_memory(cls, sizes: Sizes, warpgroups: int, T: int) -> Memory:
        """Shared memory that the gates need beside the kernel's own."""
        return {}

    def load_ring(self, at: Unit, count: jax.Array, with_u: bool) -> Held:
        """Loads the ring of a unit, of which so many entries are tokens."""
        return self.ring.load(at, count, with_u)

    def decay_of_state(self, held: Held, g: Any = None) -> Decay:
        """The decay since the checkpoint.

        Args:
          g: log decay of a token behind those of the ring.
        """
        decay = jnp.exp(held.total if g is None else held.total + g)
        return lambda S, rows, here, layout: self.numbers.times(S, decay, rows, layout)

    def spill(self, held: Held, g: Any = None) -> None:
        """Writes what the ring adds to a state to `spilled`, see `decay_of_state`."""
        self.ring.spill(held, jnp.float32(0) if g is None else g, *self.spilled())

    def load_tokens(self, at: Unit) -> Raw:
        """Loads a unit's tokens."""
        gmem, row, head = self.gmem, at.row, at.head
        whole = vector_layout(self.sizes.K)
        A_log, dt_bias = gmem.A_log[head], gmem.dt_bias[head]
        tokens = [
            (
                load(gmem.q.at[row, t, at.q_head], whole),
                load(gmem.k.at[row, t, at.k_head], whole),
                load(gmem.v.at[row, t, head, at.entries], self.along_v),
                gmem.a[row, t, head],
                gmem.b[row, t, head],
            )
            for t in range(self.T)
        ]
        return Raw(A_log, dt_bias, tokens)

    def prepare_tokens(self, raw: Raw, held: Held) -> list[Token]:
        """The tokens, whose vectors and weights of the ring's tokens are in shared memory then."""
        gmem, vectors, tokens = self.gmem, self.vectors, []
        for t, (q, k, v, a, b) in enumerate(raw.tokens):
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            rq, rk, _ = self.tile.norms(q, k)
            g = log_decay(a, raw.A_log, raw.dt_bias)
            beta = write_strength(b, self.sizes.allow_neg_eigval)
            stored_k = (k * rk).astype(gmem.ring_k.dtype)
            tokens.append(Token(q * rq, k * rk, stored_k, v, g, beta))
            # The state's products are with q and k as they lie here; every warp writes the same.
            store_any(vectors.at[2 * t], k * rk)
            store_any(vectors.at[2 * t + 1], q * rq)
        plgpu.commit_smem()
        decayed = jnp.float32(0)
        for t, token in enumerate(tokens):
            decayed = decayed + token.g
            for j in (2 * t, 2 * t + 1):
                x = load(vectors.at[j], self.ring.k_layout.reduce(0))
                store_any(self.weights.at[j], self.ring.weights(held, x, decayed))
        return tokens

    def answers(self, held: Held, tokens: list[Token], carry: list[jax.Array]) -> Iterator[Answer]:
        """Yields the answer to each token, one after the other, from the carry of `take_state`."""
        total, since, us = held.total, [], []
        for t, token in enumerate(tokens):
            total, since = total + token.g, [x + token.g for x in since]
            decay = jnp.exp(total)
            y, z = self.products.of_token(t, carry)
            found = decay * y + self.ring.recall(held, self.weights.at[2 * t])
            read = decay * z + self.ring.recall(held, self.weights.at[2 * t + 1])
            for s, earlier in enumerate(tokens[:t]):
                k = earlier.stored_k.astype(jnp.float32)
                D = jnp.exp(since[s])
                found = found + (D * jnp.sum(token.k * k)) * us[s]
                read = read + (D * jnp.sum(token.q * k)) * us[s]
            u = token.beta * (token.v - found)
            o = self.sizes.scale * (read + jnp.sum(token.q * token.k) * u)
            stored_u = u.astype(self.gmem.ring_u.dtype)
            yield Answer(o, u, stored_u)
            us.append(stored_u.astype(jnp.float32))
            since.append(jnp.float32(0))

    def keep_gate(self, ring_g: Any, position: jax.Array, g: jax.Array) -> None:
        """Writes the log decay of a token into the ring."""
        ring_g[position] = g

    def append(
        self, at: Unit, ends: Ends, position: jax.Array, token: Any, stored_u: jax.Array, condition: Any
    ) -> None:
        """Makes a token, a `Token` or that of a subclass, an entry of the ring, if a condition holds."""

        @pl.when(condition)
        def _():
            store_any(at.ring_u.at[position], stored_u)

            @pl.when(ends.head)
            def _():
                self.keep_gate(at.ring_g, position, token.g)

            @pl.when(ends.key_head)
            def _():
                store_any(at.ring_k.at[position], token.stored_k)


def take_state(
    cta: Cta,
    i: jax.Array,
    here: Here,
    next_slot: jax.Array,
    *,
    change: Callable | None = None,
    stays: Any = False,
) -> list[jax.Array]:
    """Takes the products of the tokens with the i-th unit's state: the carry of `Products` behind it.

    The copies of the next unit's first chunks are started.

    Args:
      change: change(chunk, row) changes a chunk, which begins with a row of the state, before products are taken.
      stays: whether the last chunks are to stay in shared memory instead, a scalar.
    """
    shape, stages = cta.shape, cta.stages
    copies = here.copies

    def one(c, carry):
        chunk, row = cta.wait_for_copy(copies + c), c * shape.rows
        if change is not None:
            change(chunk, row)
        carry = cta.products.add(chunk, row, carry)
        # All warps have read the chunk.
        plgpu.commit_smem()
        later = c + stages
        number = copies + later
        is_same = later < shape.chunks
        cta.copy_chunk(i, later, number, jnp.where(is_same, here.slot, -1))
        cta.copy_chunk(i + 1, later - shape.chunks, number, jnp.where(is_same | stays, -1, next_slot))
        return carry

    return lax.fori_loop(0, shape.chunks, one, cta.products.start())


def begin(cta: Cta, count: Callable) -> Here:
    """Starts the copies of the first unit's first chunks.

    Args:
      count: count(cta, i, slot), as of `Cta.count_of`.
    """
    first, slot = jnp.int32(0), cta.slot_of(jnp.int32(0))
    for c in range(cta.stages):
        cta.copy_chunk(first, jnp.int32(c), jnp.int32(c), slot)
    return Here(slot, cta.count_of(first, slot, count), copies=first)


def pass_by(cta: Cta, i: jax.Array, here: Here, next_slot: jax.Array, count: Callable) -> Here:
    """Passes by the i-th unit, which is padding, and starts the copies of the next one's first chunks."""
    cta.clear(i)
    for c in range(cta.stages):
        cta.copy_chunk(i + 1, jnp.int32(c), here.copies + c, next_slot)
    return Here(next_slot, cta.count_of(i + 1, next_slot, count), copies=here.copies)
