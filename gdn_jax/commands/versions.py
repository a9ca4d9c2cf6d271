"""What a number may depend on beside the options."""

import platform
import shutil
import subprocess
from importlib import metadata

import jax

PACKAGES = ("gdn-jax", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")


def versions() -> dict[str, str]:
    """Python, PACKAGES, the system, the devices and the driver by name; a driver only where there is a GPU."""
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


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
