"""The seam between the family's rule and its kernels: what they can run, and the only derivative defined over them.

The backward is by kernels too where `gradients_reason` has no objection. Else the derivative is that of the chunked
form in plain JAX, `family.chunked`, from the arguments alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas  # adds to JAX's tracing context: inside a jit, its first call would compile twice
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gdn_jax import gates, xla
from gdn_jax.chunks.recurrence import INVERSE_NAME, STATES_NAME
from gdn_jax.family import forms
from gdn_jax.family.arrays import Arrays, array_names, rule_axes
from gdn_jax.kernel_sets.call import GATES_NAME, OUTPUT_NAME
from gdn_jax.partitioning import RuleAxes, on_shards
from gdn_jax.shapes import Dims, Scale, accumulation_dtype, rule_dims

# The kernels' own record, which is imported inside calls.
Residuals = Any  # pallas_kernels.chunks.channel_arrays.ChannelResiduals


class Call(NamedTuple):
    """Everything that a call is compiled for, besides shapes."""

    use_qk_l2norm: bool
    state_layout: str
    known_lengths: bytes | None
    """cu_seqlens as int64, where its values are known while tracing: the kernels split their work by them."""
    is_beta: bool
    """Whether erase stands for both strengths, a number of each head or None, and write is None."""
    shards: int | None = None
    """Devices that XLA is expected to split the call over, see `gdn_jax.mosaic.Call`; None where it is not to."""
    scale: float = 1.0
    """The factor of the output, one that the kernels hold."""
    segment_chunks: int | None = None
    """Chunks of every segment, 0 for rows that are not cut; None for a choice from the shapes."""


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
    return _forward(call, x)[:2]


def _forward(call: Call, x: Arrays) -> tuple[jax.Array, jax.Array, Residuals]:
    """Outputs, final states and residuals of the kernels, on the shards of the arguments."""
    from pallas_kernels.forward import channel_rule

    if call.shards is not None:
        return _forward_on_shards(call, x)
    arrays, dims = prepared(call, x, normalize=call.use_qk_l2norm and not call.is_beta)
    options: dict[str, Any] = dict(scale=call.scale, state_layout=call.state_layout)
    options |= dict(use_qk_l2norm=call.use_qk_l2norm and call.is_beta)
    if call.segment_chunks is not None:
        options |= dict(config=channel_rule.Config(segment_chunks=call.segment_chunks))
    return channel_rule.forward(arrays, dims, **options)


def _forward_on_shards(call: Call, x: Arrays) -> tuple[jax.Array, jax.Array, Residuals]:
    assert call.shards is not None
    axes, alone = rule_axes(x), call._replace(shards=None)
    names = array_names(x, axes)
    # What is kept of the segments has a shape: all shards are cut alike, as is best for those that are expected.
    expected = jax.eval_shape(lambda x: _forward(alone, x)[2], axes.shard(x, call.shards, names)).segments
    cut = 0 if expected is None else expected.items.split.segment_chunks
    static = alone._replace(segment_chunks=cut)

    def results(shapes):
        return *axes.outputs, _residual_axes(axes, shapes[2])

    o, final, residuals = on_shards(_forward_on_shard, static, (x,), (names,), results, axes.sizes)
    return o, final, _together(residuals)


def _forward_on_shard(call: Call, x: Arrays) -> tuple[jax.Array, jax.Array, Residuals]:
    o, final, residuals = _forward(call, x)
    return o, final, _by_rows(residuals)


def _residual_axes(axes: RuleAxes, residuals: Residuals) -> Residuals:
    """Names of the dimensions of what the forward leaves, `_by_rows`. Packed equal sequences are its rows."""
    matrices = axes.inputs.initial_state
    names = {5: matrices.replace("h", ". h"), 1: "."}
    names |= {4: names[5].removesuffix(" ."), 3: matrices.removesuffix(" .")}
    return jax.tree.map(lambda y: names[y.ndim], residuals)


def _by_rows(residuals: Residuals) -> Residuals:
    """The residuals with an axis of rows before the visits and the segments of each."""
    rows = residuals.beta_t.shape[0]
    return _reshaped(residuals, lambda y: y.reshape(rows, -1, *y.shape[1:]))


def _together(residuals: Residuals) -> Residuals:
    """The residuals without the axis of `_by_rows`, and with the number of items of this shard."""
    residuals = _reshaped(residuals, lambda y: y.reshape(-1, *y.shape[2:]))
    if (cut := residuals.segments) is None:
        return residuals
    split = cut.items.split._replace(num_items=cut.starts.shape[0])
    return residuals._replace(segments=cut._replace(items=cut.items._replace(split=split)))


def _reshaped(residuals: Residuals, shape: Callable[[jax.Array], jax.Array]) -> Residuals:
    pairs, segments = jax.tree.map(shape, residuals.pairs), residuals.segments
    if segments is not None:
        starts, m_t = jax.tree.map(shape, segments[:2])
        segments = segments._replace(starts=starts, m_t=m_t)
    return residuals._replace(pairs=pairs, segments=segments)


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


def gradients_reason(x: Arrays) -> str | None:
    """Why the kernels cannot run the backward of a call whose forward they run; None if they can."""
    from pallas_kernels.backward import channel_rule

    return channel_rule.check_supported(x.q.dtype)


def gradients(call: Call, x: Arrays, residuals: Residuals, cotangents: Any) -> Arrays:
    """Cotangents of the arguments by the kernels of the backward, on the shards of the arguments.

    Args:
      residuals: of `pallas_kernels.forward.channel_rule.forward` for the same call, with q and k normalised before it
        where `use_qk_l2norm` asks for that.
      cotangents: of o and of the final states.
    """
    from pallas_kernels.backward import channel_rule
    from pallas_kernels.backward.rule import OutputCotangents

    if call.shards is not None:
        axes, static = rule_axes(x), call._replace(shards=None)
        names = array_names(x, axes)
        results = names._replace(cu_seqlens=None, segment_ids=None)
        residuals = _by_rows(residuals)
        operands = names, _residual_axes(axes, residuals), axes.outputs
        args = x, residuals, tuple(cotangents)
        return on_shards(_gradients_on_shard, static, args, operands, lambda _: results, axes.sizes)

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


def _gradients_on_shard(call: Call, x: Arrays, residuals: Residuals, cotangents: Any) -> Arrays:
    return gradients(call, x, _together(residuals), cotangents)


def _times(strength: jax.Array | None, y: jax.Array, HO: int) -> jax.Array:
    """Keys or values [B, T, H, .] times their strengths, for each of HO heads, in their dtype."""
    y = jnp.repeat(y, HO // y.shape[2], axis=2)
    if strength is None:
        return y
    strength = strength if strength.ndim == 4 else strength[..., None]
    return (strength.astype(jnp.float32) * y.astype(jnp.float32)).astype(y.dtype)


def _rule_fwd(call: Call, x: Arrays):
    if gradients_reason(x) is not None:
        return _rule(call, x), (x, None)
    plain = x
    if call.use_qk_l2norm:  # the backward kernels take them normalised; alone the forward does it inside
        plain, call = x._replace(q=gates.l2norm(x.q), k=gates.l2norm(x.k)), call._replace(use_qk_l2norm=False)
    o, final, residuals = _forward(call, plain)
    pairs, beta_t, segments = jax.tree.map(
        lambda y: checkpoint_name(y, GATES_NAME), residuals._replace(segments=None)
    )
    pairs = pairs._replace(t=checkpoint_name(residuals.pairs.t, INVERSE_NAME))
    if (cut := residuals.segments) is not None:
        starts, m_t = jax.tree.map(lambda y: checkpoint_name(y, STATES_NAME), cut[:2])
        segments = cut._replace(starts=starts, m_t=m_t)
    return (checkpoint_name(o, OUTPUT_NAME), final), (
        x,
        residuals._replace(pairs=pairs, beta_t=beta_t, segments=segments),
    )


def _rule_bwd(call: Call, saved: tuple[Arrays, Residuals | None], cotangents: Any) -> tuple[Arrays]:
    x, residuals = saved
    if residuals is None:
        return (_plain_gradients(call, x, cotangents),)
    return (gradients(call, x, residuals, cotangents),)


def _plain_gradients(call: Call, x: Arrays, cotangents: Any) -> Arrays:
    """Cotangents of the arguments by the derivative of the chunked form in plain JAX."""
    plain = xla.Call(call.use_qk_l2norm, call.state_layout)

    def form(*floats):
        y = x._replace(**dict(zip(FLOATS, floats, strict=True)))
        return forms.rule(plain, y._replace(write=y.erase) if call.is_beta else y, call.scale)

    _, pull_back = jax.vjp(form, *(getattr(x, name) for name in FLOATS))
    d = pull_back(cotangents)
    return Arrays(**dict(zip(FLOATS, d, strict=True)), cu_seqlens=None, segment_ids=None)


FLOATS = Arrays._fields[:7]
"""Names of the arguments that have a derivative."""

_rule.defvjp(_rule_fwd, _rule_bwd)
