"""Serving: plain, deferred before and after, verification; one process, fresh random inputs, checked against float64."""
import dataclasses, os, sys, time
sys.path.insert(0, os.path.dirname(__file__))
from typing import Any
import jax, jax.numpy as jnp, numpy as np
from gdn_jax.checks import decode_bench as db, device_time
from gdn_jax.checks.decode_bench import DecodeBenchOptions, Line
from gdn_jax.checks.device_time import GRAPH_OPTIONS
from old_ring import cursors, ring_flush as old_flush, ring_step as old_step

T0 = time.time()
options = DecodeBenchOptions(implementations=("mosaic_gpu",), repeats=15, seed=int(time.time()) % 100000)
LAST = {}
of_calls = device_time.of_calls
def remember(once, repeats):
    LAST["t"] = of_calls(once, repeats)
    return LAST["t"]
device_time.of_calls = remember

draw_all = db._draw
def draw(options, line):
    """Tokens and states of 32 requests, for more requests again and again: quicker to draw."""
    x = draw_all(options, line._replace(batch=min(line.batch, 32)))
    more = lambda y: np.resize(y, (line.batch, *y.shape[1:]))
    slots = np.random.default_rng(options.seed).permutation(line.batch).astype(np.int32)
    states = np.empty_like(more(x.states))
    states[slots] = more(x.states[x.slots])
    return db._Problem(tuple(map(more, x.tokens)), x.A_log, x.dt_bias, states, slots)
db._draw = draw

def old(line: Line):
    """decode_bench.measure with the kernels of before."""
    x = db._draw(options, line)
    D, (Hk, HV) = options.width, options.heads
    N, steps, T = line.batch, line.steps, line.tokens
    L = line.deferred
    pool = (jnp.asarray(x.states), jnp.zeros((N, Hk, L, D), jnp.bfloat16), jnp.zeros((N, HV, L, D), jnp.bfloat16),
            jnp.zeros((N, HV, L)), jnp.zeros(N, jnp.int32), jnp.full(N, -1, jnp.int32))
    tokens = jax.device_put([tuple(y[:, i * T : i * T + T] for y in x.tokens) for i in range(steps)])
    slots, accepted = jnp.asarray(x.slots), jnp.full(N, T, jnp.int32)
    rule = dict(A_log=jnp.asarray(x.A_log), dt_bias=jnp.asarray(x.dt_bias), scale=D**-0.5)
    def step(pool, token):
        *arrays, count, before = pool
        if T == 1:
            count, before, held = cursors.advance(count, before, slots)
            o, *arrays = old_step.ring_step(*token, *arrays, read_slots=slots, held=held, deferred=True, **rule)
        else:
            count, before, held, start = cursors.advance(count, before, slots, T=T, accepted=accepted)
            arrays[0] = old_flush.ring_flush(*arrays, read_slots=slots, held=held, room=T)
            o, *arrays = old_step.ring_step(*token, *arrays, read_slots=slots, held=start, deferred=False, **rule)
        return (*arrays, count, before), o
    def f(pool, tokens):
        out = []
        for token in tokens:
            pool, o = step(pool, token)
            out.append(o)
        return pool, out
    run = jax.jit(f, donate_argnums=0).lower(pool, tokens).compile(compiler_options=GRAPH_OPTIONS)
    outputs = []
    for _ in range(2):
        pool, o = run(pool, tokens)
        outputs.append(np.concatenate([np.asarray(y) for y in o], 1))
    error = db._error(x, outputs, "kv")
    def once():
        nonlocal pool
        pool, o = run(pool, tokens)
        jax.block_until_ready((pool, o))
    t = device_time.of_calls(once, options.repeats)
    return db.Result(*line, error, step_us=t.median_ms * 1e3 / steps, fastest_us=t.fastest_ms * 1e3 / steps, slowest_us=t.slowest_ms * 1e3 / steps)

def kernels_of_call():
    """Medians of the kernels of a period, us: of a step without and with a flush (the longest)."""
    ks = [(n, m * 1e3) for n, m in LAST["t"].kernels]
    steps = sorted(m for n, m in ks if "deferred" in n or "verify" in n)
    rest = [m for n, m in ks if not ("deferred" in n or "verify" in n)]
    if not steps: return f"{len(ks)} kernels: {ks[0][1] if ks else 0:.1f} each"
    return f"kernel median {steps[len(steps)//2]:.1f}, longest {steps[-1]:.1f}" + (f", others {np.median(rest):.1f} to {max(rest):.1f} ({len(rest)})" if rest else "")

def show(what, r, base=None):
    ratio = "" if base is None else f"{base / r.step_us if r.tokens == 1 else r.step_us / base:5.2f}"
    fail = "" if r.failure is None else f"  FAILED {r.failure}"
    print(f"{what:22} {r.pool:8} {r.batch:4} {r.step_us:7.1f} us ({r.fastest_us:.1f}-{r.slowest_us:.1f}) {ratio:5} err {r.error:.1e} {kernels_of_call()}{fail}", flush=True)
    return r.step_us

