"""The pools with their operations by the kernels, and which calls these take.

The kernels normalise q and k, know padding, and change the pool in place. Those of decode and verify make the gates,
and a request's bits do not depend on the others. What is left for here is the cursors of rings, and requests that
write where others read: the kernels of a token read and write at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax.rule.call import Arrays
from gdn_jax.rule.call import Call as RuleCall
from gdn_jax.rule.ops import check_call
from gdn_jax.serving.byte_states import BytePool, ByteStates
from gdn_jax.serving.call import At, Call, PromptCall, Spans, interpreter
from gdn_jax.serving.ring import DeferredPool
from gdn_jax.serving.ring_arrays import drop, put_parents
from gdn_jax.serving.slots import Address
from gdn_jax.serving.states import StatePool
from gdn_jax.serving.tokens import Raw
from gdn_jax.serving.windows import Channels, WindowPool
from gdn_jax.shapes import STATE_LAYOUTS, RuleArrays, accumulation_dtype


class StateKernels(StatePool):
    """A `StatePool` by kernels that read and write states in their slots."""

    is_opaque: ClassVar[bool] = True

    def unsupported(self, tokens: Raw, where: Any) -> str | None:
        """Why the kernels cannot run a call of `decode` or `verify` on JAX's default device; None if they can."""
        from pallas_kernels.decode import step

        reason = step.check_supported(*tokens[:3], self.arrays, is_tree=_is_tree(where))
        return reason or _gates_reason(tokens) or _reason(self, step)

    def decode(self, call: Call, raw: Raw, at: At) -> tuple[Float[Array, "B HO V"], Any]:
        """`serving.decode` of tokens [B, ...]."""
        from pallas_kernels.decode.step import Channels

        (Hq, Hk, HV), K = (x.shape[-2] for x in raw[:3]), raw.k.shape[-1]
        x, first = raw.with_token_axis(), Channels()
        q, k, v = (y.reshape(*y.shape[:2], -1) for y in x[:3])
        if x.qkv is not None:
            q, k, v, first = x.qkv, x.qkv, x.qkv, Channels(k=Hq * K, v=(Hq + Hk) * K)
        options: dict[str, Any] = {"heads": (Hq, Hk, HV), "first": first} | _options(call, self)
        options |= {"q": q, "k": k, "v": v}
        kernel = _step(call, x)

        def run(pool: StatePool, read: Array, write: Array, layer: Any) -> tuple[Array, Any]:
            slots = {"read_slots": read, "write_slots": write[:, None], "null_slot": pool.null_slot}
            o, arrays = kernel(pool=pool.arrays, **slots, **options, layer=layer)
            return o[:, 0], pool.holding(arrays)

        return _in_slots(self, at, run)

    def verify(self, call: Call, raw: Raw, spans: Spans) -> tuple[Float[Array, "N T HO V"], Any]:
        """`serving.verify` of tokens [N, T, ...]. No request reads what another writes."""
        start, after = self.span(spans)
        at: dict[str, Any] = {"read_slots": start.slot, "write_slots": after.slot}
        at |= {"num_tokens": _int32_or_none(spans.num_tokens), "parents": _parents(raw, spans)}
        at |= {"heads": tuple(x.shape[-2] for x in raw[:3]), "layer": spans.layer} | _options(call, self)
        q, k, v = (x.reshape(*x.shape[:2], -1) for x in raw[:3])
        o, arrays = _step(call, raw)(q=q, k=k, v=v, pool=self.arrays, **at)
        return o, self.holding(arrays)

    def takes_prompts(self, call: Any, tokens: RuleArrays) -> bool:
        """Whether a call of `serving.prefill` runs by kernels that read and write the states of a pool themselves.

        Raises:
          NotImplementedError: the named implementation of the rule cannot run this call, with the reason.
        """
        from pallas_kernels.forward import rule

        if call.batch_invariant or call.checkpoint_every:
            return False
        dims, cu_seqlens, S = tokens.dims, tokens.cu_seqlens, jax.ShapeDtypeStruct
        initial = S((dims.N, *self.arrays.shape[-3:]), accumulation_dtype(*tokens[:5], self.arrays))
        shapes = Arrays(*tokens[:5], None, initial, S(cu_seqlens.shape, cu_seqlens.dtype), None)
        asked = RuleCall(call.use_qk_l2norm, self.layout, chunk_size=call.chunk_size)
        runs = check_call(asked, shapes, call.scale, call.implementation)[2].name == "mosaic_gpu"
        return runs and not _varies(self) and rule.check_pool(dims, self.arrays, call.scale) is None

    def prefill(self, call: PromptCall, tokens: RuleArrays, at: At) -> tuple[Float[Array, "1 T HO V"], Any]:
        """`serving.prefill`. It cannot be differentiated."""
        from pallas_kernels.forward import rule
        from pallas_kernels.work.slots import PoolStates

        write = None if at.write_slots is None else _int32(at.write_slots, self)
        numbers = (_int32(at.read_slots, self), write, at.has_initial_state)
        states = PoolStates.of(self.arrays, *numbers, null_slot=self.null_slot, layer=at.layer)
        options: dict[str, Any] = dict(scale=call.scale, use_qk_l2norm=call.use_qk_l2norm)
        options |= dict(state_layout=self.layout, interpret=interpreter.get())
        o, places, _ = rule.forward(tokens._replace(initial_state=states), **options)
        return o, self.holding(places.reshape(self.arrays.shape))


