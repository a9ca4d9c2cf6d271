"""Write strengths outside the inverse: variants beside main in one run. python .gpu/records.py (from the repository root).

Reads .gpu/records.tar.gz: a folder with gdn_jax and pallas_kernels for each variant. Prints tables; writes $OUT/records.json.
"""

import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import time

IMPL, DRY = os.environ.get("IMPL", "mosaic_gpu"), "DRY" in os.environ
ROUNDS, REPEATS = 3, 7
CHECKED = tuple(os.environ.get("CHECKED", "main,head").split(","))
SMALL = dict(T=400, B=1, heads=(2, 2, 4), K=128, V=128)
LENGTHS = (0, 1, 64, 190, 0, 100)
RECIPES = {
    "by-head": dict(beta="by-head"),
    "0 to 1": dict(beta="0 to 1"),
    "some 0": dict(beta="some 0"),
    "hundredfold": dict(g="hundredfold"),
    "repeated": dict(keys="repeated", g="-1e-3", beta=".835", ill_conditioned=True),
    "repeated 2": dict(keys="repeated", g="zero", beta="2", ill_conditioned=True),
}


def answer(**message):
    print("@" + json.dumps(message), flush=True)


def check(variant):
    """Small rows against the oracle in float64, by recipe; one compilation for each dtype and form."""
    import jax
    import numpy as np

    from gdn_jax import gated_delta_rule
    from gdn_jax.checks import cases, oracle
    from gdn_jax.checks.accuracy import GRADIENTS, STATES, bound, cancelling, head_axis, worst_ratio

    def call(x, known):
        def rule(q, k, v, g, beta, h_0):
            return gated_delta_rule(q, k, v, g, beta, initial_state=h_0, cu_seqlens=known, implementation=IMPL)

        outputs, vjp = jax.vjp(rule, *x[:6])
        return *outputs, *vjp((x.do, x.dh_T))

    def packed(x):
        return call(x, x.cu_seqlens)

    variant, dtype = variant.split(":")
    for _ in (0,):
        for lengths in (None, LENGTHS):
            run = jax.jit(packed)
            for name, recipe in RECIPES.items():
                case = cases.Case(name, lengths=lengths, **SMALL, **recipe)
                x = cases.inputs(case, dtype, seed=int(os.environ["SEED"]))
                started = time.time()
                got = dict(zip(STATES + GRADIENTS, map(np.asarray, run(x)), strict=True))
                expected = oracle.evaluate(**x.arguments, **case.rule_options, do=x.do, dh_T=x.dh_T)
                cancels = cancelling(x.g, x.k)
                errors, over = {}, {}
                for key, y in got.items():
                    y = y.astype(np.float64)
                    if not np.isfinite(y).all():
                        over[key] = "nan"
                        continue
                    errors[key] = worst_ratio(expected[key], y, head_axis(key))
                    limit = bound(key, dtype, cancelling=cancels)
                    ends = dtype == "float16" and name == "by-head" and key in ("dv", "dk")  # outputs below 6e-8
                    if not errors[key] <= limit and not ends:
                        over[key] = f"{errors[key]:.1e}>{limit:.1e}"
                if name == "by-head" and np.any(got["dv"][:, :, 0]):
                    over["dv of beta 0"] = "not 0"
                answer(check=[variant, dtype, "packed" if lengths else "row", name], dbeta=errors.get("dbeta"), dk=errors.get("dk"), over=over, s=time.time() - started)
    if dtype == "float16":
        return
    T = 300 if DRY else 30000
    rng = np.random.default_rng(int(os.environ["SEED"]))
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    bf = lambda x: jax.numpy.asarray(x, jax.numpy.bfloat16)  # noqa: E731
    k, v = bf(unit(rng.standard_normal((1, T, 2, 128)))), bf(rng.standard_normal((1, T, 4, 128)))
    h_0 = rng.standard_normal((1, 4, 128, 128)).astype(np.float32)
    zero = np.zeros((1, T, 4), np.float32)
    run = jax.jit(lambda *a: jax.vjp(lambda h: gated_delta_rule(*a[:5], initial_state=h, implementation=IMPL)[1], a[5]))
    final, vjp = run(k, k, v, zero, zero, h_0)
    same = bool((np.asarray(final) == h_0).all())
    answer(untouched=[variant, same, bool((np.asarray(jax.jit(lambda f, y: f(y))(vjp, h_0)[0]) == h_0).all())])


def work(variant):
    """Compiles, says so, and times at every line that comes."""
    import jax
    import numpy as np

    from gdn_jax.checks import device_time, passes
    from gdn_jax.checks import rows as bench_rows

    seed, programs = int(os.environ["SEED"]), []
    one, many = bench_rows.Row(16, 32, (256 if DRY else 32768,)), bench_rows.Row(16, 32, (64 if DRY else 4096,) * 8)
    plan = [("1x32768", one, False, ("backward", "forward")), ("4096x8", many, False, ("backward", "forward")), ("4096x8 run time", many, True, ("backward", "forward"))]
    for name, row, traced, whats in plan:
        x = bench_rows.inputs(row, "bfloat16", seed)
        cu = None if row.cu_seqlens is None else jax.numpy.asarray(row.cu_seqlens)
        known, given = (None, cu) if traced else (row.cu_seqlens, None)
        for what in whats:
            if what == "forward" and not variant.startswith(("main", "head")):
                continue
            started = time.time()
            step, args = passes.call(what, IMPL, x, known, given)
            program = device_time.compile_step(step, *args)
            if what == "backward":
                few = {key: np.asarray(y[:, ::61, ::5] if key != "dh_0" else y[:, ::5, ::3], np.float32) for key, y in passes.named(what, program.results).items()}
                np.savez(f"{os.environ['FOLDER']}/{variant}-{name}.npz", **few)
            programs.append((f"{what} {name}", program, args))
            answer(compiled=[variant, what, name], s=time.time() - started)
    answer(ready=variant)
    for line in sys.stdin:
        if line.strip() != "go":
            break
        times = {}
        for name, program, args in programs:
            t = device_time.measure(program._replace(results=None), *args, calls=1, repeats=REPEATS)
            times[name] = [t.median_ms, t.fastest_ms, [[k, ms] for k, ms in t.kernels]]
        answer(times=times)


