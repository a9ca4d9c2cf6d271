"""Deferred writes: a slot is a checkpoint state and a ring of the tokens since. Decoding seldom writes a state then.

A flush makes the ring part of the checkpoint. It happens when the ring is full. Drafts of a speculative step are
appended like any token; those that are not accepted vanish by counting the ring's tokens without them. The equations
are in `deferred`.

Source: the deferred state writes of Dao's "ReplaySSM"; FlashInfer's `gated_delta_rule_stp_ucache_flush`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.serving import shards, slots
from gdn_jax.serving.arguments import check_integers, check_range, check_slots, slot_count
from gdn_jax.serving.deferred import Entry, respond
from gdn_jax.serving.pools import RingPool, make_cursors
from gdn_jax.serving.slots import Address, Indices
from gdn_jax.serving.tokens import Options, Raw, Tokens, alone, by_row, prepare, step
from gdn_jax.shapes import STATE_LAYOUTS, accumulation_dtype, check_choice


def accept(
    pool: RingPool,
    read_slots: Indices,
    num_accepted_tokens: Indices,
    *,
    null_slot: int | None = None,
    layer: Any = None,
) -> RingPool:
    """The pool with those tokens of the last call dropped that were not accepted. The pool is donated.

    `verify` does this itself. It is for whoever goes on otherwise after a `verify`: with `decode`, `flush`,
    `snapshot` or `take_slots`.

    Args:
      pool: the pool.
      read_slots: [N] integers; no slot twice; -1 is padding.
      num_accepted_tokens: [N] integers, at least 1: how many of the tokens that the last call appended stay. After a
        tree it is 1 + the last accepted token's index, as for `verify`.
      null_slot, layer: as for `decode`.

    Raises:
      ValueError: an argument is wrong.
    """
    check_slots("read_slots", read_slots, (None,), "N", slot_count(pool), null_slot=null_slot, unique=True)
    check_integers("num_accepted_tokens", num_accepted_tokens, tuple(read_slots.shape), "N")
    check_range("num_accepted_tokens", num_accepted_tokens, 1, pool.length)
    return _accept(pool, jnp.asarray(read_slots), jnp.asarray(num_accepted_tokens), layer, null_slot)


def flush(
    pool: RingPool,
    read_slots: Indices,
    *,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
) -> RingPool:
    """The pool with the rings of some slots made part of their checkpoints. The pool is donated.

    Args:
      pool: the pool.
      read_slots: [N] integers; no slot twice; -1 is padding.
      state_layout: of pool.state.
      null_slot, layer: as for `decode`.

    Raises:
      ValueError: an argument is wrong.
    """
    check_choice("state_layout", state_layout, STATE_LAYOUTS)
    check_slots("read_slots", read_slots, (None,), "N", slot_count(pool), null_slot=null_slot, unique=True)
    return _flush(pool, jnp.asarray(read_slots), layer, state_layout, null_slot)


def snapshot(
    pool: RingPool,
    read_slots: Indices,
    *,
    state_layout: str = "kv",
    null_slot: int | None = None,
    layer: Any = None,
) -> Float[Array, "N HO _ _"]:
    """The present states of some slots: what a flush would make their checkpoints. The pool stays as it is.

    Args: those of `flush`, but slots may come twice.

    Returns:
      [N, HO, K, V], or [N, HO, V, K] with state_layout "vk", in float32 (float64 for a pool in it); 0 for padding.

    Raises:
      ValueError: an argument is wrong.
    """
    check_choice("state_layout", state_layout, STATE_LAYOUTS)
    check_slots("read_slots", read_slots, (None,), "N", slot_count(pool), null_slot=null_slot)
    return _snapshot(pool, jnp.asarray(read_slots), layer, state_layout, null_slot)


def _entry(pool: RingPool, at: Address, dtype, state_layout: str) -> Entry:
    """The slots of a pool as the algebra takes them. What lies behind a ring's tokens is cleared, whatever it is."""
    held: RingPool = slots.take(pool, at)
    real = jnp.arange(pool.length) < held.count[:, None]
    state = held.state if state_layout == STATE_LAYOUTS[0] else jnp.swapaxes(held.state, -1, -2)
    k, u = (jnp.where(real[:, None, :, None], x, 0).astype(dtype) for x in (held.k, held.u))
    return Entry(state.astype(dtype), k, u, jnp.where(real[:, None], held.g, 0).astype(dtype), held.count)


