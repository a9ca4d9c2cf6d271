"""FP8 checkpoints: what transformers computes from the dequantised weights, both forms written, damage refused."""

import dataclasses
import json
from pathlib import Path

import hf_checkpoints
import jax
import ml_dtypes
import numpy as np
import pytest
import small_models
from flax import nnx
from harness import tiers
from safetensors_files import write

from gdn_jax.commands import cli
from gdn_jax.hf import load_hf, save_hf
from gdn_jax.hf.checkpoint import read_tensors
from gdn_jax.models import AttentionConfig, ExpertsConfig, ModelConfig

DATA = Path(__file__).parents[1] / "data"
FP8 = ("qwen3_5_fp8", "qwen3_5_moe_fp8")
E4M3 = np.array(
    [
        (-1) ** (b >> 7) * (m * 2.0**-9 if not e else (8 + m) * 2.0 ** (e - 10))
        for b in range(256)
        for e, m in [(b >> 3 & 15, b & 7)]
    ],
    np.float64,
)
"""Numbers by their bytes, of which 0x7f and 0xff are NaN."""
E4M3[[0x7F, 0xFF]] = np.nan


def params(model):
    return {
        jax.tree_util.keystr(path): np.asarray(value)
        for path, value in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    }


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("name", tiers(FP8, FP8[1:], FP8[:1]))
def test_logits_are_those_of_transformers_with_dequantised_weights(name):
    """Whole rows and rows with padding on the left; matrices, scales and experts of no whole number of blocks."""
    want = hf_checkpoints.expected_of(DATA / name)
    model = load_hf(DATA / name, dtype="float32", implementation="recurrent")
    assert model.config.weight_dtype == "float32" and load_hf(DATA / name).config.weight_dtype == "bfloat16"
    assert not [name for name in model.origin.skipped if not name.startswith(("model.visual.", "mtp."))]
    hf_checkpoints.assert_same_as_expected(model, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", FP8)
def test_greedy_continuation(name):
    tokens = hf_checkpoints.expected_of(DATA / name)["generated"]
    model = load_hf(DATA / name, dtype="float32", implementation="recurrent")
    hf_checkpoints.assert_continued(model, tokens[:, :21], tokens[:, 21:])


# What follows is of checkpoints that the test quantises itself, by searching all numbers of E4M3.

SIZES = dict(vocab_size=37, num_layers=2, implementation="recurrent", zero_centred_norms=True)
SIZES |= dict(scale_embedding=False, layer_types=("gated_delta_net", "attention"))
DENSE = ModelConfig(
    hidden_size=139,
    num_heads=3,
    num_v_heads=6,
    head_dim=24,
    expand_v=1.5,
    intermediate_size=130,
    attention=AttentionConfig(3, 1, 48, "head", output_gate=True, rotary_dim=12),
    **SIZES,
)
MOE = ModelConfig(
    hidden_size=72,
    num_heads=2,
    num_v_heads=4,
    head_dim=16,
    expand_v=2.0,
    experts=ExpertsConfig(3, 2, 129, 33),
    attention=AttentionConfig(2, 1, 64, "head", output_gate=True, rotary_dim=16),
    **SIZES,
)
NEXT = dataclasses.replace(MOE, dense_layers=(1,), intermediate_size=131)
CHOSEN = (
    "qkv.weight",
    "z.weight",
    "out_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
)
CHOSEN += ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "qkvz.weight")


