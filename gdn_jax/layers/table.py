"""The recurrent layers that a model can have, by name."""

from gdn_jax.layers import (
    erase_then_delta,
    gated_delta_net,
    gated_delta_net_2,
    gated_delta_product,
    gated_linear_attention,
    kimi_delta_attention,
)
from gdn_jax.layers.mixer import MixerConfig

TOKEN_MIXERS: dict[str, MixerConfig] = {
    **gated_delta_net.MIXERS,
    **kimi_delta_attention.MIXERS,
    **gated_linear_attention.MIXERS,
    **gated_delta_net_2.MIXERS,
    **gated_delta_product.MIXERS,
    **erase_then_delta.MIXERS,
}
"""Mixers by name, for `ModelConfig(mixer=...)`, `gdn train --mixer` and sweeps. An object with other fields is one
too."""
