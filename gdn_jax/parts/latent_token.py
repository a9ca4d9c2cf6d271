"""Latent attention of a token of one row, by two kernels between the projections of its input and of its output."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gdn_jax.parts.kernels import is_whole, token_op, usable


class Latents(NamedTuple):
    """The static part of a call of `latent_token`."""

    kv: int
    """First channel of c before its norm; k_r comes after it."""
    gate: int | None
    """First channel of the gates of the heads; None where there are none."""
    scale: float
    """Factor of the scores."""
    eps: float
    """Epsilon of the norm of c."""
    theta: float
    """Base of the wavelengths by which k_r and q_r are turned."""


class LatentToken(NamedTuple):
    """Arrays that `latent_token` takes."""

    channels: Float[Array, "1 F"]
    """Projections of the token."""
    q: Float[Array, "1 G"]
    """Queries of all heads as they meet c, and then what is turned of them, in pairs (0, 1), (2, 3) .."""
    norm: Float[Array, " C"]
    """Weight of the norm of c, float32."""
    values: Float[Array, "H V C"]
    """Matrix of each head that makes values of c."""
    k: Float[Array, "1 S 1 R"]
    """Cache of k_r after its rotation, the firsts of all pairs before the seconds."""
    v: Float[Array, "1 S 1 C"]
    """Cache of c."""
    length: Int[Array, "1"]
    """Tokens before this one."""


def takes(token: LatentToken, latents: Latents, implementation: str | None) -> bool:
    """Whether `latent_token` takes a call: one row in 16 bits on one device, and no more slots than pay."""
    if not usable(implementation) or not is_whole(token.channels, token.k, token.v):
        return False
    from pallas_kernels.layer.latent_row import Places, check_supported

    places = Places(latents.kv, latents.gate)
    return check_supported(token.q, token.k, token.v, token.values, places) is None


@token_op
def latent_token(
    token: LatentToken, latents: Latents
) -> tuple[Float[Array, "1 O"], Float[Array, "1 S 1 R"], Float[Array, "1 S 1 C"], Int[Array, "1"]]:
    """The heads' results of a cache and the token itself, times their gates, and the cache with the token.

        c = kv (mean(kv^2) + eps)^(-1/2) norm,   k_r and each q_r turned by the token's position
        o_h = sum_j softmax_j((q_h . c_j + q_r,h . k_r,j) scale) c_j;   y_h = sigmoid(gate_h) values_h o_h

    A loop that carries the cache has it changed where it lies.

    Args:
      token: arrays for which `takes` is true.
      latents: what is static.

    Returns:
      y [1, H V] in q's dtype, side by side, both caches, and how many tokens they hold. A token without a
      free slot overwrites the last one, and its y is NaN. Numerics: float32; c and k_r are rounded as they lie in
      the cache.
    """
    from pallas_kernels.layer.latent_row import Places, latent_row

    static = dict(places=Places(latents.kv, latents.gate), scale=latents.scale, eps=latents.eps)
    angles = jnp.asarray(frequencies(latents, token.k.shape[-1]))
    return latent_row(*token[:3], angles, *token[3:], **static)


def frequencies(latents: Latents, width: int) -> np.ndarray:
    """Angles of the pairs of `width` turned dimensions from a token to the next, float32."""
    return (1.0 / latents.theta ** (np.arange(width // 2) * 2 / width)).astype(np.float32)
