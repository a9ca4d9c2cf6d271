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
from gdn_jax.shapes import Dims, RuleArrays, accumulation_dtype

GATES_NAME, OUTPUT_NAME = "gdn_gates", "gdn_output"
RESIDUAL_NAMES = (INVERSE_NAME, STATES_NAME, GATES_NAME, OUTPUT_NAME)
"""`checkpoint_name`s of all that the forward kernels write, the final states apart: who keeps these arrays runs no
forward kernel again in the backward pass. The output is among them for what follows the rule."""


class Options(NamedTuple):
    """Static options of a call."""

    use_qk_l2norm: bool
    state_layout: str
    known_lengths: bytes | None
    """cu_seqlens as int64, where its values are known while tracing: the kernels split their work by them."""
    backward_head_slices: int
    shards: int | None = None
    """Devices that XLA is expected to split the call over, by rows and by heads; None where it is not to split it.
    Any other number of shards is right too, but has its sequences cut into segments as suits this one."""

    def kernel_arguments(self, x: RuleArrays) -> dict[str, Any]:
        """What forward and backward both take beside the arrays."""
        known = self.known_lengths
        return {
            "cu_seqlens": x.cu_seqlens if known is None else np.frombuffer(known, np.int64),
            "segment_ids": x.segment_ids,
            "state_layout": self.state_layout,
        }


def check_supported(dims: Dims, q, g, beta, initial_state, *, chunk_size: int, packed: bool) -> str | None:
    """Why the kernels cannot run a call, forward and backward, on JAX's default device; None if they can."""
    from pallas_kernels.device import launch
    from pallas_kernels.forward import rule

    reason = rule.check_supported(dims, q.dtype, chunk_size=chunk_size, packed=packed)
    if reason is None and accumulation_dtype(q, g, beta, initial_state) != jnp.float32:
        reason = "a gate or the state is float64; the kernels compute in float32"
    return reason or launch.device_reason()


def check_head_slices(slices: int, dims: Dims) -> None:
    """Raises ValueError unless no two slices of the heads share a head."""
    from pallas_kernels.backward import rule

    rule.check_head_slices("backward_head_slices", slices, dims)


