"""What a sweep trains and scores: its models, what a scale multiplies, runs in one program, the sets of sequences."""

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_sweeps import options

from gdn_jax.commands.errors import RunError
from gdn_jax.commands.files import JsonLines
from gdn_jax.inspect.plots import STYLES
from gdn_jax.models import ModelConfig
from gdn_jax.sweeps import grid, program, sweep
from gdn_jax.sweeps import options as sweep_options
from gdn_jax.sweeps.scoring import shared
from gdn_jax.training import mixers, steps
from gdn_jax.training.mixers import MIXERS
from gdn_jax.training.options import OptimizerOptions, RunOptions, TrainOptions
from gdn_jax.training.slices import Slice, table
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.recall import RecallOptions
from gdn_jax.training.tasks.table import make_task
from gdn_jax.training.trainer import Trainer


@pytest.mark.parametrize(
    ("scaled", "state", "changed"),
    [
        ("width", 3, {"hidden_size": 24, "num_heads": 3}),
        ("depth", 3, {"num_layers": 3}),
        ("state", 9, {"head_dim": 12}),
    ],
)
def test_what_a_scale_multiplies(scaled, state, changed):
    """The options that each choice multiplies, no others, and what becomes of the state."""
    o = options(scales=(1, 3), scaled=scaled)
    one, three = (sweep_options.scaled_model(o, scale) for scale in (1, 3))
    assert one == o.model and three == dataclasses.replace(one, **changed)
    assert sweep_options.state_size(three) == state * sweep_options.state_size(one)


def weights_of(*makes):
    """Weights of a model that each of `makes` makes, drawn by one program."""
    return jax.jit(lambda: [nnx.to_pure_dict(nnx.state(make(), nnx.Param)) for make in makes])()


@pytest.mark.slow
def test_equal_parameters_and_initial_weights():
    o = options()
    task = make_task(o.task, 8)

    def weights(mixer):
        return weights_of(lambda: program.make_model(o, task, mixer, 3))[0]

    usual = "gated_delta_net"
    alike = [name for name, m in MIXERS.items() if m.mixer == m.form == usual]
    shapes = [jax.eval_shape(lambda mixer=mixer: weights(mixer)) for mixer in alike]
    assert all(x == shapes[0] for x in shapes)
    jax.tree.map(np.testing.assert_array_equal, weights("softmax_attention"), weights("gated_delta_net_neg"))
    assert {*MIXERS} == {*get_args(sweep_options.MixerName)} == {*STYLES}
    assert set(alike) == set(o.sweep.mixers)
    made = {(m.rule, m.allow_neg_eigval, m.form, m.mixer) for m in MIXERS.values()}
    assert len(made) == len(MIXERS)


def test_time_step_scales_the_first_decays():
    """Initial time steps are multiplied; every other weight stays, whatever the mixer."""
    o = options()
    slow = dataclasses.replace(o, model=dataclasses.replace(o.model, time_step=0.1))
    task = make_task(o.task, 8)
    for mixer in ("mamba2", "gated_delta_net", "kda"):
        one, tenth = weights_of(
            *(functools.partial(program.make_model, x, task, mixer, 3) for x in (o, slow))
        )
        biases = [x["blocks"][0]["mixer"].pop("dt_bias") for x in (one, tenth)]
        steps_of = [np.log1p(np.exp(np.asarray(x, np.float64))) for x in biases]
        np.testing.assert_allclose(steps_of[1], 0.1 * steps_of[0], rtol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, one, tenth)


@pytest.mark.slow
def test_starts_are_arguments_of_one_program():
    """What runs side by side start with is what a model of these options starts with."""
    o = options(write_starts=(0.5, 0.06), time_steps=(1.0, 0.1), lrs=(0.01,), seeds=1, together=4)
    task = make_task(o.task, 8)
    runs = grid.wanted(o, "gated_delta_net", 1, [], "accuracy")
    start = program.make_start(o, task, "gated_delta_net")
    made = jax.jit(lambda: nnx.to_pure_dict(start(runs).state.params))()
    for i, run in enumerate(runs):
        size = dataclasses.replace(o.model, **run.start._asdict())
        model = MIXERS["gated_delta_net"].model(size)
        [wanted] = weights_of(lambda model=model: steps.make_model(model, task.vocab_size, 0))
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-6), made, wanted
        )


