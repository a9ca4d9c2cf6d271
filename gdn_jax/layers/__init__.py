"""The Gated DeltaNet layer: its parameters and cache, one token by kernels, whole rows, and padding around them."""

from gdn_jax.layers.gated_delta_net import GatedDeltaNet
from gdn_jax.layers.parameters import GatedDeltaNetCache

__all__ = ["GatedDeltaNet", "GatedDeltaNetCache"]
