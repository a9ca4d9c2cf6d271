"""The seam to the GPU kernels: what they can run, and the only derivatives that are defined over them.

The sets of kernels lie in `kernel_sets`. The kernels of what stands around the rule in a layer are reached through
`fused`, those of serving through `serving.kernels`. Here stands what a call needs around the kernels and what is
mathematics: the factor of the output where the kernels cannot hold it, and the derivative of the L2 norm.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas  # adds to JAX's tracing context: inside a jit, its first call would compile twice
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gdn_jax import gates
from gdn_jax.kernel_sets.ampere import Ampere
from gdn_jax.kernel_sets.call import (
    OUTPUT_NAME,
    RESIDUAL_NAMES,
    Call,
    Cotangents,
    KernelSet,
    OutputCotangents,
    Residuals,
)
from gdn_jax.kernel_sets.hopper import Hopper
from gdn_jax.partitioning import RuleAxes, on_shards
from gdn_jax.shapes import AnyStates, Dims, Outputs, RuleArrays, Scale, accumulation_dtype

__all__ = ["KERNELS", "RESIDUAL_NAMES", "Call", "check_supported", "rule"]

KERNELS: dict[str, KernelSet] = {kernels.name: kernels for kernels in (Hopper(), Ampere())}
"""Name -> a set of kernels, the fastest first where a device runs several."""


def check_supported(
    name: str, dims: Dims, q, g, beta, initial_state, *, chunk_size: int, packed: bool
) -> str | None:
    """Why a set of kernels cannot run a call, forward and backward, on JAX's default device; None if it can."""
    kernels = KERNELS[name]
    if (device := kernels.device_reason()) is not None:  # first: no other arguments would help
        return device
    reason = kernels.check_supported(dims, q.dtype, chunk_size=chunk_size, packed=packed)
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
    return _forward(call)(call, x)[:2]


def _forward(call: Call) -> Callable[[Call, RuleArrays], tuple[Outputs, AnyStates, Residuals]]:
    """The function that gives outputs, final states and residuals of a call, on the shards of its arguments."""
    return KERNELS[call.kernels].forward if call.shards is None else _forward_on_shards


def _forward_on_shards(call: Call, x: RuleArrays) -> tuple[Outputs, AnyStates, Residuals]:
    assert call.shards is not None
    kernels = KERNELS[call.kernels]
    axes = RuleAxes.of(x)
    static = kernels.settled(call._replace(shards=None), axes.shard(x, call.shards))

    def results(shapes):
        return *axes.outputs, kernels.axes(axes, shapes[2])

    o, final, arrays = on_shards(_forward_on_shard, static, (x,), (axes.inputs,), results, axes.sizes)
    return o, final, kernels.unpack(static, arrays)


def _forward_on_shard(call: Call, x: RuleArrays) -> tuple[Outputs, AnyStates, Any]:
    kernels = KERNELS[call.kernels]
    o, final, residuals = kernels.forward(call, x)
    return o, final, kernels.pack(residuals)


def _normalized(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gates.l2norm(q), gates.l2norm(k)


def _rule_fwd(call: Call, x: RuleArrays):
    plain = x
    if call.use_qk_l2norm:  # the backward kernels take them normalised; alone the forward does it inside
        q, k = _normalized(x.q, x.k)
        plain, call = x._replace(q=q, k=k), call._replace(use_qk_l2norm=False)
    o, final, residuals = _forward(call)(call, plain)
    residuals = KERNELS[call.kernels].named(residuals)
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

    kernels = KERNELS[call.kernels]
    if call.shards is None:
        return kernels.backward(call, x, residuals, cotangents)
    axes, arrays = RuleAxes.of(x), kernels.pack(residuals)
    static = kernels.settled_by(call._replace(shards=None), residuals)
    operands = axes.inputs, kernels.axes(axes, arrays), rule.OutputCotangents._make(axes.outputs)
    args, gradients = (x, arrays, cotangents), rule.Cotangents(*axes.inputs[:6])
    return on_shards(_backward_on_shard, static, args, operands, lambda _: gradients, axes.sizes)


def _backward_on_shard(call: Call, x: RuleArrays, arrays: Any, cotangents: OutputCotangents) -> Cotangents:
    return _backward(call, x, KERNELS[call.kernels].unpack(call, arrays), cotangents)


_rule.defvjp(_rule_fwd, _rule_bwd)
