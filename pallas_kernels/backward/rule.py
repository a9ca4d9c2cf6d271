"""The backward of the gated delta rule on Hopper: composition of the kernels and padding. No device code.

    [segment_adjoints  ->  segment_states]  ->  chains (states forward and their cotangents backward)
        ->  gradients (everything else, all chunks in parallel)

The part in brackets runs where the forward cut the sequences into segments and that pays here too: it finds the
cotangent at the end of every segment, with what the forward found a segment to do to a state.

Memory while it runs: both states at every chunk, 2 K V of q's dtype for each head and 64 tokens, and u and dv, V each
for each token and head.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from gdn_jax.shapes import AnyStates, Dims, Outputs, RuleArrays, changes_segment
from pallas_kernels.backward import chain
from pallas_kernels.backward import gradients as gradients_kernel
from pallas_kernels.backward.chains import chains
from pallas_kernels.backward.gradients import JOIN, MAX_LIFT, gradients, join_dbeta, join_weight
from pallas_kernels.backward.reach import Entry, OpenAdjoints, choose_open
from pallas_kernels.backward.segment_adjoints import segment_adjoints
from pallas_kernels.backward.strengths import mantissa, power
from pallas_kernels.chunks.segment_states import segment_states
from pallas_kernels.device.launch import compiled
from pallas_kernels.device.layouts import CHUNK, GRANULE, LOG2_E, RESET_G2, round_up
from pallas_kernels.device.memory import cut_states, pad, pad_states
from pallas_kernels.device.needs import Needs
from pallas_kernels.work.residuals import Residuals, Segments
from pallas_kernels.work.split import Work, chain_warpgroups, segments_pay, work_of
from pallas_kernels.work.tables import (
    VisitTables,
    as_rows,
    borders,
    common_length,
    known_lengths,
    visit_of_token,
    visit_tables,
)

NEEDS = Needs.TMA | Needs.WGMMA


@dataclasses.dataclass(frozen=True)
class Config:
    """How the backward runs, not what it computes. None stands for a choice from the shapes."""

    segments: bool | None = None
    """Whether the chains are cut into segments, where the forward's were."""
    state_warpgroups: int | None = None
    """64-row tiles of the state in one CTA of the chains, 1 or 2."""
    chains: chain.Config | None = None
    gradients: gradients_kernel.Config | None = None


class Cotangents(NamedTuple):
    """Cotangents of the inputs, each in its input's dtype; None where the input is None."""

    dq: Float[Array, "B T Hq K"]
    dk: Float[Array, "B T Hk K"]
    dv: Float[Array, "B T HV V"]
    dg: Float[Array, "B T HO"] | None
    dbeta: Float[Array, "B T HO"] | None
    dh_0: Float[Array, "N HO _ _"] | None


class OutputCotangents(NamedTuple):
    """Cotangents of both outputs of the rule."""

    do: Outputs
    dfinal: AnyStates | None
    """None for zeros."""


