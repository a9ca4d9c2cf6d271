"""A training step compiled for devices that are not there: what each holds and sends, beside the formulas."""

import dataclasses
import math
import re
import subprocess
import sys

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from gdn_jax import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.inspect.dry_run import dry_run
from gdn_jax.models import AttentionConfig, ExpertsConfig, LanguageModel, ModelConfig
from gdn_jax.parallel import sharding
from gdn_jax.parallel.mesh import MeshShape

CONFIG = ModelConfig(
    vocab_size=512, hidden_size=128, num_layers=4, num_heads=2, num_v_heads=4, head_dim=32, expand_v=1.0,
    layer_types=("gated_delta_net", "attention") * 2, implementation="recurrent",
    attention=AttentionConfig(4, 2, 32, "head", output_gate=True, rotary_dim=8),
)  # fmt: skip
ROWS, LENGTH = 8, 128


def compare(sent, expected, within):
    """Every kind that is a hundredth of all that is sent, against the sum of its formulas."""
    wanted = {}
    for part in expected.values():
        for kind, number in part.items():
            wanted[kind] = wanted.get(kind, 0) + number
    total = sum(sent.values())
    for kind in {*sent, *wanted}:
        got, want = sent.get(kind, 0), wanted.get(kind, 0)
        if max(got, want) > total / 100:
            assert abs(got - want) <= within * want, (kind, got, want, sent, expected)


def held(config, shape, rows, length):
    """Bytes of weights, two moments of each and a batch on one device, by the rules for parameters."""
    params = nnx.state(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))), nnx.Param)
    specs = sharding.parameter_specs(params, shape)
    total = 0
    is_spec = dict(is_leaf=lambda x: isinstance(x, PartitionSpec))
    for x, spec in zip(jax.tree.leaves(params), jax.tree.leaves(specs, **is_spec), strict=True):
        total += 12 * x.size // math.prod(getattr(shape, axis) for axis in spec if axis is not None)
    return total + 12 * rows * length // (shape.data * shape.context)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        pytest.param("data=2,head=2,context=2,sharded", 2, marks=pytest.mark.slow),
        pytest.param("data=8", 4, marks=pytest.mark.slow),
        pytest.param("data=4,context=2,sharded", 4, marks=pytest.mark.slow),
        pytest.param("head=2,context=2", 4, marks=pytest.mark.slow),
    ],
)
def test_small_model(text, layers):
    """Two layers that differ, or pairs of them, which are compiled as a loop."""
    shape = MeshShape.parse(text)
    if jax.device_count() < shape.size:
        pytest.skip(f"needs {shape.size} devices, JAX sees {jax.device_count()}")
    config = dataclasses.replace(CONFIG, num_layers=layers, layer_types=CONFIG.types[:layers])
    found = dry_run(config, shape, ROWS, LENGTH)
    assert found.config.scan_layers == (layers > 2)
    exact = held(config, shape, ROWS, LENGTH)
    assert exact <= found.state_bytes <= exact + 64, "the numbers of steps beside"
    assert found.temporary_bytes > 0
    compare(found.sent.sent, found.expected, 0.1)


@pytest.mark.slow
def test_heads_that_are_exchanged():
    """Over a context axis whose shards are short."""
    shape = MeshShape(context=4)
    if jax.device_count() < shape.size:
        pytest.skip(f"needs {shape.size} devices, JAX sees {jax.device_count()}")
    config = dataclasses.replace(CONFIG, num_heads=4, num_layers=2, layer_types=CONFIG.types[:2])
    found = dry_run(config, shape, ROWS, LENGTH)
    assert found.expected["heads"]["all-to-all"] and "states" not in found.expected
    compare(found.sent.sent, found.expected, 0.1)


def test_refusals():
    shape = MeshShape(data=2)
    with pytest.raises(RunError, match="data: expected a divisor of the 7 rows"):
        dry_run(CONFIG, shape, 7, LENGTH)
    with pytest.raises(RunError, match=r"expected at most \d+ devices, JAX_NUM_CPU_DEVICES, got 4096"):
        dry_run(CONFIG, MeshShape(data=4096), 4096, LENGTH)
    experts = dataclasses.replace(CONFIG, experts=ExpertsConfig(4, 2, 8, 8))
    with pytest.raises(RunError, match="expected a model without experts"):
        dry_run(experts, shape, ROWS, LENGTH)


def test_info_of_a_preset(capsys):
    assert cli.main(["info", "qwen3.5-small"]) == 0
    assert "qwen3.5-small: a preset, weights float32" in capsys.readouterr().out
    assert cli.main(["info", "qwen3.5-small", "--mesh", "rows=2"]) == 1
    assert "--mesh: expected axes out of data, head, context" in capsys.readouterr().err


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.mark.slow
def test_seven_billion_parameters_on_256_devices():
    """By the command, in a process that begins with so many devices."""
    arguments = "info olmo-hybrid-7b --mesh data=128,context=2,sharded --context 8192 --batch 128"
    command = [sys.executable, "-m", "gdn_jax.cli", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "128 x 8,192 tokens on data=128,context=2,sharded, 256 devices" in done.stdout
    number = r"([\d.]+) ([KMG]?i?B)"
    rows = re.findall(rf"│ ([a-z]+(?:-[a-z]+)+) +│ +\d+ │ +{number} │ +{number} │", done.stdout)
    values = {kind: (float(a) * UNITS[x], float(b) * UNITS[y]) for kind, a, x, b, y in rows}
    assert set(values) == {"all-gather", "all-reduce", "all-to-all", "collective-permute"}
    sent = {kind: got for kind, (got, _) in values.items()}
    compare(sent, {"all": {kind: want for kind, (_, want) in values.items()}}, 0.1)
    # 12 bytes of each parameter over 128 devices, a few small ones whole.
    held = re.search(rf"holds {number} of weights", done.stdout)
    assert held is not None
    assert 1.0 <= float(held[1]) * UNITS[held[2]] / (12 * 7.43e9 / 128) <= 1.05
