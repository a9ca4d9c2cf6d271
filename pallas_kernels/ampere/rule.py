"""The forward of the gated delta rule by mma.sync: composition of the kernels and padding. No device code.

    prepare (T and P of all chunks in parallel)  ->  [ends  ->  segments]  ->  outputs (the walk)

The part in brackets runs only where heads are so few that walks would leave most SMs idle.

Gates and vectors of a chunk are made in plain JAX: they are few numbers. What belongs to other places than tokens is
zeros; see `rows`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.shapes import Dims, Outputs, RuleArrays, changes_segment
from pallas_kernels.ampere import segments
from pallas_kernels.ampere.decays import HEADS
from pallas_kernels.ampere.prepare import prepare
from pallas_kernels.ampere.rows import Packed, Rows
from pallas_kernels.ampere.states import ends, factors, outputs
from pallas_kernels.ampere.walk import Config
from pallas_kernels.device.launch import compiled
from pallas_kernels.device.layouts import CHUNK, GRANULE, LOG2_E, RESET_G2, round_up
from pallas_kernels.device.memory import cut_states, pad, pad_states
from pallas_kernels.device.needs import Needs
from pallas_kernels.work import refusals
from pallas_kernels.work.tables import as_rows, borders, chunk_tables, common_length, known_lengths

NEEDS = Needs.MMA

MOST_NUMBERS = 2**31
"""Numbers of an array up to which the kernels count."""


class Residuals(NamedTuple):
    """Arrays that the forward leaves for a backward, chunk by chunk of each row of the batch."""

    g2_cum: Float[Array, "B NT HO C"]
    """In-chunk cumulative log2 decay."""
    beta: Float[Array, "B NT HO C"]
    t: Float[Array, "B NT HO C C"]
    p: Float[Array, "B NT HO C C"]
    starts: Float[Array, "B S HO V K"] | None
    """States before each segment, transposed and padded; None where rows are not cut."""
    m: Float[Array, "B S HO K K"] | None
    """Maps of states over each segment, see `segments`."""


def check_supported(dims: Dims, dtype, *, chunk_size: int = CHUNK, packed: bool = False) -> str | None:
    """Why these kernels cannot run a call of the rule, from shapes and dtypes; None if they can.

    Args:
      dims: of gdn_jax.shapes.
      dtype: of q, k and v.
      chunk_size: as asked for.
      packed: whether cu_seqlens is given.
    """
    if (reason := refusals.check_supported(dims, dtype, chunk_size)) is not None:
        return reason
    if dims.K > 128 or dims.V > 128:
        return f"K = {dims.K}, V = {dims.V}; the kernels by mma.sync go up to 128, as registers allow"
    chunks = dims.B * -(-dims.T // CHUNK) + (dims.N if packed else 0)
    if chunks * dims.HO * round_up(dims.K, GRANULE) * round_up(dims.V, GRANULE) >= MOST_NUMBERS:
        return "the states of all chunks are more numbers than the kernels by mma.sync count"
    return None


class Static(NamedTuple):
    """Everything that a pass is compiled for, besides shapes."""

    dims: Dims
    scale: float
    kv_layout: bool
    segment_chunks: int
    """0 for rows that are not cut; a backward takes it from the residuals."""
    config: Config | None
    interpret: Any


def batched(x: RuleArrays) -> RuleArrays:
    """The call with packed sequences as rows of a batch, where they are known to have one length."""
    known = known_lengths(x.cu_seqlens)
    return x if known is None or not common_length(known, x.dims.T) else as_rows(x, x.dims.N)


def chosen_segment(dims: Dims, cu_seqlens: Any) -> int:
    """Chunks of a segment that `forward` chooses for a call, 0 for rows that are not cut."""
    known = known_lengths(cu_seqlens)
    length = None if known is None else common_length(known, dims.T)
    if length:  # as `batched`
        return segments.choose(dims._replace(B=dims.N, T=length), packed=False)
    return segments.choose(dims, packed=cu_seqlens is not None)


def settled_segment(dims: Dims, cu_seqlens: Any, segment_chunks: int | None) -> int:
    """Chunks of a segment of a call that is `batched`, from those that its caller wants."""
    if segment_chunks is None or cu_seqlens is not None:
        return chosen_segment(dims, cu_seqlens)
    return segments.even(-(-dims.T // CHUNK), segment_chunks) if segment_chunks else 0


def tables_of(cu_seqlens: Any, T: int) -> Packed | None:
    """Places of packed tokens; None where rows are not packed."""
    if cu_seqlens is None:
        return None
    tables = Packed.of(chunk_tables(borders(cu_seqlens, known_lengths(cu_seqlens)), T), T)
    return jax.tree.map(jnp.asarray, tables)


def forward(
    x: RuleArrays,
    *,
    scale: float,
    state_layout: str = "kv",
    segment_chunks: int | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Outputs, Float[Array, "N HO _ _"], Residuals]:
    """The rule on arguments that gdn_jax.gated_delta_rule has checked, and that check_supported accepts.

    Args: those of gdn_jax.gated_delta_rule.
      x: q and k are normalised already where they are to be. Where the values of cu_seqlens are known while tracing,
        the tables cost nothing at run time, and sequences of equal lengths run as a batch.
      scale: a number within `forward.rule.FOLDED_SCALES`.
      segment_chunks: chunks of a segment, 0 for rows that are not cut; None for a choice from the shapes. Packed rows
        are never cut.
      config: None for a choice from the shapes.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      o in q's dtype, the final states in float32, and the residuals (of the batch, where sequences run as one).

    Numerics: operands of products rounded to q's dtype (float16 inside the inverse), sums, gates and states in
      float32. Keys with |k|^2 beta > 2 leave the range where the inverse is accurate: normalise them.
    """
    shape, x = (*x.q.shape[:2], x.dims.HO), batched(x)
    segment_chunks = settled_segment(x.dims, x.cu_seqlens, segment_chunks)
    static = Static(x.dims, float(scale), state_layout == "kv", segment_chunks, config, interpret)
    o, final, kept = compiled(_run, interpret)(
        static, x._replace(cu_seqlens=None), tables_of(x.cu_seqlens, x.dims.T)
    )
    return o.reshape(*shape, -1), final, kept


def spread(x: jax.Array, rows: Rows) -> jax.Array:
    """[B, T, H, width] as [places, H, width padded]."""
    return rows.spread(_widened(x))


def _widened(x: jax.Array) -> jax.Array:
    return pad(x, (*x.shape[:3], round_up(x.shape[3], GRANULE)))


def _gates(x: RuleArrays, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Cumulative log2 decays and write strengths of every chunk."""
    shape, f32 = (*x.q.shape[:2], x.dims.HO), jnp.float32
    g = jnp.zeros(shape, f32) if x.g is None else x.g.astype(f32)
    beta = jnp.ones(shape, f32) if x.beta is None else x.beta.astype(f32)
    if x.segment_ids is not None:
        g = jnp.where(changes_segment(x.segment_ids)[..., None], -jnp.inf, g)
    g2 = rows.by_chunk(jnp.maximum(g * LOG2_E, RESET_G2))
    return lax.cumsum(g2, axis=2), rows.by_chunk(beta)


