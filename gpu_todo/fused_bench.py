import sys, jax, jax.numpy as jnp, numpy as np, concurrent.futures as cf
from gdn_jax.checks import device_time
from pallas_kernels.layer import short_conv as S, cross_entropy as C
key = jax.random.key(0)
def rnd(i, shape, dtype=jnp.bfloat16): return jax.jit(lambda k: jax.random.normal(k, shape, dtype))(jax.random.fold_in(key, i))
x, w = rnd(0, (8, 8192, 3072)), rnd(1, (3072, 4), jnp.float32)
dq, dk, dv = rnd(2, (8, 8192, 8, 128)), rnd(3, (8, 8192, 8, 128)), rnd(4, (8, 8192, 1024))
logits, a = rnd(5, (2048, 32768), jnp.float32), jnp.ones(2048)
t = jnp.asarray(np.random.default_rng(0).integers(0, 32768, 2048), jnp.int32)
jobs = []
for c in [(128,2,1),(128,2,2),(128,1,2),(256,1,2),(256,2,2),(256,2,1),(64,2,1),(512,2,1),(128,4,1)]:
    c = S.Config(*c)
    jobs.append((f"conv backward {c}", lambda x, w, dq, dk, dv, c=c: S.short_conv_backward(x, w, None, dq, dk, dv, config=c), (x, w, dq, dk, dv)))
for c in [(256,4,1),(256,2,2),(256,1,2),(128,2,2),(256,2,1),(512,4,1),(256,4,2)]:
    c = S.Config(*c)
    jobs.append((f"conv forward {c}", lambda x, w, c=c: S.short_conv(x, w, heads=8, width=128, config=c), (x, w)))
progs = []
for n in (1, 2, 3, 4):
    C.CTAS_PER_SM = n
    jobs.append((f"loss, {n} CTAs", lambda l, t, a, n=n: C._run(None, l, t, a), (logits, t, a)))
    progs.append(jax.jit(jobs[-1][1]).lower(*jobs[-1][2]))
ref = {}
for i, (name, f, args) in enumerate(jobs):
    p = (progs[i - len(jobs) + 4] if name.startswith("loss") else jax.jit(f).lower(*args)).compile()
    r = jax.block_until_ready(p(*args)); jax.block_until_ready(p(*args))
    kind = name.split(" Config")[0].split(",")[0]
    first = ref.setdefault(kind, r)
    diff = max(float(jnp.max(jnp.abs(u.astype(jnp.float32) - v.astype(jnp.float32)))) for u, v in zip(jax.tree.leaves(r), jax.tree.leaves(first)))
    ks = device_time.kernels(device_time.profile(lambda: jax.block_until_ready(p(*args)), 7))
    main = [k.end_ns - k.start_ns for k in ks if "mosaic" in k.name]
    print(f"{name:60s} {np.median(main)/1e3:8.1f} us  differs {diff:.2g}", flush=True)
