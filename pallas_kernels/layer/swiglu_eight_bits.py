"""The product inside a SwiGLU, and its derivative, as 8-bit operands of the products that read them.

    h = silu(a) b,   da = dh b silu'(a),   db = dh silu(a)

each rounded to ab's dtype, then as in `eight_bits`: nothing is written in 16 bits. a and b lie in one array,
`COLUMNS` numbers of a, as many of b, and so on; da and db likewise.

Inputs (GMEM): ab [T, 2 F], dh [T, F] bfloat16 or float16; scale [1] float32. Outputs (GMEM): h or dab in 8 bits, by
rows [T, ..] and by columns [.., T], and the count of `eight_bits`. Grid, shared memory, numerics, hardware and
limits: those of `eight_bits`.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.device.launch import kernel
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.eight_bits import COLUMNS, load, start

NEEDS = Needs.TMA

CTAS_PER_SM, BACKWARD_CTAS_PER_SM = 3, 2
"""CTAs for each multiprocessor: as many as their registers allow."""


def _branches(gmem, tokens, column):
    return (load(gmem.ab, tokens, pl.ds(2 * column + i * COLUMNS, COLUMNS)) for i in (0, 1))


@kernel("dtype")
def swiglu(
    ab: Float[Array, "T F2"], scale: Float[Array, ""], dtype: DTypeLike, *, interpret=None
) -> tuple[Float[Array, "T F"], Float[Array, "F T"], Float[Array, ""]]:
    """silu(a) b in 8 bits, by rows and by columns, for branches that `eight_bits.check_supported` accepts, and how
    many numbers are saturated."""
    F = ab.shape[1] // 2

    def source(gmem):
        def read(tokens, column):
            return tuple(_branches(gmem, tokens, column))

        def tiles(*arrays):
            a, b = (x.astype(jnp.float32) for x in arrays)
            return ((a * r.sigmoid(a) * b).astype(ab.dtype),)

        return read, tiles

    options = dict(columns=F, tiles=1, ctas_per_sm=CTAS_PER_SM, interpret=interpret)
    return start("swiglu_eight_bits", source, {"ab": ab}, scale, dtype, **options)


@kernel("dtype")
def swiglu_backward(
    ab: Float[Array, "T F2"],
    dh: Float[Array, "T F"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    *,
    interpret=None,
) -> tuple[Float[Array, "T F2"], Float[Array, "F2 T"], Float[Array, ""]]:
    """Gradient of <dh, silu(a) b> with respect to ab in 8 bits, by rows and by columns, and how many numbers are
    saturated."""
    F = dh.shape[1]

    def source(gmem):
        def read(tokens, column):
            return (*_branches(gmem, tokens, column), load(gmem.dh, tokens, pl.ds(column, COLUMNS)))

        def tiles(*arrays):
            a, b, dh = (x.astype(jnp.float32) for x in arrays)
            gate = r.sigmoid(a)
            return [x.astype(ab.dtype) for x in (dh * b * (gate * (1.0 + a * (1.0 - gate))), dh * (a * gate))]

        return read, tiles

    options = dict(columns=2 * F, tiles=2, ctas_per_sm=BACKWARD_CTAS_PER_SM, interpret=interpret)
    return start("swiglu_eight_bits_backward", source, {"ab": ab, "dh": dh}, scale, dtype, **options)
