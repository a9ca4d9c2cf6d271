"""Gated linear attention, in the layer of KDA, as the mixer of a model."""

import dataclasses
from typing import Any, ClassVar

from gdn_jax.layers import GatedLinearAttention, RecurrentMixer
from gdn_jax.models.mixers.kimi_delta_attention import ChannelMixer
from gdn_jax.models.mixers.mixer import Start


@dataclasses.dataclass(frozen=True)
class GatedLinear(ChannelMixer):
    """`GatedLinearAttention`."""

    name: ClassVar[str] = "gla"
    layer: ClassVar[type[RecurrentMixer]] = GatedLinearAttention

    def start(self, config: Any, time_step: float) -> Start | None:
        """See `Mixer.start`: nothing is erased."""
        start = super().start(config, time_step)
        return None if start is None else start._replace(beta=0.0)
