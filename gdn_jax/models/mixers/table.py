"""The recurrent token mixers that a model can have, by name."""

from gdn_jax.models.mixers.gated_delta_net import GatedDeltaNetMixer
from gdn_jax.models.mixers.gated_delta_net_2 import EraseAndWrite
from gdn_jax.models.mixers.gated_delta_product import DeltaProduct
from gdn_jax.models.mixers.gated_linear_attention import GatedLinear
from gdn_jax.models.mixers.kimi_delta_attention import KimiDelta
from gdn_jax.models.mixers.mixer import Mixer

TOKEN_MIXERS: dict[str, Mixer] = {
    "gated_delta_net": GatedDeltaNetMixer(),
    "kda": KimiDelta(),
    "kda_lower_bound": KimiDelta(gate="lower_bound"),
    "gla": GatedLinear(),
    "gated_delta_net_2": EraseAndWrite(),
    "gated_delta_product": DeltaProduct(),
    "gated_delta_product_3": DeltaProduct(num_householder=3),
    "gated_delta_product_4": DeltaProduct(num_householder=4),
}
"""Mixers by name, for `ModelConfig(mixer=...)`, `gdn train --mixer` and sweeps. An object with other fields is one
too."""
