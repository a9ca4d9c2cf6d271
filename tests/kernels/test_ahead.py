"""Programs compiled for TPUs and GPUs on a machine without one, in processes with their compilers."""

import os
import pathlib
import subprocess
import sys

import ahead
import gpu_ahead
import pytest
import tpu_ahead

ROOT = pathlib.Path(__file__).parents[2]


def report(program, *options: str) -> list[list[str]]:
    """The cells of the table that a program prints; skips the test where its compiler cannot be had."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, program.__file__, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if ahead.FETCHING in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [[cell.strip() for cell in x.split("|")[1:-1]] for x in done.stdout.splitlines() if x[:1] == "|"]
    return lines[2:]


@pytest.mark.slow
@pytest.mark.crossed
@pytest.mark.parametrize("kind", tpu_ahead.TOPOLOGIES)
def test_programs_for_tpus(kind):
    """Both rules in both passes, and the training step of a small model, with temporaries that a chip can hold."""
    lines = report(tpu_ahead, "--topologies", kind, "--tokens", "2048", "--model", "tiny")
    assert [line[:2] for line in lines] == [[kind, program] for program in tpu_ahead.PROGRAMS]
    assert all(0 <= int(line[3]) < 1024 for line in lines)


@pytest.mark.slow
@pytest.mark.crossed
def test_steps_for_gpus():
    """With the same kernels on a mesh as on one device, and what each mesh sends."""
    sizes = "--fields", "num_layers=1", "vocab_size=4096", "--tokens", "2048", "--length", "1024"
    meshes = "data=1", "data=2", "data=2,sharded", "context=2"
    one, data, sharded, context = report(gpu_ahead, *sizes, "--mesh", *meshes)
    assert one[4] == data[4] == sharded[4] and int(one[4]) > 10
    assert int(context[4]) > int(one[4])  # the maps of segments
    sent = [{*filter(line[7:].__getitem__, range(5))} for line in (one, data, sharded, context)]
    gather, scatter, reduce, permute = range(4)
    assert sent[0] == set() and sent[1] == {reduce} and {gather, scatter} <= sent[2] and permute in sent[3]
    assert float(sharded[6].split()[0]) < float(data[6].split()[0])
