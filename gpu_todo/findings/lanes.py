"""python lanes.py SECONDS WORKERS NAME:TASK[:MIXER,...]...: sweeps side by side, a mixer each, from a queue in this order.

A process writes a folder of its own, NAME-MIXER; a line of runs.jsonl is written only when its run is finished, so what is cut
leaves no line. PREV: an unpacked findings.tar to go on with. $OUT/findings.tar gets the folders.
"""
import json, os, queue, shlex, shutil, signal, subprocess, sys, tarfile, threading, time
from pathlib import Path

begin = time.monotonic()
total, workers, plans = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
root = Path(os.environ.get("ROOT", Path(__file__).resolve().parents[2]))
out, work = Path(os.environ["OUT"]), Path(os.environ.get("WORK", "/tmp/findings-work"))
extra = shlex.split(os.environ.get("EXTRA", ""))
shutil.rmtree(work, ignore_errors=True)
(work / "logs").mkdir(parents=True)
if (prev := os.environ.get("PREV")) and Path(prev).is_dir():
    shutil.copytree(prev, work, dirs_exist_ok=True)
end = total - 12  # a step in flight, packing
lock, jobs = threading.Lock(), queue.Queue()
for plan in plans:
    name, task, *mixers = plan.split(":")
    stored = json.loads((root / f"results/configs/{name}.full.json").read_text())["options"]["mixers"]
    for m in mixers[0].split(",") if mixers else stored:
        jobs.put((name, task, m))
left = lambda: end - (time.monotonic() - begin)

def note(text):
    with lock, open(work / "logs" / "queue.txt", "a") as f:
        print(f"{time.monotonic() - begin:5.0f} {text}", file=f, flush=True)

def job(name, task, mixer):
    folder = work / f"{name}-{mixer}"
    if (folder / "table.md").exists():
        return note(f"finished before {folder.name}")
    for attempt in range(2):
        command = [os.environ.get("PYTHON", "python3"), "-c", "import gdn_command,sys; sys.exit(gdn_command.main())", "sweep", task, "--out", str(folder)]
        if (folder / "config.json").exists():
            command += ["--resume"]
        command += ["--config", str(root / f"results/configs/{name}.full.json"), "--mixers", mixer, *extra]
        env = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.5 / workers:.3f}"}
        if "longer" in name:
            env["JAX_LOG_COMPILES"] = "1"
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
        lines = len((folder / "runs.jsonl").read_text().splitlines()) if (folder / "runs.jsonl").exists() else 0
        note(f"end {folder.name} rc {rc}, {lines} lines")
        if rc == 0 or left() < 60:
            return
        if not lines:
            shutil.rmtree(folder, ignore_errors=True)

def lane():
    while left() > 35:
        try:
            job(*jobs.get_nowait())
        except queue.Empty:
            return

threads = [threading.Thread(target=lane) for _ in range(workers)]
for t in threads:
    t.start()
while any(t.is_alive() for t in threads):
    time.sleep(2)
    if (time.monotonic() - begin) % 20 > 2:
        continue
    used = subprocess.run(["nvidia-smi", "--query-gpu=utilization.gpu,memory.used,power.draw", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip() if shutil.which("nvidia-smi") else ""
    note(f"gpu {used}")
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
    lines = [json.loads(x) for x in (f / "runs.jsonl").read_text().splitlines()] if (f / "runs.jsonl").exists() else []
    print(f"{f.name}: {len(lines)} runs, {'finished' if (f / 'table.md').exists() else 'NOT FINISHED'}, seconds {[round(x['wall']['seconds']) for x in lines]}")
    if not lines and (work / "logs" / f"{f.name}.log").exists():
        log = (work / "logs" / f"{f.name}.log").read_text().splitlines()
        print(*["   " + x[:180] for x in log if x.strip() and x[0] not in "WIE"][-3:], sep="\n")
print(f"{time.monotonic() - begin:.0f} s")
