"""Decode, verify, prefill and the convolution of a token by the kernels: which calls they take, and what stands
between such a call and them.

The kernels normalise q and k, know padding, and change the pool in place. Those of decode and verify make the gates,
and a request's bits do not depend on the others. What is left for here is the cursors of rings, and requests that
write where others read: the kernels of a token read and write at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from gdn_jax import ops
from gdn_jax.serving import slots
from gdn_jax.serving.pools import RingPool
from gdn_jax.serving.slots import Address
from gdn_jax.serving.tokens import Options, Raw
from gdn_jax.shapes import STATE_LAYOUTS, Dims, RuleArrays, accumulation_dtype


def unsupported(raw: Raw, pool: Any, *, is_tree: bool = False, kv_layout: bool = True) -> str | None:
    """Why the kernels cannot run a call of `decode` or `verify` on JAX's default device; None if they can.

    Args:
      is_tree: whether it has parents.
      kv_layout: whether states are [K, V], of which trees on a ring have to be.
    """
    from pallas_kernels.decode import ring_drafts, ring_step, step
    from pallas_kernels.device.launch import device_reason

    if isinstance(pool, RingPool):
        reason = ring_step.check_supported(*raw[:3], pool.state, pool.k, pool.u, pool.g)
        if reason is None and is_tree:
            reason = ring_drafts.check_supported(*raw[:3], *pool[:3], kv_layout=kv_layout)
            reason = reason and f"a tree of drafts on a ring: {reason}"
    else:
        reason = step.check_supported(*raw[:3], pool, is_tree=is_tree)
    if reason is None and accumulation_dtype(*raw) != jnp.float32:
        reason = "a gate is float64; the kernels compute in float32"
    return reason or _varying_reason(pool) or device_reason()


def convolution_unsupported(pool: Array, x: Array, weight: Array, bias: Array | None) -> str | None:
    """Why the kernel cannot run a call of `causal_conv1d_update` on JAX's default device; None if it can."""
    from pallas_kernels.decode import conv_update
    from pallas_kernels.device.launch import device_reason

    reason = conv_update.check_supported(x, pool, weight, bias)
    return reason or _varying_reason(pool) or device_reason()


def _varying_reason(pool: Any) -> str | None:
    if not _varies(pool):
        return None
    return "the pool is a shard whose type names mesh axes; in shard_map the kernels need check_vma=False"


def _varies(pool: Any) -> bool:
    """Whether JAX keeps in the pool's types the mesh axes that it varies over: it then refuses to let a kernel write
    into the pool."""
    return any(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(pool))


def _rule(raw: Raw, options: Options) -> dict[str, Any]:
    """What the kernels are told of the rule."""
    return {
        "A_log": raw.A_log,
        "dt_bias": raw.dt_bias,
        "scale": options.scale,
        "use_qk_l2norm": options.use_qk_l2norm,
        "allow_neg_eigval": options.allow_neg_eigval,
        "kv_layout": options.state_layout == STATE_LAYOUTS[0],
    }


def _one_token(raw: Raw) -> Raw:
    """Tokens [B, ..] as [B, 1, ..]."""
    q, k, v, a, b = (x[:, None] for x in raw[:5])
    return Raw(q, k, v, a, b, raw.A_log, raw.dt_bias)


def _int32(numbers: Array, pool: Any) -> Int[Array, " B"]:
    """Slot numbers for a kernel. It makes padding of all that is outside the pool; int32 has to hold it for that."""
    return numbers if numbers.dtype == jnp.int32 else Address.of(numbers, pool).slot


def convolve(
    static: tuple[str | None, int | None],
    pool: Array,
    x: Array,
    weight: Array,
    bias: Array | None,
    read_slots: Array,
    write_slots: Array | None,
    layer: Any,
) -> tuple[Array, Array]:
    """`serving.causal_conv1d_update`; static: its activation and null_slot."""
    from pallas_kernels.decode.conv_update import conv_update

    activation, null_slot = static

    def run(pool, read: Array, write: Array, layer: Any, null_slot: int | None):
        at: dict[str, Any] = {
            "read_slots": read,
            "write_slots": write,
            "layer": layer,
            "null_slot": null_slot,
        }
        return conv_update(x, pool, weight, bias, silu=activation == "silu", **at)

    return _in_slots(run, pool, read_slots, write_slots, layer, null_slot)