def ours(matrix, block, scale_dtype):
    """Bytes, scales and the float64 numbers that they mean, of a matrix [rows, columns], block by block."""
    rows, columns = matrix.shape
    grid = [range(0, n, size) for n, size in zip(matrix.shape, block, strict=True)]
    scales = np.empty([len(starts) for starts in grid], scale_dtype)
    values = np.empty(matrix.shape, np.uint8)
    meant = np.empty(matrix.shape)
    numbers = np.sort(E4M3[np.isfinite(E4M3)])
    for i, top in enumerate(grid[0]):
        for j, left in enumerate(grid[1]):
            place = np.s_[top : min(top + block[0], rows), left : min(left + block[1], columns)]
            part = matrix[place].astype(np.float64)
            scales[i, j] = np.abs(part).max() / 448
            scale = float(scales[i, j])
            after = np.clip(np.searchsorted(numbers, part / scale), 1, len(numbers) - 1)
            low, high = numbers[after - 1], numbers[after]
            near = np.where(part / scale - low < high - part / scale, low, high)
            values[place] = np.argmax(E4M3 == near[..., None], -1)
            meant[place] = near * scale
    return values, scales, meant


def quantise(folder, block=(128, 128), scale_dtype=ml_dtypes.bfloat16, fused=False, **fields):
    """Quantises a float32 checkpoint in its folder; returns the matrices that it means by name."""
    found = {name: tensor.read() for name, tensor in read_tensors(folder).items()}
    tensors, meant = {}, {}
    kinds = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    for name, array in found.items():
        if not name.endswith(CHOSEN):
            tensors[name] = "F32", array
            continue
        values, scales, meant[name] = ours(array, block, scale_dtype)
        tensors[name] = "F8_E4M3", values
        tensors[f"{name}_scale_inv"] = kinds[np.dtype(scale_dtype).name], scales
    if fused:
        tensors, meant = join_experts(tensors, meant, found, block)
    write(folder / "model.safetensors", tensors)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    hf_checkpoints.change_config(folder, quantization_config=quantization | fields)
    return meant


