"""The state that enters each device of a mesh axis: prefixes of affine maps, in a logarithm of steps.

Each device d holds what its tokens do to a state, h -> M_d h + E_d. What enters it is

    h_d = E_{d-1} + M_{d-1} (E_{d-2} + M_{d-2} (... E_0))

Neighbouring maps are merged and sent on, over distances 1, 2, 4...: each of D devices sends at most ceil(log2(D - 1))
merged maps and one state, however long their shards are. Cotangents of states go the other way through the same maps,
transposed, and need no derivative of the prefix.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.rule.state_passing import Affine


def entering(own: Affine, axis_name: str, *, backwards: bool = False) -> Float[Array, "R HO K V"]:
    """The state that enters each device of a mesh axis, zeros at the first; inside `jax.shard_map`.

    Args:
      own: what each device does to a state. An initial state is part of the first device's e.
      axis_name: of the mesh.
      backwards: the devices are passed from the last to the first, the maps are dh -> m^T dh + e, and what enters is
        the cotangent at a device's end.

    Numerics: in the dtype of the maps, products at the highest precision.
    """
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if backwards:
        index = size - 1 - index

    def shift(x: jax.Array, distance: int) -> jax.Array:
        """Gives each device the x of the device at this distance before it, zeros where there is none."""
        pairs = [(d, d + distance) for d in range(size - distance)]
        if backwards:
            pairs = [(b, a) for a, b in pairs]
        return lax.ppermute(x, axis_name, pairs)

    def product(m: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.einsum("...kj,...jv->...kv", m, x, precision=lax.Precision.HIGHEST)

    e, m = own
    if backwards:
        m = jnp.swapaxes(m, -1, -2)
    V, distance = e.shape[-1], 1
    while distance < size - 1:
        is_last = 2 * distance >= size - 1
        columns = e if is_last else jnp.concatenate([e, m], -1)  # so that one message and one product do
        merged = product(m, shift(columns, distance))
        e = e + merged[..., :V]
        if not is_last:
            m = jnp.where(index >= distance, merged[..., V:], m)
        distance *= 2
    return shift(e, 1)