def decode(
    pool: Array,
    raw: Raw,
    read_slots: Array,
    write_slots: Array | None,
    layer: Any,
    options: Options,
    qkv: Array | None = None,
) -> tuple[Array, Array]:
    """`serving.decode` on a pool of states. The kernel reads q, k and v where they lie in qkv [B, D], if that is
    given."""
    from pallas_kernels.decode import step

    one, common = _one_token(raw), _rule(raw, options)

    def run(pool, read: Array, write: Array, layer: Any, null_slot: int | None):
        at: dict[str, Any] = {"read_slots": read, "write_slots": write[:, None]}
        at |= {"layer": layer, "null_slot": null_slot}
        if qkv is None:
            o, pool = step.step(*one[:5], pool, **common, **at)
        else:
            Hk, HV, K = options.dims.Hk, options.dims.HV, options.dims.K
            at |= {"heads": (Hk, Hk, HV), "first": step.Channels(k=Hk * K, v=2 * Hk * K)}
            x = qkv[:, None]
            o, pool = step.step_of_channels(x, x, x, one.a, one.b, pool, **common, **at)
        return o[:, 0], pool

    return _in_slots(run, pool, read_slots, write_slots, layer, options.null_slot)


def _in_slots(
    run: Callable[..., tuple[Array, Array]],
    pool: Array,
    read_slots: Array,
    write_slots: Array | None,
    layer: Any,
    null_slot: int | None,
) -> tuple[Array, Array]:
    """run(pool, read, write, layer, null_slot), a kernel that reads and writes slots at once: outputs and the pool.

    Where a request writes what another reads, it runs on a pool of all states that are read.
    """
    numbers = _int32(read_slots, pool)
    if write_slots is None:
        return run(pool, numbers, numbers, layer, null_slot)
    read, write = slots.addresses(pool, read_slots, write_slots, null_slot, layer)

    def in_place(pool):
        return run(pool, numbers, _int32(write_slots, pool), layer, null_slot)

    def read_first(pool):
        rows = jnp.arange(read_slots.shape[0], dtype=jnp.int32)
        rows = jnp.where(read.is_slot, rows, slots.BEYOND)
        o, states = run(slots.take(pool, read), rows, rows, None, None)
        return o, slots.put(pool, write, states)

    return lax.cond(_writes_where_another_reads(read, write), read_first, in_place, pool)


def _writes_where_another_reads(read: Address, write: Address) -> Array:
    same = (write.slot[:, None] == read.slot[None, :]) & write.is_slot[:, None]
    return jnp.any(same & ~jnp.eye(same.shape[0], dtype=bool))


def verify(
    pool: Array,
    raw: Raw,
    start: Address,
    after: Address,
    num_tokens: Array | None,
    parents: Array | None,
    options: Options,
) -> tuple[Array, Array]:
    """`serving.verify` on a pool with a state for each token. No request reads what another writes."""
    from pallas_kernels.decode.step import step

    at: dict[str, Any] = {"read_slots": start.slot, "write_slots": after.slot, "layer": start.layer}
    if options.dims.T > 1:  # one token alone follows no other
        at["parents"] = _int32_or_none(parents)
    return step(*raw[:5], pool, **_rule(raw, options), **at, num_tokens=_int32_or_none(num_tokens))


def _int32_or_none(x: Array | None) -> Array | None:
    return None if x is None else x.astype(jnp.int32)


def decode_on_ring(
    pool: RingPool, raw: Raw, numbers: Array, layer: Any, options: Options
) -> tuple[Array, RingPool]:
    """`serving.decode` on a `RingPool`, without write_slots."""
    from pallas_kernels.decode import ring_step

    o, *after = ring_step.ring_step(
        *_one_token(raw)[:5],
        *pool[:5],
        read_slots=_int32(numbers, pool),
        drafts=None,
        layer=layer,
        null_slot=options.null_slot,
        **_rule(raw, options),
    )
    return o[:, 0], RingPool._make((*after, pool.parents))