def join_experts(tensors, meant, found, block):
    """Experts in two tensors, gate_up_proj [E, 2I, H] and down_proj [E, H, I], whose blocks begin anew."""
    tensors, meant = ({n: x for n, x in of.items() if ".experts." not in n} for of in (tensors, meant))
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [
            [found[f"{prefix}.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")] for e in range(3)
        ]
        for name, arrays in (
            ("gate_up_proj", [np.concatenate(parts[:2]) for parts in each]),
            ("down_proj", [parts[2] for parts in each]),
        ):
            values, scales, numbers = map(
                np.stack, zip(*(ours(a, block, np.float32) for a in arrays), strict=True)
            )
            tensors[f"{prefix}.{name}"] = "F8_E4M3", values
            tensors[f"{prefix}.{name}_scale_inv"] = "F32", scales
            meant[f"{prefix}.{name}"] = numbers
    return tensors, meant


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folders of float32 checkpoints."""
    folder = tmp_path_factory.mktemp("plain")
    for seed, (name, config) in enumerate({"dense": DENSE, "moe": MOE, "next": NEXT}.items()):
        save_hf(small_models.made(config, seed), folder / name)
    return folder


def copied(plain, name, to):
    to.mkdir(parents=True)
    for file in (plain / name).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize(
    "name, options",
    [
        ("dense", {}),
        ("dense", dict(scale_dtype=np.float32, block=(64, 32), weight_per_tensor=False, scale_fmt="float")),
        (
            "moe",
            dict(
                scale_dtype=np.float16, fmt="e4m3", ignored_layers=["lm_head"], dequantize=None, other=False
            ),
        ),
        ("moe", dict(fused=True)),
        ("dense", dict(block=(100, 2**31 - 1))),
    ],
    ids=["dense", "other blocks", "experts", "fused", "wide"],
)
def test_other_sizes_are_read_as_they_are_meant(name, options, plain, tmp_path):
    """Every parameter, in both dtypes: the number that the bytes mean in float64, rounded."""
    folder = copied(plain, name, tmp_path / "fp8")
    meant = quantise(folder, **options)
    assert len(meant) > 9
    dense = tmp_path / "dense"
    copied(plain, name, dense)
    found = {
        name: ("F32", tensor.read()) for name, tensor in read_tensors(folder).items() if tensor.dtype == "F32"
    }
    found = {name: x for name, x in found.items() if not name.endswith("_scale_inv")}
    write(
        dense / "model.safetensors",
        found | {name: ("F32", x.astype(np.float32)) for name, x in meant.items()},
    )
    for dtype in ("float32", "bfloat16"):
        model = load_hf(folder, dtype=dtype)
        assert_same(params(model), params(load_hf(dense, dtype=dtype)))
    save_hf(model, tmp_path / "again", weight_dtype="float8")  # in the same blocks
    again = read_tensors(tmp_path / "again")
    for key, tensor in read_tensors(folder).items():
        if tensor.dtype == "F8_E4M3" and key in again:
            assert again[f"{key}_scale_inv"].shape == read_tensors(folder)[f"{key}_scale_inv"].shape


@pytest.mark.parametrize("name", ["dense", "moe", "next"])
def test_a_model_is_written_in_8_bits(name, plain, tmp_path):
    """What we write are the bytes and scales of the test's quantiser, also a second time."""
    model = load_hf(plain / name)
    save_hf(model, tmp_path / "saved", weight_dtype="float8", max_file_bytes=50_000)
    folder = copied(plain, name, tmp_path / "wanted")
    quantise(folder)
    got, want = read_tensors(tmp_path / "saved"), read_tensors(folder)
    assert got.keys() == want.keys() and len({tensor.file for tensor in got.values()}) > 2
    for key, tensor in want.items():
        assert (
            got[key].dtype == tensor.dtype
            and (got[key].begin % {"F32": 4, "BF16": 2}.get(tensor.dtype, 1)) == 0
        )
        np.testing.assert_array_equal(got[key].stored_values(), tensor.stored_values(), err_msg=key)
    again = load_hf(tmp_path / "saved")
    assert_same(params(again), params(load_hf(folder)))
    told = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    gates = "ba" if name == "next" else "a"
    assert f"model.layers.0.linear_attn.in_proj_{gates}" in told["modules_to_not_convert"]
    assert not [module for module in told["modules_to_not_convert"] if f"{module}.weight".endswith(CHOSEN)]
    save_hf(again, tmp_path / "twice", weight_dtype="float8")
    assert_same(params(load_hf(tmp_path / "twice")), params(again))
    save_hf(again, tmp_path / "wide")
    assert "quantization_config" not in json.loads((tmp_path / "wide" / "config.json").read_text())
    assert_same(params(load_hf(tmp_path / "wide")), params(again))


@pytest.mark.parametrize("name", tiers(FP8, FP8[1:], FP8[:1]))
def test_a_published_form_is_written_in_both(name, tmp_path):
    """Also the head for more tokens, which is in 8 bits too, where the model has lost it."""
    model = load_hf(DATA / name)
    model.mtp = None
    before = read_tensors(DATA / name)
    save_hf(model, tmp_path / "wide")
    after = read_tensors(tmp_path / "wide")
    assert {key for key in before if not key.endswith("_scale_inv")} == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {"BF16", "F32"}
    again = load_hf(tmp_path / "wide")
    again.mtp = None
    assert_same(params(again), params(model))
    head = "mtp.layers.0.self_attn.o_proj.weight"
    values, scales = (before[key].stored_values().astype(np.float32) for key in (head, head + "_scale_inv"))
    spread = np.kron(scales, np.ones((128, 128), np.float32))[: values.shape[0], : values.shape[1]]
    np.testing.assert_array_equal(after[head].read(), (values * spread).astype(ml_dtypes.bfloat16))
    save_hf(model, tmp_path / "narrow", weight_dtype="float8")
    after = read_tensors(tmp_path / "narrow")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype or key.endswith(
            ("_scale_inv", "A_log", "dt_bias", "linear_attn.norm.weight")
        )
        if (
            tensor.dtype == "F8_E4M3"
        ):  # bfloat16 rounds a weight by less than half a step of 8 bits, but for ties
            values = (t[key].stored_values().astype(np.float32) for t in (before, after))
            assert np.mean(next(values) == next(values)) > 0.999, key
    assert before[head].stored_values().tobytes() == after[head].stored_values().tobytes()