def backward(
    x: RuleArrays,
    residuals: Residuals,
    cotangents: OutputCotangents,
    *,
    scale: float,
    state_layout: str = "kv",
    config: Config | None = None,
    adjoints: Float[Array, "items HO V64 K64"] | None = None,
    interpret: Any = None,
) -> Cotangents:
    """Gradients of <do, o> + <dfinal, final state> for a call that forward.rule.check_supported accepts.

    Args: those of the forward, with q and k as they entered it (after an L2 norm, whose gradient is the caller's).
      residuals: of forward.rule.forward on the same arguments.
      config: None for a choice from the shapes.
      adjoints: e of `segment_states(backwards=True)`, where it is known; else it is found here.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      Cotangents in the dtypes of the arguments.

    Numerics: operands of products rounded to q's dtype, sums, gates and states in float32; states and adjoints at
      the borders of chunks, u, dv, dP and dL are kept in q's dtype. dg is 0 at resets: below -104, where exp(g) is 0.
      float16 ends at 65504 and 2^-24. Above, a number is infinite and so are gradients: of the inputs and outputs of
      both passes, the state and its adjoint at any chunk, v - k^T S, and 16 times the gradient of what a token writes
      times its beta. Below, digits go; gates are kept out of what is rounded, so that dg and dh_0 hold their relative
      accuracy down to decays of 2^-64 at every token of a chunk. dbeta holds it whatever beta is, also where it is 0.
    """
    config, (B, T), known = config or Config(), x.dims[:2], known_lengths(x.cu_seqlens)
    as_batch = known is not None and bool(common_length(known, T))  # as in the forward
    if as_batch:
        x, do, known = as_rows(x, x.dims.N), cotangents.do, None
        cotangents = cotangents._replace(do=do.reshape(x.dims.B, -1, *do.shape[2:]))
    tables, packed, dims = None, x.cu_seqlens is not None, x.dims
    if packed:
        tables = visit_tables(borders(x.cu_seqlens, known), round_up(T, 8))
    work, K64, V64 = work_of(dims, packed, known), round_up(dims.K, GRANULE), round_up(dims.V, GRANULE)
    segments, warpgroups = choose_chains(config, dims, K64, V64, work, residuals.segments)
    static = _Static(
        scale=float(scale),
        kv_layout=state_layout == "kv",
        segments=segments,
        chains=config.chains or chain.Config.default(K64, warpgroups),
        gradients=config.gradients,
        interpret=interpret,
    )
    arguments = x._replace(cu_seqlens=None), residuals, cotangents, tables, adjoints
    out = compiled(_run, interpret)(static, *arguments)
    if not as_batch:
        return out
    tokens = (None if y is None else y.reshape(B, T, *y.shape[2:]) for y in out[:5])
    return Cotangents._make((*tokens, out.dh_0))


def choose_chains(
    config: Any, dims: Dims, K64: int, V64: int, work: Work, segments: Segments | None
) -> tuple[bool, int]:
    """Whether the chains are cut into segments, and their state warpgroups.

    Args:
      config: has segments and state_warpgroups, as `Config`.
      segments: of the forward, None where it cut no sequences.
    """
    length = None if segments is None else segments.items.split.segment_chunks
    cut = config.segments if length is not None else False
    if length is not None and cut is None:
        cut = segments_pay(dims, V64, work, length)
    warpgroups = config.state_warpgroups
    if warpgroups is None:
        warpgroups = chain_warpgroups(dims, K64, V64, work, length if cut else None)
    return bool(cut), warpgroups


def open_adjoints(
    x: RuleArrays,
    residuals: Residuals,
    cotangents: OutputCotangents,
    entry: Entry,
    *,
    scale: float,
    interpret: Any = None,
) -> OpenAdjoints:
    """Finds what the cotangents of sequences that come from elsewhere need of the segments of an open forward.

    Args: those of `backward`; cu_seqlens is not known while tracing, and there are cotangents of the final states.
      entry: the sequences that do.

    Numerics: where chains are not cut, without what the maps of segments make smaller than `reach.FAINT`.
    """
    q, k, (do, dfinal), dims = x.q, x.k, cotangents, x.dims
    K64, V64, T8, tables = round_up(dims.K, GRANULE), round_up(dims.V, GRANULE), round_up(dims.T, 8), None
    if x.cu_seqlens is not None:
        tables = visit_tables(borders(x.cu_seqlens, None), T8)
    segments = residuals.segments
    assert segments is not None and dfinal is not None
    walk = choose_open(dims, K64, V64, x.cu_seqlens is not None, segments, entry)
    q8, k8, do8 = (pad(y, (y.shape[0], T8, y.shape[2], round_up(y.shape[3], GRANULE))) for y in (q, k, do))
    dh_T = pad_states(dfinal, dims.K, dims.V, kv_layout=True)
    e = segment_adjoints(
        q8,
        k8,
        do8.astype(k.dtype),
        *residuals[:3],
        dh_T,
        tables,
        scale=scale,
        kv_layout=True,
        items=segments.items,
        walked=walk.walked,
        config=chain.Config.default(K64, walk.warpgroups),
        interpret=interpret,
    )
    ends = at_ends(e, segments, dh_T, num_sequences=dims.N, kv_layout=True, interpret=interpret)
    return OpenAdjoints(e, ends, walk.cut)