def test_hybrid():
    """Attention in every fourth layer, in the last of a shallower model; it has to have another one."""
    o = options(mixers=("hybrid",))
    for layers, attention in ((2, [1]), (8, [3, 7])):
        size = dataclasses.replace(o.model, num_layers=layers)
        kinds = MIXERS["hybrid"].model(size).config_values()["layer_types"]
        assert [i for i, kind in enumerate(kinds) if kind == "attention"] == attention
    with pytest.raises(RunError, match="--attention-every: expected 2 to --num-layers 1, got 1"):
        sweep_options.check(o)


def test_controls():
    """A Transformer has attention with rotary positions alone, the hybrid's control all of its form but attention.

    Both have about as many parameters as the other mixers, and take a start that is none of attention's."""
    size = sweep_options.SizeOptions(hidden_size=64, num_layers=4, num_heads=2, head_dim=24, write_start=0.1)

    def made(name):
        options = MIXERS[name].model(size)
        options.check()
        model = nnx.eval_shape(lambda: steps.make_model(options, 16, 0))
        return model, sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))

    (_, usual), (transformer, wide), (control, same) = map(
        made, ("gated_delta_net", "transformer", "hybrid_control")
    )
    assert abs(wide / usual - 1) < 0.05 and same == usual
    attention = transformer.config.attention
    assert {*transformer.config.types} == {"attention"} and attention.rotary_dim == attention.head_dim == 32
    assert (attention.qk_norm, attention.output_gate, transformer.config.scale_embedding) == (
        "none",
        False,
        True,
    )
    hybrid = ModelConfig(**MIXERS["hybrid"].model(size).config_values())
    assert control.config.attention is None and {*control.config.types} == {"gated_delta_net"}
    left = {name for name in vars(hybrid) if getattr(hybrid, name) != getattr(control.config, name)}
    assert left - {"vocab_size", "dtype"} == {"layer_types", "attention"}
    for name in ("transformer", "hybrid_control"):
        with pytest.raises(RunError, match=f"--rule: expected gated_delta in a {name}, got delta"):
            dataclasses.replace(MIXERS[name].model(size), rule="delta").check()
        assert mixers.label(MIXERS[name].model(size)) == MIXERS[name].label