def _run(static: Static, x: RuleArrays, tables: Packed | None):
    """The kernels in order, with the padding around them."""
    dims = static.dims
    rows = Rows(dims.B, dims.T, tables)
    q, k, v = (rows.tiled(_widened(y)) for y in x[:3])
    g2_cum, beta = _gates(x, rows)
    prepared = prepare(q, k, g2_cum, beta, rows.spans, scale=static.scale, interpret=static.interpret)
    o, final, *cut = walked(
        static, rows, {"q": q, "k": k}, v, prepared, factors(g2_cum, beta), x.initial_state, rows.spans
    )
    kept = (y.reshape(dims.B, -1, *y.shape[1:]) for y in (g2_cum, beta, *prepared))
    return o, final, Residuals._make((*kept, *cut))


def walked(static: Static, rows: Rows, keys, v, squares, vectors, initial_state, spans, decays=HEADS):
    """The walks of a forward: o and the final states, as the rule gives them, and starts and m of its residuals.

    Args:
      keys, v, vectors, spans, decays: of `states.outputs`.
      squares: T and P.
    """
    dims, kv_layout = static.dims, static.kv_layout
    h_0 = pad_states(initial_state, dims.K, dims.V, kv_layout)
    both: dict[str, Any] = dict(decays=decays, config=static.config, interpret=static.interpret)
    first_chunk, starts, m = jnp.asarray(rows.first_chunk), None, None
    if static.segment_chunks:
        first_chunk = jnp.asarray(segments.first_chunks(rows, static.segment_chunks))
        h_0 = segments.of_layout(h_0, kv_layout)
        starts, m = segments_of(keys, v, squares[0], vectors, h_0, first_chunk, dims.B, both)
        h_0, kv_layout = starts.reshape(-1, *starts.shape[2:]), False
    both |= dict(scale=static.scale, kv_layout=kv_layout)
    t, p = squares
    o, final = outputs(keys, v, t, p, vectors, h_0, first_chunk, spans, **both)
    if static.segment_chunks:
        final = final.reshape(dims.B, -1, *final.shape[1:])[:, -1]
        final = final.swapaxes(-1, -2) if static.kv_layout else final
    return rows.back(o[:, :, : dims.V]), cut_states(final, dims.K, dims.V, static.kv_layout), starts, m


def segments_of(keys, v, t, vectors, h_0, first_chunk, B: int, both) -> tuple[jax.Array, jax.Array]:
    """States before each segment and maps over each, [B, S, ..], from initial states [B, HO, V, K].

    Args:
      keys, v, t, vectors, first_chunk: of `states.ends`, whose options are both.
    """
    HO, K, N = t.shape[1], keys[both["decays"].written].shape[-1], first_chunk.shape[0] - 1
    identity = jnp.broadcast_to(jnp.eye(K, dtype=jnp.float32), (N, HO, K, K))
    e = ends(keys, v, t, vectors, None, first_chunk, **both)
    nothing = jnp.zeros_like(v, shape=(v.shape[0], 1, K))
    m = ends(keys, nothing, t, vectors, identity, first_chunk, **both)
    e, m = (y.reshape(B, -1, *y.shape[1:]) for y in (e, m))
    return segments.joined(h_0, e, m), m
