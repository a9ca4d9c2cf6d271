"""The kernels by wgmma and bulk copies, for compute capability 9.0: "mosaic_gpu"."""

import dataclasses
from functools import partial
from typing import Any

from gdn_jax.rule.call import HEADS, Arrays, Call, RuleAxes
from gdn_jax.rule.kernels.kernel_set import (
    InSegments,
    OutputCotangents,
    Residuals,
    as_gates,
    as_inverse,
    axes_of_segments,
    named_segments,
    of_heads,
)
from gdn_jax.rule.kernels.passing import KernelPassing, Opened
from gdn_jax.rule.state_passing import StatePassing
from gdn_jax.shapes import AnyStates, Outputs


@dataclasses.dataclass(frozen=True)
class Hopper(InSegments):
    """The set of that name; `Residuals` are `pallas_kernels.work.residuals`."""

    name = "mosaic_gpu"
    gates = (HEADS,)

    def state_passing(self, call: Call, x: Arrays) -> StatePassing | None:
        """See `KernelSet`."""
        del x
        return KernelPassing(call, self)

    def opened(self, call: Call, x: Arrays, interpret: Any) -> Opened:
        """See `OpenKernels`."""
        from pallas_kernels.backward import rule as backward
        from pallas_kernels.forward import rule as forward

        arrays, options = x.of_heads, dict[str, Any](scale=call.scale, interpret=interpret)

        def gradients(residuals: Residuals, cotangents: OutputCotangents, adjoints: Any) -> Arrays:
            how = dict(config=backward.Config(segments=adjoints is not None), adjoints=adjoints)
            return of_heads(backward.backward(arrays, residuals, cotangents, **how, **options))

        return Opened(
            lambda sequence: forward.prepare_open(arrays, open_sequence=sequence, **options),
            partial(backward.open_adjoints, arrays, **options),
            gradients,
        )

    def forward_module(self) -> Any:
        """See `OfModules`."""
        from pallas_kernels.forward import rule

        return rule

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

    def axes(self, axes: RuleAxes, residuals: Residuals) -> Residuals:
        """See `KernelSet`."""
        matrices = axes.inputs.initial_state
        gates, segments = matrices.removesuffix(" ."), axes_of_segments(residuals.segments)
        return residuals._replace(g2_cum=gates, beta_t=gates, t=matrices, segments=segments)

    def named(self, residuals: Residuals) -> Residuals:
        """See `KernelSet`."""
        g2_cum, beta_t, t, segments = residuals
        g2_cum, beta_t, t = as_gates(g2_cum), as_gates(beta_t), as_inverse(t)
        return residuals._make((g2_cum, beta_t, t, named_segments(segments)))