def test_info_reads_the_sizes(capsys):
    assert cli.main(["info", str(DATA / "qwen3_5_moe_fp8")]) == 0
    assert "weights bfloat16" in capsys.readouterr().out


def test_what_cannot_be_written_in_8_bits(plain, tmp_path):
    model = load_hf(plain / "dense")
    with pytest.raises(
        ValueError, match="weight_dtype: expected 'float32', as the model is, or 'float8', got 'float9'"
    ):
        save_hf(model, tmp_path / "saved", weight_dtype="float9")
    with pytest.raises(ValueError, match=r"weight_dtype: expected one of .*, got 'float8'"):
        load_hf(plain / "dense", weight_dtype="float8")
    kernel = model.blocks[1].mlp.up_proj.kernel
    kernel[...] = np.where(np.arange(kernel.size).reshape(kernel.shape) == 5, np.nan, kernel[...])
    with pytest.raises(
        ValueError, match=r"model: tensor model\.layers\.1\.mlp\.up_proj\.weight in 8 bits: expected"
    ):
        save_hf(model, tmp_path / "saved", weight_dtype="float8")
    assert not [*tmp_path.iterdir()]
    lara = load_hf(DATA / "lara_mini")
    with pytest.raises(NotImplementedError, match="weight_dtype: no FP8 checkpoints of LaraMini"):
        save_hf(lara, tmp_path / "saved", weight_dtype="float8")


MATRIX = "model.layers.1.self_attn.o_proj.weight"  # [139, 144]
SCALES = MATRIX + "_scale_inv"


def _without(key):
    return lambda tensors: tensors.pop(key)


def _set(key, dtype, change):
    def damage(tensors):
        tensors[key] = dtype, change(tensors[key][1])

    return damage


