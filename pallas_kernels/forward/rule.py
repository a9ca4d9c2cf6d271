"""The forward of the gated delta rule on Hopper: composition of the kernels, choice of the split, padding.

    chunk_gates  ->  gated_inverse  ->  [segment_transitions  ->  segment_states]  ->  outputs

The part in brackets runs only where there are too few sequences and heads to fill the GPU: sequences are then cut
into segments, whose effect on a state is computed for all of them at once. That is exact, not an approximation.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gdn_jax.shapes import Dims, Outputs, RuleArrays, changes_segment
from pallas_kernels.chunks import inverse as inverse_kernel
from pallas_kernels.chunks.gates import chunk_gates
from pallas_kernels.chunks.inverse import gated_inverse
from pallas_kernels.chunks.segment_states import segment_states
from pallas_kernels.device.launch import compiled, num_sms
from pallas_kernels.device.layouts import CHUNK, GRANULE, L2NORM_EPS, round_up
from pallas_kernels.device.memory import cut_states, pad, pad_states
from pallas_kernels.device.needs import Needs
from pallas_kernels.forward import walk
from pallas_kernels.forward.outputs import default_config, outputs
from pallas_kernels.forward.transitions import segment_transitions
from pallas_kernels.work import refusals
from pallas_kernels.work.residuals import Residuals, Segments, Transition
from pallas_kernels.work.slots import PoolStates
from pallas_kernels.work.split import choose_split, work_of
from pallas_kernels.work.tables import (
    Items,
    as_rows,
    borders,
    common_length,
    known_lengths,
    packed_items,
    row_items,
    share_chunks,
)

NEEDS = Needs.TMA | Needs.WGMMA

MANY_WAVES = 16
"""Waves of CTAs after which the order of the sequences no longer matters."""

MAX_ORDERED = 128
"""Sequences up to which they are ordered: the ranks are N^2 comparisons."""

FOLDED_SCALES = (2.0**-16, 16.0)
"""Scales that the kernels apply: their P holds them, which float16 must have room for. Others are the caller's."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the forward runs, not what it computes. None stands for a choice from the shapes."""

    state_warpgroups: int | None = None
    """64-row tiles of the state in one CTA of the walk, 1 or 2."""
    segment_chunks: int | None = None
    """Chunks of a segment; 0 for whole sequences."""
    inverse: inverse_kernel.Config | None = None
    outputs: walk.Config | None = None
    """Configuration of the walk that writes outputs."""


