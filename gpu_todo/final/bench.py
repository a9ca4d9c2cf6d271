"""Deferred decode: variants of `ring_step` in turns, each compared with the product's. `python bench.py SECONDS [tiny]`

A period of 16 tokens: 15 calls without a flush and one with all flushes. Plain decode is timed in the same run.
"""
import dataclasses, os, sys, time, statistics
HERE = os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0, HERE + "/variants")
START = time.time(); BUDGET = float(sys.argv[1]); tiny = "tiny" in sys.argv; only = [a for a in sys.argv[2:] if a not in ("tiny", "float32", "bfloat16")]
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from gdn_jax import serving
from gdn_jax.checks import device_time
from pallas_kernels.decode import ring_step as rs, step as product
VARIANTS = {}

Hk, HV, K = (1, 2, 128) if tiny else (16, 32, 128)
INTERPRET = dict(interpret=plgpu.InterpretGPUParams(detect_races=True)) if tiny else {}
TURNS, CALLS, TOKENS = (1, 1, 3) if tiny else (3, 3, 16)
if tiny: rs.NUM_SMS = 1
rng = np.random.default_rng(0)
LEFT = lambda: BUDGET - (time.time() - START)
normal = lambda *s: jnp.asarray(rng.standard_normal(s, np.float32))
big = lambda *s, dt: jax.random.normal(jax.random.key(0), s, jnp.float32).astype(dt)
gates = dict(A_log=jnp.log(jnp.asarray(rng.uniform(0.1, 16, HV), jnp.float32)), dt_bias=jnp.asarray(rng.uniform(-6, -2, HV), jnp.float32))
def tokens_of(N): return [normal(N, 1, *s).astype("bfloat16") for s in ((Hk, K), (Hk, K), (HV, K), (HV,), (HV,))]
PLAIN, FOUND = {}, {}

def kernels_of(once, calls):
    """Median us of each kernel of once(), in order; the ring kernel alone (copies that XLA adds are told apart)."""
    if tiny:
        once(); return [1.0] * TOKENS
    found = device_time.of_calls(once, calls).kernels
    named = [ms * 1e3 for name, ms in found if "decode" in name]
    return named or [ms * 1e3 for _, ms in found]

def rms(a, b): return float(np.sqrt(((a - b) ** 2).sum() / max((b ** 2).sum(), 1e-30)))

common_extra, make_extra = {}, {}
def plain(N, dtype):
    slots = jnp.asarray(rng.permutation(N), jnp.int32)
    pool, x = big(N, HV, K, K, dt=dtype), tokens_of(N)
    f = jax.jit(lambda pool, *x: product.step(*x, pool, **gates, read_slots=slots, write_slots=slots[:, None], scale=K**-0.5, **common_extra), donate_argnums=0)
    run, box = f.lower(pool, *x).compile(), [pool]
    def once():
        for _ in range(4):
            o, box[0] = run(box[0], *x)
        jax.block_until_ready((o, box[0]))
    us = [t for t in kernels_of(once, CALLS) if t > 1]
    PLAIN[N, dtype] = statistics.median(us)
    print(f"PLAIN {N} requests, {dtype}: {PLAIN[N, dtype]:.2f} us ({min(us):.2f} to {max(us):.2f})", flush=True)

