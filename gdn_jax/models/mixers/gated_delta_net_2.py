"""Gated DeltaNet-2 as the mixer of a model."""

import dataclasses
from typing import Any, ClassVar

from gdn_jax.layers import GatedDeltaNet2, RecurrentMixer
from gdn_jax.layers.options import value_width
from gdn_jax.models.mixers.kimi_delta_attention import ChannelMixer
from gdn_jax.models.mixers.mixer import MixerCosts, recurrent_costs


@dataclasses.dataclass(frozen=True)
class EraseAndWrite(ChannelMixer):
    """`GatedDeltaNet2`."""

    name: ClassVar[str] = "gated_delta_net_2"
    layer: ClassVar[type[RecurrentMixer]] = GatedDeltaNet2

    def costs(self, config: Any, L: int) -> MixerCosts:
        """See `Mixer.costs`: decays and both strengths of each channel are kept."""
        K = config.head_dim
        return recurrent_costs(config, L, gates=2 * K + value_width(K, config.expand_v))
