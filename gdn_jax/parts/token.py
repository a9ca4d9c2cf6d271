"""One token of every row on states that kernels change in place: the step of generation.

`mix_token` is the convolution and the rule from the products of a layer's input, which its two kernels read where
they lie. On a mesh, and without a convolution, `parts.token_step` is the rule alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import token_op, usable


class Heads(NamedTuple):
    """Places at which `mix_token` finds the parts of a token."""

    H: int
    """Heads of q, and of k, which are the first channels; those of v follow."""
    a: int
    """First channel of a in the array of the gates."""
    b: int


class HeadGates(NamedTuple):
    """The heads and gates of a layer, besides its arrays."""

    heads: Heads
    allow_neg_eigval: bool = False
    """Whether beta = 2 sigmoid(b)."""

    @property
    def places(self) -> tuple[int, int, int]:
        """See `delta_layer.Gates.places`."""
        return self.heads

    def kernel_decay(self) -> Any:
        """See `delta_layer.Gates.kernel_decay`."""
        from pallas_kernels.token.decays import HeadDecay

        return HeadDecay()


class Token(NamedTuple):
    """Arrays that `mix_token` takes."""

    channels: Float[Array, "B C"]
    """Products of the layer's input: q, k and v before the convolution, then any others."""
    gates: Float[Array, "B G"]
    """Array in which a and b lie; may be `channels` itself."""
    weight: Float[Array, "D W"]
    """Filters of the convolution, of the D channels of q, k and v."""
    bias: Float[Array, " D"] | None
    A_log: Float[Array, " HV"]
    dt_bias: Float[Array, " HV"]
    conv_state: Float[Array, "B D W1"]
    """Inputs before the token, oldest first."""
    state: Float[Array, "B HV K V"]
    """States of the rule before the token."""


def takes(token: Token, heads: Heads, implementation: str | None) -> bool:
    """Whether the kernels take a call of `mix_token`, from the shapes of its arrays, for which `is_whole` is true."""
    from pallas_kernels.decode import conv_update, step

    if any(x is not None and x.dtype == jnp.float64 for x in token):
        return False
    (B, HV, K, V), dtype = token.state.shape, token.channels.dtype
    q, v = (jax.ShapeDtypeStruct((B, n, width), dtype) for n, width in ((heads.H, K), (HV, V)))
    reason = conv_update.check_supported(token.channels, token.conv_state, token.weight, token.bias)
    reason = reason or step.check_supported(q, q, v, token.state)
    return usable(implementation, part="the step of a token", reason=reason)


def mix_token(
    token: Token, heads: Heads, *, allow_neg_eigval: bool = False
) -> tuple[Float[Array, "B HV V"], Float[Array, "B D W1"], Float[Array, "B HV K V"]]:
    """One token of every row by two kernels, which change both states where they lie.

        [q | k | v] = silu(conv(channels))

    and `token_step` of that. A loop that carries the states has them changed where they lie; elsewhere XLA copies
    them.

    Args:
      token: arrays for which `is_whole` and `takes` are true.
      heads: where the parts lie.
      allow_neg_eigval: beta = 2 sigmoid(b).

    Returns:
      o in the channels' dtype, and both states after the token in their dtypes. Numerics: float32, rounded behind the
      convolution and at the end.
    """
    return _mix_token((heads, allow_neg_eigval), token)


def _mix_by_kernels(static, token: Token):
    from pallas_kernels.decode.conv_update import conv_update
    from pallas_kernels.decode.step import Channels, step_of_channels

    heads, allow_neg_eigval = static
    everywhere: dict[str, Any] = {"read_slots": None, "write_slots": None}
    filters = token.weight, token.bias
    qkv, conv_state = conv_update(token.channels, token.conv_state, *filters, **everywhere)
    (HV, K), H = token.state.shape[1:3], heads.H
    options: dict[str, Any] = {"A_log": token.A_log, "dt_bias": token.dt_bias, "scale": K**-0.5}
    options |= {"heads": (H, H, HV), "first": Channels(0, H * K, 2 * H * K, heads.a, heads.b)}
    qkv, gates = qkv[:, None], token.gates[:, None]
    options |= {"allow_neg_eigval": allow_neg_eigval} | everywhere
    o, state = step_of_channels(qkv, qkv, qkv, gates, gates, token.state, **options)
    return o[:, 0], conv_state, state


_mix_token = token_op(_mix_by_kernels)
