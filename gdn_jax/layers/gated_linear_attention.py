"""Gated linear attention (GLA): a decay of each key channel and no correction, in the layer of KDA."""

import jax.numpy as jnp
from jaxtyping import Array

from gdn_jax.gates import write_strength
from gdn_jax.layers.kimi_delta_attention import KimiDeltaAttention


class GatedLinearAttention(KimiDeltaAttention):
    """Kimi Delta Attention without its correction, to compare with: a write erases nothing.

        S <- Diag(exp(g)) S + beta k v^T;   o = S^T q / sqrt(K)

    All else, and so the arguments, the parameters and their initial values, is that of `KimiDeltaAttention`;
    allow_neg_eigval has no effect. The published layer has neither a convolution nor unit length, and another gate.

    Raises:
      ValueError: as `ChannelDecayMixer`.

    Source: the rule is that of Yang et al. 2023, "Gated Linear Attention" (arXiv 2312.06635).
    """

    def _logits(self, *logits: Array) -> tuple[Array, Array | None]:
        return jnp.full_like(logits[0], -jnp.inf), logits[0]

    def strengths(self, b: Array, w: Array | None) -> tuple[Array | None, Array | None, Array | None]:
        """See `ChannelDecayMixer.strengths`: nothing is erased; w is what is written."""
        assert w is not None
        return None, write_strength(b), write_strength(w)