class Checkpoints(NamedTuple):
    """How the kernels of rings take the arrays of a kind of checkpoints: numbers, and scales or None."""

    apart: Callable[[Any], tuple[Any, Any]]
    together: Callable[[Any, Any], Any]


CHECKPOINTS: dict[type[StatePool], Checkpoints] = {
    StatePool: Checkpoints(lambda states: (states, None), lambda states, _: states),
    BytePool: Checkpoints(lambda states: (states.codes, states.scale), ByteStates),
}
"""Kinds of checkpoints that these kernels take."""


class DeferredKernels(DeferredPool):
    """A `DeferredPool` by kernels that read and append to rings in their slots."""

    def unsupported(self, tokens: Raw, where: Any) -> str | None:
        """Why the kernels cannot run a call of `decode` or `verify` on JAX's default device; None if they can."""
        from pallas_kernels.decode import deferred

        if type(self.checkpoints) not in CHECKPOINTS:
            return f"no kernel reads a {type(self.checkpoints).__name__} beside a ring"
        reason = _ring_reason(tokens, self._rings(), self.layout == STATE_LAYOUTS[0], _is_tree(where))
        return reason or _gates_reason(tokens) or _reason(self, deferred)

    def _append_token(self, call: Call, raw: Raw, at: At) -> tuple[Float[Array, "B HO V"], Any]:
        """A token in the ring of each request."""
        from pallas_kernels.decode.channel_ring import channel_deferred
        from pallas_kernels.decode.deferred import deferred

        options: dict[str, Any] = {"read_slots": _int32(at.read_slots, self), "null_slot": self.null_slot}
        options |= {"layer": at.layer} | _options(call, self)
        tokens = _ring_tokens(raw.with_token_axis())
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

        T, rings, tokens = raw.q.shape[1], self._rings(), _ring_tokens(raw)
        num_tokens, accepted = map(_int32_or_none, (spans.num_tokens, spans.num_accepted_tokens))
        options: dict[str, Any] = {"read_slots": at.slot, "layer": at.layer} | _options(call, self)
        if (_tensor_cores_reason(raw, rings, options["kv_layout"]) or _device_reason(drafts_mma)) is None:
            options |= {"accepted": accepted, "num_tokens": num_tokens, "parents": _parents(raw, spans)}
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

        states, *rings = self.arrays[:5]
        numbers, scale = CHECKPOINTS[type(self.checkpoints)].apart(states)
        return Rings._make((numbers, *rings, scale))

    def _with(self, rings: Any) -> StatePool:
        """The pool with rings that a kernel has changed."""
        numbers, *rings, scale = rings
        states = CHECKPOINTS[type(self.checkpoints)].together(numbers, scale)
        return self.holding(type(self.arrays)._make((states, *rings, self.arrays.parents)))


