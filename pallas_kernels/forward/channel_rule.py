"""The forward of the delta rule with a decay of each channel on Hopper: composition of the kernels.

    channel_pairs  ->  [channel_transitions  ->  segment_states]  ->  channel_outputs

The part in brackets runs where few sequences and heads would leave most of the GPU idle, as in `forward.rule`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.shapes import Dims, changes_segment
from pallas_kernels.chunks import channel_stages
from pallas_kernels.chunks import pairs as pairs_kernel
from pallas_kernels.chunks.channel_arrays import ChannelArrays, ChannelResiduals, batched
from pallas_kernels.chunks.pairs import Pairs, channel_pairs
from pallas_kernels.chunks.segment_states import segment_states
from pallas_kernels.device.launch import compiled
from pallas_kernels.device.layouts import CHUNK, GRANULE, round_up
from pallas_kernels.device.memory import cut_states, pad, pad_states
from pallas_kernels.device.needs import Needs
from pallas_kernels.forward import rule as head_rule
from pallas_kernels.forward.channel_outputs import channel_outputs, default_config
from pallas_kernels.forward.channel_transitions import channel_transitions
from pallas_kernels.work.residuals import Segments, Transition
from pallas_kernels.work.split import choose_split, work_of
from pallas_kernels.work.tables import (
    Items,
    VisitTables,
    borders,
    known_lengths,
    packed_items,
    row_items,
    visit_tables,
)

NEEDS = Needs.TMA | Needs.WGMMA


@dataclasses.dataclass(frozen=True)
class Config:
    """How the forward runs, not what it computes. None stands for a choice from the shapes."""

    state_warpgroups: int | None = None
    """64-row tiles of the state in one CTA of the walk, 1 or 2."""
    segment_chunks: int | None = None
    """Chunks of a segment; 0 for whole sequences."""
    pairs: pairs_kernel.Config | None = None
    outputs: channel_stages.Config | None = None


def check_supported(dims: Dims, dtype, *, chunk_size: int = CHUNK, packed: bool = False) -> str | None:
    """Why these kernels cannot run a call, from shapes and dtypes; None if they can.

    Args: those of `forward.rule.check_supported`.
    """
    reason = head_rule.check_supported(dims, dtype, chunk_size=chunk_size, packed=packed)
    if reason is None and dims.K > 128:
        return f"K = {dims.K}; with a decay of each channel the kernels go up to 128, as shared memory allows"
    return reason


def forward(
    x: ChannelArrays,
    dims: Dims,
    *,
    scale: float,
    use_qk_l2norm: bool = False,
    state_layout: str = "kv",
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T HO V"], Float[Array, "_ HO _ _"], ChannelResiduals]:
    """The rule on checked arguments that check_supported accepts.

    Args:
      x: arrays; where the values of cu_seqlens are known while tracing, the work is split by the true lengths, as in
        `forward.rule.forward`.
      dims: of the call.
      scale: a number within `forward.rule.FOLDED_SCALES`.
      use_qk_l2norm: whether q and k are normalised; not together with e.
      state_layout: "kv" or "vk", of initial and final states.
      config: None for a choice from the shapes.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      o in v's dtype, the final states in float32 and the residuals (of the batch, where sequences run as one).

    Numerics: operands of products rounded to q's dtype (float16 between tokens), sums, gates and states in float32.
    """
    shape, (x, dims) = (*x.v.shape[:2], dims.HO, dims.V), batched(x, dims)
    known = known_lengths(x.cu_seqlens)
    config, packed = config or Config(), x.cu_seqlens is not None
    config, segment_chunks = _chosen(config, dims, packed, known)
    items, visits = row_items(dims.B, dims.T, segment_chunks), None
    if packed:
        starts = borders(x.cu_seqlens, known)
        items = packed_items(starts, dims.T, segment_chunks, segment_chunks is None and known is not None)
        visits = visit_tables(starts, dims.T)
    static = _Static(
        dims=dims,
        scale=float(scale),
        use_qk_l2norm=use_qk_l2norm,
        kv_layout=state_layout == "kv",
        config=config,
        interpret=interpret,
    )
    items, visits = jax.tree.map(jnp.asarray, (items, visits))
    o, final, residuals = compiled(_run, interpret)(static, x._replace(cu_seqlens=None), items, visits)
    return o.reshape(shape), final, residuals


def _chosen(
    config: Config, dims: Dims, packed: bool, known: Any, is_open: bool = False
) -> tuple[Config, int | None]:
    """The configurations of the walk and of the outputs, and the chunks of a segment."""
    K64, V64 = round_up(dims.K, GRANULE), round_up(dims.V, GRANULE)
    warpgroups, segment_chunks = choose_split(
        dims,
        max(K64, 128) if V64 % 128 == 0 else K64,
        V64,
        work_of(dims, packed, known),
        state_warpgroups=config.state_warpgroups,
        segment_chunks=config.segment_chunks,
        is_open=is_open,
    )
    outputs = config.outputs or default_config(K64, warpgroups)
    return dataclasses.replace(config, outputs=outputs), segment_chunks


class _Static(NamedTuple):
    """Everything that a forward is compiled for, besides shapes."""

    dims: Dims
    scale: float
    use_qk_l2norm: bool
    kv_layout: bool
    config: Config
    """Its `outputs` is given."""
    interpret: Any


class Prepared(NamedTuple):
    """Everything that is found before any state is known, padded."""

    v: Float[Array, "B T8 HV V64"]
    beta_t: Float[Array, "B HO T64"]
    pairs: Pairs
    e: Float[Array, "items HO V64 K64"] | None
    m_t: Transition | None
    items: Items
    visits: VisitTables | None


def _prepare(static: _Static, x: ChannelArrays, items: Items, visits: VisitTables | None) -> Prepared:
    """The kernels up to what segments do to states."""
    dims, config, interpret, f32 = static.dims, static.config, static.interpret, jnp.float32
    B, T, HO, K, V = dims.B, dims.T, dims.HO, dims.K, dims.V
    tokens = T // 2 if x.of_halves else T
    T8, K64, V64 = round_up(tokens, 8), round_up(K, GRANULE), round_up(V, GRANULE)
    g = x.g.astype(f32)
    if x.segment_ids is not None:
        g = jnp.where(changes_segment(x.segment_ids)[..., None, None], -jnp.inf, g)
    beta = jnp.ones((B, T, HO), f32) if x.beta is None else x.beta.astype(f32)
    beta_t = jnp.pad(beta.swapaxes(1, 2), ((0, 0), (0, 0), (0, -T % CHUNK)))
    q, k, e, g = (None if y is None else pad(y, (B, T8, y.shape[2], K64)) for y in (x.q, x.k, x.e, g))
    v = pad(x.v, (B, T8, x.v.shape[2], V64))
    assert q is not None and k is not None and g is not None
    pairs = channel_pairs(
        q,
        k,
        g,
        beta_t,
        e,
        of_halves=x.of_halves,
        scale=static.scale,
        normalize=static.use_qk_l2norm,
        visits=visits,
        config=config.pairs,
        interpret=interpret,
    )
    e_t = m_t = None
    if items.split.segment_chunks is not None:
        options: dict[str, Any] = dict(items=items, visits=visits, of_halves=x.of_halves, interpret=interpret)
        e_t, m_t = channel_transitions(v, beta_t, pairs, **options)
    return Prepared(v, beta_t, pairs, e_t, m_t, items, visits)


def _run(
    static: _Static,
    x: ChannelArrays,
    items: Items,
    visits: VisitTables | None,
    prepared: Prepared | None = None,
):
    """The kernels in order, with the padding around them; those of `prepared` where it is not given."""
    prepared = prepared or _prepare(static, x, items, visits)
    v, beta_t, pairs, _, m_t, _, _ = prepared
    (T, K, V), config = (static.dims.T, static.dims.K, static.dims.V), static.config
    tokens = T // 2 if x.of_halves else T
    T8, V64, K64 = v.shape[1], v.shape[3], pairs.gl.shape[2]
    options: dict[str, Any] = dict(items=items, visits=visits, of_halves=x.of_halves)
    options |= dict(interpret=static.interpret)
    h_0, segments = pad_states(x.initial_state, K, V, static.kv_layout), None
    if m_t is not None:
        segments = Segments(_starts(static, prepared, h_0), m_t, items)
    o, final = channel_outputs(
        v,
        beta_t,
        pairs,
        h_0 if segments is None else segments.starts,
        kv_layout=static.kv_layout,
        h_0_kv_layout=static.kv_layout and segments is None,
        config=config.outputs,
        **options,
    )
    if (T8, V64) != (tokens, V):
        o = o[:, :tokens, :, :V]
    if (K64, V64) != (K, V):
        final = cut_states(final, K, V, static.kv_layout)
    return o, final, ChannelResiduals(pairs, beta_t, segments)


def _starts(static: _Static, prepared: Prepared, h_0) -> Float[Array, "items HO V64 K64"]:
    """The state at the start of every segment, from padded initial states."""
    assert prepared.e is not None and prepared.m_t is not None
    return segment_states(
        prepared.e,
        prepared.m_t,
        h_0,
        prepared.items,
        num_sequences=static.dims.N,
        kv_layout=static.kv_layout,
        interpret=static.interpret,
    )


class Open(NamedTuple):
    """The forward of rows that go on elsewhere, before any state is known, as `forward.rule.Open`."""

    static: _Static
    x: ChannelArrays
    prepared: Prepared

    def starts(self, initial_state: Float[Array, "N HO K V"]) -> Float[Array, "items HO V64 K64"]:
        """The state at the start of every segment; at the empty one's that which goes on."""
        h_0 = pad_states(initial_state, self.static.dims.K, self.static.dims.V, self.static.kv_layout)
        return _starts(self.static, self.prepared, h_0)

    def finish(
        self, initial_state: Float[Array, "N HO K V"]
    ) -> tuple[jax.Array, jax.Array, ChannelResiduals]:
        """The results of `forward`."""
        x = self.x._replace(initial_state=initial_state)
        return _run(self.static, x, self.prepared.items, self.prepared.visits, self.prepared)


def prepare_open(
    x: ChannelArrays,
    dims: Dims,
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
    packed = x.cu_seqlens is not None
    config, segment_chunks = _chosen(config or Config(), dims, packed, None, is_open=True)
    items, visits = row_items(dims.B, dims.T, segment_chunks, is_open=True), None
    if packed:
        starts = borders(x.cu_seqlens, None)
        items = packed_items(starts, dims.T, segment_chunks, open_sequence=open_sequence)
        visits = visit_tables(starts, dims.T)
    static = _Static(dims, float(scale), False, True, config, interpret)
    x = x._replace(cu_seqlens=None, segment_ids=None)
    return Open(static, x, _prepare(static, x, items, visits))
