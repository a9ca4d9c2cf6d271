"""Variants of the products with a SwiGLU in turns: short bursts, so that all see the same power and temperature."""

import time

import jax
import jax.numpy as jnp
import products as p
from bursts import START, rounds
from gdn_jax.fused.swiglu import swiglu
from pallas_kernels.layer import swiglu as kernel

M, D, F = 65536, 1024, 2736
bf, f32 = jnp.bfloat16, jnp.float32
keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 8)
x, dy = (jax.random.normal(k, (M, D), bf) for k in keys[:2])
gate, up = ((jax.random.normal(k, (D, F), f32) / D**0.5).astype(bf) for k in keys[2:4])
down = (jax.random.normal(keys[4], (F, D), f32) / F**0.5).astype(bf)
w16, w32 = p.interleave(gate, up, 16), p.interleave(gate, up, 32)
down32 = jnp.pad(down, ((0, -F % 32), (0, 0)))
C = p.Config


def today(x, w):
    ab = x @ w
    return ab, kernel.swiglu(ab.reshape(-1)).reshape(M, -1)


def today_backward(dy, down, ab):
    dh = jnp.einsum("...e,fe->...f", dy, down)
    return kernel.swiglu_backward(ab.reshape(-1), dh.reshape(-1)).reshape(ab.shape)


def forward(**options):
    c = C(**options)
    return lambda x, w: p.forward(x, w, config=c)


def backward(**options):
    c = C(**options)
    return lambda dy, w, ab: p.backward(dy, w, ab, config=c)


ab16 = jax.jit(today)(x, w16)[0]
ab32 = jax.jit(lambda ab: p.interleave(*p.separate(ab, 16, F), 32))(ab16)
kn = dict(k_major=False)
few = dict(columns=128, stages=6)
rounds(
    "forward",
    {
        "today": (jax.jit(today), (x, w16)),
        "cuBLAS alone, 5504": (jax.jit(lambda x, w: x @ w), (x, w32)),
        "product alone": (forward(**kn, product=False), (x, w32)),
        "lead 0": (forward(**kn), (x, w32)),
        "lead 2": (forward(**kn, lead=2), (x, w32)),
        "lead 3": (forward(**kn, lead=3), (x, w32)),
        "lead 2, no sigmoid (wrong)": (forward(**kn, lead=2, math=False), (x, w32)),
        "lead 2, no cluster": (forward(**kn, lead=2, cluster=1), (x, w32)),
        "128 columns, 6 stages, lead 3": (forward(**kn, **few, lead=3), (x, w32)),
    },
)
few["stages"] = 7
rounds(
    "backward",
    {
        "today": (jax.jit(today_backward), (dy, down, ab16)),
        "cuBLAS alone, 2752": (jax.jit(lambda dy, w, ab: dy @ w.T), (dy, down32, ab32)),
        "lead 0": (backward(), (dy, down32, ab32)),
        "lead 2": (backward(lead=2), (dy, down32, ab32)),
        "lead 3": (backward(lead=3), (dy, down32, ab32)),
        "lead 2, no sigmoid (wrong)": (backward(lead=2, math=False), (dy, down32, ab32)),
        "lead 2, no cluster": (backward(lead=2, cluster=1), (dy, down32, ab32)),
        "128 columns, 7 stages, lead 3": (backward(**few, lead=3), (dy, down32, ab32)),
    },
)


def whole_today(x, gate, up, down, dy):
    y, vjp = jax.vjp(swiglu, x, gate, up, down)
    return y, *vjp(dy)


def whole(**options):
    def f(x, gate, up, down, dy):
        w, wide = p.interleave(gate, up, 32), jnp.pad(down, ((0, -F % 32), (0, 0)))
        ab, h = p.forward(x, w, config=C(**kn, **options)).values()
        y = h @ wide
        dab = p.backward(dy, wide, ab, config=C(**options))
        dx = jnp.einsum("...f,df->...d", dab, w)
        dw = jnp.einsum("...d,...f->df", x, dab)
        return y, dx, *p.separate(dw, 32, F), jnp.einsum("...f,...e->fe", h, dy)[:F]

    return jax.jit(f)


args = (x, gate, up, down, dy)
rounds(
    "SwiGLU, forward and backward",
    {
        "today, if not merged": (jax.jit(whole_today), args),
        "both, lead 0": (whole(), args),
        "both, lead 2": (whole(lead=2), args),
        "both, lead 2, no cluster": (whole(lead=2, cluster=1), args),
    },
)
print(f"{time.time() - START:.0f} s")
