"""Trains recall by a config with changes, and prints the accuracy of every case by step.

python .gpu/recall_pilot.py NAME CONFIG MIXER EVERY SECONDS [option=json ...]     options of the sweep; lrs run side by side
"""
import json, sys, time
from pathlib import Path
import jax
from gdn_jax.experiments import options as options_lib
from gdn_jax.experiments.options import ModelOptions, OptimizerOptions, RunOptions, TrainOptions
from gdn_jax.experiments.sweeps import sweep
from gdn_jax.experiments.sweeps.options import GridOptions, PRESETS, check, from_json
from gdn_jax.experiments.tasks.table import make_task

name, config, mixer, every, limit, *changes = sys.argv[1:]
content = json.loads(Path(config).read_text())
stored, kind = content["options"], content.get("task", "sweep recall").split()[1]
stored = options_lib.to_json(PRESETS[kind][stored["size"]]) | stored | {"mixers": [mixer], "lr_seeds": None, "seeds": 1, "scales": [1]}
stored |= {k: json.loads(v) for k, v in (c.split("=", 1) for c in changes)}
stored["together"] = stored["seeds"] * len(stored["lrs"])
o = from_json(kind, stored, GridOptions())
check(o)
g = o.sweep
task = make_task(TrainOptions(o.task, RunOptions(seed=0, batch_size=g.batch_size), ModelOptions(), OptimizerOptions()))
runs = [sweep.Run(mixer, lr, seed) for lr in g.lrs for seed in range(g.seeds)]
program = sweep.Program(o, task, mixer)
state = sweep.make_start(o, task, mixer)(runs)
tests = {n: [p for b in bs for p in b.cut(min(64, g.batch_size))][:4] for n, bs in task.test_batches(g.batch_size).items()}
begin = time.monotonic(); took = 0.0
step = 0
print(f"{name} {mixer} start {' '.join(changes)} params {program.parameters}", flush=True)
while step < g.steps and time.monotonic() - begin < float(limit):
    last = min(step + int(every), g.steps)
    t = time.monotonic()
    state = program.advance(state, step, last)
    jax.block_until_ready(state.state.params)
    took, did, step = time.monotonic() - t, last - step, last
    scores = {n: program.score(state, bs) for n, bs in tests.items()}
    for r, run in enumerate(runs):
        acc = " ".join(f"{n}:{100 * s[r][1]:5.1f}({s[r][0]:.2f})" for n, s in scores.items())
        print(f"{name} {mixer} lr {run.lr:g} seed {run.seed} step {step} {acc}  {1e3 * took / did:.1f} ms/step {time.monotonic() - begin:.0f} s", flush=True)
