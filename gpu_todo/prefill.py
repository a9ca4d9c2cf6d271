"""`gdn bench --what prefill` line by line, and the same with states taken out of the pool and put back, as on main.

Prints for each line: us over a pool, us of the rule alone, what part more; "outside" is the path of main. Writes
$OUT/prefill.json. The bench's own function measures; only what runs on the host is made faster here.
"""
import functools, json, os, sys, time
T0 = time.time()
LIMIT = float(os.environ.get("PREFILL_SECONDS", 100))
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_compilation_cache_dir", "/tmp/prefill-compiled")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from gdn_jax.checks import device_time, prefill_bench as bench
from gdn_jax.serving import kernels

FAKE = bool(os.environ.get("PREFILL_FAKE"))
host_ratio, of_calls, take = bench.worst_ratio, device_time.of_calls, kernels.take_prompts

@jax.jit
def device_ratio(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    def rms(x, axes): return jnp.sqrt(jnp.mean(x * x, axes))
    heads = rms(a - b, (0, 1, 3)) / rms(a, (0, 1, 3))
    return jnp.max(jnp.append(heads, rms(a - b, None) / rms(a, None)))

def ratio(a, b, axis):
    return host_ratio(a, b, axis) if a.size < 1e6 else float(device_ratio(jnp.asarray(a), jnp.asarray(b)))

@functools.lru_cache(1)
def tokens(options, T):
    rng = np.random.default_rng(T)
    (Hk, HV), D = options.heads, options.width
    def normal(*shape): return rng.standard_normal((1, T, *shape), np.float32)
    q, k, v = (normal(h, D).astype(bench.DTYPES[options.dtype]) for h in (Hk, Hk, HV))
    return q, k, v, -np.abs(normal(HV)) / 8, 1 / (1 + np.exp(-normal(HV)))

def draw(options, line):
    rng, N, D, HV = np.random.default_rng(), line.requests, options.width, options.heads[1]
    cuts = np.sort(np.random.default_rng(N).choice(np.arange(1, line.tokens), N - 1, replace=False))
    pool = rng.standard_normal((2 * N, HV, D, D), np.float32).astype(bench.DTYPES[line.pool])
    slots = np.random.default_rng(0).permutation(2 * N)[:N].astype(np.int32)
    return bench._Problem(tokens(options, line.tokens), np.r_[0, cuts, line.tokens].astype(np.int32), pool, slots)

timings = []
def timed(once, repeats):
    timings.append(of_calls(once, repeats)); return timings[-1]

bench._draw, bench.worst_ratio, bench.device_time.of_calls = draw, ratio, timed
options = bench.PrefillBenchOptions(**({"heads": (1, 2), "width": 16, "dtype": "float32", "repeats": 2} if FAKE else {}))
sizes = (70, 200) if FAKE else (8192, 32768)
plan = [(T, N, p, "in place") for T in sizes for N in (1, 8, 64) for p in ("float32", "bfloat16")]
plan[6:6] = [(sizes[0], N, p, "outside") for N in (8, 1) for p in ("float32", "bfloat16")]
plan += [(sizes[1], N, p, "outside") for N in (64, 1) for p in ("float32", "bfloat16")]
found = []
slowest = 0
for T, N, pool, how in plan:
    begun = time.time()
    if begun - T0 + slowest > LIMIT:
        print("no time for", T, N, pool, how); continue
    kernels.take_prompts = take if how == "in place" else lambda *call: False
    timings.clear()
    try:
        r = bench.measure(options, bench.Line(T, N, pool))
    except Exception as e:
        print(T, N, pool, how, "FAILED", repr(e)[:600], flush=True); continue
    if r.failure:
        print(T, N, pool, how, "FAILED", r.failure, flush=True); continue
    a, b = timings[1], timings[0]
    print(f"{T:6d} x{N:<3d} {pool:8s} {how:8s} {r.prefill_us:8.1f} us, rule {r.rule_us:8.1f} us, {r.more:+7.1%}  error {r.error:.1e} diff {r.difference:.1e}"
          f"  spread {a.fastest_ms*1e3:.1f}-{a.slowest_ms*1e3:.1f} / {b.fastest_ms*1e3:.1f}-{b.slowest_ms*1e3:.1f}  [{time.time()-begun:.1f} s]", flush=True)
    found.append(dict(r._asdict(), how=how, more=r.more, pool_kernels=a.kernels, rule_kernels=b.kernels))
    with open(os.path.join(os.environ.get("OUT", "/tmp"), "prefill.json"), "w") as f:
        json.dump(found, f, indent=1)
    slowest = max(slowest, time.time() - begun) if T == sizes[1] else time.time() - begun
for r in found:
    if (r["requests"], r["how"]) in ((8, "in place"), (8, "outside")) and r["tokens"] == sizes[0] and r["pool"] == "bfloat16":
        for side in ("pool_kernels", "rule_kernels"):
            print(r["how"], side, " ".join(f"{n[:40]}={ms*1e3:.1f}" for n, ms in r[side]))
