"""Deferred writes: a slot is a checkpoint state and a ring of the tokens since. Decoding seldom writes a state then.

A flush makes the ring part of the checkpoint. It happens when the ring is full. Drafts of a speculative step are
appended like any token; those that are not accepted vanish by counting the ring's tokens without them. The equations
are in `deferred`.

Source: the deferred state writes of Dao's "ReplaySSM"; FlashInfer's `gated_delta_rule_stp_ucache_flush`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from gdn_jax.serving import kernels, shards, slots
from gdn_jax.serving.call import At, Call, Spans
from gdn_jax.serving.deferred import Entry
from gdn_jax.serving.pools import Accept, Pool, Run, outputs
from gdn_jax.serving.ring_arrays import RingPool, append, check_ring, drop, put_counts, put_parents
from gdn_jax.serving.slots import Address
from gdn_jax.serving.states import opened
from gdn_jax.serving.tokens import Raw, alone, by_row
from gdn_jax.shapes import STATE_LAYOUTS, Dims, accumulation_dtype

GATES = "one gate a head", "gates of each channel, or erase and write apart"
"""The gates of tokens without and with an axis of channels, in words."""


class DeferredPool(Pool, of=RingPool):
    """The arrays of a `RingPool`: states in a pool of any other kind, and a ring of tokens with each."""

    arrays: RingPool
    slot_per_token: ClassVar[bool] = False
    is_opaque: ClassVar[bool] = True

    @property
    def names(self) -> Any:  # pyrefly: ignore[bad-override]
        """Names of the arrays' last dimensions."""
        rings = ("h . .", "h . .", "h . ." if self.arrays.by_channels else "h .", "h .", ".")
        return self.arrays._make((self.checkpoints.names, *rings))

    @property
    def checkpoints(self) -> Pool:
        """The pool of the checkpoints."""
        return opened(self.arrays.state, self.layout, self.null_slot)

    @property
    def states(self) -> Any:
        """The checkpoints as they lie in memory."""
        return self.checkpoints.states

    def check(self, dims: Dims, layer: Any) -> None:
        """Raises ValueError unless checkpoints and rings have the heads and widths of a call."""
        self.checkpoints.check(dims, layer)
        check_ring(self.arrays, self.states, dims, layer)

    def check_tokens(self, raw: Any) -> None:
        """Raises ValueError for tokens whose decays are not those of the rings."""
        if raw.by_channels != self.arrays.by_channels:
            want, got = (GATES[by_channels] for by_channels in (raw.by_channels, self.arrays.by_channels))
            raise ValueError(f"pool: expected a ring for {want}, see make_ring_pool, got one for {got}")

    def most_accepted(self, T: int) -> int:
        """A ring has all tokens of the call before, however many come now."""
        return self.arrays.length

    def check_drafts(self, T: int, is_tree: bool) -> None:
        """Raises ValueError where a ring is shorter than T, or is not made for trees and has to take one."""
        if T > self.arrays.length:
            raise ValueError(
                f"q: expected at most {self.arrays.length} tokens, the length of the ring, got {T}"
            )
        if is_tree and self.arrays.parents is None:
            raise ValueError("parents: expected a ring that is made for trees, see make_ring_pool")

    def take(self, at: Address) -> Float[Array, "*N HO _ _"]:
        """Present states in float32, or in float64 for checkpoints in it."""
        return self.swap(self._entry(at, accumulation_dtype(self.states)).present())

    def put(self, at: Address, states: Float[Array, "*N HO _ _"]) -> Any:
        """The pool with whole states in some slots, and nothing in their rings."""
        return self._emptied(at, self.checkpoints.put(at, states).arrays)

    def decode(self, call: Call, raw: Any, at: At) -> tuple[Float[Array, "B HO V"], Any]:
        """`serving.decode` of tokens [B, ...]."""
        if at.write_slots is not None:
            return self.on_copies(at, lambda pool, at: pool.decode(call, raw, at))
        return self._append_token(call, raw, at)

    def _append_token(self, call: Call, raw: Any, at: At) -> tuple[Float[Array, "B HO V"], Any]:
        """A token in the ring of each request.

        Where it fills the ring, the present state is made, takes the token as in plain decoding, and is written.
        """
        read, ring = self.address(at.read_slots, at.layer), self.arrays
        tokens = raw.prepare(self.states, call)
        entry = self._entry(read, tokens.g.dtype)
        is_full = (entry.count + 1 >= ring.length) & read.is_slot
        x = jax.tree.map(lambda y: y[:, None], tokens)
        out = by_row(partial(Entry.respond, call=call, ring_dtype=ring.k.dtype), call, entry, x)
        ring = append(ring, read.only(~is_full), entry.count[:, None], tokens.k[:, None], out.u, x.g)

        def renew(rows, carry):
            checkpoints, o = carry
            some, x = jax.tree.map(lambda y: slots.rows_of(y, rows), (entry, tokens))
            take_token = alone(lambda entry, x: x.step(entry.present(), call))
            h, new_o = take_token(some, x)
            return checkpoints.put(read.rows(rows), self.swap(h)), o.at[rows].set(new_o, mode="drop")

        carry = (self.holding(ring).checkpoints, out.o[:, 0])
        checkpoints, o = _blocks_of_rows(is_full, self._block(call, raw), renew, carry)
        is_full = entry.count + 1 >= ring.length  # of padding too
        count, before = jnp.where(is_full, 0, entry.count + 1), jnp.where(is_full, -1, entry.count)
        ring = put_counts(ring._replace(state=checkpoints.arrays), read, count, before)
        return outputs(o, read.is_slot, raw), self.holding(ring)

    def verify(self, call: Call, raw: Any, spans: Spans) -> tuple[Float[Array, "N T HO V"], Any]:
        """`serving.verify` of tokens [N, T, ...]. Where they find no room, the accepted ones are flushed first."""
        at, T, num_tokens = self._span(spans, raw), raw.q.shape[1], spans.num_tokens
        pool = self.holding(drop(self.arrays, at, spans.num_accepted_tokens))
        flushed = at.only(slots.take(pool.arrays.count, at) + T > pool.arrays.length)
        pool = pool._flush_rows(flushed, self._block(call, raw))
        tokens, ring = raw.prepare(pool.states, call), pool.arrays
        entry = pool._entry(at, tokens.g.dtype)
        answer = partial(Entry.respond, call=call, ring_dtype=ring.k.dtype)
        out = by_row(answer, call, entry, tokens, spans.parents)
        ring = append(ring, at, entry.count[:, None] + jnp.arange(T), tokens.k, out.u, tokens.g)
        if ring.parents is not None:
            ring = put_parents(ring, at, spans.parents, T)
        added = T if num_tokens is None else num_tokens.astype(jnp.int32)
        ring = put_counts(ring, at, entry.count + added, entry.count)
        return outputs(out.o, spans.is_token(T) & at.is_slot[:, None], raw), self.holding(ring)

    def on_trial(self, run: Run, at: Any, T: int) -> tuple[Array, Accept]:
        """See `step.on_trial`: the tokens are appended to the rings, and those not accepted are dropped."""
        ones = jnp.ones(at.shape, jnp.int32)
        o, arrays = run(self.arrays, state_slots=at, num_accepted_tokens=ones)

        def accept(count: Array) -> Any:
            rings, spans = self.holding(arrays), Spans(at, count)
            return shards.change((DeferredPool.accept,), rings.axes(spans), rings, spans).arrays

        return o, accept

    def accept(self, spans: Spans) -> Any:
        """The pool without the tokens of the last call that were not accepted."""
        accepted = spans.num_accepted_tokens
        at = self.address(spans.state_slots, spans.layer).only(accepted >= 1)
        ring = drop(self.arrays, at, accepted)
        count = slots.take(ring.count, at)
        return self.holding(put_counts(ring, at, count, count - 1))

    def flush(self, at: At) -> Any:
        """The pool with the rings of some slots made part of their checkpoints."""
        return self._flush_rows(self.address(at.read_slots, at.layer), max(1, at.read_slots.shape[0]))

    def snapshot(self, at: At) -> Float[Array, "N HO _ _"]:
        """The present states of some slots."""
        return self.take(self.address(at.read_slots, at.layer))

    def by_kernels(self) -> "DeferredKernels":
        """The same pool by kernels."""
        return DeferredKernels(self.arrays, self.layout, self.null_slot)

    def _span(self, spans: Spans, raw: Any) -> Address:
        """Slots of the requests; one with a wrong number of accepted tokens is padding."""
        accepted = slots.widened(spans.num_accepted_tokens)
        at = self.address(spans.state_slots, spans.layer)
        return at.only((accepted >= 1) & (accepted <= self.most_accepted(raw.q.shape[1])))

    def _entry(self, at: Address, dtype) -> Entry:
        """Slots as the algebra takes them. What lies after a ring's tokens is cleared, whatever it is."""
        rings: Any = {"state": None}  # which their own pool takes out
        held: RingPool = slots.take(self.arrays._replace(**rings), at)
        real = jnp.arange(held.length) < held.count[:, None]

        def cleared(x: Array) -> Array:
            mask = real.reshape(real.shape[0], 1, held.length, *(1,) * (x.ndim - 3))
            return jnp.where(mask, x, 0).astype(dtype)

        state = self.swap(self.checkpoints.take(at)).astype(dtype)
        return Entry(state, cleared(held.k), cleared(held.u), cleared(held.g), held.count)

    def _emptied(self, at: Address, states: Any) -> Any:
        """The pool with other states, and nothing in the rings of some slots."""
        # The cursors hang on the states, which may come from what they were: XLA copies what is read after it is
        # written.
        states, cursors = lax.optimization_barrier((states, self.arrays.cursors))
        return self.holding(put_counts(self.arrays._replace(state=states, cursors=cursors), at, 0, -1))

    def _flush_rows(self, at: Address, block: int) -> Any:
        """The pool with the rings of some slots made part of their checkpoints, so many at a time."""

        def fold(rows, checkpoints):
            some = at.rows(rows)
            pool = self.holding(self.arrays._replace(state=checkpoints.arrays))
            return checkpoints.put(some, pool.take(some))

        checkpoints = _blocks_of_rows(at.is_slot, block, fold, self.checkpoints)
        return self._emptied(at, checkpoints.arrays)

    def _block(self, call: Call, raw: Any) -> int:
        """Requests that are flushed at a time: as many as fill their rings with a token, on average."""
        return 1 if call.batch_invariant else max(1, -(-raw.q.shape[0] // self.arrays.length))


class DeferredKernels(DeferredPool):
    """A `DeferredPool` by kernels that read and append to rings in their slots."""

    def reason(self, tokens: Raw, where: Any) -> str | None:
        """Why the kernels cannot run a call of `decode` or `verify` on JAX's default device; None if they can."""
        from pallas_kernels.decode import deferred

        if self.checkpoints.beside_rings() is None:
            return f"no kernel reads a {type(self.checkpoints).__name__} beside a ring"
        if where.is_tree and tokens.by_channels:
            return "there is no kernel of trees of drafts on a ring with per-channel decay"
        args = tokens, self._rings(), self.layout == STATE_LAYOUTS[0]
        reason = kernels.check_supported(*args)
        if reason is None and where.is_tree:
            reason = kernels.check_supported(*args, by_tensor_cores=True)
            reason = reason and f"a tree of drafts on a ring: {reason}"
        return reason or kernels.reason(self, deferred, tokens)

    def _append_token(self, call: Call, raw: Raw, at: At) -> tuple[Float[Array, "B HO V"], Any]:
        """A token in the ring of each request."""
        from pallas_kernels.decode.channel_ring import channel_deferred
        from pallas_kernels.decode.deferred import deferred

        options: dict[str, Any] = {
            "read_slots": kernels.int32(at.read_slots, self),
            "null_slot": self.null_slot,
        }
        options |= {"layer": at.layer} | kernels.options(call, self)
        tokens = kernels.ring_tokens(raw.with_token_axis())
        kernel = partial(channel_deferred, lower_bound=call.lower_bound) if raw.by_channels else deferred
        o, rings = kernel(tokens, self._rings(), **options)
        return o[:, 0], self._with(rings)

    def verify(self, call: Call, raw: Raw, spans: Spans) -> tuple[Float[Array, "N T HO V"], Any]:
        """`serving.verify` of tokens [N, T, ...]. Where they find no room, the accepted ones are flushed first.

        Of the last call's tokens the first that were accepted stay in the ring, or all that are left there. In a ring
        that is made for trees these have been moved together before.
        """
        at, T = self._span(spans, raw), raw.q.shape[1]
        if self.arrays.parents is None:
            return self._append_drafts(call, raw, at, spans)
        pool = self.holding(drop(self.arrays, at, spans.num_accepted_tokens))
        o, pool = pool._append_drafts(call, raw, at, spans)
        return o, self.holding(put_parents(pool.arrays, at, spans.parents, T))

    def _append_drafts(self, call: Call, raw: Raw, at: Address, spans: Spans) -> tuple[Array, Any]:
        from pallas_kernels.decode import channel_ring, drafts, drafts_mma

        T, rings, tokens = raw.q.shape[1], self._rings(), kernels.ring_tokens(raw)
        num_tokens, accepted = map(kernels.int32_or_none, (spans.num_tokens, spans.num_accepted_tokens))
        options: dict[str, Any] = {"read_slots": at.slot, "layer": at.layer} | kernels.options(call, self)
        if kernels.check_supported(raw, rings, options["kv_layout"], by_tensor_cores=True) is None:
            options |= {
                "accepted": accepted,
                "num_tokens": num_tokens,
                "parents": kernels.parents(raw, spans),
            }
            o, rings = drafts_mma.drafts_mma(tokens, rings, **options)
            return o, self._with(rings)
        kernel, outputs = drafts.drafts, []
        if raw.by_channels:
            kernel = partial(channel_ring.channel_drafts, lower_bound=call.lower_bound)
        for t in range(0, T, drafts.MAX_TOKENS):
            *of_tokens, A_log, dt_bias = tokens
            of_tokens = (None if x is None else x[:, t : t + drafts.MAX_TOKENS] for x in of_tokens)
            some = tokens._make((*of_tokens, A_log, dt_bias))
            options |= {"drafts": drafts.Drafts(T, t), "accepted": None if t else accepted}
            options["num_tokens"] = None if num_tokens is None else num_tokens - t
            o, rings = kernel(some, rings, **options)
            outputs.append(o)
        return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, 1), self._with(rings)

    def _rings(self) -> Any:
        """The arrays that a kernel changes in place: all but the parents."""
        from pallas_kernels.decode.ring import Rings

        checkpoints = self.checkpoints.beside_rings()
        assert checkpoints is not None
        numbers, scale = checkpoints
        return Rings._make((numbers, *self.arrays[1:5], scale))

    def _with(self, rings: Any) -> Pool:
        """The pool with rings that a kernel has changed."""
        numbers, *rings, scale = rings
        leaves = (numbers,) if scale is None else (numbers, scale)
        states = jax.tree.unflatten(jax.tree.structure(self.arrays.state), leaves)
        return self.holding(RingPool._make((states, *rings, self.arrays.parents)))


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