@pytest.mark.slow
@pytest.mark.parametrize(
    "large",
    [
        pytest.param(1024, id="all logits", marks=pytest.mark.crossed),
        pytest.param(16, id="logits at the queries"),
    ],
)
def test_turns_in_one_program(monkeypatch, large):
    """Steps whose shapes take turns, in one compiled loop and two runs at a time, of which the second is that of
    `gdn train`."""
    monkeypatch.setattr(program, "_LARGE_VOCABULARY", large)
    task_options = RecallOptions(
        vocab_size=16, cases=("8:2", "12:3", "8:1", "8:2"), train_sequences=50, val_sequences=16
    )
    o = dataclasses.replace(options(together=2), task=task_options)
    task = make_task(o.task, 8)
    start = program.make_start(o, task, "mamba2")
    runs = jax.jit(lambda: start([grid.Run("mamba2", lr, 0) for lr in (0.01, 0.03)]))()
    runs = program.Program(o, task, "mamba2").advance(runs, 0, 5)
    trained = TrainOptions(
        task_options,
        RunOptions(steps=5, batch_size=8),
        MIXERS["mamba2"].model(o.model),
        OptimizerOptions(lr=0.03),
    )
    trainer = Trainer.make(trained, task)
    for step in range(1, 6):
        trainer.state, _ = trainer.functions.train(
            trainer.rest, trainer.state, trainer.task.train_batch(step)
        )
    got = jax.tree.map(lambda x: x[1], runs.state.params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(trainer.state.params), strict=True):
        # float32 sums in another order, over five steps of Adam
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_last_steps_pass_states():
    """Steps before them are those of a sweep without, and they are steps of `gdn train --start passed`."""
    o = options(together=1, passed_steps=2, lrs=(0.03,))
    task = make_task(o.task, 8)
    runs = program.make_start(o, task, "mamba2")([grid.Run("mamba2", 0.03, 0)])
    made = program.Program(o, task, "mamba2")
    runs = made.advance(made.advance(runs, 0, 4), 4, 5)  # the first of the two in a loop with others
    trained = TrainOptions(
        o.task,
        RunOptions(steps=5, batch_size=8),
        MIXERS["mamba2"].model(o.model),
        OptimizerOptions(lr=0.03),
    )
    trainer = Trainer.make(trained, task)
    passed = dataclasses.replace(trained, run=dataclasses.replace(trained.run, start="passed"))
    with_states = Trainer.make(passed, task).functions
    for step in range(1, 6):
        functions = with_states if step > 3 else trainer.functions
        trainer.state, _ = functions.train(trainer.rest, trainer.state, trainer.task.train_batch(step))
    got = jax.tree.map(lambda x: x[0], runs.state.params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(trainer.state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    for size, grid_of, said in (
        ({}, {"passed_steps": 6}, "at most --steps = 5, got 6"),
        ({"remat": "full"}, {"passed_steps": 2}, "0 with --remat, --matmul or single rows, got 2"),
        ({}, {"passed_steps": 2, "batch_size": 1, "together": 1}, "single rows, got 2"),
    ):
        wrong = options(**grid_of)
        with pytest.raises(RunError, match=f"--passed-steps: expected .*{said}"):
            sweep_options.check(dataclasses.replace(wrong, model=dataclasses.replace(wrong.model, **size)))


@pytest.mark.parametrize(
    "tests, shapes", [((4, 6), [(8, 6)]), ((2, 3), [(8, 6)]), ((6, 30), [(2, 6), (2, 30)])]
)
def test_sets_that_runs_are_scored_on(tmp_path, monkeypatch, tests, shapes):
    """One shape where that wastes little, at most so many tokens at a time; every sequence is scored once."""
    monkeypatch.setattr(sweep, "_SCORED", 60)
    o = options()
    o = dataclasses.replace(o, task=dataclasses.replace(o.task, test_lengths=tests))
    task = make_task(o.task, 8)
    scored = sweep.Sweep(o, task, JsonLines(tmp_path / "runs.jsonl")).sets
    sets = {name: [x for x in scored if x.names == (name,)] for name in ("val", *map(str, tests))}
    assert sum(map(len, sets.values())) == len(scored)
    assert sorted({x.batch.tokens.shape for x in scored}) == shapes
    whole = np.concatenate([batch.tokens for batch in task.test_batches(8)[tests[-1]]])[:, : tests[-1]]
    read = np.concatenate([x.batch.tokens for x in sets[str(tests[-1])]])[:, : tests[-1]]
    np.testing.assert_array_equal(read, whole)
    assert {float(x.weights.sum()) for x in sets["val"]} == {6 * shapes[0][0]}


def test_scores_of_slices(tmp_path):
    """Those of a model's own logits at the queries of each slice, in NumPy; they make up the score of the test."""
    o = options(together=2)
    task_options = RecallOptions(vocab_size=16, num_pairs=4, length=24, test_pairs=(2, 3), val_sequences=16)
    o = dataclasses.replace(o, task=task_options)
    task = make_task(o.task, 8)
    work = sweep.Sweep(o, task, JsonLines(tmp_path / "runs.jsonl"))
    runs = program.make_start(o, task, "mamba2")([grid.Run("mamba2", 0.01, seed) for seed in (0, 1)])
    scores = program.Program(o, task, "mamba2").score(runs, work.sets)

    @jax.jit
    def best(params, tokens):
        model = program.make_model(o, task, "mamba2", 0)
        nnx.update(model, params)
        return jnp.argmax(model(tokens)[0], -1)

    for size, batches in task.test_batches(8).items():
        names = [name for name in scores if isinstance(name, Slice) and name.size == size]
        assert names == [Slice(size, by, i) for by in ("place", "order") for i in range(size)]
        for r in range(2):
            params = jax.tree.map(lambda x, r=r: x[r], runs.state.params)
            right, asked = np.zeros((2, size)), np.zeros((2, size))
            for batch in batches:
                tokens, targets, weights = map(np.asarray, batch)
                guess = np.asarray(best(params, tokens))
                for b, t in np.argwhere(weights):
                    place = tokens[b, : 2 * size : 2].tolist().index(tokens[b, t])
                    at = (0, 1), (place, int(weights[b, :t].sum()))
                    right[at] += guess[b, t] == targets[b, t]
                    asked[at] += 1
            np.testing.assert_allclose(
                [scores[name][r][1] for name in names], (right / asked).ravel(), rtol=1e-6
            )
            assert scores[str(size)][r][1] == pytest.approx(right[0].sum() / asked[0].sum())


def test_sets_of_learning_curves(tmp_path):
    """Each kind of sequences has its own, under its name: here as many queries as the name says."""
    o = options(curve_every=2)
    o = dataclasses.replace(o, task=RecallOptions(vocab_size=16, cases=("8:1", "12:3"), val_sequences=16))
    kinds = sweep.Sweep(o, make_task(o.task, 8), JsonLines(tmp_path / "runs.jsonl")).kinds
    asked = [(name, set(x.weights[i].sum(1))) for x in kinds for i, name in enumerate(x.names)]
    assert sorted(asked) == [("1", {1}), ("3", {3})]


@pytest.mark.slow
def test_sets_with_the_same_sequences_are_read_once():
    """Each counts by its own weights, also a set that has a batch twice; batches of a shape have as many weights."""
    tokens, weights = np.arange(6).reshape(2, 3), np.eye(2, 3, dtype=np.float32)
    one = Batch(tokens, tokens + 1, weights)
    sets = {
        "val": [one._replace(targets=tokens)],
        "2": [one, one],
        "3": [one._replace(weights=1 - weights), Batch(tokens[:, :2], tokens[:, :2], weights[:, :2])],
    }
    got = shared(sets)
    assert [x.names for x in got] == [("val",), ("2", "3"), ("2",), ("3",)]
    assert [x.weights.shape for x in got] == [(2, 2, 3)] * 3 + [(1, 2, 2)]
    np.testing.assert_array_equal(got[1].weights, [weights, 1 - weights])
    np.testing.assert_array_equal(got[0].weights, [weights, 0 * weights])

    @jax.jit
    def scored(batch, weights):
        model = steps.make_model(MIXERS["mamba2"].model(options().model), 8, 0)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        alone = [steps.loss_sum(graphdef, rest, params, one._replace(weights=x))[1] for x in weights]
        return steps.sums_by_weights(graphdef, rest, params, batch, weights), alone

    sums, alone = scored(got[1].batch, got[1].weights)
    for i, wanted in enumerate(alone):
        for x, y in zip(wanted, sums, strict=True):
            np.testing.assert_allclose(y[i], x, rtol=1e-6)


def test_slices_as_files_have_them():
    """In their order by size; None where nothing counts. A set in which nothing counts has no mean."""
    nothing = steps.mean([steps.Sums(0.0, 0.0, 0.0)])
    scores = {Slice(2, "place", 0): 1 / 3, Slice(2, "place", 1): nothing[1], Slice(12, "order", 0): 1.0}
    assert table(scores) == {"place": {"2": [0.3333, None]}, "order": {"12": [1.0]}}
