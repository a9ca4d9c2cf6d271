"""python step.py MIXER STEPS [tiny]: seconds and kernels of a step of needle_3's sweep, alone on the device."""
import json, sys, time, os
t0 = time.perf_counter()
import jax
from gdn_jax.checks import device_time
from gdn_jax.experiments.options import ModelOptions, OptimizerOptions, RunOptions, TrainOptions
from gdn_jax.experiments.sweeps import options, sweep
from gdn_jax.experiments.tasks.table import make_task
mixer, n = sys.argv[1], int(sys.argv[2]); tiny = "tiny" in sys.argv
stored = json.load(open("results/configs/needle_3.full.json"))["options"] | {"packages": False}
if tiny: stored |= dict(hidden_size=32, num_layers=1, implementation="chunked", dtype="float32", length=256, test_lengths=[256], batch_size=2, val_sequences=4)
import dataclasses
from gdn_jax.experiments.sweeps.options import GridOptions
import tempfile
p = tempfile.mktemp(suffix=".json"); json.dump({"task": "sweep sentence", "options": stored}, open(p, "w"))
import inspect
from pathlib import Path
o = options.from_file("sentence", Path(p), GridOptions())
task = make_task(TrainOptions(o.task, RunOptions(seed=0, batch_size=o.sweep.batch_size), ModelOptions(), OptimizerOptions()))
clock = lambda: round(time.perf_counter() - t0, 1)
print("task at", clock(), flush=True)
program = sweep.Program(o, task, mixer); start = sweep.make_start(o, task, mixer)
runs = start([sweep.Run(mixer, 0.003, 0, 1)]); jax.block_until_ready(runs.state); print("weights at", clock(), flush=True)
runs = program.advance(runs, 0, 2); print("compiled at", clock(), flush=True)
for a in range(3):
    t = time.perf_counter(); runs = program.advance(runs, 2, 2 + n); print(f"{(time.perf_counter() - t) / n * 1e3:.2f} ms a step", flush=True)
if jax.default_backend() == "gpu":
    state = [runs]
    def once(): state[0] = program.advance(state[0], 2, 7)
    found = device_time.kernels(device_time.profile(once, 2))
    span = (max(k.end_ns for k in found) - min(k.start_ns for k in found)) / 1e6
    print(f"kernels {sum(k.end_ns - k.start_ns for k in found) / 1e6 / 10:.2f} ms a step, {len(found) / 10:.0f} of them, span {span / 10:.2f}")
    for x in device_time.by_kernel(found, 10)[:28]: print("  ", x, flush=True)
print("end", clock())
