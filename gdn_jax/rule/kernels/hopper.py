"""The kernels by wgmma and bulk copies, for compute capability 9.0: "mosaic_gpu"."""

import dataclasses
from typing import Any, NamedTuple

import jax

from gdn_jax.rule.call import HEADS, Arrays, Call, RuleAxes
from gdn_jax.rule.kernels.kernel_set import (
    InSegments,
    OutputCotangents,
    Residuals,
    as_gates,
    as_inverse,
    as_states,
    of_heads,
)
from gdn_jax.shapes import AnyStates, Dims, Outputs


@dataclasses.dataclass(frozen=True)
class Hopper(InSegments):
    """The set of that name; `Residuals` are `pallas_kernels.work.residuals`."""

    name = "mosaic_gpu"
    gates = (HEADS,)
    hands_over_states = True

    def device_reason(self) -> str | None:
        """See `KernelSet`."""
        from pallas_kernels.device import launch

        return launch.device_reason()

    def check_supported(self, dims: Dims, dtype: Any, *, chunk_size: int, packed: bool) -> str | None:
        """See `KernelSet`."""
        from pallas_kernels.forward import rule

        return rule.check_supported(dims, dtype, chunk_size=chunk_size, packed=packed)

    def gradients_reason(self, x: Arrays) -> str | None:
        """See `KernelSet`."""
        del x

    def forward(self, call: Call, x: Arrays) -> tuple[Outputs, AnyStates, Residuals]:
        """See `KernelSet`."""
        from pallas_kernels.forward import rule

        config = rule.Config(segment_chunks=call.segment_chunks)
        options = dict(scale=call.scale, use_qk_l2norm=call.use_qk_l2norm, state_layout=call.state_layout)
        return rule.forward(call.known(x).of_heads, config=config, **options)

    def backward(self, call: Call, x: Arrays, residuals: Residuals, cotangents: OutputCotangents) -> Arrays:
        """See `KernelSet`."""
        from pallas_kernels.backward import rule

        options = dict(scale=call.scale, state_layout=call.state_layout)
        return of_heads(rule.backward(call.known(x).of_heads, residuals, cotangents, **options))

    def pack(self, residuals: Residuals) -> "_Arrays":
        """See `KernelSet`."""
        segments = residuals.segments
        if segments is None:
            return _Arrays(residuals.g2_cum, residuals.beta_t, residuals.t, None, None, None)
        rows = residuals.t.shape[0]
        starts, m_t = jax.tree.map(lambda y: y.reshape(rows, -1, *y.shape[1:]), segments[:2])
        return _Arrays(residuals.g2_cum, residuals.beta_t, residuals.t, starts, m_t, segments.items.tables)

    def unpack(self, call: Call, arrays: "_Arrays") -> Residuals:
        """See `KernelSet`."""
        from pallas_kernels.work.residuals import Residuals, Segments
        from pallas_kernels.work.tables import Items, Split

        segments = None
        if call.segment_chunks:
            starts, m_t = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), (arrays.starts, arrays.m_t))
            items = Items(Split(starts.shape[0], call.segment_chunks), arrays.tables)
            segments = Segments(starts, m_t, items)
        return Residuals(arrays.g2_cum, arrays.beta_t, arrays.t, segments)

    def axes(self, axes: RuleAxes, arrays: "_Arrays") -> "_Arrays":
        """See `KernelSet`."""
        matrices = axes.inputs.initial_state
        gates, segments = matrices.removesuffix(" ."), matrices.replace("h", ". h")
        tables = jax.tree.map(lambda _: ".", arrays.tables)
        m_t = arrays.m_t
        if m_t is not None:
            m_t = m_t._replace(diagonal=segments.removesuffix(" ."), rest=segments)
        return _Arrays(gates, gates, matrices, segments, m_t, tables)

    def named(self, residuals: Residuals) -> Residuals:
        """See `KernelSet`."""
        segments = residuals.segments
        if segments is not None:
            starts, m_t = jax.tree.map(as_states, segments[:2])
            segments = segments._replace(starts=starts, m_t=m_t)
        g2_cum, beta_t = as_gates(residuals.g2_cum), as_gates(residuals.beta_t)
        return residuals._replace(g2_cum=g2_cum, beta_t=beta_t, t=as_inverse(residuals.t), segments=segments)


class _Arrays(NamedTuple):
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
