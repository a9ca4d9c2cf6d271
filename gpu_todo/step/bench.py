"""Products with the SwiGLU in their epilogue beside cuBLAS and the kernel behind it: device, back to back."""

import os
import signal
import statistics
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import products as p
from gdn_jax.fused.swiglu import side_by_side, swiglu
from pallas_kernels.layer import swiglu as kernel

START = time.time()
LIMIT = float(sys.argv[1]) if len(sys.argv) > 1 else 140  # seconds after which no variant is begun
M, D, F = 65536, 1024, 2736
bf, f32 = jnp.bfloat16, jnp.float32
keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 8)
x = jax.random.normal(keys[0], (M, D), bf)
dy = jax.random.normal(keys[1], (M, D), bf)
gate, up = ((jax.random.normal(k, (D, F), f32) / D**0.5).astype(bf) for k in keys[2:4])
down = (jax.random.normal(keys[4], (F, D), f32) / F**0.5).astype(bf)
FLOPS = 2 * M * D * F * 1e-9  # of a product of F columns, in TFLOP / (ms / 1000)


def timed(f, *args, seconds=0.9):
    """ms a call, calls without a pause: of five parts of the time, median, and the largest less the least."""
    jax.block_until_ready(f(*args))
    t = time.perf_counter()
    for _ in range(5):
        r = f(*args)
    jax.block_until_ready(r)
    n = max(5, int(seconds / 5 / ((time.perf_counter() - t) / 5)))
    parts = []
    for part in range(6):  # the first warms up
        t = time.perf_counter()
        for _ in range(n):
            r = f(*args)
        jax.block_until_ready(r)
        parts.append((time.perf_counter() - t) / n * 1e3)
    parts = parts[1:]
    return statistics.median(parts), max(parts) - min(parts)


def rms(a, b):
    a, b = a.astype(f32), b.astype(f32)
    return float(jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2)))


def line(name, ms, products, note=""):
    print(f"{name:44} {ms[0]:7.4f} +-{ms[1]:6.4f} ms {products * FLOPS / ms[0]:6.0f} TFLOP/s  {note}", flush=True)


BEGUN = "/tmp/step_bench_begun"  # a variant that hangs ends the process; run.sh starts it again without that one
SKIP = open(BEGUN).read().splitlines() if os.path.exists(BEGUN) else []


def attempt(name, products, f, check, *args):
    if name in SKIP:
        return
    with open(BEGUN, "a") as file:
        print(name, file=file)
    signal.alarm(40)
    if time.time() - START > LIMIT:
        return print(f"{name:44} left out: time")
    try:
        note = check(f(*args), f(*args))
        line(name, timed(f, *args), products, note)
    except Exception:
        print(f"{name:44} FAILED", traceback.format_exc().strip().splitlines()[-1][:150], flush=True)


EDGES = np.r_[0:256, M - 256 : M]
HIGH = jax.lax.Precision.HIGHEST


@jax.jit
def reference(x, dy, gate, up, down):
    x, dy, gate, up, down = (y.astype(f32) for y in (x, dy, gate, up, down))
    a, b = jnp.dot(x, gate, precision=HIGH), jnp.dot(x, up, precision=HIGH)
    ar, br = a.astype(bf).astype(f32), b.astype(bf).astype(f32)
    s = jax.nn.sigmoid(ar)
    dh = jnp.dot(dy, down.T, precision=HIGH)
    return a, b, ar * s * br, dh * br * s * (1 + ar * (1 - s)), dh * ar * s


a_ref, b_ref, h_ref, da_ref, db_ref = reference(x[EDGES], dy[EDGES], gate, up, down)
print(jax.__version__, jax.devices()[0].device_kind, "error: rms(ab) rms(h) or rms(da) rms(db), same bits twice")

# ---- forward
w16 = side_by_side(gate, up)
w32 = p.interleave(gate, up, 32)


def check_forward(group, pair=True):
    def check(one, two):
        one, two = (list(o.values()) if isinstance(o, dict) else list(o) for o in (one, two))
        same = all(bool(jnp.array_equal(a, b)) for a, b in zip(one, two, strict=True))
        a, b = p.separate(one[0][EDGES], group, F)
        e = [rms(a, a_ref), rms(b, b_ref)]
        if pair:
            e.append(rms(one[1][EDGES][:, :F], h_ref))
        return " ".join(f"{v:.1e}" for v in e) + f" {same}"

    return check


def today(x, w):
    ab = x @ w
    return ab, kernel.swiglu(ab.reshape(-1)).reshape(M, F)


