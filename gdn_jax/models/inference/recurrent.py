"""Recurrent layers for single tokens: projections of one input are one product, which kernels read as it lies."""

from typing import Any

from flax import nnx

from gdn_jax.layers import RecurrentMixer, single_token
from gdn_jax.layers.blocks import group_projections
from gdn_jax.layers.channel_decay import ChannelDecayMixer
from gdn_jax.models.inference.call import Call

INPUTS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "a_proj",
    "f_proj",
    "f_a_proj",
    "g_a_proj",
    "b_proj",
    "w_proj",
    "g_proj",
)
"""Projections of the layer's input, in the order in which its kernels take them. First factors are neighbours: what
multiplies both, `RecurrentMixer.join_factors`, reads them where they lie."""


def of(mixer: RecurrentMixer, call: Call) -> Any:
    """A layer for calls of single tokens, changed in place or another one, whose gates have full rank."""
    if call.rows == 1 and isinstance(mixer, ChannelDecayMixer):
        whole = nnx.clone(mixer)
        whole.multiply_factors()
        group(whole)
        if single_token.takes(whole):
            return whole
    group(mixer)
    mixer.join_factors()
    return mixer


def group(mixer: RecurrentMixer) -> None:
    """Makes one product of all projections of the layer's input, in place."""
    # Whole heads, so that a kernel can take the last ones as those of the output gate.
    group_projections(mixer, INPUTS, mixer.head_v_dim)
    group_projections(mixer, ("o_proj",))
