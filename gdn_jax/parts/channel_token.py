"""The step of generation with a decay of each channel: one token of every row on states that kernels change in place.

It is to Kimi Delta Attention what `parts.token.mix_token` is to the gated delta rule.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import token_op, usable


class ChannelToken(NamedTuple):
    """Arrays that `mix_channel_token` takes."""

    channels: Float[Array, "B C"]
    """Products of the layer's input: q, k and v before the convolution, then any others."""
    f: Float[Array, "B F"]
    """Array in which the raw input of each channel's decay lies, [HV, K]; may be `channels` itself."""
    b: Float[Array, "B G"]
    """Array in which the raw input of the strengths lies; may be `channels` itself."""
    weight: Float[Array, "D W"] | None
    """Filters of the convolution, of the D channels of q, k and v; None where these are behind it."""
    bias: Float[Array, " D"] | None
    A_log: Float[Array, " HV"] | None
    dt_bias: Float[Array, "HV K"]
    conv_state: Float[Array, "B D W1"]
    """Inputs before the token, oldest first."""
    state: Float[Array, "B HV K V"]
    """States of the rule before the token."""


class ChannelGates(NamedTuple):
    """The heads and gates of a layer, besides its arrays."""

    H: int
    """Heads of q, and of k."""
    f: int
    """First channel of the decays in their array."""
    b: int
    """First channel of the strengths in theirs."""
    lower_bound: float | None
    """The strongest log decay of the bounded gate; None for the other gate, see `channel_log_decay`."""
    allow_neg_eigval: bool = False
    """Whether beta = 2 sigmoid(b)."""

    @property
    def places(self) -> tuple[int, int, int]:
        """See `delta_layer.Gates.places`."""
        return self.H, self.f, self.b

    def kernel_decay(self) -> Any:
        """See `delta_layer.Gates.kernel_decay`."""
        from pallas_kernels.token.decays import ChannelDecay

        return ChannelDecay(self.lower_bound)


def takes(token: ChannelToken, gates: ChannelGates, implementation: str | None) -> bool:
    """Whether the kernels take a call of `mix_channel_token`, from the shapes of its arrays.

    Args:
      token: arrays for which `parts.kernels.is_whole` is true.
      implementation: as for `parts.token_step.takes`.
    """
    from pallas_kernels.decode import conv_update, step

    if any(x is not None and x.dtype == jnp.float64 for x in token):
        return False
    (B, HV, K, V), dtype = token.state.shape, token.channels.dtype
    q, v = (jax.ShapeDtypeStruct((B, n, width), dtype) for n, width in ((gates.H, K), (HV, V)))
    reason = None
    if token.weight is not None:
        reason = conv_update.check_supported(token.channels, token.conv_state, token.weight, token.bias)
    reason = reason or step.check_supported(q, q, v, token.state)
    return usable(implementation, part="the step of a token", reason=reason)


def mix_channel_token(
    token: ChannelToken, gates: ChannelGates
) -> tuple[Float[Array, "B HV V"], Float[Array, "B D W1"], Float[Array, "B HV K V"]]:
    """One token of every row by two kernels, or one behind the convolution, which change states where they lie.

        [q | k | v] = silu(conv(channels));   q and k to unit length;   beta = sigmoid(b)
        g = channel_log_decay(f, A_log, dt_bias, lower_bound)
        S <- Diag(exp(g)) S;   u = beta (v - k^T S);   S <- S + k u^T;   o = K^(-1/2) q^T S

    A loop that carries the states has them changed where they lie; elsewhere XLA copies them.

    Args:
      token: arrays for which `takes` is true.
      gates: heads and gates of the layer.

    Returns:
      o in the channels' dtype, and both states after the token in their dtypes. Numerics: float32, rounded behind the
      convolution and at the end.
    """
    return _mix(gates, token)


def _by_kernels(gates: ChannelGates, token: ChannelToken):
    from pallas_kernels.device.launch import compiled

    return compiled(_run, None)(gates, token)  # by itself: layers of a model share it


def _run(gates: ChannelGates, token: ChannelToken):
    from pallas_kernels.decode.channel_step import channel_step
    from pallas_kernels.decode.conv_update import conv_update
    from pallas_kernels.decode.step import Channels

    everywhere: dict[str, Any] = {"read_slots": None, "write_slots": None}
    qkv, conv_state = token.channels, token.conv_state
    if token.weight is not None:
        qkv, conv_state = conv_update(qkv, conv_state, token.weight, token.bias, **everywhere)
    (HV, K), H = token.state.shape[1:3], gates.H
    options: dict[str, Any] = {
        "A_log": token.A_log,
        "dt_bias": token.dt_bias,
        "lower_bound": gates.lower_bound,
    }
    options |= {"heads": (H, H, HV), "first": Channels(0, H * K, 2 * H * K, gates.f, gates.b)}
    options |= {"scale": K**-0.5, "allow_neg_eigval": gates.allow_neg_eigval} | everywhere
    qkv, f, b = qkv[:, None], token.f[:, None], token.b[:, None]
    o, state = channel_step(qkv, qkv, qkv, f, b, token.state, **options)
    return o[:, 0], conv_state, state


_mix = token_op(_by_kernels)
