"""Versions that a number may depend on beside the options."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import jax

PACKAGES = ("gdn-jax", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")


def versions() -> dict[str, str]:
    """Returns Python, PACKAGES, the system, the devices and, where there is a GPU, the driver, by name."""
    device = jax.devices()[0]
    found = {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
    }
    if device.platform == "gpu" and (program := shutil.which("nvidia-smi")):
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        if answer.stdout.split():
            found["driver"] = answer.stdout.split()[0]
    return found


def commit() -> str | None:
    """Returns the commit of the repository of this package, with a "+" where a file of it has changed since.

    What GDN_COMMIT in the environment says stands in its place: for a copy of the files on another machine, which has
    no repository or that of another time. None without either.
    """
    if said := os.environ.get("GDN_COMMIT"):
        return said
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists() or (git := shutil.which("git")) is None:
        return None

    def ask(*words: str) -> str:
        answer = subprocess.run([git, "-C", str(folder), *words], capture_output=True, text=True, check=False)
        return answer.stdout.strip()

    changed = ask("status", "--porcelain", "--untracked-files=no")
    return ask("rev-parse", "HEAD") + ("+" if changed else "") or None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
