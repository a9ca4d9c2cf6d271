"""ring_step and ring_flush alone, all rings equally full; run in a tree by PYTHONPATH."""
import sys, time, numpy as np, jax, jax.numpy as jnp, functools
from pallas_kernels.decode.ring_step import ring_step
from pallas_kernels.decode.ring_flush import ring_flush
from gdn_jax.checks import device_time
name = sys.argv[1]
Hk, HV, D, L = 16, 32, 128, 16
for N in (128, 512):
  for dt in (jnp.float32, jnp.bfloat16):
    ks = jax.random.split(jax.random.key(0), 9)
    n = lambda k, *s, d=jnp.bfloat16: jax.random.normal(k, s, jnp.float32).astype(d)
    q, k, v = n(ks[0], N, 1, Hk, D), n(ks[1], N, 1, Hk, D), n(ks[2], N, 1, HV, D)
    a, b = n(ks[3], N, 1, HV), n(ks[4], N, 1, HV)
    pool = [n(ks[5], N, HV, D, D, d=dt), n(ks[6], N, Hk, L, D) / 11, n(ks[7], N, HV, L, D), -jnp.abs(n(ks[8], N, HV, L, d=jnp.float32)) / 8]
    A, dtb = jnp.zeros(HV), jnp.zeros(HV)
    slots = jnp.asarray(np.random.default_rng(0).permutation(N).astype(np.int32))
    for what in ("step 7", "step 15", "flush"):
        held = jnp.full(N, 7 if what == "step 7" else 15, jnp.int32)
        if what == "flush":
            f = jax.jit(lambda pool, held: [ring_flush(*pool, read_slots=slots, held=held, room=4), *pool[1:]], donate_argnums=0)
        else:
            f = jax.jit(lambda pool, held: list(ring_step(q, k, v, a, b, *pool, A_log=A, dt_bias=dtb, read_slots=slots, held=held, deferred=True, scale=D**-.5)[1:]), donate_argnums=0)
        p = f(pool, held); jax.block_until_ready(p)
        def once():
            global p
            p = f(p, held); jax.block_until_ready(p)
        t = device_time.of_calls(once, 15)
        pool = p
        print(f"{name} N={N} {np.dtype(dt).name} {what}: {t.median_ms*1e3:.1f} us ({t.fastest_ms*1e3:.1f}..{t.slowest_ms*1e3:.1f})", [(k[:20], round(m*1e3,1)) for k, m in t.kernels], flush=True)
