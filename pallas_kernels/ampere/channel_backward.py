"""The backward of the delta rule with a decay of each channel by mma.sync: composition of the kernels and padding.

    states (the walk forwards again)  ->  adjoints (the walk backwards)  ->  channel_gradients (all chunks at once)

The walks are those of `backward`, on what `channel_prepare` made for the forward, which is not made again.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.shapes import Dims
from pallas_kernels.ampere import adjoints, decays
from pallas_kernels.ampere.backward import of_heads, walked
from pallas_kernels.ampere.channel_gradients import channel_gradients
from pallas_kernels.ampere.channel_rule import Residuals, batched, gates
from pallas_kernels.ampere.rows import Packed, Rows
from pallas_kernels.ampere.rule import Static, spread, tables_of
from pallas_kernels.ampere.walk import Config
from pallas_kernels.backward.channel_gradients_step import ChannelGradients
from pallas_kernels.backward.channel_rule import ChannelCotangents
from pallas_kernels.backward.gradients import join_dbeta, join_weight
from pallas_kernels.backward.rule import OutputCotangents
from pallas_kernels.backward.strengths import mantissa
from pallas_kernels.chunks.channel_arrays import ChannelArrays
from pallas_kernels.device.launch import compiled


def backward(
    x: ChannelArrays,
    dims: Dims,
    residuals: Residuals,
    cotangents: OutputCotangents,
    *,
    scale: float,
    state_layout: str = "kv",
    config: Config | None = None,
    interpret: Any = None,
) -> ChannelCotangents:
    """Gradients of <do, o> + <dfinal, final state> for a call of the forward, in bfloat16.

    Args: those of the forward, with q and k as they entered it (after an L2 norm, whose gradient is the caller's).
      residuals: of `channel_rule.forward` on the same arguments.
      cotangents: of both outputs.
      config: of both walks, None for a choice from the shapes.
      interpret: parameters of Pallas' interpreter, None to compile.

    Numerics: as of `backward.channel_rule.backward`.
    """
    (B, T), do = dims[:2], cotangents.do
    x, dims = batched(x, dims)
    cotangents = cotangents._replace(do=do.reshape(*x.q.shape[:2], *do.shape[2:]))
    static = Static(dims, float(scale), state_layout == "kv", 0, config, interpret)
    tables = tables_of(x.cu_seqlens, dims.T)
    out = compiled(_run, interpret)(static, x._replace(cu_seqlens=None), tables, residuals, cotangents)
    tokens = (None if y is None else y.reshape(B, T, *y.shape[2:]) for y in out[:6])
    return ChannelCotangents._make((*tokens, out.dh_0))


def _dbeta(sums: ChannelGradients, beta: Float[Array, "chunks HO C"], factor: Float[Array, "chunks HO C"]):
    """The gradient of the write strengths of every chunk."""
    weight = join_weight(sums.k_late, sums.k_write)
    return join_dbeta(sums.dv_u, sums.k_write, beta, factor, weight)


def _run(
    static: Static,
    x: ChannelArrays,
    tables: Packed | None,
    residuals: Residuals,
    cotangents: OutputCotangents,
) -> ChannelCotangents:
    """The kernels in order, with the padding around them."""
    dims, dtype = static.dims, x.k.dtype
    rows = Rows(dims.B, dims.T, tables)
    beta, pairs = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), residuals[:2])
    tokens = x.q, x.k, x.e, gates(x), x.v, cotangents.do.astype(dtype)
    q, k, e, g, v, do = (None if y is None else spread(y, rows) for y in tokens)
    assert q is not None and k is not None and g is not None and do is not None
    vectors, of = decays.channel_factors(beta, pairs.gl), (decays.CHANNELS, adjoints.CHANNELS)
    walks = walked(
        static,
        rows,
        pairs._asdict(),
        v,
        do,
        residuals,
        (vectors, vectors),
        x.initial_state,
        cotangents.dfinal,
        of,
    )
    factor = mantissa(beta, dtype)
    u = (walks.w.astype(jnp.float32) * _of_tokens(factor)[..., None]).astype(dtype)
    options: dict[str, Any] = dict(scale=static.scale, interpret=static.interpret)
    sums = channel_gradients(q, k, e, g, pairs.gl, do, walks.dv, u, walks.h, walks.dh, **options)
    dbeta = None if x.beta is None else rows.by_token(_dbeta(sums, beta, factor)).astype(x.beta.dtype)
    return ChannelCotangents(
        of_heads(sums.dq, rows, dims.Hq, dims.K),
        of_heads(sums.dk, rows, dims.Hk, dims.K),
        None if sums.de is None else of_heads(sums.de, rows, dims.HO, dims.K),
        of_heads(walks.dv, rows, x.v.shape[2], dims.V).astype(x.v.dtype),
        rows.back(sums.dg[..., : dims.K]).astype(x.g.dtype),
        dbeta,
        walks.dh_0,
    )


def _of_tokens(y: Float[Array, "chunks HO C"]) -> Float[Array, "places HO"]:
    """Numbers by chunk and head as numbers by place and head."""
    return y.swapaxes(1, 2).reshape(-1, y.shape[1])
