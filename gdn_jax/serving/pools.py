"""Pools of states. A pool is memory with slots that knows what its numbers mean.

Every pool answers the same few calls: `decode`, `verify` and `prefill`, and below them `take` and `put` of whole
states. A kind of pool is a class, whose statement says for which arrays of a caller it stands (`of`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.rule import packing
from gdn_jax.serving import slots
from gdn_jax.serving.arguments import check_pool, slot_count
from gdn_jax.serving.call import At, Call, Spans
from gdn_jax.serving.prompt_tokens import Prompts
from gdn_jax.serving.slots import Address
from gdn_jax.serving.tokens import alone, by_row, walk
from gdn_jax.shapes import STATE_LAYOUTS, Dims, RuleArrays, accumulation_dtype, check_choice, check_floating

GRID = 64
"""Tokens of a chunk where bits count: pieces of a prompt that end on multiples of it can have the whole's bits."""


IMPLEMENTATIONS = ("mosaic_gpu", "xla")
"""Names of the implementations of decode and verify, fastest first."""

Run = Callable[..., tuple[Array, Any]]
"""An operation of a pool with its tokens given: from arrays, and slots by the operation's names, to outputs, arrays.

That of a trial is `verify`."""
Accept = Callable[[Int[Array, " N"]], Any]
"""Arrays after the first of the tokens of each request, 1 or more."""

KINDS: dict[type, type["Pool"]] = {}
"""Kinds of pools by the type of the arrays that they stand for; any others are a `states.StatePool`."""

register = partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["layout", "null_slot"]
)
"""Makes a kind of pool a pytree of its arrays."""


