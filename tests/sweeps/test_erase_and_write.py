"""The mixers of `results.erase_and_write` against their equations, their runs, and seeds that begin elsewhere."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from gdn_jax.layers.gated_delta_net import GatedDeltaNet
from gdn_jax.sweeps.grid import wanted
from gdn_jax.sweeps.options import GridOptions, SweepOptions
from gdn_jax.training.tasks.recall import RecallOptions
from results import first_mixer
from results.erase_and_write import EraseAndWrite
from results.pages import apart
from results.pages.numbers import Numbers
from results.pages.questions import OWN
from results.pages.stored import HALF

RESULTS = Path(__file__).parents[2] / "results"


def test_what_is_erased_and_what_is_written_are_apart():
    options = dict(num_heads=2, head_dim=8, expand_v=1.0, write_start=0.5, rule="delta")
    x = np.random.default_rng(0).standard_normal((1, 12, 16), np.float32)

    @jax.jit
    def run(x):
        layer = EraseAndWrite(16, erase_start=0.06, **options, rngs=nnx.Rngs(0))
        inputs = layer.rule_inputs(x)[0]
        plain = GatedDeltaNet.rule_inputs(layer, x)[0]
        gates = jax.nn.sigmoid(layer.b_proj(x)), jax.nn.sigmoid(layer.w_proj(x))
        return (
            plain,
            gates,
            layer.apply_rule(inputs)[0],
            layer(x)[0],
            layer.rule_output(layer.apply_rule(inputs)[0], x),
        )

    (q, k, v, _, _), (erase, write), o, y, whole = jax.device_get(run(x))
    assert abs(erase.mean() - 0.06) < 0.03 and abs(write.mean() - 0.5) < 0.2
    wanted_o = np.zeros_like(o)
    for h in range(2):
        S = np.zeros((8, 8))
        for t in range(12):
            S += np.outer(k[0, t, h], write[0, t, h] * v[0, t, h] - erase[0, t, h] * (k[0, t, h] @ S))
            wanted_o[0, t, h] = q[0, t, h] @ S / np.sqrt(8)
    np.testing.assert_allclose(o, wanted_o, atol=1e-5)
    np.testing.assert_allclose(y, whole, atol=1e-6)


@pytest.mark.parametrize("sweep", [apart.SWEEP, apart.HIGH, "recall/room", "recall/eps"])
def test_no_run_is_left_out(sweep):
    config, lines = Numbers(RESULTS).folder(sweep)
    o = config["options"]
    seeds = range(o["first_seed"], o["first_seed"] + o["seeds"])
    grid = itertools.product(o["mixers"], o["lrs"], o["write_starts"], seeds)
    assert sorted((x["mixer"], x["lr"], x["write_start"], x["seed"]) for x in lines) == sorted(grid)


def test_no_seed_of_the_intervention_is_left_out():
    """`results.first_mixer`: each rule, seed and factor, and as many places in each."""
    made = {
        "runs": (first_mixer.RULES, first_mixer.SEEDS),
        "further": (first_mixer.RULES, first_mixer.FURTHER_SEEDS),
    }
    for name, (rules, seeds) in made.items():
        runs = json.loads((first_mixer.FOLDER / f"{name}.json").read_text())["runs"]
        assert [(run["rule"], run["seed"]) for run in runs] == [*itertools.product(rules, range(seeds))]
        for run in runs:
            assert [*map(float, run["place"])] == [*first_mixer.FACTORS]
            assert {len(places) for places in run["place"].values()} == {8}
            assert (run["steps"], run["rate"]) == (first_mixer.STEPS, first_mixer.RATE)


@pytest.mark.slow
def test_the_intervention_runs(tmp_path, monkeypatch):
    few = dict(RULES=("delta_net",), SEEDS=1, FURTHER_SEEDS=1, FURTHER_PAIRS=16, STEPS=2, ROWS=4)
    for name, value in few.items():
        monkeypatch.setattr(first_mixer, name, value)
    assert first_mixer.main([str(tmp_path / "a")]) == 0
    for name in ("runs", "further"):
        [line] = json.loads((tmp_path / "a" / f"{name}.json").read_text())["runs"]
        assert line["steps"] == 2 and len(line["place"]) == len(first_mixer.FACTORS)


def test_runs_that_never_come_to_half_are_left_out():
    runs = Numbers(RESULTS)
    [comparison] = [claim.comparisons["erase_50_half"] for claim in OWN if claim.id == "write"]
    one, other = (runs.scores(arm, HALF) for arm in (comparison.of, comparison.than))
    both = [seed for seed in one if max(one[seed], other[seed]) < math.inf]
    assert 0 < len(both) < len(one) == len(other)
    assert runs.compared("write.erase_50_half").gains == tuple(other[seed] - one[seed] for seed in both)


def test_seeds_begin_where_first_seed_says():
    grid = GridOptions(mixers=("delta_net",), lrs=(0.1, 0.2), first_seed=10, seeds=3)
    options = SweepOptions(RecallOptions(), grid)
    assert {run.seed for run in wanted(options, "delta_net", 1, [], "accuracy")} == {10, 11, 12}
    few = dataclasses.replace(options, sweep=dataclasses.replace(grid, lr_seeds=1))
    tried = [run.record() | _scores() for run in wanted(few, "delta_net", 1, [], "accuracy")]
    assert [run["seed"] for run in tried] == [10, 10]
    assert [run.seed for run in wanted(few, "delta_net", 1, tried, "accuracy")][2:] == [11, 12]


def _scores():
    return {"val_loss": 1.0, "val_accuracy": 0.5, "test_accuracy": {"2": 0.5}}