def _append(pool: RingPool, at: Address, position: Int[Array, "B T"], k, u, g) -> RingPool:
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


def _blocks_of_rows(wanted: Bool[Array, " B"], block: int, f: Callable[[Array, Any], Any], carry: Any) -> Any:
    """carry <- f(rows, carry) for blocks of the rows that are wanted; a block is filled up with `BEYOND`.

    One row in L is wanted of most calls: what f does costs as much as there is to do, not as much as there might be.
    """
    B = wanted.shape[0]
    if B == 0:
        return carry
    order = jnp.where(jnp.sort(~wanted, stable=True), slots.BEYOND, jnp.argsort(~wanted, stable=True))
    order = jnp.pad(order, (0, -B % block), constant_values=slots.BEYOND)
    number = jnp.sum(wanted)

    def body(state):
        i, carry = state
        return i + block, f(lax.dynamic_slice(order, (i,), (block,)), carry)

    return lax.while_loop(lambda state: state[0] < number, body, (jnp.int32(0), carry))[1]


def _block(B: int, pool: RingPool, options: Options) -> int:
    return 1 if options.batch_invariant else max(1, -(-B // pool.length))


def decode(pool: RingPool, raw: Raw, read: Address, options: Options) -> tuple[Array, RingPool]:
    """`step.decode` on a ring, in the slots that are read.

    Where the new token fills the ring, the present state is made, takes the token as in plain decoding, and is
    written.
    """
    tokens = prepare(raw, pool.state, options)
    entry = _entry(pool, read, tokens.g.dtype, options.state_layout)
    is_full = (entry.count + 1 >= pool.length) & read.is_slot
    x = Tokens(*(y[:, None] for y in tokens))
    out = by_row(partial(respond, options=options, ring_dtype=pool.k.dtype), options, entry, x)
    pool = _append(pool, read.only(~is_full), entry.count[:, None], tokens.k[:, None], out.u, x.g)

    def renew(rows, carry):
        states, o = carry
        some, x = jax.tree.map(lambda y: slots.rows_of(y, rows), (entry, tokens))
        take_token = alone(lambda entry, x: step(entry.present(), x, options))
        h, new_o = take_token(some, x)
        return slots.put(states, read.rows(rows), options.swap(h)), o.at[rows].set(new_o, mode="drop")

    carry = (pool.state, out.o[:, 0])
    states, o = _blocks_of_rows(is_full, _block(options.dims.B, pool, options), renew, carry)
    counts = after_one_token(entry.count, pool.length)
    return o, put_counts(pool._replace(state=states), read, *counts)


def after_one_token(count: Array, length: int) -> tuple[Array, Array]:
    """`count` and `before` after a token, which is flushed with the ring that it fills."""
    is_full = count + 1 >= length
    return jnp.where(is_full, 0, count + 1), jnp.where(is_full, -1, count)


def verify(
    pool: RingPool,
    raw: Raw,
    at: Address,
    num_accepted: Array,
    num_tokens: Array | None,
    parents: Array | None,
    options: Options,
) -> tuple[Array, RingPool]:
    """`drafts.verify` on a ring. Where T more tokens find no room, the accepted ones are flushed first."""
    T = options.dims.T
    pool = drop(pool, at, num_accepted)
    flushed = at.only(slots.take(pool.count, at) + T > pool.length)
    pool = _flush_rows(pool, flushed, options.state_layout, _block(options.dims.B, pool, options))
    tokens = prepare(raw, pool.state, options)
    entry = _entry(pool, at, tokens.g.dtype, options.state_layout)
    answer = partial(respond, options=options, ring_dtype=pool.k.dtype)
    out = by_row(answer, options, entry, tokens, parents)
    pool = _append(pool, at, entry.count[:, None] + jnp.arange(T), tokens.k, out.u, tokens.g)
    if pool.parents is not None:
        pool = put_parents(pool, at, parents, T)
    added = T if num_tokens is None else num_tokens.astype(jnp.int32)
    return out.o, put_counts(pool, at, entry.count + added, entry.count)


def present_states(pool: RingPool, at: Address, state_layout: str) -> Float[Array, "N HO _ _"]:
    """What `snapshot` returns."""
    h = _entry(pool, at, accumulation_dtype(pool.state), state_layout).present()
    return h if state_layout == STATE_LAYOUTS[0] else jnp.swapaxes(h, -1, -2)


def put_states(pool: RingPool, at: Address, states: Float[Array, "*N HO _ _"]) -> RingPool:
    """The pool with whole states in some slots, and nothing in their rings."""
    return _emptied(pool, at, slots.put(pool.state, at, states))


def _emptied(pool: RingPool, at: Address, states: Array) -> RingPool:
    """The pool with other states, and nothing in the rings of some slots."""
    # The cursors hang on the states, which may come from what they were: XLA copies what is read after it is written.
    states, cursors = lax.optimization_barrier((states, pool.cursors))
    return put_counts(pool._replace(state=states, cursors=cursors), at, 0, -1)


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
        """Its tokens' entries [B, L, heads, ..], oldest first."""
        return jax.vmap(lambda x, i: x[i])(jnp.moveaxis(ring, 2, 1), source)

    pool = _append(pool, at, position, *map(path, slots.take((pool.k, pool.u, pool.g), at)))
    return put_parents(pool, at, None, pool.length), length


def _chain(T: int) -> Int[Array, " T"]:
    """The parents of a chain."""
    return jnp.arange(-1, T - 1)


def put_parents(pool: RingPool, at: Address, parents: Int[Array, "B T"] | None, T: int) -> RingPool:
    """The pool with pool.parents those of some slots' T tokens, None for a chain; -1 behind them."""
    parents = _chain(T) if parents is None else parents
    rows = jnp.full((*at.slot.shape, pool.length), -1, jnp.int32).at[:, :T].set(parents)
    return pool._replace(parents=slots.put(pool.parents, at, rows))


def _flush_rows(pool: RingPool, at: Address, state_layout: str, block: int) -> RingPool:
    def fold(rows, states):
        some = at.rows(rows)
        return slots.put(states, some, present_states(pool._replace(state=states), some, state_layout))

    return _emptied(pool, at, _blocks_of_rows(at.is_slot, block, fold, pool.state))


@partial(jax.jit, static_argnums=4, donate_argnums=0, inline=True)
def _accept(pool, read_slots, num_accepted, layer, null_slot):
    return shards.on_pool(_accept_on_shard, null_slot, pool, read_slots, num_accepted, layer)


def _accept_on_shard(null_slot, pool, read_slots, num_accepted, layer):
    return drop(pool, Address.of(read_slots, pool, null_slot, layer).only(num_accepted >= 1), num_accepted)


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0, inline=True)
def _flush(pool, read_slots, layer, state_layout, null_slot):
    return shards.on_pool(_flush_on_shard, (state_layout, null_slot), pool, read_slots, layer)


def _flush_on_shard(static, pool, read_slots, layer):
    state_layout, null_slot = static
    at = Address.of(read_slots, pool, null_slot, layer)
    return _flush_rows(pool, at, state_layout, max(1, at.slot.shape[0]))


@partial(jax.jit, static_argnums=(3, 4), inline=True)
def _snapshot(pool, read_slots, layer, state_layout, null_slot):
    return shards.states_of(_snapshot_on_shard, (state_layout, null_slot), pool, read_slots, layer)


def _snapshot_on_shard(static, pool, read_slots, layer):
    state_layout, null_slot = static
    return present_states(pool, Address.of(read_slots, pool, null_slot, layer), state_layout)