def check_supported(dims: Dims, dtype, *, chunk_size: int = CHUNK, packed: bool = False) -> str | None:
    """Why these kernels cannot run a call of the rule and its backward, from shapes and dtypes; None if they can.

    Args:
      dims: of gdn_jax.shapes.
      dtype: of q, k and v.
      chunk_size: as asked for.
      packed: whether cu_seqlens is given.
    """
    if (reason := refusals.check_supported(dims, dtype, chunk_size)) is not None:
        return reason
    if dims.K > 256 or dims.V > 256:
        return f"K = {dims.K}, V = {dims.V}; the kernels go up to 256"
    chunks = dims.B * -(-dims.T // CHUNK) + (dims.N if packed else 0)
    largest = max(dims.B * dims.T * max(dims.K, dims.V, CHUNK), chunks * _padded(dims.K) * _padded(dims.V))
    if largest * dims.HO >= 2**40:
        return "the arrays, or the states of all chunks, are larger than the offsets of a bulk copy"
    return None


def _padded(width: int) -> int:
    return round_up(width, GRANULE)


def forward(
    x: RuleArrays,
    *,
    scale: float,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Outputs, Float[Array, "_ HO _ _"], Residuals]:
    """The rule on arguments that gdn_jax.gated_delta_rule has checked, and that check_supported accepts.

    Args: those of gdn_jax.gated_delta_rule.
      x: its initial_state may be slots of a pool that `forward.pools` accepts (`PoolStates`). Tokens of a sequence
        without a slot are finite. Where the values of cu_seqlens are known while tracing (NumPy, or a JAX array that
        is not traced) the work is split by the true lengths, the tables cost nothing at run time, and sequences of
        equal lengths run as a batch. Otherwise the split assumes equal lengths.
      scale: a number within FOLDED_SCALES.
      config: None for a choice from the shapes.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      o in q's dtype, the final states in float32 (or the pool [slots * layers, ...], in which nothing but the named
      slots changes, in place where XLA gives it away) and the residuals (of the batch, where sequences run as one).

    Numerics: operands of products rounded to q's dtype (float16 inside the inverse), sums, gates and states in
      float32. Keys with |k|^2 beta > 2 leave the range where the inverse is accurate: normalise them.
    """
    known, shape = known_lengths(x.cu_seqlens), (*x.q.shape[:2], x.dims.HO, x.dims.V)
    if known is not None and common_length(known, x.dims.T):
        x, known = as_rows(x, x.dims.N), None
    config, dims, packed = config or Config(), x.dims, x.cu_seqlens is not None
    work = work_of(dims, packed, known)
    K64, V64 = _padded(dims.K), _padded(dims.V)
    warpgroups, segment_chunks = choose_split(
        dims, K64, V64, work, state_warpgroups=config.state_warpgroups, segment_chunks=config.segment_chunks
    )
    items, starts, by_length = row_items(dims.B, dims.T, segment_chunks), None, False
    if packed:
        starts = borders(x.cu_seqlens, known)
        # With few waves of CTAs a long one at the end is felt.
        ctas = dims.N * dims.HO * V64 // (GRANULE * warpgroups)
        is_felt = num_sms() < ctas < MANY_WAVES * num_sms() and 1 < dims.N <= MAX_ORDERED
        by_length = is_felt and segment_chunks is None
        items = packed_items(starts, dims.T, segment_chunks, by_length and known is not None)
        if known is not None and not share_chunks(known, dims.T):
            starts = None
    static = _Static(
        scale=float(scale),
        use_qk_l2norm=use_qk_l2norm,
        kv_layout=state_layout == "kv",
        finds_order=by_length and known is None,
        config=dataclasses.replace(config, outputs=config.outputs or default_config(K64, warpgroups)),
        interpret=interpret,
    )
    items, starts = jax.tree.map(jnp.asarray, (items, starts))
    o, final, residuals = compiled(_run, interpret)(static, x._replace(cu_seqlens=None), items, starts)
    return o.reshape(shape), final, residuals


class _Static(NamedTuple):
    """Everything that a forward is compiled for, besides shapes."""

    scale: float
    use_qk_l2norm: bool
    kv_layout: bool
    finds_order: bool
    """Whether packed sequences are started in an order that is found on the device, the longest first."""
    config: Config
    """Its `outputs` is given."""
    interpret: Any


class Prepared(NamedTuple):
    """Everything that is found before any state is known, padded."""

    q: Float[Array, "B T8 Hq K64"]
    k: Float[Array, "B T8 Hk K64"]
    v: Float[Array, "B T8 HV V64"]
    g2_cum: Float[Array, "B HO T64"]
    beta_t: Float[Array, "B HO T64"]
    t: Float[Array, "B HO T64 C"]
    rstd: tuple[jax.Array, jax.Array] | None
    e: Float[Array, "items HO V64 K64"] | None
    m_t: Transition | None
    items: Items


def _run(static: _Static, x: RuleArrays, items: Items, starts):
    """The kernels in order, with the padding around them."""
    return _finish(static, _prepare(static, x, items, starts), x.initial_state, x.dims)


def _prepare(static: _Static, x: RuleArrays, items: Items, starts) -> Prepared:
    """The kernels up to what segments do to states."""
    (q, k, v, g, beta), (B, T, _, Hq, Hk, HV, HO, K, V) = x[:5], x.dims
    f32, interpret, config = jnp.float32, static.interpret, static.config

    normalize = static.use_qk_l2norm
    if normalize and k.dtype == jnp.float16:  # which has no room for the reciprocal norm of a key of zeros
        q, k, normalize = _l2norm(q), _l2norm(k), False
    g = jnp.zeros((B, T, HO), f32) if g is None else g.astype(f32)
    beta = jnp.ones((B, T, HO), f32) if beta is None else beta.astype(f32)
    if x.segment_ids is not None:
        g = jnp.where(changes_segment(x.segment_ids)[..., None], -jnp.inf, g)
    K64, V64, T8 = _padded(K), _padded(V), round_up(T, 8)
    q, k, v = pad(q, (B, T8, Hq, K64)), pad(k, (B, T8, Hk, K64)), pad(v, (B, T8, HV, V64))
    # The kernels work in chunks of one sequence as in rows that are not packed, where none is shared (starts = None).
    g2_cum, beta_t, first, order = chunk_gates(
        g, beta, starts, ordered=static.finds_order, interpret=interpret
    )
    if order is not None:
        assert items.tables is not None
        items = items._replace(tables=items.tables._replace(sequence=order))
    inverse_options = dict(normalize=normalize, config=config.inverse, interpret=interpret)
    t, k_rstd = gated_inverse(k, beta_t, g2_cum, first, **inverse_options)
    rstd = None if k_rstd is None else (_reciprocal_norms(q), k_rstd)
    e = m_t = None
    if items.split.segment_chunks is not None:
        e, m_t = segment_transitions(k, v, g2_cum, beta_t, t, k_rstd=k_rstd, items=items, interpret=interpret)
    return Prepared(q, k, v, g2_cum, beta_t, t, rstd, e, m_t, items)


def _finish(static: _Static, prepared: Prepared, initial_state, dims: Dims):
    """The kernels from the states on: outputs, final states and residuals, without padding."""
    (q, k, v, g2_cum, beta_t, t, rstd, _, m_t, items), (T, K, V) = prepared, (dims.T, dims.K, dims.V)
    T8, K64, V64 = q.shape[1], q.shape[3], v.shape[3]
    interpret, config = static.interpret, static.config
    states = initial_state if isinstance(initial_state, PoolStates) else None
    h_0 = None if states is not None else pad_states(initial_state, K, V, static.kv_layout)
    segments = None
    if m_t is not None:
        segments = Segments(_starts(static, prepared, h_0 if states is None else states), m_t, items)
    o, final = outputs(
        q,
        k,
        v,
        g2_cum,
        beta_t,
        t,
        h_0 if segments is None else segments.starts,
        rstd=rstd,
        scale=static.scale,
        kv_layout=static.kv_layout,
        h_0_kv_layout=static.kv_layout and segments is None,
        states=states,
        config=config.outputs,
        items=items,
        interpret=interpret,
    )
    if (T8, V64) != (T, V):
        o = o[:, :T, :, :V]
    if (K64, V64) != (K, V):
        final = cut_states(final, K, V, static.kv_layout)
    return o, final, Residuals(g2_cum, beta_t, t, segments)


def _starts(static: _Static, prepared: Prepared, h_0) -> Float[Array, "items HO V64 K64"]:
    """The state at the start of every segment, from padded initial states, or from those of a pool."""
    tables = prepared.items.tables
    assert prepared.e is not None and prepared.m_t is not None
    return segment_states(
        prepared.e,
        prepared.m_t,
        h_0,
        prepared.items,
        num_sequences=prepared.q.shape[0] if tables is None else tables.cu_seqlens.shape[0] - 1,
        kv_layout=static.kv_layout,
        interpret=static.interpret,
    )


class Open(NamedTuple):
    """The forward of rows that go on elsewhere, before any state is known.

    Behind the segments of what goes on lies an empty one, so that e and m_t of every segment are there.
    """

    static: _Static
    prepared: Prepared
    dims: Dims

    def starts(self, initial_state: Float[Array, "N HO K V"]) -> Float[Array, "items HO V64 K64"]:
        """The state at the start of every segment; at the empty one's that which goes on."""
        h_0 = pad_states(initial_state, self.dims.K, self.dims.V, self.static.kv_layout)
        return _starts(self.static, self.prepared, h_0)

    def finish(self, initial_state: Float[Array, "N HO K V"]) -> tuple[jax.Array, jax.Array, Residuals]:
        """The results of `forward`."""
        return _finish(self.static, self.prepared, initial_state, self.dims)


def prepare_open(
    x: RuleArrays,
    *,
    scale: float,
    open_sequence: Int[Array, ""] | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> Open:
    """The forward of rows that go on elsewhere, up to where initial states are needed.

    Args: as for `forward`, without the L2 norm.
      x: its initial states and segments are not read; cu_seqlens is not known while tracing.
      open_sequence: the packed sequence that goes on.
    """
    config, dims, packed = config or Config(), x.dims, x.cu_seqlens is not None
    K64, V64 = _padded(dims.K), _padded(dims.V)
    warpgroups, segment_chunks = choose_split(
        dims,
        K64,
        V64,
        work_of(dims, packed, None),
        state_warpgroups=config.state_warpgroups,
        segment_chunks=config.segment_chunks,
        is_open=True,
    )
    items, starts = row_items(dims.B, dims.T, segment_chunks, is_open=True), None
    if packed:
        starts = borders(x.cu_seqlens, None)
        items = packed_items(starts, dims.T, segment_chunks, open_sequence=open_sequence)
    config = dataclasses.replace(config, outputs=config.outputs or default_config(K64, warpgroups))
    static = _Static(float(scale), False, True, False, config, interpret)
    return Open(static, _prepare(static, x._replace(cu_seqlens=None, segment_ids=None), items, starts), dims)


def _l2norm(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + L2NORM_EPS)).astype(x.dtype)


def _reciprocal_norms(x: Float[Array, "B T H K"]) -> Float[Array, "B H T64"]:
    """Reciprocal norm of every head of every token, head-major."""
    x32 = x.astype(jnp.float32)
    rstd = lax.rsqrt(jnp.sum(x32 * x32, axis=-1) + L2NORM_EPS).swapaxes(1, 2)
    return jnp.pad(rstd, ((0, 0), (0, 0), (0, -x.shape[1] % CHUNK)))
