"""One token of every row on states that kernels change in place: the step of generation and of a server.

`mix_token` is the convolution and the rule from the products of a layer's input, which its two kernels read where
they lie. On a mesh, and without a convolution, the rule alone is a kernel: the cache is then a pool of `serving`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.parts.kernels import token_op, usable
from gdn_jax.shapes import Convolution


@dataclasses.dataclass(frozen=True)
class Gates:
    """The heads and gates of a layer, besides its arrays.

    Fields:
      H: heads of q, and of k, which are the first channels; those of v follow.
      decay, strength: first channels of the raw inputs of decays and strengths in their arrays.
      allow_neg_eigval: whether beta = 2 sigmoid(b).
    """

    H: int
    decay: int
    strength: int
    allow_neg_eigval: bool = False

    def kernel_decay(self) -> Any:
        """The decay as the kernel of a whole layer takes it, see `pallas_kernels.token.decays`."""
        raise NotImplementedError

    def step(self) -> Callable[..., tuple[Array, Array]]:
        """The kernel of the rule, of `pallas_kernels.decode`."""
        raise NotImplementedError


class HeadGates(Gates):
    """A decay of each head, g = -exp(A_log) softplus(a + dt_bias)."""

    def kernel_decay(self) -> Any:
        """See `Gates.kernel_decay`."""
        from pallas_kernels.token.decays import HeadDecay

        return HeadDecay()

    def step(self) -> Callable[..., tuple[Array, Array]]:
        """See `Gates.step`."""
        from pallas_kernels.decode.step import step_of_channels

        return step_of_channels


@dataclasses.dataclass(frozen=True)
class ChannelGates(Gates):
    """Per-channel decay, g = channel_log_decay(f, A_log, dt_bias, lower_bound).

    Fields:
      lower_bound: the strongest log decay of the bounded gate; None for the other gate, see `channel_log_decay`.
    """

    lower_bound: float | None = None

    def kernel_decay(self) -> Any:
        """See `Gates.kernel_decay`."""
        from pallas_kernels.token.decays import ChannelDecay

        return ChannelDecay(self.lower_bound)

    def step(self) -> Callable[..., tuple[Array, Array]]:
        """See `Gates.step`."""
        from pallas_kernels.decode.channel_step import channel_step

        return partial(channel_step, lower_bound=self.lower_bound)


class Token(NamedTuple):
    """Arrays that `mix_token` takes."""

    channels: Float[Array, "B C"]
    """Products of the layer's input: q, k and v before the convolution, then any others."""
    decay: Float[Array, "B F"]
    """Array in which the raw inputs of the decays lie, [HV] or [HV, K]; may be `channels` itself."""
    strength: Float[Array, "B G"]
    """Array in which the raw inputs of the strengths lie; may be `channels` itself."""
    convolution: Convolution
    """The short convolution of the channels of q, k and v."""
    A_log: Float[Array, " HV"] | None
    dt_bias: Float[Array, "HV *K"]
    state: Float[Array, "S HV K V"]
    """States of the rule before the token."""
    slots: Int[Array, " B"] | None = None
    """Where each row's states of the convolution and the rule are; -1: nowhere, and o is 0. None: B = S, in order."""


def takes(token: Token, gates: Gates, implementation: str | None) -> bool:
    """Whether the kernels take a call of `mix_token`, from the shapes of its arrays, for which `is_whole` is true."""
    from pallas_kernels.decode import conv_update, step

    if any(x.dtype == jnp.float64 for x in jax.tree.leaves(token)):
        return False
    (_, HV, K, V), B, dtype = token.state.shape, len(token.channels), token.channels.dtype
    q, v = (jax.ShapeDtypeStruct((B, n, width), dtype) for n, width in ((gates.H, K), (HV, V)))
    reason = conv_update.check_supported(token.channels, *token.convolution)
    reason = reason or step.check_supported(q, q, v, token.state)
    return usable(implementation, step, part="the step of a token", reason=reason)


@token_op
def mix_token(
    token: Token, gates: Gates
) -> tuple[Float[Array, "B HV V"], Float[Array, "S D W1"], Float[Array, "S HV K V"]]:
    """One token of every row by two kernels, which change states where they lie.

        [q | k | v] = silu(conv(channels));   q and k to unit length;   beta = sigmoid(b)
        S <- exp(g) S, of each head or key channel;   u = beta (v - k^T S);   S <- S + k u^T;   o = K^(-1/2) q^T S

    A loop that carries the states has them changed where they lie; elsewhere XLA copies them.

    Args:
      token: arrays for which `takes` is true.
      gates: heads and gates of the layer.

    Returns:
      o in the channels' dtype, and both states after the token in their dtypes. Numerics: float32, rounded after the
      convolution and at the end.
    """
    from pallas_kernels.device.launch import compiled

    return compiled(_run, None)(gates, token)  # by itself: layers of a model share it


def _run(gates: Gates, token: Token):
    from pallas_kernels.decode.conv_update import conv_update
    from pallas_kernels.decode.step import Channels

    slots = token.slots
    qkv, conv_state = conv_update(token.channels, *token.convolution, read_slots=slots, write_slots=slots)
    (HV, K), H = token.state.shape[1:3], gates.H
    options: dict[str, Any] = {"A_log": token.A_log, "dt_bias": token.dt_bias, "scale": K**-0.5}
    options |= {"heads": (H, H, HV), "first": Channels(0, H * K, 2 * H * K, gates.decay, gates.strength)}
    options |= {"allow_neg_eigval": gates.allow_neg_eigval, "read_slots": slots}
    options |= {"write_slots": None if slots is None else slots[:, None]}
    qkv, decay, strength = qkv[:, None], token.decay[:, None], token.strength[:, None]
    o, state = gates.step()(qkv, qkv, qkv, decay, strength, token.state, **options)
    return o[:, 0], conv_state, state
