"""The pool that is an array of states, in plain JAX and by kernels."""

from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float

from gdn_jax.rule.call import Arrays
from gdn_jax.rule.call import Call as RuleCall
from gdn_jax.rule.ops import check_call
from gdn_jax.serving import kernels
from gdn_jax.serving.call import At, Call, PromptCall, Spans, interpreter
from gdn_jax.serving.pools import KINDS, Pool
from gdn_jax.serving.tokens import Packed, Raw
from gdn_jax.shapes import STATE_LAYOUTS, RuleArrays, accumulation_dtype, check_choice


class StatePool(Pool):
    """An array of states."""

    def beside_rings(self) -> tuple[Any, Any]:
        """The states, which have no scales."""
        return self.arrays, None

    def by_kernels(self) -> "StateKernels":
        """The same pool by kernels."""
        return StateKernels(self.arrays, self.layout, self.null_slot)


class StateKernels(StatePool):
    """A `StatePool` by kernels that read and write states in their slots."""

    erases_at_once: ClassVar[bool] = True
    is_opaque: ClassVar[bool] = True

    def reason(self, tokens: Raw, where: Any) -> str | None:
        """Why the kernels cannot run a call of `decode` or `verify` on JAX's default device; None if they can."""
        from pallas_kernels.decode import step

        reason, q = step.check_supported(*tokens[:3], self.arrays, is_tree=where.is_tree), tokens.q
        if reason or q.ndim == 3:
            return reason or kernels.reason(self, step, tokens)
        # Several tokens of each request wait in shared memory.
        several = q.shape[1], self.arrays, self.layout == STATE_LAYOUTS[0], where.is_tree
        return kernels.reason(self, step, tokens, step.bytes_of_tokens(*several))

    def decode(self, call: Call, raw: Raw | Packed, at: At) -> tuple[Float[Array, "B HO V"], Any]:
        """`serving.decode` of tokens [B, ...], or of tokens in arrays of channels."""
        kernel = kernels.step(call, raw.with_token_axis().packed())
        options = kernels.options(call, self)

        def run(pool: Pool, read: Array | None, write: Array | None, layer: Any) -> tuple[Array, Any]:
            write = write if write is None else write[:, None]
            slots = {"read_slots": read, "write_slots": write, "null_slot": pool.null_slot}
            o, arrays = kernel(pool=pool.arrays, **slots, **options, layer=layer)
            return o[:, 0], pool.holding(arrays)

        return kernels.in_slots(self, at, run)

    def verify(self, call: Call, raw: Raw, spans: Spans) -> tuple[Float[Array, "N T HO V"], Any]:
        """`serving.verify` of tokens [N, T, ...]. No request reads what another writes."""
        start, after = self.span(spans)
        at: dict[str, Any] = {"read_slots": start.slot, "write_slots": after.slot}
        at |= {"num_tokens": kernels.int32_or_none(spans.num_tokens), "parents": kernels.parents(raw, spans)}
        at |= {"layer": spans.layer} | kernels.options(call, self)
        o, arrays = kernels.step(call, raw.packed())(pool=self.arrays, **at)
        return o, self.holding(arrays)

    def takes(self, call: Any, tokens: RuleArrays) -> bool:
        """Whether a call of `serving.prefill` runs by kernels that read and write the states of a pool themselves.

        Raises:
          NotImplementedError: the named implementation of the rule cannot run this call, with the reason.
        """
        from pallas_kernels.forward import pools

        if call.batch_invariant or call.checkpoint_every:
            return False
        dims, cu_seqlens, S = tokens.dims, tokens.cu_seqlens, jax.ShapeDtypeStruct
        initial = S((dims.N, *self.arrays.shape[-3:]), accumulation_dtype(*tokens[:5], self.arrays))
        shapes = Arrays(*tokens[:5], None, initial, S(cu_seqlens.shape, cu_seqlens.dtype), None)
        asked = RuleCall(call.use_qk_l2norm, self.layout, chunk_size=call.chunk_size)
        runs = check_call(asked, shapes, call.scale, call.implementation)[2].name == "mosaic_gpu"
        return (
            runs and not kernels.varies(self) and pools.check_supported(dims, self.arrays, call.scale) is None
        )

    def prefill(self, call: PromptCall, tokens: RuleArrays, at: At) -> tuple[Float[Array, "1 T HO V"], Any]:
        """`serving.prefill`. It cannot be differentiated."""
        from pallas_kernels.forward import rule
        from pallas_kernels.work.slots import PoolStates

        write = None if at.write_slots is None else kernels.int32(at.write_slots, self)
        numbers = (kernels.int32(at.read_slots, self), write, at.has_initial_state)
        states = PoolStates.of(self.arrays, *numbers, null_slot=self.null_slot, layer=at.layer)
        options: dict[str, Any] = dict(scale=call.scale, use_qk_l2norm=call.use_qk_l2norm)
        options |= dict(state_layout=self.layout, interpret=interpreter.get())
        o, places, _ = rule.forward(tokens._replace(initial_state=states), **options)
        return o, self.holding(places.reshape(self.arrays.shape))


def opened(arrays: Any, layout: str, null_slot: int | None = None) -> Pool:
    """The pool that a caller's arrays are, in plain JAX.

    Raises:
      ValueError: there is no such layout.
    """
    check_choice("state_layout", layout, STATE_LAYOUTS)
    return KINDS.get(type(arrays), StatePool)(arrays, layout, null_slot)
