"""A token of one row through the first half of a block, its norm and a recurrent layer, by one kernel."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.layers.blocks import ProjectionOfGroup, RMSNorm, group_of
from gdn_jax.layers.recurrent import RecurrentCache, RecurrentMixer
from gdn_jax.parts import delta_layer
from gdn_jax.parts.ahead import read_ahead
from gdn_jax.parts.products import Addend, array_of
from gdn_jax.parts.unsummed import Parts
from gdn_jax.shapes import Convolution


def in_one_kernel(
    mixer: RecurrentMixer,
    norm: RMSNorm,
    x: Float[Array, "B T D"],
    y: Float[Array, "P T D"] | Addend | Parts | None,
    *,
    cache: RecurrentCache | None = None,
    return_cache: bool = False,
    **packing: Any,
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "HO T D"], RecurrentCache]] | None:
    """`blocks.from_stream` of a token of one row by `parts.delta_layer`, in parts; None where that does not take it.

    Args:
      mixer: the layer, in a copy for single tokens; another one has no `token_gates`.
      norm, x, y: as for `blocks.from_stream`.
      cache: of the tokens before.
      return_cache: a cache that came in is returned in any case.
      packing: other options of a call, with which the kernel is not asked.
    """
    del return_cache
    if cache is None or any(option is not None for option in packing.values()):
        return None
    found = _layer_of(mixer, norm.scale(jnp.float32), cache)
    if found is None or not delta_layer.takes(x, *found, mixer.implementation):
        return None
    layer, gates = found
    options = delta_layer.Options(norm.eps, mixer.o_norm.eps, mixer.activation)
    arrays = x, array_of(y), layer
    after, out, *states = delta_layer.delta_layer(*arrays, gates, options, read_ahead(mixer, 2))
    return after, (out, RecurrentCache(*states))


def takes(mixer: RecurrentMixer) -> bool:
    """Whether `in_one_kernel` takes a token of one row in a copy of a layer for single tokens."""
    width = mixer.hidden_size
    found = _layer_of(mixer, jnp.ones(width), mixer.init_cache(1))
    return found is not None and delta_layer.takes(jnp.zeros((1, 1, width)), *found, mixer.implementation)


def _layer_of(
    mixer: RecurrentMixer, norm: Float[Array, " D"], cache: RecurrentCache
) -> tuple[delta_layer.Layer, delta_layer.Gates] | None:
    """The arguments of `parts.delta_layer`; None where the layer's products are not what it reads."""
    gates, last = mixer.token_gates(), mixer.o_proj
    group = group_of((mixer.q_proj, mixer.k_proj, mixer.v_proj))
    if gates is None or group is None or not isinstance(last, ProjectionOfGroup) or not last.is_alone:
        return None
    layer = delta_layer.Layer(
        norm=norm,
        inputs=group.weight[...],
        convolution=Convolution(cache.conv, *mixer.filters()),
        A_log=None if mixer.A_log is None else mixer.A_log[...],
        dt_bias=mixer.dt_bias[...],
        state=cache.state,
        output_norm=mixer.o_norm.scale(jnp.float32),
        output=last.group.weight[...],
    )
    return layer, gates
