"""The forward of the delta rule with a decay of each channel by mma.sync: composition of the kernels and padding.

    channel_prepare (all chunks in parallel)  ->  [ends  ->  segments]  ->  outputs (the walk)

The walks are those of `rule`, on keys and queries that hold a chunk's decays (`decays.ChannelDecay`). Tokens of
packed rows are brought to their places, see `rows`: what else is read of a chunk has these places, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.shapes import Dims, changes_segment
from pallas_kernels.ampere.channel_prepare import channel_prepare
from pallas_kernels.ampere.decays import CHANNELS, channel_factors
from pallas_kernels.ampere.rows import Packed, Rows
from pallas_kernels.ampere.rule import Static, check_supported, settled_segment, spread, tables_of, walked
from pallas_kernels.ampere.walk import Config
from pallas_kernels.chunks.channel_arrays import ChannelArrays, batched
from pallas_kernels.chunks.pairs import Pairs
from pallas_kernels.device.launch import compiled
from pallas_kernels.device.needs import Needs

NEEDS = Needs.MMA

__all__ = ["NEEDS", "Residuals", "batched", "check_supported", "forward"]


class Residuals(NamedTuple):
    """Arrays that the forward leaves for a backward, chunk by chunk of each row of the batch."""

    beta: Float[Array, "B NT HO C"]
    pairs: Pairs
    """Each with an axis for the row of the batch in front."""
    starts: Float[Array, "B S HO V K"] | None
    """The same as in `rule.Residuals`."""
    m: Float[Array, "B S HO K K"] | None

    @property
    def t(self) -> Float[Array, "B NT HO C C"]:
        """T of every chunk."""
        return self.pairs.t

    @property
    def p(self) -> Float[Array, "B NT HO C C"]:
        """P of every chunk."""
        return self.pairs.p


def forward(
    x: ChannelArrays,
    dims: Dims,
    *,
    scale: float,
    state_layout: str = "kv",
    segment_chunks: int | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "N HO _ _"], Residuals]:
    """The rule on checked arguments that check_supported accepts.

    Args: those of `rule.forward`, and
      dims: of the call.

    Numerics: operands of products rounded to q's dtype (float16 between tokens), sums, gates and states in float32.
    """
    shape, (x, dims) = (*x.q.shape[:2], dims.HO, dims.V), batched(x, dims)
    segment_chunks = settled_segment(dims, x.cu_seqlens, segment_chunks)
    static = Static(dims, float(scale), state_layout == "kv", segment_chunks, config, interpret)
    tables = tables_of(x.cu_seqlens, dims.T)
    o, final, kept = compiled(_run, interpret)(static, x._replace(cu_seqlens=None), tables)
    return o.reshape(shape), final, kept


def gates(x: ChannelArrays) -> jax.Array:
    """Log decays in float32, those of the first tokens of segments -inf."""
    g = x.g.astype(jnp.float32)
    if x.segment_ids is None:
        return g
    return jnp.where(changes_segment(x.segment_ids)[..., None, None], -jnp.inf, g)


def _run(static: Static, x: ChannelArrays, tables: Packed | None):
    """The kernels in order, with the padding around them."""
    dims = static.dims
    rows = Rows(dims.B, dims.T, tables)
    tokens = x.q, x.k, x.e, gates(x), x.v
    q, k, e, g, v = (None if y is None else spread(y, rows) for y in tokens)
    assert q is not None and k is not None and g is not None
    beta = jnp.ones((dims.B, dims.T, dims.HO), jnp.float32) if x.beta is None else x.beta.astype(jnp.float32)
    beta = rows.by_chunk(beta)
    pairs = channel_prepare(q, k, e, g, beta, scale=static.scale, interpret=static.interpret)
    keys, vectors = pairs._asdict(), channel_factors(beta, pairs.gl)
    o, final, *cut = walked(
        static, rows, keys, v, (pairs.t, pairs.p), vectors, x.initial_state, None, CHANNELS
    )
    kept = jax.tree.map(lambda y: y.reshape(dims.B, -1, *y.shape[1:]), (beta, pairs))
    return o, final, Residuals(*kept, *cut)
