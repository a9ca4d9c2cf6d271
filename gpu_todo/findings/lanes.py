"""Works through lanes of jobs side by side until the time is over; packs all they leave.

jobs.json: {"lanes": [{"slots": 4, "memory": 0.08, "jobs": [{"name", "command": [...], "least": seconds that must be left}]}]}
"{work}", "{here}", "{python}", "{left}" are replaced in commands.
"""
import json, os, shutil, signal, subprocess, sys, tarfile, threading, time
from pathlib import Path

begin = time.monotonic()
here = Path(__file__).parent
plan, total = json.loads(Path(sys.argv[1]).read_text()), float(sys.argv[2])
out, work = Path(os.environ["OUT"]), Path(os.environ.get("WORK", "/tmp/findings-work"))
shutil.rmtree(work, ignore_errors=True)
(work / "logs").mkdir(parents=True)
for name in ("prev",):
    if (here / name).exists():
        shutil.copytree(here / name, work, dirs_exist_ok=True)
end = total - 22  # scoring, packing
lock = threading.Lock()


def left() -> float:
    return end - (time.monotonic() - begin)


def note(text: str) -> None:
    with lock, open(work / "logs" / "queue.txt", "a") as f:
        print(f"{time.monotonic() - begin:5.0f} {text}", file=f, flush=True)


def lane(spec, jobs):
    while True:
        with lock:
            if not jobs:
                return
            job = jobs.pop(0)
        if left() < job.get("least", 30):
            note(f"skipped {job['name']}")
            continue
        places = {"{work}": str(work), "{here}": str(here), "{python}": os.environ.get("PYTHON", "python3"), "{left}": str(int(left() - 3))}
        command = []
        for part in job["command"]:
            for a, b in places.items():
                part = part.replace(a, b)
            command.append(part)
        env = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(spec["memory"]), "XLA_FLAGS": "--xla_gpu_autotune_level=0"} | job.get("env", {})
        note(f"start {job['name']}")
        with open(work / "logs" / (job["name"] + ".log"), "a") as log:
            p = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
            try:
                rc = p.wait(max(1, left()))
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGINT)
                try:
                    rc = p.wait(8)
                except subprocess.TimeoutExpired:
                    os.killpg(p.pid, signal.SIGKILL)
                    rc = p.wait()
        note(f"end {job['name']} {rc}")
        if rc and left() > job.get("least", 30) and not job.get("again"):
            shutil.rmtree(work / job["name"], ignore_errors=True)
            with lock:
                jobs.insert(0, job | {"again": True})


threads = []
for spec in plan["lanes"]:
    jobs = list(spec["jobs"])
    threads += [threading.Thread(target=lane, args=(spec, jobs)) for _ in range(spec["slots"])]
for t in threads:
    t.start()
for t in threads:
    t.join()
with tarfile.open(out / "findings.tar", "w") as tar:
    for f in sorted(work.rglob("*")):
        if f.is_file() and not f.name.startswith(("lock.", ".")):
            tar.add(f, str(f.relative_to(work)))
print((work / "logs" / "queue.txt").read_text())
for f in sorted(work.glob("*/runs.jsonl")):
    print(f.parent.name, sum(1 for _ in open(f)), "lines")
for f in sorted((work / "logs").glob("*.log")):
    lines = [x for x in f.read_text().splitlines() if x.strip() and x[0] not in "WIE"]
    print("==", f.name, *[x[:150] for x in lines[-3:]], sep="\n")
