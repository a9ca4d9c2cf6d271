"""The kernels by wgmma for per-channel decay, or for erase and write apart: "mosaic_gpu" too."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gdn_jax import gates
from gdn_jax.rule import halves
from gdn_jax.rule.call import APART, CHANNELS, ERASURES, Arrays, Call, RuleAxes
from gdn_jax.rule.kernels.kernel_set import (
    InSegments,
    OutputCotangents,
    Residuals,
    as_gates,
    as_inverse,
    axes_of_segments,
    named_segments,
    of_items,
)
from gdn_jax.rule.kernels.passing import KernelPassing, Opened
from gdn_jax.rule.state_passing import StatePassing
from gdn_jax.shapes import AnyStates, Dims, Outputs, rule_dims


@dataclasses.dataclass(frozen=True)
class Channels(InSegments):
    """The set of that name; `Residuals` are `pallas_kernels.chunks.channel_arrays.ChannelResiduals`."""

    name = "mosaic_gpu"
    gates = CHANNELS, APART, ERASURES

    def state_passing(self, call: Call, x: Arrays) -> StatePassing | None:
        """See `KernelSet`. A derivative in plain JAX would need a forward in plain JAX."""
        return None if self.reason(x) else KernelPassing(call, self)

    def opened(self, call: Call, x: Arrays, interpret: Any) -> Opened:
        """See `OpenKernels`."""
        from pallas_kernels.backward import channel_rule as backward
        from pallas_kernels.forward import channel_rule as forward

        options: dict[str, Any] = dict(scale=call.scale, interpret=interpret)

        def prepare(sequence: Any) -> Any:
            return forward.prepare_open(*prepared(call, x), open_sequence=sequence, **options)

        def adjoints(residuals: Residuals, cotangents: OutputCotangents, entry: Any) -> Any:
            known = residuals, _padded_for(call, cotangents)
            return backward.open_adjoints(*prepared(call, x), *known, entry, interpret=interpret)

        def gradients(residuals: Residuals, cotangents: OutputCotangents, adjoints: Any) -> Arrays:
            how = dict(config=backward.Config(segments=adjoints is not None), adjoints=adjoints)
            known = residuals, _padded_for(call, cotangents)
            return cotangents_of(call, x, backward.backward(*prepared(call, x), *known, **how, **options))

        return Opened(prepare, adjoints, gradients)

    def forward_module(self) -> Any:
        """See `OfModules`."""
        from pallas_kernels.forward import channel_rule

        return channel_rule

    def reason(self, x: Arrays) -> str | None:
        """See `KernelSet`."""
        from pallas_kernels.backward import channel_rule

        return channel_rule.check_supported(x.q.dtype)

    def forward(self, call: Call, x: Arrays) -> tuple[Outputs, AnyStates, Residuals]:
        """See `KernelSet`. The norm of q and k comes before what they are multiplied by."""
        from pallas_kernels.forward import channel_rule

        if call.gates == ERASURES and not _in_halves(x):
            return halves.forward_in_rows(self.forward, call, x)
        if call.use_qk_l2norm and call.gates != CHANNELS:
            units = {name: gates.l2norm(getattr(x, name)) for name in call.keys}
            x, call = x._replace(**units), call._replace(use_qk_l2norm=False)
        arrays, dims = prepared(call, x)
        options: dict[str, Any] = dict(scale=call.scale, state_layout=call.state_layout)
        if call.segment_chunks is not None:
            options |= dict(config=channel_rule.Config(segment_chunks=call.segment_chunks))
        options |= dict(use_qk_l2norm=call.use_qk_l2norm)
        o, final, residuals = channel_rule.forward(arrays, dims, **options)
        if call.gates == ERASURES:
            o = o[:, : x.q.shape[1]]
        return o, final, residuals

    def backward(self, call: Call, x: Arrays, residuals: Residuals, cotangents: OutputCotangents) -> Arrays:
        """See `KernelSet`."""
        from pallas_kernels.backward import channel_rule

        if call.gates == ERASURES and not _in_halves(x):
            return halves.backward_in_rows(self.backward, call, x, residuals, cotangents)
        cotangents = _padded_for(call, cotangents)
        options = dict(scale=call.scale, state_layout=call.state_layout)
        d = channel_rule.backward(*prepared(call, x), residuals, cotangents, **options)
        return cotangents_of(call, x, d)

    def axes(self, axes: RuleAxes, residuals: Residuals) -> Residuals:
        """See `KernelSet`."""
        gates, segments = axes.inputs.initial_state.removesuffix(" ."), axes_of_segments(residuals.segments)
        return residuals._replace(pairs=of_items(residuals.pairs), beta_t=gates, segments=segments)

    def named(self, residuals: Residuals) -> Residuals:
        """See `KernelSet`."""
        pairs, beta_t, segments = residuals
        t, rest = as_inverse(pairs.t), jax.tree.map(as_gates, pairs._replace(t=None))
        return residuals._make((rest._replace(t=t), as_gates(beta_t), named_segments(segments)))


def prepared(call: Call, x: Arrays) -> tuple[Any, Dims]:
    """The arguments as the kernels take them, a `pallas_kernels.forward.channel_rule.ChannelArrays`, and their sizes.

    q and k are as they are.
    """
    from pallas_kernels.forward import channel_rule
    from pallas_kernels.work.halves import GROUP

    rest = x.initial_state, x.cu_seqlens, x.segment_ids
    dims = rule_dims(x.q, x.k, x.v, None, None, *rest, call.state_layout)
    q, k, e, v, beta = x.q, x.k, None, x.v, x.erase
    if call.gates == ERASURES:
        q, k, e, v, strengths = (_padded(y) for y in (x.q, x.k, x.write, x.v, x.erase))
        beta = halves.together(strengths[..., 0], strengths[..., 1], GROUP)
    elif not call.is_beta:
        e, v, beta = _times(x.erase, k, dims.HO), _times(x.write, v, dims.HO), None
    g = jnp.zeros((), jnp.float32) if x.g is None else x.g if x.g.ndim == 4 else x.g[..., None]
    g = jnp.broadcast_to(g.astype(jnp.float32), (dims.B, dims.T, dims.HO, dims.K))
    if call.gates == ERASURES:
        g, dims = _padded(g), dims._replace(T=2 * v.shape[1])
    return channel_rule.ChannelArrays(q, k, e, v, g, beta, *call.known(x)[6:]), dims


def cotangents_of(call: Call, x: Arrays, d: Any) -> Arrays:
    """Cotangents of a call's arrays from those of the arrays that `prepared` makes of them.

    Args:
      d: a `pallas_kernels.backward.channel_rule.ChannelCotangents`.
    """

    def arrays(*floats):
        return prepared(call, Arrays._make((*floats, *x[7:])))[0][: len(d)]

    _, pull_back = jax.vjp(arrays, *x.floats)
    return Arrays._make((*pull_back(tuple(d)), None, None))


def _in_halves(x: Arrays) -> bool:
    """Whether the kernels put both halves of tokens in rows. Where rows hold several sequences they get the rows, as
    a call with per-channel decay gives them."""
    return x.cu_seqlens is None and x.segment_ids is None


def _padded(y: jax.Array) -> jax.Array:
    """An array of tokens with zeros after them, up to a multiple of what kernels of two rows take."""
    from pallas_kernels.work.halves import TOKENS

    return jnp.pad(y, [(0, 0), (0, -y.shape[1] % TOKENS), *[(0, 0)] * (y.ndim - 2)])


def _padded_for(call: Call, cotangents: OutputCotangents) -> OutputCotangents:
    """The cotangents as the kernels of a call take them."""
    return cotangents._replace(do=_padded(cotangents.do)) if call.gates == ERASURES else cotangents


def _times(strength: jax.Array | None, y: jax.Array, HO: int) -> jax.Array:
    """Keys or values [B, T, H, .] times their strengths, for each of HO heads, in their dtype."""
    y = jnp.repeat(y, HO // y.shape[2], axis=2)
    if strength is None:
        return y
    strength = strength if strength.ndim == 4 else strength[..., None]
    return (strength.astype(jnp.float32) * y.astype(jnp.float32)).astype(y.dtype)
