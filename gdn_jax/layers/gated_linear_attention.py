"""Gated linear attention (GLA): a decay of each key channel and no correction, in the layer of KDA."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.layers.kimi_delta_attention import KimiDeltaAttention


class GatedLinearAttention(KimiDeltaAttention):
    """Kimi Delta Attention without its correction, to compare with: a write erases nothing.

        S <- Diag(exp(g)) S + beta k v^T;   o = S^T q / sqrt(K)

    All else, and so the parameters and their initial values, is that of `KimiDeltaAttention`. The published layer has
    neither a convolution nor unit length, and another gate.

    Source: the rule is that of Yang et al. 2023, "Gated Linear Attention" (arXiv 2312.06635).
    """

    def strengths(self, *logits: Float[Array, "B T _"]) -> tuple[Array | None, Array | None, Array | None]:
        """See `ChannelDecayMixer.strengths`: beta is what is written, and nothing is erased."""
        beta, _, _ = super().strengths(*logits)
        assert beta is not None
        return None, jnp.zeros_like(beta), beta
