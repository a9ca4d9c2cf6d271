"""The seam to the GPU kernels: what they can run, and the only derivatives that are defined over them.

The kernels of what stands around the rule in a layer are reached through `fused`, those of serving through
`serving.kernels`. Here stands what a call needs around the kernels and what is mathematics: the factor of the output
where the kernels cannot hold it, and the derivative of the L2 norm.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas  # adds to JAX's tracing context: inside a jit, its first call would compile twice
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gdn_jax import gates
from gdn_jax.chunks.recurrence import INVERSE_NAME, STATES_NAME
from gdn_jax.partitioning import RuleAxes, on_shards
from gdn_jax.shapes import AnyStates, Dims, Outputs, RuleArrays, Scale, accumulation_dtype

# The kernels' own records, which are imported inside calls.
Residuals = Any  # pallas_kernels.work.residuals
Cotangents = OutputCotangents = Any  # pallas_kernels.backward.rule

GATES_NAME, OUTPUT_NAME = "gdn_gates", "gdn_output"
RESIDUAL_NAMES = (INVERSE_NAME, STATES_NAME, GATES_NAME, OUTPUT_NAME)
"""`checkpoint_name`s of all that the forward kernels write, the final states apart: who keeps these arrays runs no
forward kernel again in the backward pass. The output is among them for what follows the rule."""


class Call(NamedTuple):
    """Everything that a call is compiled for, besides shapes."""

    use_qk_l2norm: bool
    state_layout: str
    known_lengths: bytes | None
    """cu_seqlens as int64, where its values are known while tracing: the kernels split their work by them."""
    shards: int | None = None
    """Devices that XLA is expected to split the call over, by rows and by heads; None where it is not to split it.
    Any other number of shards is right too, but has its sequences cut into segments as suits this one."""
    scale: float = 1.0
    """The factor of the output, one that the kernels hold."""
    segment_chunks: int | None = None
    """Chunks of every segment, 0 for rows that are not cut; None for a choice from the shapes."""

    def arrays(self, x: RuleArrays) -> RuleArrays:
        """The arguments of the call, with the lengths that are known."""
        known = self.known_lengths
        return x if known is None else x._replace(cu_seqlens=np.frombuffer(known, np.int64))


def check_supported(dims: Dims, q, g, beta, initial_state, *, chunk_size: int, packed: bool) -> str | None:
    """Why the kernels cannot run a call, forward and backward, on JAX's default device; None if they can."""
    from pallas_kernels.device import launch
    from pallas_kernels.forward import rule

    if (device := launch.device_reason()) is not None:  # first: no other arguments would help
        return device
    reason = rule.check_supported(dims, q.dtype, chunk_size=chunk_size, packed=packed)
    if reason is None and accumulation_dtype(q, g, beta, initial_state) != jnp.float32:
        reason = "a gate or the state is float64; the kernels compute in float32"
    return reason


def rule(call: Call, x: RuleArrays, scale: Scale) -> tuple[Outputs, AnyStates]:
    """`gated_delta_rule` by the kernels, forward and backward.

    Args:
      scale: any number or array; one that the kernels cannot hold is a factor of their output.
    """
    from pallas_kernels.forward.rule import FOLDED_SCALES

    if isinstance(scale, (int, float)) and FOLDED_SCALES[0] <= scale <= FOLDED_SCALES[1]:
        return _rule(call._replace(scale=float(scale)), x)
    o, final = _rule(call, x)
    return (scale * o).astype(o.dtype), final


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(call: Call, x: RuleArrays) -> tuple[Outputs, AnyStates]:
    return _forward(call, x)[:2]


def _forward(call: Call, x: RuleArrays) -> tuple[Outputs, AnyStates, Residuals]:
    """Outputs, final states and residuals of the kernels, on the shards of the arguments."""
    from pallas_kernels.forward import rule

    if call.shards is not None:
        return _forward_on_shards(call, x)
    config = rule.Config(segment_chunks=call.segment_chunks)
    options = dict(scale=call.scale, use_qk_l2norm=call.use_qk_l2norm, state_layout=call.state_layout)
    return rule.forward(call.arrays(x), config=config, **options)


def _forward_on_shards(call: Call, x: RuleArrays) -> tuple[Outputs, AnyStates, Residuals]:
    assert call.shards is not None
    axes, alone = RuleAxes.of(x), call._replace(shards=None)
    # What is kept of the segments has a shape: all shards are cut alike, as is best for those that are expected.
    expected = jax.eval_shape(lambda x: _forward(alone, x)[2], axes.shard(x, call.shards))
    segment_chunks = _segment_chunks(expected)

    def results(shapes):
        return *axes.outputs, _residual_axes(axes, shapes[2])

    static = alone._replace(segment_chunks=segment_chunks or 0)
    o, final, arrays = on_shards(_forward_on_shard, static, (x,), (axes.inputs,), results, axes.sizes)
    return o, final, arrays.residuals(segment_chunks)


def _forward_on_shard(call: Call, x: RuleArrays) -> tuple[Outputs, AnyStates, "_ResidualArrays"]:
    o, final, residuals = _forward(call, x)
    return o, final, _ResidualArrays.of(residuals)