def messages(process, until=None):
    """Answers of a worker until one with that key, or the end."""
    for line in process.stdout:
        if line.startswith("@"):
            message = json.loads(line[1:])
            yield message
            if until in message:
                return
        else:
            print("   ", line.rstrip()[:300], flush=True)


def report(rounds, alive, folder, out):
    import numpy as np

    for row in rounds["main"][0]:
        base = float(np.median([r[row][0] for r in rounds["main"]]))
        print(f"\n{row}")
        names = [k for k, _ in rounds["main"][0][row][2]]
        for name in [n for n in alive if row in rounds[n][0]]:
            ms = float(np.median([r[row][0] for r in rounds[name]]))
            parts = {}
            for r in rounds[name]:
                for i, (kernel, t) in enumerate(r[row][2]):
                    parts.setdefault((i, kernel), []).append(t)
            listed = [f"{k[:26]} {1e3 * float(np.median(t)):.1f}" for (_, k), t in parts.items() if np.median(t) > 0.012 or len(parts) < 4]
            small = 1e3 * sum(float(np.median(t)) for t in parts.values() if np.median(t) <= 0.012)
            out["times"].setdefault(row, {})[name] = {"ms": ms, "ratio": ms / base, "kernels": [[k, float(np.median(t))] for (_, k), t in parts.items()]}
            print(f"  {name:6} {ms:.3f} ms {ms / base:.3f}  | {', '.join(listed)}, other {small:.1f} us in {len(parts) - len(listed)} (main {len(names)} kernels)")
    for name in ("1x32768", "4096x8", "4096x8 run time"):
        files = {v: folder / f"{v}-{name}.npz" for v in alive}
        truth = np.load(files["main"])
        for v in alive[1:]:
            got = np.load(files[v])
            print(f"difference to main, {name}, {v}:", {k: f"{np.sqrt(np.mean((got[k] - truth[k]) ** 2) / np.mean(truth[k] ** 2)):.1e}" for k in truth.files})


def main():
    started = time.time()
    folder = pathlib.Path(tempfile.mkdtemp())
    tarfile.open(pathlib.Path(__file__).with_name("records.tar.gz")).extractall(folder)
    variants = sorted(p.name for p in folder.iterdir() if p.is_dir())
    variants.sort(key=lambda name: name != "main")
    seed = str(time.time_ns() % 2**31)

    def start(mode, variant):
        path = f"{folder / variant.split(':')[0]}:{os.environ.get('PYTHONPATH', '')}"
        env = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "SEED": seed, "FOLDER": str(folder), "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), mode, variant]
        return subprocess.Popen(command, env=env, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    workers = {name: start("work", name) for name in variants}
    checks = {(name, dtype): start("check", f"{name}:{dtype}") for name in CHECKED if name in variants for dtype in ("bfloat16", "float16")}
    out = {"checks": [], "untouched": [], "times": {}}
    for process in checks.values():
        for message in messages(process):
            if "check" in message:
                out["checks"].append(message)
                print(*message["check"], f"dbeta {message['dbeta'] or -1:.1e} dk {message['dk'] or -1:.1e}", message["over"] or "ok", f"{message['s']:.0f} s", flush=True)
            else:
                out["untouched"].append(message["untouched"])
                print("state, cotangent untouched by 30000 tokens of beta 0:", message["untouched"], flush=True)
    print(f"checks done at {time.time() - started:.0f} s", flush=True)
    alive = []
    for name, process in workers.items():
        seen = list(messages(process, "ready"))
        if seen and "ready" in seen[-1]:
            alive.append(name)
        print(name, "ready" if name in alive else "FAILED", f"{sum(m.get('s', 0) for m in seen):.0f} s of compiling", flush=True)
    print(f"ready at {time.time() - started:.0f} s", flush=True)
    rounds = {name: [] for name in alive}
    for _ in range(ROUNDS):
        if rounds["main"] and time.time() - started > 125:
            break
        for name in alive:
            workers[name].stdin.write("go\n")
            workers[name].stdin.flush()
            rounds[name].append(list(messages(workers[name], "times"))[-1]["times"])
    for process in workers.values():
        process.stdin.close()
    report(rounds, alive, folder, out)
    target = os.environ.get("OUT")
    if target:
        pathlib.Path(target, "records.json").write_text(json.dumps(out))
    print(f"\nall in {time.time() - started:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"work": work, "check": check}[sys.argv[1]](sys.argv[2])
    else:
        main()