def at_ends(
    e, segments: Segments, dh_T, *, num_sequences: int, kv_layout: bool, interpret
) -> Float[Array, "items HO V64 K64"]:
    """The cotangent at the end of every segment, from that at its start by itself and padded ones of final states."""
    options: dict[str, Any] = dict(num_sequences=num_sequences, kv_layout=kv_layout, interpret=interpret)
    return segment_states(e, segments.m_t, dh_T, segments.items, backwards=True, **options)


class _Static(NamedTuple):
    """Everything that a backward is compiled for, besides shapes."""

    scale: float
    kv_layout: bool
    segments: bool
    chains: chain.Config
    gradients: gradients_kernel.Config | None
    interpret: Any


def _run(
    static: _Static,
    x: RuleArrays,
    residuals: Residuals,
    cotangents: OutputCotangents,
    tables: VisitTables | None,
    adjoints: Float[Array, "items HO V64 K64"] | None,
) -> Cotangents:
    """The kernels in order, with the padding around them."""
    (q, k, v, g, beta, initial_state), (do, dfinal), (B, T, N, Hq, Hk, HV, HO, K, V) = (
        x[:6],
        cotangents,
        x.dims,
    )
    if tables is not None:
        N = tables.cu_seqlens.shape[0] - 1
    K64, V64, T8 = round_up(K, GRANULE), round_up(V, GRANULE), round_up(T, 8)
    q8, k8 = pad(q, (B, T8, Hq, K64)), pad(k, (B, T8, Hk, K64))
    v8, do8 = pad(v, (B, T8, HV, V64)), pad(do.astype(v.dtype), (B, T8, HO, V64))
    h_0, dh_T = (pad_states(y, K, V, static.kv_layout) for y in (initial_state, dfinal))
    powers = lift = None
    if k.dtype == jnp.float16:
        powers, lift = power(residuals.beta_t), _lift(residuals.g2_cum, tables, T)
    both: dict[str, Any] = dict(scale=static.scale, interpret=static.interpret)
    walks: dict[str, Any] = dict(**both, kv_layout=static.kv_layout, config=static.chains)
    segments, items = residuals.segments if static.segments else None, None
    if segments is not None:
        items, h_0, e = segments.items, segments.starts, adjoints
        if e is None:
            e = segment_adjoints(q8, k8, do8, *residuals[:3], dh_T, tables, items=items, **walks)
        layout = dict(kv_layout=static.kv_layout, interpret=static.interpret)
        dh_T = at_ends(e, segments, dh_T, num_sequences=N, **layout)
    walked = chains(
        q8,
        k8,
        v8,
        do8,
        residuals.g2_cum,
        residuals.beta_t,
        residuals.t,
        h_0,
        dh_T,
        tables,
        with_dh_0=initial_state is not None,
        items=items,
        **walks,
    )
    sums = gradients(
        q8,
        k8,
        do8,
        walked.u,
        walked.dv,
        walked.h,
        walked.dh,
        residuals.g2_cum,
        tables,
        power=powers,
        lift=lift,
        config=static.gradients,
        **both,
    )
    dg, dbeta = by_token(sums.dg, tables, B, T), None
    if beta is not None:
        dbeta = strength_gradient(sums.dv_u, sums.k_write, beta, tables, k.dtype)
    if g is not None:
        dg = jnp.where(has_no_past(x, None if tables is None else tables.cu_seqlens), 0.0, dg).astype(g.dtype)
    dh_0 = None
    if initial_state is not None and walked.dh_0 is not None:
        dh_0 = cut_states(walked.dh_0, K, V, static.kv_layout).astype(initial_state.dtype)
    return Cotangents(
        sum_heads(sums.dq, Hq)[:, :T, :, :K],
        sums.dk[:, :T, :, :K],
        sum_heads(walked.dv, HV)[:, :T, :, :V].astype(v.dtype),
        None if g is None else dg,
        dbeta,
        dh_0,
    )


