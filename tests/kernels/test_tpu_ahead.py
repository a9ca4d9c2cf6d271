"""The rule compiled for TPUs on a machine without one, in a process with libtpu."""

import os
import pathlib
import subprocess
import sys

import pytest
import tpu_ahead

ROOT = pathlib.Path(__file__).parents[2]


def report(*options: str) -> subprocess.CompletedProcess:
    """What `tpu_ahead` prints and how it ends; skips the test where libtpu cannot be had."""
    command = [sys.executable, tpu_ahead.__file__, *options]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    if tpu_ahead.FETCHING in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return done


@pytest.mark.slow
@pytest.mark.crossed
@pytest.mark.parametrize("kind", tpu_ahead.TOPOLOGIES)
def test_programs_compile(kind):
    """Both rules in both passes, and the training step of a small model, with temporaries that a chip can hold."""
    done = report("--topologies", kind, "--tokens", "2048", "--model", "tiny")
    lines = [[cell.strip() for cell in x.split("|")[1:-1]] for x in done.stdout.splitlines() if x[:1] == "|"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[:2] for line in lines[2:]] == [[kind, program] for program in tpu_ahead.PROGRAMS]
    assert all(0 <= int(line[3]) < 1024 for line in lines[2:])
