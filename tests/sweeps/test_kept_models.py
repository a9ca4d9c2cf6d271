"""`results.kept_models`: what it changes of rows and gates, and that no entry is left out of what is stored."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from gdn_jax.commands.versions import versions
from gdn_jax.sweeps import weights
from gdn_jax.sweeps.grid import Run
from gdn_jax.sweeps.options import GridOptions, SweepOptions
from gdn_jax.sweeps.program import make_model
from gdn_jax.training.options import SizeOptions, to_json
from gdn_jax.training.runs import RunFolder
from gdn_jax.training.tasks.recall import RecallOptions
from gdn_jax.training.tasks.table import make_task
from results import kept_models
from results.kept_models import Gates, Rows


def test_rows_with_something_in_front():
    """Keys and values in front are not in the row, which follows as it was; targets and places move along."""
    rng = np.random.default_rng(0)
    tokens = np.concatenate([rng.permutation(8)[None, :4], 8 + rng.permutation(8)[None, :4]], 1).repeat(2, 0)
    parts = rng.random((3, 2, 8)) < 0.5
    rows = Rows(tokens, tokens + 1, parts)
    for count in ({"pairs": 3}, {"fill": 6}):
        found = kept_models.in_front(rows, 16, **count)
        front = found.tokens[:, :6]
        np.testing.assert_array_equal(found.tokens[:, 6:], tokens)
        np.testing.assert_array_equal(found.targets[:, 6:], tokens + 1)
        np.testing.assert_array_equal(found.parts[..., 6:], parts)
        assert not found.targets[:, :6].any() and not found.parts[..., :6].any()
        for row, before in zip(tokens, front, strict=True):
            if "pairs" in count:
                assert not np.isin(before, row).any() and len({*before}) == 6
                assert (before[::2] < 8).all() and (before[1::2] >= 8).all()
            else:
                assert (before >= 8).all()


def test_gates_of_one_mixer_are_changed():
    """Factors go to their mixer alone; a frozen state is neither written nor forgotten at those tokens."""
    g, beta = np.full((1, 4, 1), -0.5, np.float32), np.full((1, 4, 1), 0.25, np.float32)
    gates = Gates(first=2.0, second=0.5, frozen_from=2, frozen_to=3)
    found = [[np.asarray(x).ravel().tolist() for x in gates.change(layer, g, beta)] for layer in (0, 1)]
    assert found[0] == [[-0.5, -0.5, 0, -0.5], [0.5, 0.5, 0, 0.5]]
    assert found[1] == [4 * [-0.5], 4 * [0.125]]
    plain = [np.asarray(x).tolist() for x in Gates().change(0, g, beta)]
    assert plain == [g.tolist(), beta.tolist()]


def test_no_change_is_left_out_of_what_is_stored(monkeypatch):
    """Two rules of the size of Zoology's, each with every change; unchanged they have the score of their run."""
    monkeypatch.setattr(kept_models, "ROWS", 1)
    names = [name for name, _, _ in kept_models.changes(RecallOptions(vocab_size=8192))]
    found = json.loads(kept_models.FILE.read_text())["runs"]
    assert [entry["mixer"] for entry in found] == ["gated_delta_net", "delta_net"]
    for entry in found:
        assert [*entry["places"]] == names and {len(x) for x in entry["places"].values()} == {8}
        # 64 rows of ours and 320 others of the run
        assert np.mean(entry["places"]["gaps, as trained"]) == pytest.approx(
            entry["test_accuracy"]["256"], abs=0.02
        )


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    """On a sweep as one with --keep-weights leaves it, here with weights that were drawn."""
    small = dict(ROWS=4, PAIRS=4, LENGTH=16, TRAINED=2, TRAINED_LENGTH=8, FACTORS=(2.0,))
    for name, value in (small | dict(PAIRS_IN_FRONT=(1,), FILL_IN_FRONT=(2,))).items():
        monkeypatch.setattr(kept_models, name, value)
    task = RecallOptions(vocab_size=32, num_pairs=2, length=8, test_pairs=(2,), val_sequences=4)
    grid = GridOptions(mixers=("delta_net",), lrs=(0.01,), seeds=1, keep_weights=True)
    options = SweepOptions(task, grid, SizeOptions(hidden_size=16, num_layers=2, num_heads=2, head_dim=8))
    folder, run = RunFolder.create(tmp_path / "sweep", "sweep recall"), Run("delta_net", 0.01, 0)
    about = {"task": "sweep recall", "options": to_json(options), "data": {}, "versions": versions()}
    folder.write_json("config.json", about)
    scores = {"val_loss": 1.0, "val_accuracy": 0.5, "test_accuracy": {"2": 0.5}, "parameters": 1}
    line = run.record() | scores | {"commit": None, "wall": {"seconds": 1.0}}
    (folder.path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    shapes = nnx.state(
        nnx.eval_shape(lambda: make_model(options, make_task(task, 4, 0), "delta_net", 0)), nnx.Param
    )
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda x: 0.1 * rng.standard_normal(x.shape).astype(x.dtype), shapes)
    weights.save(folder.path, run, drawn)
    assert kept_models.main([str(tmp_path / "kept.json"), str(folder.path)]) == 0
    [entry] = json.loads((tmp_path / "kept.json").read_text())["runs"]
    assert entry["mixer"] == "delta_net" and len(entry["places"]) == 5 + 2 + 3
    assert {len(x) for x in entry["places"].values()} == {2, 4}
