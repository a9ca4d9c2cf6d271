"""Tests of kernels are skipped where what they executed is unchanged, and only there."""

import os
import re
import subprocess
import sys

import pytest
import unchanged
from faults.run import copy_of_the_project

TEST = """
import pallas_kernels.device.layouts as layouts
from pallas_kernels.device.memory import SMEM_LIMIT

def test_rounding():
    assert layouts.round_up(5, 4) == 8

def test_limit():
    assert SMEM_LIMIT > 0
"""


def test_where_names_come_from():
    """A file stands for what it imports, an __init__.py for the files that its names come from."""
    assert unchanged.origin("gdn_jax", "gated_delta_rule") == unchanged.ROOT / "gdn_jax" / "rule" / "ops.py"
    assert unchanged.origin("gdn_jax.rule.ops", "check") is None
    assert unchanged.origin("pallas_kernels.device", "lanes") == unchanged.file_of(
        "pallas_kernels.device.lanes"
    )
    here = unchanged.imported(unchanged.pathlib.Path(__file__))
    assert {path.name for path in here} == {"unchanged.py", "run.py"}


@pytest.mark.slow
def test_a_test_runs_when_what_it_executes_changes(tmp_path):
    project = copy_of_the_project(tmp_path)
    (project / "tests" / "kernels" / "test_of_this_test.py").write_text(TEST)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache" / "programs"),
        "PYTHONPATH": str(project),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--changed"]

    def outcome():
        done = subprocess.run(
            [*command, "tests/kernels/test_of_this_test.py"],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
        )
        found = [re.findall(rf"(\d+) {kind}", done.stdout) for kind in ("passed", "skipped", "failed")]
        assert any(found), done.stdout + done.stderr
        return tuple(int(n[0]) if n else 0 for n in found)

    def edit(name, old, new):
        path = project / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    assert outcome() == (2, 0, 0)
    assert outcome() == (0, 2, 0)
    edit("gdn_jax/sweeps/summary.py", '"""', '"""Another text. ')  # nothing of it was executed
    assert outcome() == (0, 2, 0)
    edit("pallas_kernels/device/memory.py", "SMEM_LIMIT = ", "SMEM_LIMIT = -")  # a constant that is imported
    assert outcome() == (1, 0, 1)
    assert outcome() == (0, 1, 1)  # what failed runs again
    edit("pallas_kernels/device/memory.py", "SMEM_LIMIT = -", "SMEM_LIMIT = ")
    edit(
        "pallas_kernels/device/layouts.py", "def round_up(", "def round_up(  # a comment\n    "
    )  # a function that ran
    assert outcome() == (2, 0, 0)
