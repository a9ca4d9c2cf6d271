"""What rows of a training batch begin from: nothing, or the recurrent states after the rows before."""

import dataclasses

import jax
import numpy as np
import pytest
from device_arrays import put
from flax import nnx
from tiny_runs import metrics, train

from gdn_jax.commands.errors import RunError
from gdn_jax.models import AttentionConfig, LanguageModel, ModelConfig
from gdn_jax.training import options as options_lib
from gdn_jax.training import steps
from gdn_jax.training.starts import STARTS
from gdn_jax.training.tasks.batch import Batch

CONFIG = ModelConfig(
    vocab_size=13,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    head_dim=8,
    tie_embeddings=True,
    implementation="recurrent",
)
TOKENS = np.random.default_rng(0).integers(0, 13, (3, 10)).astype(np.int32)


def made(config):
    return nnx.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))()


@pytest.mark.parametrize("mixer", ["gated_delta_net", pytest.param("kda", marks=pytest.mark.slow)])
def test_rows_go_on_as_one_long_row(mixer):
    """The loss of each row is that of its part of the long one, and so is its gradient through that part alone."""
    graphdef, params, rest = nnx.split(made(dataclasses.replace(CONFIG, mixer=mixer)), nnx.Param, ...)
    targets = np.roll(TOKENS, -1, axis=1)

    @jax.jit
    def losses(params):
        def of_rows(weights):
            batch = Batch(TOKENS, targets, weights)
            return steps.loss_sum(graphdef, rest, params, batch, start=STARTS["passed"])[0]

        def of_long_row(weights):
            batch = Batch(*(x.reshape(1, -1) for x in (TOKENS, targets, weights)))
            return steps.loss_sum(graphdef, rest, params, batch)[0]

        rows = [np.ones((3, 10), np.float32) * (np.arange(3) == b)[:, None] for b in range(3)]
        return [[f(weights) for weights in rows] for f in (of_rows, of_long_row)]

    got, want = losses(params)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert len({round(float(x), 3) for x in got}) == 3

    def last(params, frozen, tokens):
        """The loss of the last row, with other parameters before it."""
        model = nnx.merge(graphdef, frozen, rest)
        cache = None
        for row in tokens[:2]:
            _, cache = model.hidden_states(row[None], cache=cache, return_cache=True)
        weights = np.ones((1, 10), np.float32)
        batch = Batch(tokens[2:], targets[2:], weights)
        return steps.loss_sum(graphdef, rest, params, batch, start=lambda *_: cache)[0]

    def passed(params, tokens):
        weights = np.ones((3, 10), np.float32) * (np.arange(3) == 2)[:, None]
        batch = Batch(tokens, targets, weights)
        return steps.loss_sum(graphdef, rest, params, batch, start=STARTS["passed"])[0]

    got, want = jax.jit(lambda p, x: (jax.grad(passed)(p, x), jax.grad(last)(p, p, x)))(params, put(TOKENS))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_attention_sees_its_own_row():
    """In a model with both, the first row is as without, and only recurrent layers know of the rows before."""
    config = dataclasses.replace(
        CONFIG, layer_types=("gated_delta_net", "attention"), attention=AttentionConfig(2, head_dim=8)
    )
    model = made(config)

    @nnx.jit
    def run(model, tokens):
        start = STARTS["passed"](model, tokens)
        return start, model.hidden_states(tokens, cache=start)[0], model.hidden_states(tokens)[0]

    start, got, without = run(model, put(TOKENS))
    assert start[1] is None and start[0].state.shape[0] == 3
    np.testing.assert_allclose(got[0], without[0], rtol=0, atol=1e-5)
    assert np.abs(np.asarray(got - without))[1:].max() > 1e-2

    only = dataclasses.replace(config, layer_types=("attention",) * 2)
    with pytest.raises(ValueError, match="start: expected empty for a model without recurrent layers"):
        STARTS["passed"](nnx.eval_shape(lambda: LanguageModel(only, rngs=nnx.Rngs(0))), put(TOKENS))


@pytest.mark.slow
def test_a_run(folder, tmp_path, capsys):
    assert train(folder, tmp_path / "empty") == train(folder, tmp_path / "passed", "--start", "passed") == 0
    empty, passed = (metrics(tmp_path / name) for name in ("empty", "passed"))
    assert len(empty) == len(passed) == 4 and empty != passed
    assert train(folder, tmp_path / "none", "--start", "passed", "--model", "transformer") == 1
    assert "start: expected empty for a model without recurrent layers" in capsys.readouterr().err


def test_what_cannot_be():
    default = options_lib.TASKS["bytes"]
    asked = dataclasses.replace(default.run, start="passed")
    for run, model, said in (
        (dataclasses.replace(asked, mesh="data=2"), default.model, "--mesh, --remat or --matmul"),
        (asked, dataclasses.replace(default.model, remat="full"), "--mesh, --remat or --matmul"),
        (dataclasses.replace(asked, accumulate=asked.batch_size), default.model, "are single rows"),
    ):
        with pytest.raises(RunError, match="--start: expected empty .*" + said):
            options_lib.check(dataclasses.replace(default, run=run, model=model))
