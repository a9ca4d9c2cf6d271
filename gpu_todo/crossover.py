"""Rule fwd+bwd over context=2, by states and by heads, one and four rows, short shards: device loop of 16 chained calls."""
import sys, time, json, os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding
from gdn_jax.experiments import scale_bench as sb
from gdn_jax.checks.rows import Inputs
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.parallel import exchange
from gdn_jax.shapes import Dims
LOOP = 16
def chained(options, shape, x):
    def body(_, x):
        (o, hT), grads = sb._call(options, shape, x)
        f = lambda a, d: (a.astype(jnp.float32) + 1e-30 * d.astype(jnp.float32)).astype(a.dtype)
        tokens = [f(a, d) for a, d in zip(x.tokens, grads[:5], strict=True)]
        return Inputs(*tokens, f(x.initial_state, grads[5]), f(x.do, o), f(x.dh_T, hT))
    return lax.fori_loop(0, LOOP, body, x)
def cases():
    for rows, per in ((1, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192), (4, 1024)):
        yield rows, per
shape = MeshShape(context=2)
mesh = shape.make(jax.devices()[:2])
t0 = time.time()
pool = ThreadPoolExecutor(14)
jobs = {}
for rows, per in cases():
    length = 2 * per
    base = sb.ScaleBenchOptions(rows=rows, tokens=(rows * length,))
    x = sb._inputs(base, rows, length)
    tok, st = sb._specs(shape)
    specs = [st if i in (5, 7) else tok for i in range(8)]
    placed = Inputs(*(jax.device_put(y, NamedSharding(mesh, s)) for y, s in zip(x, specs, strict=True)))
    for by in ("states", "heads"):
        o = sb.ScaleBenchOptions(rows=rows, tokens=(rows * length,), context_by=by)
        with jax.set_mesh(mesh):
            low = jax.jit(partial(chained, o, shape)).lower(placed)
        jobs[rows, per, by] = (pool.submit(low.compile), placed)
print("lowered", round(time.time() - t0, 1), flush=True)
out = []
for (rows, per, by), (f, placed) in jobs.items():
    try:
        c = f.result()
        jax.block_until_ready(c(placed)); ts = []
        for _ in range(9):
            t = time.perf_counter(); jax.block_until_ready(c(placed)); ts.append((time.perf_counter() - t) / LOOP * 1e6)
        w = 2*rows*per*(2*((16+16)*128+(32+32)*128)+8*32)//2
        out.append(dict(rows=rows, tokens=per, by=by, us=float(np.median(ts)), fast=min(ts), slow=max(ts), exchange_mib=w/2**20))
        print(f"rows {rows} tokens/device {per:6d} by {by:7s} {np.median(ts):9.1f} us ({min(ts):.1f}..{max(ts):.1f}) exchange sends {w/2**20:.1f} MiB  t={time.time()-t0:.0f}", flush=True)
    except Exception as e:
        print(rows, per, by, "FAILED", str(e)[:300], flush=True)
json.dump(out, open(os.environ["OUT"] + "/crossover.json", "w"))
