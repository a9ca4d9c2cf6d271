"""`gdn train`: the step, what it learns. Its errors: test_commands.py; a run and its resume: test_runs.py; data:
test_*tasks.py."""

import dataclasses
import json
import math
import threading
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_runs import TINY, metrics, train

from gdn_jax.commands import cli
from gdn_jax.layers.blocks import weight_decay_mask
from gdn_jax.training import memory, steps, trainer
from gdn_jax.training import options as options_lib
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.next_byte import TextOptions
from gdn_jax.training.tasks.table import make_task

# --- the step


def tiny_options(**optimizer):
    return options_lib.TrainOptions(
        TextOptions(),
        run=options_lib.RunOptions(steps=10, batch_size=4),
        model=options_lib.ModelOptions(
            hidden_size=16,
            num_layers=1,
            num_heads=1,
            head_dim=8,
            dtype="float32",
            implementation="recurrent",
        ),
        optimizer=options_lib.OptimizerOptions(**optimizer),
    )


def made(options):
    """A fresh model as its structure, its parameters and the rest, drawn by one program."""
    graphdef = None

    @jax.jit
    def draw():
        nonlocal graphdef
        graphdef, *state = nnx.split(steps.make_model(options.model, 256, 0), nnx.Param, ...)
        return state

    state = draw()
    return graphdef, *state


@pytest.mark.slow
def test_accumulated_gradient_is_that_of_the_batch():
    o = tiny_options()
    graphdef, params, rest = made(o)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (4, 17)).astype(np.int32)
    weights = rng.integers(0, 2, (4, 16)).astype(np.float32)  # pieces of unequal weight
    batch = Batch(tokens[:, :-1], tokens[:, 1:], weights)
    optimizer = steps.make_optimizer(o.optimizer, 10, o.optimizer.lr)
    start = jax.jit(lambda params: (jax.tree.map(jnp.copy, params), optimizer.init(params)))
    got = []
    for accumulate in (1, 2):
        functions = steps.make_functions(graphdef, optimizer, accumulate)
        state = steps.TrainState(*start(params))
        got.append(functions.train(rest, state, batch))
    (one, first), (two, second) = got
    np.testing.assert_allclose(first, second, rtol=1e-5)
    # the second moments are the squared gradients, Adam's update is not divided into them
    for a, b in zip(jax.tree.leaves(one.opt_state), jax.tree.leaves(two.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7)


def test_decay_spares_gates_and_norms():
    o = tiny_options(weight_decay=10.0, lr=0.1)
    _, params, _ = made(o)
    optimizer = steps.make_optimizer(o.optimizer, 10, o.optimizer.lr)

    @jax.jit
    def updates_of_no_gradient(params):
        return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]

    updates = updates_of_no_gradient(params)
    spared, decayed = set(), set()
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path)
        (decayed if np.any(np.asarray(update)) else spared).add(name)
    assert any("A_log" in n for n in spared) and any("dt_bias" in n for n in spared)
    assert any("norm" in n for n in spared)
    assert not any(word in n for n in decayed for word in ("A_log", "dt_bias", "norm"))
    assert any("embed" in n for n in decayed)
    # Vectors that nobody has marked, such as biases.
    assert weight_decay_mask({"bias": np.ones(3), "kernel": np.ones((2, 2))}) == {
        "bias": False,
        "kernel": True,
    }


def test_schedule_rises_and_falls():
    o = options_lib.ScheduleOptions(end_lr=0.1, warmup=0.1)

    def rates(number, at):
        return np.asarray(jax.jit(jax.vmap(steps.make_schedule(o, number, 1.0)))(np.asarray(at)))

    lr = rates(100, range(101))
    assert 0 < lr[0] < lr[5] < lr[10] == 1.0 and (np.diff(lr[10:]) < 0).all()
    assert lr[100] == pytest.approx(0.1)
    assert all(np.isfinite(rates(n, [n])) for n in (1, 2, 3))
    o = dataclasses.replace(o, warmup=0.0)  # the first step is half as long all the same
    np.testing.assert_allclose(rates(100, [0, 1]), [0.5, 1.0])


# --- runs


@pytest.mark.slow
def test_loss_falls_below_the_unigram(folder, tmp_path):
    rarely = "--log-every 40 --eval-every 80 --save-every 80"
    assert train(folder, tmp_path / "run", *f"--steps 80 --lr 0.02 {rarely}".split()) == 0
    assert metrics(tmp_path / "run")[-1]["val_bpb"] < 3.0


@pytest.mark.slow
def test_recall_learns_and_shows_its_answers(tmp_path):
    out = tmp_path / "run"
    options = (
        "--vocab-size 16 --num-pairs 2 --test-pairs 1 2 --length 8 --val-sequences 64 --steps 150 --lr 0.02 --seed 2 "
        "--log-every 50 --eval-every 150 --save-every 150"
    )
    argv = ["train", "recall", "--out", str(out), *TINY, "--batch-size", "32", *options.split()]
    assert cli.main(argv) == 0
    last = metrics(out)[-1]
    assert last["val_accuracy"] > 0.6  # a value of the sequence at random: 0.5
    assert len((out / "sample.txt").read_text().splitlines()) == 3
    result = json.loads((out / "result.json").read_text())
    tests, slices = result["test"], result["test_by"]
    assert tests.keys() == {"1", "2"} and tests["1"]["accuracy"] > 0.6
    for by in ("place", "order"):
        for size, found in slices[by].items():
            assert len(found) == int(size) and sum(found) / int(size) == pytest.approx(
                tests[size]["accuracy"], abs=1e-4
            )


