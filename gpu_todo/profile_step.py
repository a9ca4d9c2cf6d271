import json, os, sys
from gdn_jax.checks import device_time
from gdn_jax.experiments import step_bench
import jax
out = sys.argv[1]
def dump(once, calls=3):
    ks = device_time.kernels(device_time.profile(lambda: jax.block_until_ready(once()), calls))
    n = len(ks) // calls
    one = ks[n:2*n]
    json.dump([(k.name, k.start_ns - one[0].start_ns, k.end_ns - k.start_ns) for k in one], open(out, "w"))
    gaps = [b.start_ns - a.end_ns for a, b in zip(one, one[1:])]
    print("kernels", n, "span ms", (one[-1].end_ns - one[0].start_ns) / 1e6, "gaps ms", sum(g for g in gaps if g > 0) / 1e6, "over 5us", sum(g for g in gaps if g > 5000) / 1e6)
    return {}, {}
step_bench._kinds = dump
options = step_bench.StepBenchOptions(lengths=(8192,), options=tuple(sys.argv[2:]))
r = step_bench.measure(step_bench.config_of(options), options, 8192)
print(r)
