"""RMSNorm of each head times an activation f of a gate, and its derivative, each in one pass over its arrays.

    r = (mean(o^2) + eps)^(-1/2),   y = o r w f(z)                                 the mean along a head
    t = dy f(z),   do = r (w t - o r mean(w t o r)),   dz = dy o r w f'(z),   dw = sum of t o r

The activations are in ACTIVATIONS: SiLU and the sigmoid.

Inputs (GMEM): o, dy [N, V], a row for each token and head; w [V] float32; z [N, V], or the last heads of
[tokens, heads and others before them, V].
Outputs (GMEM): y, do of o's dtype, [N, V]; dz like z, of which nothing is written where z is not read; y again beside
its derivative, if asked for; the sums of dw that each CTA made, [CTAs, rows, V] float32, which are added in a fixed
order.
Grid: as many CTAs of one warpgroup as run at once, each of which walks over blocks of rows. No shared memory.
Numerics: float32 inside. Hardware: `NEEDS`. Limits: `check_supported`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.device.launch import Shaped, grid_index, kernel, launch
from pallas_kernels.device.memory import store_any
from pallas_kernels.device.needs import Needs
from pallas_kernels.layer import rows as r

NEEDS = Needs.NOTHING

BLOCK = 1024
"""Numbers of a block: 8 a thread. Blocks of 4096 take 16 % more time backward (H200, 2026-11-22)."""

CTAS_PER_SM = 12


class Activation(NamedTuple):
    """An activation f by functions of z and sigmoid(z): f(z), and f'(z)."""

    value: Callable[[jax.Array, jax.Array], jax.Array]
    slope: Callable[[jax.Array, jax.Array], jax.Array]


ACTIVATIONS = {
    "silu": Activation(lambda z, s: z * s, lambda z, s: s * (1.0 + z * (1.0 - s))),
    "sigmoid": Activation(lambda z, s: s, lambda z, s: s * (1.0 - s)),
}
"""Activations of the gate by name."""


