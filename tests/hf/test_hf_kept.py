"""Models whose weights are kept in 8 bits: loaded, called, served, written, and refused where nothing keeps them."""

import dataclasses
from pathlib import Path

import hf_checkpoints
import jax
import ml_dtypes
import numpy as np
import pytest
import small_models
from device_arrays import put
from flax import nnx
from harness import tiers
from test_hf_float8 import DENSE, FP8, MOE, NEXT, assert_same, copied, params, quantise

from gdn_jax import serving
from gdn_jax.commands import cli
from gdn_jax.hf import load_hf, save_hf
from gdn_jax.hf.checkpoint import read_tensors
from gdn_jax.layers.block_weights import BlockLinear, BlockSwiGLU
from gdn_jax.models import ExpertsConfig, LanguageModel, ModelConfig, generate
from gdn_jax.models.costs import bytes_of_step, parameters, weight_bytes
from gdn_jax.models.experts import BlockExperts
from gdn_jax.models.inference.program import for_decoding, for_inference
from gdn_jax.models.inference.projections import BlockGroup
from gdn_jax.models.lora import add_lora
from gdn_jax.models.presets import PRESETS
from gdn_jax.models.served import ServedModel
from gdn_jax.parts.kernels import trusted

DATA = Path(__file__).parents[1] / "data"
LOAD = {"implementation": "recurrent", "weights": "float8"}


@pytest.mark.parametrize("name", tiers(FP8, FP8[1:], FP8[:1]))
def test_logits_are_those_of_transformers_with_dequantised_weights(name):
    """The head for more tokens, too, is that of the dequantised model, but for the order of float32 sums; the
    matrices and their scales are in 8 bits."""
    want = hf_checkpoints.expected_of(DATA / name)
    model = load_hf(DATA / name, dtype="float32", **LOAD)
    hf_checkpoints.assert_same_as_expected(model, want)
    whole = load_hf(DATA / name, dtype="float32", implementation="recurrent")
    tokens = put(want["input_ids"])

    @jax.jit
    def heads():
        return model.mtp_logits(tokens), whole.mtp_logits(tokens)

    np.testing.assert_allclose(*heads(), rtol=0, atol=hf_checkpoints.LOGITS)
    kept = {key: array for key, array in params(model).items() if "_blocks" in key}
    codes = [array for key, array in kept.items() if "codes" in key]
    assert codes and all(array.dtype == ml_dtypes.float8_e4m3fn for array in codes)
    of_whole = sum(array.size for array in params(whole).values())
    assert of_whole == sum(a.size for key, a in params(model).items() if "scales" not in key)
    assert sum(array.size for array in codes) > 0.7 * of_whole


@pytest.mark.slow
@pytest.mark.parametrize("name", FP8)
def test_greedy_continuation(name):
    """Of one row, which multiplies by the codes, and of two, by `generate` and, of the dense model, by a server."""
    tokens = hf_checkpoints.expected_of(DATA / name)["generated"]
    model = load_hf(DATA / name, dtype="float32", **LOAD)
    hf_checkpoints.assert_continued(model, tokens[:, :21], tokens[:, 21:])
    new = tokens[:, 21:]
    np.testing.assert_array_equal(generate(model, put(tokens[:1, :21]), new.shape[1]), new[:1])
    if model.config.experts is not None:
        return
    served = ServedModel(model)
    server = serving.Server(
        *(served.prefill, served.decode, served.params, served.make_pools(2, capacity=64)), max_batch=2
    )
    numbers = [server.submit(row[:21], new.shape[1]) for row in tokens]
    answers = server.run()
    np.testing.assert_array_equal([answers[number] for number in numbers], new)


