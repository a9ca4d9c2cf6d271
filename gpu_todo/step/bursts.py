"""Variants in turns: short bursts of calls without a pause, so that all see the same power and temperature."""

import time

import jax
import numpy as np

START = time.time()


def rounds(title, variants, seconds=0.25, count=7, limit=110):
    """Median over rounds of ms a call, and of the ratio to the first variant in the same round."""
    ready, calls = {}, {}
    for name, (f, args) in variants.items():
        if time.time() - START > limit:
            print(f"{name}: left out, time")
            continue
        try:
            jax.block_until_ready(f(*args))
            t = time.perf_counter()
            for _ in range(5):
                r = f(*args)
            jax.block_until_ready(r)
            calls[name] = max(3, int(seconds / ((time.perf_counter() - t) / 5)))
            ready[name] = []
        except Exception as error:
            print(f"{name}: FAILED {str(error).splitlines()[0][:140]}", flush=True)
    for _ in range(count):
        for name in ready:
            f, args = variants[name]
            t = time.perf_counter()
            for _ in range(calls[name]):
                r = f(*args)
            jax.block_until_ready(r)
            ready[name].append((time.perf_counter() - t) / calls[name] * 1e3)
    first = np.array(next(iter(ready.values())))
    print(title, flush=True)
    for name, ms in ready.items():
        ratio = np.array(ms) / first
        print(f"  {name:36} {np.median(ms):.4f} ms, {np.median(ratio):.4f} of the first ({ratio.min():.3f} to {ratio.max():.3f})", flush=True)
