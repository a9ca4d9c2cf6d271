"""Gated linear attention (GLA): a decay of each key channel and no correction, in the layer of KDA."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from gdn_jax.gates import write_strength
from gdn_jax.layers.channel_decay import ChannelMixer
from gdn_jax.layers.kimi_delta_attention import KimiDeltaAttention
from gdn_jax.layers.mixer import MixerConfig, Start
from gdn_jax.styles import OLIVE, Style


class GatedLinearAttention(KimiDeltaAttention):
    """Kimi Delta Attention without its correction, as a baseline: a write erases nothing.

        S <- Diag(exp(g)) S + beta k v^T;   o = S^T q / sqrt(K)

    Arguments, parameters and initial values are the same as in `KimiDeltaAttention`; allow_neg_eigval has no effect.
    The published layer has another gate, no convolution, and keys that are not normalised.

    Raises:
      ValueError: as `ChannelDecayMixer`.

    Source: the rule of Yang et al. 2023, "Gated Linear Attention" (arXiv 2312.06635).
    """

    def _logits(self, *logits: Array) -> tuple[Array, Array | None]:
        return jnp.full_like(logits[0], -jnp.inf), logits[0]

    def strengths(self, b: Array, w: Array | None) -> tuple[Array | None, Array | None, Array | None]:
        """See `ChannelDecayMixer.strengths`: nothing is erased; w is the write strength."""
        assert w is not None
        return None, write_strength(b), write_strength(w)


@dataclasses.dataclass(frozen=True)
class GatedLinear(ChannelMixer):
    """`GatedLinearAttention`."""

    name: ClassVar = "gla"
    layer: ClassVar = GatedLinearAttention

    def start(self, config: Any, time_step: float) -> Start | None:
        """See `MixerConfig.start`: nothing is erased."""
        start = super().start(config, time_step)
        return None if start is None else start._replace(beta=0.0)


MIXERS: dict[str, MixerConfig] = {
    "gla": GatedLinear(style=Style(OLIVE, "<", "none", (0, (5, 1)), "gated linear attention"))
}
