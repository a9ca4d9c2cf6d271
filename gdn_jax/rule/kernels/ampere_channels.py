"""The kernels by mma.sync for per-channel decay, or for erase and write apart: "mosaic_mma" too."""

import dataclasses
from typing import Any

import jax
import numpy as np

from gdn_jax.rule import halves
from gdn_jax.rule.call import APART, CHANNELS, ERASURES, Arrays, Call, RuleAxes
from gdn_jax.rule.kernels.ampere import Ampere, normalised
from gdn_jax.rule.kernels.channels import cotangents_of, prepared
from gdn_jax.rule.kernels.kernel_set import OutputCotangents, Residuals, as_gates, as_inverse, as_states
from gdn_jax.shapes import AnyStates, Outputs, rule_dims


@dataclasses.dataclass(frozen=True)
class AmpereChannels(Ampere):
    """The kernel set of that name, with the `Residuals` of `pallas_kernels.ampere.channel_rule`."""

    gates: tuple[str, ...] = (CHANNELS, APART, ERASURES)

    def forward_module(self) -> Any:
        """See `OfModules`."""
        from pallas_kernels.ampere import channel_rule

        return channel_rule

    def reason(self, x: Arrays) -> str | None:
        """See `KernelSet`."""
        from pallas_kernels.backward import channel_rule

        return channel_rule.check_supported(x.q.dtype)

    def forward(self, call: Call, x: Arrays) -> tuple[Outputs, AnyStates, Residuals]:
        """See `KernelSet`. The norm of q and k comes before the kernels, which have none inside."""
        from pallas_kernels.ampere import channel_rule

        if call.gates == ERASURES:
            return halves.forward_in_rows(self.forward, call, x)
        x = normalised(call, x)
        options: dict[str, Any] = dict(scale=call.scale, state_layout=call.state_layout)
        return channel_rule.forward(*prepared(call, x), segment_chunks=call.segment_chunks, **options)

    def backward(self, call: Call, x: Arrays, residuals: Residuals, cotangents: OutputCotangents) -> Arrays:
        """See `KernelSet`."""
        from pallas_kernels.ampere import channel_backward

        if call.gates == ERASURES:
            return halves.backward_in_rows(self.backward, call, x, residuals, cotangents)
        options: dict[str, Any] = dict(scale=call.scale, state_layout=call.state_layout)
        d = channel_backward.backward(*prepared(call, x), residuals, cotangents, **options)
        return cotangents_of(call, x, d)

    def settled(self, call: Call, x: Arrays) -> Call:
        """See `KernelSet`. All shards are cut as is best for those that are expected."""
        from pallas_kernels.ampere import rule

        x = call.known(x)
        rest, lengths = (x.initial_state, x.cu_seqlens, x.segment_ids), x.cu_seqlens
        dims = rule_dims(x.q, x.k, x.v, None, None, *rest, call.state_layout)
        if call.gates == ERASURES:
            dims = dims._replace(T=2 * dims.T)
            lengths = 2 * lengths if isinstance(lengths, np.ndarray) else lengths
        return call._replace(segment_chunks=rule.chosen_segment(dims, lengths))

    def axes(self, axes: RuleAxes, residuals: Residuals) -> Residuals:
        """See `KernelSet`. The chunks of each row lie along an axis of their own."""
        squares = axes.inputs.initial_state.replace("h", ". h")
        vectors = squares.removesuffix(" .")
        pairs = residuals.pairs._replace(gl=vectors, **dict.fromkeys(("t", "p", "kg", "qg", "kr"), squares))
        names = residuals._make((vectors, pairs, squares, squares))
        return names if residuals.m is not None else names._replace(starts=None, m=None)

    def named(self, residuals: Residuals) -> Residuals:
        """See `KernelSet`."""
        beta, pairs, *of_segments = residuals
        t, rest = as_inverse(pairs.t), jax.tree.map(as_gates, pairs._replace(t=None))
        return residuals._make((as_gates(beta), rest._replace(t=t), *jax.tree.map(as_states, of_segments)))