def _at(place, value):
    def change(array):
        array = array.copy()
        array[place] = value
        return array

    return change


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            _without(SCALES),
            rf"fp8: expected tensor {SCALES} of shape \(2, 2\), with the scales of a tensor in F8_E4M3",
        ),
        (
            _set(SCALES, "F32", lambda x: x[:1]),
            rf"expected tensor {SCALES} of shape \(2, 2\), one .*, got \(1, 2\)",
        ),
        (
            _set(SCALES, "F32", lambda x: x[0, 0]),
            rf"expected tensor {SCALES} of shape \(2, 2\), one .*, got \(\)",
        ),
        (
            _set(SCALES, "F32", _at((1, 1), np.nan)),
            rf"expected scales from 0 to 7.6e\+35 in tensor {SCALES}, got nan",
        ),
        (_set(SCALES, "F32", _at((0, 1), np.inf)), rf"expected scales from 0 .* in tensor {SCALES}, got inf"),
        (_set(SCALES, "F32", _at((0, 1), -1.0)), rf"expected scales from 0 .* in tensor {SCALES}, got -1"),
        (
            _set(SCALES, "F32", _at((0, 1), 1e36)),
            rf"expected scales from 0 .* in tensor {SCALES}, got 1e\+36",
        ),
        (
            _set(SCALES, "F8_E8M0", lambda x: x.astype(np.uint8)),
            rf"tensor {SCALES} has dtype F8_E8M0; scales are",
        ),
        (
            _set(SCALES, "F8_E4M3", lambda x: x.astype(np.uint8)),
            rf"tensor {SCALES} has dtype F8_E4M3; scales are",
        ),
        (_without(MATRIX), rf"expected tensor {MATRIX} of the scales {SCALES}, got none in any file"),
        (
            _set(MATRIX, "F32", lambda x: x.astype(np.float32)),
            rf"dtype F8_E4M3 of tensor {MATRIX}, .*, got F32",
        ),
        (
            _set(MATRIX, "F8_E5M2", lambda x: x),
            rf"expected dtype F8_E4M3 of tensor {MATRIX}, .*, got F8_E5M2",
        ),
        (
            _set(MATRIX, "F8_E4M3", lambda x: x.T),
            rf"expected tensor {MATRIX} of shape \(139, 144\), got \(144, 139\)",
        ),
        (
            _set(MATRIX, "F8_E4M3", lambda x: x[None, None]),
            rf"expected a matrix .* {MATRIX}, got shape \(1, 1, 139",
        ),
        (_set(MATRIX, "F8_E4M3", _at((3, 5), np.nan)), rf"expected numbers in tensor {MATRIX}, got NaN"),
        (
            _set("model.norm.weight", "F8_E4M3", lambda x: x.astype(np.uint8)),
            r"expected a matrix .* as tensor model\.norm\.weight, got shape \(139,\)",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_whole(damage, message, plain, tmp_path):
    folder = copied(plain, "dense", tmp_path / "fp8")
    quantise(folder, scale_dtype=np.float32)
    tensors = {name: (tensor.dtype, tensor.stored_values()) for name, tensor in read_tensors(folder).items()}
    damage(tensors)
    write(folder / "model.safetensors", tensors)
    with pytest.raises((ValueError, NotImplementedError), match=message) as raised:
        load_hf(folder)
    assert str(tmp_path) in str(raised.value)


def test_a_cut_file_is_refused(plain, tmp_path):
    folder = copied(plain, "dense", tmp_path / "fp8")
    quantise(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="it is cut off"):
        load_hf(folder)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(quant_method="gptq"), "quant_method = 'gptq': only 'fp8' is supported"),
        (dict(quant_method=None), "quant_method = None: only 'fp8' is supported"),
        (dict(activation_scheme="static"), "activation_scheme = 'static': only 'dynamic' is supported"),
        (dict(fmt="e5m2"), "fmt = 'e5m2': only 'e4m3' is supported"),
        (dict(scale_fmt="ue8m0"), "scale_fmt = 'ue8m0': only 'float' is supported"),
        (dict(expert_dtype="fp4"), "expert_dtype = 'fp4': only None is supported"),
        (dict(weight_per_tensor=True), "weight_per_tensor = True: only False is supported"),
        (dict(weight_block_size=None), "weight_block_size = None: one scale for a whole matrix"),
        (dict(weight_block_size=[128]), r"weight_block_size of two sizes above 0, got \[128\]"),
        (dict(weight_block_size=[128, 0]), r"weight_block_size of two sizes above 0, got \[128, 0\]"),
        (dict(weight_block_size=[128, 10**30]), "weight_block_size of two sizes above 0"),
        (dict(weight_block_size=[64, 64]), "one scale for each block of 64 x 64 numbers of"),
        (dict(modules_to_not_convert="lm_head"), "names of modules modules_to_not_convert, got 'lm_head'"),
        (dict(modules_to_not_convert=[3]), r"names of modules modules_to_not_convert, got \[3\]"),
        (
            dict(modules_to_not_convert=[MATRIX.removesuffix(".weight")]),
            rf"expected a floating dtype of tensor {MATRIX}, whose module is among those",
        ),
    ],
)
def test_other_quantizations_are_refused(fields, message, plain, tmp_path):
    folder = copied(plain, "dense", tmp_path / "fp8")
    quantise(folder, **fields)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        load_hf(folder)
    hf_checkpoints.change_config(folder, quantization_config=[1])
    with pytest.raises(ValueError, match=r"config\.json: quantization_config: expected an object, got \[1\]"):
        load_hf(folder)
    hf_checkpoints.change_config(folder, quantization_config=None)
    with pytest.raises((ValueError, NotImplementedError), match=r"expected no tensor .*_scale_inv"):
        load_hf(folder)
