"""The seam to the kernels: the only derivative that is defined over them, for every set.

The sets of kernels lie in `rule.kernels`. The kernels of what stands around the rule in a layer are reached through
`parts`, those of serving through `serving.kernels`. Here stands what a call needs around the kernels and what is
mathematics: the factor of the output where the kernels cannot hold it, and the derivative of the L2 norm.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas  # adds to JAX's tracing context: inside a jit, its first call would compile twice
from jax.ad_checkpoint import checkpoint_name

from gdn_jax import gates
from gdn_jax.partitioning import on_shards
from gdn_jax.rule import plain
from gdn_jax.rule.call import Arrays, Call, RuleAxes
from gdn_jax.rule.kernels.kernel_set import (
    OUTPUT_NAME,
    RESIDUAL_NAMES,
    OutputCotangents,
    Residuals,
    axes_by_row,
    by_row,
    whole,
)
from gdn_jax.shapes import AnyStates, Outputs, Scale

__all__ = ["RESIDUAL_NAMES", "program", "rule", "scaled"]


def program(call: Call, scale: Scale) -> tuple[Callable[..., Any], Call, tuple[Scale, ...]]:
    """The function that computes a call by kernels, the call that it takes, and its arguments after the arrays.

    Args:
      scale: any number or array; one that the kernels cannot hold is a factor of their output.
    """
    from pallas_kernels.forward.rule import FOLDED_SCALES

    if isinstance(scale, (int, float)) and FOLDED_SCALES[0] <= scale <= FOLDED_SCALES[1]:
        return rule, call._replace(scale=float(scale)), ()
    return scaled, call, (scale,)


def scaled(call: Call, x: Arrays, scale: Scale) -> tuple[Outputs, AnyStates]:
    """`rule`, and a factor of its output."""
    o, final = rule(call, x)
    return (scale * o).astype(o.dtype), final


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rule(call: Call, x: Arrays) -> tuple[Outputs, AnyStates]:
    """`delta_rule` by the kernels of the call, with the factor that it holds, forward and backward."""
    return _forward(call)(call, x)[:2]


def _forward(call: Call) -> Callable[[Call, Arrays], tuple[Outputs, AnyStates, Residuals]]:
    """The function that gives outputs, final states and residuals of a call, on the shards of its arguments."""
    return call.kernels.forward if call.shards is None else _forward_on_shards


def _forward_on_shards(call: Call, x: Arrays) -> tuple[Outputs, AnyStates, Residuals]:
    assert call.shards is not None
    kernels, axes = call.kernels, RuleAxes.of(x)
    static = kernels.settled(call._replace(shards=None), axes.shard(x, call.shards))

    def results(shapes):
        return *axes.outputs, axes_by_row(kernels, axes, shapes[2])

    o, final, residuals = on_shards(_forward_on_shard, static, (x,), (axes.inputs,), results, axes.sizes)
    return o, final, whole(residuals)


def _forward_on_shard(call: Call, x: Arrays) -> tuple[Outputs, AnyStates, Residuals]:
    o, final, residuals = call.kernels.forward(call, x)
    return o, final, by_row(call.kernels, x, residuals)


def _normalized(*keys: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(gates.l2norm(key) for key in keys)


def _of_unit_length(call: Call, x: Arrays) -> Arrays:
    """The arguments with queries and keys as the backward kernels take them."""
    keys = _normalized(*(getattr(x, name) for name in call.keys))
    return x._replace(**dict(zip(call.keys, keys, strict=True)))


def _rule_fwd(call: Call, x: Arrays):
    if call.kernels.reason(x) is not None:
        return rule(call, x), (x, None)
    normalised = x
    if call.use_qk_l2norm:  # the backward kernels take them normalised; alone the forward does it inside
        normalised, call = _of_unit_length(call, x), call._replace(use_qk_l2norm=False)
    o, final, residuals = _forward(call)(call, normalised)
    residuals = call.kernels.named(residuals)
    return (checkpoint_name(o, OUTPUT_NAME), final), (x, residuals)


def _rule_bwd(call: Call, saved: tuple[Arrays, Residuals | None], cotangents) -> tuple[Arrays]:
    from pallas_kernels.backward.rule import OutputCotangents

    x, residuals = saved
    if residuals is None:
        return (_plain_gradients(call, x, cotangents),)
    keys, through_norm = tuple(getattr(x, name) for name in call.keys), None
    if call.use_qk_l2norm:
        keys, through_norm = jax.vjp(_normalized, *keys)
    of_unit_length = x._replace(**dict(zip(call.keys, keys, strict=True)))
    out = _backward(call, of_unit_length, residuals, OutputCotangents(*cotangents))
    if through_norm is not None:
        dkeys = through_norm(tuple(getattr(out, name) for name in call.keys))
        out = out._replace(**dict(zip(call.keys, dkeys, strict=True)))
    return (out,)


def _backward(call: Call, x: Arrays, residuals: Residuals, cotangents: OutputCotangents) -> Arrays:
    """Cotangents of the arguments by the kernels, on the shards of the arguments."""
    from pallas_kernels.backward import rule

    kernels = call.kernels
    if call.shards is None:
        return kernels.backward(call, x, residuals, cotangents)
    axes, residuals = RuleAxes.of(x), by_row(kernels, x, residuals)
    static = call._replace(shards=None)
    operands = axes.inputs, axes_by_row(kernels, axes, residuals), rule.OutputCotangents._make(axes.outputs)
    args, results = (x, residuals, cotangents), axes.inputs._replace(cu_seqlens=None, segment_ids=None)
    return on_shards(_backward_on_shard, static, args, operands, lambda _: results, axes.sizes)


def _backward_on_shard(call: Call, x: Arrays, residuals: Residuals, cotangents: OutputCotangents) -> Arrays:
    return _backward(call, x, whole(residuals), cotangents)


def _plain_gradients(call: Call, x: Arrays, cotangents: Any) -> Arrays:
    """Cotangents of the arguments by the derivative of the chunked form in plain JAX."""

    def form(*floats):
        return plain.rule(Call(*call[:3]), Arrays._make((*floats, *x[7:])), call.scale)

    _, pull_back = jax.vjp(form, *x.floats)
    return Arrays._make((*pull_back(cotangents), None, None))


rule.defvjp(_rule_fwd, _rule_bwd)
