"""Records of what the forward leaves for a backward."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.work.tables import Items


class Transition(NamedTuple):
    """M^T, by which a segment changes a (transposed) state: h -> h M^T + ...

    That of a sequence's last segment is not written. The diagonal is kept apart and multiplies the state in float32.
    In a segment that writes nothing, M^T is its diagonal, and the state loses no digit but by its decay.
    """

    diagonal: Float[Array, "items HO K"]
    """Diagonal of M^T, float32."""
    rest: Float[Array, "items HO K K"]
    """M^T in q's dtype, with zeros on its diagonal."""

    def whole(self) -> Float[Array, "*items HO K K"]:
        """M^T in float32."""
        return self.rest.astype(jnp.float32) + self.diagonal[..., None] * jnp.eye(
            self.rest.shape[-1], dtype=jnp.float32
        )


class Segments(NamedTuple):
    """The part of `Residuals` for a backward over the same segments as the forward."""

    starts: Float[Array, "items HO V K"]
    """State at the start of every segment, transposed."""
    m_t: Transition
    items: Items


class Residuals(NamedTuple):
    """Arrays that the forward leaves for a backward. K and V are padded to multiples of 64."""

    g2_cum: Float[Array, "B HO T64"]
    """In-chunk cumulative log2 decay."""
    beta_t: Float[Array, "B HO T64"]
    t: Float[Array, "B HO T64 C"]
    """T of every chunk, as the gated inverse leaves it; with use_qk_l2norm its rows are divided by the keys'
    norms."""
    segments: Segments | None
    """Residuals of segments; None where sequences are not cut."""