def verify_on_ring(
    pool: RingPool,
    raw: Raw,
    at: Address,
    num_accepted: Array,
    num_tokens: Array | None,
    parents: Array | None,
    options: Options,
) -> tuple[Array, RingPool]:
    """`serving.verify` on a `RingPool`. Where T more tokens find no room, the accepted ones are flushed first.

    Parents are those of the new tokens. Of the last call's, the first num_accepted in the ring stay, or all that are
    left there.
    """
    from pallas_kernels.decode import ring_drafts, ring_step

    T, rule = options.dims.T, _rule(raw, options)
    num_tokens, accepted = (None if x is None else x.astype(jnp.int32) for x in (num_tokens, num_accepted))
    if ring_drafts.check_supported(*raw[:3], *pool[:3], kv_layout=rule["kv_layout"]) is None:
        del rule["kv_layout"]
        spans: dict[str, Any] = {"accepted": accepted, "num_tokens": num_tokens, "layer": at.layer}
        spans["parents"] = _int32_or_none(parents) if T > 1 else None  # one token alone follows no other
        o, *arrays = ring_drafts.ring_drafts(*raw[:5], *pool[:5], read_slots=at.slot, **spans, **rule)
        return o, RingPool._make((*arrays, pool.parents))
    arrays, outputs = list(pool[:5]), []
    for t in range(0, T, ring_step.MAX_TOKENS):
        some = slice(t, t + ring_step.MAX_TOKENS)
        o, *arrays = ring_step.ring_step(
            *(x[:, some] for x in raw[:5]),
            *arrays,
            drafts=ring_step.Drafts(T, t),
            read_slots=at.slot,
            accepted=None if t else accepted,
            num_tokens=None if num_tokens is None else num_tokens - t,
            layer=at.layer,
            **rule,
        )
        outputs.append(o)
    o = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, 1)
    return o, RingPool._make((*arrays, pool.parents))


Tokens = tuple[Array, Array, Array, Array | None, Array | None]
"""q, k, v, g and beta of packed rows."""


class PromptOptions(NamedTuple):
    """Static options of a call of `prefill`."""

    scale: float
    use_qk_l2norm: bool
    state_layout: str
    null_slot: int | None


def take_prompts(
    dims: Dims,
    tokens: Tokens,
    cu_seqlens: Any,
    pool: Any,
    options: PromptOptions,
    chunk_size: int,
    implementation: str | None,
) -> bool:
    """Whether a call of `serving.prefill` runs by kernels that read and write the states of a pool themselves.

    Where it does not, `gated_delta_rule` runs on states that are taken out of the pool.

    Raises:
      NotImplementedError: the named implementation of the rule cannot run this call, with the reason.
    """
    from pallas_kernels.forward import rule

    shape = (dims.N, *pool.shape[-3:])
    initial = jax.ShapeDtypeStruct(shape, accumulation_dtype(*tokens, pool))
    arrays = RuleArrays(*tokens, initial_state=initial, cu_seqlens=cu_seqlens, segment_ids=None)
    call = options.scale, options.state_layout, chunk_size, implementation
    by_kernels = ops.check_call(arrays, *call)[2] == "mosaic_gpu"
    return by_kernels and not _varies(pool) and rule.check_pool(dims, pool, options.scale) is None


def prefill(
    options: PromptOptions,
    pool: Array,
    tokens: Tokens,
    cu_seqlens: Array,
    read_slots: Array,
    write_slots: Array | None,
    has_initial_state: Array | None,
    layer: Any,
) -> tuple[Array, Array]:
    """`serving.prefill` on a pool of states. It cannot be differentiated."""
    from pallas_kernels.forward import rule
    from pallas_kernels.work.slots import PoolStates

    write = None if write_slots is None else _int32(write_slots, pool)
    numbers = (_int32(read_slots, pool), write, has_initial_state)
    states = PoolStates.of(pool, *numbers, null_slot=options.null_slot, layer=layer)
    o, places, _ = rule.forward(
        RuleArrays(*tokens, states, cu_seqlens, None),
        scale=options.scale,
        use_qk_l2norm=options.use_qk_l2norm,
        state_layout=options.state_layout,
    )
    return o, places.reshape(pool.shape)
