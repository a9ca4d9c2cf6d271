"""merge.py RESULT FILE MIXERS RUNS.jsonl...: joins lines into results/RESULT with the config of the first folder."""
import json, sys, itertools
from pathlib import Path
from gdn_jax.experiments.options import ModelOptions, OptimizerOptions, RunOptions, TrainOptions
from gdn_jax.experiments.sweeps import options, sweep, summary
from gdn_jax.experiments.tasks.table import make_task
name, file, mixers, scales, *sources = sys.argv[1:]
mixers, scales = mixers.split(","), [int(x) for x in scales.split(",")]
folder = Path("results") / name
folder.mkdir(exist_ok=True)
base = folder if (folder / "config.json").exists() else Path(sources[0]).parent
config = json.loads((base / "config.json").read_text())
lines = {}
for s in sources:
    c = json.loads((Path(s).parent / "config.json").read_text()) if (Path(s).parent / "config.json").exists() else config
    skip = {"mixers", "scales", "together"}
    assert {k: v for k, v in c["options"].items() if k not in skip} == {k: v for k, v in config["options"].items() if k not in skip}, s
    assert c["data"]["fingerprint"] == config["data"]["fingerprint"] and c["versions"]["jax"] == config["versions"]["jax"], s
    for x in Path(s).read_text().splitlines():
        r = json.loads(x)
        lines.setdefault((r["mixer"], r["scale"], r["lr"], r["seed"]), x)
stored = json.loads(Path(f"results/configs/{file}").read_text())["options"]
config["options"] |= {"mixers": mixers, "scales": scales, "together": stored.get("together", 1)}
sub = "" if mixers == stored["mixers"] else " --mixers " + " ".join(mixers)
task_name = config["task"].split()[1]
config["command"] = f"gdn sweep {task_name} --out runs/{name} --config results/configs/{file}{sub}"
o = options.from_json(task_name, config["options"], options.GridOptions())
want = [k for m, s in itertools.product(o.sweep.mixers, o.sweep.scales) for k in sweep.wanted(o, m, s, [], config["about"]["metric"])]
out = [lines[r.mixer, r.scale, r.lr, r.seed] for r in want]
(folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
(folder / "runs.jsonl").write_text("".join(x + "\n" for x in out))
task = make_task(TrainOptions(o.task, RunOptions(seed=o.sweep.data_seed, batch_size=o.sweep.batch_size), ModelOptions(), OptimizerOptions()))
about = summary.About(**config["about"])
class Fixed:  # the task as the machine of the runs saw it
    def __getattr__(self, k): return getattr(task, k)
if summary.About.of(task) != about:
    print("another text here; about of the runs is kept")
    summary.About.of = classmethod(lambda cls, t: about)
print(sweep.write_results(o, task, folder, config, [json.loads(x) for x in out]))
