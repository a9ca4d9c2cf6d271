"""RMSNorm with the sum before it, and RMSNorm of each head with the gate behind it.

The kernels' results can be differentiated once, in reverse.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.fused.kernels import usable
from gdn_jax.shapes import accumulation_dtype


def add_norm(
    x: Float[Array, "*S D"],
    y: Float[Array, "*S D"] | None,
    weight: Float[Array, " D"],
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
      weight: [D].
      eps: added to the mean square.
      dtype: of n; x's when None.
      implementation: None takes a kernel where there is one (a GPU of compute capability 9.0), "chunked" and
        "recurrent" do not.

    Returns:
      s in x's dtype (x itself without y), and n.

    Numerics: float32 (float64 when x is), rounded once, at the end; n is made of the sum before it is rounded.
    """
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    from pallas_kernels.layer import norm

    if usable(implementation, norm.check_supported(x)):
        return _add_norm(x, y, weight, eps, dtype)
    wide = accumulation_dtype(x)
    s = x.astype(wide) if y is None else x.astype(wide) + y.astype(wide)
    scale = jax.lax.rsqrt(jnp.mean(s * s, axis=-1, keepdims=True) + eps)
    return s.astype(x.dtype), (s * scale * weight.astype(wide)).astype(dtype)


def gated_norm(
    o: Float[Array, "*S V"],
    gate: Float[Array, "*S V"],
    weight: Float[Array, " V"],
    *,
    eps: float = 1e-5,
    implementation: str | None = None,
) -> Float[Array, "*S V"]:
    """RMSNorm of each head times SiLU of its gate.

        y = o (mean(o^2) + eps)^(-1/2) weight silu(gate)             the mean along the last axis

    Args:
      o: outputs of the rule [.., V], any floating dtype.
      gate: [.., V], any floating dtype.
      weight: [V].
      eps: added to the mean square.
      implementation: as for `add_norm`.

    Returns:
      y in o's dtype. Numerics: float32 (float64 when o is), rounded once, at the end.

    Source: fla's `FusedRMSNormGated`.
    """
    from pallas_kernels.layer import gated_norm as kernel

    if usable(implementation, kernel.check_supported(o)):
        return _gated_norm(o, gate, weight, eps)
    wide = accumulation_dtype(o)
    _, n = add_norm(o, None, weight, eps=eps, dtype=wide, implementation="chunked")
    return (n * jax.nn.silu(gate.astype(wide))).astype(o.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add_norm(x, y, weight, eps, dtype):
    from pallas_kernels.layer import norm

    D = x.shape[-1]
    rows = None if y is None else y.reshape(-1, D)
    s, n = norm.add_norm(x.reshape(-1, D), rows, weight, eps=eps, dtype=dtype)
    return s.reshape(x.shape), n.reshape(x.shape)


def _add_norm_fwd(x, y, weight, eps, dtype):
    s, n = _add_norm(x, y, weight, eps, dtype)
    return (s, n), (s, weight, None if y is None else jnp.zeros((0,), y.dtype))


def _add_norm_bwd(eps, dtype, saved, cotangents):
    from pallas_kernels.layer import norm

    s, weight, like_y = saved
    ds, dn = (x.reshape(-1, s.shape[-1]) for x in cotangents)
    y_dtype = None if like_y is None else like_y.dtype
    dx, dy, dweight = norm.add_norm_backward(s.reshape(ds.shape), weight, ds, dn, eps=eps, y_dtype=y_dtype)
    dy = None if dy is None else dy.reshape(s.shape)
    return dx.reshape(s.shape), dy, dweight.astype(weight.dtype)


_add_norm.defvjp(_add_norm_fwd, _add_norm_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gated_norm(o, gate, weight, eps):
    from pallas_kernels.layer import gated_norm as kernel

    V = o.shape[-1]
    return kernel.gated_norm(o.reshape(-1, V), gate.reshape(-1, V), weight, eps=eps).reshape(o.shape)


def _gated_norm_fwd(o, gate, weight, eps):
    return _gated_norm(o, gate, weight, eps), (o, gate, weight)


def _gated_norm_bwd(eps, saved, dy):
    from pallas_kernels.layer import gated_norm as kernel

    o, gate, weight = saved
    o_rows, gate_rows, dy_rows = (x.reshape(-1, o.shape[-1]) for x in (o, gate, dy))
    do, dgate, dweight = kernel.gated_norm_backward(o_rows, gate_rows, weight, dy_rows, eps=eps)
    return do.reshape(o.shape), dgate.reshape(gate.shape), dweight.astype(weight.dtype)


_gated_norm.defvjp(_gated_norm_fwd, _gated_norm_bwd)