def deferred(N, dtype, names):
    if LEFT() < 12: print(f"SKIPPED {N} requests, {dtype}"); return
    if not tiny: plain(N, dtype)
    slots = jnp.asarray(rng.permutation(N), jnp.int32)
    if tiny: slots = jnp.asarray([1, -1, 0], jnp.int32)
    x = [tokens_of(N) for _ in range(TOKENS)]
    first_pool = tuple(serving.make_ring_pool(big(N, HV, K, K, dt=dtype), num_key_heads=Hk, **make_extra)[:5])
    if tiny:  # two tokens before a flush
        state, k, u, g, _ = first_pool
        first_pool = (state, *(normal(*y.shape).astype(y.dtype) / 8 for y in (k, u)), -abs(normal(*g.shape)) / 9, jnp.asarray([[[14, 13]] * HV] * N, jnp.int32))
    common = dict(read_slots=slots, scale=K**-0.5, drafts=None, **common_extra, **gates, **INTERPRET)
    def call(step, config):
        def f(pool, *tokens):
            o, *pool = step(*tokens, *pool, config=config, **common)
            return o, tuple(pool)
        return f
    fs = {"product": call(rs.ring_step, rs.Config(128, warpgroups=1) if tiny else None)}
    for name in names:
        module, text = VARIANTS[name]
        config = eval(text, {"C": module.Config, "f4": dtype == "float32"})
        if tiny: config = dataclasses.replace(config, warpgroups=1, stages=4 if dtype == "float32" else 5)
        fs[name] = call(module.ring_step, config)
    runs, pools, first, times = {}, {}, {}, {}
    for name, f in fs.items():
        if LEFT() < 6 and first: print(f"SKIPPED {N} {dtype}: {name}"); continue
        try:
            mine = jax.tree.map(jnp.array, first_pool)
            run = f if tiny else jax.jit(f, donate_argnums=0).lower(mine, *x[0]).compile()
            outputs, rings = [], None
            for t, tokens in enumerate(x):
                o, mine = run(mine, *tokens)
                outputs.append(o)
                if t == TOKENS - 2: rings = [np.asarray(y[slots[:2]].astype("float32"), np.float64).ravel() for y in mine[1:4]]
            outputs = np.asarray(jnp.concatenate(outputs, 1).astype("float32"), np.float64)
            sum_, some = (np.asarray(y, np.float64) for y in (mine[0].astype("float32").sum((-1, -2)), mine[0][slots[jnp.asarray([0, -1])]].astype("float32")))
            first[name] = outputs, some, np.concatenate(rings), np.asarray(mine[4])
            first[name + "/sum"] = sum_
            runs[name], pools[name], times[name] = run, mine, []
        except Exception as error:
            print(f"FAILED {N} {dtype}: {name}: {type(error).__name__} {str(error)[:300]}", flush=True)
    for _ in range(TURNS):
        for name, run in runs.items():
            if LEFT() < 3 and times[name]: continue
            def once(name=name, run=run):
                for tokens in x:
                    o, pools[name] = run(pools[name], *tokens)
                jax.block_until_ready((o, pools[name]))
            us = kernels_of(once, CALLS)
            if len(us) != TOKENS: us = sorted(us[:-1], reverse=True)[: TOKENS - 1] + us[-1:] if len(us) > TOKENS else us + [float("nan")] * (TOKENS - len(us))
            times[name].append(us)
    for name in runs:
        errors = [rms(a, b) for a, b in zip(first[name][:3], first["product"][:3])]
        cursors = bool((first[name][3] == first["product"][3]).all())
        sums = float(np.abs(first[name + "/sum"] - first["product/sum"]).max())
        verdict = "same" if max(errors) <= (1e-2 if dtype == "bfloat16" else 1e-3) and cursors else "WRONG"
        each = [statistics.median(t[i] for t in times[name]) for i in range(TOKENS)]
        period = [statistics.mean(t) for t in times[name]]
        mean = statistics.median(period)
        FOUND.setdefault((N, dtype), {})[name] = mean
        ratio = PLAIN.get((N, dtype), 0) / mean
        print(f"{N} {dtype} | {name:28} | mean {mean:7.2f} us ({min(period):.2f} to {max(period):.2f}) | without flush {statistics.median(each[:-1]):7.2f} ({min(each[:-1]):.2f} to {max(each[:-1]):.2f}) with {each[-1]:7.2f} | ratio {ratio:.3f} | o {errors[0]:.0e} state {errors[1]:.0e} ring {errors[2]:.0e} sums {sums:.0e} {verdict}", flush=True)

def best(dtype, N, n):
    """The fastest variants of a case that was run, without the floor."""
    found = FOUND.get((N, dtype), {})
    return [x for x in sorted(found, key=found.get) if x not in ("product",) and "floor" not in x][:n]


def special(N, dtype, vk, ring):
    """The product with states [V, K], or a float32 ring."""
    global serving
    real, given = serving.make_ring_pool, dict(common_extra)
    common_extra.update(kv_layout=not vk)
    make_extra.update({"dtype": ring} if ring else {})
    try:
        print("vk" if vk else "kv", "ring", ring or "bfloat16", end=": ")
        deferred(N, dtype, [])
    finally:
        common_extra.clear(); make_extra.clear()

if __name__ == "__main__":
    if tiny:
        for dtype in ("bfloat16", "float32"): deferred(3, dtype, [])
        for vk, ring in ((True, None), (False, "float32")):
            for dtype in ("bfloat16", "float32"): special(3, dtype, vk, ring)
        sys.exit()
    for N in (128, 512, 32, 1):
        for dtype in ("bfloat16", "float32"): deferred(N, dtype, [])
    for vk, ring in ((True, None), (False, "float32")):
        for dtype in ("bfloat16", "float32"): special(128, dtype, vk, ring)
    for dtype in ("bfloat16", "float32"): deferred(256, dtype, [])
