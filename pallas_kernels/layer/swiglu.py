"""The product inside a SwiGLU, and its derivative, each in one pass over its arrays.

    h = silu(a) b,   da = dh b silu'(a),   db = dh silu(a)

The derivative's kernel gives h again, so that nobody has to keep it.

Inputs (GMEM): a, b, dh [N] bfloat16 or float16. Outputs (GMEM): h; da, db, h, of a's dtype.
Grid: as many CTAs of one warpgroup as run at once, each of which walks over blocks of `BLOCK` numbers. No shared
memory. Numerics: float32 inside. Hardware: compute capability 9.0. Limits: `check_supported`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.launch import launch
from pallas_kernels.layer import rows as r

PIECE = 8
"""Neighbouring numbers of a thread: 16 bytes."""

BLOCK = 2 * PIECE * 128
"""Numbers of a block."""

CTAS_PER_SM = 4


def check_supported(a: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernels cannot take an array; None if they can."""
    if a.dtype not in (jnp.bfloat16, jnp.float16):
        return f"gate is {jnp.dtype(a.dtype).name}; the kernel takes bfloat16 and float16"
    if not a.size or a.size % BLOCK:
        return f"gate of {a.shape}; the kernel takes a multiple of {BLOCK} numbers"
    return None


def _blocks(size: int) -> tuple[int, int]:
    """Blocks, and CTAs."""
    return size // BLOCK, r.num_ctas(size // BLOCK, CTAS_PER_SM)


def _load(ref: Any) -> jax.Array:
    layout = plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=PIECE)
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _forward(gmem: Any, smem: Any) -> None:
    def block(i, carry):
        part = pl.ds(i * BLOCK, BLOCK)
        a, b = _load(gmem.a.at[part]), _load(gmem.b.at[part])
        gmem.h.at[part][...] = (a * r.sigmoid(a) * b).astype(gmem.h.dtype)
        return carry

    r.walk(block, *_blocks(gmem.a.shape[0]))


def _backward(gmem: Any, smem: Any) -> None:
    def block(i, carry):
        part = pl.ds(i * BLOCK, BLOCK)
        a, b, dh = (_load(x.at[part]) for x in (gmem.a, gmem.b, gmem.dh))
        gate = r.sigmoid(a)
        silu = a * gate
        gmem.da.at[part][...] = (dh * b * (gate * (1.0 + a * (1.0 - gate)))).astype(gmem.da.dtype)
        gmem.db.at[part][...] = (dh * silu).astype(gmem.db.dtype)
        gmem.h.at[part][...] = (silu * b).astype(gmem.h.dtype)
        return carry

    r.walk(block, *_blocks(gmem.a.shape[0]))


def swiglu(a: Float[Array, " N"], b: Float[Array, " N"], *, interpret: Any = None) -> Float[Array, " N"]:
    """silu(a) b in a's dtype; a and b as `check_supported` accepts them."""
    run = _compiled_forward if interpret is None else _run_forward
    return run(interpret, a, b)


def _run_forward(interpret, a, b):
    return launch(
        "swiglu",
        _forward,
        inputs={"a": a, "b": b},
        outputs={"h": jax.ShapeDtypeStruct(a.shape, a.dtype)},
        memory={},
        auto_barriers=False,
        ctas=_blocks(a.size)[1],
        interpret=interpret,
    )["h"]


def swiglu_backward(
    a: Float[Array, " N"], b: Float[Array, " N"], dh: Float[Array, " N"], *, interpret: Any = None
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """Gradients of <dh, silu(a) b> with respect to a and b, and silu(a) b itself."""
    run = _compiled_backward if interpret is None else _run_backward
    return run(interpret, a, b, dh)


def _run_backward(interpret, a, b, dh):
    like = jax.ShapeDtypeStruct(a.shape, a.dtype)
    results = launch(
        "swiglu_backward",
        _backward,
        inputs={"a": a, "b": b, "dh": dh},
        outputs={"da": like, "db": like, "h": like},
        memory={},
        auto_barriers=False,
        ctas=_blocks(a.size)[1],
        interpret=interpret,
    )
    return results["da"], results["db"], results["h"]


_compiled_forward = jax.jit(_run_forward, static_argnums=0)
_compiled_backward = jax.jit(_run_backward, static_argnums=0)
"""So that the layers of a model share one kernel, and a call outside jit compiles once."""
