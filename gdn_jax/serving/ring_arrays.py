"""The arrays of a pool with deferred writes: states, a ring of tokens with each, and what changes the rings."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from gdn_jax.serving import slots
from gdn_jax.serving.arguments import check_integers
from gdn_jax.serving.byte_states import ByteStates
from gdn_jax.serving.slots import Address
from gdn_jax.serving.states import opened
from gdn_jax.shapes import (
    STATE_LAYOUTS,
    Dims,
    accumulation_dtype,
    check_array,
    check_choice,
    check_flags,
    check_floating,
    check_whole,
)


class RingPool(NamedTuple):
    """A pool with deferred writes. Every array may have an axis of layers after the first, as in `decode`."""

    state: Float[Array, "slots *state"] | ByteStates
    """Checkpoints [slots, HO, K, V], or [slots, HO, V, K], as a pool without a ring."""
    k: Float[Array, "slots *keys"]
    """Keys since the checkpoint [slots, Hk, L, K], normalised, oldest first."""
    u: Float[Array, "slots *values"]
    """Written values [slots, HO, L, V]."""
    g: Float[Array, "slots *gates"]
    """Log decays [slots, HO, L], or of each key channel [slots, HO, L, K], float32."""
    cursors: Int[Array, "slots *layers HO 2"]
    """`count` and `before` [slots, HO, 2], the same for all heads of a slot: a kernel that works on a head reads and
    writes the head's own."""
    parents: Int[Array, "slots *layers L"] | None = None
    """The parents of the last `verify`; `accept` moves the accepted tokens of a tree together in the ring. None in a
    pool for chains only, whose accepted tokens lie together already."""

    @property
    def by_channels(self) -> bool:
        """Whether the ring's tokens have per-channel gates."""
        return self.g.ndim == self.u.ndim

    @property
    def length(self) -> int:
        """L, the tokens that a ring holds."""
        return self.u.shape[-2]

    @property
    def count(self) -> Int[Array, "slots *layers"]:  # pyrefly: ignore[bad-override]
        """Number of entries of the ring that hold tokens; the others are stale and never read."""
        return self.cursors[..., 0, 0]

    @property
    def before(self) -> Int[Array, "slots *layers"]:
        """Number of entries before the tokens of the last call, which is the index of its first token. -1 if that
        call flushed its only token."""
        return self.cursors[..., 0, 1]


Arrays = Float[Array, "slots *state"] | ByteStates | RingPool
"""Types of a caller's pool of states."""


def make_cursors(
    count: Int[Array, "slots *layers"], before: Int[Array, "slots *layers"], heads: int
) -> Int[Array, "slots *layers HO 2"]:
    """Cursors of rings, for each value head."""
    both = jnp.stack([count, before], -1).astype(jnp.int32)[..., None, :]
    return jnp.broadcast_to(both, (*both.shape[:-2], heads, 2))


def make_ring_pool(
    states: Float[Array, "slots *state"] | ByteStates,
    *,
    num_key_heads: int,
    length: int = 16,
    dtype: DTypeLike = jnp.bfloat16,
    state_layout: str = "kv",
    trees: bool = False,
    channels: bool = False,
) -> RingPool:
    """A pool of states with an empty ring for each.

    Args:
      states: [slots, HO, K, V], or [slots, HO, V, K] with state_layout "vk"; [slots, layers, ...] for a whole model.
        Of any floating dtype, or of 8 bits, see `make_byte_states`.
      num_key_heads: Hk.
      length: L, tokens between two writes of a state. 1 writes every token's, as a pool without a ring.
      dtype: of the keys and values in the ring. bfloat16 reads half the bytes and rounds each once.
      state_layout: of the states.
      trees: whether `verify` may be given trees of drafts.
      channels: whether the tokens have a decay of each key channel, or erase and write apart. The log decays of a
        ring are then [slots, HO, L, K].

    Raises:
      ValueError: an argument is wrong.
    """
    check_choice("state_layout", state_layout, STATE_LAYOUTS)
    check_flags(trees=trees, channels=channels)
    memory = opened(states, state_layout)
    memory.check_dtype("states")
    shape = memory.states.shape
    if len(shape) not in (4, 5):
        raise ValueError(
            f"states: expected shape [slots, HO, K, V] or [slots, layers, HO, K, V], got {shape}"
        )
    check_whole("length", length, 1)
    try:
        is_floating = jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        is_floating = False
    if not is_floating:
        raise ValueError(f"dtype: expected a floating dtype, got {dtype!r}")
    *leading, HO, K, V = shape
    K, V = (K, V) if state_layout == "kv" else (V, K)
    check_whole("num_key_heads", num_key_heads, 1)
    if HO % num_key_heads:
        raise ValueError(f"num_key_heads: expected a divisor of HO = {HO}, got {num_key_heads}")
    widths = (K,) if channels else ()
    return RingPool(
        states,
        jnp.zeros((*leading, num_key_heads, length, K), dtype),
        jnp.zeros((*leading, HO, length, V), dtype),
        jnp.zeros((*leading, HO, length, *widths), accumulation_dtype(memory.states)),
        make_cursors(jnp.zeros(leading, jnp.int32), jnp.full(leading, -1, jnp.int32), HO),
        jnp.full((*leading, length), -1, jnp.int32) if trees else None,
    )


