"""Forward and backward kernels of several versions side by side in one process, lengths known and not. See run.sh."""
import concurrent.futures as futures, functools, importlib, json, os, pathlib, sys, threading, time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import jax, jax.numpy as jnp, numpy as np
from gdn_jax.checks import device_time
from gdn_jax.checks.rows import Row, inputs

DRY = "DRY" in os.environ
T0, BUDGET = time.time(), float(os.environ.get("BUDGET", "150"))
REPEATS, ROUNDS = (9, 3)
SEED = time.time_ns() % 2**31
OUT = os.environ.get("OUT", "/tmp")
fwd = lambda v: importlib.import_module(f"pk_{v}.forward.rule")
bwd = lambda v: importlib.import_module(f"pk_{v}.backward.rule")
SCALE = 128**-0.5

def row_of(heads, name):
    return Row(*heads, {"1x32768": (32768,), "1x32768b1": (32768,), "16384x2": (16384,) * 2, "1024+7168": (1024, 7168), "4096x8": (4096,) * 8, "1024x8": (1024,) * 8, "1x8192": (8192,),
                        "ragged": (1000, 3001, 0, 1, 63, 64, 500, 0, 4096, 7, 129, 3000), "tail": (6000, *(10,) * 100)}[name])

@functools.cache
def data(heads, name):
    row = row_of(heads, name)
    if DRY:
        return jax.eval_shape(lambda: inputs(row, "bfloat16", SEED)), row.cu_seqlens
    x = inputs(row, "bfloat16", SEED)
    return x._replace(beta=jnp.ones_like(x.beta)) if name.endswith("b1") else x, row.cu_seqlens  # what the variants without strengths are right for

def forward_step(variant, known, config=None):
    def step(h0, q, k, v, g, beta, cu):
        o, final, _ = fwd(variant).forward(q, k, v, g, beta, h0, scale=SCALE, cu_seqlens=known if known is not None else cu, config=config)
        return (o, final), jnp.zeros((), jnp.float32)
    return step

def forward_args(x, cu):
    return x.initial_state, x.q, x.k, x.v, x.g, x.beta, cu

def residuals_of(variant, x, known, cu):
    f = jax.jit(lambda h0, q, k, v, g, beta, cu: fwd(variant).forward(q, k, v, g, beta, h0, scale=SCALE, cu_seqlens=known if known is not None else cu)[2])
    return jax.eval_shape(f, *forward_args(x, cu)) if DRY else f(*forward_args(x, cu))

def backward_step(variant, known):
    def step(h0, q, k, v, g, beta, do, dh_T, res, cu):
        out = bwd(variant).backward(q, k, v, g, beta, h0, res, do, dh_T, scale=SCALE, cu_seqlens=known if known is not None else cu)
        return out, jnp.zeros((), jnp.float32)
    return step

def config_of(variant, warpgroups=None, segments=None):
    return None if warpgroups is segments is None else fwd(variant).Config(state_warpgroups=warpgroups, segment_chunks=segments)

# ---- what is compiled: (label, kind, variant, heads, row, "known" | "run", config)
def plan():
    """The most important first."""
    B, F = (16, 32), "forward"
    jobs = [(F, v, B, "1x32768", "known", None) for v in ("base", "head")]
    jobs += [(F, v, B, "4096x8", kind, None) for kind in ("known", "run") for v in ("base", "head")]
    jobs += [("backward", v, B, "4096x8", kind, None) for v, kind in (("base", "known"), ("base", "run"), ("head", "run"))]
    jobs += [(F, v, B, "1024x8", kind, None) for kind in ("known", "run") for v in ("base", "head")]
    jobs += [(F, v, B, "16384x2", kind, None) for kind in ("known", "run") for v in ("base", "head")]
    jobs += [(F, v, (2, 8), "1024x8", "known", c) for v, c in (("base", (None, None)), ("head", (None, None)), ("head", (2, 0)), ("head", (1, 8)))]
    jobs += [(F, "base", B, "1024+7168", "known", None), (F, "base", B, "1024+7168", "run", None), (F, "head", B, "1024+7168", "run", None)]
    jobs += [(F, "head", B, "1024x8", "known", (1, 0)), (F, "base", B, "tail", "run", None), (F, "head", B, "tail", "run", None)]
    jobs += [(F, "head", heads, "1024x8", "known", c) for heads in ((16, 64), (8, 32)) for c in ((None, None), (1, 0))]
    return jobs

