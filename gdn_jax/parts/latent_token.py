"""Latent attention of a token of one row, by two kernels between the projections of its input and of its output."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.parts.attention import frequencies
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


def takes(
    latents: Latents,
    channels: Float[Array, "1 F"],
    q: Float[Array, "1 G"],
    values: Float[Array, "H V C"],
    k: Float[Array, "1 S 1 R"],
    v: Float[Array, "1 S 1 C"],
    implementation: str | None,
) -> bool:
    """Whether `latent_token` takes a call: one row in 16 bits on one device, and no more slots than pay."""
    if not usable(implementation) or not is_whole(channels, k, v):
        return False
    from pallas_kernels.rows.latent_row import Places, check_supported

    return check_supported(q, k, v, values, Places(latents.kv, latents.gate)) is None


@token_op
def latent_token(
    latents: Latents,
    channels: Float[Array, "1 F"],
    q: Float[Array, "1 G"],
    norm: Float[Array, " C"],
    values: Float[Array, "H V C"],
    k: Float[Array, "1 S 1 R"],
    v: Float[Array, "1 S 1 C"],
    length: Int[Array, "1"],
) -> tuple[Float[Array, "1 O"], Float[Array, "1 S 1 R"], Float[Array, "1 S 1 C"], Int[Array, "1"]]:
    """The heads' results of a cache and the token itself, times their gates, and the cache with the token.

        c = kv (mean(kv^2) + eps)^(-1/2) norm,   k_r and each q_r turned by the token's position
        o_h = sum_j softmax_j((q_h . c_j + q_r,h . k_r,j) scale) c_j;   y_h = sigmoid(gate_h) values_h o_h

    A loop that carries the cache has it changed where it lies.

    Args: what is static, and arrays of the kernel's function, for which `takes` is true. k and v are the caches
      of k_r after its rotation, the firsts of all pairs before the seconds, and of c.

    Returns:
      y [1, H V] in q's dtype, side by side, both caches, and how many tokens they hold. A token without a
      free slot overwrites the last one, and its y is NaN. Numerics: float32; c and k_r are rounded as they lie in
      the cache.
    """
    from pallas_kernels.rows.latent_row import Places, latent_row

    static = dict(places=Places(latents.kv, latents.gate), scale=latents.scale, eps=latents.eps)
    angles = jnp.asarray(frequencies(latents.theta, k.shape[-1]))
    return latent_row(channels, q, norm, angles, values, k, v, length, **static)