def check_supported(o: Shaped, channels: int | None = None) -> str | None:
    """Why the kernels cannot take outputs of the rule [B, T, H, V]; None if they can.

    Args:
      channels: of which the last heads are the gates; None: the gates have o's shape.
    """
    V = o.shape[-1]
    if o.dtype not in (jnp.bfloat16, jnp.float16):
        return f"o is {jnp.dtype(o.dtype).name}; the kernel takes bfloat16 and float16"
    if V not in (32, 64, 128, 256):
        return f"V = {V}; the kernel takes 32, 64, 128 and 256"
    if not o.size or o.size % BLOCK:
        return f"o of {o.shape}; the kernel takes a multiple of {BLOCK} numbers"
    if channels is None:
        return None
    H = o.shape[-2]
    if channels % V:
        return f"{channels} channels; the kernel takes whole heads of {V}"
    return f"{H} heads; the kernel takes a multiple of {BLOCK // V}" if H % (BLOCK // V) else None


def _blocks(size: int) -> tuple[int, int]:
    """Blocks, and CTAs."""
    return size // BLOCK, r.num_ctas(size // BLOCK, CTAS_PER_SM)


def _gates(z: Any, N: int, first: Any, rows: int) -> Any:
    """The gates of rows `first` to first + rows - 1 of N in the whole array of them."""
    heads = N // z.shape[0]
    others = z.shape[1] - heads
    return z.at[lax.div(first, heads), pl.ds(others + lax.rem(first, heads), rows)]


def _forward(gmem: Any, smem: Any, *, eps: float, activation: Activation) -> None:
    N, V = gmem.o.shape
    rows = BLOCK // V
    w = r.load_along(gmem.w, rows)

    def block(i, carry):
        first = i * rows
        o, z = (
            r.load(gmem.o, first, V, rows),
            r.load_whole(_gates(gmem.z, N, first, rows)).astype(jnp.float32),
        )
        scale = r.spread(lax.rsqrt(r.row_sum(o * o) / V + eps), V)
        r.store(gmem.y, first, o * scale * w * activation.value(z, r.sigmoid(z)))
        return carry

    r.walk(block, *_blocks(N * V))


def _backward(gmem: Any, smem: Any, *, eps: float, activation: Activation) -> None:
    N, V = gmem.o.shape
    rows = BLOCK // V
    w = r.load_along(gmem.w, rows)

    def block(i, dw):
        first = i * rows
        o, dy = (r.load(x, first, V, rows) for x in (gmem.o, gmem.dy))
        z = r.load_whole(_gates(gmem.z, N, first, rows)).astype(jnp.float32)
        gate = r.sigmoid(z)
        scale = r.spread(lax.rsqrt(r.row_sum(o * o) / V + eps), V)
        unit, t = o * scale, dy * activation.value(z, gate)
        through = t * w
        if gmem.y is not None:
            r.store(gmem.y, first, unit * w * activation.value(z, gate))
        dz = dy * (unit * w) * activation.slope(z, gate)
        store_any(_gates(gmem.dz, N, first, rows), dz.astype(gmem.dz.dtype))
        r.store(gmem.do, first, scale * (through - unit * r.spread(r.row_sum(through * unit) / V, V)))
        return dw + t * unit

    dw = r.walk(block, *_blocks(N * V), r.zeros(V, rows))
    r.store(gmem.dw.at[grid_index()], 0, dw)


@kernel("eps", "activation")
def gated_norm(
    o: Float[Array, "N V"],
    z: Float[Array, "N V"] | Float[Array, "M G V"],
    weight: Float[Array, " V"],
    *,
    eps: float,
    activation: str = "silu",
    interpret: Any = None,
) -> Float[Array, "N V"]:
    """RMSNorm of each row of o, times the activation of z, in o's dtype.

    Args:
      o: rows of all tokens and heads, which `check_supported` accepts.
      z: gates of o's shape; or an array [tokens, G, V] whose last heads they are, if `check_supported` accepts them.
      weight: of the norm.
      eps: added to the mean square.
      activation: one of ACTIVATIONS.
      interpret: parameters of Pallas' interpreter, None to compile.
    """
    return launch(
        "gated_norm",
        functools.partial(_forward, eps=eps, activation=ACTIVATIONS[activation]),
        inputs={"o": o, "z": _in_blocks(z, o.shape[1]), "w": weight.astype(jnp.float32)},
        outputs={"y": jax.ShapeDtypeStruct(o.shape, o.dtype)},
        ctas=_blocks(o.size)[1],
        interpret=interpret,
    )["y"]


def _in_blocks(z: jax.Array, V: int) -> jax.Array:
    """Gates [N, V] as whole blocks [blocks, rows, V], in the place of tokens and heads."""
    return z if z.ndim == 3 else z.reshape(-1, BLOCK // V, V)


@kernel("eps", "activation", "again")
def gated_norm_backward(
    o: Float[Array, "N V"],
    z: Float[Array, "N V"] | Float[Array, "M G V"],
    weight: Float[Array, " V"],
    dy: Float[Array, "N V"],
    *,
    eps: float,
    activation: str = "silu",
    again: bool = False,
    interpret: Any = None,
) -> tuple[Float[Array, "N V"], Any, Float[Array, " V"], Float[Array, "N V"] | None]:
    """Gradients of <dy, gated_norm(o, z)>: do, dz in the dtypes of o and z, dweight in float32; y `again` or None.

    Where z has more heads than gates, nothing is written to theirs in dz, which may hold anything.
    """
    V, ctas = o.shape[1], _blocks(o.size)[1]
    gates = _in_blocks(z, V)
    results = launch(
        "gated_norm_backward",
        functools.partial(_backward, eps=eps, activation=ACTIVATIONS[activation]),
        inputs={"o": o, "z": gates, "dy": dy, "w": weight.astype(jnp.float32)},
        outputs={
            "do": jax.ShapeDtypeStruct(o.shape, o.dtype),
            "dz": jax.ShapeDtypeStruct(gates.shape, z.dtype),
            "y": jax.ShapeDtypeStruct(o.shape, o.dtype) if again else None,
            "dw": jax.ShapeDtypeStruct((ctas, BLOCK // V, V), jnp.float32),
        },
        ctas=ctas,
        interpret=interpret,
    )
    dz, dweight = results["dz"].reshape(z.shape), jnp.sum(results["dw"], axis=(0, 1))
    return results["do"], dz, dweight, results.get("y")
