"""Serving: variants of the kernels in turns, each compared with the product's. `python bench.py SECONDS [tiny]`"""
import os, sys, time, statistics
HERE = os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0, HERE + "/variants")
START = time.time(); BUDGET = float(sys.argv[1]); tiny = "tiny" in sys.argv
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from gdn_jax import serving
from gdn_jax.checks import device_time
from pallas_kernels.decode import ring_drafts as rd, ring_step as rs, step as product
import step_v as sv

Hk, HV, K = (1, 2, 128) if tiny else (16, 32, 128)
INTERPRET = dict(interpret=plgpu.InterpretGPUParams()) if tiny else {}
TURNS, CALLS = (1, 1) if tiny else (3, 5)
rng = np.random.default_rng(0)
LEFT = lambda: BUDGET - (time.time() - START)
normal = lambda *s: jnp.asarray(rng.standard_normal(s, np.float32))
big = lambda *s, dt: jax.random.normal(jax.random.key(0), s, jnp.float32).astype(dt)
gates = dict(A_log=jnp.log(jnp.asarray(rng.uniform(0.1, 16, HV), jnp.float32)), dt_bias=jnp.asarray(rng.uniform(-6, -2, HV), jnp.float32))
def tokens_of(N, T): return [normal(N, T, *s).astype("bfloat16") for s in ((Hk, K), (Hk, K), (HV, K), (HV,), (HV,))]

def timed(once, calls):
    if tiny:
        once(); return [1.0]
    return [ms * 1e3 for _, ms in device_time.of_calls(once, calls).kernels]

def turns(title, fs, pool, calls, compare, bound):
    """fs: name -> f(pool, *args) -> (o, pool), called with each of `calls`. Device us of all their kernels, in turns."""
    runs, pools, first, times, each = {}, {}, {}, {}, {}
    for name, f in list(fs.items()):
        if LEFT() < 8 and first: print(f"SKIPPED {title}: {name}"); continue
        try:
            mine = jax.tree.map(jnp.array, pool)
            run = f if tiny else jax.jit(f, donate_argnums=0).lower(mine, *calls[0]).compile()
            outputs = []
            for args in calls:
                o, mine = run(mine, *args)
                outputs.append(np.asarray(o, np.float64))
            first[name] = [np.concatenate(outputs, 1), np.asarray(compare(mine), np.float64)]
            runs[name], pools[name], times[name] = run, mine, []
        except Exception as error:
            print(f"FAILED {title}: {name}: {type(error).__name__} {str(error)[:300]}", flush=True)
    for _ in range(TURNS):
        for name, run in runs.items():
            if LEFT() < 3 and times[name]: continue
            def once(name=name, run=run):
                for args in calls:
                    o, pools[name] = run(pools[name], *args)
                jax.block_until_ready((o, pools[name]))
            each[name] = timed(once, CALLS); times[name].append(sum(each[name]))
    base = next(iter(first), None)
    for name in runs:
        error = [np.sqrt(((a - b) ** 2).sum() / (b ** 2).sum()) for a, b in zip(first[name], first[base])]
        verdict = "same" if max(error) <= bound else "WRONG"
        kernels = " ".join(f"{x:.1f}" for x in each[name]) if len(each[name]) > 1 else ""
        print(f"{title} | {name} | {statistics.median(times[name]):.2f} us ({min(times[name]):.2f} to {max(times[name]):.2f}) | against {base}: o {error[0]:.1e}, states {error[1]:.1e} {verdict} | {kernels}", flush=True)
    return {name: statistics.median(t) for name, t in times.items()}

def copies():
    for n in (2**27, 2**26):
        x = jax.random.normal(jax.random.key(1), (n if not tiny else 64,), jnp.float32)
        f = jax.jit(lambda x: -x)
        us = timed(lambda: jax.block_until_ready(f(x)), CALLS * 3)[0]
        print(f"COPY {x.nbytes / 1e6:.0f} MB in, as many out: {us:.1f} us, {2 * x.nbytes / us * 1e-6:.3f} TB/s", flush=True)

C = sv.Config
S = 132
ONE = {
    "float32": {"block 64": C(64), "ahead 396": C(64, ahead=3 * S), "streamed out": C(64, stream=1), "ahead 396, streamed": C(64, stream=2, ahead=3 * S), "across": C(64, across=True),
                "4 warpgroups": C(64, across=True, warpgroups=4), "4 warpgroups, ahead 528": C(64, across=True, warpgroups=4, ahead=4 * S), "bulk stores": C(64, bulk=True), "ahead 132": C(64, ahead=S)},
    "bfloat16": {"narrow": C(128, across=True, narrow=True), "narrow, ahead 396": C(128, across=True, narrow=True, ahead=3 * S), "narrow, ahead 396, streamed": C(128, across=True, narrow=True, stream=2, ahead=3 * S), "narrow, streamed": C(128, across=True, narrow=True, stream=2),
                 "narrow 64, ahead 528": C(64, across=True, narrow=True, ahead=4 * S), "narrow, 4 warpgroups of 64, ahead 528": C(64, across=True, narrow=True, warpgroups=4, ahead=4 * S), "ahead 264": C(128, across=True, ahead=2 * S), "narrow below, ahead 396": C(128, narrow=True, ahead=3 * S)},
}
FOUR = {"float32": {"ahead 396": C(64, ahead=3 * S), "bulk": C(64, bulk=True), "bulk, ahead 396": C(64, bulk=True, ahead=3 * S), "streamed out": C(64, stream=1), "ahead 396, streamed": C(64, stream=2, ahead=3 * S)},
        "bfloat16": {"ahead 264": C(128, ahead=2 * S), "bulk": C(128, bulk=True), "streamed out": C(128, stream=1), "ahead 264, streamed": C(128, stream=2, ahead=2 * S)}}