def check_ring(pool: RingPool, states: Any, dims: Dims, layer: Any) -> None:
    """Raises ValueError unless the ring fits its states and the dimensions of a call."""
    leading = states.shape[: 1 if layer is None else 2]
    axes, L = "slots" if layer is None else "slots, layers", pool.length
    check_array("pool.k", pool.k, (*leading, dims.Hk, L, dims.K), f"{axes}, Hk, L, K")
    check_array("pool.u", pool.u, (*leading, dims.HO, L, dims.V), f"{axes}, HO, L, V")
    widths = (dims.K,) if pool.by_channels else ()
    check_array("pool.g", pool.g, (*leading, dims.HO, L, *widths), f"{axes}, HO, L{', K' * len(widths)}")
    for name, x in (("pool.k", pool.k), ("pool.u", pool.u), ("pool.g", pool.g)):
        check_floating(name, x)
    check_integers("pool.cursors", pool.cursors, (*leading, dims.HO, 2), f"{axes}, HO, 2")
    if pool.parents is not None:
        check_integers("pool.parents", pool.parents, (*leading, L), f"{axes}, L")


def append(pool: RingPool, at: Address, position: Int[Array, "B T"], k, u, g) -> RingPool:
    """The pool with tokens [B, T, heads, ...] in their rings at some positions.

    Heads are indexed too: with a slice in their place, XLA would transpose the whole ring for it, there and back.
    """
    # u hangs on what was read from the rings. XLA copies a ring that may still be read after it is written.
    k, u, g, pool = lax.optimization_barrier((k, u, g, pool))
    slot = at.slot[:, None, None]
    slot = (slot,) if at.layer is None else (slot, at.layer)

    def written(ring: Array, x: Array) -> Array:
        index = (*slot, jnp.arange(x.shape[2]), position[:, :, None])
        return ring.at[index].set(x.astype(ring.dtype), mode="drop")

    return pool._replace(k=written(pool.k, k), u=written(pool.u, u), g=written(pool.g, g))


def put_counts(pool: RingPool, at: Address, count: Any, before: Any) -> RingPool:
    """The pool with other cursors in some slots."""
    count, before = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), at.slot.shape) for x in (count, before))
    cursors = make_cursors(count, before, pool.cursors.shape[-2])
    return pool._replace(cursors=slots.put(pool.cursors, at, cursors))


def drop(pool: RingPool, at: Address, num_accepted: Array) -> RingPool:
    """The pool without the tokens of the last call that were not accepted."""
    length = num_accepted.astype(jnp.int32)
    if pool.parents is not None:
        pool, length = _keep_path(pool, at, slots.take(pool.parents, at), length - 1)
    before, count = slots.take(pool.before, at), slots.take(pool.count, at)
    return put_counts(pool, at, jnp.minimum(before + length, count), before)


def _keep_path(
    pool: RingPool, at: Address, parents: Int[Array, "B L"], last: Int[Array, " B"]
) -> tuple[RingPool, Int[Array, " B"]]:
    """The pool with the last call's tokens up to `last`, along the tree, as a chain; and how many they are."""
    before, index = slots.take(pool.before, at)[:, None], jnp.arange(pool.length)

    def up(_, carry):
        on_path, t = carry
        parent = jnp.take_along_axis(parents, jnp.maximum(t, 0), axis=1)
        return on_path | (index == t), jnp.where(t < 0, t, parent)

    start = (jnp.zeros(parents.shape, bool), last[:, None])
    on_path, _ = lax.fori_loop(0, pool.length, up, start)
    length = jnp.sum(on_path, axis=1)
    source = before + jnp.argsort(~on_path, axis=1, stable=True)
    position = jnp.where((index < length[:, None]) & (before >= 0), before + index, pool.length)

    def path(ring: Array) -> Array:
        """Entries [B, L, heads, ..] of the tokens on the path, oldest first."""
        return jax.vmap(lambda x, i: x[i])(jnp.moveaxis(ring, 2, 1), source)

    pool = append(pool, at, position, *map(path, slots.take((pool.k, pool.u, pool.g), at)))
    return put_parents(pool, at, None, pool.length), length


def put_parents(pool: RingPool, at: Address, parents: Int[Array, "B T"] | None, T: int) -> RingPool:
    """The pool with the parents of some slots' T tokens, None for a chain; -1 after them."""
    parents = jnp.arange(-1, T - 1) if parents is None else parents
    rows = jnp.full((*at.slot.shape, pool.length), -1, jnp.int32).at[:, :T].set(parents)
    return pool._replace(parents=slots.put(pool.parents, at, rows))
