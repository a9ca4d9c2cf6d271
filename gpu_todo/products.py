import time, json, os, sys
import concurrent.futures as cf
import jax, jax.numpy as jnp, numpy as np
T, D = 65536, 1024
key = jax.random.key(0)
def rnd(shape, i):
    return jax.jit(lambda k: jax.random.normal(k, shape, jnp.bfloat16))(jax.random.fold_in(key, i))
opts = {"xla_gpu_deterministic_ops": True}
def fwd(x, w): return x @ w
def dx(dy, w): return jnp.einsum("tn,dn->td", dy, w)
def dw(x, dy): return jnp.einsum("td,tn->dn", x, dy)
def dw32(x, dy): return jnp.einsum("td,tn->dn", x, dy, preferred_element_type=jnp.float32)
def dws(k):
    def f(x, dy):
        a, b = x.reshape(k, T // k, -1), dy.reshape(k, T // k, -1)
        return jnp.einsum("ktd,ktn->kdn", a, b, preferred_element_type=jnp.float32).sum(0).astype(jnp.bfloat16)
    return f
def dwT(x, dy): return jnp.einsum("td,tn->nd", x, dy)
jobs = []
for N in (3072, 1024, 4096, 4112, 2736, 5472, 2816, 5632):
    jobs += [(f"fwd D->{N}", fwd, (T, D), (D, N), 2 * T * D * N), (f"dx {N}->D", dx, (T, N), (D, N), 2 * T * D * N),
             (f"dw {N}", dw, (T, D), (T, N), 2 * T * D * N), (f"dwT {N}", dwT, (T, D), (T, N), 2 * T * D * N)]
    jobs += [(f"dw {N} split {k}", dws(k), (T, D), (T, N), 2 * T * D * N) for k in (2, 4, 8)]
for N in (2736,):
    jobs += [(f"down fwd", fwd, (T, N), (N, D), 2 * T * D * N), (f"down dh", dx, (T, D), (N, D), 2 * T * D * N)]
V, tile = 32768, 2048
for tile in (2048, 4096):
    jobs += [(f"head logits f32 {tile}", lambda x, w: jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32), (tile, D), (V, D), 2 * tile * D * V),
         (f"head dx {tile}", lambda dl, w: jnp.einsum("tv,vd->td", dl, w, preferred_element_type=jnp.float32), (tile, V), (V, D), 2 * tile * D * V),
         (f"head dw {tile}", lambda dl, x: jnp.einsum("tv,td->vd", dl, x, preferred_element_type=jnp.float32), (tile, V), (tile, D), 2 * tile * D * V)]
arrays = {}
def arr(shape):
    if shape not in arrays: arrays[shape] = rnd(shape, len(arrays))
    return arrays[shape]
def build(j):
    name, f, a, b, fl = j
    return jax.jit(f).lower(jax.ShapeDtypeStruct(a, jnp.bfloat16), jax.ShapeDtypeStruct(b, jnp.bfloat16)).compile(compiler_options=opts)
t0 = time.time()
with cf.ThreadPoolExecutor(12) as ex: progs = list(ex.map(build, jobs))
print("compiled", time.time() - t0, flush=True)
for j, p in zip(jobs, progs):
    name, f, a, b, fl = j
    x, y = arr(a), arr(b)
    jax.block_until_ready(p(x, y))
    n = max(4, int(0.05 / (fl / 6e14)))
    ts = []
    for _ in range(3):
        s = time.perf_counter()
        for _ in range(n): r = p(x, y)
        jax.block_until_ready(r); ts.append((time.perf_counter() - s) / n)
    t = float(np.median(ts))
    print(f"{name:24s} {t*1e3:8.4f} ms  {fl/t/1e12:6.0f} TFLOP/s", flush=True)
