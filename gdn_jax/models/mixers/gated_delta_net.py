"""Gated DeltaNet as the mixer of a model, with any of the rules that it can have."""

import dataclasses
from typing import Any, ClassVar

from gdn_jax import rules
from gdn_jax.gates import MAX_RATE
from gdn_jax.layers import GatedDeltaNet, RecurrentMixer
from gdn_jax.layers.options import check_options, check_sizes
from gdn_jax.models.mixers.mixer import MIDDLE_STEP, Mixer, Start, strength_at_start

# Whether a rule decays, and whether it erases.
_FORGETS = {"gated_delta": (True, True), "delta": (False, True), "mamba2": (True, False)}


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetMixer(Mixer):
    """`GatedDeltaNet`; `ModelConfig.rule` is its rule."""

    name: ClassVar[str] = "gated_delta_net"
    layer: ClassVar[type[RecurrentMixer]] = GatedDeltaNet

    def check(self, config: Any) -> None:
        """See `Mixer.check`."""
        check_options(rule=config.rule, **config.options_of(check_sizes))

    def start(self, config: Any, time_step: float) -> Start | None:
        """See `Mixer.start`."""
        if config.rule not in _FORGETS:
            return None
        decays, erases = _FORGETS[config.rule]
        g = -time_step * MAX_RATE / 2 * MIDDLE_STEP if decays else 0.0
        return Start(g, strength_at_start(config) if erases else 0.0)

    def splits_tokens(self, config: Any) -> bool:
        """See `Mixer.splits_tokens`: the delta rules do."""
        return rules.find(config.rule).splits_tokens
