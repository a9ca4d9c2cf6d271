"""Token mixers with a recurrent state, one in a file, and next to them what they share.

`recurrent` has what goes around a rule, `channel_decay` the gates of the layers that decay by channels, `options` the
checks of sizes, and `padding` the padding around a row's tokens. What a model knows of its layers is in `mixer`, and
`table` has the layers by name.
"""

from gdn_jax.layers.erase_then_delta import EraseThenDelta
from gdn_jax.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetCache
from gdn_jax.layers.gated_delta_net_2 import GatedDeltaNet2
from gdn_jax.layers.gated_delta_product import GatedDeltaProduct
from gdn_jax.layers.gated_linear_attention import GatedLinearAttention
from gdn_jax.layers.kimi_delta_attention import KimiDeltaAttention
from gdn_jax.layers.recurrent import RecurrentCache, RecurrentMixer

__all__ = [
    "EraseThenDelta",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaNetCache",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "RecurrentCache",
    "RecurrentMixer",
]
