"""The product inside a SwiGLU, and its derivative, each in one pass over its arrays.

    h = silu(a) b,   da = dh b silu'(a),   db = dh silu(a)

a and b lie in one array, `GROUP` numbers of a, as many of b, and so on: one product of matrices writes both, and one
reads both of their derivatives.

Inputs (GMEM): ab [2 N], dh [N] bfloat16 or float16. Outputs (GMEM): h [N]; dab [2 N], of ab's dtype.
Grid: as many CTAs of one warpgroup as run at once, each of which walks over blocks of `BLOCK` numbers of h. No shared
memory. Numerics: float32 inside. Hardware: `NEEDS`. Limits: `check_supported`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.launch import Shaped, kernel, launch
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import rows as r

NEEDS = Needs.NOTHING

GROUP = 16
"""Numbers of a, or of b, that lie together: 32 bytes, of which memory is read in whole."""

PIECE = 8
"""Neighbouring numbers of a thread: 16 bytes."""

BLOCK = 2 * PIECE * 128
"""Numbers of h in a block."""

CTAS_PER_SM = 4

_ROWS = r.LANES * PIECE // GROUP
"""Groups of a warp."""

_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((r.WARPS * _ROWS, GROUP), (_ROWS, GROUP), (PIECE,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
"""Layout of groups [BLOCK / GROUP, GROUP]: a row to two neighbouring threads."""


def check_supported(h: Shaped) -> str | None:
    """Why the kernels cannot make an array h [.., F]; None if they can."""
    if h.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {jnp.dtype(h.dtype).name}; the kernel takes bfloat16 and float16"
    if not h.size or h.size % BLOCK:
        return f"branches of {h.shape}; the kernel takes a multiple of {BLOCK} numbers"
    return None


def _blocks(size: int) -> tuple[int, int]:
    """Blocks of h, and CTAs."""
    return size // BLOCK, r.num_ctas(size // BLOCK, CTAS_PER_SM)


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_LAYOUT, optimized=False).astype(jnp.float32)


def _store(ref: Any, x: jax.Array) -> None:
    store_any(ref, x.astype(ref.dtype))


def _forward(gmem: Any, smem: Any) -> None:
    def block(i, carry):
        part = pl.ds(i * (BLOCK // GROUP), BLOCK // GROUP)
        a, b = _load(gmem.ab.at[part, 0]), _load(gmem.ab.at[part, 1])
        _store(gmem.h.at[part], a * r.sigmoid(a) * b)
        return carry

    r.walk(block, *_blocks(gmem.h.shape[0] * GROUP))


def _backward(gmem: Any, smem: Any) -> None:
    def block(i, carry):
        part = pl.ds(i * (BLOCK // GROUP), BLOCK // GROUP)
        a, b, dh = _load(gmem.ab.at[part, 0]), _load(gmem.ab.at[part, 1]), _load(gmem.dh.at[part])
        gate = r.sigmoid(a)
        _store(gmem.dab.at[part, 0], dh * b * (gate * (1.0 + a * (1.0 - gate))))
        _store(gmem.dab.at[part, 1], dh * (a * gate))
        return carry

    r.walk(block, *_blocks(gmem.dh.shape[0] * GROUP))


@kernel()
def swiglu(ab: Float[Array, " N2"], *, interpret: Any = None) -> Float[Array, " N"]:
    """silu(a) b in ab's dtype; for results that `check_supported` accepts."""
    size = ab.size // 2
    return launch(
        "swiglu",
        _forward,
        inputs={"ab": ab.reshape(-1, 2, GROUP)},
        outputs={"h": _groups(size, dtype=ab.dtype)},
        ctas=_blocks(size)[1],
        interpret=interpret,
    )["h"].reshape(-1)


def _groups(size: int, *inner: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size // GROUP, *inner, GROUP), dtype)


@kernel()
def swiglu_backward(
    ab: Float[Array, " N2"], dh: Float[Array, " N"], *, interpret: Any = None
) -> Float[Array, " N2"]:
    """Gradient of <dh, silu(a) b> with respect to ab."""
    return launch(
        "swiglu_backward",
        _backward,
        inputs={"ab": ab.reshape(-1, 2, GROUP), "dh": dh.reshape(-1, GROUP)},
        outputs={"dab": _groups(dh.size, 2, dtype=ab.dtype)},
        ctas=_blocks(dh.size)[1],
        interpret=interpret,
    )["dab"].reshape(-1)