@dataclass(frozen=True)
class Pool:
    """Slots of states, with the operations of serving in plain JAX.

    A kind of pool that is not one array says what its arrays are: `names`, `states`, `check`, `take` and `put`. The
    three operations then work; it may have faster ones.
    """

    arrays: Any
    """The caller's own: an array or a pytree of arrays [slots, ...]."""
    layout: str = "kv"
    """Whether a state is [K, V] or, with "vk", [V, K]."""
    null_slot: int | None = None
    """A slot that is padding like -1."""

    names: ClassVar[Any] = "h . ."
    """Names of the arrays' last dimensions, see `shards`; before them come slots, and layers."""
    slot_per_token: ClassVar[bool] = True
    """Whether `verify` has a slot for every token of a request; else a request has one slot."""
    erases_at_once: ClassVar[bool] = False
    """Whether `decode` takes a token that erases at a key of its own before it writes; else it comes as two."""
    is_opaque: ClassVar[bool] = False
    """Whether XLA, left alone, would gather the arrays on every device: for a kernel, or for appending to rings."""

    def __init_subclass__(cls, of: type | None = None) -> None:
        register(cls)
        if of is not None:
            KINDS[of] = cls

    @property
    def states(self) -> Any:
        """The array of the states [slots, HO, K, V] as they lie in memory, with an axis of layers after the first."""
        return self.arrays

    @property
    def size(self) -> int:
        """How many slots there are."""
        return slot_count(self.arrays)

    def axes(self, where: At | Spans) -> Any:
        """Names of all dimensions, in a call on these slots."""
        slots = "b" if where.are_rows else "s"

        def one(x: Any, names: str) -> str | None:
            return None if x is None else " ".join((slots, *"." * (x.ndim - 1 - len(names.split())), names))

        return self.holding(jax.tree.map(one, self.arrays, self.names, is_leaf=lambda x: x is None))

    def check(self, dims: Dims, layer: Any) -> None:
        """Raises ValueError unless the states have the heads and widths of a call."""
        check_pool(self.states, *self.state_shape(dims), layer)

    def state_shape(self, dims: Dims) -> tuple[tuple[int, int, int], str]:
        """The shape of a slot's states in a call, and the names of its axes."""
        if self.layout == STATE_LAYOUTS[0]:
            return (dims.HO, dims.K, dims.V), "HO, K, V"
        return (dims.HO, dims.V, dims.K), "HO, V, K"

    def check_dtype(self, name: str) -> None:
        """Raises ValueError, by that name of the arrays, unless a pool may have their dtype."""
        check_floating(name, self.arrays)

    def check_tokens(self, raw: Any) -> None:
        """Raises ValueError for tokens of a rule whose numbers the pool does not hold."""

    def most_accepted(self, T: int) -> int:
        """How many tokens of the call before may be accepted, in a call of T tokens."""
        return T

    def check_drafts(self, T: int, is_tree: bool) -> None:
        """Raises ValueError where there is no room for T tokens of a request, or for a tree of them."""

    def by_kernels(self) -> "Pool":
        """The same pool with its operations by kernels; one that has none stays as it is."""
        return self

    def by(self, implementation: str | None, tokens: Any, where: Any) -> "Pool":
        """The pool with its operations by the implementation that is named; else by kernels where they run the call.

        Raises:
          ValueError: there is no such implementation.
          NotImplementedError: the kernels are named and cannot run, with the reason.
        """
        check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))
        if implementation == "xla":
            return self
        fast = self.by_kernels()
        reason = fast.reason(tokens, where)
        if implementation == "mosaic_gpu" and reason:
            raise NotImplementedError(f"implementation 'mosaic_gpu': {reason}")
        return self if reason else fast

    def reason(self, tokens: Any, where: Any) -> str | None:
        """Why no kernels run a call on this pool; None if they do."""
        return f"no kernel reads a {type(self).__name__}"

    def beside_rings(self) -> tuple[Any, Any] | None:
        """Numbers, and their scales or None, as the kernels of rings take checkpoints; None where they take none."""
        return None

    def takes(self, call: Any, tokens: RuleArrays) -> bool:
        """Whether the pool's `prefill` is by kernels and runs a call."""
        return False

    def take(self, at: Address) -> Float[Array, "*N HO _ _"]:
        """States of some slots in the pool's layout, zeros for padding."""
        return slots.take(self.arrays, at)

    def put(self, at: Address, states: Float[Array, "*N HO _ _"]) -> Any:
        """The pool with states in some slots."""
        return self.holding(slots.put(self.arrays, at, states))

    def holding(self, arrays: Any) -> Any:
        """The same kind of pool with other arrays."""
        return replace(self, arrays=arrays)

    def swap(self, h: Float[Array, "*N _ _"]) -> Float[Array, "*N _ _"]:
        """States [.., K, V] in the pool's layout; its own inverse."""
        return h if self.layout == STATE_LAYOUTS[0] else jnp.swapaxes(h, -1, -2)

    def address(self, numbers: Any, layer: Any) -> Address:
        """Where slots of some numbers lie."""
        return Address.of(numbers, self.arrays, self.null_slot, layer)

    def addresses(self, at: At) -> tuple[Address, Address]:
        """Where a call reads and where it writes; it writes nothing for a request that it does not read."""
        read = self.address(at.read_slots, at.layer)
        if at.write_slots is None:
            return read, read
        return read, self.address(at.write_slots, at.layer).only(read.is_slot)

    def span(self, spans: Spans) -> tuple[Address, Address]:
        """Where each request starts [N], and where the state after each token goes [N, T]."""
        T = spans.state_slots.shape[1]
        last = spans.num_accepted_tokens.astype(jnp.int32) - 1
        start = jnp.take_along_axis(spans.state_slots, jnp.clip(last, 0, T - 1)[:, None], axis=1)[:, 0]
        start = self.address(start, spans.layer).only((last >= 0) & (last < T))
        is_token = start.is_slot[:, None] & spans.is_token(T)
        return start, self.address(spans.state_slots, spans.layer).only(is_token)

    def on_copies(self, at: At, run: Callable[..., tuple[Array, "Pool"]]) -> tuple[Array, Any]:
        """Calls run(pool, at) on copies of the slots that are read, which then go where they are to be written.

        So all is read before any is written, a slot may be read twice, and a request that is written nowhere has a
        place.
        """
        read, write = self.addresses(at)
        rows = jnp.where(read.is_slot, jnp.arange(at.read_slots.shape[0], dtype=jnp.int32), slots.BEYOND)
        o, copies = run(replace(self, arrays=slots.take(self.arrays, read), null_slot=None), At(rows))
        return o, self.holding(slots.put(self.arrays, write, copies.arrays))

    def decode(self, call: Any, raw: Any, at: At) -> tuple[Float[Array, "B *HO V"], Any]:
        """One token of every request, [B, ...]: outputs and the pool."""
        read, write = self.addresses(at)
        o, states = self.advance(call, raw, self.take(read), None)
        return outputs(o, read.is_slot, raw), self.put(write, states)

    def verify(self, call: Any, raw: Any, spans: Spans) -> tuple[Float[Array, "N T *HO V"], Any]:
        """Tokens [N, T, ...] of every request: outputs and the pool."""
        start, after = self.span(spans)
        o, states = self.advance(call, raw, self.take(start), spans)
        is_token = spans.is_token(raw[0].shape[1]) & start.is_slot[:, None]
        return outputs(o, is_token, raw), self.put(after, states)

    def on_trial(self, run: Run, at: Any, T: int) -> tuple[Array, Accept]:
        """See `step.on_trial`: the tokens are read on copies, and what is accepted is read once more."""
        N, ones = at.shape[0], jnp.ones(at.shape, jnp.int32)
        address = self.address(at, None)

        def only(slots_of: Array, count: Array) -> dict[str, Array]:
            """The state after the first `count` tokens goes where they start, the others nowhere."""
            state_slots = jnp.where(jnp.arange(T) == count[:, None] - 1, slots_of[:, None], -1)
            return dict(state_slots=state_slots, num_accepted_tokens=count)

        rows = jnp.where(address.is_slot, jnp.arange(N, dtype=jnp.int32), -1)
        o, _ = run(slots.take(self.arrays, address), **only(rows, ones))
        whole = jnp.where(address.is_slot, address.slot, -1)
        return o, lambda count: run(self.arrays, **only(whole, count))[1]

    def advance(self, call: Call, raw: Any, states: Array, spans: Spans | None) -> tuple[Array, Array]:
        """Outputs of a token of every request and the states after it, or with spans those of each token."""
        tokens = raw.prepare(self.states, call)
        h = self.swap(states.astype(tokens.g.dtype))

        def one(h: Array, x: Any) -> tuple[Array, Array]:
            return x.step(h, call)

        if spans is None:
            h, o = by_row(one, call, h, tokens)
        else:
            h, o = by_row(partial(walk, one), call, h, tokens, spans.parents)
        return o, self.swap(h)

    def prefill(self, call: Any, tokens: Any, at: At) -> tuple[Float[Array, "1 T HO V"], Any]:
        """`serving.prefill` of packed `Prompts`, by `delta_rule` on states that are taken out of the pool."""
        cu_seqlens = tokens.cu_seqlens
        read, write = self.addresses(at)
        initial = self.take(read).astype(accumulation_dtype(*tokens.arrays, self.states))
        if at.has_initial_state is not None:
            initial = jnp.where(at.has_initial_state[:, None, None, None], initial, 0)
        # A sequence without a slot starts from zeros; if it writes nothing either, its outputs are zeros.
        is_real = slots.is_real(cu_seqlens, read, tokens.q.shape[1])
        tokens = tokens.writing(is_real, initial)
        options = dict(
            scale=call.scale,
            use_qk_l2norm=call.use_qk_l2norm,
            state_layout=self.layout,
            chunk_size=GRID if call.batch_invariant else call.chunk_size,
            implementation=call.implementation,
        )
        every, pool = call.checkpoint_every, self
        run = _by_chunks if call.batch_invariant else _all_at_once
        o, final, h = run(tokens, initial, every is not None, options)
        if every is not None:
            kept = self.address(at.checkpoint_slots, at.layer).only(read.is_slot[:, None])
            after, length = every * (1 + jnp.arange(kept.slot.shape[1])), jnp.diff(cu_seqlens)[:, None]
            states = _states_after(after, length, h, final, options["chunk_size"])
            pool = pool.put(kept.only(after <= length), states)
        return o, pool.put(write, final)


