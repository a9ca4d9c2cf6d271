"""RMSNorm with the sum before it, and RMSNorm of each head with the gate and the projection behind it.

The kernels' results can be differentiated once, in reverse.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.fused.kernels import inner_axes, run, token_axes, usable
from gdn_jax.partitioning import on_explicit_shards
from gdn_jax.shapes import accumulation_dtype


def add_norm(
    x: Float[Array, "*S D"],
    y: Float[Array, "*S D"] | None,
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
      y: what is added to it, any floating dtype; None: nothing.
      weight: [D]; None: ones. Where a projection alone reads n, its kernel can be multiplied by the weight instead:
        the kernel then keeps n for the derivative of both.
      eps: added to the mean square.
      dtype: of n; x's when None.
      implementation: None takes a kernel where there is one (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not.

    Returns:
      s in x's dtype (x itself without y), and n.

    Numerics: float32 (float64 when x is), rounded once, at the end; n is made of the sum before it is rounded. The
      kernel with a weight keeps s for the derivative in the narrower dtype of s and n, which is that of the cotangent
      of n: the cotangent of s passes by it, and a 16-bit layer keeps half of the bytes.
    """
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    from pallas_kernels.layer import norm

    if usable(implementation, norm.check_supported(x)):
        names, sizes = _norm_axes(x)
        call = partial(_add_norm, eps=eps, dtype=dtype)
        return on_explicit_shards(call, (x, y, weight), (names, names, "."), (names, names), sizes)
    wide = accumulation_dtype(x)
    s = x.astype(wide) if y is None else x.astype(wide) + y.astype(wide)
    scale = jax.lax.rsqrt(jnp.mean(s * s, axis=-1, keepdims=True) + eps)
    n = s * scale if weight is None else s * scale * weight.astype(wide)
    return s.astype(x.dtype), n.astype(dtype)


