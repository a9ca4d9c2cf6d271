"""Checks and times variants of the decode kernels on one GPU; from the worktree's root: PYTHONPATH=/tmp/site:. python3 decode_bench.py [seconds]

Every variant is checked against float64 on some rows, then timed: median of 11 device times of a call.
"""
import dataclasses, functools, itertools, os, sys, time, traceback
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, os.getcwd())
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from gdn_jax import serving
from gdn_jax.checks import device_time
from gdn_jax.checks.device_time import GRAPH_OPTIONS
from pallas_kernels.decode import ring_step, step, step_stream

START, LIMIT = time.time(), float(sys.argv[1]) if len(sys.argv) > 1 else 110.0
SMALL = bool(os.environ.get("SMALL"))      # a rehearsal without a GPU: shapes only, nothing is run
Hk, HV, K, V, L, SLOTS = 16, 32, 128, 128, 16, 1024
SCALE = K ** -0.5
rng = np.random.default_rng(0)
A_log = jnp.asarray(np.log(rng.uniform(0.01, 16, HV)), jnp.float32)
dt_bias = jnp.asarray(rng.normal(size=HV) - 3, jnp.float32)


@functools.cache
def generator(shape, dtype):
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32).astype(dtype))


def normal(key, shape, dtype):
    return generator(shape, jnp.dtype(dtype).name)(jax.random.key(key))


@functools.lru_cache(None)
def tokens(N, T):
    return tuple(normal(i, (N, T, h, d) if d else (N, T, h), jnp.bfloat16)
                 for i, (h, d) in enumerate(((Hk, K), (Hk, K), (HV, V), (HV, 0), (HV, 0))))


def slots(N, of):
    return np.random.default_rng(N).permutation(of)[:N].astype(np.int32)


def f64(x):
    return np.asarray(x).astype(np.float64)


def reference(rows, N, T, states):
    """o [rows, T, HV, V] and the states after each token [rows, T, HV, K, V] from states [rows, HV, K, V]."""
    q, k, v, a, b = (f64(x[jnp.asarray(rows)]) for x in tokens(N, T))
    unit = lambda x: np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), HV // Hk, axis=-2)
    q, k = unit(q), unit(k)
    g = -np.exp(f64(A_log)) * np.logaddexp(0, a + f64(dt_bias))
    beta = 1 / (1 + np.exp(-b))
    S, os_, Ss = states, [], []
    for t in range(T):
        S = S * np.exp(g[:, t])[..., None, None]
        u = beta[:, t][..., None] * (v[:, t] - np.einsum("nhk,nhkv->nhv", k[:, t], S))
        S = S + np.einsum("nhk,nhv->nhkv", k[:, t], u)
        os_.append(SCALE * np.einsum("nhk,nhkv->nhv", q[:, t], S)); Ss.append(S)
    return np.stack(os_, 1), np.stack(Ss, 1)


def worst(expected, got):
    e, g = f64(expected), f64(got)
    return float(np.sqrt(((e - g) ** 2).mean(axis=-1) / (e ** 2).mean(axis=-1)).max() if e.ndim == 1 else
                 np.sqrt(((e - g) ** 2).reshape(len(e), -1).mean(1) / (e ** 2).reshape(len(e), -1).mean(1)).max())


def kv_of(states, kv):
    return f64(states) if kv else np.swapaxes(f64(states), -1, -2)


