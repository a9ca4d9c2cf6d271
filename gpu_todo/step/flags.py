"""The training step of 0.4b under compiler options that decide how its kernels become CUDA graphs, in turns."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gdn_jax.experiments import step_bench, steps
from gdn_jax.experiments.options import ScheduleOptions
from gdn_jax.experiments.steps import TrainState
from gdn_jax.experiments.tasks.batch import Batch
from gdn_jax.models import LanguageModel

START = time.time()
layers, limit = int(sys.argv[1]), float(sys.argv[2])
MODE = "xla_gpu_command_buffer_scheduling_mode"
KINDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
VARIANTS = {
    "as it is": {},
    "concurrent": {MODE: "CONCURRENT"},
    "concurrent regions": {MODE: "CONCURRENT_REGIONS"},
    "loops too": {"xla_gpu_enable_command_buffer": KINDS + ",WHILE"},
    "no graphs": {"xla_gpu_enable_command_buffer": ""},
    "graphs from 1": {"xla_gpu_graph_min_graph_size": 1},
}
wanted = sys.argv[3:] or ["as it is", "concurrent", "concurrent regions"]
config = step_bench.config_of(step_bench.StepBenchOptions(options=(f"num_layers={layers}",)))
graphdef, params, rest = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
optimizer = steps.make_optimizer(ScheduleOptions(), 1000, 1e-3)
first = TrainState(params, jax.jit(optimizer.init)(params))
text = np.random.default_rng(0).integers(0, config.vocab_size, (8, 8193)).astype(np.int32)
batch = jax.device_put(Batch(text[:, :-1], text[:, 1:], np.ones((8, 8192), np.float32)))
print(f"{jax.__version__}, {layers} layers, ready after {time.time() - START:.0f} s", flush=True)


def copy():
    return jax.tree.map(jnp.copy, first)


programs, losses = {}, {}
for name in wanted:
    if time.time() - START > limit - 30:
        print(f"{name}: left out, no time")
        continue
    began = time.time()

    def train(state, batch):
        return steps.train_step(graphdef, rest, optimizer, 1, state, batch)

    try:
        options = {"xla_gpu_deterministic_ops": True} | VARIANTS[name]
        compiled = jax.jit(train, donate_argnums=0, compiler_options=options).lower(copy(), batch).compile()
        state, found = copy(), []
        for _ in range(3):
            state, metrics = compiled(state, batch)
            found.append(float(metrics.loss).hex())
        del state
    except Exception as error:
        print(f"{name}: {str(error).splitlines()[0][:200]}", flush=True)
        continue
    programs[name], losses[name] = compiled, found
    gib = compiled.memory_analysis().temp_size_in_bytes / 2**30
    same = found == losses[wanted[0]] if wanted[0] in losses else None
    print(f"{name}: {gib:.2f} GiB, losses {found} same {same}, {time.time() - began:.0f} s", flush=True)


def measure(compiled, count=8):
    state = copy()
    state, metrics = compiled(state, batch)
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
    print(f"{name:22} {np.median(found):8.2f} ms a step, all: " + " ".join(f"{t:.2f}" for t in found))
print(f"{time.time() - START:.0f} s")