print(jax.__version__, jax.devices()[0].device_kind, "; ratio: plain / deferred of one token; verify / plain of four", flush=True)
only = sys.argv[1:]
base = {}
for pool in ("float32", "bfloat16"):
    for batch in (128, 512, 32, 1):
        line = Line("mosaic_gpu", 1, pool, 1, batch)
        b = base[pool, batch] = show("plain", db.measure(options, line))
        if batch in (1, 128):
            show("deferred, before", old(line._replace(deferred=16)), b)
        show("deferred, after", db.measure(options, line._replace(deferred=16)), b)
for pool in ("float32", "bfloat16"):
    line, b = Line("mosaic_gpu", 4, pool, 16, 128), base[pool, 128]
    show("verify 4 ring, before", old(line), b)
    show("verify 4 ring, after", db.measure(options, line), b)
    show("verify 4, 4 states", db.measure(options, line._replace(deferred=1)), b)
from old_ring import step_old
from pallas_kernels.decode import step as new_step
for dtype in ("float32", "bfloat16"):
    N, T, (Hk, HV), D = 128, 4, options.heads, options.width
    rng = np.random.default_rng()
    n = lambda *s, d=jnp.bfloat16: jnp.asarray(rng.standard_normal(s, np.float32), d)
    tokens = (n(N, T, Hk, D), n(N, T, Hk, D), n(N, T, HV, D), n(N, T, HV), n(N, T, HV))
    start = n(N * T, HV, D, D, d=dtype)
    order = rng.permutation(N * T).astype(np.int32).reshape(N, T)
    rest = dict(A_log=n(HV, d=jnp.float32), dt_bias=n(HV, d=jnp.float32), read_slots=jnp.asarray(order[:, 0]), write_slots=jnp.asarray(order), scale=D**-0.5)
    want = None
    for name, module, config in (("before", step_old, None), ("after", new_step, None), *((("32", new_step, (32, False)), ("128", new_step, (128, False))) if dtype == "float32" else (("64 across", new_step, (64, True)), ("64", new_step, (64, False))))):
        try:
            c = None if config is None else module.Config(*config)
            run = jax.jit(lambda pool: module.step(*tokens, pool, config=c, **rest), donate_argnums=0).lower(start).compile(compiler_options=GRAPH_OPTIONS)
            o, pool = jax.block_until_ready(run(jnp.array(start)))
            f = [np.asarray(o[::17], np.float32), np.asarray(pool[::67], np.float32)]
            want = want or f
            err = [float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(f, want)]
            def once():
                global pool
                o, pool = run(pool)
                jax.block_until_ready((o, pool))
            t = device_time.of_calls(once, 15)
            print(f"4 states, {dtype:8} {name:10} {t.median_ms*1e3:7.1f} us ({t.fastest_ms*1e3:.1f}-{t.slowest_ms*1e3:.1f}) differs by {err[0]:.0e} {err[1]:.0e}", flush=True)
        except Exception as e:
            print("4 states", dtype, name, "FAILED", str(e)[:100], flush=True)
    del start, pool
from gdn_jax import serving
for N in (1, 128):
    rng = np.random.default_rng()
    D2 = 2 * Hk * D + HV * D
    x, w = jnp.asarray(rng.standard_normal((N, D2)), jnp.bfloat16), jnp.asarray(rng.standard_normal((D2, 4)), jnp.float32)
    conv = jnp.asarray(rng.standard_normal((512, D2, 3)), jnp.bfloat16)
    at = jnp.asarray(rng.permutation(512)[:N].astype(np.int32))
    run = jax.jit(lambda conv: serving.causal_conv1d_update(x, conv, w, read_slots=at), donate_argnums=0).lower(conv).compile(compiler_options=GRAPH_OPTIONS)
    def once():
        global conv
        y, conv = run(conv)
        jax.block_until_ready((y, conv))
    t = of_calls(once, 15)
    print(f"conv update of {N} requests {t.median_ms*1e3:.1f} us:", [round(m * 1e3, 1) for _, m in t.kernels], flush=True)
N = 128
x = jnp.ones((N * T, HV, D, D))
for what, f, moved in (("fill", lambda x: jnp.zeros_like(x) + x[0, 0, 0, 0], 1), ("copy", lambda x: x + 1, 2), ("sum", lambda x: jnp.sum(x, (2, 3)), 1)):
    run = jax.jit(f).lower(x).compile(compiler_options=GRAPH_OPTIONS)
    t = of_calls(lambda: jax.block_until_ready(run(x)), 10)
    print(f"{what}: {x.nbytes * moved / t.median_ms * 1e-9:.2f} TB/s")
print(f"bench took {time.time() - T0:.0f} s")
