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
    gates, last = mixer.token_gates(), mixer.o_proj
    group = group_of((mixer.q_proj, mixer.k_proj, mixer.v_proj))
    if gates is None or group is None or not isinstance(last, ProjectionOfGroup) or not last.is_alone:
        return None
    layer = delta_layer.Layer(
        norm=norm.scale(jnp.float32),
        inputs=group.weight[...],
        convolution=Convolution(cache.conv, *mixer.filters()),
        A_log=None if mixer.A_log is None else mixer.A_log[...],
        dt_bias=mixer.dt_bias[...],
        state=cache.state,
        output_norm=mixer.o_norm.scale(jnp.float32),
        output=last.group.weight[...],
    )
    if not delta_layer.takes(x, layer, gates, mixer.implementation):
        return None
    options = delta_layer.Options(norm.eps, mixer.o_norm.eps, mixer.activation)
    arrays = x, array_of(y), layer
    after, out, *states = delta_layer.delta_layer(*arrays, gates, options, read_ahead(mixer, 2))
    return after, (out, RecurrentCache(*states))