def outputs(o: Array, is_token: Bool[Array, "*N"], raw: Any) -> Array:
    """Outputs [*N, ...] in the dtype of the tokens, 0 at padding."""
    mask = is_token.reshape(*is_token.shape, *(1,) * (o.ndim - is_token.ndim))
    return jnp.where(mask, o, 0).astype(raw[0].dtype)


def _states_after(after: Array, length: Array, h: Any, final: Array, C: int) -> Float[Array, "N M HO _ _"]:
    """States after so many tokens [M] of sequences of some lengths [N, 1], from those at the chunks' starts."""
    chunks = -(-length // C)
    chunk = jnp.cumsum(chunks, axis=0) - chunks + after // C  # that begins there, if the sequence goes on
    goes_on = (after < length)[..., None, None, None]
    return jnp.where(goes_on, h.at[chunk].get(mode="clip"), final[:, None])


def _all_at_once(
    tokens: Prompts, initial: Array, keep: bool, options: dict
) -> tuple[Array, Array, Array | None]:
    """The rule: outputs, final states, and if they are kept the states at the start of every chunk."""
    o, final = tokens.rule(initial, **options)
    return o, final, tokens.chunk_states(initial, **options) if keep else None


def _by_chunks(
    tokens: Prompts, initial: Array, keep: bool, options: dict
) -> tuple[Array, Array, Array | None]:
    """The same chunk by chunk, each by the same compiled code."""
    table = packing.packed_chunks(tokens.cu_seqlens, tokens.q.shape[1], GRID)
    chunks = [None if x is None else packing.gather_chunks(x, table) for x in tokens.arrays]
    work = (table.sequence, table.owned.any(1), chunks)

    def chunk(states, x):
        n, is_used, x = x
        run = alone(lambda x, h: Prompts(*x, cu_seqlens=None).rule(h, **options))
        o, h = run(x, states[n][None])
        before = states[n] if keep else None
        return states.at[n].set(jnp.where(is_used, h[0], states[n])), (o, before)

    if table.owned.shape[0] == 1:  # a loop of one iteration would be compiled as no loop at all
        work = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x)]), work)
    final, (o, h) = lax.scan(chunk, initial, work)
    return packing.scatter_chunks(o[: table.owned.shape[0]], table), final, h
