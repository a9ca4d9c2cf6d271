"""Softmax attention of a token of each row, from the products of its input to what the heads see of a cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.parts.attention import frequencies
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
    seen: Int[Array, " B"] | None = None
    """Slots that the token sees, the first ones: fewer than 1 count as 1, and more than S as S. None: those up to its
    position."""
    row: Int[Array, " B"] | None = None
    """Row of the cache, which is a pool then; None: the row of the same number."""


def takes(
    channels: Float[Array, "B F"],
    k: Float[Array, "R S N K"],
    v: Float[Array, "R S N K"],
    heads: Heads,
    implementation: str | None,
    output: Float[Array, "D G"] | None = None,
    scales: Float[Array, "M G"] | None = None,
) -> bool:
    """Whether the kernels of `cached_attention` take channels and a cache, on one device."""
    if not usable(implementation) or not is_whole(channels, k, v) or v.shape != k.shape or v.dtype != k.dtype:
        return False
    from pallas_kernels.rows import attention_rows, cached_heads, row_product

    (B, _), (*_, N, K) = channels.shape, k.shape
    q = jax.ShapeDtypeStruct((B, N, heads.queries // N, K), channels.dtype)
    reason = cached_heads.check_supported(channels, k, heads.queries, heads.rotary_dim // 2)
    reason = reason or attention_rows.check_supported((q,), (k, v))
    if output is None or reason is not None:
        return reason is None
    reason = row_product.Attended.check_supported(heads.queries, K, channels.shape[1], output.shape[1])
    reason = reason or row_product.check_supported(output, scales)
    return B == len(k) == 1 and is_whole(output) and reason is None


@token_op
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
      What each head sees, in the channels' dtype, NaN where the token is not kept, and the cache with the token.
      Numerics: float32; queries, keys and the softmax's weights are rounded.
    """
    from pallas_kernels.rows.attention_rows import attention_rows

    (*_, N, K), (q, cache) = k.shape, _cached(heads, channels, k, v, place, norms)
    seen, more = (place.position, 1) if place.seen is None else (jnp.maximum(place.seen, 1), 0)
    o = attention_rows((q,), cache, seen, place.row, scale=K**-0.5, more=more)
    return o[:, :, : heads.queries // N].reshape(-1, heads.queries, K), *cache


@token_op
def attended_token(
    channels: Float[Array, "1 F"],
    k: Float[Array, "1 S N K"],
    v: Float[Array, "1 S N K"],
    length: Int[Array, "1"],
    norms: tuple[Float[Array, " K"], Float[Array, " K"]] | None,
    output: Float[Array, "D G"],
    scales: Float[Array, "M G"] | None,
    heads: Heads,
    *,
    is_gated: bool,
    ahead: Sequence[jax.Array] = (),
) -> tuple[Float[Array, "1 D"], Float[Array, "1 S N K"], Float[Array, "1 S N K"], Int[Array, "1"]]:
    """`cached_attention` of one row with the gates and the output projection after it, by three kernels.

    Args:
      channels, k, v, norms, heads: as for `cached_attention`; with gates, by whose sigmoids the heads are multiplied,
        the last channels are these.
      length: tokens before this one.
      output: the output projection, for which, with its scales, `takes` is true.
      scales: as for `row_product.stream_product`.
      is_gated: whether there are gates.
      ahead: arrays that the next kernels read first, see `pallas_kernels.device.ahead`.

    Returns:
      The output in the projection's dtype, of codes in the channels', the cache with the token, and its length.
      Numerics: as for `cached_attention`; the heads' sums, their gates and their product are float32.
    """
    from pallas_kernels.rows.attention_rows import Config, Parts, attention_parts, attention_rows
    from pallas_kernels.rows.made_rows import MOST_NUMBERS
    from pallas_kernels.rows.row_product import attended_product

    q, cache = _cached(heads, channels, k, v, Place(length, length), norms)
    options: Any = dict(scale=k.shape[3] ** -0.5, more=1)
    if Config.of((q,), cache).parts * output.shape[1] > MOST_NUMBERS:
        parts = Parts(attention_rows((q,), cache, length, **options)[:, :, None])
    else:
        parts = attention_parts((q,), cache, length, **options)
    z, group = channels.reshape(-1, k.shape[3]) if is_gated else None, heads.queries // k.shape[2]
    static: Any = dict(group=group, dtype=(output if scales is None else channels).dtype, ahead=tuple(ahead))
    y, after = attended_product(parts, length, z, output, scales, **static)
    return y, *cache, after


def _cached(heads: Heads, channels, k, v, place: Place, norms) -> tuple[Array, tuple[Array, Array]]:
    """The queries, and the cache with the token."""
    from pallas_kernels.rows.cached_heads import Norms, Rotation, cached_heads

    rotation: Any = None
    if heads.rotary_dim:
        rotation = Rotation(place.position, jnp.asarray(frequencies(heads.theta, heads.rotary_dim)))
    known, sizes = None if norms is None else Norms(*norms), dict(heads=heads.queries, eps=heads.eps)
    return cached_heads(channels, (k, v), place.slot, place.row, known, rotation, **sizes)
