"""Kimi Delta Attention as the mixer of a model, and what it shares with other mixers that decay by channels."""

import dataclasses
from typing import Any, ClassVar

from gdn_jax.gates import MAX_RATE
from gdn_jax.layers import KimiDeltaAttention, RecurrentMixer
from gdn_jax.layers.channel_decay import HEAD_DIM, LEAST_RATE, check_gates
from gdn_jax.models.mixers.mixer import (
    MIDDLE_STEP,
    Mixer,
    MixerCosts,
    Start,
    recurrent_costs,
    strength_at_start,
)


@dataclasses.dataclass(frozen=True)
class ChannelMixer(Mixer):
    """A layer of `layers.channel_decay`.

    Fields:
      gate, lower_bound, gate_rank, output_gate_rank, output_gate_bias, use_A_log: as for `ChannelDecayMixer`.
    """

    gate: str = "softplus"
    lower_bound: float = -5.0
    gate_rank: int | str | None = HEAD_DIM
    output_gate_rank: int | str | None = HEAD_DIM
    output_gate_bias: bool = False
    use_A_log: bool = True

    def __post_init__(self):
        ranks = dict(gate_rank=self.gate_rank, output_gate_rank=self.output_gate_rank)
        check_gates(gate=self.gate, lower_bound=self.lower_bound, **ranks)

    def costs(self, config: Any, L: int) -> MixerCosts:
        """See `Mixer.costs`: a decay of each key channel is kept; products of numbers with decays are not counted."""
        return recurrent_costs(config, L, gates=config.head_dim)

    def splits_tokens(self, config: Any) -> bool:
        """See `Mixer.splits_tokens`."""
        del config
        return True

    def start(self, config: Any, time_step: float) -> Start | None:
        """See `Mixer.start`."""
        rate = -self.lower_bound if self.gate == "lower_bound" else (LEAST_RATE + MAX_RATE) / 2
        if self.gate == "softplus" and not self.use_A_log:
            rate = 1.0
        return Start(-time_step * rate * MIDDLE_STEP, strength_at_start(config))


@dataclasses.dataclass(frozen=True)
class KimiDelta(ChannelMixer):
    """`KimiDeltaAttention`."""

    name: ClassVar[str] = "kda"
    layer: ClassVar[type[RecurrentMixer]] = KimiDeltaAttention
