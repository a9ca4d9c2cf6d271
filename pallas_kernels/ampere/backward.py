"""The backward of the gated delta rule by mma.sync: composition of the kernels and padding. No device code.

    states (the walk forwards again)  ->  adjoints (the walk backwards)  ->  gradients (all chunks in parallel)

Rows that the forward cut are walked in the same segments; adjoints then runs twice.

Memory while it runs: both states at every chunk, 2 K V of q's dtype for each head and 64 tokens, w and dv, V each for
each token and head, and dq and dk of every output head.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.shapes import RuleArrays
from pallas_kernels.ampere.adjoints import adjoint_factors, adjoints
from pallas_kernels.ampere.gradients import Gradients, gradients
from pallas_kernels.ampere.rows import Packed, Rows
from pallas_kernels.ampere.rule import Residuals, batched, padded_states, spread, tables_of
from pallas_kernels.ampere.segments import first_chunks, joined_backwards, of_layout
from pallas_kernels.ampere.states import factors, states
from pallas_kernels.ampere.walk import Config
from pallas_kernels.backward.gradients import MAX_LIFT, join_dbeta
from pallas_kernels.backward.rule import Cotangents, OutputCotangents, has_no_past, sum_heads
from pallas_kernels.backward.strengths import mantissa, power
from pallas_kernels.device.launch import compiled


class _Static(NamedTuple):
    """Everything that a backward is compiled for, besides shapes."""

    scale: float
    kv_layout: bool
    config: Config | None
    interpret: Any


def backward(
    x: RuleArrays,
    residuals: Residuals,
    cotangents: OutputCotangents,
    *,
    scale: float,
    state_layout: str = "kv",
    config: Config | None = None,
    interpret: Any = None,
) -> Cotangents:
    """Gradients of <do, o> + <dfinal, final state> for a call that `rule.check_supported` accepts.

    Args: those of `rule.forward`, with q and k as they entered it (after an L2 norm, whose gradient is the caller's).
      residuals: of `rule.forward` on the same arguments.
      config: of both walks, None for a choice from the shapes.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      Cotangents in the dtypes of the arguments.

    Numerics: as `backward.rule.backward`, but that write strengths below 2^-20 lose digits in dv and dh_0 in float16.
    """
    static, (B, T) = _Static(float(scale), state_layout == "kv", config, interpret), x.dims[:2]
    x, do = batched(x), cotangents.do
    cotangents = cotangents._replace(do=do.reshape(*x.q.shape[:2], *do.shape[2:]))
    out = compiled(_run, interpret)(static, x, tables_of(x), residuals, cotangents)
    tokens = (None if y is None else y.reshape(B, T, *y.shape[2:]) for y in out[:5])
    return Cotangents._make((*tokens, out.dh_0))


def _lift(g2_cum: Float[Array, "chunks HO C"], rows: Rows) -> Float[Array, "chunks HO"]:
    """Least decay between two tokens of a chunk, -log2: no entry of Gamma below its diagonal is more."""
    is_token = rows.by_chunk(jnp.ones((rows.B, rows.T, 1), jnp.float32))[..., 1:] > 0
    decay = jnp.where(is_token, g2_cum[..., :-1] - g2_cum[..., 1:], MAX_LIFT)
    return jnp.min(decay, axis=2, initial=MAX_LIFT)


def _gate_gradient(sums: Gradients, g2_cum: Float[Array, "chunks HO C"]) -> Float[Array, "chunks HO C"]:
    """dg of every token of a chunk."""
    not_before = lax.cumsum(sums.x, axis=2, reverse=True)
    before = jnp.pad(lax.cumsum(sums.l, axis=2)[..., :-1], ((0, 0), (0, 0), (1, 0)))
    return not_before + before + (jnp.exp2(g2_cum[..., -1]) * sums.inner)[..., None]


def _run(
    static: _Static,
    x: RuleArrays,
    tables: Packed | None,
    residuals: Residuals,
    cotangents: OutputCotangents,
) -> Cotangents:
    """The kernels in order, with the padding around them."""
    dims, (do, dfinal) = x.dims, cotangents
    g2_cum, strengths, t, p = (y.reshape(-1, *y.shape[2:]) for y in residuals[:4])
    rows, dtype, kv_layout = Rows(dims.B, dims.T, tables), x.k.dtype, static.kv_layout
    q, k, v, do = (spread(y, rows) for y in (*x[:3], do.astype(dtype)))
    h_0, dh_T = (padded_states(y, dims, kv_layout) for y in (x.initial_state, dfinal))
    first_chunk = jnp.asarray(rows.first_chunk)
    both: dict[str, Any] = dict(config=static.config, interpret=static.interpret)
    walked = q, k, do, t, p, adjoint_factors(g2_cum, strengths)
    starts, m = residuals.starts, residuals.m
    if starts is not None and m is not None:
        first_chunk = jnp.asarray(first_chunks(rows, -(-residuals.t.shape[1] // starts.shape[1])))
        e = adjoints(
            *walked, None, first_chunk, scale=static.scale, kv_layout=False, only_dh_0=True, **both
        ).dh_0
        assert e is not None
        after = joined_backwards(of_layout(dh_T, kv_layout), e.reshape(starts.shape), m)
        (h_0, dh_T), kv_layout = (y.reshape(-1, *y.shape[2:]) for y in (starts, after)), False
    both |= dict(kv_layout=kv_layout)
    h, w = states(k, v, t, factors(g2_cum, strengths), h_0, first_chunk, **both)
    wanted = x.initial_state is not None
    back = adjoints(*walked, dh_T, first_chunk, scale=static.scale, with_dh_0=wanted, **both)
    assert back.dh is not None and back.dv is not None
    is_float16, factor = dtype == jnp.float16, mantissa(strengths, dtype)
    sums = gradients(
        q,
        k,
        do,
        w,
        back.dv,
        h,
        back.dh,
        g2_cum,
        factor,
        power=power(strengths) if is_float16 else None,
        lift=_lift(g2_cum, rows) if is_float16 else None,
        scale=static.scale,
        interpret=static.interpret,
    )
    dbeta = dg = dh_0 = None
    if x.beta is not None:
        by_chunk = join_dbeta(factor * sums.dv_w, sums.k_write, strengths, factor)
        dbeta = rows.by_token(by_chunk).astype(x.beta.dtype)
    if x.g is not None:
        dg = rows.by_token(_gate_gradient(sums, g2_cum))
        dg = jnp.where(has_no_past(x, x.cu_seqlens), 0.0, dg).astype(x.g.dtype)
    if x.initial_state is not None and back.dh_0 is not None:
        dh_0 = back.dh_0
        if starts is not None:
            dh_0 = dh_0.reshape(starts.shape)[:, 0]
            dh_0 = dh_0.swapaxes(-1, -2) if static.kv_layout else dh_0
        shape = (dims.K, dims.V) if static.kv_layout else (dims.V, dims.K)
        dh_0 = dh_0[:, :, : shape[0], : shape[1]].astype(x.initial_state.dtype)
    return Cotangents(
        _of_heads(sums.dq, rows, dims.Hq, dims.K),
        _of_heads(sums.dk, rows, dims.Hk, dims.K),
        _of_heads(back.dv, rows, dims.HV, dims.V).astype(x.v.dtype),
        dg,
        dbeta,
        dh_0,
    )


def _of_heads(x: Float[Array, "places HO _"], rows: Rows, heads: int, width: int) -> Float[Array, "B T _ _"]:
    """The gradient of an input with so many heads, from that of every output head."""
    return sum_heads(rows.back(x[..., :width]), heads)
