"""One first call in this process: seconds of its phases, when each kernel was lowered and compiled, device time.

    python measure.py ROW WHAT MODE    PYTHONPATH says which tree
MODE: final (the tree as it is), off (nothing compiled ahead), in_order (kernels lowered in the order of the call, and
nothing waits for them); a tree without `ahead` knows only "before".
"""
import os, sys, time
t_start = time.perf_counter()
import jax, jax.numpy as jnp, numpy as np
from gdn_jax.checks import device_time, passes, rows
t_jax = time.perf_counter()
import pallas_kernels.forward.rule, pallas_kernels.backward.rule
t_kernels = time.perf_counter()

ROWS = {
    "1x32768": ((16, 32), (32768,), None),
    "2_8": ((2, 8), (32768,), None),
    "4096x8": ((16, 32), (4096,) * 8, "known"),
    "4096x8rt": ((16, 32), (4096,) * 8, "traced"),
    "tiny": ((1, 2), (256,), None),
}
name, what, mode = sys.argv[1:4]
(Hk, HV), lengths, packing = ROWS[name]
row = rows.Row(Hk, HV, lengths)
x = rows.inputs(row, "bfloat16", 0)
cu = row.cu_seqlens if packing else None
known, traced = (cu, None) if packing == "known" else (None, None if cu is None else jnp.asarray(cu))
jax.block_until_ready(jax.jit(lambda y: jax.tree.map(jnp.sum, y))(x))  # the device is up, the data are there
step, args = passes.call(what, os.environ.get("IMPL", "mosaic_gpu"), x, known, traced)

log = []
if mode != "before":
    from pallas_kernels.device import ahead

    def noted(kind, f):
        def run(*a):
            begin = time.perf_counter()
            try:
                return f(*a)
            finally:
                log.append((kind, begin, time.perf_counter()))
        return run

    ahead._lower, ahead._compile = noted("lower", ahead._lower), noted("compile", ahead._compile)
    if mode == "off":
        ahead.pays = lambda: False
    if mode == "in_order":
        lowered = ahead._lowered
        ahead._lowered = lambda found: lowered(dict(reversed(found.items())))
        ahead._Module.of = lambda module: module

options = device_time.GRAPH_OPTIONS if jax.default_backend() == "gpu" else {}
times = [time.perf_counter()]
trace = jax.jit(step).trace(*args); times.append(time.perf_counter())
lowered_ = trace.lower(); times.append(time.perf_counter())
run = lowered_.compile(compiler_options=options); times.append(time.perf_counter())
results = jax.block_until_ready(run(*args)); times.append(time.perf_counter())
phases = dict(zip(("trace", "lower", "compile", "run"), np.diff(times).round(2).tolist()))
print(f"FIRST {name} {what} {mode}: {times[-1] - times[0]:.2f} s  {phases}  imports: jax and gdn {t_jax - t_start:.2f},"
      f" kernels {t_kernels - t_jax:.2f}", flush=True)
if log:
    at = lambda t: round(t - times[0], 2)
    print("   ", "; ".join(f"{kind} {at(b)}-{at(e)}" for kind, b, e in log), flush=True)

@jax.jit
def checksum(y):
    def one(a):
        bits = jax.lax.bitcast_convert_type(a, jnp.uint16 if a.dtype.itemsize == 2 else jnp.uint32).astype(jnp.uint32)
        return jnp.sum(bits.reshape(-1) * (2 * jax.lax.iota(jnp.uint32, bits.size) + 1))
    return sum(one(a) * jnp.uint32(2 * i + 1) for i, a in enumerate(jax.tree.leaves(y)))

print(f"    checksum {int(checksum(results)):08x}", flush=True)
if jax.default_backend() == "gpu":
    timing = device_time.measure(device_time.Program(step, run, results, 0.0, 0.0), *args, calls=1, repeats=9)
    print(f"    device {timing.median_ms:.4f} ms ({timing.fastest_ms:.4f} to {timing.slowest_ms:.4f})", flush=True)
