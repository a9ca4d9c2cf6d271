"""Recurrent layers for single tokens: projections of one input are one product, which kernels read as it lies, and of
one row the norm and the layer are one kernel."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax.layers import RecurrentCache, RecurrentMixer
from gdn_jax.layers.blocks import ProjectionOfGroup, RMSNorm, from_stream, group_of, group_projections
from gdn_jax.layers.channel_decay import ChannelDecayMixer
from gdn_jax.models.inference.call import Call
from gdn_jax.parts import delta_layer
from gdn_jax.parts.ahead import read_ahead
from gdn_jax.parts.products import Addend, array_of
from gdn_jax.shapes import Convolution

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


class DeltaRow(nnx.Module):
    """A recurrent layer that is one kernel with the norm before it for a token of one row.

    Args:
      mixer: the layer, of a copy for inference, all of whose projections of its input are one product.
    """

    attends = False

    def __init__(self, mixer: RecurrentMixer):
        self.mixer = mixer

    @classmethod
    def of(cls, mixer: RecurrentMixer, call: Call) -> "RecurrentMixer | DeltaRow":
        """A layer for calls of single tokens: this one where the kernel takes it, else the layer itself, changed in
        place. Gates of low rank have full rank where that makes the kernel take it."""
        if call.rows == 1 and call.from_stream:
            whole = mixer
            if isinstance(mixer, ChannelDecayMixer):
                whole = nnx.clone(mixer)
                whole.multiply_factors()
            group(whole)
            if cls(whole).takes():
                return cls(whole)
        group(mixer)
        mixer.join_factors()
        return mixer

    def __call__(self, x: Float[Array, "B T D"], **options: Any) -> tuple[Float[Array, "B T D"], Any]:
        """The layer, see `layers.blocks.TokenMixer`."""
        return self.mixer(x, **options)

    def init_cache(self, batch: int) -> RecurrentCache:
        """See `layers.blocks.TokenMixer.init_cache`."""
        return self.mixer.init_cache(batch)

    def from_stream(
        self,
        norm: RMSNorm,
        x: Float[Array, "B T D"],
        y: Float[Array, "P T D"] | Addend | None,
        *,
        cache: RecurrentCache | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "Q T D"] | Addend, RecurrentCache | None]]:
        """See `layers.blocks.from_stream`: the kernel's result is in parts."""
        packing = [value for name, value in options.items() if name != "return_cache"]
        found = None
        if cache is not None and all(value is None for value in packing):
            found = self._layer(norm.scale(jnp.float32), cache)
        if found is None or not delta_layer.takes(x, *found, self.mixer.implementation):
            return from_stream(self.mixer)(norm, x, y, cache=cache, **options)
        static = delta_layer.Options(norm.eps, self.mixer.o_norm.eps, self.mixer.activation)
        arrays = x, array_of(y), found[0]
        after, out, *states = delta_layer.delta_layer(*arrays, found[1], static, read_ahead(self, 2))
        return after, (out, RecurrentCache(*states))

    def takes(self) -> bool:
        """Whether the kernel takes a token of one row of this layer."""
        width = self.mixer.hidden_size
        found = self._layer(jnp.ones(width), self.init_cache(1))
        return found is not None and delta_layer.takes(
            jnp.zeros((1, 1, width)), *found, self.mixer.implementation
        )

    def _layer(
        self, norm: Float[Array, " D"], cache: RecurrentCache
    ) -> tuple[delta_layer.Layer, delta_layer.Gates] | None:
        """The arguments of `parts.delta_layer`; None where the layer's products are not what it reads."""
        mixer = self.mixer
        gates, last = mixer.token_gates(), mixer.o_proj
        product = group_of((mixer.q_proj, mixer.k_proj, mixer.v_proj))
        if gates is None or product is None or not isinstance(last, ProjectionOfGroup) or not last.is_alone:
            return None
        layer = delta_layer.Layer(
            norm=norm,
            inputs=product.weight[...],
            convolution=Convolution(cache.conv, *mixer.filters()),
            A_log=None if mixer.A_log is None else mixer.A_log[...],
            dt_bias=mixer.dt_bias[...],
            state=cache.state,
            output_norm=mixer.o_norm.scale(jnp.float32),
            output=last.group.weight[...],
        )
        return layer, gates

    ahead: tuple[nnx.Param, ...] = ()
    """See `parts.ahead.Reader`."""

    def token_weights(self) -> list[nnx.Param]:
        """See `parts.ahead.Reader.token_weights`."""
        return self.mixer.token_weights()


def group(mixer: RecurrentMixer) -> None:
    """Makes one product of all projections of the layer's input, in place."""
    # Whole heads, so that a kernel can take the last ones as those of the output gate.
    group_projections(mixer, INPUTS, mixer.head_v_dim)
    group_projections(mixer, ("o_proj",))
