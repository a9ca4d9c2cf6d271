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
from pallas_kernels.ampere import adjoints as of_adjoints
from pallas_kernels.ampere.adjoints import adjoint_factors, adjoints
from pallas_kernels.ampere.decays import HEADS
from pallas_kernels.ampere.gradients import Gradients, gradients
from pallas_kernels.ampere.rows import Packed, Rows
from pallas_kernels.ampere.rule import Residuals, Static, batched, spread, tables_of
from pallas_kernels.ampere.segments import first_chunks, joined_backwards, of_layout
from pallas_kernels.ampere.states import factors, states
from pallas_kernels.ampere.walk import Config
from pallas_kernels.backward.gradients import MAX_LIFT, join_dbeta
from pallas_kernels.backward.rule import Cotangents, OutputCotangents, has_no_past, sum_heads
from pallas_kernels.backward.strengths import mantissa, power
from pallas_kernels.device.launch import compiled
from pallas_kernels.device.memory import cut_states, pad_states


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
    (B, T), x, do = x.dims[:2], batched(x), cotangents.do
    static = Static(x.dims, float(scale), state_layout == "kv", 0, config, interpret)
    cotangents = cotangents._replace(do=do.reshape(*x.q.shape[:2], *do.shape[2:]))
    out = compiled(_run, interpret)(static, x, tables_of(x.cu_seqlens, x.dims.T), residuals, cotangents)
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
    static: Static,
    x: RuleArrays,
    tables: Packed | None,
    residuals: Residuals,
    cotangents: OutputCotangents,
) -> Cotangents:
    """The kernels in order, with the padding around them."""
    dims, dtype = static.dims, x.k.dtype
    g2_cum, strengths = (y.reshape(-1, *y.shape[2:]) for y in residuals[:2])
    rows = Rows(dims.B, dims.T, tables)
    q, k, v, do = (spread(y, rows) for y in (*x[:3], cotangents.do.astype(dtype)))
    vectors = factors(g2_cum, strengths), adjoint_factors(g2_cum, strengths)
    back = walked(
        static, rows, {"q": q, "k": k}, v, do, residuals, vectors, x.initial_state, cotangents.dfinal
    )
    is_float16, factor = dtype == jnp.float16, mantissa(strengths, dtype)
    sums = gradients(
        q,
        k,
        do,
        back.w,
        back.dv,
        back.h,
        back.dh,
        g2_cum,
        factor,
        power=power(strengths) if is_float16 else None,
        lift=_lift(g2_cum, rows) if is_float16 else None,
        scale=static.scale,
        interpret=static.interpret,
    )
    dbeta = dg = None
    if x.beta is not None:
        by_chunk = join_dbeta(factor * sums.dv_w, sums.k_write, strengths, factor)
        dbeta = rows.by_token(by_chunk).astype(x.beta.dtype)
    if x.g is not None:
        dg = rows.by_token(_gate_gradient(sums, g2_cum))
        dg = jnp.where(has_no_past(x, x.cu_seqlens), 0.0, dg).astype(x.g.dtype)
    return Cotangents(
        of_heads(sums.dq, rows, dims.Hq, dims.K),
        of_heads(sums.dk, rows, dims.Hk, dims.K),
        of_heads(back.dv, rows, dims.HV, dims.V).astype(x.v.dtype),
        dg,
        dbeta,
        back.dh_0,
    )


class Walked(NamedTuple):
    """Both walks' results."""

    h: Float[Array, "chunks HO V K"]
    w: Float[Array, "places HO V"]
    dh: Float[Array, "chunks HO V K"]
    dv: Float[Array, "places HO V"]
    dh_0: Float[Array, "N HO _ _"] | None
    """In the layout of the rule; None without an initial state."""


def walked(
    static: Static,
    rows: Rows,
    keys: dict[str, Any],
    v: Any,
    do: Any,
    residuals: Any,
    vectors: tuple[Any, Any],
    initial_state: Any,
    dfinal: Any,
    decays: tuple[Any, Any] = (HEADS, of_adjoints.HEADS),
) -> Walked:
    """The walks of a backward, in the segments of the forward.

    Args:
      keys, v, do, vectors, decays: of `states` and `adjoints`, vectors and decays of each.
      residuals: with t, p, starts and m.
    """
    dims, (t, p) = static.dims, (y.reshape(-1, *y.shape[2:]) for y in (residuals.t, residuals.p))
    (starts, m), kv_layout = (residuals.starts, residuals.m), static.kv_layout
    h_0, dh_T = (pad_states(y, dims.K, dims.V, kv_layout) for y in (initial_state, dfinal))
    first_chunk = jnp.asarray(rows.first_chunk)
    both: dict[str, Any] = dict(config=static.config, interpret=static.interpret)
    back: dict[str, Any] = dict(scale=static.scale, of=decays[1])
    arrays = keys, do, t, p, vectors[1]
    if starts is not None and m is not None:
        first_chunk = jnp.asarray(first_chunks(rows, -(-residuals.t.shape[1] // starts.shape[1])))
        e = adjoints(*arrays, None, first_chunk, kv_layout=False, only_dh_0=True, **back, **both).dh_0
        assert e is not None
        after = joined_backwards(of_layout(dh_T, kv_layout), e.reshape(starts.shape), m)
        (h_0, dh_T), kv_layout = (y.reshape(-1, *y.shape[2:]) for y in (starts, after)), False
    both |= dict(kv_layout=kv_layout)
    h, w = states(keys, v, t, vectors[0], h_0, first_chunk, decays=decays[0], **both)
    wanted = initial_state is not None
    result = adjoints(*arrays, dh_T, first_chunk, with_dh_0=wanted, **back, **both)
    assert result.dh is not None and result.dv is not None
    dh_0 = result.dh_0
    if wanted and dh_0 is not None:
        if starts is not None:
            dh_0 = dh_0.reshape(starts.shape)[:, 0]
            dh_0 = dh_0.swapaxes(-1, -2) if static.kv_layout else dh_0
        dh_0 = cut_states(dh_0, dims.K, dims.V, static.kv_layout).astype(initial_state.dtype)
    return Walked(h, w, result.dh, result.dv, dh_0)


def of_heads(x: Float[Array, "places HO _"], rows: Rows, heads: int, width: int) -> Float[Array, "B T _ _"]:
    """The gradient of an input with so many heads, from that of every output head."""
    return sum_heads(rows.back(x[..., :width]), heads)
