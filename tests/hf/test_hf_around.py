"""Checkpoints of models for images around a Qwen3.5: the language model inside, and everything else as it was."""

import json

import hf_checkpoints
import numpy as np
import pytest
from safetensors_files import write
from test_hf_float8 import assert_same, params

from gdn_jax.hf import load_hf, save_hf
from gdn_jax.hf.checkpoint import read_tensors

NAMES = {
    "model.visual.patch_embed.": "model.vision_tower.embeddings.patch_embedding.",
    "model.visual.merger.": "model.merger.mlp.0.",
    "model.visual.blocks.0.attn.": "model.vision_tower.vit_merger.self_attn.",
    "model.visual.": "model.vpm.encoder.",
}
"""Our made-up names of a MiniCPM-V, by those of a Qwen3.5 for images."""
IDS = {"image_start_id": 60, "image_end_id": 61, "insert_layer_id": 6}


def minicpm(to, kind, source="qwen3_5_released", **fields):
    """A checkpoint whose tensors for images have the names of a MiniCPM-V."""
    folder = hf_checkpoints.copy(source, to)
    renamed = {}
    for name, tensor in read_tensors(folder).items():
        start = next((start for start in NAMES if name.startswith(start)), "")
        renamed[NAMES.get(start, "") + name.removeprefix(start)] = tensor.dtype, tensor.read()
    for file in folder.glob("model*"):
        file.unlink()
    write(folder / "model.safetensors", renamed)
    hf_checkpoints.change_config(folder, model_type=kind, architectures=None, **IDS | fields)
    return folder


@pytest.mark.parametrize(
    "kind, source",
    [
        ("minicpmv4_6", "qwen3_5_released"),
        ("minicpmv4_7", "qwen3_5_moe_released"),
        ("minicpm_ocr", "qwen3_5_released"),
    ],
)
def test_the_language_model_inside_is_opened(kind, source, tmp_path):
    """Dense or with experts, as text_config says; written with all other tensors and fields as they were."""
    folder = minicpm(tmp_path, kind, source)
    model = load_hf(folder)
    assert_same(params(model), params(load_hf(hf_checkpoints.FOLDER / source)))
    skipped = {name.split(".")[1] for name in model.origin.skipped if name.startswith("model.")}
    assert {"vision_tower", "merger", "vpm"} >= skipped >= {"merger"}
    save_hf(model, tmp_path / "saved")
    before, after = (read_tensors(path) for path in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name].read(), tensor.read())
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "saved")]
    assert configs[0] == configs[1]


def test_what_is_not_inside_is_refused(tmp_path):
    folder = minicpm(tmp_path, "minicpmv4_7")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | {"model_type": "qwen2"}
    for fields, inner in (({"text_config": text}, "'qwen2'"), ({"text_config": None}, "None")):
        hf_checkpoints.change_config(folder, **fields)
        message = (
            f"model_type 'minicpmv4_7' around a text_config of model_type {inner}: only hybrid models .*_ocr$"
        )
        with pytest.raises(NotImplementedError, match=message):
            load_hf(folder)
    folder = hf_checkpoints.copy("qwen3_5_released", tmp_path / "other")
    hf_checkpoints.change_config(folder, model_type="minicpmv4_6")
    with pytest.raises(
        ValueError, match=r"expected no tensor model\.visual\.\S+: a model of this config\.json"
    ):
        load_hf(folder)
    folder = minicpm(tmp_path / "qwen", "qwen3_5")
    with pytest.raises(
        ValueError, match=r"expected no tensor model\.(merger|vision_tower|vpm)\.\S+: a model"
    ):
        load_hf(folder)
