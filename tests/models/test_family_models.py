"""Models, runs and reports with the family's mixers."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from flax import nnx
from harness import tiers
from jax.sharding import PartitionSpec
from small_layers import drawn, empty_cache
from small_models import made
from steps_on_meshes import CONFIG, check_same_steps, three_steps
from tolerances import FLOAT32, assert_close

from gdn_jax.commands import cli
from gdn_jax.hf import save_hf
from gdn_jax.inspect.analysis import layer_half_lives, memory_horizon, model_rule_inputs
from gdn_jax.layers import KimiDeltaAttention
from gdn_jax.layers.gated_delta_product import DeltaProduct
from gdn_jax.layers.kimi_delta_attention import KimiDelta
from gdn_jax.layers.table import TOKEN_MIXERS
from gdn_jax.models import LanguageModel, ModelConfig, generate
from gdn_jax.models.config import AttentionConfig
from gdn_jax.models.costs import layer_costs, parameters
from gdn_jax.models.inference import program
from gdn_jax.models.inference.projections import (
    FactorGroup,
    ProjectionGroup,
    multiply_factors,
)
from gdn_jax.models.inference.recurrent import FACTORS, DeltaRow
from gdn_jax.models.presets import PRESETS
from gdn_jax.models.served import ServedModel
from gdn_jax.parallel import sharding
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.parts.kernels import trusted
from gdn_jax.rules import RULES
from gdn_jax.training import steps
from gdn_jax.training.mixers import MIXERS, label
from gdn_jax.training.options import (
    TASKS,
    ScheduleOptions,
    SizeOptions,
    from_json,
    to_json,
)
from gdn_jax.training.tasks.batch import Batch

F32 = FLOAT32["o"]
SIZE = dict(vocab_size=19, hidden_size=16, num_heads=2, head_dim=6, expand_v=1.5, implementation="recurrent")
FAMILY = [name for name in TOKEN_MIXERS if name != "gated_delta_net"]


def small(mixer, **options):
    return ModelConfig(**{**SIZE, "num_layers": 1, "intermediate_size": 16, "mixer": mixer, **options})


@functools.cache
def model_of(mixer, **options):
    return made(small(mixer, **options))


@nnx.jit
def call(model, tokens, cache):
    return model(tokens, cache=cache)


def test_tables():
    """One name for a mixer everywhere; a run of a version without them has Gated DeltaNets."""
    default = TASKS["bytes"]
    stored = {name: value for name, value in to_json(default).items() if name != "mixer"}
    assert from_json(default, stored, default.run) == default
    assert {*TOKEN_MIXERS} <= {*MIXERS}
    for name, mixer in TOKEN_MIXERS.items():
        assert ModelConfig(mixer=name).mixer == mixer
        assert label(MIXERS[name].model(SizeOptions())) == MIXERS[name].label


@pytest.mark.parametrize(
    "mixer",
    tiers(FAMILY, [], ["kda", "gated_delta_product", "gated_delta_net_2", "kda_lower_bound", "gla"]),
)
def test_a_row_equals_its_tokens(mixer, monkeypatch):
    """A row in one pass, and token by token through the cache by the copy whose projections are one product."""
    model, tokens = model_of(mixer), np.random.default_rng(0).integers(0, 19, (2, 5))
    empty = empty_cache(model, 2)
    whole, last = jax.device_get(call(model, tokens, empty))
    cache, logits = empty, []
    monkeypatch.setattr(program, "usable", lambda *_: True)
    single = program.for_decoding(program.for_inference(model), 1)
    assert any(isinstance(part, ProjectionGroup) for _, part in nnx.iter_modules(single))
    own, (first, *_, last_read) = single.blocks[0].mixer, single.blocks[0].mixer.ahead
    assert first is own.mixer.q_proj.group.weight and last_read is single.head
    for t in range(5):
        one, cache = call(single, tokens[:, t : t + 1], cache)
        logits.append(one)
    assert_close(whole, np.concatenate(logits, 1), F32)
    assert_close(last[0].state, np.asarray(cache[0].state), F32)


@pytest.mark.parametrize(
    ("sizes", "rows", "multiplied"),
    [({}, 1, True), ({}, 2, False), (dict(hidden_size=2304, num_heads=18), 1, False)],
    ids=["one row", "two rows", "a stream that the kernel refuses"],
)
def test_factors_are_multiplied_for_the_kernel_of_a_whole_layer(sizes, rows, multiplied):
    """A token of one row has one kernel for a layer whose gates have full rank; other copies keep the factors."""
    options: dict = dict(vocab_size=8, num_layers=1, dtype="bfloat16", weight_dtype="bfloat16")
    config = dataclasses.replace(PRESETS["kda-0.4b"], **options | sizes)

    def copied():
        model = program.for_inference(LanguageModel(config, rngs=nnx.Rngs(0)))
        return program.for_decoding(model, rows)

    with trusted():
        mixer = nnx.eval_shape(copied).blocks[0].mixer
    assert isinstance(mixer, DeltaRow) == multiplied
    kinds = {type(getattr(mixer.mixer, f"{name}_proj").group) for name in FACTORS}
    assert kinds == {ProjectionGroup if multiplied else FactorGroup}


def test_the_product_of_factors_is_the_layer():
    layer = drawn(lambda rngs: KimiDeltaAttention(16, 2, head_dim=8, output_gate_bias=True, rngs=rngs))
    x = np.random.default_rng(0).standard_normal((2, 3, 16)).astype(np.float32)

    @nnx.jit
    def both(layer, x):
        whole = nnx.clone(layer)
        multiply_factors(whole, FACTORS)
        return layer(x)[0], whole(x)[0]

    assert_close(*both(layer, x), F32)


@pytest.mark.slow
def test_generation():
    """Beside attention: the likeliest tokens are those of whole passes, with a prompt that is padded."""
    attention = AttentionConfig(2, None, 8, rotary_dim=4)
    model = model_of("kda", num_layers=2, layer_types=("kda", "attention"), attention=attention)
    prompt = np.random.default_rng(1).integers(0, 19, (1, 3))
    new = np.asarray(generate(model, jax.device_put(prompt), 4))
    logits = nnx.jit(lambda model, tokens: model(tokens)[0])(model, np.concatenate([prompt, new], 1))
    np.testing.assert_array_equal(np.argmax(np.asarray(logits)[:, 2:-1], -1), new)


@pytest.mark.parametrize("mixer", tiers(["kda", "gated_delta_net_2", "kda_lower_bound", "gla"], [], ["kda"]))
def test_served(mixer):
    """Two prompts in one call, a token, and drafts, over pools: the likeliest tokens of whole passes."""
    model, rng = model_of(mixer), np.random.default_rng(2)
    server = ServedModel(model)
    prompts = [rng.integers(0, 19, n) for n in (3, 5)]
    slots, pools = np.array([2, 0]), jax.jit(lambda: server.make_pools(3))()
    new, pools = jax.jit(server.prefill)(
        server.params, np.concatenate(prompts)[None], np.array([0, 3, 8]), slots, np.zeros(2, bool), pools
    )
    tokens = [np.asarray(new)]
    new, pools = jax.jit(server.decode)(server.params, new, slots, pools)
    tokens.append(np.asarray(new))
    drafts = np.stack([np.asarray(new), [7, 8]], 1)
    checked, _ = jax.jit(server.verify)(
        server.params, drafts, np.array([[2, 1], [0, -1]]), np.ones(2, np.int32), pools
    )
    rows = np.zeros((2, 8), int)  # padded behind, where no token is read
    for n, prompt in enumerate(prompts):
        rows[n, : len(prompt) + 3] = [*prompt, *(t[n] for t in tokens), drafts[n, 1]]
    likeliest = np.argmax(np.asarray(call(model, rows, empty_cache(model, 2))[0]), -1)
    for n, prompt in enumerate(prompts):
        want = likeliest[n, len(prompt) - 1 : len(prompt) + 3]
        np.testing.assert_array_equal(want, [*(t[n] for t in tokens), *np.asarray(checked)[n]])


def test_analyses():
    """Inputs of the rule, half-lives of every channel, and the horizon that gdn info tells."""
    inputs = nnx.jit(model_rule_inputs)(model_of("kda"), np.zeros((1, 4), int))
    assert [x.g.shape for x in inputs] == [(1, 4, 2, 6)]
    lives = jax.device_get(jax.jit(layer_half_lives)(inputs[0].g))
    assert lives.median.shape == (2, 6) and np.all(lives.mean_rate > 0)
    start = TOKEN_MIXERS["gated_delta_product_3"].start(small("kda", allow_neg_eigval=True), 1.0)
    assert float(memory_horizon(6, *start)) == pytest.approx(np.log(2) / (0.08 - 3 * np.log(5 / 6)), rel=1e-5)
    assert TOKEN_MIXERS["gla"].start(small("gla"), 1.0).beta == 0
    assert TOKEN_MIXERS["kda_lower_bound"].start(small("kda"), 0.1).g == pytest.approx(-0.005)
    plain = dataclasses.replace(TOKEN_MIXERS["kda"], use_A_log=False)
    assert plain.start(small("kda"), 0.1).g == pytest.approx(-0.001)  # a rate of 1, the middle step of 0.01
    starts = {
        rule: TOKEN_MIXERS["gated_delta_net"].start(small("gated_delta_net", rule=rule), 1.0)
        for rule in RULES
    }
    forgets = {rule: (start.g < 0, start.beta > 0) for rule, start in starts.items() if start is not None}
    assert forgets == {"gated_delta": (True, True), "delta": (False, True), "mamba2": (True, False)}


def test_costs_and_parameters():
    """Parameters by part; states are as large as those of Gated DeltaNet, and n steps cost n times as much."""
    counts = parameters(small("gated_delta_net_2", num_layers=3))
    assert counts["GatedDeltaNet2"] % 3 == 0 and "GatedDeltaNet" not in counts
    plain, kda, product = (
        layer_costs(small(mixer), TOKEN_MIXERS[mixer].name, 64)
        for mixer in ("gated_delta_net", "kda", "gated_delta_product_3")
    )
    assert plain.cache_bytes == kda.cache_bytes and plain.prefill_flops == kda.prefill_flops
    assert kda.activation_bytes - plain.activation_bytes == 64 * 2 * 6 * 4
    apart = layer_costs(small("gated_delta_net_2"), "gated_delta_net_2", 64)
    assert (
        apart.activation_bytes - kda.activation_bytes == 64 * 2 * (6 + 9) * 4
    )  # erase and write of each channel
    assert product.prefill_flops == 3 * plain.prefill_flops
    assert product.cache_bytes - plain.cache_bytes == 2 * (2 * 6 + 2 * 9) * 3 * 4


OF_THE_FAMILY = [
    name
    for name, config in PRESETS.items()
    if config.mixer.name != "gated_delta_net" and not config.attention
]


@pytest.mark.parametrize(
    "preset", tiers(OF_THE_FAMILY, {*OF_THE_FAMILY} - {"gated-delta-net-2-0.4b", "kda-0.4b"}, ("kda-0.4b",))
)
def test_info(preset, capsys):
    assert cli.main(["info", preset]) == 0
    out = capsys.readouterr().out
    mixer = PRESETS[preset].mixer
    assert f"x ({1} x {mixer.title})" in out and "half of a stored key is left after" in out
    if preset.endswith("0.4b"):
        assert 3.5e8 < sum(parameters(PRESETS[preset]).values()) < 4.6e8


def test_the_size_of_a_published_model():
    """The dense model of Erase-then-Delta Attention has the number of parameters that its paper says."""
    assert round(sum(parameters(PRESETS["eda-2.5b"]).values()), -5) == 2_529_500_000


def test_parameters_on_a_mesh():
    """Projections to heads are split over them, the narrow factors between are whole."""
    config = small("gated_delta_net_2", num_heads=4)
    shape = MeshShape(head=2, data=2)
    sharding.check(config, shape, 2, 8)
    params = nnx.state(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))), nnx.Param)
    mixer = nnx.to_pure_dict(sharding.parameter_specs(params, shape))["blocks"][0]["mixer"]
    for name in ("f_b_proj", "g_b_proj", "w_proj", "b_proj", "q_proj"):
        assert mixer[name]["kernel"] == PartitionSpec(None, "head"), name
    assert mixer["f_a_proj"]["kernel"] == PartitionSpec(None, None)
    assert mixer["dt_bias"] == PartitionSpec("head", None)


@pytest.mark.parametrize(
    "mixer, mesh",
    [
        pytest.param("kda", "head=2,context=2", marks=pytest.mark.slow),
        pytest.param("eda", "head=2,context=2", marks=pytest.mark.slow),
        pytest.param("gated_delta_product", "head=2,context=4", marks=pytest.mark.crossed),
    ],
)
def test_training_on_a_mesh(mixer, mesh):
    """Three steps on devices of a mesh are those of one device."""
    config = dataclasses.replace(CONFIG, mixer=mixer, num_layers=1)
    check_same_steps(three_steps(mesh, config), three_steps("data=1", config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["kda-0.4b", pytest.param("gated-delta-net-2-0.4b", marks=pytest.mark.crossed)]
)
def test_a_training_step_of_04b_traces(preset):
    """Forward, backward and AdamW of the full size, by shapes alone."""
    config = PRESETS[preset]
    graphdef, params, rest = nnx.split(
        nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))), nnx.Param, ...
    )
    optimizer = steps.make_optimizer(ScheduleOptions(), 10, 1e-3)
    tokens = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    batch = Batch(tokens, tokens, jax.ShapeDtypeStruct((2, 2048), jnp.float32))
    state = steps.TrainState(params, jax.eval_shape(optimizer.init, params))
    new, metrics = jax.eval_shape(
        lambda state, batch: steps.train_step(graphdef, rest, optimizer, 1, state, batch), state, batch
    )
    jax.tree.map(lambda a, b: None if a.shape == b.shape else pytest.fail(f"{a} {b}"), new.params, params)
    assert metrics.loss.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixer",
    [
        "kda",
        *(
            pytest.param(name, marks=pytest.mark.crossed)
            for name in ("gated_delta_net_2", "gated_delta_product")
        ),
    ],
)
def test_a_run_resumes_bit_for_bit(mixer, tmp_path):
    """Bytes: a run in one go, and the same one resumed from its first checkpoint; an older version's file opens. One
    mixer's samples are longer than a byte, which takes a program more."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text(f"{i} the quick brown fox jumps over the lazy dog. " * 20)
    out = tmp_path / "run"
    sample = () if mixer == "kda" else ("--sample-bytes", "1")
    assert tiny_runs.train(folder, out, "--mixer", mixer, *sample) == 0
    step, expected = tiny_runs.final_state(out)
    lines = tiny_runs.metrics(out)
    assert step == 12 and lines[-1]["loss"] < lines[0]["loss"]
    for later in (8, 12):
        shutil.rmtree(out / "checkpoints" / str(later))
    assert tiny_runs.resume(out) == 0
    assert tiny_runs.metrics(out) == lines
    jax.tree.map(np.testing.assert_array_equal, tiny_runs.final_state(out)[1], expected)
    file = out / "config.json"
    config = json.loads(file.read_text())
    assert config["options"].pop("mixer") == mixer
    if mixer == "kda":
        file.write_text(json.dumps(config))
        assert tiny_runs.resume(out) != 0  # it is read as a Gated DeltaNet, whose arrays are others


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mixer: expected one of 'gated_delta_net', 'kda'"):
        ModelConfig(mixer="kimi")
    with pytest.raises(
        ValueError, match="rule: expected gated_delta, as kda has a rule of its own, got mamba2"
    ):
        ModelConfig(mixer="kda", rule="mamba2")
    with pytest.raises(
        ValueError,
        match="layer_types: expected one of 'kda', 'attention', 'window_attention', got 'gated_delta_net'",
    ):
        ModelConfig(mixer="kda", num_layers=1, layer_types=("gated_delta_net",))
    with pytest.raises(ValueError, match="gate_rank: expected a positive integer, got 0"):
        KimiDelta(gate_rank=0)
    with pytest.raises(ValueError, match="num_householder: expected a positive integer, got 0"):
        DeltaProduct(num_householder=0)
    with pytest.raises(NotImplementedError, match="mixer: models of the family Qwen have GatedDeltaNetMixer"):
        save_hf(model_of("kda"), tmp_path / "saved")
