"""The seam between the family's rule and its kernels: what they can run, and the only derivative defined over them.

The kernels compute the forward. The derivative is that of the chunked form in plain JAX, `family.chunked`, from the
arguments alone.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas  # adds to JAX's tracing context: inside a jit, its first call would compile twice
import jax.numpy as jnp
import numpy as np

from gdn_jax import gates, xla
from gdn_jax.family import forms
from gdn_jax.family.arrays import Arrays, array_names, rule_axes
from gdn_jax.partitioning import on_shards
from gdn_jax.shapes import Dims, Scale, accumulation_dtype, rule_dims


class Call(NamedTuple):
    """Everything that a call is compiled for, besides shapes."""

    use_qk_l2norm: bool
    state_layout: str
    known_lengths: bytes | None
    """cu_seqlens as int64, where its values are known while tracing: the kernels split their work by them."""
    is_beta: bool
    """Whether erase stands for both strengths, a number of each head or None, and write is None."""
    is_split: bool = False
    """Whether XLA may have to split the call over devices."""
    scale: float = 1.0
    """The factor of the output, one that the kernels hold."""


def check_supported(dims: Dims, x: Arrays, *, chunk_size: int) -> str | None:
    """Why the kernels cannot run a call on JAX's default device; None if they can."""
    from pallas_kernels.device import launch
    from pallas_kernels.forward import channel_rule

    if (device := launch.device_reason()) is not None:  # first: no other arguments would help
        return device
    packed = x.cu_seqlens is not None
    reason = channel_rule.check_supported(dims, x.q.dtype, chunk_size=chunk_size, packed=packed)
    if reason is None and accumulation_dtype(x.q, x.g, x.erase, x.write, x.initial_state) != jnp.float32:
        reason = "a gate, a strength or the state is float64; the kernels compute in float32"
    return reason


def rule(call: Call, x: Arrays, scale: Scale) -> tuple[jax.Array, jax.Array]:
    """`delta_rule` by the kernels.

    Args:
      scale: any number or array; one that the kernels cannot hold is a factor of their output.
    """
    from pallas_kernels.forward.rule import FOLDED_SCALES

    if isinstance(scale, (int, float)) and FOLDED_SCALES[0] <= scale <= FOLDED_SCALES[1]:
        return _rule(call._replace(scale=float(scale)), x)
    o, final = _rule(call, x)
    return (scale * o).astype(o.dtype), final


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(call: Call, x: Arrays) -> tuple[jax.Array, jax.Array]:
    if not call.is_split:
        return _forward(call, x)
    axes = rule_axes(x)
    names = array_names(x, axes)
    return on_shards(_forward, call, (x,), (names,), lambda _: axes.outputs, axes.sizes)


def _forward(call: Call, x: Arrays) -> tuple[jax.Array, jax.Array]:
    """Outputs and final states by the kernels."""
    from pallas_kernels.forward import channel_rule

    arrays, dims = prepared(call, x, normalize=call.use_qk_l2norm and not call.is_beta)
    normalize = call.use_qk_l2norm and call.is_beta
    options = dict(scale=call.scale, use_qk_l2norm=normalize, state_layout=call.state_layout)
    return channel_rule.forward(arrays, dims, **options)[:2]


def prepared(call: Call, x: Arrays, *, normalize: bool) -> tuple[Any, Dims]:
    """The arguments as the kernels take them, a `pallas_kernels.forward.channel_rule.ChannelArrays`, and their sizes.

    Args:
      normalize: whether q and k are brought to unit length here.
    """
    from pallas_kernels.forward import channel_rule

    rest = x.initial_state, x.cu_seqlens, x.segment_ids
    dims = rule_dims(x.q, x.k, x.v, None, None, *rest, call.state_layout)
    if call.known_lengths is not None:
        rest = x.initial_state, np.frombuffer(call.known_lengths, np.int64), x.segment_ids
    q, k, e, v, beta = x.q, x.k, None, x.v, x.erase
    if normalize:
        q, k = gates.l2norm(q), gates.l2norm(k)
    if not call.is_beta:
        e, v, beta = _times(x.erase, k, dims.HO), _times(x.write, v, dims.HO), None
    g = jnp.zeros((), jnp.float32) if x.g is None else x.g if x.g.ndim == 4 else x.g[..., None]
    g = jnp.broadcast_to(g.astype(jnp.float32), (dims.B, dims.T, dims.HO, dims.K))
    return channel_rule.ChannelArrays(q, k, e, v, g, beta, *rest), dims


def gradients(call: Call, x: Arrays, residuals: Any, cotangents: Any) -> Arrays:
    """Cotangents of the arguments by the kernels of the backward, which `_rule_bwd` does not call yet.

    Args:
      residuals: of `pallas_kernels.forward.channel_rule.forward` for the same call, with q and k normalised before it
        where `use_qk_l2norm` asks for that.
      cotangents: of o and of the final states.
    """
    from pallas_kernels.backward import channel_rule
    from pallas_kernels.backward.rule import OutputCotangents

    def arrays(floats):
        y = x._replace(**dict(zip(FLOATS, floats, strict=True)))
        return prepared(call, y, normalize=call.use_qk_l2norm)[0][
            : len(channel_rule.ChannelCotangents._fields)
        ]

    _, pull_back = jax.vjp(arrays, tuple(getattr(x, name) for name in FLOATS))
    given, dims = prepared(call, x, normalize=call.use_qk_l2norm)
    options = dict(scale=call.scale, state_layout=call.state_layout)
    d = channel_rule.backward(given, dims, residuals, OutputCotangents(*cotangents), **options)
    (floats,) = pull_back(tuple(d))
    return Arrays(**dict(zip(FLOATS, floats, strict=True)), cu_seqlens=None, segment_ids=None)


def _times(strength: jax.Array | None, y: jax.Array, HO: int) -> jax.Array:
    """Keys or values [B, T, H, .] times their strengths, for each of HO heads, in their dtype."""
    y = jnp.repeat(y, HO // y.shape[2], axis=2)
    if strength is None:
        return y
    strength = strength if strength.ndim == 4 else strength[..., None]
    return (strength.astype(jnp.float32) * y.astype(jnp.float32)).astype(y.dtype)


def _rule_fwd(call: Call, x: Arrays) -> tuple[tuple[jax.Array, jax.Array], Arrays]:
    return _rule(call, x), x


def _rule_bwd(call: Call, x: Arrays, cotangents: Any) -> tuple[Arrays]:
    plain = xla.Call(call.use_qk_l2norm, call.state_layout)

    def form(*floats):
        y = x._replace(**dict(zip(FLOATS, floats, strict=True)))
        return forms.rule(plain, y._replace(write=y.erase) if call.is_beta else y, call.scale)

    _, pull_back = jax.vjp(form, *(getattr(x, name) for name in FLOATS))
    d = pull_back(cotangents)
    return (Arrays(**dict(zip(FLOATS, d, strict=True)), cu_seqlens=None, segment_ids=None),)


FLOATS = Arrays._fields[:7]
"""Names of the arguments that have a derivative."""

_rule.defvjp(_rule_fwd, _rule_bwd)
