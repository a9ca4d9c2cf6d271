"""Compilers for devices that this machine has not, in a process of their own.

Their packages are fetched through pip once, into a cache folder that no other program imports from.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FETCHING = "could not be fetched"
"""Stands in the error of a machine that cannot have the packages."""


def fetched(name: str, packages: Sequence[str]) -> Path:
    """The folder of packages, which are fetched if it is not there.

    Args:
      name: of the folder of all their versions.
      packages: requirements as pip takes them; the folder is named after the first.

    Raises:
      SystemExit: pip could not fetch them.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / f"gdn-{name}"
    place = cache / re.sub(r"[^\w.]+", "-", packages[0]).strip(".-")
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"fetching {', '.join(packages)} through pip, once, into {place}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            whole = Path(made, "whole")
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(whole)]
            done = subprocess.run([*pip, *packages], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{packages[0]} {FETCHING}: {done.stderr.strip().splitlines()[-1]}")
            whole.rename(place)
    return place


def ensure(place: Path, environment: Mapping[str, str]) -> None:
    """Ends with the status of this program in a process that finds these packages first; returns in that process.

    Args:
      place: folder of the packages.
      environment: variables of the process. It computes on the CPU.
    """
    if str(place) in sys.path:
        return
    paths = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", **environment}
    sys.exit(subprocess.run([sys.executable, *sys.argv], env=os.environ | own).returncode)


def failure(error: Exception) -> str:
    """An error of a compiler in a line of a table."""
    return f"FAIL: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
