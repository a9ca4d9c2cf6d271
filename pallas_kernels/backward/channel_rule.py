"""The backward of the delta rule with a decay of each channel on Hopper: composition of the kernels and padding.

    [channel_segment_adjoints  ->  segment_states]  ->  channel_chains  ->  channel_gradients

The part in brackets runs where the forward cut the sequences into segments and that pays here too, as in
`backward.rule`. What `chunks.pairs` made for the forward is not made again.

Memory while it runs: as of `backward.rule`, and gradients of q and k for each output head.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.shapes import Dims, changes_segment
from pallas_kernels.backward import channel_chain, channel_gradients_work
from pallas_kernels.backward.channel_chains import channel_chains
from pallas_kernels.backward.channel_gradients import channel_gradients
from pallas_kernels.backward.channel_segment_adjoints import channel_segment_adjoints
from pallas_kernels.backward.reach import Entry, OpenAdjoints, choose_open
from pallas_kernels.backward.rule import (
    OutputCotangents,
    at_ends,
    choose_chains,
    strength_gradient,
    sum_heads,
)
from pallas_kernels.chunks import channel_stages
from pallas_kernels.chunks.channel_arrays import ChannelArrays, ChannelResiduals, batched
from pallas_kernels.device.launch import compiled
from pallas_kernels.device.layouts import GRANULE, round_up
from pallas_kernels.device.memory import cut_states, pad, pad_states
from pallas_kernels.device.needs import Needs
from pallas_kernels.work import halves
from pallas_kernels.work.split import work_of
from pallas_kernels.work.tables import VisitTables, borders, known_lengths, visit_tables

NEEDS = Needs.TMA | Needs.WGMMA


@dataclasses.dataclass(frozen=True)
class Config:
    """How the backward runs, not what it computes. None stands for a choice from the shapes."""

    segments: bool | None = None
    """Whether the chains are cut into segments, where the forward's were."""
    state_warpgroups: int | None = None
    """64-row tiles of the state in one CTA of the chains, 1 or 2."""
    chains: channel_stages.Config | None = None
    gradients: channel_gradients_work.Config | None = None


class ChannelCotangents(NamedTuple):
    """Cotangents of the first arrays of `ChannelArrays`, each in its array's dtype; None where the array is None."""

    dq: Float[Array, "B T Hq K"]
    dk: Float[Array, "B T Hk K"]
    """Without what reaches the keys through erase keys that are given."""
    de: Float[Array, "B T HO K"] | None
    dv: Float[Array, "B T HV V"]
    dg: Float[Array, "B T HO K"]
    dbeta: Float[Array, "B T HO"] | None
    dh_0: Float[Array, "N HO _ _"] | None


def check_supported(dtype) -> str | None:
    """Why these kernels cannot run the backward of a forward of theirs; None if they can.

    Args:
      dtype: of q, k and v.
    """
    if dtype == jnp.bfloat16:
        return None
    return f"q, k and v are {jnp.dtype(dtype).name}; with a decay of each channel the backward takes bfloat16"


def backward(
    x: ChannelArrays,
    dims: Dims,
    residuals: ChannelResiduals,
    cotangents: OutputCotangents,
    *,
    scale: float,
    state_layout: str = "kv",
    config: Config | None = None,
    adjoints: Float[Array, "items HO V64 K64"] | None = None,
    interpret: Any = None,
) -> ChannelCotangents:
    """Gradients of <do, o> + <dfinal, final state> for a call of the forward whose dtype check_supported accepts.

    Args: those of the forward, with q and k as they entered it (after an L2 norm, whose gradient is the caller's).
      residuals: of forward.channel_rule.forward on the same arguments.
      cotangents: of both outputs.
      config: None for a choice from the shapes.
      adjoints: e of `segment_states(backwards=True)`, where it is known; else it is found here.
      interpret: parameters of Pallas' interpreter, None to compile.

    Numerics: operands of products rounded to q's dtype, sums, gates and states in float32; states and adjoints at the
      borders of chunks, u, dv, dP and dL are kept in q's dtype. dg is 0 at resets: below -104, where exp(g) is 0.
    """
    config, B, (x, dims) = config or Config(), dims.B, batched(x, dims)  # as in the forward
    known, do = known_lengths(x.cu_seqlens), cotangents.do
    cotangents = cotangents._replace(do=do.reshape(dims.B, -1, *do.shape[2:]))
    packed, K64, V64 = x.cu_seqlens is not None, round_up(dims.K, GRANULE), round_up(dims.V, GRANULE)
    visits = visit_tables(borders(x.cu_seqlens, known), dims.T) if packed else None
    work = work_of(dims, packed, known)
    segments, warpgroups = choose_chains(config, dims, K64, V64, work, residuals.segments)
    static = _Static(
        dims=dims,
        scale=float(scale),
        kv_layout=state_layout == "kv",
        segments=segments,
        chains=config.chains or channel_chain.default_config(K64, warpgroups),
        gradients=config.gradients,
        interpret=interpret,
    )
    arguments = x._replace(cu_seqlens=None), residuals, cotangents, visits, adjoints
    out = compiled(_run, interpret)(static, *arguments)
    tokens = (None if y is None else y.reshape(B, -1, *y.shape[2:]) for y in out[:6])
    return ChannelCotangents._make((*tokens, out.dh_0))


