"""The training step of 0.4b with the SwiGLU as it was and as it is, in turns, in one process."""

import sys
import time

import gdn_jax.parallel.channels_on_mesh as channels
import jax
import jax.numpy as jnp
import numpy as np
import old_swiglu
from flax import nnx
from gdn_jax.checks import device_time
from gdn_jax.experiments import step_bench, steps
from gdn_jax.experiments.options import ScheduleOptions
from gdn_jax.experiments.steps import TrainState
from gdn_jax.experiments.tasks.batch import Batch
from gdn_jax.models import LanguageModel
from gdn_jax.parallel.channels_on_mesh import fused_swiglu as new

START = time.time()
length, layers = int(sys.argv[1]), int(sys.argv[2])
MODE = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
VARIANTS = {"old": (old_swiglu.swiglu, {}), "new": (new, {}), "new, concurrent": (new, MODE)}
wanted = sys.argv[3:] or ["old", "new"]
config = step_bench.config_of(step_bench.StepBenchOptions(options=(f"num_layers={layers}",)))
graphdef, params, rest = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
optimizer = steps.make_optimizer(ScheduleOptions(), 1000, 1e-3)
first = TrainState(params, jax.jit(optimizer.init)(params))
rows = 65536 // length
text = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length + 1)).astype(np.int32)
batch = jax.device_put(Batch(text[:, :-1], text[:, 1:], np.ones((rows, length), np.float32)))
print(f"{jax.__version__}, {layers} layers, rows of {length}, ready after {time.time() - START:.0f} s", flush=True)


def copy():
    return jax.tree.map(jnp.copy, first)


programs = {}
for name in wanted:
    began = time.time()
    channels.fused_swiglu, options = VARIANTS[name]

    def train(state, batch):
        return steps.train_step(graphdef, rest, optimizer, 1, state, batch)

    options = {"xla_gpu_deterministic_ops": True} | options
    compiled = jax.jit(train, donate_argnums=0, compiler_options=options).lower(copy(), batch).compile()
    runs = []
    for _ in range(2):
        state, found = copy(), []
        for _ in range(3):
            state, metrics = compiled(state, batch)
            found.append(float(metrics.loss))
        runs.append((found, jax.tree.map(lambda x: jnp.sum(jnp.abs(x)), state.params)))
    del state
    same = all(bool(a == b) for a, b in zip(*map(jax.tree.leaves, runs), strict=True))
    gib = compiled.memory_analysis().temp_size_in_bytes / 2**30
    losses = " ".join(f"{x:.6f}" for x in runs[0][0])
    print(f"{name}: {gib:.2f} GiB, losses {losses}, two runs the same {same}, {time.time() - began:.0f} s", flush=True)
    programs[name] = compiled


def measure(compiled, count=6):
    state = copy()
    for _ in range(2):
        state, metrics = compiled(state, batch)
    jax.block_until_ready(metrics)
    began = time.perf_counter()
    for _ in range(count):
        state, metrics = compiled(state, batch)
    jax.block_until_ready(metrics)
    return (time.perf_counter() - began) / count * 1e3


times = {name: [] for name in programs}
for _ in range(4):
    for name, compiled in programs.items():
        times[name].append(measure(compiled))
for name, found in times.items():
    ms = float(np.median(found))
    print(f"{name:18} {ms:8.2f} ms, {65536 / ms * 1e3:.0f} tokens/s; all: " + " ".join(f"{t:.2f}" for t in found))
for name, compiled in programs.items():
    state = copy()

    def once():
        global state
        state, metrics = compiled(state, batch)
        return metrics

    kinds, kernels = step_bench._kinds(once)
    print(name, {k: round(v, 1) for k, v in kinds.items()}, flush=True)
    longest = [f"{k[:44]} {v:.2f}" for k, v in kernels.items() if "swiglu" in k or "nvjet" in k][:9]
    print("   " + "; ".join(longest))
    del state
print(f"{time.time() - START:.0f} s")
