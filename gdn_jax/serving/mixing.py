"""A token of every row from the products of a layer's input: the convolution and the rule by their two kernels."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.serving.call import At, Call, interpreter
from gdn_jax.serving.states import StateKernels
from gdn_jax.serving.tokens import Packed
from gdn_jax.serving.windows import Channels, WindowKernels
from gdn_jax.shapes import Convolution


def kernel() -> Any:
    """The module of the rule's kernel."""
    from pallas_kernels.decode import step

    return step


def reason(
    channels: Float[Array, "B C"], H: int, convolution: Convolution, state: Float[Array, "S HV K V"]
) -> str | None:
    """Why the kernels cannot take a call of `mix_token`, on any device; None if they can."""
    from pallas_kernels.decode import conv_update, step

    if jnp.float64 in (channels.dtype, *(x.dtype for x in jax.tree.leaves((convolution, state)))):
        return "an array is float64; the kernels compute in float32"
    (_, HV, K, V), B, dtype = state.shape, len(channels), channels.dtype
    q, v = (jax.ShapeDtypeStruct((B, n, width), dtype) for n, width in ((H, K), (HV, V)))
    return conv_update.check_supported(channels, *convolution) or step.check_supported(q, q, v, state)


def mix_token(
    call: Call,
    H: int,
    gates: Sequence[tuple[Float[Array, "B _"], int]],
    channels: Float[Array, "B C"],
    convolution: Convolution,
    A_log: Float[Array, " HV"] | None,
    dt_bias: Float[Array, "HV *K"],
    state: Float[Array, "S HV K V"],
    slots: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B HV V"], Float[Array, "S D W1"], Float[Array, "S HV K V"]]:
    """One token of every row by two kernels, which change states where they lie.

        [q | k | v] = silu(conv(channels));   q and k to unit length;   beta = sigmoid(b)
        S <- exp(g) S, of each head or key channel;   u = beta (v - k^T S);   S <- S + k u^T;   o = scale q^T S

    A loop that carries the states has them changed where they lie; elsewhere XLA copies them.

    Args:
      call: options.
      H: heads of q, and of k, which are the first channels; heads of v follow.
      gates: arrays in which the raw inputs of decays, [HV] or [HV, K], and of strengths lie, and their first channels
        there. They may be `channels` itself.
      channels: products of the layer's input: q, k and v before the convolution, then any others. `reason` is None.
      convolution: the short convolution of the channels of q, k and v.
      A_log, dt_bias: of the decays.
      state: states of the rule before the token.
      slots: where each row's states of the convolution and the rule are; -1: nowhere, and o is 0. None: B = S, in
        order.

    Returns:
      o in the channels' dtype, and both states after the token in their dtypes. Numerics: float32, rounded after the
      convolution and at the end.
    """
    from pallas_kernels.device.launch import compiled

    arrays, first = zip(*gates, strict=True)
    run = compiled(_run, interpreter.get(), static=3)  # by itself: layers of a model share it
    return run(call, H, first, arrays, channels, convolution, A_log, dt_bias, state, slots)


def _run(call, H, first, gates, channels, convolution, A_log, dt_bias, state, slots):
    from pallas_kernels.decode import step

    at, filters = At(slots), (convolution.filters, convolution.bias)
    qkv, windows = WindowKernels(convolution.state).decode("silu", Channels(channels, *filters), at)
    (HV, K), qkv = state.shape[1:3], qkv[:, None]
    decay, strength = (x[:, None] for x in gates)
    places = step.Channels(0, H * K, 2 * H * K, *first)
    tokens = Packed(qkv, qkv, qkv, decay, strength, None, A_log, dt_bias, (H, H, HV), places)
    o, states = StateKernels(state).decode(call, tokens, at)
    return o, windows.arrays, states.arrays
