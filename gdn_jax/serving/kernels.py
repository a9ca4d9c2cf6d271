"""The pools' way to the kernels: which ones take a call, and how these take its tokens, slots and options.

The kernels normalise q and k, know padding, and change the pool in place. Those of decode and verify make the gates,
and a request's bits do not depend on the others. What is left for the pools is the cursors of rings, and requests
that write where others read: the kernels of a token read and write at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from gdn_jax.serving.call import At, Call, Spans, interpreter
from gdn_jax.serving.pools import Pool
from gdn_jax.serving.slots import Address
from gdn_jax.serving.tokens import Packed, Raw
from gdn_jax.shapes import STATE_LAYOUTS, accumulation_dtype


def step(call: Call, x: Packed) -> Callable[..., tuple[Array, Array]]:
    """The kernel of tokens on states, with the tokens and their gates."""
    from pallas_kernels.decode.apart_step import apart_step
    from pallas_kernels.decode.channel_step import channel_step
    from pallas_kernels.decode.erasure_step import erasure_step
    from pallas_kernels.decode.step import step_of_channels

    options: dict[str, Any] = x._asdict()
    erase_key, erase_strength, w = (options.pop(name) for name in ("erase_key", "erase_strength", "w"))
    if x.dt_bias.ndim == 1:
        return partial(step_of_channels, **options)
    options |= dict(lower_bound=call.lower_bound, bound=call.bound)
    if erase_key is not None:
        return partial(erasure_step, erase_key=erase_key, w=erase_strength, **options)
    return partial(channel_step, **options) if w is None else partial(apart_step, w=w, **options)


def ring_tokens(x: Raw) -> Any:
    """Tokens [B, T, ...] as the kernels of rings take them."""
    from pallas_kernels.decode.ring import ChannelTokens, Tokens

    a, b, w, A_log, dt_bias = x.gates_of_kernels()
    if not x.by_channels:
        return Tokens(*x[:3], a, b, A_log, dt_bias)
    A_log = jnp.zeros(a.shape[-2], jnp.float32) if A_log is None else A_log
    return ChannelTokens(*x[:3], a, b, w, A_log, dt_bias)


def check_supported(x: Raw, rings: Any, kv_layout: bool, *, by_tensor_cores: bool = False) -> str | None:
    """Why no kernel takes tokens on rings, or drafts on them by tensor cores; None if one does."""
    from pallas_kernels.decode import channel_ring, drafts_mma, vectors

    if not by_tensor_cores:
        kernel = channel_ring if x.by_channels else vectors
        return kernel.check_supported(x.q, x.k, x.v, rings, kv_layout=kv_layout)
    if x.by_channels:
        return "there is no kernel by tensor cores with per-channel decay"
    return drafts_mma.check_supported(x.q, x.v, rings, kv_layout=kv_layout) or device_reason(drafts_mma)


def options(call: Call, pool: Pool) -> dict[str, Any]:
    """Options that the kernels of decode and verify have in common."""
    return {
        "scale": call.scale,
        "use_qk_l2norm": call.use_qk_l2norm,
        "allow_neg_eigval": call.allow_neg_eigval,
        "kv_layout": pool.layout == STATE_LAYOUTS[0],
        "interpret": interpreter.get(),
    }


def in_slots(pool: Any, at: At, run: Callable[..., tuple[Array, Any]]) -> tuple[Array, Any]:
    """Calls run(pool, read, write, layer), a kernel that reads and writes slots at once: outputs and the pool.

    Where a request writes what another reads, it runs on copies of all slots that are read.
    """
    if at.are_rows:
        return run(pool, None, None, at.layer)
    numbers = int32(at.read_slots, pool)
    if at.write_slots is None:
        return run(pool, numbers, numbers, at.layer)
    read, write = pool.addresses(at)

    def in_place(pool):
        return run(pool, numbers, int32(at.write_slots, pool), at.layer)

    def on_copies(pool):
        return pool.on_copies(at, lambda copies, at: run(copies, at.read_slots, at.read_slots, None))

    same = (write.slot[:, None] == read.slot[None, :]) & write.is_slot[:, None]
    crossed = jnp.any(same & ~jnp.eye(same.shape[0], dtype=bool))
    if interpreter.get() is not None:  # outside of a compiled function
        return on_copies(pool) if crossed else in_place(pool)
    return lax.cond(crossed, on_copies, in_place, pool)


def int32(numbers: Any, pool: Pool) -> Int[Array, " B"]:
    """Slot numbers for a kernel. It makes padding of all that is outside the pool; int32 has to hold it for that."""
    return numbers if numbers.dtype == jnp.int32 else Address.of(numbers, pool.arrays).slot


def int32_or_none(x: Any) -> Array | None:
    return None if x is None else x.astype(jnp.int32)


def parents(raw: Raw, spans: Spans) -> Array | None:
    """Parents for a kernel, to which one token alone follows no other."""
    return int32_or_none(spans.parents) if raw.q.shape[1] > 1 else None


def reason(pool: Pool, kernel: Any, tokens: Raw | None = None, shared_bytes: int = 0) -> str | None:
    """Why a kernel, from its module, cannot change the pool in place on JAX's default device; None if it can.

    Args:
      tokens: of the rule, whose gates the kernel makes; None where there are none.
      shared_bytes: shared memory that this call needs; 0 where the kernel itself says what it needs.
    """
    if tokens is not None and accumulation_dtype(*tokens) != jnp.float32:
        return "a gate is float64; the kernels compute in float32"
    if varies(pool):
        return "the pool is a shard whose type names mesh axes; in shard_map the kernels need check_vma=False"
    return device_reason(kernel, shared_bytes)


def device_reason(kernel: Any, shared_bytes: int = 0) -> str | None:
    """Why JAX's default device cannot run a kernel, from its module; None if it can.

    Args:
      shared_bytes: as for `reason`.
    """
    from pallas_kernels.device import launch
    from pallas_kernels.device.needs import Needs

    needs = kernel.NEEDS | (Needs.LARGE if shared_bytes > launch.SMALL_MEMORY else Needs.NOTHING)
    return None if interpreter.get() is not None else launch.device_reason(needs)


def varies(pool: Pool) -> bool:
    """Whether JAX keeps in the pool's types the mesh axes that it varies over: it then refuses to let a kernel write
    into the pool."""
    return any(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(pool))
