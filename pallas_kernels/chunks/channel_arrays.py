"""Records of the arrays of the rule with a decay of each channel, for both passes."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.chunks.pairs import Pairs
from pallas_kernels.work.residuals import Segments
from pallas_kernels.work.tables import common_length, known_lengths


class ChannelArrays(NamedTuple):
    """Array arguments of one call, or their shapes. Head i of the output reads head i // (HO // Hx) of an input with
    Hx heads.

    Where tokens are two rows (`of_halves`), beta has T rows and all else T / 2 tokens, a multiple of 32: e
    [B, T / 2, Hk, K] are the keys that first halves erase at, which write and read nothing. Rows are in the order of
    `work.halves`.
    """

    q: Any
    k: Any
    e: Any
    """Erase keys [B, T, HO, K] in k's dtype; None for the keys."""
    v: Any
    g: Any
    """Log decay of each channel [B, T, HO, K], float32."""
    beta: Any
    """Strength of what is erased and written [B, T, HO], float32; None for 1."""
    initial_state: Any
    cu_seqlens: Any
    segment_ids: Any

    @property
    def of_halves(self) -> bool:
        """Whether tokens are two rows."""
        return self.beta is not None and self.k.shape[1] != self.beta.shape[1]


class ChannelResiduals(NamedTuple):
    """Arrays that the forward leaves for a backward. K and V are padded to multiples of 64."""

    pairs: Pairs
    beta_t: Float[Array, "B HO T64"]
    segments: Segments | None
    """Residuals of segments; None where sequences are not cut."""


def batched(x: ChannelArrays, dims: Any) -> tuple[ChannelArrays, Any]:
    """The call, with its `Dims`, and packed sequences as the rows of a batch where they are known to have one
    length."""
    known, rows = known_lengths(x.cu_seqlens), dims.N
    if known is None or not common_length(known, dims.T):
        return x, dims
    tokens = (None if y is None else y.reshape(rows, -1, *y.shape[2:]) for y in x[:6])
    arrays = ChannelArrays._make((*tokens, x.initial_state, None, None))
    return arrays, dims._replace(B=rows, T=dims.T // rows)
