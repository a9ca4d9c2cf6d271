"""The short convolution over a pool of its states, for prompts, for one token and for drafts.

A slot of the pool holds the last W - 1 inputs of a request, [D, W - 1], oldest first. A model keeps such a pool
beside that of its recurrent states and gives both the same slots. Rejected drafts are then dropped from both alike.
"""

from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from gdn_jax.parts import conv
from gdn_jax.serving import shards
from gdn_jax.serving.arguments import check_pool, check_sequences
from gdn_jax.serving.call import At, Spans
from gdn_jax.serving.slots import Indices
from gdn_jax.serving.windows import Channels, WindowPool
from gdn_jax.shapes import check_array

Windows = Float[Array, "slots *state"]


def causal_conv1d(
    x: Float[Array, "B T D"],
    cu_seqlens: Integer[Array, " N1"] | Integer[np.ndarray, " N1"],
    pool: Windows,
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    read_slots: Indices,
    write_slots: Indices | None = None,
    has_initial_state: Bool[Array, " N"] | Bool[np.ndarray, " N"] | None = None,
    activation: str | None = "silu",
    null_slot: int | None = None,
    layer: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], Windows]:
    """The convolution of packed sequences, pieces of prompts, whose states lie in a pool, which is donated.

    Args:
      x: inputs [1, T, D], floating.
      cu_seqlens: [N + 1], as for `prefill`; a sequence may be shorter than the filter, or empty.
      pool: the last inputs of every slot [slots, D, W - 1], any floating dtype.
      weight, bias, activation: as for `gdn_jax.causal_conv1d`.
      read_slots, write_slots, has_initial_state, null_slot, layer: as for `prefill`.
      implementation: as for `decode`; there are no kernels for prompts.

    Returns:
      y [1, T, D] in x's dtype, 0 at padding, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: the kernels are named.

    Source: vLLM's `causal_conv1d_fn`; pass 1 of Modular's two-pass prefill.
    """
    check_array("x", x, (1, None, None), "1, T, D")
    windows = _checked(x, pool, weight, layer, null_slot)
    check_sequences(cu_seqlens, x.shape[1], has_initial_state)
    at = At(read_slots, write_slots, layer, has_initial_state)
    at.check(windows, "N", cu_seqlens.shape[0] - 1)
    tokens = Channels(x, weight, bias, cu_seqlens.astype(np.int32))  # which may be narrow or unsigned
    windows = windows.by(implementation, tokens, at)
    return shards.left_to_xla((WindowPool.prefill, activation), windows, tokens, at)


def causal_conv1d_update(
    x: Float[Array, "B D"],
    pool: Windows,
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    read_slots: Indices,
    write_slots: Indices | None = None,
    activation: str | None = "silu",
    null_slot: int | None = None,
    layer: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B D"], Windows]:
    """One token of every request. The pool is donated.

    Args:
      x: the new inputs [B, D], floating.
      pool, weight, bias, activation: as for `causal_conv1d`.
      read_slots, write_slots, null_slot, layer, implementation: as for `decode`. Two implementations leave the same
        bits in the pool; their y differs by rounding.

    Returns:
      y [B, D] in x's dtype, 0 at padding, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: the named implementation cannot run this call, with the reason.
    """
    check_array("x", x, (None, None), "B, D")
    windows, at = _checked(x, pool, weight, layer, null_slot), At(read_slots, write_slots, layer)
    at.check(windows, "B", x.shape[0])
    conv.check(x[:, None], weight, bias, activation)
    tokens = Channels(x, weight, bias)
    windows = windows.by(implementation, tokens, at)
    run = shards.by_heads if windows.is_opaque else shards.left_to_xla
    return run((type(windows).decode, activation), windows, tokens, at)


def causal_conv1d_verify(
    x: Float[Array, "N T D"],
    pool: Windows,
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    state_slots: Indices,
    num_accepted_tokens: Indices,
    num_tokens: Indices | None = None,
    parents: Indices | None = None,
    activation: str | None = "silu",
    null_slot: int | None = None,
    layer: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "N T D"], Windows]:
    """T = 1 + gamma tokens of every request, with a state after each. The pool is donated.

    Beside a `RingPool`, whose requests have one slot, this pool still has a slot a token: its states are small.

    Args:
      x: the new inputs [N, T, D], floating.
      pool, weight, bias, activation: as for `causal_conv1d`.
      state_slots: [N, T] integers. These, num_accepted_tokens, num_tokens, parents, null_slot and layer are as for
        `verify`: a token of a tree sees those on its own path.
        Where fewer tokens come than were accepted, `copy_slots` first brings the state to one of their slots.
      implementation: as for `decode`; there are no kernels for drafts.

    Returns:
      y [N, T, D] in x's dtype, 0 at padding, and the pool, in which all but the written slots keep their bits.

    Raises:
      ValueError: an argument is wrong; names it, what was expected and what came.
      NotImplementedError: the kernels are named.
    """
    check_array("x", x, (None, None, None), "N, T, D")
    windows = _checked(x, pool, weight, layer, null_slot)
    spans = Spans(state_slots, num_accepted_tokens, num_tokens, parents, layer)
    spans.check(windows, "N, T", *x.shape[:2])
    tokens = Channels(x, weight, bias)
    windows = windows.by(implementation, tokens, spans)
    return shards.left_to_xla((WindowPool.verify, activation), windows, tokens, spans)


def _checked(x, pool, weight, layer, null_slot: int | None) -> WindowPool:
    check_array("weight", weight, (x.shape[-1], None), "D, W")
    check_pool(pool, (x.shape[-1], weight.shape[1] - 1), "D, W - 1", layer)
    return WindowPool(pool, null_slot=null_slot)
