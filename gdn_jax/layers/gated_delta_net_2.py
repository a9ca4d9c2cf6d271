"""Gated DeltaNet-2: an erase strength for each key channel, and a write strength for each value channel."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array

from gdn_jax.gates import write_strength
from gdn_jax.layers import blocks
from gdn_jax.layers.channel_decay import ChannelDecayMixer, ChannelMixer
from gdn_jax.layers.mixer import MixerConfig, MixerCosts, recurrent_costs
from gdn_jax.layers.options import value_width
from gdn_jax.styles import TEAL, Style


class GatedDeltaNet2(ChannelDecayMixer):
    """The Gated DeltaNet-2 token mixer.

        S <- Diag(exp(g)) S;   S <- S + k (w * v - (b * k)^T S)^T;   o = S^T q / sqrt(K)
        b = sigmoid(x Wb), doubled with allow_neg_eigval          for each key channel
        w = sigmoid(x Ww)                                         for each value channel

    `layers.channel_decay` has the equations of q, k, v, g and y. If b and w are the same single number for a head,
    the layer is `KimiDeltaAttention`.

    Args: as for `ChannelDecayMixer`.

    Parameters: as for `ChannelDecayMixer`, and b_proj [hidden_size, num_v_heads * head_dim] and w_proj
      [hidden_size, num_v_heads * V], which have biases with a write_start.

    Raises:
      ValueError: as `ChannelDecayMixer`.

    Source: Hatamizadeh, Choi, Kautz, "Gated DeltaNet-2" (arXiv 2605.22791); fla's layer of that name. There the
      output gate has a bias, and the decay and b belong to key heads; here each output head has its own.
    """

    b_proj: blocks.Projection
    w_proj: blocks.Projection

    def _make_strengths(self, linear: Callable[[int, int], nnx.Linear]) -> None:
        self.b_proj = linear(self.hidden_size, self.num_v_heads * self.head_dim)
        self.w_proj = linear(self.hidden_size, self.num_v_heads * self.head_v_dim)

    def strength_projections(self) -> tuple[blocks.Projection, ...]:
        """See `RecurrentMixer.strength_projections`."""
        return self.b_proj, self.w_proj

    def _logits(self, *logits: Array) -> tuple[Array, Array | None]:
        b, w = (y.reshape(*y.shape[:2], self.num_v_heads, -1) for y in logits)
        return b, w

    def strengths(self, b: Array, w: Array | None) -> tuple[Array | None, Array | None, Array | None]:
        """See `ChannelDecayMixer.strengths`: erase strengths of key channels, write strengths of value channels."""
        assert w is not None
        return None, write_strength(b, allow_neg_eigval=self.allow_neg_eigval), write_strength(w)


@dataclasses.dataclass(frozen=True)
class EraseAndWrite(ChannelMixer):
    """`GatedDeltaNet2`."""

    name: ClassVar = "gated_delta_net_2"
    layer: ClassVar = GatedDeltaNet2

    def costs(self, config: Any, L: int) -> MixerCosts:
        """See `MixerConfig.costs`: decays and both strengths of each channel are kept."""
        K = config.head_dim
        return recurrent_costs(config, L, gates=2 * K + value_width(K, config.expand_v))


MIXERS: dict[str, MixerConfig] = {
    "gated_delta_net_2": EraseAndWrite(style=Style(TEAL, "p", "full", "-", "Gated DeltaNet-2"))
}