def gated_norm(
    o: Float[Array, "*S V"],
    gate: Float[Array, "*G V"],
    weight: Float[Array, " V"],
    kernel: Float[Array, "F D"] | None = None,
    *,
    eps: float = 1e-5,
    joined: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*R E"]:
    """RMSNorm of each head times SiLU of its gate, and the projection of all heads.

        y = o (mean(o^2) + eps)^(-1/2) weight silu(gate)             the mean along the last axis
        result = y without a kernel, else the heads of y side by side @ kernel

    With the GPU's kernels, y is not kept for the derivative of the projection but made again beside that of the norm.

    Args:
      o: outputs of the rule [.., H, V], without a kernel [.., V], any floating dtype.
      gate: of o's shape, any floating dtype.
      weight: [V].
      kernel: projection [H V, D], any floating dtype, used in o's.
      eps: added to the mean square.
      joined: whether gate may have more heads than o, of which these are the last, as `fused.joined.short_conv`
        returns them. By the kernels their cotangent holds for the others whatever lies in memory: that function alone
        knows what to make of it.
      implementation: as for `add_norm`.

    Returns:
      [.., D] in o's dtype, without a kernel [.., V]. Numerics of y: float32 (float64 when o is), rounded once.

    Raises:
      ValueError: gate does not have o's shape, without `joined`.

    Source: fla's `FusedRMSNormGated`.
    """
    from pallas_kernels.layer import gated_norm as kernels

    if gate.shape != o.shape and not joined:
        raise ValueError(f"gate: expected the shape of o, {o.shape}, got {gate.shape}")
    kernel = None if kernel is None else kernel.astype(o.dtype)
    reason = kernels.check_supported(o)
    if gate.shape != o.shape:
        reason = reason or kernels.check_gates(o, gate.shape[-2] * gate.shape[-1])
    if usable(implementation, reason):
        names, sizes = _head_axes(o, gate)
        result = names if kernel is None else names.rpartition(" ")[0]  # D in the place of H and V
        if kernel is not None:
            sizes.pop("h", None)  # the projection sums over it
        call = partial(_gated_norm, eps=eps)
        operands = (names, names, ".", None if kernel is None else ". .")
        return on_explicit_shards(call, (o, gate, weight, kernel), operands, result, sizes)
    if gate.shape != o.shape:
        gate = gate[..., -o.shape[-2] :, :]
    wide = accumulation_dtype(o)
    _, n = add_norm(o, None, weight, eps=eps, dtype=wide, implementation="chunked")
    return _project((n * jax.nn.silu(gate.astype(wide))).astype(o.dtype), kernel)


def _norm_axes(x) -> tuple[str, dict[str, int]]:
    from pallas_kernels.layer import rows

    return token_axes(x, rows.rows_at_once(x.shape[-1]))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add_norm(x, y, weight, eps, dtype):
    return _run_add_norm(x, y, weight, eps, dtype)


def _run_add_norm(x, y, weight, eps, dtype, keep=False):
    names, sizes = _norm_axes(x)
    kept = names.rpartition(" ")[0] if weight is None else names
    results = (names, names, kept) if keep else (names, names)
    return run(_add_norm_forward, (eps, dtype, keep), (x, y, weight), (names, names, "."), results, sizes)


def _add_norm_forward(static, x, y, weight):
    from pallas_kernels.layer import norm

    eps, dtype, keep = static
    flat = None if y is None else _rows(y)
    s, n, *kept = norm.add_norm(_rows(x), flat, weight, eps=eps, dtype=dtype, keep=keep)
    shape = x.shape[:-1] if weight is None else x.shape
    return s.reshape(x.shape), n.reshape(x.shape), *(k.reshape(shape) for k in kept)


def _add_norm_fwd(x, y, weight, eps, dtype):
    x, y, weight = (None if p is None else p.value for p in (x, y, weight))
    s, n, kept = _run_add_norm(x, y, weight, eps, dtype, keep=True)
    kept = (n, kept) if weight is None else (kept, None)
    return (s, n), (*kept, weight, None if y is None else jnp.zeros((0,), y.dtype))


def _add_norm_bwd(eps, dtype, saved, cotangents):
    s, factors, weight, like_y = saved
    ds, dn = cotangents
    names, sizes = _norm_axes(s)
    static = eps, ds.dtype, None if like_y is None else like_y.dtype
    # The sum of the last norm of a model has no cotangent; one of zeros would be written and read.
    ds = None if isinstance(ds, SymbolicZero) else ds
    dn = jnp.zeros(s.shape, dtype) if isinstance(dn, SymbolicZero) else dn
    args = (s, factors, weight, ds, dn)
    operands = (names, names.rpartition(" ")[0], ".", names, names)
    results = (names, None if like_y is None else names, None if weight is None else ". +b +t")
    dx, dy, dweight = run(_add_norm_backward, static, args, operands, results, sizes)
    return dx, dy, None if weight is None else dweight.astype(weight.dtype)


def _add_norm_backward(static, s, factors, weight, ds, dn):
    from pallas_kernels.layer import norm

    eps, x_dtype, y_dtype = static
    ds = None if ds is None else _rows(ds)
    options: Any = dict(
        x_dtype=x_dtype, y_dtype=y_dtype, factors=None if factors is None else factors.reshape(-1)
    )
    dx, dy, dweight = norm.add_norm_backward(_rows(s), weight, ds, _rows(dn), eps=eps, **options)
    return dx.reshape(s.shape), None if dy is None else dy.reshape(s.shape), dweight


_add_norm.defvjp(_add_norm_fwd, _add_norm_bwd, symbolic_zeros=True)


def _head_axes(o, gate) -> tuple[str, dict[str, int]]:
    if o.shape != gate.shape:
        return token_axes(o, 1)
    from pallas_kernels.layer import gated_norm as kernels

    return inner_axes(o, kernels.BLOCK, o.shape[2] if o.ndim > 3 else 1)


def _project(y, kernel):
    """The heads side by side, times the kernel if there is one."""
    return y if kernel is None else y.reshape(*y.shape[:-2], -1) @ kernel


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _gated_norm(o, gate, weight, kernel, eps):
    names, sizes = _head_axes(o, gate)
    y = run(_gated_norm_forward, eps, (o, gate, weight), (names, names, "."), names, sizes)
    return _project(y, kernel)


def _gated_norm_forward(eps, o, gate, weight):
    from pallas_kernels.layer import gated_norm as kernels

    return kernels.gated_norm(_rows(o), _gates(o, gate), weight, eps=eps).reshape(o.shape)


def _gated_norm_fwd(o, gate, weight, kernel, eps):
    return _gated_norm(o, gate, weight, kernel, eps), (o, gate, weight, kernel)


def _gated_norm_bwd(eps, saved, dresult):
    *primals, kernel = saved
    o, gate, weight = primals
    again = kernel is not None
    dy = jnp.einsum("...d,fd->...f", dresult, kernel).reshape(o.shape) if again else dresult
    names, sizes = _head_axes(o, gate)
    args, operands = (*primals, dy), (names, names, ".", names)
    results = (names, names, ". +b +t +h", names if again else None)
    do, dgate, dweight, y = run(_gated_norm_backward, (eps, again), args, operands, results, sizes)
    dkernel = jnp.einsum("...f,...d->fd", y.reshape(*y.shape[:-2], -1), dresult) if again else None
    return do, dgate, dweight.astype(weight.dtype), dkernel


def _gated_norm_backward(static, o, gate, weight, dy):
    from pallas_kernels.layer import gated_norm as kernels

    eps, again = static
    rows = (_rows(o), _gates(o, gate), weight, _rows(dy))
    do, dgate, dweight, y = kernels.gated_norm_backward(*rows, eps=eps, again=again)
    y = None if y is None else y.reshape(o.shape)
    return do.reshape(o.shape), dgate.reshape(gate.shape), dweight, y


_gated_norm.defvjp(_gated_norm_fwd, _gated_norm_bwd)


def _rows(x):
    return x.reshape(-1, x.shape[-1])


def _gates(o, gate):
    """Gates as the kernels take them: as rows, or as heads of tokens where they are the last of more."""
    return _rows(gate) if gate.shape == o.shape else gate.reshape(-1, *gate.shape[-2:])