BEST = {}

def steps(T, N, dtype, variants):
    if LEFT() < 12: print(f"SKIPPED {T} tokens, {N} requests, {dtype}"); return
    slots = jnp.asarray(rng.permutation(N * T).reshape(N, T), jnp.int32)
    read = slots[:, 0]
    def call(step, config):
        def f(pool, *x):
            more = dict(config=config) if config is not None else {}
            return step(*x, pool, **gates, read_slots=read, write_slots=slots, scale=K**-0.5, **more, **INTERPRET)
        return f
    fs = {"product": call(product.step, None)} | {name: call(sv.step, config) for name, config in variants.items()}
    bytes_ = N * HV * K * K * (1 + T) * (4 if dtype == "float32" else 2)
    found = turns(f"STEP {T} tokens, {N} requests, {dtype}, {bytes_ / 1e6:.0f} MB", fs, big(N * T, HV, K, K, dt=dtype), [tokens_of(N, T)], lambda pool: pool[slots[:2].ravel()].astype("float32"), 1e-2 if dtype == "bfloat16" else 1e-5)
    for name, us in found.items(): print(f"  {name}: {bytes_ / us * 1e-6:.3f} TB/s")
    if (T, dtype) not in BEST and found:
        BEST[T, dtype] = {n: variants[n] for n in sorted((n for n in found if n != "product"), key=found.get)[:2]}

def rings(T, N, dtype="bfloat16", variants=True):
    if LEFT() < 14: print(f"SKIPPED ring of {T} tokens, {N} requests, {dtype}"); return
    slots, n = jnp.asarray(rng.permutation(N), jnp.int32), 16 // T
    accepted = jnp.full(N, T, jnp.int32)
    pool = serving.make_ring_pool(big(N, HV, K, K, dt=dtype), num_key_heads=Hk)[:5]
    x = [tokens_of(N, T) for _ in range(n)]
    common = dict(read_slots=slots, scale=K**-0.5, **gates, **INTERPRET)
    def old(pool, *tokens):
        parts = []
        for t in range(0, T, 4):
            o, *pool = rs.ring_step(*(y[:, t:t + 4] for y in tokens), *pool, drafts=rs.Drafts(T, t), accepted=None if t else accepted, **common)
            parts.append(o)
        return jnp.concatenate(parts, 1), tuple(pool)
    def new(config):
        def f(pool, *tokens):
            o, *pool = rd.ring_drafts(*tokens, *pool, accepted=accepted, config=config, **common)
            return o, tuple(pool)
        return f
    fs = {"ring_step": old}
    if dtype == "bfloat16":
        fs["ring_drafts"] = new(None)
        if variants:
            fs |= {"ring_drafts 2 warpgroups, 2 states": new(rd.Config(128, 2, 2)), "ring_drafts 64, 4 warpgroups": new(rd.Config(64, 4, 1)), "ring_drafts 64, 3 warpgroups, 2 states": new(rd.Config(64, 3, 2))}
    def compare(pool):
        s = pool[0][slots[:2]].astype("float32")
        return jnp.concatenate([s.ravel(), pool[2][slots[:2]].astype("float32").ravel()])
    found = turns(f"RING {T} tokens, {N} requests, {dtype}: {n} calls of a period", fs, tuple(pool), x, compare, 1.5e-2)
    for name, us in found.items(): print(f"  {name}: mean of a call {us / n:.2f} us")

if tiny:
    rings(8, 2, variants=False); steps(1, 1, "bfloat16", dict(list(ONE["bfloat16"].items())[1:2])); steps(4, 1, "float32", {"bulk": FOUR["float32"]["bulk"]}); sys.exit()
copies()
rings(4, 128)
steps(1, 128, "bfloat16", ONE["bfloat16"])
steps(1, 128, "float32", ONE["float32"])
steps(4, 128, "float32", FOUR["float32"])
for dtype in ("bfloat16", "float32"):
    if (1, dtype) in BEST: steps(1, 512, dtype, BEST[1, dtype])
rings(16, 128, variants=False)
steps(4, 128, "bfloat16", FOUR["bfloat16"])
for N in (1, 32, 256):
    for dtype in ("float32", "bfloat16"):
        if (1, dtype) in BEST: steps(1, N, dtype, BEST[1, dtype])
rings(4, 512, variants=False); rings(8, 128, variants=False); rings(4, 1, variants=False); rings(2, 128, variants=False); rings(4, 32, variants=False)
if (4, "float32") in BEST: steps(4, 512, "float32", BEST[4, "float32"])
rings(4, 128, "float32")
copies()
