"""Seconds. The convolution's backward with its default strip beside 128 and 152, over its floor; results beside those of strips of 128.

    python .gpu/conv.py        8 rows of 8192, 32 of 2048, 2 of 32768; 3072 channels; median of device times
"""
import os, sys, time, json, dataclasses
import jax, jax.numpy as jnp, numpy as np
from gdn_jax.checks import device_time
from pallas_kernels.layer import short_conv as S

def timed(call, n=20):
    for _ in range(5): jax.block_until_ready(call())
    k = device_time.kernels(device_time.profile(lambda: jax.block_until_ready(call()), n))
    each = np.reshape([x.end_ns - x.start_ns for x in k], (n, -1)) / 1e6
    return np.median(each.sum(1)), [(x.name.split("_mosaic")[0][:20], round(float(np.median(each[:, i])), 4)) for i, x in enumerate(k[: each.shape[1]])]

big = jnp.ones((65536, 5472), jnp.float32)
ms, _ = timed(lambda c=jax.jit(jnp.copy): c(big)); speed = 2 * big.nbytes / ms * 1e3; del big
floor = 3 * 65536 * 3072 * 2 / speed * 1e3
print(f"copy {speed/1e12:.3f} TB/s, floor {floor:.4f} ms", flush=True)
rows = []
for B, T in ((8, 8192), (32, 2048), (2, 32768)):
    key = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(key[0], (B, T, 3072)).astype(jnp.bfloat16)
    w = jax.random.normal(key[1], (3072, 4)) * 0.5
    dq, dk = (jax.random.normal(k, (B, T, 8, 128)).astype(jnp.bfloat16) for k in key[2:4])
    dv = jax.random.normal(key[4], (B, T, 1024)).astype(jnp.bfloat16)
    default = S.backward_config(B, T, 24, False)
    like = None
    for strip in dict.fromkeys((128, 152, 192, 376, 250, 188, 752, default.strip, 128)) if T == 8192 else (128, 152, default.strip):
        c = dataclasses.replace(default, strip=strip)
        call = lambda c=c: S.short_conv_backward(x, w, None, dq, dk, dv, config=c)
        dx, dw = call()
        if like is None: like = dx, dw
        off = float(jnp.linalg.norm(dw - like[1]) / jnp.linalg.norm(like[1]))
        same = bool((dx == like[0]).all())
        ms, parts = timed(call)
        rows.append((B, T, strip, strip == default.strip, ms, ms / floor, parts))
        print(f"{B}x{T} strip {strip}{' (default)' if strip == default.strip else ''}: {ms:.4f} ms, {ms/floor:.3f} of the floor; dx same {same}, dw off {off:.1e};", parts, flush=True)
json.dump(rows, open(os.environ.get("OUT", "/tmp") + "/conv.json", "w"))
