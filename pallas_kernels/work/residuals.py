"""What the forward leaves for a backward."""

from typing import NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.work.tables import Items


class Segments(NamedTuple):
    """What a forward over segments leaves for a backward over the same ones."""

    starts: Float[Array, "items HO V K"]
    """State at the start of every segment, transposed."""
    m_t: Float[Array, "items HO K K"]
    """What a segment does to a state, h -> h m_t + ..; that of a sequence's last one is not written."""
    items: Items


class Residuals(NamedTuple):
    """What the forward leaves for a backward. K and V are padded to multiples of 64."""

    g2_cum: Float[Array, "B HO T64"]
    """In-chunk cumulative log2 decay."""
    beta_t: Float[Array, "B HO T64"]
    t: Float[Array, "B HO T64 C"]
    """T of every chunk, as the gated inverse leaves it; with use_qk_l2norm its rows are divided by the keys'
    norms."""
    segments: Segments | None
    """None where sequences are not cut."""