def loaders():
    return [("forward", v, (16, 32), name, "known", None) for name in ("1x32768", "16384x2") for v in ("base", "head", "loader")]

def risky():
    return []



def dry(step, *args):
    """Lowers instead of compiling, on a machine without a GPU."""
    jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))
    return device_time.Program(step, None, (), 0, 0)

def build(job):
    kind, variant, heads, name, lengths, c = job
    x, borders = data(heads, name)
    cu = None if borders is None else jnp.asarray(borders)
    known, given = (borders, None) if lengths == "known" else (None, cu)
    if kind == "forward":
        return device_time.compile_step(forward_step(variant, known, None if c is None else config_of(variant, *c)), *forward_args(x, given)), forward_args(x, given)
    res = residuals_of(variant, x, known, given)
    args = (x.initial_state, x.q, x.k, x.v, x.g, x.beta, x.do, x.dh_T, res, given)
    return device_time.compile_step(backward_step(variant, known), *args), args

@jax.jit
def compared(x, y):
    x = x.reshape(y.shape).astype(jnp.float32)
    y = y.astype(jnp.float32)
    return jnp.all(x == y), jnp.sqrt(jnp.nanmean((x - y) ** 2) / jnp.nanmean(y**2))

def same(a, b):
    """On the device: float32 is exact for what is compared."""
    found = [compared(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    return "bit-equal" if all(bool(e) for e, _ in found) else f"differ, rms {max(float(r) for _, r in found):.1e}"

def correctness():
    """Ragged rows, the padding past their end NaN: head against base, run-time against known, each bit for bit."""
    x, borders = data((16, 32), "ragged")
    T = int(borders[-1]) + 91
    T += -T % 8
    def padded(y, fill):
        return jnp.concatenate([y, jnp.full((1, T - y.shape[1], *y.shape[2:]), fill, y.dtype)], 1)
    x = x._replace(**{n: padded(getattr(x, n), jnp.nan) for n in ("q", "k", "v", "g", "beta")}, do=padded(x.do, 0))
    cu, got, grads = jnp.asarray(borders), {}, {}
    for variant in ("base", "head"):
        for kind in ("known", "run"):
            known, given = (borders, None) if kind == "known" else (None, cu)
            whole = jax.jit(lambda h0, q, k, v, g, beta, cu: fwd(variant).forward(q, k, v, g, beta, h0, scale=SCALE, cu_seqlens=known if known is not None else cu))
            *out, res = whole(*forward_args(x, given))
            args = (x.initial_state, x.q, x.k, x.v, x.g, x.beta, x.do, x.dh_T, res, given)
            got[variant, kind] = out
            if True:
                grads[variant, kind] = jax.jit(backward_step(variant, known))(*args)[0]
    n = int(borders[-1])
    clean = lambda t: [y[:, :n] if y.ndim == 4 and y.shape[1] == T or y.ndim == 3 else y for y in jax.tree.leaves(t)]
    for variant in got:
        if variant[0] != "base":
            print(f"ragged {variant}: forward to base {same(clean(got[variant]), clean(got['base', variant[1]]))}", end="; ")
            if variant in grads:
                print(f"backward {same(clean(grads[variant]), clean(grads['base', variant[1]]))}", end="; ")
            print(f"finite {all(bool(jnp.isfinite(y.astype(jnp.float32)).all()) for y in clean(got[variant]) + clean(grads.get(variant, [])))}")

def short(name):
    return {"chunk_gates": "gates", "gated_inverse": "inv", "segment_transitions": "trans", "segment_states": "seg", "outputs": "out"}.get(name.removesuffix("_mosaic_gpu").removesuffix("_kernel"), name)

def main():
    print(f"seed {SEED}, jax {jax.__version__}, {jax.devices()[0].device_kind}")
    if DRY:
        device_time.compile_step = dry
        for job in [j for j in plan() + risky() + loaders() if not os.environ["DRY"] or os.environ["DRY"] in str(j)]:
            build(job)
            print(job, f"{time.time() - T0:.0f} s", flush=True)
        return
    phase(plan(), 0.55 * BUDGET, 0.7 * BUDGET)
    # Variants that have never run come last: one that waits for ever costs no other's numbers.
    phase(loaders(), 0.9 * BUDGET, BUDGET)
    if time.time() - T0 < BUDGET:
        correctness()
    print(f"done at {time.time() - T0:.0f} s")

def phase(jobs, compile_until, time_until):
    programs, failed = {}, {}
    lock = threading.Lock()
    def attempt(job):
        with lock:
            data(*job[2:4])
        if time.time() - T0 > compile_until:
            return "no time"
        try:
            return build(job)
        except Exception as e:
            return repr(e)[:200]
    with futures.ThreadPoolExecutor(6) as pool:
        for job, built in zip(jobs, pool.map(attempt, jobs)):
            (failed if isinstance(built, str) else programs)[job] = built
    print(f"compiled {len(programs)} at {time.time() - T0:.0f} s", flush=True)
    seen = {}
    for (kind, variant, heads, name, lengths, c), (program, _) in programs.items():
        seen.setdefault((kind, heads, name), []).append((variant, lengths, c, program.results))
    for where, results in seen.items():
        base = [r for r in results if r[:3] == ("base", "known", None)]
        for variant, lengths, c, value in results if base else ():
            verdict = same(value, base[0][3])
            if verdict != "bit-equal":
                print(f"{where} {variant} {lengths} {c}: to base known {verdict}")
    times = {job: [] for job in programs}
    for n in range(ROUNDS):
        for job, (program, args) in programs.items():
            if n == 0 or time.time() - T0 < time_until:
                times[job].append(device_time.measure(program._replace(results=None), *args, calls=1, repeats=REPEATS))
    record = {}
    print(f"{'row':24} {'kind':6} {'variant':8} {'ms':>7} {'spread':>7}  us of each kernel; between = launch gaps")
    for job, ts in times.items():
        kind, variant, heads, name, lengths, c = job
        if not ts:
            continue
        ms = float(np.median([t.median_ms for t in ts]))
        spread = (max(t.slowest_ms for t in ts) - min(t.fastest_ms for t in ts)) / ms
        parts = [(n, 1e3 * float(np.median([t.kernels[i][1] for t in ts]))) for i, (n, _) in enumerate(ts[0].kernels)]
        named = [(short(n), us) for n, us in parts if any(w in n for w in ("chunk_", "gated_", "segment", "outputs", "chains", "gradients"))]
        small = [us for n, us in parts if not any(w in n for w in ("chunk_", "gated_", "segment", "outputs", "chains", "gradients"))]
        listed = " ".join(f"{n} {us:.1f}" for n, us in named)
        gaps = 1e3 * ms - sum(us for _, us in parts)
        print(f"{kind[:3]} {heads[0]},{heads[1]} {name:10} {'' if c is None else c!s:12.12} {lengths:6} {variant:8} {ms:7.4f} {100 * spread:5.1f} %  {listed} | {len(small)} small {sum(small):.1f} between {gaps:.1f}")
        record[str(job)] = dict(ms=ms, spread=spread, kernels=parts, all=[t.median_ms for t in ts])
    print("not run:", *(f"{job}: {why}" for job, why in failed.items()))
    with open(f"{OUT}/records.json", "a") as file:
        file.write(json.dumps(record) + "\n")
    sys.stdout.flush()


main()
