"""Builds the wheel and the source distribution, and tries the wheel where nothing else of the project is.

    python tests/release/run.py [--python PYTHON ...] [--with REQUIREMENT ...] [--minutes MINUTES] [--out dist]

1. Builds both of the tracked files; the wheel is built of the source distribution. Checks them as the index does, the
   wheel's list of files, and that the description shows nothing that the index cannot reach.
2. For each PYTHON, by default each one of `VERSIONS` that the path has, makes an environment in a temporary folder,
   installs the wheel with each REQUIREMENT (such as jax==0.11.2), and runs there, in an empty folder: the import, the
   code of the description, and, with the extra `experiments`, every line of docs/first_hour.md.
3. Puts the files into --out if all of it passed; the exit status is 1 if anything did not.

It needs the extra `release`, git, and the package index. One Python takes about three minutes on two cores.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from package import contents, copy_tracked, description, expected, paths_in
from readme_renderer import markdown

IMPORT = """
import pathlib, sys, gdn_jax, pallas_kernels
for package in (gdn_jax, pallas_kernels):
    path = pathlib.Path(package.__file__).resolve()
    assert path.is_relative_to(pathlib.Path(sys.prefix).resolve()), path
print(gdn_jax.__version__)
"""
QUICKSTART = """
import importlib.metadata, re
page = importlib.metadata.metadata("gdn-jax")["Description"]
blocks = re.findall(r"(?ms)^```python\\n(.*?)^```$", page)
assert blocks, page
for block in blocks:
    exec(compile(block, "README.md", "exec"), {"__name__": "quickstart"})
print(len(blocks), "blocks")
"""
VERSIONS = ("3.12", "3.13", "3.14")
"""Versions of Python that are looked for, from the oldest one that pyproject.toml allows to the newest one of JAX."""
PAGE = Path(__file__).parents[2] / "docs" / "first_hour.md"
"""What a user is told to run first."""


class Failed(Exception):
    """A step of the rehearsal did not pass."""


def interpreters() -> list[str]:
    """The Pythons of `VERSIONS` that the path has, this one among them; says which it has and which not."""
    found = []
    for version in VERSIONS:
        own = version == "{}.{}".format(*sys.version_info)
        python = sys.executable if own else shutil.which(f"python{version}")
        # A launcher of several versions may have a name for one that is not there.
        code = "import ensurepip, platform; print(platform.python_version())"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True) if python else None
        if python and done and done.returncode == 0:
            found.append(python)
        there = done.stdout.strip() if done and done.returncode == 0 else "not found"
        print(f"Python {version}: {there}", flush=True)
    return found


def commands(minutes: float | None) -> Iterator[str]:
    """The lines of `PAGE` but for the installation; minutes: of each training run, None for those of the page."""
    _, *blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", PAGE.read_text())
    for line in "".join(blocks).splitlines():
        command = re.sub(r"\s+#.*", "", line)
        yield command if minutes is None else re.sub(r"(?<=--max-minutes )\S+", f"{minutes}", command)


def run(words: list[str], folder: Path, environment: dict[str, str] | None = None, status: int = 0) -> None:
    """Runs a command and shows its last line; raises with its whole output if it ends with another status."""
    start = time.perf_counter()
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    shown = (
        words[-1]
        if words[0] == "sh"
        else " ".join([Path(words[0]).name, *(w for w in words[1:] if "\n" not in w)])
    )
    if done.returncode != status:
        raise Failed(f"{shown}\n{done.stdout}\nexit status {done.returncode}")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    print(f"  {time.perf_counter() - start:6.1f} s  {shown}\n            {last[:98]}", flush=True)


def build(folder: Path) -> list[Path]:
    """Builds and checks the wheel and the source distribution; returns their paths."""
    source = copy_tracked(folder / "source")
    run([sys.executable, "-m", "build", "--outdir", str(folder / "built"), str(source)], folder)
    [wheel], [archive] = (folder / "built").glob("*.whl"), (folder / "built").glob("*.tar.gz")
    run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(archive)], folder)
    files, metadata, _ = contents(wheel)
    if files != expected():
        raise Failed(f"{wheel.name}: missing {expected() - files}, not tracked {files - expected()}")
    page = description(metadata)
    if paths := paths_in(page):
        raise Failed(f"the description links to {', '.join(paths)}, which no index has")
    html = markdown.render(page)
    if html is None or html.count("<table>") != len(re.findall(r"(?m)^\|[-:|]+\|$", page)):
        raise Failed(f"the description is not rendered as it should be:\n{html}")
    return [wheel, archive]


def try_wheel(wheel: Path, python: str, requirements: list[str], minutes: float | None, folder: Path) -> None:
    """Installs a wheel into a new environment and runs what a user runs first."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    run([python, "-m", "venv", "env"], folder, environment)
    own, gdn = (str(folder / "env" / "bin" / name) for name in ("python", "gdn"))
    install = [own, "-m", "pip", "install", "-qqq", "--disable-pip-version-check"]
    run([*install, str(wheel), *requirements], folder, environment)
    (place := folder / "empty").mkdir()
    alone = environment | {"HOME": str(folder), "PYTHONNOUSERSITE": "1"}
    run([own, "-c", IMPORT], place, alone)
    run([own, "-c", QUICKSTART], place, alone)
    run([gdn, "check"], place, alone, status=1)
    # The line of the command's message where the extra is missing: what is installed satisfies the name.
    run([*install, "gdn-jax[experiments]", *requirements], folder, environment)
    run([*install, f"{wheel}[hf]", *requirements], folder, environment)
    activated = alone | {"PATH": os.pathsep.join([str(Path(own).parent), os.environ["PATH"]])}
    for command in commands(minutes):
        run(["sh", "-c", command], place, activated)


def main() -> int:
    """Rehearses a release; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", nargs="+", default=None, help="interpreters to try the wheel with")
    parser.add_argument("--with", nargs="+", default=[], dest="requirements", help="installed with the wheel")
    parser.add_argument(
        "--minutes", type=float, default=None, help="of each training run, not those of the page"
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of what passed")
    o = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as name:
            pythons = o.python or interpreters()
            files = build(Path(name))
            for i, python in enumerate(pythons):
                (folder := Path(name) / f"python{i}").mkdir()
                print(" ".join([python, *o.requirements]), flush=True)
                try_wheel(files[0], python, o.requirements, o.minutes, folder)
            o.out.mkdir(parents=True, exist_ok=True)
            for file in files:
                part = o.out / f".{file.name}.part"
                part.write_bytes(file.read_bytes())
                part.rename(o.out / file.name)
                print(f"{o.out / file.name}: {file.stat().st_size / 1024:.0f} KiB")
    except Failed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
