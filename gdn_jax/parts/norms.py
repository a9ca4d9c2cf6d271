"""RMSNorm with the sum before it, and RMSNorm of each head with the gate and the projection after it.

The kernels' results can be differentiated once, in reverse.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.partitioning import on_explicit_shards
from gdn_jax.parts.kernels import fused_op, inner_axes, run, token_axes, token_op, usable
from gdn_jax.shapes import ArgumentError, accumulation_dtype, check_choice


def add_norm(
    x: Float[Array, "*S D"],
    y: Float[Array, "*P D"] | None,
    weight: Float[Array, " D"] | None,
    *,
    eps: float = 1e-5,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*S D"], Float[Array, "*S D"]]:
    """The residual stream with a layer's output added, and the RMSNorm of the sum.

        s = x + y,   n = s (mean(s^2) + eps)^(-1/2) weight          the mean along the last axis

    Args:
      x: residual stream [.., D], any floating dtype.
      y: what is added to it, any floating dtype, of x's shape, or, of single tokens, parts of it [P, .., D]; None:
        nothing.
      weight: [D]; None: ones. Where projections alone read n, their weights can be multiplied by it instead, and n is
        then kept for the derivative of both.
      eps: added to the mean square.
      dtype: of n; x's when None.
      implementation: None takes a kernel where there is one (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not. "mosaic_gpu" is None with a warning where there is none.

    Returns:
      s in x's dtype (x itself without y), and n.

    Numerics: float32 (float64 when x is), rounded once, at the end; n is made of the sum before it is rounded. The
      kernel with a weight keeps s for the derivative in the narrower dtype of s and n, which is that of the cotangent
      of n: the cotangent of s passes by it, and a 16-bit layer keeps half of the bytes.
    """
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    from pallas_kernels.layer import norm
    from pallas_kernels.rows import parts_norm

    if y is not None and y.shape != x.shape:
        y = y.reshape(-1, *x.shape)
        reason = "no weight" if weight is None else parts_norm.check_supported(x, len(y))
        if usable(implementation, parts_norm, reason=reason):
            return _parts_norm(x, y, weight, eps=eps, dtype=dtype)
        y = jnp.sum(y, axis=0)
    if usable(implementation, norm, part="the norm of the stream", reason=norm.check_supported(x)):
        names, sizes = _norm_axes(x)
        call = partial(_add_norm, _Norm(eps, dtype))
        return on_explicit_shards(call, (x, y, weight), (names, names, "."), (names, names), sizes)
    wide = accumulation_dtype(x)
    s = x.astype(wide) if y is None else x.astype(wide) + y.astype(wide)
    scale = jax.lax.rsqrt(jnp.mean(s * s, axis=-1, keepdims=True) + eps)
    n = s * scale if weight is None else s * scale * weight.astype(wide)
    return s.astype(x.dtype), n.astype(dtype)


@token_op
def _parts_norm(x, y, weight, *, eps, dtype):
    """`add_norm` of a few rows to which parts are added."""
    from pallas_kernels.rows import parts_norm

    s, n = parts_norm.parts_norm(_rows(x), y.reshape(len(y), -1, x.shape[-1]), weight, eps=eps, dtype=dtype)
    return s.reshape(x.shape), n.reshape(x.shape)


def gated_norm(
    o: Float[Array, "*S V"],
    gate: Float[Array, "*G V"],
    weight: Float[Array, " V"],
    projection: Float[Array, "F D"] | None = None,
    *,
    eps: float = 1e-5,
    activation: str = "silu",
    implementation: str | None = None,
) -> Float[Array, "*R E"]:
    """RMSNorm of each head times SiLU or the sigmoid of its gate, and the projection of all heads.

        y = o (mean(o^2) + eps)^(-1/2) weight silu(gate)             the mean along the last axis
        result = y without a projection, else the heads of y side by side @ projection

    With the GPU's kernels, y is not kept for the derivative of the projection; the derivative of the norm recomputes
    it.

    Args:
      o: outputs of the rule [.., H, V], without a projection [.., V], any floating dtype.
      gate: array of o's shape, any floating dtype.
      weight: [V].
      projection: weight [H V, D], any floating dtype, used in o's.
      eps: added to the mean square.
      activation: "silu" or "sigmoid", of the gate.
      implementation: as for `add_norm`.

    Returns:
      [.., D] in o's dtype, without a projection [.., V]. Numerics of y: float32 (float64 when o is), rounded once.

    Raises:
      ValueError: gate does not have o's shape, or there is no such activation.

    Source: fla's `FusedRMSNormGated`.
    """
    from pallas_kernels.layer import gated_norm as kernels

    if gate.shape != o.shape:
        raise ArgumentError("gate", f"the shape of o, {o.shape}", gate.shape)
    check_choice("activation", activation, tuple(_ACTIVATIONS))
    projection = None if projection is None else projection.astype(o.dtype)
    if usable(implementation, kernels, part="the gated norm", reason=kernels.check_supported(o)):
        names, sizes = _head_axes(o, gate)
        result = names
        if projection is not None:
            result = names.rpartition(" ")[0]  # D in the place of H and V
            sizes.pop("h", None)  # the projection sums over it
        operands = (names, names, ".", None if projection is None else ". .")
        args = (o, gate, weight, projection)
        call = partial(_gated_norm, GatedNorm(eps, activation))
        return on_explicit_shards(call, args, operands, result, sizes)
    return plain_gated_norm(GatedNorm(eps, activation), o, gate, weight, projection)


def gated_norm_of_channels(
    o: Float[Array, "*S H V"],
    channels: Float[Array, "*S C"],
    weight: Float[Array, " V"],
    projection: Float[Array, "F D"] | None = None,
    *,
    eps: float = 1e-5,
    activation: str = "silu",
    implementation: str | None = None,
) -> Float[Array, "*R E"]:
    """`gated_norm` whose gate is the last H V of an array's channels, which the kernel reads where they lie.

    Args:
      o, weight, projection, eps, activation, implementation: of `gated_norm`. The arrays lie on one device.
      channels: [.., C].
    """
    from pallas_kernels.layer import gated_norm as kernels

    (H, V), leading, static = o.shape[-2:], o.shape[:-2], GatedNorm(eps, activation)
    projection = None if projection is None else projection.astype(o.dtype)
    reason = kernels.check_supported(o, channels.shape[-1])
    if usable(implementation, kernels, part="the gated norm", reason=reason):
        return _gated_norm(static, o, channels.reshape(*leading, -1, V), weight, projection)
    return plain_gated_norm(static, o, channels[..., -H * V :].reshape(o.shape), weight, projection)


class _Norm(NamedTuple):
    """Options of a sum with its norm."""

    eps: float
    dtype: Any


class GatedNorm(NamedTuple):
    """Options of the norm of each head with its gate."""

    eps: float
    activation: str = "silu"


def _norm_axes(x) -> tuple[str, dict[str, int]]:
    from pallas_kernels.layer import rows

    return token_axes(x, rows.rows_at_once(x.shape[-1]))


def _run_add_norm(static, x, y, weight, keep=False):
    names, sizes = _norm_axes(x)
    kept = names.rpartition(" ")[0] if weight is None else names
    results = (names, names, kept) if keep else (names, names)
    return run(_add_norm_kernel, (*static, keep), (x, y, weight), (names, names, "."), results, sizes)


def _add_norm_kernel(static, x, y, weight):
    from pallas_kernels.layer import norm

    eps, dtype, keep = static
    flat = None if y is None else _rows(y)
    s, n, *kept = norm.add_norm(_rows(x), flat, weight, eps=eps, dtype=dtype, keep=keep)
    shape = x.shape[:-1] if weight is None else x.shape
    return s.reshape(x.shape), n.reshape(x.shape), *(k.reshape(shape) for k in kept)


def _add_norm_forward(static, x, y, weight):
    s, n, kept = _run_add_norm(static, x, y, weight, keep=True)
    kept = (n, kept) if weight is None else (kept, None)
    return (s, n), (*kept, weight, None if y is None else jnp.zeros((0,), y.dtype))


def _add_norm_backward(static, saved, cotangents):
    s, factors, weight, like_y = saved
    ds, dn = cotangents
    names, sizes = _norm_axes(s)
    dtypes = static.eps, ds.dtype, None if like_y is None else like_y.dtype
    # The sum of the last norm of a model has no cotangent; one of zeros would be written and read.
    ds = None if isinstance(ds, SymbolicZero) else ds
    dn = jnp.zeros(s.shape, static.dtype) if isinstance(dn, SymbolicZero) else dn
    operands = (names, names.rpartition(" ")[0], ".", names, names)
    results = (names, None if like_y is None else names, None if weight is None else ". +b +t")
    return run(_add_norm_kernel_backward, dtypes, (s, factors, weight, ds, dn), operands, results, sizes)


def _add_norm_kernel_backward(static, s, factors, weight, ds, dn):
    from pallas_kernels.layer import norm

    eps, x_dtype, y_dtype = static
    ds = None if ds is None else _rows(ds)
    factors = None if factors is None else factors.reshape(-1)
    options: dict[str, Any] = dict(x_dtype=x_dtype, y_dtype=y_dtype, factors=factors)
    dx, dy, dweight = norm.add_norm_backward(_rows(s), weight, ds, _rows(dn), eps=eps, **options)
    return dx.reshape(s.shape), None if dy is None else dy.reshape(s.shape), dweight


_add_norm = fused_op(_add_norm_forward, _add_norm_backward, alone=_run_add_norm, symbolic_zeros=True)


def gated_norm_kernel(
    options: GatedNorm,
    o: Float[Array, "*S H V"],
    gate: Float[Array, "*S G V"],
    weight: Float[Array, " V"],
    projection: Float[Array, "F D"] | None,
) -> Float[Array, "*R E"]:
    """`gated_norm` by the kernel, without a derivative; of heads in gate the last H are the gates."""
    names, sizes = _head_axes(o, gate)
    return _project(run(_kernel, options, (o, gate, weight), (names, names, "."), names, sizes), projection)


def gated_norm_gradients(
    options: GatedNorm, saved: tuple[Array, Array, Array, Array | None], dresult: Float[Array, "*R E"]
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of <dresult, gated_norm_kernel(options, *saved)> for o, gate, weight and projection.

    The kernel writes the last H heads of the gradient for `gate`. Others are for the caller to write: until then they
    hold whatever lies in memory.
    """
    o, gate, weight, projection = saved
    again = projection is not None
    dy = jnp.einsum("...d,fd->...f", dresult, projection).reshape(o.shape) if again else dresult
    names, sizes = _head_axes(o, gate)
    args, operands = (o, gate, weight, dy), (names, names, ".", names)
    results = (names, names, ". +b +t +h", names if again else None)
    do, dgate, dweight, y = run(_kernel_backward, (options, again), args, operands, results, sizes)
    dprojection = jnp.einsum("...f,...d->fd", y.reshape(*y.shape[:-2], -1), dresult) if again else None
    return do, dgate, dweight, dprojection


def _gated_norm_backward(options, saved, dresult):
    """The gradients, of which those of heads that are no gates are zeros."""
    do, dgate, *others = gated_norm_gradients(options, saved, dresult)
    before = dgate.shape[-2] - do.shape[-2]
    if before:
        dgate = jnp.pad(dgate[..., before:, :], ((0, 0),) * (dgate.ndim - 2) + ((before, 0), (0, 0)))
    return do, dgate, *others


def _head_axes(o, gate) -> tuple[str, dict[str, int]]:
    if o.shape != gate.shape:
        return token_axes(o, 1)
    from pallas_kernels.layer import gated_norm as kernels

    return inner_axes(o, kernels.BLOCK, o.shape[2] if o.ndim > 3 else 1)


def _kernel(options, o, gate, weight):
    from pallas_kernels.layer import gated_norm as kernels

    return kernels.gated_norm(_rows(o), _gates(o, gate), weight, **options._asdict()).reshape(o.shape)


def _kernel_backward(static, o, gate, weight, dy):
    from pallas_kernels.layer import gated_norm as kernels

    options, again = static
    rows = (_rows(o), _gates(o, gate), weight, _rows(dy))
    do, dgate, dweight, y = kernels.gated_norm_backward(*rows, **options._asdict(), again=again)
    y = None if y is None else y.reshape(o.shape)
    return do.reshape(o.shape), dgate.reshape(gate.shape), dweight, y


_gated_norm = fused_op(lambda options, *args: (gated_norm_kernel(options, *args), args), _gated_norm_backward)


_ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def plain_gated_norm(
    options: GatedNorm, o: Array, gate: Array, weight: Array, projection: Array | None
) -> Array:
    """`gated_norm` without kernels."""
    wide = accumulation_dtype(o)
    _, n = add_norm(o, None, weight, eps=options.eps, dtype=wide, implementation="chunked")
    return _project((n * _ACTIVATIONS[options.activation](gate.astype(wide))).astype(o.dtype), projection)


def _project(y, projection):
    """The heads side by side, times the projection if there is one."""
    return y if projection is None else y.reshape(*y.shape[:-2], -1) @ projection


def _rows(x):
    return x.reshape(-1, x.shape[-1])


def _gates(o, gate):
    """Gates as the kernels take them: as rows, or as heads of tokens where they are the last of more."""
    return _rows(gate) if gate.shape == o.shape else gate.reshape(-1, *gate.shape[-2:])
