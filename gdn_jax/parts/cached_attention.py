"""Softmax attention of a token of each row, from the products of its input to what the heads see of a cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gdn_jax.parts.kernels import is_whole, token_op, usable


class Heads(NamedTuple):
    """Static sizes of the heads of a layer."""

    queries: int
    """Heads of the queries; those of the keys are the cache's."""
    eps: float = 0.0
    """The norms of queries and keys add it under the root."""
    rotary_dim: int = 0
    """Dimensions of a head that are rotated, the first ones; 0: none."""
    theta: float = 1.0
    """Base of the wavelengths, see `models.attention.rotate`."""


class Place(NamedTuple):
    """Where the token of each row of a call is in its sequence and in the cache."""

    position: Int[Array, " B"]
    slot: Int[Array, " B"]
    """Slot of the cache. A token whose slot is none of S is not kept."""
    seen: Int[Array, " B"]
    """Slots that the token sees, the first ones: fewer than 1 count as 1, and more than S as S."""
    row: Int[Array, " B"] | None = None
    """Row of the cache, which is a pool then; None: that of the same number."""


def takes(
    channels: Float[Array, "B F"],
    k: Float[Array, "R S N K"],
    v: Float[Array, "R S N K"],
    heads: Heads,
    implementation: str | None,
) -> bool:
    """Whether the kernels of `cached_attention` take channels and a cache, on one device."""
    if not usable(implementation) or not is_whole(channels, k, v) or v.shape != k.shape or v.dtype != k.dtype:
        return False
    from pallas_kernels.layer import attention_rows, cached_heads

    (B, _), (*_, N, K) = channels.shape, k.shape
    q = jax.ShapeDtypeStruct((B, N, heads.queries // N, K), channels.dtype)
    reason = cached_heads.check_supported(channels, k, heads.queries, heads.rotary_dim // 2)
    return (reason or attention_rows.check_supported((q,), (k, v))) is None


def cached_attention(
    channels: Float[Array, "B F"],
    k: Float[Array, "R S N K"],
    v: Float[Array, "R S N K"],
    place: Place,
    norms: tuple[Float[Array, " K"], Float[Array, " K"]] | None,
    heads: Heads,
) -> tuple[Float[Array, "B H K"], Float[Array, "R S N K"], Float[Array, "R S N K"]]:
    """`models.Attention.heads` and `parts.attention_rows` of a token of each row, by two kernels.

    A loop that carries the cache has it changed where it lies; elsewhere XLA copies it.

    Args:
      channels: products of the layer's input, for which `takes` is true: those of queries, keys and values, then any
        others.
      k, v: the cache before the token. What the slots hold that the token does not see does not matter.
      place: of the token.
      norms: factors of the norms of queries and keys, float32; None: there are none.
      heads: sizes.

    Returns:
      What each head sees, in the channels' dtype, and the cache with the token. Numerics: float32; queries, keys and
      the softmax's weights are rounded.
    """
    return _op(heads, channels, k, v, place, norms)


def _by_kernels(heads: Heads, channels, k, v, place: Place, norms) -> tuple[Array, Array, Array]:
    from pallas_kernels.layer.attention_rows import attention_rows
    from pallas_kernels.layer.cached_heads import Norms, Rotation, cached_heads

    rotation: Any = None
    if heads.rotary_dim:
        steps = np.arange(heads.rotary_dim // 2) * 2 / heads.rotary_dim
        angles = place.position[:, None] * (1.0 / heads.theta**steps).astype(np.float32)
        rotation = Rotation(jnp.cos(angles), jnp.sin(angles))
    H, (*_, N, K) = heads.queries, k.shape
    norms, sizes = None if norms is None else Norms(*norms), dict(heads=H, eps=heads.eps)
    q, cache = cached_heads(channels, (k, v), place.slot, place.row, norms, rotation, **sizes)
    o = attention_rows((q,), cache, jnp.maximum(place.seen, 1), place.row, scale=K**-0.5)
    return o[:, :, : H // N].reshape(-1, H, K), *cache


_op = token_op(_by_kernels)
