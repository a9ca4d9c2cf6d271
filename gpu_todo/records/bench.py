"""Forward and backward kernels of main before (pk_old) and of the tree (new), in turns in one process. See run.sh."""
import concurrent.futures as futures, functools, importlib, json, os, pathlib, sys, threading, time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import jax, jax.numpy as jnp, numpy as np
from gdn_jax.checks import device_time
from gdn_jax.checks.rows import Row, inputs

DRY = "DRY" in os.environ
T0, BUDGET = time.time(), float(os.environ.get("BUDGET", "66"))
REPEATS, ROUNDS = 7, 3
SEED = time.time_ns() % 2**31
OUT = os.environ.get("OUT", "/tmp")
PACKAGE = {"old": "pk_old", "new": "pallas_kernels"}
fwd = lambda v: importlib.import_module(f"{PACKAGE[v]}.forward.rule")
bwd = lambda v: importlib.import_module(f"{PACKAGE[v]}.backward.rule")
SCALE = 128**-0.5
LENGTHS = {"1x32768": (32768,), "16384x2": (16384,) * 2, "4096x8": (4096,) * 8, "1024x8": (1024,) * 8,
           "ragged": (1000, 3001, 0, 1, 63, 64, 500, 0, 4096, 7, 129, 3000)}

@functools.cache
def data(heads, name):
    row = Row(*heads, LENGTHS[name])
    if DRY:
        return jax.eval_shape(lambda: inputs(row, "bfloat16", SEED)), row.cu_seqlens
    return inputs(row, "bfloat16", SEED), row.cu_seqlens

def forward_step(variant, known):
    def step(h0, q, k, v, g, beta, cu):
        o, final, _ = fwd(variant).forward(q, k, v, g, beta, h0, scale=SCALE, cu_seqlens=known if known is not None else cu)
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

def plan():
    """(kind, variant, heads, row, lengths known or at run time), the most important first."""
    B, both = (16, 32), ("old", "new")
    jobs = [("backward", v, B, "4096x8", kind) for v, kind in (("old", "known"), ("old", "run"), ("new", "run"))]
    jobs += [("forward", v, (16, 64), "1x32768", "known") for v in both]
    jobs += [("forward", v, (2, 8), "1024x8", "known") for v in both]
    jobs += [("forward", v, B, "16384x2", "run") for v in both]
    jobs += [("backward", v, B, "ragged", "run") for v in both]
    jobs += [("forward", v, (2, 8), "1x32768", "known") for v in both]
    return jobs

def dry(step, *args):
    """Lowers instead of compiling, on a machine without a GPU."""
    jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))
    return device_time.Program(step, None, (), 0, 0)

def build(job):
    kind, variant, heads, name, lengths = job
    x, borders = data(heads, name)
    cu = None if borders is None else jnp.asarray(borders)
    known, given = (borders, None) if lengths == "known" else (None, cu)
    if kind == "forward":
        return device_time.compile_step(forward_step(variant, known), *forward_args(x, given)), forward_args(x, given)
    res = residuals_of(variant, x, known, given)
    args = (x.initial_state, x.q, x.k, x.v, x.g, x.beta, x.do, x.dh_T, res, given)
    return device_time.compile_step(backward_step(variant, known), *args), args

@jax.jit
def compared(x, y):
    x = x.reshape(y.shape).astype(jnp.float32)
    y = y.astype(jnp.float32)
    return jnp.all((x == y) | (jnp.isnan(x) & jnp.isnan(y))), jnp.sqrt(jnp.nanmean((x - y) ** 2) / jnp.nanmean(y**2)), jnp.isfinite(y).all()

def same(a, b):
    found = [compared(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    equal = "bit-equal" if all(bool(e) for e, *_ in found) else f"DIFFER, rms {[f'{float(r):.1e}' for _, r, _ in found]}"
    return equal + ("" if all(bool(f) for *_, f in found) else ", NOT FINITE")

KERNELS = {"chunk_gates": "gates", "gated_inverse": "inverse", "segment_transitions": "transitions", "segment_states": "states", "outputs": "outputs", "chains": "chains", "gradients": "gradients"}

def short(name):
    return next((s for key, s in KERNELS.items() if name.startswith(key)), None)

def main():
    print(f"seed {SEED}, jax {jax.__version__}, {jax.devices()[0].device_kind}")
    jobs = plan()
    if DRY:
        device_time.compile_step = dry
        for job in jobs:
            build(job)
            print(job, f"{time.time() - T0:.0f} s", flush=True)
        return
    programs, failed, lock = {}, {}, threading.Lock()
    def attempt(job):
        with lock:
            data(*job[2:4])
        if time.time() - T0 > 0.6 * BUDGET:
            return "no time"
        try:
            return build(job)
        except Exception as e:
            return repr(e)[:300]
    with futures.ThreadPoolExecutor(8) as pool:
        for job, built in zip(jobs, pool.map(attempt, jobs)):
            (failed if isinstance(built, str) else programs)[job] = built
    print(f"compiled {len(programs)} at {time.time() - T0:.0f} s", flush=True)
    for job, (program, _) in programs.items():
        kind, variant, *rest = job
        first = programs.get((kind, "old", *rest))
        if variant == "new" and first is not None:
            print(f"{kind} {rest}: new to old {same(program.results, first[0].results)}", flush=True)
    known, run = (programs.get(("backward", v, (16, 32), "4096x8", k)) for v, k in (("old", "known"), ("new", "run")))
    if known and run:
        print(f"backward 4096x8: new at run time to known {same(run[0].results, known[0].results)}", flush=True)
    programs = {job: (program._replace(results=None), args) for job, (program, args) in programs.items()}
    times = {job: [] for job in programs}
    for n in range(ROUNDS):
        for job, (program, args) in programs.items():
            if n == 0 or time.time() - T0 < BUDGET:
                times[job].append(device_time.measure(program, *args, calls=1, repeats=REPEATS))
    record = {}
    for job, ts in times.items():
        kind, variant, heads, name, lengths = job
        ms = float(np.median([t.median_ms for t in ts]))
        spread = (max(t.slowest_ms for t in ts) - min(t.fastest_ms for t in ts)) / ms
        parts = [(n, 1e3 * float(np.median([t.kernels[i][1] for t in ts]))) for i, (n, _) in enumerate(ts[0].kernels)]
        listed = " ".join(f"{short(n)} {us:.1f}" for n, us in parts if short(n))
        copies = [us for n, us in parts if not short(n) and n.lower().startswith("memcpy")]
        small = [us for n, us in parts if not short(n) and not n.lower().startswith("memcpy")]
        print(f"{kind[:3]} {heads[0]},{heads[1]} {name:8} {lengths:5} {variant:3} {ms:7.4f} ms {100 * spread:4.1f} %  {listed} | {len(small)} small {sum(small):.1f}, copies {sum(copies):.1f}")
        record[str(job)] = dict(ms=ms, spread=spread, kernels=parts, all=[t.median_ms for t in ts])
    for job, why in failed.items():
        print("not run:", job, why)
    with open(f"{OUT}/records.json", "w") as file:
        json.dump(record, file)
    print(f"done at {time.time() - T0:.0f} s", flush=True)


main()
