"""Gated DeltaProduct as the mixer of a model."""

import dataclasses
from typing import Any, ClassVar

from gdn_jax.gates import MAX_RATE
from gdn_jax.layers import GatedDeltaProduct, RecurrentMixer
from gdn_jax.layers.options import check_positive
from gdn_jax.models.mixers.mixer import (
    MIDDLE_STEP,
    Mixer,
    MixerCosts,
    Start,
    recurrent_costs,
    strength_at_start,
)


@dataclasses.dataclass(frozen=True)
class DeltaProduct(Mixer):
    """`GatedDeltaProduct`.

    Fields:
      num_householder: steps of a token.
    """

    name: ClassVar[str] = "gated_delta_product"
    layer: ClassVar[type[RecurrentMixer]] = GatedDeltaProduct
    num_householder: int = 2

    def __post_init__(self):
        check_positive(num_householder=self.num_householder)

    def costs(self, config: Any, L: int) -> MixerCosts:
        """See `Mixer.costs`: a row has as many tokens as steps."""
        return recurrent_costs(config, L, steps=self.num_householder)

    def splits_tokens(self, config: Any) -> bool:
        """See `Mixer.splits_tokens`."""
        del config
        return True

    def start(self, config: Any, time_step: float) -> Start | None:
        """See `Mixer.start`: a token erases with every step, as much as one step of this strength."""
        left = (1 - strength_at_start(config) / config.head_dim) ** self.num_householder
        return Start(-time_step * MAX_RATE / 2 * MIDDLE_STEP, config.head_dim * (1 - left))