def open_adjoints(
    x: ChannelArrays,
    dims: Dims,
    residuals: ChannelResiduals,
    cotangents: OutputCotangents,
    entry: Entry,
    *,
    interpret: Any = None,
) -> OpenAdjoints:
    """`backward.rule.open_adjoints` where each channel decays by itself."""
    (do, dfinal), (pairs, beta_t, segments), packed = cotangents, residuals, x.cu_seqlens is not None
    T8 = x.v.shape[1] if x.of_halves else round_up(dims.T, 8)
    K64, V64 = round_up(dims.K, GRANULE), round_up(dims.V, GRANULE)
    assert segments is not None and dfinal is not None
    walk = choose_open(dims, K64, V64, packed, segments, entry)
    dh_T = pad_states(dfinal, dims.K, dims.V, kv_layout=True)
    e = channel_segment_adjoints(
        pad(do.astype(x.v.dtype), (dims.B, T8, dims.HO, V64)),
        beta_t,
        pairs,
        dh_T,
        visit_tables(borders(x.cu_seqlens, None), dims.T) if packed else None,
        kv_layout=True,
        items=segments.items,
        of_halves=x.of_halves,
        walked=walk.walked,
        config=channel_chain.default_config(K64, walk.warpgroups),
        interpret=interpret,
    )
    ends = at_ends(e, segments, dh_T, num_sequences=dims.N, kv_layout=True, interpret=interpret)
    return OpenAdjoints(e, ends, walk.cut)


class _Static(NamedTuple):
    """Everything that a backward is compiled for, besides shapes."""

    dims: Dims
    scale: float
    kv_layout: bool
    segments: bool
    chains: channel_stages.Config
    gradients: channel_gradients_work.Config | None
    interpret: Any


def _run(
    static: _Static,
    x: ChannelArrays,
    residuals: ChannelResiduals,
    cotangents: OutputCotangents,
    visits: VisitTables | None,
    adjoints: Float[Array, "items HO V64 K64"] | None,
) -> ChannelCotangents:
    """The kernels in order, with the padding around them."""
    dims, f32 = static.dims, jnp.float32
    B, T, N, K, V = dims.B, dims.T, dims.N, dims.K, dims.V
    T8, K64, V64 = round_up(T, 8), round_up(K, GRANULE), round_up(V, GRANULE)
    if x.of_halves:
        T8 = T // 2
    g = x.g.astype(f32)
    if x.segment_ids is not None:
        g = jnp.where(changes_segment(x.segment_ids)[..., None, None], -jnp.inf, g)
    q, k, e, g = (None if y is None else pad(y, (B, T8, y.shape[2], K64)) for y in (x.q, x.k, x.e, g))
    v, do = (pad(y.astype(x.v.dtype), (B, T8, y.shape[2], V64)) for y in (x.v, cotangents.do))
    assert q is not None and k is not None and g is not None
    h_0, dh_T = (pad_states(y, K, V, static.kv_layout) for y in (x.initial_state, cotangents.dfinal))
    pairs, beta_t, segments = residuals
    walks: dict[str, Any] = dict(kv_layout=static.kv_layout, config=static.chains, interpret=static.interpret)
    walks |= dict(of_halves=x.of_halves)
    items = None
    if static.segments and segments is not None:
        items, h_0 = segments.items, segments.starts
        ends = adjoints
        if ends is None:
            ends = channel_segment_adjoints(do, beta_t, pairs, dh_T, visits, items=items, **walks)
        layout = dict(kv_layout=static.kv_layout, interpret=static.interpret)
        dh_T = at_ends(ends, segments, dh_T, num_sequences=N, **layout)
    with_dh_0 = x.initial_state is not None
    walked = channel_chains(
        v, do, beta_t, pairs, h_0, dh_T, visits, with_dh_0=with_dh_0, items=items, **walks
    )
    sums = channel_gradients(
        q,
        k,
        e,
        g,
        pairs.gl,
        do,
        walked.dv,
        walked.u,
        walked.h,
        walked.dh,
        visits,
        of_halves=x.of_halves,
        scale=static.scale,
        config=static.gradients,
        interpret=static.interpret,
    )
    dbeta = None
    if x.beta is not None:
        dbeta = strength_gradient(sums.dv_u, sums.k_write, x.beta, visits, k.dtype, sums.k_late)
    dh_0 = None
    if x.initial_state is not None and walked.dh_0 is not None:
        dh_0 = cut_states(walked.dh_0, K, V, static.kv_layout).astype(x.initial_state.dtype)
    return ChannelCotangents(
        sum_heads(sums.dq, dims.Hq)[:, :T, :, :K],
        sum_heads(sums.dk, dims.Hk)[:, :T, :, :K],
        None if x.e is None or sums.de is None else sum_heads(sums.de, x.e.shape[2])[:, :T, :, :K],
        sum_heads(halves.second(walked.dv) if x.of_halves else walked.dv, x.v.shape[2])[:, :T, :, :V],
        sums.dg[:, :T, :, :K].astype(x.g.dtype),
        dbeta,
        dh_0,
    )
