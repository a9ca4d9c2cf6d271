"""Kimi Delta Attention (KDA): the delta rule with per-channel decay and one write strength a head."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from flax import nnx
from jaxtyping import Array

from gdn_jax.gates import write_strength
from gdn_jax.layers import blocks
from gdn_jax.layers.channel_decay import ChannelDecayMixer, ChannelMixer
from gdn_jax.layers.mixer import MixerConfig
from gdn_jax.styles import MAROON, ROSE, WINE, Style


class KimiDeltaAttention(ChannelDecayMixer):
    """The Kimi Delta Attention token mixer.

        S <- Diag(exp(g)) S;   S <- S + beta k (v - k^T S)^T;   o = S^T q / sqrt(K)
        beta = sigmoid(x Wb + c), doubled with allow_neg_eigval

    `layers.channel_decay` has the equations of q, k, v, g and y.

    Args: as for `ChannelDecayMixer`.

    Parameters: as for `ChannelDecayMixer`, and b_proj [hidden_size, num_v_heads], with a bias c if there is a
      write_start.

    Raises:
      ValueError: as `ChannelDecayMixer`.

    Source: Kimi Team, "Kimi Linear" (arXiv 2510.26692), with the gate "softplus" and both ranks the width of a head.
      Ling-3.0 has the gate "lower_bound" and projections of full rank. In fla's layer of that name the output gate
      has a bias.
    """

    b_proj: blocks.Projection

    def _make_strengths(self, linear: Callable[[int, int], nnx.Linear]) -> None:
        self.b_proj = linear(self.hidden_size, self.num_v_heads)

    def strength_projections(self) -> tuple[blocks.Projection, ...]:
        """See `RecurrentMixer.strength_projections`."""
        return (self.b_proj,)

    def _logits(self, *logits: Array) -> tuple[Array, Array | None]:
        return logits[0], None

    def strengths(self, b: Array, w: Array | None) -> tuple[Array | None, Array | None, Array | None]:
        """See `ChannelDecayMixer.strengths`: beta of each head."""
        del w
        return write_strength(b, allow_neg_eigval=self.allow_neg_eigval), None, None


@dataclasses.dataclass(frozen=True)
class KimiDelta(ChannelMixer):
    """`KimiDeltaAttention`."""

    name: ClassVar = "kda"
    layer: ClassVar = KimiDeltaAttention


MIXERS: dict[str, MixerConfig] = {
    "kda": KimiDelta(style=Style(WINE, ">", "full", (0, (5, 1)), "KDA")),
    "kda_lower_bound": KimiDelta(
        gate="lower_bound", style=Style(ROSE, "8", "none", (0, (5, 1)), "KDA, bounded gate")
    ),
    "kda_exponential": KimiDelta(
        gate="exponential", style=Style(MAROON, "H", "full", (0, (1, 2)), "KDA, EDA's gate")
    ),
}
