"""A layer of the delta rule, with a decay of each head or channel, for one token of one row, in one kernel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from gdn_jax.parts.kernels import is_whole, token_op, usable
from gdn_jax.shapes import Convolution, LayerScales


class Gates(NamedTuple):
    """The heads and gates of a layer, besides its arrays: decays of heads or of key channels, as dt_bias is."""

    H: int
    """Heads of q, and of k, which are the first channels; heads of v follow."""
    decay: int
    """First channel of the raw inputs of the decays."""
    strength: int
    """First channel of the raw inputs of the strengths."""
    allow_neg_eigval: bool = False
    """Whether beta = 2 sigmoid(b)."""
    lower_bound: float | None = None
    """The strongest log decay of the bounded gate of channels; None for the other gate, see `channel_log_decay`."""


class Layer(NamedTuple):
    """Arrays of `delta_layer`, but for the stream."""

    norm: Float[Array, " D"]
    """Weight of the norm of the stream, float32."""
    inputs: Float[Array, "C D"]
    """Projections of q, k, v, the raw inputs of decays and strengths and, last, the gates of the output."""
    convolution: Convolution
    """The short convolution of q, k and v."""
    A_log: Float[Array, " HV"] | None
    dt_bias: Float[Array, "HV *K"]
    """The bias of each value head, or of each of its key channels."""
    state: Float[Array, "1 HV K V"]
    """States of the rule before the token."""
    output_norm: Float[Array, " V"]
    """Weight of the norm of each head, float32."""
    output: Float[Array, "D F"]
    """The output projection."""
    scales: LayerScales | None = None
    """Where both matrices are codes of E4M3: their scales, and the projections to decays and strengths, whose
    channels come after the gates of the output."""


class Options(NamedTuple):
    """Static arguments of `delta_layer`, besides its gates."""

    eps: float
    """Is added under the root of the norm of the stream."""
    output_eps: float
    """The same of the norm of each head."""
    activation: str
    """Its gate: "silu" or "sigmoid"."""


def _places(layer: Layer, gates: Gates):
    """Where the channels lie, as the kernel takes it."""
    from pallas_kernels.rows.delta_heads import Places

    (_, HV, K, V), H = layer.state.shape, gates.H
    return Places(0, H * K, 2 * H * K, gates.decay, gates.strength, layer.inputs.shape[0] - HV * V)


def kernel_decay(layer: Layer, gates: Gates):
    """The decay, as the kernel takes it."""
    from pallas_kernels.rows.delta_decays import ChannelDecay, HeadDecay

    return HeadDecay() if layer.dt_bias.ndim == 1 else ChannelDecay(gates.lower_bound)


def takes(x: Float[Array, "*S D"], layer: Layer, gates: Gates, implementation: str | None) -> bool:
    """Whether `delta_layer` takes a stream and a layer: one row, on one device."""
    arrays = x, layer.inputs, layer.output, layer.state, layer.convolution.state
    if x.size != x.shape[-1] or not usable(implementation) or not is_whole(*arrays):
        return False
    from pallas_kernels.rows.delta_layer import check_supported

    known = layer.inputs, layer.convolution, layer.state, layer.output, _places(layer, gates)
    return check_supported(x.reshape(1, -1), *known, kernel_decay(layer, gates), layer.scales) is None


@token_op
def delta_layer(
    x: Float[Array, "*S D"],
    y: Float[Array, "*P D"] | None,
    layer: Layer,
    gates: Gates,
    options: Options,
    ahead: Sequence[jax.Array] = (),
    words: Any = None,
) -> tuple[Float[Array, "*S D"], Float[Array, "P 1 D"], Float[Array, "1 C W1"], Float[Array, "1 HV K V"]]:
    """The stream s = x + y, and the layer's output for its norm, a token after others.

    A loop that carries the states has them changed where they lie; elsewhere XLA copies them.

    Args:
      x: residual stream, for which `takes` is true.
      y: what is added to it, or parts of that, [P, .., D]; None: nothing.
      layer, gates, options: the layer.
      ahead: arrays that the next kernels read first, see `pallas_kernels.device.ahead`.
      words: of the kernels before this one, see `parts.products.words_after`; None: words of its own.

    Returns:
      s in x's dtype; the output in parts, one for each value head, in the weight's dtype, of codes in the narrow
      projections'; the states of the
      convolution and of the rule. Numerics: float32; what passes through the convolution is rounded before it, and
      each part is.
    """
    from pallas_kernels.rows import delta_layer as kernels

    rule = kernels.Rule(kernel_decay(layer, gates), gates.allow_neg_eigval, *options[1:])
    arrays = layer.norm, layer.inputs, layer.convolution, layer.state, layer.output_norm, layer.output
    known: dict[str, Any] = dict(A_log=layer.A_log, dt_bias=layer.dt_bias, scales=layer.scales)
    known |= dict(eps=options.eps, places=_places(layer, gates), rule=rule, ahead=tuple(ahead), words=words)
    parts = None if y is None else y.reshape(-1, y.shape[-1])
    s, out, conv, state = kernels.delta_layer(x.reshape(1, -1), parts, *arrays, **known)
    return s.reshape(x.shape), out[:, None], conv, state
