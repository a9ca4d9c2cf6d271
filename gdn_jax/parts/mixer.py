"""A Gated DeltaNet layer from its normalised input to its output by kernels: one operation with one derivative.

    c = x W                                          all channels, [q | k | v | a, b | gate], from one product
    q, k, v = silu(conv(c)), q and k to unit length;   g, beta = gates(a, b)
    o = rule(q, k, v, g, beta)
    y = (RMSNorm(o) * silu(gate)) Wo                 the norm over each head

The kernels of the convolution and of the gated norm read their channels where they lie in c. In the backward pass the
gated norm makes an array for the cotangents of all channels and writes those of the gate; those of a and b and, by
the convolution's kernel, those of q, k and v are then written before them. So the cotangent of x is one product, as c
is, instead of three and their sum.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from gdn_jax.gates import log_decay, write_strength
from gdn_jax.parts import products
from gdn_jax.parts.conv import last_inputs, segment_starts
from gdn_jax.parts.eight_bits import gated_norm
from gdn_jax.parts.kernels import fused_op, usable
from gdn_jax.parts.norms import GatedNorm, gated_norm_gradients, gated_norm_kernel
from gdn_jax.parts.products import (
    PLAIN,
    Addend,
    Prepared,
    array_of,
    backward_products,
    by_rows,
    cotangent_operand,
    counter,
    forward_product,
    rounded,
    times,
)
from gdn_jax.parts.short_conv import KeyHeads, filtered, filtered_gradients


class Mixer(NamedTuple):
    """A layer's sizes and options, as far as `mix` depends on them."""

    keys: KeyHeads
    v_heads: int
    v_width: int
    eps: float
    """Is added to the mean square in the gated norm."""
    allow_neg_eigval: bool
    dtype: DTypeLike
    """The compute dtype."""
    rule: Callable[..., tuple[Array, Array | None]]
    """From q, k, v, g, beta and `segment_ids` to outputs and final states, or None."""
    product: Any = PLAIN
    """How projections are multiplied, of `gdn_jax.parts.products`."""

    @property
    def before(self) -> int:
        """Channels of q, k and v."""
        return 2 * self.keys.heads * self.keys.width + self.v_heads * self.v_width

    @property
    def between(self) -> int:
        """Channels of a and b, filled up to whole heads."""
        width = max(self.keys.width, self.v_width)
        return -(-2 * self.v_heads // width) * width

    @property
    def channels(self) -> int:
        """All of them."""
        return self.before + self.between + self.v_heads * self.v_width


class Weights(NamedTuple):
    """A layer's parameters as `mix` takes them."""

    inputs: Float[Array, "D C"]
    """All projections of x, see `side_by_side`."""
    filters: Float[Array, "conv_dim W"]
    A_log: Float[Array, " HV"]
    dt_bias: Float[Array, " HV"]
    write_bias: Float[Array, " HV"] | None
    """Is added to b."""
    norm: Float[Array, " V"]
    output: Float[Array, "F D"]


def takes(
    mixer: Mixer,
    x: Float[Array, "B T D"] | jax.ShapeDtypeStruct,
    filters: Float[Array, "conv_dim W"],
    implementation: str | None,
) -> bool:
    """Whether `mix` runs, from the shapes of its arrays; where it does not, its parts may have kernels apart.

    It does not inside jax.shard_map, nor on explicit axes of a mesh: Pallas has no references to arrays that vary
    over a mesh, through which a kernel changes an array.

    Args:
      mixer: the layer.
      x: its input, or the stream that the input is the norm of.
      filters: of the convolution.
      implementation: as for `parts.kernels.usable`.
    """
    from pallas_kernels.layer import gated_norm, short_conv

    here = jax.typeof(x)
    if here.manual_axis_type.varying or AxisType.Explicit in here.sharding.mesh.axis_types:
        return False
    c = jax.ShapeDtypeStruct((*x.shape[:2], mixer.channels), mixer.dtype)
    o = jax.ShapeDtypeStruct((*x.shape[:2], mixer.v_heads, mixer.v_width), mixer.dtype)
    reason = short_conv.check_supported(c, filters, mixer.keys.heads, mixer.keys.width)
    reason = reason or gated_norm.check_supported(o, mixer.channels)
    return reason is None and usable(implementation, gated_norm)


def side_by_side(mixer: Mixer, before: Sequence[Array], gate: Float[Array, "D F"]) -> Float[Array, "D C"]:
    """All projections of x as one.

    Args:
      mixer: the layer.
      before: projections of q, k, v, a and b.
      gate: that of the output gate.
    """
    fill = jnp.zeros((len(gate), mixer.between - 2 * mixer.v_heads), before[0].dtype)
    return jnp.concatenate([*before, fill, gate], axis=1)


def mix(
    mixer: Mixer,
    x: Float[Array, "B T D"] | Prepared,
    weights: Weights,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T E"] | Addend, Float[Array, "B conv_dim W1"], Float[Array, "B HV K V"] | None]:
    """Mixes the tokens of whole rows; the module docstring has the equations.

    Where the product is not the plain one, the projection down is an operation of its own, which reads y, but for a
    `Prepared` x of which kernels make y in 8 bits: it is then part of this one.

    The results can be differentiated once, in reverse.

    Args:
      mixer: the layer, for which `takes` is true.
      x: normalised inputs.
      weights: its parameters, used in the compute dtype but for the filters, gates and the norm.
      segment_ids: packed rows; nothing crosses a change of id.

    Returns:
      y in the compute dtype, an `Addend` where kernels make the projection's operands; the last inputs of the
      convolution, and the rule's final states.
    """
    prepared = isinstance(x, Prepared) and x.value.dtype == mixer.dtype
    inputs = x if prepared else array_of(x).astype(mixer.dtype)
    c = times(mixer.product, inputs, weights.inputs.astype(mixer.dtype))
    _, *others, output = weights
    output = output.astype(mixer.dtype)
    inside = mixer.product is PLAIN
    if prepared and not inside:  # where kernels make the operands of the projection down
        from pallas_kernels.layer import gated_norm_eight_bits, norm_eight_bits

        o = jax.ShapeDtypeStruct((*c.shape[:2], mixer.v_heads, mixer.v_width), mixer.dtype)
        stream = jax.ShapeDtypeStruct((*c.shape[:2], output.shape[1]), jnp.float32)
        reason = gated_norm_eight_bits.check_supported(o)
        reason = reason or norm_eight_bits.check_supported(stream, mixer.dtype)
        inside = reason is None and products.takes(c[..., -len(output) :], output)  # of y's shape
    y, state = _mix(mixer, c, *others, output if inside else None, segment_ids, counter())
    if not inside:
        y = times(mixer.product, y.reshape(*y.shape[:2], -1), output)
    conv_state = last_inputs(c[..., : mixer.before], segment_ids, weights.filters.shape[1])
    return y, conv_state, state


class _Saved(NamedTuple):
    """Arrays that the derivative reads, and the derivative of the rule."""

    convolution: tuple[Array, Array, Array | None]
    """All channels, filters and where segments begin."""
    gated_norm: tuple[Array, Array, Any]
    """Outputs of the rule, weight of the norm and, if it is multiplied here, projection; in 8 bits that is what it
    multiplies, by columns, the projection, and how many numbers of the former were saturated."""
    through_rule: Callable[..., tuple[Array, ...]] | None


def _run(
    mixer: Mixer, c, filters, A_log, dt_bias, write_bias, norm, output, segment_ids, counter, differentiate
):
    """Output and final states, and what the derivative reads if there will be one."""
    fresh = None if segment_ids is None else segment_starts(segment_ids).astype("int32")
    q, k, v = filtered(mixer.keys, c, filters, fresh)

    def rule(q, k, v, gates, A_log, dt_bias, write_bias):
        a, b = jnp.split(gates[..., : 2 * mixer.v_heads], 2, axis=-1)
        b = b if write_bias is None else b + write_bias.astype(b.dtype)
        g = log_decay(a, A_log, dt_bias)
        beta = write_strength(b, allow_neg_eigval=mixer.allow_neg_eigval)
        v = v.reshape(*v.shape[:2], mixer.v_heads, mixer.v_width)
        return mixer.rule(q, k, v, g, beta, segment_ids=segment_ids)

    gates = c[..., mixer.before : mixer.before + mixer.between]
    inputs = q, k, v, gates, A_log, dt_bias, write_bias
    (o, state), through_rule = jax.vjp(rule, *inputs) if differentiate else (rule(*inputs), None)
    options = GatedNorm(mixer.eps)
    if output is None or mixer.product is PLAIN:
        y = gated_norm_kernel(options, o, _heads(mixer, c), norm, output)
    else:
        policy = mixer.product
        y8, output8 = gated_norm(policy, options, o, c, norm), rounded(by_rows(output), policy.operands)
        y = forward_product(y8, output8, o.dtype).reshape(*o.shape[:2], -1)
        saturated = None if counter is None else y8.saturated
        y, output = Addend.of(y, policy), (y8.by_columns, output8, saturated)
    return (y, state), _Saved((c, filters, fresh), (o, norm, output), through_rule)


def _heads(mixer, c):
    """All channels as heads, of which the last are the gates."""
    return c.reshape(*c.shape[:2], -1, mixer.v_width)


def _backward(mixer: Mixer, saved: _Saved, cotangents):
    (dy, dstate), count = cotangents, None
    assert saved.through_rule is not None
    o, norm, output = saved.gated_norm
    heads = _heads(mixer, saved.convolution[0])
    if isinstance(dy, Addend):
        y8, output8, saturated = output
        dy8 = cotangent_operand(mixer.product, dy)
        count = None if saturated is None else saturated + dy8.saturated
        dy, doutput = backward_products(mixer.product, y8, output8, dy8, o.dtype)
        saved_here = o, heads, norm, None
        do, dheads, dnorm, _ = gated_norm_gradients(GatedNorm(mixer.eps), saved_here, dy.reshape(o.shape))
    else:
        saved_here = o, heads, norm, output
        do, dheads, dnorm, doutput = gated_norm_gradients(GatedNorm(mixer.eps), saved_here, _whole(dy))
    dstate = _whole(dstate)
    dq, dk, dv, dgates, *dparameters = saved.through_rule((do, dstate))
    # So far the last channels alone are written in this array.
    dothers = dgates, dheads.reshape(*dheads.shape[:2], -1)
    dc, dfilters = filtered_gradients(mixer.keys, saved.convolution, (dq, dk, dv), dothers)
    return dc, dfilters, *dparameters, dnorm, doutput, None, count


def _whole(cotangent: Any) -> Any:
    """Zeros where there is no cotangent."""
    zero: Any = cotangent
    return jnp.zeros(zero.shape, zero.dtype) if isinstance(cotangent, SymbolicZero) else cotangent


def _alone(mixer, *arguments):
    return _run(mixer, *arguments, differentiate=False)[0]


_mix = fused_op(partial(_run, differentiate=True), _backward, alone=_alone, symbolic_zeros=True)
