"""Latent attention of a token of each row over a cache."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.partitioning import lie_on_explicit_axes
from gdn_jax.parts.kernels import fused_op, kernels_run, run
from gdn_jax.shapes import accumulation_dtype


def latent_rows(
    q: Float[Array, "B H C"],
    r: Float[Array, "B H R"],
    c: Float[Array, "B S C"],
    k: Float[Array, "B S R"],
    length: Int[Array, " B"],
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B H C"]:
    """o_h = sum_{j < length} softmax_j((q_h . c_j + r_h . k_j) scale) c_j in each row.

    The kernel reads the cache once, in bfloat16 and float16, of a multiple of 8 slots; rows may be split over
    devices. Plain JAX reads it twice, and all scores several times. The result can be differentiated once, in
    reverse.

    Args:
      q, r: queries of the heads as they meet c, and as they meet k.
      c, k: the cache of S slots, of q's dtype. What the slots after `length` hold does not matter.
      length: tokens of each row; fewer than 1 count as 1, and more than S as S.
      scale: factor of the scores.
      implementation: as for `parts.kernels.kernels_run`.

    Returns:
      o in q's dtype. Numerics: scores and softmax in float32 (float64 of such arrays), weights rounded to c's dtype.
    """
    from pallas_kernels.layer import latent_rows as kernel

    arrays, length = (q, r, c, k), jnp.maximum(length, 1)
    explicit = lie_on_explicit_axes(q, c)
    if kernels_run(implementation, kernel) and not explicit and kernel.check_supported(q, r, c) is None:
        return _latent_rows(scale, *arrays, length)
    return _plain(scale, length, *arrays)


def _plain(scale: float, length, q, r, c, k):
    """The operation in plain JAX, which is its derivative's, too."""
    dtype, seen = q.dtype, jnp.arange(c.shape[1]) < length[:, None]
    # A weight of 0 is not enough: other slots may hold NaN, of a request before this one.
    c, k = (jnp.where(seen[..., None], x, 0) for x in (c, k))
    if dtype == jnp.float16:  # XLA has no such products on a CPU
        q, r, c, k = (x.astype(jnp.float32) for x in (q, r, c, k))
    wide = accumulation_dtype(c)
    scores = [jnp.einsum("bhk,bsk->bhs", *x, preferred_element_type=wide) for x in ((q, c), (r, k))]
    scores = jnp.where(seen[:, None], (scores[0] + scores[1]) * scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(c.dtype)
    return jnp.einsum("bhs,bsc->bhc", weights, c).astype(dtype)


def _by_kernel(scale: float, *args):
    from pallas_kernels.layer.latent_rows import latent_rows

    return latent_rows(*args, scale=scale)


def _forward(scale: float, *args):
    operands = "b . .", "b . .", "b . .", "b . .", "b"
    return run(_by_kernel, scale, args, operands, "b . .", {"b": args[0].shape[0]}), args


def _backward(scale: float, saved, do):
    *arrays, length = saved
    return *jax.vjp(partial(_plain, scale, length), *arrays)[1](do), None


_latent_rows = fused_op(_forward, _backward)