def some(N):
    return sorted({0, N // 3, N - 1})


# ---- kinds: each gives (jitted function of (donated, rest), donated pytree, rest, check(out, donated_before)) ----

def plain(N, T, dtype, kv, config):
    of = max(SLOTS if dtype == "bfloat16" or N * (T + 1) > 512 else 512, 1)
    if T > 1:
        of = N * T + 64
    order = slots(N * max(T, 1), of)
    read, write = (order[:N], order[:N, None]) if T == 1 else (order.reshape(N, T)[:, 0], order.reshape(N, T))
    read, write = jnp.asarray(read), jnp.asarray(write)

    def f(pool, q, k, v, a, b, read, write):
        call = step_stream.step_stream if isinstance(config, ring_step.Config) else step.step
        return call(q, k, v, a, b, pool, A_log=A_log, dt_bias=dt_bias, read_slots=read, write_slots=write,
                         scale=SCALE, kv_layout=kv, config=config)

    make = lambda: normal(9, (of, HV, K, V), dtype)
    rest = (*tokens(N, T), read, write)

    def check(run):
        pool = make(); rows = some(N)
        before = kv_of(pool[read[jnp.asarray(rows)]], kv)
        o, pool = run(pool, *rest)
        eo, eS = reference(rows, N, T, before)
        errors = [worst(eo, o[jnp.asarray(rows)])]
        got = kv_of(pool[write[jnp.asarray(rows)].reshape(-1)], kv).reshape(eS.shape)
        errors.append(worst(eS, got))
        return errors, (5e-3, 5e-3 if dtype == "bfloat16" else 1e-5), pool
    return f, make, rest, check


def ring(N, T, dtype, kv, config, counts):
    """A call of the kernel alone: rings with `counts` tokens (a number, or "mixed")."""
    of = SLOTS
    read = jnp.asarray(slots(N, of))
    c = np.arange(N) % L if counts == "mixed" else np.full(N, counts)
    held = jnp.asarray(c.astype(np.int32))

    def f(pool, q, k, v, a, b, read, held):
        out = ring_step.ring_step(q, k, v, a, b, *pool, A_log=A_log, dt_bias=dt_bias, read_slots=read, held=held,
                                  deferred=T == 1, scale=SCALE, kv_layout=kv, config=config)
        return out[0], tuple(out[1:])

    def make_():
        k = normal(11, (of, Hk, L, K), jnp.float32)
        k = (k / jnp.sqrt(jnp.sum(k * k, -1, keepdims=True))).astype(jnp.bfloat16)
        return (normal(9, (of, HV, K, V), dtype), k, normal(12, (of, HV, L, V), jnp.bfloat16),
                -jnp.abs(normal(13, (of, HV, L), jnp.float32)) / 8)
    make = make_
    rest = (*tokens(N, T), read, held)

    def present(pool, rows, counts):
        S, k, u, g = (f64(x[read[jnp.asarray(rows)]]) for x in pool)
        S = S if kv else np.swapaxes(S, -1, -2)
        out = []
        for i, n in enumerate(counts):
            since = np.cumsum(g[i][:, :n][:, ::-1], 1)[:, ::-1]
            D = np.exp(np.concatenate([since, np.zeros((HV, 1))], 1))
            kk = np.repeat(k[i][:, :n], HV // Hk, 0)
            out.append(D[:, 0, None, None] * S[i] + np.einsum("hj,hjk,hjv->hkv", D[:, 1:], kk, u[i][:, :n]))
        return np.stack(out)

    def check(run):
        pool = make(); rows = some(N); n = [int(c[r]) for r in rows]
        before = present(pool, rows, n)
        o, pool = run(pool, *rest)
        eo, eS = reference(rows, N, T, before)
        after = [0 if T == 1 and m + 1 >= L else min(m + T, L) for m in n]
        errors = [worst(eo, o[jnp.asarray(rows)]), worst(eS[:, -1], present(pool, rows, after))]
        return errors, (5e-3, 5e-3), pool
    return f, make, rest, check


def public(N, T, dtype, length, kv=True):
    """The public call on a ring (length 16) or a plain pool (length 1), with everything around the kernels."""
    of = SLOTS
    read = jnp.asarray(slots(N, of))
    gates = dict(A_log=A_log, dt_bias=dt_bias, state_layout="kv" if kv else "vk")
    accepted = jnp.full(N, T, jnp.int32)

    def f(pool, q, k, v, a, b, read):
        x = (q, k, v, a, b)
        if T == 1:
            o, pool = serving.decode(*(y[:, 0] for y in x), pool, read_slots=read, **gates)
            return o[:, None], pool
        return serving.verify(*x, pool, state_slots=read, num_accepted_tokens=accepted, **gates)

    def make():
        states = normal(9, (of, HV, K, V), dtype)
        return serving.make_ring_pool(states, num_key_heads=Hk) if length > 1 else states
    rest = (*tokens(N, T), read)

    def check(run):
        pool = make(); rows = some(N)
        S = kv_of((pool.state if length > 1 else pool)[read[jnp.asarray(rows)]], kv)
        worst_o = 0.0
        for _ in range(5):       # the ring fills, and is flushed where four tokens are verified
            o, pool = run(pool, *rest)
            eo, eS = reference(rows, N, T, S)
            S = eS[:, -1]
            worst_o = max(worst_o, worst(eo, o[jnp.asarray(rows)]))
        return [worst_o], (1e-2,), pool
    return f, make, rest, check


def rows_to_time():
    C, R = step.Config, ring_step.Config
    f32, bf = "float32", "bfloat16"
    # A call of the public functions: what users get. Averaged over a period of 16 tokens (or 4 calls of 4).
    for N, dtype in itertools.product((128, 1, 32, 512), (f32, bf)):
        yield f"public deferred", N, 1, dtype, functools.partial(public, N, 1, dtype, 16), 16
    for dtype in (f32, bf):
        yield f"public verify ring", 128, 4, dtype, functools.partial(public, 128, 4, dtype, 16), 4
        yield f"public verify ring", 1, 4, dtype, functools.partial(public, 1, 4, dtype, 16), 4
    # The kernel alone.
    variants = {"4 wg, 5 x 8 KB": R(128), "4 wg, 3 x 16 KB": R(128, 4, 3, 16384), "6 wg, 3 x 8 KB": R(128, 6, 3, 8192),
                "8 wg, 2 x 8 KB": R(128, 8, 2, 8192), "8 wg, 4 x 4 KB": R(128, 8, 4, 4096), "64 entries, 8 wg": R(64, 8, 4, 4096)}
    for dtype, (name, config) in itertools.product((f32, bf), variants.items()):
        yield f"ring, {name}", 128, 1, dtype, functools.partial(ring, 128, 1, dtype, True, config, 7), 1
    for dtype in (f32, bf):
        yield "ring, empty", 128, 1, dtype, functools.partial(ring, 128, 1, dtype, True, None, 0), 1
        yield "ring, full", 128, 1, dtype, functools.partial(ring, 128, 1, dtype, True, None, 15), 1
        yield "ring, mixed", 128, 1, dtype, functools.partial(ring, 128, 1, dtype, True, None, "mixed"), 1
        yield "ring, vk", 128, 1, dtype, functools.partial(ring, 128, 1, dtype, False, None, 7), 1
        yield "verify ring", 128, 4, dtype, functools.partial(ring, 128, 4, dtype, True, None, 7), 1
        yield "verify ring, 4 wg, 3 x 16", 128, 4, dtype, functools.partial(ring, 128, 4, dtype, True, R(128, 4, 2, 16384), 7), 1
        yield "verify ring, vk", 128, 4, dtype, functools.partial(ring, 128, 4, dtype, False, None, 7), 1
    # Plain, and plain verification.
    for dtype, kv in ((f32, True), (bf, True), (bf, False), (f32, False)):
        for name, config in PLAIN[dtype, kv].items():
            yield f"plain {'kv' if kv else 'vk'}, {name}", 128, 1, dtype, functools.partial(plain, 128, 1, dtype, kv, config), 1
    for dtype, kv in ((f32, True), (f32, False), (bf, True), (bf, False)):
        for name, config in DRAFTS[dtype, kv].items():
            yield f"verify plain {'kv' if kv else 'vk'}, {name}", 128, 4, dtype, functools.partial(plain, 128, 4, dtype, kv, config), 1


C, R = step.Config, ring_step.Config
STREAM = {"float32": {"stream 3 wg": R(128, 3, 99, 8192), "stream 3 wg, 16 KB": R(128, 3, 99, 16384), "stream 5 wg, 64 entries": R(64, 5, 99, 8192)},
          "bfloat16": {"stream 5 wg": R(128, 5, 99, 8192), "stream 4 wg": R(128, 4, 99, 8192), "stream 8 wg, 64 entries": R(64, 8, 99, 4096)}}
PLAIN = {("float32", True): {"default": None} | STREAM["float32"], ("float32", False): {"default": None, "stream 3 wg": R(128, 3, 99, 8192)},
         ("bfloat16", True): {"default": None} | STREAM["bfloat16"], ("bfloat16", False): {"default": None, "stream 5 wg": R(128, 5, 99, 8192)}}
DRAFTS = {("float32", True): {"default": None, "64 entries": C(64), "stream 3 wg": R(128, 3, 99, 8192)},
          ("float32", False): {"default": None, "stream 3 wg": R(128, 3, 99, 8192)},
          ("bfloat16", True): {"default": None, "32, not across": C(32), "64, not across": C(64), "128 across": C(128, True), "stream 4 wg": R(128, 4, 99, 8192), "stream 5 wg": R(128, 5, 99, 8192)},
          ("bfloat16", False): {"default": None, "stream 4 wg": R(128, 4, 99, 8192)}}


def compile_(row):
    name, N, T, dtype, make, period = row
    f, pool, rest, check = make()
    shapes = jax.eval_shape(pool) if not name.startswith("public") else jax.eval_shape(pool)
    lowered = jax.jit(f, donate_argnums=0).trace(shapes, *rest)
    if SMALL:
        lowered.lower(lowering_platforms=("cuda",)); return None
    return lowered.lower().compile(compiler_options=GRAPH_OPTIONS), pool, rest, check


def show(name, N, T, dtype, text):
    print(f"{name:34} batch {N:4} tokens {T} {dtype:8} {text}   [{time.time() - START:5.1f} s]", flush=True)


def main():
    table = list(rows_to_time())
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(compile_, row) for row in table]
        for row, future in zip(table, futures):
            name, N, T, dtype, _, period = row
            if time.time() - START > LIMIT:
                show(name, N, T, dtype, "not run: out of time"); continue
            try:
                done = future.result()
                if SMALL:
                    show(name, N, T, dtype, "lowers"); continue
                run, make, rest, check = done
                errors, bounds, pool = check(run)
                wrong = any(not e <= b for e, b in zip(errors, bounds))

                def once():
                    nonlocal pool
                    for _ in range(period):
                        o, pool = run(pool, *rest)
                    jax.block_until_ready(pool)
                once()
                profile = device_time.profile(once, 11)
                timing = spans(profile, 11, period)
                show(name, N, T, dtype, f"{timing:7.1f} us  errors {' '.join(f'{e:.1e}' for e in errors)}{'  WRONG' if wrong else ''}")
                del pool, done, run
            except Exception as error:
                show(name, N, T, dtype, f"FAILED {type(error).__name__}: {str(error)[:150]}")
                if os.environ.get("TRACE"):
                    traceback.print_exc()


def spans(profile, calls, period):
    """Microseconds of one call: from a call's first kernel to its last one's end, averaged over a period, median."""
    found = device_time.kernels(profile)
    n = len(found) // (calls * period)
    assert n and len(found) == n * calls * period, f"{len(found)} kernels in {calls * period} calls"
    each = [max(k.end_ns for k in found[i : i + n]) - found[i].start_ns for i in range(0, len(found), n)]
    return float(np.median([np.mean(each[i : i + period]) for i in range(0, len(each), period)])) / 1e3


if __name__ == "__main__":
    main()
