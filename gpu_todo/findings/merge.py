"""PYTHONPATH=$PWD python .gpu/findings/merge.py RESULT CONFIG TASK FOLDER...: joins the folders of a sweep's mixers.

RESULT: results/RESULT is written, with the command that makes all of it. Refuses folders that are not finished, that differ in
their options, text or versions, and a grid that is not whole (a mixer without a folder is left out, and the command says so).
    merge.py recall_again_h200 recall_again.full.json recall /tmp/x/recall_again-*
    merge.py recall_longer_h200 recall_longer.full.json recall /tmp/x/recall_longer-*
    merge.py parity_far_h200 parity_far.full.json parity /tmp/x/parity_far-*
"""
import itertools, json, os, sys
from pathlib import Path
from gdn_jax.experiments.options import ModelOptions, OptimizerOptions, RunOptions, TrainOptions
from gdn_jax.experiments.sweeps import options, sweep
from gdn_jax.experiments.tasks.table import make_task

name, file, task_name, *folders = sys.argv[1:]
folders = [Path(f) for f in folders if (Path(f) / "table.md").exists()]
configs = [json.loads((f / "config.json").read_text()) for f in folders]
config, stored = configs[0], json.loads(Path(f"results/configs/{file}").read_text())["options"]
for f, c in zip(folders, configs):
    assert all(c["options"][k] == v for k, v in stored.items() if k not in ("mixers", "scales")), f
    assert {**c["options"], "mixers": 0} == {**config["options"], "mixers": 0}, f
    assert c["data"] == config["data"] and c["versions"] == config["versions"], f
lines = [json.loads(x) for f in folders for x in (f / "runs.jsonl").read_text().splitlines()]
mixers = [m for m in stored["mixers"] if m in {x["mixer"] for x in lines}]
config["options"]["mixers"] = mixers
some = "" if mixers == stored["mixers"] else " --mixers " + " ".join(mixers)
config["command"] = f"gdn sweep {task_name} --out runs/{name} --config results/configs/{file}{some}{os.environ.get("SOME","")}"
o = options.from_json(task_name, config["options"], options.GridOptions())
by_run = {sweep.as_run(x): x for x in lines}
grid = itertools.product(o.sweep.mixers, o.sweep.scales)
records = [by_run[r] for m, s in grid for r in sweep.wanted(o, m, s, lines, config["about"]["metric"])]
assert len(records) == len(lines) == sweep.count(o)
folder = Path("results") / name
folder.mkdir(exist_ok=True)
(folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
(folder / "runs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
task = make_task(TrainOptions(o.task, RunOptions(seed=o.sweep.data_seed, batch_size=o.sweep.batch_size), ModelOptions(), OptimizerOptions()))
print(sweep.write_results(o, task, folder, config, records))
print("commits", {x["commit"] for x in records}, "mixers", mixers, "seconds", round(sum(x["wall"]["seconds"] for x in records)))
