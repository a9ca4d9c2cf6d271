"""RMSNorm of each head times SiLU or the sigmoid of its gate, as an 8-bit operand of the projection behind it.

    y = o r w f(z),   r = (mean(o^2) + eps)^(-1/2)                               the mean along a head

as in `gated_norm`, rounded to o's dtype, then as in `eight_bits`: nothing is written in 16 bits.

Inputs (GMEM): o [T, H V]; z [T, C], of whose channels the last H V are the gates, both bfloat16 or float16; w [V]
float32; scale [1] float32. Outputs (GMEM): y in 8 bits, by rows [T, H V] and by columns [H V, T], and the count of
`eight_bits`.
Grid, shared memory, numerics and hardware: those of `eight_bits`; a tile is one head of 64 tokens.
Limits: `check_supported`.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.device import lanes
from pallas_kernels.device.lanes import spread
from pallas_kernels.device.launch import Shaped, kernel
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import rows as r
from pallas_kernels.layer.eight_bits import COLUMNS, LAYOUT, TOKENS, load, start
from pallas_kernels.layer.gated_norm import ACTIVATIONS

NEEDS = Needs.TMA

CTAS_PER_SM = 2
"""CTAs for each multiprocessor: as many as their registers allow."""

WIDTH = 2 * COLUMNS
"""Entries of a head."""


def check_supported(o: Shaped) -> str | None:
    """Why the kernel cannot take outputs of the rule [B, T, H, V]; None if it can."""
    if o.dtype not in (jnp.bfloat16, jnp.float16):
        return f"o is {jnp.dtype(o.dtype).name}; the kernel takes bfloat16 and float16"
    tokens, V = o.shape[0] * o.shape[1], o.shape[-1]
    if V != WIDTH:
        return f"V = {V}; the kernel takes {WIDTH}"
    return (
        None
        if o.size and tokens % TOKENS == 0
        else f"{tokens} tokens; the kernel takes a multiple of {TOKENS}"
    )


@kernel("dtype", "eps", "activation")
def gated_norm_eight_bits(
    o: Float[Array, "T F"],
    z: Float[Array, "T C"],
    weight: Float[Array, " V"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    *,
    eps: float,
    activation: str = "silu",
    interpret=None,
) -> tuple[Float[Array, "T F"], Float[Array, "F T"], Float[Array, ""]]:
    """The gated norm in 8 bits of a dtype, by rows and by columns, and how many numbers are saturated.

    Args:
      o: all heads of outputs that `check_supported` accepts.
      z: channels, of which the last F are the gates.
      weight: of the norm.
      scale: factor of the codes.
      dtype: float8_e4m3fn or float8_e5m2.
      eps: added to the mean square.
      activation: one of `ACTIVATIONS`.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    F, others = o.shape[1], z.shape[1] - o.shape[1]
    f = ACTIVATIONS[activation].value

    def source(gmem):
        # A thread has the same columns in every tile.
        halves = [gmem.w.at[pl.ds(i * COLUMNS, COLUMNS)] for i in (0, 1)]
        w = [spread(lanes.load(half, LAYOUT.reduce(0)), (TOKENS, COLUMNS), 1, LAYOUT) for half in halves]

        def read(tokens, column):
            first = [2 * column + i * COLUMNS for i in (0, 1)]
            heads = [load(gmem.o, tokens, pl.ds(c, COLUMNS)) for c in first]
            return (*heads, *(load(gmem.z, tokens, pl.ds(others + c, COLUMNS)) for c in first))

        def tiles(*arrays):
            *heads, z0, z1 = (x.astype(jnp.float32) for x in arrays)
            square = sum(jnp.sum(x * x, axis=1) for x in heads)
            factor = lax.rsqrt(square / WIDTH + eps)
            factor = spread(factor, (TOKENS, COLUMNS), 0, LAYOUT)
            parts = zip(heads, w, (z0, z1), strict=True)
            return [(x * factor * w * f(z, r.sigmoid(z))).astype(o.dtype) for x, w, z in parts]

        return read, tiles

    options = dict(columns=F, tiles=2, ctas_per_sm=CTAS_PER_SM, interpret=interpret)
    inputs = {"o": o, "z": z, "w": weight.astype(jnp.float32)}
    return start("gated_norm_eight_bits", source, inputs, scale, dtype, **options)
