"""Cumulative log decay inside chunks, and the decays it implies, accurate in value and derivative.

With G the inclusive cumulative sum of the log decay g inside a chunk of C tokens:

    exp(G_i)          from the chunk's start to token i
    exp(G_C - G_i)    from token i to the chunk's end
    exp(G_i - G_j)    from token j to token i
    exp(G_C)          over the whole chunk

Source: fla's `chunk_local_cumsum`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Coarse parts of gates are multiples of this, so that a chunk's sum of them is exact in float32 up to
# 2^24 / 1024 = 16384, that is -256 per token at C = 64; stronger gates only lose what exp has long made 0.
_COARSE_GRID = 1024.0


class ChunkDecay(NamedTuple):
    """Cumulative log decay inside chunks, and the decays it implies, accurate in value and derivative.

    The sum of 64 gates of -20 is -1280, where float32 has steps of 1e-4; a difference of two such sums would
    carry that error into weak gates. So gates are summed in two parts: `coarse` multiples of 1/1024, whose sums
    and differences are exact, and the small `fine` rest. Gates of -inf are left out of both and counted.

    The derivative of exp(G_i - G_j) in g_t is itself for j < t <= i and 0 elsewhere. Taken through the cumulative
    sum, every gate outside would get a +x and a -x that ought to cancel; so it is written down here.
    """

    g: Float[Array, "*S C"]
    """The gates, 0 in place of -inf."""
    coarse: Float[Array, "*S C"]
    fine: Float[Array, "*S C"]
    resets: Int[Array, "*S C"]
    """Number of gates of -inf up to and including each token: decays across a reset are 0."""

    @property
    def g_cum(self) -> Float[Array, "*S C"]:
        """Inclusive cumulative log decay of the finite gates."""
        return self.coarse + self.fine

    def from_start(self) -> Float[Array, "*S C"]:
        """exp(G_i): decay of the state at the chunk's start, after token i's gate."""
        return _decay_from_start(self)

    def to_end(self) -> Float[Array, "*S C"]:
        """exp(G_C - G_i): decay of token i's write at the chunk's end."""
        return _decay_to_end(self)

    def total(self) -> Float[Array, "*S"]:
        """exp(G_C): decay over the whole chunk."""
        return _decay_from_start(self)[..., -1]

    def between(self) -> Float[Array, "*S C C"]:
        """exp(G_i - G_j) for i >= j, else 0: decay of token j's write when token i reads it."""
        return _decay_between(self)


@jax.custom_jvp
def _decay_from_start(decay: ChunkDecay) -> jax.Array:
    return jnp.exp(jnp.where(decay.resets == 0, decay.g_cum, -jnp.inf))


@_decay_from_start.defjvp
def _decay_from_start_jvp(primals, tangents):
    out = _decay_from_start(*primals)
    return out, out * jnp.cumsum(tangents[0].g, -1)


@jax.custom_jvp
def _decay_to_end(decay: ChunkDecay) -> jax.Array:
    last = jax.tree.map(lambda x: x[..., -1:], decay)
    difference = (last.coarse - decay.coarse) + (last.fine - decay.fine)
    return jnp.exp(jnp.where(last.resets == decay.resets, difference, -jnp.inf))


@_decay_to_end.defjvp
def _decay_to_end_jvp(primals, tangents):
    out, dg = _decay_to_end(*primals), tangents[0].g
    after = jnp.pad(lax.cumsum(dg[..., 1:], dg.ndim - 1, reverse=True), [(0, 0)] * (dg.ndim - 1) + [(0, 1)])
    return out, out * after


@jax.custom_jvp
def _decay_between(decay: ChunkDecay) -> jax.Array:
    C = decay.fine.shape[-1]
    i, j = (lambda x: x[..., :, None]), (lambda x: x[..., None, :])
    difference = (i(decay.coarse) - j(decay.coarse)) + (i(decay.fine) - j(decay.fine))
    visible = jnp.tril(jnp.ones((C, C), bool)) & (i(decay.resets) == j(decay.resets))
    # The exponent is masked, not the result: above the diagonal exp would overflow, and inf * 0 is NaN.
    return jnp.exp(jnp.where(visible, difference, -jnp.inf))


@_decay_between.defjvp
def _decay_between_jvp(primals, tangents):
    out, dg = _decay_between(*primals), tangents[0].g
    lower = jnp.tril(jnp.ones((dg.shape[-1],) * 2, bool))
    strict = jnp.tril(lower, -1).astype(dg.dtype)
    # A selection, not a product with the mask: XLA's CPU sums the transpose of the latter six times slower.
    until = jnp.where(lower, dg[..., None, :], 0)
    passed = jnp.einsum("...it,tj->...ij", until, strict, precision=lax.Precision.HIGHEST)
    return out, out * passed


def chunk_cumsum(g: Float[Array, "*S C"]) -> ChunkDecay:
    """Inclusive cumulative sum of the log decay along the last axis; see `ChunkDecay`.

    Args:
      g: log decay [.., C] <= 0, float32 or float64; -inf is a full reset.

    Returns:
      The sums as a `ChunkDecay` in g's dtype, which `kkt`, `wy` and `chunk_output` take.
    """
    reset = jnp.isneginf(g)
    g = jnp.where(reset, 0, g)
    coarse = lax.stop_gradient(jnp.round(g * _COARSE_GRID) / _COARSE_GRID)
    sums = jnp.cumsum(coarse, -1), jnp.cumsum(g - coarse, -1), jnp.cumsum(reset.astype(jnp.int32), -1)
    # Without the barrier XLA's CPU computes these sums again for each of the C x C decays.
    return ChunkDecay(g, *lax.optimization_barrier(sums))
