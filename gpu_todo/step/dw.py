"""Gradients of weights by the prototype and by cuBLAS, in turns."""

import time

import jax
import jax.numpy as jnp
from bursts import START, rounds
from gradients import gradient
from products import Config

T, bf, f32 = 65536, jnp.bfloat16, jnp.float32
key = jax.random.key(time.time_ns() % 2**31)


def normal(i, *shape):
    return jax.random.normal(jax.random.fold_in(key, i), shape, bf)


def cublas(x, y):
    return jnp.einsum("td,tf->df", x, y)


def split(parts):
    def f(x, y):
        x, y = (z.reshape(parts, -1, z.shape[1]) for z in (x, y))
        return jnp.sum(jnp.einsum("ptd,ptf->pdf", x, y, preferred_element_type=f32), axis=0).astype(bf)

    return jax.jit(f)


def ours(parts, **options):
    return lambda x, y: gradient(x, y, parts=parts, config=Config(**options))


for i, (M, N, parts) in enumerate([(1024, 5504, (1, 3, 6)), (2752, 1024, (1, 3, 6)), (1024, 4224, (2, 3, 4))]):
    x, y = normal(2 * i, T, M), normal(2 * i + 1, T, N)
    want = jnp.einsum("td,tf->df", x.astype(f32), y.astype(f32), precision="highest")
    for got, name in ((jax.jit(cublas)(x, y), "cuBLAS"), (gradient(x, y), "ours")):
        error = float(jnp.sqrt(jnp.mean((got.astype(f32) - want) ** 2) / jnp.mean(want**2)))
        print(f"{M} x {N} {name}: error {error:.2e}, same {bool(jnp.array_equal(gradient(x, y), gradient(x, y)))}")
    variants = {"cuBLAS": (jax.jit(cublas), (x, y)), "cuBLAS, 4 parts": (split(4), (x, y))}
    for n in parts:
        variants[f"ours, {n} parts"] = (ours(n), (x, y))
    if not i:
        odd = y[:, :5472].copy()
        variants["cuBLAS, 5472 columns"] = (jax.jit(cublas), (x, odd))
        variants["ours, 3 parts, no cluster"] = (ours(3, cluster=1), (x, y))
    rounds(f"x^T y, {M} x {N}, 65,536 rows ({2 * T * M * N / 1e12:.3f} TFLOP)", variants, count=6)
print(f"{time.time() - START:.0f} s")