def strength_gradient(
    dv_u: jax.Array,
    k_write: jax.Array,
    beta: jax.Array,
    tables: VisitTables | None,
    dtype,
    k_late: jax.Array | None = None,
) -> Float[Array, "B T HO"]:
    """dbeta in beta's dtype from its two sums [visits, HO, C], of calls whose keys have a dtype.

    k_late: the part of k_write that `join_weight` takes; None where the weight is JOIN.
    """
    strengths, (B, T, HO) = beta.astype(jnp.float32), beta.shape
    if tables is None:  # joined as the sums lie, so that only beta and the result change places
        padded = jnp.pad(strengths, ((0, 0), (0, -T % CHUNK), (0, 0)))
        strengths = padded.reshape(-1, CHUNK, HO).swapaxes(1, 2)
        return by_token(_join(dv_u, k_write, strengths, k_late, dtype), None, B, T).astype(beta.dtype)
    # whatever the padding holds
    strengths = jnp.where((jnp.arange(T) < tables.cu_seqlens[-1])[:, None], strengths, 0.0)
    dv_u, k_write = (by_token(x, tables, B, T) for x in (dv_u, k_write))
    k_late = None if k_late is None else by_token(k_late, tables, B, T)
    return _join(dv_u, k_write, strengths, k_late, dtype).astype(beta.dtype)


def _join(dv_u, k_write, strengths, k_late, dtype) -> jax.Array:
    """`join_dbeta` of arrays of one shape."""
    weight = JOIN if k_late is None else join_weight(k_late, k_write)
    return join_dbeta(dv_u, k_write, strengths, mantissa(strengths, dtype), weight)


def sum_heads(x: jax.Array, heads: int) -> jax.Array:
    """Sums over the heads that read one head of an input."""
    B, T, H, D = x.shape
    if heads == H:
        return x
    return jnp.sum(x.reshape(B, T, heads, H // heads, D).astype(jnp.float32), axis=3).astype(x.dtype)


def by_token(x: jax.Array, tables: VisitTables | None, B: int, T: int) -> jax.Array:
    """[visits, HO, C] as [B, T, HO]; 0 for the padding of packed rows."""
    HO = x.shape[1]
    if tables is None:
        return x.reshape(B, -1, HO, CHUNK).swapaxes(2, 3).reshape(B, -1, HO)[:, :T]
    token = jnp.arange(T, dtype=jnp.int32)
    visit, _ = visit_of_token(T, tables)
    rows = x.swapaxes(1, 2).reshape(-1, HO)[visit * CHUNK + token % CHUNK]
    return jnp.where((token < tables.cu_seqlens[-1])[:, None], rows, 0.0)[None]


def _lift(g2_cum: jax.Array, tables: VisitTables | None, T: int) -> jax.Array:
    """[visits, HO] least decay between two tokens of a visit, -log2: no entry of Gamma below its diagonal is more."""
    B, HO, T64 = g2_cum.shape
    token = jnp.arange(T64, dtype=jnp.int32)
    decay = jnp.pad(g2_cum[..., :-1] - g2_cum[..., 1:], ((0, 0), (0, 0), (1, 0)))
    has_past = (token % CHUNK > 0) & (token < T)
    if tables is None:
        decay = jnp.where(has_past, decay, MAX_LIFT).reshape(B, HO, -1, CHUNK)
        return jnp.min(decay, axis=3, initial=MAX_LIFT).swapaxes(1, 2).reshape(-1, HO)
    visit, begin = visit_of_token(T64, tables)
    has_past = has_past & (token > begin) & (token < tables.cu_seqlens[-1])
    least = jnp.full((tables.chunk.shape[0], HO), MAX_LIFT, g2_cum.dtype)
    return least.at[visit].min(jnp.where(has_past, decay[0], MAX_LIFT).T, mode="drop")


def has_no_past(x: RuleArrays, cu_seqlens: Any) -> Bool[Array, "B T _"]:
    """[B, T, HO or 1] tokens whose gate multiplies nothing: after a reset, or zeros before the first token."""
    none = x.g.astype(jnp.float32) * LOG2_E <= RESET_G2
    if x.segment_ids is not None:
        none = none | changes_segment(x.segment_ids)[..., None]
    if x.initial_state is None:
        token = lax.broadcasted_iota(jnp.int32, x.g.shape[:2], 1)
        if cu_seqlens is None:
            is_first = token == 0
        else:
            starts = jnp.zeros((x.g.shape[1],), bool).at[jnp.asarray(cu_seqlens)].set(True, mode="drop")
            is_first = starts[None]
        none = none | is_first[..., None]
    return none
