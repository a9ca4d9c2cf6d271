"""Checkpoints that cannot be: damaged files, and what no family of the library has."""

import dataclasses
import json
import struct

import hf_checkpoints
import pytest

from gdn_jax.hf import load_hf, save_hf


def test_names_of_a_hub_are_not_downloaded():
    with pytest.raises(
        ValueError, match=r"expected a folder with config\.json, got none; names of a hub are not"
    ):
        load_hf("Qwen/Qwen3.5-0.8B")


def test_saving_refuses(tmp_path):
    model = load_hf(hf_checkpoints.FOLDER / "qwen3_5")
    with pytest.raises(ValueError, match=r"path: expected a folder that does not exist, got"):
        save_hf(model, tmp_path)
    model.config = dataclasses.replace(model.config, norm_eps=1e-3)
    with pytest.raises(ValueError, match=r"model: expected norm_eps = 1e-06 as in the checkpoint"):
        save_hf(model, tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


def _cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _no_header(folder):
    (folder / "model.safetensors").write_bytes(b"PK" + bytes(100))


def _broken_header(folder):
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[20] = 0
    file.write_bytes(content)


def _rewrite(change):
    """Changes the header of the file, and keeps the bytes behind it."""

    def damage(folder):
        file = folder / "model.safetensors"
        content = file.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return damage


NORM = "model.layers.1.input_layernorm.weight"


QKV = "model.layers.1.linear_attn.in_proj_qkv.weight"


def _rename(header):
    header["model.layers.9.odd"] = header.pop(NORM)


def _shape(header):
    header[QKV]["shape"] = header[QKV]["shape"][::-1]


def _offsets(header):
    header[NORM]["data_offsets"][1] += 4


def _no_offsets(header):
    del header[NORM]["data_offsets"]


def _quantized(header):
    header[NORM] |= {"dtype": "F8_E5M2"}


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            _cut,
            r"model\.safetensors: expected tensor \S+ up to byte \d+, got a file of \d+ bytes: it is cut off",
        ),
        (_no_header, r"model\.safetensors: expected a safetensors file, got no header"),
        (_broken_header, r"model\.safetensors: expected a JSON header, got a damaged one"),
        (_rewrite(_rename), rf"expected tensor {NORM} of shape \(32,\), got none in any file"),
        (
            _rewrite(_shape),
            rf"model\.safetensors: expected tensor {QKV} of shape \(160, 32\), got \(32, 160\)",
        ),
        (_rewrite(_offsets), rf"model\.safetensors: expected 128 bytes of tensor {NORM}, got 132"),
        (
            _rewrite(_no_offsets),
            rf"model\.safetensors: expected dtype, shape and data_offsets of tensor {NORM}",
        ),
        (
            lambda f: (f / "model.safetensors").unlink(),
            r"qwen3_5: expected model\.safetensors or .*, got neither",
        ),
        (lambda f: (f / "config.json").unlink(), r"qwen3_5: expected a folder with config\.json, got none$"),
        (
            lambda f: (f / "config.json").write_text("{"),
            r"config\.json: expected a JSON object, got a damaged",
        ),
        (
            lambda f: hf_checkpoints.change_config(f, hidden_size=None),
            r"config\.json: expected hidden_size of type int",
        ),
        (
            lambda f: hf_checkpoints.change_config(f, vocab_size=63),
            r"expected tensor \S+embed\S+ of shape \(63, 32\), got",
        ),
        (
            lambda f: hf_checkpoints.change_config(f, num_hidden_layers=3, layer_types=None),
            r"model\.safetensors: expected no tensor model\.layers\.3",
        ),
        (
            lambda f: hf_checkpoints.change_config(f, linear_num_value_heads=3),
            r"config\.json: num_v_heads: expected a multiple of num_heads = 2, got 3",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named(damage, message, tmp_path):
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_hf(folder)


def test_a_damaged_index_is_named(tmp_path):
    name = "qwen3_5_moe_released"
    second = "model-00002-of-00002.safetensors"
    index = "model.safetensors.index.json"

    def change(folder, **places):
        content = json.loads((folder / index).read_text())
        content["weight_map"] |= places
        content["weight_map"] = {key: place for key, place in content["weight_map"].items() if place}
        (folder / index).write_text(json.dumps(content))

    norm = "model.language_model.norm.weight"
    for i, (damage, message) in enumerate(
        [
            (lambda f: (f / second).unlink(), rf"{second}: expected this file, of tensor model\S+, as"),
            (lambda f: change(f, odd=second), rf"{second}: expected tensor odd, as {index} says, got none"),
            (lambda f: change(f, **{norm: None}), rf"tensor {norm} is not there according to {index}"),
            (lambda f: (f / index).write_text("{}"), rf"{index}: expected a weight_map"),
        ]
    ):
        folder = hf_checkpoints.copy(name, tmp_path / str(i))
        damage(folder)
        with pytest.raises(ValueError, match=message):
            load_hf(folder)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "qwen4_exp"}, "model_type 'qwen4_exp': hyper-connections"),
        ({"model_type": "glm5_next"}, "model_type 'glm5_next': sparse attention"),
        ({"model_type": "kimi_k3"}, "model_type 'kimi_k3': residuals by attention"),
        ({"model_type": "kimi_k25"}, "model_type 'kimi_k25': only hybrid models"),
        ({"model_type": "jev"}, "model_type 'jev': the Qwen3.5 inside it"),
        ({"model_type": "llama"}, "model_type 'llama': only hybrid models .* Supported are qwen3_5_text"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config: weight_block_size = None: one scale",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': only 'silu' is supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid': only 'swish'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        ({"layer_types": ["linear_attention"] * 3 + ["mamba"]}, "layers of type 'mamba' are not supported"),
        (
            {"per_layer_config": {"1": {"rms_norm_eps": 1e-3}}},
            "per_layer_config: layers with fields of their",
        ),
        ({"dtype": "float16"}, "weights in float16 are computed in another dtype"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, message, tmp_path):
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    hf_checkpoints.change_config(folder, **fields)
    with pytest.raises(NotImplementedError, match=message):
        load_hf(folder)


def test_other_refusals(tmp_path):
    folder = hf_checkpoints.copy("qwen3_5_released", tmp_path)
    hf_checkpoints.change_config(folder, text_config={"quantization_config": {}} | {"vocab_size": 64})
    with pytest.raises(NotImplementedError, match=r"config\.json: text_config: quantization_config"):
        load_hf(folder)
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    _rewrite(_quantized)(folder)
    with pytest.raises(NotImplementedError, match=rf"tensor {NORM} has dtype F8_E5M2; quantized weights"):
        load_hf(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(NotImplementedError, match="pickled weights are not supported"):
        load_hf(folder)
