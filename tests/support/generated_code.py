"""What the compiler says of the kernels' generated code, on a machine without a GPU."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def ptxas_report(*options: str) -> str:
    """What `pallas_kernels.tools.ptxas_report` prints; skips the test where it cannot run.

    It needs gcc and ptxas, and fetches the compiler plugin of the installed jax through pip, once for a machine.
    """
    if missing := [program for program in ("ptxas", "gcc") if shutil.which(program) is None]:
        pytest.skip(f"needs {' and '.join(missing)}")
    command = [sys.executable, "-m", "pallas_kernels.tools.ptxas_report", *options]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if "'pip', 'download'" in done.stderr:
        pytest.skip("the compiler of JAX's CUDA plugin is not here, and pip could not fetch it")
    assert done.returncode == 0, done.stderr
    return done.stdout
