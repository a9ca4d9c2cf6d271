"""Works at sweeps side by side until the time is over, and packs what they leave. See run.sh.

Waves go one after another: first recall (six processes: three mixers where keys come again, three with longer training), then
parity_far, a mixer each, if enough time is left. A process writes a folder of its own, NAME-MIXER; a line of runs.jsonl is written
only when its run is finished, so what is cut leaves no line. PREV: an unpacked findings.tar to go on with.
"""
import os, shlex, shutil, signal, subprocess, sys, tarfile, threading, time
from pathlib import Path

begin = time.monotonic()
total = float(sys.argv[1])
here, root = Path(__file__).parent, Path(__file__).resolve().parents[2]
out, work = Path(os.environ["OUT"]), Path(os.environ.get("WORK", "/tmp/findings-work"))
extra = shlex.split(os.environ.get("EXTRA", ""))
shutil.rmtree(work, ignore_errors=True)
(work / "logs").mkdir(parents=True)
if prev := os.environ.get("PREV"):
    shutil.copytree(prev, work, dirs_exist_ok=True)
end = total - 12  # a step in flight, packing
RECALL = ("gated_delta_net", "delta_net", "mamba2")
PARITY = ("gated_delta_net_neg", "gated_delta_net", "delta_net", "mamba2", "softmax_attention", "linear_attention")
# (sweep, task, mixer); seconds that must be left for a wave to begin; part of the GPU's memory for each process
WAVES = [
    ([(n, "recall", m) for n in ("recall_longer", "recall_again") for m in RECALL], 60, 0.06),
    ([("parity_far", "parity", m) for m in PARITY], float(os.environ.get("PARITY_LEAST", 75)), 0.06),
]
lock = threading.Lock()


def left():
    return end - (time.monotonic() - begin)


def note(text):
    with lock, open(work / "logs" / "queue.txt", "a") as f:
        print(f"{time.monotonic() - begin:5.0f} {text}", file=f, flush=True)


def job(name, task, mixer, memory):
    folder = work / f"{name}-{mixer}"
    if (folder / "table.md").exists():
        return note(f"finished before {folder.name}")
    command = [os.environ.get("PYTHON", "python3"), "-m", "gdn_jax.cli", "sweep", task, "--out", str(folder)]
    if (folder / "config.json").exists():
        command += ["--resume"]
    command += ["--config", str(root / f"results/configs/{name}.full.json"), "--mixers", mixer, *extra]
    env = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(memory)}
    env["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    for attempt in range(2):
        note(f"start {folder.name}")
        with open(work / "logs" / f"{folder.name}.log", "a") as log:
            p = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
            try:
                rc = p.wait(max(0.1, left()))
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGINT)
                try:
                    rc = p.wait(6)
                except subprocess.TimeoutExpired:
                    os.killpg(p.pid, signal.SIGKILL)
                    rc = p.wait()
        note(f"end {folder.name} {rc}")
        if rc == 0 or left() < 60:
            return
        if not (folder / "runs.jsonl").exists():
            shutil.rmtree(folder, ignore_errors=True)
            command = [x for x in command if x != "--resume"]


for jobs, least, memory in WAVES:
    if left() < least:
        note(f"skipped {jobs[0][0]}: {left():.0f} s left")
        continue
    threads = [threading.Thread(target=job, args=(*x, memory)) for x in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
out.mkdir(parents=True, exist_ok=True)
keep = {"config.json", "runs.jsonl", "table.md", "figure.png"}
with tarfile.open(out / "findings.tar", "w") as tar:
    for f in sorted(work.rglob("*")):
        if f.is_file() and (f.name in keep or f.parent.name == "logs"):
            tar.add(f, str(f.relative_to(work)))
print((work / "logs" / "queue.txt").read_text())
for f in sorted(x for x in work.glob("*-*") if x.is_dir()):
    lines = len((f / "runs.jsonl").read_text().splitlines()) if (f / "runs.jsonl").exists() else 0
    print(f"{f.name}: {lines} runs, {'finished' if (f / 'table.md').exists() else 'NOT FINISHED'}")
    if not lines and (work / "logs" / f"{f.name}.log").exists():
        log = (work / "logs" / f"{f.name}.log").read_text().splitlines()
        print(*["   " + x[:180] for x in log if x.strip() and x[0] not in "WIE"][-3:], sep="\n")
print(f"{time.monotonic() - begin:.0f} s")
