"""The Gated DeltaNet layer in one file, and beside it the checks of its options and the padding around its tokens."""

from gdn_jax.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetCache

__all__ = ["GatedDeltaNet", "GatedDeltaNetCache"]