plain = jax.jit(lambda x, w: (x @ w,))
today = jax.jit(today)
ref_ab, _ = today(x, w16)
attempt("cuBLAS 5472", 2, plain, check_forward(16, False), x, w16)
attempt("cuBLAS 5504", 2, plain, check_forward(32, False), x, w32)
attempt("TODAY forward: cuBLAS + kernel", 2, today, check_forward(16), x, w16)
C = p.Config
for name, c in {
    "product only, no cluster": C(cluster=1, product=False),
    "product only, cluster": C(product=False),
    "no cluster": C(cluster=1),
    "cluster": C(),
    "cluster, lead 2": C(lead=2),
    "cluster, lead 3": C(lead=3),
    "cluster, [K, N] weights": C(k_major=False),
    "cluster, band 4": C(band=4),
    "cluster, band 16": C(band=16),
    "cluster, out 32 x 2": C(out_columns=32, out_slots=2, group=16),
    "cluster, group 16, not padded": C(group=16),
    "cluster, 3 stages, out 64 x 3": C(stages=3, out_slots=3),
    "no cluster, lead 2, band 8": C(cluster=1, lead=2, band=8),
}.items():
    w = w16 if c.group == 16 else w32
    f = lambda x, w, c=c: p.forward(x, w, config=c)
    attempt(f"forward {name}", 2, f, check_forward(c.group, c.product), x, w.T.copy() if c.k_major else w)
attempt("TODAY forward again", 2, today, check_forward(16), x, w16)

# ---- backward
ab16 = ref_ab
ab32 = jax.jit(lambda ab: p.interleave(*p.separate(ab, 16, F), 32))(ab16)
down32 = jnp.pad(down, ((0, -F % 32), (0, 0)))


def check_backward(group):
    def check(one, two):
        same = bool(jnp.array_equal(one, two))
        a, b = p.separate(one[EDGES], group, F)
        return f"{rms(a, da_ref):.1e} {rms(b, db_ref):.1e} {same}"

    return check


def today_backward(dy, down, ab):
    dh = jnp.einsum("...e,fe->...f", dy, down)
    return kernel.swiglu_backward(ab.reshape(-1), dh.reshape(-1)).reshape(ab.shape)


today_backward = jax.jit(today_backward)
attempt("cuBLAS dy down^T", 1, jax.jit(lambda a, b, c: a @ b.T), lambda a, b: "", dy, down, ab16)
attempt("TODAY backward: cuBLAS + kernel", 1, today_backward, check_backward(16), dy, down, ab16)
for name, c in {
    "no cluster": C(cluster=1),
    "cluster": C(),
    "cluster, lead 2": C(lead=2),
    "cluster, lead 3": C(lead=3),
    "cluster, band 4": C(band=4),
    "cluster, band 16": C(band=16),
    "no cluster, lead 2, band 8": C(cluster=1, lead=2, band=8),
}.items():
    f = lambda dy, w, ab, c=c: p.backward(dy, w, ab, config=c)
    attempt(f"backward {name}", 1, f, check_backward(32), dy, down32, ab32)
attempt("TODAY backward again", 1, today_backward, check_backward(16), dy, down, ab16)


# ---- the whole part of a layer, forward and backward
def whole_today(x, gate, up, down, dy):
    y, vjp = jax.vjp(swiglu, x, gate, up, down)
    return y, *vjp(dy)


def whole(x, gate, up, down, dy, *, forward, backward):
    g = forward.group
    w = p.interleave(gate, up, g)
    wide = jnp.pad(down, ((0, -F % g), (0, 0)))
    ab, h = p.forward(x, w.T if forward.k_major else w, config=forward).values()
    y = h @ wide
    if backward is None:
        dab = today_backward(dy, wide, ab)
    else:
        dab = p.backward(dy, wide, ab, config=backward)
    dx = jnp.einsum("...f,df->...d", dab, w)
    dw = jnp.einsum("...d,...f->df", x, dab)
    return y, dx, *p.separate(dw, g, F), jnp.einsum("...f,...e->fe", h, dy)[:F]


def check_whole(one, two):
    same = all(bool(jnp.array_equal(a, b)) for a, b in zip(one, two, strict=True))
    return " ".join(f"{rms(a, b):.0e}" for a, b in zip(one, want, strict=True)) + f" {same}"


whole_today = jax.jit(whole_today)
want = whole_today(x, gate, up, down, dy)
args = (x, gate, up, down, dy)
versions = {
    "TODAY": whole_today,
    "forward only, group 16": jax.jit(lambda *a: whole(*a, forward=C(group=16), backward=None)),
    "both": jax.jit(lambda *a: whole(*a, forward=C(), backward=C())),
    "both, lead 2": jax.jit(lambda *a: whole(*a, forward=C(lead=2), backward=C(lead=2))),
    "both, no cluster, lead 2, band 8": jax.jit(
        lambda *a: whole(*a, forward=C(cluster=1, lead=2, band=8), backward=C(cluster=1, lead=2, band=8))
    ),
    "TODAY again": whole_today,
}
for name, f in versions.items():
    attempt(f"SwiGLU, {name}", 9, f, check_whole, *args)
signal.alarm(0)
print(f"{time.time() - START:.0f} s")
