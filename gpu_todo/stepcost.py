"""What one log step of handing over states costs: ppermute of e (and m), product with m; 2 devices, device loop."""
import time, os, json
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P, NamedSharding
mesh = jax.make_mesh((2,), ("context",))
LOOP = 64
for R in (1, 4):
    HO, K = 32, 128
    e = jax.random.normal(jax.random.key(0), (2*R, HO, K, K)) ; m = jax.random.normal(jax.random.key(1), (2*R, HO, K, K)) / 12
    s = NamedSharding(mesh, P("context")); e, m = jax.device_put(e, s), jax.device_put(m, s)
    prod = lambda m, x: jnp.einsum("...kj,...jv->...kv", m, x, precision=lax.Precision.HIGHEST)
    def last(_, c):
        e, m = c
        return 0.1 * (e + prod(m, lax.ppermute(e, "context", [(0, 1), (1, 0)]))), m
    def inner(_, c):
        e, m = c
        e2 = 0.1 * (e + prod(m, lax.ppermute(e, "context", [(0, 1), (1, 0)])))
        return e2, jnp.where(lax.axis_index("context") >= 0, prod(m, lax.ppermute(m, "context", [(0, 1), (1, 0)])), m)
    for name, f in (("last", last), ("inner", inner)):
        g = jax.jit(jax.shard_map(lambda e, m: lax.fori_loop(0, LOOP, f, (e, m)), mesh=mesh, in_specs=P("context"), out_specs=P("context"), check_vma=False))
        jax.block_until_ready(g(e, m)); ts = []
        for _ in range(9):
            t = time.perf_counter(); jax.block_until_ready(g(e, m)); ts.append((time.perf_counter()-t)/LOOP*1e6)
        print(f"rows {R} step {name}: {np.median(ts):.1f} us ({min(ts):.1f}..{max(ts):.1f})", flush=True)
