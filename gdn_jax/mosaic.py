"""The seam to the GPU kernels: what they can run, and the only derivatives that are defined over them.

Nothing else of the library imports `pallas_kernels`; what times and checks kernels as such does. Here stands what a
call needs around the kernels and what is mathematics: the factor of the output where the kernels cannot hold it, the
floor of the write strengths, and the derivative of the L2 norm.
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


def _forward(x: RuleArrays, scale: float, options: Options):
    from pallas_kernels.forward import rule

    arguments = options.kernel_arguments(x)
    return rule.forward(*x[:6], scale=scale, use_qk_l2norm=options.use_qk_l2norm, **arguments)


def _normalized(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gates.l2norm(q), gates.l2norm(k)


def _rule_fwd(x: RuleArrays, scale: float, options: Options):
    from pallas_kernels.backward.gradients import BETA_FLOOR

    # The kernels divide by beta. Where it is 0 a token writes 2^-20 of its value: less than the state's rounding.
    floored = x if x.beta is None else x._replace(beta=jnp.maximum(x.beta, BETA_FLOOR))
    plain = floored
    if options.use_qk_l2norm:  # the backward kernels take them normalised; alone the forward does it inside
        q, k = _normalized(x.q, x.k)
        plain, options = floored._replace(q=q, k=k), options._replace(use_qk_l2norm=False)
    o, final, residuals = _forward(plain, scale, options)
    segments = residuals.segments
    if segments is not None:
        starts, m_t = (checkpoint_name(y, STATES_NAME) for y in (segments.starts, segments.m_t))
        segments = segments._replace(starts=starts, m_t=m_t)
    g2_cum, beta_t = (checkpoint_name(y, GATES_NAME) for y in (residuals.g2_cum, residuals.beta_t))
    t = checkpoint_name(residuals.t, INVERSE_NAME)
    residuals = residuals._replace(g2_cum=g2_cum, beta_t=beta_t, t=t, segments=segments)
    return (checkpoint_name(o, OUTPUT_NAME), final), (floored, residuals)


def _rule_bwd(scale: float, options: Options, saved, cotangents):
    from pallas_kernels.backward import rule

    x, residuals = saved
    q, k, through_norm = x.q, x.k, None
    if options.use_qk_l2norm:
        (q, k), through_norm = jax.vjp(_normalized, q, k)
    primals = (q, k, x.v, x.g, x.beta, x.initial_state)
    config = rule.Config(head_slices=options.backward_head_slices)
    arguments = options.kernel_arguments(x)
    out = rule.backward(*primals, residuals, *cotangents, scale=scale, config=config, **arguments)
    if through_norm is not None:
        dq, dk = through_norm((out.dq, out.dk))
        out = out._replace(dq=dq, dk=dk)
    return (RuleArrays(*out, None, None),)


_rule.defvjp(_rule_fwd, _rule_bwd)
