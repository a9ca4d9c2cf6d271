"""RMSNorm of each head times SiLU of a gate, and its derivative, each in one pass over its arrays.

    r = (mean(o^2) + eps)^(-1/2),   y = o r w silu(z)                              the mean along a head
    t = dy silu(z),   do = r (w t - o r mean(w t o r)),   dz = dy o r w silu'(z),   dw = sum of t o r

Inputs (GMEM): o, z, dy [N, V], a row for each token and head; w [V] float32.
Outputs (GMEM): y, do of o's dtype, dz of z's, [N, V]; y again beside its derivative, if asked for; the sums of dw
that each CTA made, [CTAs, rows, V] float32, which are added in a fixed order.
Grid: as many CTAs of one warpgroup as run at once, each of which walks over blocks of rows. No shared memory.
Numerics: float32 inside. Hardware: compute capability 9.0. Limits: `check_supported`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.device.launch import grid_index, launch
from pallas_kernels.layer import rows as r

BLOCK = 1024
"""Numbers of a block: 8 a thread. Blocks of 4096 take 16 % more time backward (H200, 2026-11-22)."""

CTAS_PER_SM = 12


def check_supported(o: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernels cannot take outputs of the rule [B, T, H, V]; None if they can."""
    V = o.shape[-1]
    if o.dtype not in (jnp.bfloat16, jnp.float16):
        return f"o is {jnp.dtype(o.dtype).name}; the kernel takes bfloat16 and float16"
    if V not in (32, 64, 128, 256):
        return f"V = {V}; the kernel takes 32, 64, 128 and 256"
    if not o.size or o.size % BLOCK:
        return f"o of {o.shape}; the kernel takes a multiple of {BLOCK} numbers"
    return None


def _blocks(size: int) -> tuple[int, int]:
    """Blocks, and CTAs."""
    return size // BLOCK, r.num_ctas(size // BLOCK, CTAS_PER_SM)


def _forward(gmem: Any, smem: Any, *, eps: float) -> None:
    N, V = gmem.o.shape
    rows = BLOCK // V
    w = r.load_along(gmem.w, rows)

    def block(i, carry):
        first = i * rows
        o, z = r.load(gmem.o, first, V, rows), r.load(gmem.z, first, V, rows)
        scale = r.spread(lax.rsqrt(r.row_sum(o * o) / V + eps), V)
        r.store(gmem.y, first, o * scale * w * (z * r.sigmoid(z)))
        return carry

    r.walk(block, *_blocks(N * V))


def _backward(gmem: Any, smem: Any, *, eps: float) -> None:
    N, V = gmem.o.shape
    rows = BLOCK // V
    w = r.load_along(gmem.w, rows)

    def block(i, dw):
        first = i * rows
        o, z, dy = (r.load(x, first, V, rows) for x in (gmem.o, gmem.z, gmem.dy))
        gate = r.sigmoid(z)
        scale = r.spread(lax.rsqrt(r.row_sum(o * o) / V + eps), V)
        unit, t = o * scale, dy * (z * gate)
        through = t * w
        if gmem.y is not None:
            r.store(gmem.y, first, unit * w * (z * gate))
        r.store(gmem.dz, first, dy * (unit * w) * (gate * (1.0 + z * (1.0 - gate))))
        r.store(gmem.do, first, scale * (through - unit * r.spread(r.row_sum(through * unit) / V, V)))
        return dw + t * unit

    dw = r.walk(block, *_blocks(N * V), r.zeros(V, rows))
    r.store(gmem.dw.at[grid_index()], 0, dw)


def gated_norm(
    o: Float[Array, "N V"],
    z: Float[Array, "N V"],
    weight: Float[Array, " V"],
    *,
    eps: float,
    interpret: Any = None,
) -> Float[Array, "N V"]:
    """RMSNorm of each row of o, times silu(z), in o's dtype.

    Args:
      o: rows of all tokens and heads, which `check_supported` accepts.
      z: gates of o's shape.
      weight: of the norm.
      eps: added to the mean square.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    run = _compiled_forward if interpret is None else _run_forward
    return run(eps, interpret, o, z, weight)


def _run_forward(eps, interpret, o, z, weight):
    return launch(
        "gated_norm",
        functools.partial(_forward, eps=eps),
        inputs={"o": o, "z": z, "w": weight.astype(jnp.float32)},
        outputs={"y": jax.ShapeDtypeStruct(o.shape, o.dtype)},
        memory={},
        auto_barriers=False,
        ctas=_blocks(o.size)[1],
        interpret=interpret,
    )["y"]


def gated_norm_backward(
    o: Float[Array, "N V"],
    z: Float[Array, "N V"],
    weight: Float[Array, " V"],
    dy: Float[Array, "N V"],
    *,
    eps: float,
    again: bool = False,
    interpret: Any = None,
) -> tuple[Float[Array, "N V"], Float[Array, "N V"], Float[Array, " V"], Float[Array, "N V"] | None]:
    """Gradients of <dy, gated_norm(o, z)>: do, dz in the dtypes of o and z, dweight in float32; y `again` or None."""
    run = _compiled_backward if interpret is None else _run_backward
    return run(eps, again, interpret, o, z, weight, dy)


def _run_backward(eps, again, interpret, o, z, weight, dy):
    V, ctas = o.shape[1], _blocks(o.size)[1]
    results = launch(
        "gated_norm_backward",
        functools.partial(_backward, eps=eps),
        inputs={"o": o, "z": z, "dy": dy, "w": weight.astype(jnp.float32)},
        outputs={
            "do": jax.ShapeDtypeStruct(o.shape, o.dtype),
            "dz": jax.ShapeDtypeStruct(z.shape, z.dtype),
            "y": jax.ShapeDtypeStruct(o.shape, o.dtype) if again else None,
            "dw": jax.ShapeDtypeStruct((ctas, BLOCK // V, V), jnp.float32),
        },
        memory={},
        auto_barriers=False,
        ctas=ctas,
        interpret=interpret,
    )
    return results["do"], results["dz"], jnp.sum(results["dw"], axis=(0, 1)), results.get("y")


_compiled_forward = jax.jit(_run_forward, static_argnums=(0, 1))
_compiled_backward = jax.jit(_run_backward, static_argnums=(0, 1, 2))
"""So that the layers of a model share one kernel, and a call outside jit compiles once."""