@pytest.mark.parametrize("name", tiers(FP8, FP8[1:], FP8[:1]))
def test_what_is_kept_is_written_as_it_was(name, tmp_path):
    """Codes and scales byte by byte; whole weights as those of the dequantised model."""
    model = load_hf(DATA / name, **LOAD)
    save_hf(model, tmp_path / "kept")
    before, after = read_tensors(DATA / name), read_tensors(tmp_path / "kept")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if tensor.dtype == "F8_E4M3" or key.endswith("_scale_inv"):
            assert after[key].dtype == tensor.dtype, key
            assert after[key].stored_values().tobytes() == tensor.stored_values().tobytes(), key
    save_hf(model, tmp_path / "whole", weight_dtype="bfloat16")
    assert_same(params(load_hf(tmp_path / "whole")), params(load_hf(DATA / name)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folders of float32 checkpoints."""
    folder = tmp_path_factory.mktemp("plain")
    for seed, (name, config) in enumerate({"dense": DENSE, "moe": MOE, "next": NEXT}.items()):
        save_hf(small_models.made(config, seed), folder / name)
    return folder


@pytest.mark.parametrize("name", ["dense", "moe", "next"])
def test_whole_weights_are_rounded_as_they_are_written(name, plain, tmp_path):
    """To keep those of a checkpoint is to write it in 8 bits and to keep these; and what is kept is written again."""
    model = load_hf(plain / name, **LOAD)
    folder = copied(plain, name, tmp_path / "fp8")
    quantise(folder)
    assert_same(params(model), params(load_hf(folder, **LOAD)))
    save_hf(model, tmp_path / "again")
    assert_same(params(load_hf(tmp_path / "again", **LOAD)), params(model))


def test_scales_of_more_digits_are_written_with_them(plain, tmp_path):
    folder = copied(plain, "dense", tmp_path / "fp8")
    quantise(folder, scale_dtype=np.float32)
    model = load_hf(folder, **LOAD)
    save_hf(model, tmp_path / "again")
    assert_same(params(load_hf(tmp_path / "again", **LOAD)), params(model))


def test_fused_experts_are_kept(plain, tmp_path):
    """Their blocks run over both branches. In the files, where each branch has blocks of its own, they are rounded
    once more, by half a step of 8 bits at most."""
    folder = copied(plain, "moe", tmp_path / "fp8")
    quantise(folder, fused=True)
    kept, whole = load_hf(folder, **LOAD), load_hf(folder)
    save_hf(kept, tmp_path / "again")
    again = load_hf(tmp_path / "again")
    for i, block in enumerate(kept.blocks):
        for name in ("gate_up", "down"):
            found, want, written = (
                np.asarray(getattr(model.blocks[i].mlp, name)[...]) for model in (kept, whole, again)
            )
            np.testing.assert_array_equal(found, want)
            assert np.all(np.abs(written - want) <= 2.0**-4 * np.abs(want) + 2.0**-10 * np.max(np.abs(want)))
        assert type(block.mlp) is BlockExperts


def test_experts_of_few_rows():
    """The chosen experts alone are read where the rows choose at most a third of all; the logits are the same."""
    config = dataclasses.replace(MOE, experts=ExpertsConfig(12, 2, 129, 33), weights="float8")
    model = small_models.made(config)
    tokens = put(np.arange(14, dtype=np.int32).reshape(2, 7))

    @jax.jit
    def logits():
        _, cache = model(tokens[:, :6], return_cache=True)
        return model(tokens)[0][:, 6:], model(tokens[:, 6:], cache=cache)[0]

    np.testing.assert_allclose(*logits(), rtol=0, atol=hf_checkpoints.LOGITS)


@pytest.mark.parametrize("experts", [None, ExpertsConfig(16, 2, 64, 64)])
def test_no_copy_for_single_tokens_has_whole_weights(experts):
    """In the copies for inference, in compute dtypes too: SwiGLUs and experts stay as they are, and projections of
    one input are one product of all their codes."""
    config = dataclasses.replace(
        PRESETS["qwen3.5-small"], vocab_size=64, num_layers=4, dtype="bfloat16", weights="float8"
    )
    model = small_models.made(dataclasses.replace(config, experts=experts))
    with trusted():
        for rows in (1, 4):
            copy = nnx.eval_shape(lambda rows=rows: for_decoding(for_inference(model), rows))
            for block in copy.blocks:
                assert type(block.mlp) is (BlockSwiGLU if experts is None else BlockExperts)
                grouped = [part for _, part in nnx.iter_modules(block.mixer) if isinstance(part, BlockGroup)]
                assert sorted(group.scales.shape[1] for group in grouped) == [1, 1]
                assert not [
                    part for _, part in nnx.iter_modules(block.mixer) if isinstance(part, BlockLinear)
                ]
    largest = max(x.size for x in jax.tree.leaves(nnx.state(copy)) if x.dtype != ml_dtypes.float8_e4m3fn)
    assert largest == 64 * 128  # of the embedding


@pytest.mark.parametrize("config", [DENSE, MOE, NEXT])
def test_costs_are_those_of_the_arrays(config):
    """Bytes of all arrays, scales among them; numbers of parameters do not change. Of the weights that a token reads,
    those in blocks count a byte and four for 128 of them."""
    kept = dataclasses.replace(config, weights="float8")
    arrays = jax.tree.leaves(nnx.eval_shape(lambda: nnx.state(LanguageModel(kept, rngs=nnx.Rngs(0)))))
    assert weight_bytes(kept) == sum(x.size * x.dtype.itemsize for x in arrays)
    assert parameters(kept) == parameters(config)
    assert bytes_of_step(kept, 1) < 0.5 * bytes_of_step(config, 1)
    published = dataclasses.replace(PRESETS["qwen3.6-27b"], dtype="bfloat16", weight_dtype="bfloat16")
    in_blocks = dataclasses.replace(published, weights="float8")
    narrow = 48 * 2 * 48 * 5120 + 48 * 4 * 10240 + 129 * 5120 + 48 * 128 + 48 * 96 + 32 * 256
    values = sum(parameters(published).values()) - 2 * 248320 * 5120 - narrow
    rest = 2 * (248320 * 5120 + narrow)
    assert bytes_of_step(in_blocks, 1) == pytest.approx(values * (1 + 4 / 128) + rest, rel=1e-6)


def test_info_counts_them(capsys):
    config = dataclasses.replace(PRESETS["qwen3.6-27b"], weights="float8")
    assert PRESETS["qwen3.6-27b"] == PRESETS["qwen3.5-27b"] and weight_bytes(config) < 40e9
    assert cli.main(["info", "qwen3.6-27b", "--weights", "float8"]) == 0
    assert "parameters, 32.93 GiB in float8 and float32" in capsys.readouterr().out
    assert cli.main(["info", "kimi-linear-48b-a3b", "--weights", "float8"]) == 1
    assert "weights: expected 'whole' for other layers than GatedDelt" in capsys.readouterr().err
    assert cli.main(["info", "qwen3.6-27b", "--weights", "float8", "--mesh", "data=2"]) == 1
    assert (
        "--weights: expected whole with --mesh, which tells of training, got float8"
        in capsys.readouterr().err
    )


def test_refusals(plain, tmp_path):
    """Each before anything is read but config.json; nothing of such a model is trained."""
    with pytest.raises(ValueError, match="weights: expected None or 'float8', got 'int8'"):
        load_hf(plain / "dense", weights="int8")
    with pytest.raises(ValueError, match="adapter: expected None with weights = 'float8', which are not tr"):
        load_hf(plain / "dense", weights="float8", adapter=tmp_path)
    with pytest.raises(NotImplementedError, match="weights: no FP8 checkpoints of LaraMini"):
        load_hf(DATA / "lara_mini", weights="float8")
    folder = copied(plain, "dense", tmp_path / "fp8")
    quantise(folder, block=(64, 32))
    with pytest.raises(NotImplementedError, match=r"a scale for 32 columns; blocks of 128 columns are kept"):
        load_hf(folder, weights="float8")
    model = load_hf(plain / "dense", **LOAD)
    with pytest.raises(
        ValueError, match="model: expected weights = 'whole', got 'float8': those kept in 8 bi"
    ):
        add_lora(model, 2, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model, nnx.Param)

    def loss(state):
        return nnx.merge(graphdef, state)(put(np.arange(6)[None]))[0].sum()

    with pytest.raises(NotImplementedError, match="weights that are kept in 8 bits have no derivative"):
        jax.eval_shape(jax.grad(loss), state)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"weights": "int8"}, "weights: expected one of 'whole', 'float8', got 'int8'"),
        ({"matmul": "float8"}, "matmul: expected 'default' with weights = 'float8', which are not trained"),
        (
            {"mixer": "kda"},
            "weights: expected 'whole' for other layers than GatedDeltaNet and softmax attention",
        ),
    ],
)
def test_models_that_cannot_keep_them(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"weights": "float8"} | fields)


def test_damage_is_refused_as_for_whole_weights(plain, tmp_path):
    matrix = "model.layers.1.self_attn.o_proj.weight"
    for i, (key, value, message) in enumerate(
        [
            (matrix, 0x7F, f"in tensor {matrix}, got NaN: it is damaged"),
            (f"{matrix}_scale_inv", 0xFF, "got nan"),
        ]
    ):
        folder = copied(plain, "dense", tmp_path / str(i))
        quantise(folder, scale_dtype=np.float32)
        tensor = read_tensors(folder)[key]
        content = bytearray(tensor.file.read_bytes())
        content[tensor.begin : tensor.begin + 4] = bytes([value] * 4)
        tensor.file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_hf(folder, weights="float8")
