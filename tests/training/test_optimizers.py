"""Optimisers of a run: Muon on the matrices that lie in a model's weights, AdamW on all others."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from device_arrays import put
from flax import nnx
from tiny_runs import final_state, metrics, resume, train

from gdn_jax.commands.errors import RunError
from gdn_jax.layers import blocks
from gdn_jax.models import AttentionConfig, ExpertsConfig, LanguageModel, ModelConfig
from gdn_jax.training import options as options_lib
from gdn_jax.training import steps
from gdn_jax.training.options import OptimizerOptions

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=24,
    num_layers=2,
    num_heads=2,
    head_dim=8,
    layer_types=("gated_delta_net", "attention"),
    attention=AttentionConfig(2, head_dim=8, output_gate=True),
    experts=ExpertsConfig(3, 2, 16, 16),
    dense_layers=(0,),
)


def weights():
    """Parameters of a model by name, and two gradients of each."""
    model = nnx.eval_shape(lambda: LanguageModel(CONFIG, rngs=nnx.Rngs(0)))
    rng, params = np.random.default_rng(0), nnx.state(model, nnx.Param)
    draw = lambda x: put(rng.standard_normal(x.shape).astype(np.float32))  # noqa: E731
    return [jax.tree.map(draw, params) for _ in range(3)]


def by_name(tree):
    paths = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator=".").removesuffix(".value"): x for k, x in paths}


def test_muon_makes_each_matrix_orthogonal():
    """Two steps: those of optax on every matrix by itself, also on the two that lie side by side in an expert's
    array, with decay and scale; all else has AdamW's."""
    options = OptimizerOptions(optimizer="muon", lr=0.1, weight_decay=0.3, clip=1e9, warmup=0.0)
    schedule = steps.make_schedule(options, 10, options.lr)

    @jax.jit
    def run(params, *gradients):
        optimizer, updates = steps.make_optimizer(options, 10, options.lr), []
        state = optimizer.init(params)
        for gradient in gradients:
            update, state = optimizer.update(gradient, state, params)
            updates.append(update)
        return updates

    @jax.jit
    def want(params, *gradients):
        adamw: dict = dict(b1=0.9, b2=0.95, weight_decay=0.3)
        usual = optax.adamw(schedule, mask=blocks.weight_decay_mask, **adamw)
        state, others = usual.init(params), []
        for gradient in gradients:
            update, state = usual.update(gradient, state, params)
            others.append(by_name(update))
        orthogonal = [{}, {}]
        for name, w in by_name(params).items():
            kind = name.rsplit(".", 1)[-1]
            if kind not in ("kernel", "down", "gate_up"):
                continue
            columns = w.shape[-1] // (2 if kind == "gate_up" else 1)
            rows = [np.s_[:]] if w.ndim == 2 else [np.s_[e] for e in range(w.shape[0])]
            for at in [
                (r, ..., np.s_[c : c + columns]) for r in rows for c in range(0, w.shape[-1], columns)
            ]:
                one = optax.contrib.muon(1.0)
                state = one.init(w[at])
                for i, gradient in enumerate(gradients):
                    update, state = one.update(by_name(gradient)[name][at], state, w[at])
                    update = 0.2 * w.shape[-2] ** 0.5 * update - 0.3 * w[at]
                    before = orthogonal[i].get(name, np.zeros(w.shape, np.float32))
                    orthogonal[i][name] = jax.numpy.asarray(before).at[at].set(schedule(i) * update)
        return others, orthogonal

    arrays = weights()
    got, (others, orthogonal) = run(*arrays), want(*arrays)
    assert len(orthogonal[0]) > 10 and any("gate_up" in name for name in orthogonal[0])
    for i in range(2):
        for name, x in by_name(got[i]).items():
            right = orthogonal[i].get(name, others[i][name])
            np.testing.assert_allclose(x, right, rtol=0, atol=1e-5, err_msg=name)
    update = np.asarray(by_name(got[0])["blocks.0.mlp.up_proj.kernel"])
    decay = 0.03 * np.asarray(by_name(arrays[0])["blocks.0.mlp.up_proj.kernel"])
    assert 0.1 < np.sqrt(np.mean(((update + decay) / 0.1) ** 2)) < 0.25  # AdamW's is about 0.2


def test_what_muon_cannot():
    default = options_lib.TASKS["bytes"]
    optimizer = dataclasses.replace(default.optimizer, optimizer="muon")
    options = dataclasses.replace(default, optimizer=optimizer)
    options_lib.check(options)
    with pytest.raises(RunError, match="--optimizer: expected adamw with --mesh or --lora-rank, got muon"):
        options_lib.check(dataclasses.replace(options, run=dataclasses.replace(default.run, mesh="data=2")))


@pytest.mark.slow
def test_a_resumed_run(folder, tmp_path):
    """With Muon it writes what a whole one does."""
    assert train(folder, tmp_path / "whole", "--optimizer", "muon") == 0
    assert train(folder, tmp_path / "cut", "--optimizer", "muon", "--max-minutes", "1e-9") == 0
    assert resume(tmp_path / "cut") == 0
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    (_, want), (step, got) = (final_state(tmp_path / name) for name in ("whole", "cut"))
    assert step == 12
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)
