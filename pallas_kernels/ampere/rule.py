"""The forward of the gated delta rule by mma.sync: composition of the kernels and padding. No device code.

    prepare (T and P of all chunks in parallel)  ->  outputs (the walk)

Gates and vectors of a chunk are made in plain JAX: they are few numbers. What belongs to other places than tokens is
zeros; see `rows`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.shapes import Dims, Outputs, RuleArrays, changes_segment
from pallas_kernels.ampere.prepare import prepare
from pallas_kernels.ampere.rows import Rows
from pallas_kernels.ampere.states import factors, outputs
from pallas_kernels.ampere.walk import Config
from pallas_kernels.device.launch import capability_reason, compiled
from pallas_kernels.device.layouts import CHUNK, GRANULE, LOG2_E, RESET_G2, round_up
from pallas_kernels.device.memory import pad
from pallas_kernels.work.refusals import refusal
from pallas_kernels.work.tables import (
    ChunkTables,
    as_rows,
    borders,
    chunk_tables,
    common_length,
    known_lengths,
)

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "12.0")
"""Compute capabilities that the kernels were compiled for, without spilled registers."""

MOST_NUMBERS = 2**31
"""Numbers of an array up to which the kernels count."""


class Residuals(NamedTuple):
    """Arrays that the forward leaves for a backward, chunk by chunk of each row of the batch."""

    g2_cum: Float[Array, "B NT HO C"]
    """In-chunk cumulative log2 decay."""
    beta: Float[Array, "B NT HO C"]
    t: Float[Array, "B NT HO C C"]
    p: Float[Array, "B NT HO C C"]


def device_reason() -> str | None:
    """Why JAX's default device cannot run these kernels; None if it can."""
    return capability_reason("the kernels by mma.sync", CAPABILITIES)


def check_supported(dims: Dims, dtype, *, chunk_size: int = CHUNK, packed: bool = False) -> str | None:
    """Why these kernels cannot run a call of the rule, from shapes and dtypes; None if they can.

    Args:
      dims: of gdn_jax.shapes.
      dtype: of q, k and v.
      chunk_size: as asked for.
      packed: whether cu_seqlens is given.
    """
    if (reason := refusal(dims, dtype, chunk_size)) is not None:
        return reason
    if dims.K > 128 or dims.V > 128:
        return f"K = {dims.K}, V = {dims.V}; the kernels by mma.sync go up to 128, as registers allow"
    chunks = dims.B * -(-dims.T // CHUNK) + (dims.N if packed else 0)
    if chunks * dims.HO * round_up(dims.K, GRANULE) * round_up(dims.V, GRANULE) >= MOST_NUMBERS:
        return "the states of all chunks are more numbers than the kernels by mma.sync count"
    return None


class _Static(NamedTuple):
    """Everything that a pass is compiled for, besides shapes."""

    scale: float
    kv_layout: bool
    config: Config | None
    interpret: Any


def batched(x: RuleArrays) -> RuleArrays:
    """The call with packed sequences as rows of a batch, where they are known to have one length."""
    known = known_lengths(x.cu_seqlens)
    return x if known is None or not common_length(known, x.dims.T) else as_rows(x, x.dims.N)


def tables_of(x: RuleArrays) -> ChunkTables | None:
    """Places of packed tokens; None where rows are not packed."""
    if x.cu_seqlens is None:
        return None
    tables = chunk_tables(borders(x.cu_seqlens, known_lengths(x.cu_seqlens)), x.dims.T)
    return jax.tree.map(jnp.asarray, tables)


def forward(
    x: RuleArrays,
    *,
    scale: float,
    state_layout: str = "kv",
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Outputs, Float[Array, "N HO _ _"], Residuals]:
    """The rule on arguments that gdn_jax.gated_delta_rule has checked, and that check_supported accepts.

    Args: those of gdn_jax.gated_delta_rule.
      x: q and k are normalised already where they are to be. Where the values of cu_seqlens are known while tracing,
        the tables cost nothing at run time, and sequences of equal lengths run as a batch.
      scale: a number within `forward.rule.FOLDED_SCALES`.
      config: None for a choice from the shapes.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      o in q's dtype, the final states in float32, and the residuals (of the batch, where sequences run as one).

    Numerics: operands of products rounded to q's dtype (float16 inside the inverse), sums, gates and states in
      float32. Keys with |k|^2 beta > 2 leave the range where the inverse is accurate: normalise them.
    """
    static, shape = (
        _Static(float(scale), state_layout == "kv", config, interpret),
        (*x.q.shape[:2], x.dims.HO),
    )
    x = batched(x)
    o, final, kept = compiled(_run, interpret)(static, x._replace(cu_seqlens=None), tables_of(x))
    return o.reshape(*shape, -1), final, kept


def spread(x: jax.Array, rows: Rows) -> jax.Array:
    """[B, T, H, width] as [places, H, width padded]."""
    return rows.spread(pad(x, (*x.shape[:3], round_up(x.shape[3], GRANULE))))


def padded_states(states: jax.Array | None, dims: Dims, kv_layout: bool) -> jax.Array | None:
    """States in float32 and of padded widths; None for zeros."""
    if states is None:
        return None
    widths = round_up(dims.K, GRANULE), round_up(dims.V, GRANULE)
    return pad(states.astype(jnp.float32), (*states.shape[:2], *(widths if kv_layout else widths[::-1])))


def _gates(x: RuleArrays, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Cumulative log2 decays and write strengths of every chunk."""
    shape, f32 = (*x.q.shape[:2], x.dims.HO), jnp.float32
    g = jnp.zeros(shape, f32) if x.g is None else x.g.astype(f32)
    beta = jnp.ones(shape, f32) if x.beta is None else x.beta.astype(f32)
    if x.segment_ids is not None:
        g = jnp.where(changes_segment(x.segment_ids)[..., None], -jnp.inf, g)
    g2 = rows.by_chunk(jnp.maximum(g * LOG2_E, RESET_G2))
    return lax.cumsum(g2, axis=2), rows.by_chunk(beta)


def _run(static: _Static, x: RuleArrays, tables: ChunkTables | None):
    """The kernels in order, with the padding around them."""
    dims, kv_layout = x.dims, static.kv_layout
    rows = Rows(dims.B, dims.T, tables)
    q, k, v = (spread(y, rows) for y in x[:3])
    g2_cum, beta = _gates(x, rows)
    prepared = prepare(q, k, g2_cum, beta, scale=static.scale, interpret=static.interpret)
    o, final = outputs(
        q,
        k,
        v,
        *prepared,
        factors(g2_cum, beta),
        padded_states(x.initial_state, dims, kv_layout),
        jnp.asarray(rows.first_chunk),
        scale=static.scale,
        kv_layout=kv_layout,
        config=static.config,
        interpret=static.interpret,
    )
    K, V = (dims.K, dims.V) if kv_layout else (dims.V, dims.K)
    kept = Residuals._make(y.reshape(dims.B, -1, *y.shape[1:]) for y in (g2_cum, beta, *prepared))
    return rows.back(o[:, :, : dims.V]), final[:, :, :K, :V], kept
