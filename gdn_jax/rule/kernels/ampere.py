"""The kernels by mma.sync and cp.async, for GPUs that have `Needs.MMA`: "mosaic_mma"."""

import dataclasses
from typing import Any

import jax

from gdn_jax import gates
from gdn_jax.rule.call import HEADS, Arrays, Call, RuleAxes
from gdn_jax.rule.kernels.kernel_set import (
    OfModules,
    OutputCotangents,
    Residuals,
    as_gates,
    as_inverse,
    as_states,
    of_heads,
)
from gdn_jax.rule.state_passing import StatePassing
from gdn_jax.shapes import AnyStates, Outputs


@dataclasses.dataclass(frozen=True)
class Ampere(OfModules):
    """The set of that name; `Residuals` are those of `pallas_kernels.ampere.rule`."""

    name = "mosaic_mma"
    called = "the kernels by mma.sync"
    gates: tuple[str, ...] = (HEADS,)

    def state_passing(self, call: Call, x: Arrays) -> StatePassing | None:
        """See `KernelSet`."""
        del call, x

    def forward_module(self) -> Any:
        """See `OfModules`."""
        from pallas_kernels.ampere import rule

        return rule

    def forward(self, call: Call, x: Arrays) -> tuple[Outputs, AnyStates, Residuals]:
        """See `KernelSet`. The norm of q and k comes before the kernels, which have none inside."""
        from pallas_kernels.ampere import rule

        x = normalised(call, x)
        options = dict(scale=call.scale, state_layout=call.state_layout)
        return rule.forward(call.known(x).of_heads, segment_chunks=call.segment_chunks, **options)

    def backward(self, call: Call, x: Arrays, residuals: Residuals, cotangents: OutputCotangents) -> Arrays:
        """See `KernelSet`."""
        from pallas_kernels.ampere import backward

        options = dict(scale=call.scale, state_layout=call.state_layout)
        return of_heads(backward.backward(call.known(x).of_heads, residuals, cotangents, **options))

    def settled(self, call: Call, x: Arrays) -> Call:
        """See `KernelSet`. All shards are cut as is best for those that are expected."""
        from pallas_kernels.ampere import rule

        x = call.known(x)
        return call._replace(segment_chunks=rule.chosen_segment(x.of_heads.dims, x.cu_seqlens))

    def axes(self, axes: RuleAxes, residuals: Residuals) -> Residuals:
        """See `KernelSet`. The chunks of each row lie along an axis of their own."""
        squares = axes.inputs.initial_state.replace("h", ". h")
        vectors = squares.removesuffix(" .")
        names = residuals._make((vectors, vectors, *[squares] * 4))
        return names if residuals.m is not None else names._replace(starts=None, m=None)

    def named(self, residuals: Residuals) -> Residuals:
        """See `KernelSet`."""
        g2_cum, beta, t, p, *of_segments = residuals
        made = as_gates(g2_cum), as_gates(beta), as_inverse(t), as_inverse(p)
        return residuals._make((*made, *jax.tree.map(as_states, of_segments)))


def normalised(call: Call, x: Arrays) -> Arrays:
    """The arguments with q and k as they are after the norm that the call wants."""
    return x._replace(q=gates.l2norm(x.q), k=gates.l2norm(x.k)) if call.use_qk_l2norm else x