def test_least_memory_is_that_of_the_arrays():
    """The estimate counts real parameters and leaves out few of them: it never refuses what fits."""
    for o in (
        options_lib.ModelOptions(),
        options_lib.ModelOptions(
            hidden_size=64, num_layers=2, expand_v=1.0, mlp_ratio=3.0, tie_embeddings=True
        ),
        tiny_options().model,
    ):
        model = nnx.eval_shape(lambda o=o: steps.make_model(o, 256, 0))
        real = sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        assert 0.85 * real < memory.fewest_parameters(o, 256) <= real
    o = options_lib.ModelOptions(hidden_size=8, num_layers=3, num_heads=1, head_dim=4)
    weights = 16 * memory.fewest_parameters(o, 10)
    assert memory.least(o, 10, 6, 2, 5) == weights + 12 * 6 * 5 + 2 * 5 * 2 * 3 * 8


def test_a_step_takes_the_program_that_was_begun_with_the_weights(tmp_path):
    """It is compiled while they are made, and no second time."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    options = dataclasses.replace(tiny_options(), task=TextOptions(data=tmp_path, length=16, val_bytes=64))
    made = trainer.Trainer.make(options, make_task(options.task, 4, 0))
    made.functions = None  # whose `train` would compile it again
    _, metrics = made._train(made.state, 1)
    assert np.isfinite(metrics.loss)


def test_gradients_are_clipped():
    """Adam's first moment after one step is a tenth of the gradient that it was given."""
    o = options_lib.ScheduleOptions(clip=0.5)
    optimizer = steps.make_optimizer(o, 10, 0.1)
    params = {"w": np.zeros((2, 2), np.float32)}

    @jax.jit
    def state_after(gradient):
        return optimizer.update({"w": gradient}, optimizer.init(params), params)[1]

    for gradient, norm in (([[30.0, 0.0], [0.0, 40.0]], 0.5), ([[0.3, 0.0], [0.0, 0.0]], 0.3)):
        state = state_after(np.array(gradient, np.float32))
        [moment] = [
            x.mu["w"] for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu")
        ]
        np.testing.assert_allclose(
            moment, 0.1 * norm * np.asarray(gradient) / np.linalg.norm(gradient), rtol=1e-6
        )


def test_constants_of_the_optimizer():
    """Those of the recorded runs."""
    o = options_lib.ScheduleOptions()
    assert (o.weight_decay, o.warmup, o.end_lr, o.clip) == (0.1, 0.05, 0.02, 1.0)
    optimizer, params = steps.make_optimizer(o, 10, 0.1), {"w": np.zeros((2, 2), np.float32)}
    gradient = {"w": np.full((2, 2), 0.1, np.float32)}
    state = jax.jit(lambda gradient: optimizer.update(gradient, optimizer.init(params), params)[1])(gradient)
    [adam] = [x for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(x, "nu")]
    np.testing.assert_allclose(adam.nu["w"], 0.05 * 0.1**2, rtol=1e-5)


@pytest.mark.usefixtures("no_type_checks")
def test_saves_and_validations_take_no_time_of_training(monkeypatch):
    """By a false clock: a step takes 1 s, the first one 50 more, a validation 100, a save 1000."""
    now, tokens, lines = [0.0], 4 * 8, []

    def takes(seconds, result):
        now[0] += seconds
        return result

    class Clocked(trainer.Trainer):
        def _train(self, state, step):
            return takes(51 if step == 1 else 1, (state, steps.StepMetrics(*np.ones(3))))

        def validate(self):
            return takes(100, {})

        def save(self, store):
            takes(1000, None)

    monkeypatch.setattr(trainer, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    run = dict(steps=8, log_every=2, eval_every=4, save_every=3)
    options = dataclasses.replace(tiny_options(), run=options_lib.RunOptions(**run))
    task = types.SimpleNamespace(
        train_batch=lambda step: types.SimpleNamespace(tokens=np.zeros((4, 8))), metrics=lambda *x: {}
    )
    ignored, folder = unittest.mock.Mock(), types.SimpleNamespace(append=lines.append)
    loop = Clocked(options, task, *[None] * 6).loop
    assert loop(folder, None, ignored, threading.Event()) is None
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert [line["wall"]["tokens_per_second"] for line in lines] == [tokens] * 4
    # To step 2 only steps; a save after 3, a validation after 4, a save after 6.
    assert [line["wall"]["seconds"] for line in lines] == [52, 1054, 1156, 2158]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("step, lines", [(2, []), (7, [3, 4, 6]), (10, [3, 4, 6, 8, 9, 10])])
def test_steps_whose_lines_a_run_has(step, lines):
    """After every --log-every and --eval-every steps, and after the last one."""
    run = options_lib.RunOptions(steps=10, log_every=3, eval_every=4)
    options = dataclasses.replace(tiny_options(), run=run)
    assert trainer.Trainer(options, *[None] * 7, step=step).lines() == lines