class WindowKernels(WindowPool):
    """A `WindowPool` by the kernel of a token."""

    is_opaque: ClassVar[bool] = True

    def unsupported(self, tokens: Channels, where: Any) -> str | None:
        """Why the kernel cannot run a call of `causal_conv1d_update` on JAX's default device; None if it can."""
        from pallas_kernels.decode import conv_update

        x, weight, bias, _ = tokens
        return conv_update.check_supported(x, self.arrays, weight, bias) or _reason(self, conv_update)

    def decode(self, call: Any, raw: Channels, at: At) -> tuple[Float[Array, "B D"], Any]:
        """`serving.causal_conv1d_update`."""
        from pallas_kernels.decode.conv_update import conv_update

        x, weight, bias, _ = raw

        def run(pool: StatePool, read: Array, write: Array, layer: Any) -> tuple[Array, Any]:
            slots = {"read_slots": read, "write_slots": write, "null_slot": pool.null_slot}
            options: dict[str, Any] = {"silu": call == "silu", "interpret": interpreter.get()}
            y, arrays = conv_update(x, pool.arrays, weight, bias, **slots, **options, layer=layer)
            return y, pool.holding(arrays)

        return _in_slots(self, at, run)


def _step(call: Call, x: Raw) -> Callable[..., tuple[Array, Array]]:
    """The kernel of tokens [B, T, ...] on states, as arrays of channels, with their gates."""
    from pallas_kernels.decode.apart_step import apart_step
    from pallas_kernels.decode.channel_step import channel_step
    from pallas_kernels.decode.step import step_of_channels

    a, b, w, A_log, dt_bias = _gates(x)
    gates: dict[str, Any] = dict(a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    if not x.by_channels:
        return partial(step_of_channels, **gates)
    gates["lower_bound"] = call.lower_bound
    return partial(channel_step, **gates) if w is None else partial(apart_step, w=w, **gates)


def _ring_tokens(x: Raw) -> Any:
    """Tokens [B, T, ...] as the kernels of rings take them."""
    from pallas_kernels.decode.ring import ChannelTokens, Tokens

    a, b, w, A_log, dt_bias = _gates(x)
    if not x.by_channels:
        return Tokens(*x[:3], a, b, A_log, dt_bias)
    A_log = jnp.zeros(a.shape[-2], jnp.float32) if A_log is None else A_log
    return ChannelTokens(*x[:3], a, b, w, A_log, dt_bias)


def _gates(x: Raw) -> tuple[Array, Array, Array | None, Any, Array]:
    """a, b, w, A_log and dt_bias as the kernels take them: strengths apart are of every channel, as decays are."""
    if not x.by_channels:
        return x.a, x.b, None, x.A_log, x.dt_bias
    (*axes, HO, _), K, V = x.a.shape, x.k.shape[-1], x.v.shape[-1]
    a, dt_bias = jnp.broadcast_to(x.a, (*axes, HO, K)), jnp.broadcast_to(x.dt_bias, (HO, K))
    if x.w is None:  # then what is erased is one number a head, too
        return a, x.b[..., 0], None, x.A_log, dt_bias
    b, w = jnp.broadcast_to(x.b, (*axes, HO, K)), jnp.broadcast_to(x.w, (*axes, HO, V))
    return a, b, w, x.A_log, dt_bias


def _ring_reason(x: Raw, rings: Any, kv_layout: bool, is_tree: bool) -> str | None:
    """Why no kernel takes tokens on rings; None if one does."""
    from pallas_kernels.decode import channel_ring, drafts_mma, vectors

    if not x.by_channels:
        reason = vectors.check_supported(x.q, x.k, x.v, rings, kv_layout=kv_layout)
        if reason is None and is_tree:
            reason = _tensor_cores_reason(x, rings, kv_layout) or _device_reason(drafts_mma)
            reason = reason and f"a tree of drafts on a ring: {reason}"
        return reason
    if is_tree:
        return "there is no kernel of trees of drafts on a ring with a decay of each channel"
    return channel_ring.check_supported(x.q, x.k, x.v, rings, kv_layout=kv_layout)


def _tensor_cores_reason(x: Raw, rings: Any, kv_layout: bool) -> str | None:
    """Why no kernel takes drafts on rings by tensor cores; None if one does."""
    from pallas_kernels.decode import drafts_mma

    if x.by_channels:
        return "there is no kernel by tensor cores with a decay of each channel"
    return drafts_mma.check_supported(x.q, x.v, rings, kv_layout=kv_layout)


def _options(call: Call, pool: StatePool) -> dict[str, Any]:
    """Options that the kernels of decode and verify have in common."""
    return {
        "scale": call.scale,
        "use_qk_l2norm": call.use_qk_l2norm,
        "allow_neg_eigval": call.allow_neg_eigval,
        "kv_layout": pool.layout == STATE_LAYOUTS[0],
        "interpret": interpreter.get(),
    }


def _in_slots(pool: Any, at: At, run: Callable[..., tuple[Array, Any]]) -> tuple[Array, Any]:
    """Calls run(pool, read, write, layer), a kernel that reads and writes slots at once: outputs and the pool.

    Where a request writes what another reads, it runs on copies of all slots that are read.
    """
    numbers = _int32(at.read_slots, pool)
    if at.write_slots is None:
        return run(pool, numbers, numbers, at.layer)
    read, write = pool.addresses(at)

    def in_place(pool):
        return run(pool, numbers, _int32(at.write_slots, pool), at.layer)

    def on_copies(pool):
        return pool.on_copies(at, lambda copies, at: run(copies, at.read_slots, at.read_slots, None))

    same = (write.slot[:, None] == read.slot[None, :]) & write.is_slot[:, None]
    crossed = jnp.any(same & ~jnp.eye(same.shape[0], dtype=bool))
    if interpreter.get() is not None:  # outside of a compiled function
        return on_copies(pool) if crossed else in_place(pool)
    return lax.cond(crossed, on_copies, in_place, pool)


def _int32(numbers: Any, pool: StatePool) -> Int[Array, " B"]:
    """Slot numbers for a kernel. It makes padding of all that is outside the pool; int32 has to hold it for that."""
    return numbers if numbers.dtype == jnp.int32 else Address.of(numbers, pool.arrays).slot


def _int32_or_none(x: Any) -> Array | None:
    return None if x is None else x.astype(jnp.int32)


def _parents(raw: Raw, spans: Spans) -> Array | None:
    """Parents for a kernel, to which one token alone follows no other."""
    return _int32_or_none(spans.parents) if raw.q.shape[1] > 1 else None


def _is_tree(where: At | Spans) -> bool:
    return isinstance(where, Spans) and where.parents is not None


def _gates_reason(raw: Raw) -> str | None:
    wide = accumulation_dtype(*raw) != jnp.float32
    return "a gate is float64; the kernels compute in float32" if wide else None


def _reason(pool: StatePool, kernel: Any) -> str | None:
    """Why a kernel, from its module, cannot change the pool in place on JAX's default device; None if it can."""
    if _varies(pool):
        return "the pool is a shard whose type names mesh axes; in shard_map the kernels need check_vma=False"
    return _device_reason(kernel)


def _device_reason(kernel: Any) -> str | None:
    from pallas_kernels.device.launch import kernel_reason

    return None if interpreter.get() is not None else kernel_reason(kernel.NEEDS)


def _varies(pool: StatePool) -> bool:
    """Whether JAX keeps in the pool's types the mesh axes that it varies over: it then refuses to let a kernel write
    into the pool."""
    return any(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(pool))