def _residual_axes(axes: RuleAxes, arrays: "_ResidualArrays") -> "_ResidualArrays":
    """Names of the dimensions of what the forward leaves. Packed sequences of equal lengths are its rows."""
    matrices = axes.inputs.initial_state
    gates, segments = matrices.removesuffix(" ."), matrices.replace("h", ". h")
    tables = jax.tree.map(lambda _: ".", arrays.tables)
    m_t = arrays.m_t
    if m_t is not None:
        m_t = m_t._replace(diagonal=segments.removesuffix(" ."), rest=segments)
    return _ResidualArrays(gates, gates, matrices, segments, m_t, tables)


class _ResidualArrays(NamedTuple):
    """The arrays of the forward's residuals, or names of their dimensions.

    The segments of each row lie along an axis of their own (of packed rows all of them). The static number of items,
    which differs from shard to whole, is left out.
    """

    g2_cum: Any
    beta_t: Any
    t: Any
    starts: Any
    m_t: Any
    tables: Any

    @classmethod
    def of(cls, residuals: Residuals) -> "_ResidualArrays":
        """Takes them from the forward's residuals."""
        segments = residuals.segments
        if segments is None:
            return cls(residuals.g2_cum, residuals.beta_t, residuals.t, None, None, None)
        rows = residuals.t.shape[0]
        starts, m_t = jax.tree.map(lambda y: y.reshape(rows, -1, *y.shape[1:]), segments[:2])
        return cls(residuals.g2_cum, residuals.beta_t, residuals.t, starts, m_t, segments.items.tables)

    def residuals(self, segment_chunks: int | None) -> Residuals:
        """The residuals again; segments have so many chunks."""
        from pallas_kernels.work.residuals import Residuals, Segments
        from pallas_kernels.work.tables import Items, Split

        segments = None
        if segment_chunks is not None:
            starts, m_t = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), (self.starts, self.m_t))
            items = Items(Split(starts.shape[0], segment_chunks), self.tables)
            segments = Segments(starts, m_t, items)
        return Residuals(self.g2_cum, self.beta_t, self.t, segments)


def _segment_chunks(residuals: Residuals) -> int | None:
    return None if residuals.segments is None else residuals.segments.items.split.segment_chunks


def _normalized(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gates.l2norm(q), gates.l2norm(k)


def _rule_fwd(call: Call, x: RuleArrays):
    plain = x
    if call.use_qk_l2norm:  # the backward kernels take them normalised; alone the forward does it inside
        q, k = _normalized(x.q, x.k)
        plain, call = x._replace(q=q, k=k), call._replace(use_qk_l2norm=False)
    o, final, residuals = _forward(call, plain)
    segments = residuals.segments
    if segments is not None:
        starts, m_t = jax.tree.map(lambda y: checkpoint_name(y, STATES_NAME), segments[:2])
        segments = segments._replace(starts=starts, m_t=m_t)
    g2_cum, beta_t = (checkpoint_name(y, GATES_NAME) for y in (residuals.g2_cum, residuals.beta_t))
    t = checkpoint_name(residuals.t, INVERSE_NAME)
    residuals = residuals._replace(g2_cum=g2_cum, beta_t=beta_t, t=t, segments=segments)
    return (checkpoint_name(o, OUTPUT_NAME), final), (x, residuals)


def _rule_bwd(call: Call, saved: tuple[RuleArrays, Residuals], cotangents) -> tuple[RuleArrays]:
    from pallas_kernels.backward.rule import OutputCotangents

    x, residuals = saved
    q, k, through_norm = x.q, x.k, None
    if call.use_qk_l2norm:
        (q, k), through_norm = jax.vjp(_normalized, q, k)
    out = _backward(call, x._replace(q=q, k=k), residuals, OutputCotangents(*cotangents))
    if through_norm is not None:
        dq, dk = through_norm((out.dq, out.dk))
        out = out._replace(dq=dq, dk=dk)
    return (RuleArrays._make((*out, None, None)),)


def _backward(call: Call, x: RuleArrays, residuals: Residuals, cotangents: OutputCotangents) -> Cotangents:
    """Cotangents of the arguments by the kernels, on the shards of the arguments."""
    from pallas_kernels.backward import rule

    if call.shards is None:
        options = dict(scale=call.scale, state_layout=call.state_layout)
        return rule.backward(call.arrays(x), residuals, cotangents, **options)
    axes, arrays = RuleAxes.of(x), _ResidualArrays.of(residuals)
    static = call._replace(shards=None, segment_chunks=_segment_chunks(residuals))
    operands = axes.inputs, _residual_axes(axes, arrays), rule.OutputCotangents._make(axes.outputs)
    args, gradients = (x, arrays, cotangents), rule.Cotangents(*axes.inputs[:6])
    return on_shards(_backward_on_shard, static, args, operands, lambda _: gradients, axes.sizes)


def _backward_on_shard(
    call: Call, x: RuleArrays, arrays: _ResidualArrays, cotangents: OutputCotangents
) -> Cotangents:
    return _backward(call, x, arrays.residuals(call.segment_chunks), cotangents)


_rule.defvjp(_rule_fwd, _rule_bwd)
