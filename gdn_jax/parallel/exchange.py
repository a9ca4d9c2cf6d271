"""The rule over tokens that are split over a mesh axis, by an exchange: every device gets all tokens of some heads.

The other way is to hand over states (`context`). Its cost grows with the logarithm of the devices and not with their
tokens. An exchange sends every token, but takes one step for any number of devices: it is faster for short shards.

Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.partitioning import vary_alike
from gdn_jax.shapes import Dims

STEP_BYTES = 20 * 2**20
"""Bytes that a device may send, forward and backward together, for each log step of handing over states that an
exchange saves. From two H200s with NVLink: a step takes 79 (the last one) or 138 microseconds, both passes together,
and every MiB of an exchange 5.2 (docs/scaling.md)."""


def steps(devices: int) -> int:
    """Number of steps in which devices merge their maps of states, `prefix.entering`: ceil(log2(devices - 1)).

    Args:
      devices: along the axis.
    """
    return (devices - 2).bit_length()


def sent_bytes(dims: Dims, itemsize: int, devices: int, gates: int = 2, keys: int = 1) -> int:
    """Bytes that a device sends in an exchange, forward and backward: q, k, v and o, and gates in float32.

    Args:
      dims: of the tokens of a device, with all heads.
      itemsize: bytes of a number of q, k, v and o.
      devices: along the axis.
      gates: numbers of all gates for a token and head.
      keys: keys of a token.
    """
    widths = (dims.Hq + keys * dims.Hk) * dims.K + (dims.HV + dims.HO) * dims.V
    one_way = dims.B * dims.T * (itemsize * widths + gates * 4 * dims.HO)
    return 2 * one_way * (devices - 1) // devices


def reason(dims: Dims, devices: int) -> str | None:
    """Returns the reason why heads cannot be exchanged; None if they can.

    Args:
      dims, devices: as for `sent_bytes`.
    """
    heads = math.gcd(dims.Hq, dims.Hk, dims.HV)
    if heads % devices:
        return f"{heads} heads, the greatest common divisor of Hq, Hk and HV, cannot be split over {devices} devices"
    return None


def pays(dims: Dims, itemsize: int, devices: int, gates: int = 2, keys: int = 1) -> bool:
    """Predicts whether an exchange takes less time than handing over states.

    Args:
      dims, itemsize, devices, gates, keys: as for `sent_bytes`.
    """
    if reason(dims, devices) is not None:
        return False
    return sent_bytes(dims, itemsize, devices, gates, keys) <= STEP_BYTES * steps(devices)


def rule_by_heads(
    rule: Callable[[Any], Any], x: Any, dims: Dims, *, axis_name: str
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO _ _"]]:
    """`context.gated_delta_rule` by an exchange.

    Args:
      rule: outputs and final states of a record of whole rows.
      x: record of this device's tokens, with the states and cu_seqlens of whole rows.
      dims: of x.
      axis_name: the mesh axis.

    Numerics: those of the rule for all tokens of as many heads as a device gets.
    """
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    x = vary_alike(x)
    tokens = _to_heads(x[: x._fields.index("initial_state")], axis_name)
    h_0, own, ids = x.initial_state, dims.HO // devices, x.segment_ids
    if h_0 is not None:
        h_0 = lax.dynamic_slice_in_dim(h_0, index * own, own, 1)
    if ids is not None:
        ids = lax.all_gather(ids, axis_name, axis=1, tiled=True)
    o, final = rule(x._make((*tokens, h_0, x.cu_seqlens, ids)))
    whole = jnp.zeros_like(final, shape=(final.shape[0], dims.HO, *final.shape[2:]))
    final = lax.psum(lax.dynamic_update_slice_in_dim(whole, final, index * own, 1), axis_name)
    return _to_tokens(o, axis_name), final


def _to_heads(arrays: tuple[jax.Array | None, ...], axis_name: str) -> tuple[Any, ...]:
    """Exchanges this device's tokens of all heads for all tokens of its heads, all arrays of a dtype in one
    all-to-all."""
    devices, found = lax.axis_size(axis_name), {}
    for dtype in dict.fromkeys(x.dtype for x in arrays if x is not None):
        parts = {
            i: x.reshape(*x.shape[:2], devices, -1)
            for i, x in enumerate(arrays)
            if x is not None and x.dtype == dtype
        }
        ends = np.cumsum([part.shape[3] for part in parts.values()])[:-1]
        together = lax.all_to_all(jnp.concatenate([*parts.values()], 3), axis_name, 2, 1, tiled=True)
        found |= zip(parts, jnp.split(together, ends, 3), strict=True)

    def own(i: int, x: jax.Array) -> jax.Array:
        return found[i].reshape(x.shape[0], devices * x.shape[1], x.shape[2] // devices, *x.shape[3:])

    return tuple(None if x is None else own(i, x) for i, x in enumerate(arrays))


def _to_tokens(x: Float[Array, "B T h V"], axis_name: str) -> Float[Array, "B t H V"]:
    """Exchanges all tokens of this device's heads for its tokens of all heads."""
    return lax.all_to_all(x, axis_name, 1, 2, tiled=True)