def rule(x: RuleArrays, scale: float | jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` by the kernels, forward and backward.

    Args:
      scale: any number or array; one that the kernels cannot hold is a factor of their output.
    """
    from pallas_kernels.forward.rule import FOLDED_SCALES

    if isinstance(scale, (int, float)) and FOLDED_SCALES[0] <= scale <= FOLDED_SCALES[1]:
        return _rule(x, float(scale), options)
    o, final = _rule(x, 1.0, options)
    return (scale * o).astype(o.dtype), final


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _rule(x: RuleArrays, scale: float, options: Options) -> tuple[jax.Array, jax.Array]:
    return _forward(x, scale, options)[:2]


class _Static(NamedTuple):
    """What a shard of a call depends on beside its arrays."""

    scale: float
    options: Options
    segment_chunks: int | None
    """Chunks of every segment; None: rows are not cut."""


def _forward(x: RuleArrays, scale: float, options: Options):
    """Outputs, final states and residuals of the kernels, on the shards of the arguments."""
    if options.shards is None:
        return _run_forward(x, scale, options)
    axes = RuleAxes.of(x, options.backward_head_slices)
    # What is kept of the segments has a shape: all shards are cut alike, as is best for those that are expected.
    expected = jax.eval_shape(lambda x: _run_forward(x, scale, options)[2], axes.shard(x, options.shards))
    static = _Static(scale, options, _segment_chunks(expected))

    def results(shapes):
        return *axes.outputs, _residual_axes(axes, shapes[2])

    o, final, arrays = on_shards(_forward_on_shard, static, (x,), (axes.inputs,), results, axes.sizes)
    return o, final, arrays.residuals(static.segment_chunks)


def _run_forward(x: RuleArrays, scale: float, options: Options, config: Any = None):
    from pallas_kernels.forward import rule

    static = dict(scale=scale, use_qk_l2norm=options.use_qk_l2norm, config=config)
    return rule.forward(*x[:6], **static, **options.kernel_arguments(x))


def _forward_on_shard(static: _Static, x: RuleArrays):
    from pallas_kernels.forward import rule

    config = rule.Config(segment_chunks=static.segment_chunks or 0)
    o, final, residuals = _run_forward(x, static.scale, static.options, config)
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
    """The arrays of the forward's residuals, with the segments of each row along an axis of their own (of packed rows
    all of them), and without the static number of items, which differs from shard to whole."""

    g2_cum: Any
    beta_t: Any
    t: Any
    starts: Any
    m_t: Any
    tables: Any

    @classmethod
    def of(cls, residuals: Any) -> "_ResidualArrays":
        """Those of the forward's residuals."""
        segments = residuals.segments
        if segments is None:
            return cls(residuals.g2_cum, residuals.beta_t, residuals.t, None, None, None)
        rows = residuals.t.shape[0]
        starts, m_t = jax.tree.map(lambda y: y.reshape(rows, -1, *y.shape[1:]), segments[:2])
        return cls(residuals.g2_cum, residuals.beta_t, residuals.t, starts, m_t, segments.items.tables)

    def residuals(self, segment_chunks: int | None) -> Any:
        """The residuals again, of segments of so many chunks."""
        from pallas_kernels.work.residuals import Residuals, Segments
        from pallas_kernels.work.tables import Items, Split

        segments = None
        if segment_chunks is not None:
            starts, m_t = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), (self.starts, self.m_t))
            items = Items(Split(starts.shape[0], segment_chunks), self.tables)
            segments = Segments(starts, m_t, items)
        return Residuals(self.g2_cum, self.beta_t, self.t, segments)


def _segment_chunks(residuals: Any) -> int | None:
    return None if residuals.segments is None else residuals.segments.items.split.segment_chunks


def _normalized(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gates.l2norm(q), gates.l2norm(k)


def _rule_fwd(x: RuleArrays, scale: float, options: Options):
    plain = x
    if options.use_qk_l2norm:  # the backward kernels take them normalised; alone the forward does it inside
        q, k = _normalized(x.q, x.k)
        plain, options = x._replace(q=q, k=k), options._replace(use_qk_l2norm=False)
    o, final, residuals = _forward(plain, scale, options)
    segments = residuals.segments
    if segments is not None:
        starts, m_t = jax.tree.map(lambda y: checkpoint_name(y, STATES_NAME), segments[:2])
        segments = segments._replace(starts=starts, m_t=m_t)
    g2_cum, beta_t = (checkpoint_name(y, GATES_NAME) for y in (residuals.g2_cum, residuals.beta_t))
    t = checkpoint_name(residuals.t, INVERSE_NAME)
    residuals = residuals._replace(g2_cum=g2_cum, beta_t=beta_t, t=t, segments=segments)
    return (checkpoint_name(o, OUTPUT_NAME), final), (x, residuals)


def _rule_bwd(scale: float, options: Options, saved, cotangents):
    from pallas_kernels.backward import rule

    x, residuals = saved
    q, k, through_norm = x.q, x.k, None
    if options.use_qk_l2norm:
        (q, k), through_norm = jax.vjp(_normalized, q, k)
    plain = x._replace(q=q, k=k)
    if options.shards is None:
        out = _run_backward(plain, residuals, cotangents, scale, options)
    else:
        axes = RuleAxes.of(x, options.backward_head_slices)
        arrays, static = _ResidualArrays.of(residuals), _Static(scale, options, _segment_chunks(residuals))
        operands = axes.inputs, _residual_axes(axes, arrays), axes.outputs
        gradients, args = rule.Cotangents(*axes.inputs[:6]), (plain, arrays, cotangents)
        out = on_shards(_backward_on_shard, static, args, operands, lambda _: gradients, axes.sizes)
    if through_norm is not None:
        dq, dk = through_norm((out.dq, out.dk))
        out = out._replace(dq=dq, dk=dk)
    return (RuleArrays._make((*out, None, None)),)


def _run_backward(x: RuleArrays, residuals, cotangents, scale: float, options: Options):
    from pallas_kernels.backward import rule

    config = rule.Config(head_slices=options.backward_head_slices)
    arguments = options.kernel_arguments(x)
    return rule.backward(*x[:6], residuals, *cotangents, scale=scale, config=config, **arguments)


def _backward_on_shard(static: _Static, x: RuleArrays, arrays: _ResidualArrays, cotangents):
    residuals = arrays.residuals(static.segment_chunks)
    return _run_backward(x, residuals, cotangents, static.scale, static.options)


_rule.defvjp(_rule_fwd, _rule_bwd)
