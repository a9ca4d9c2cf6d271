"""Checkpoints that somebody made to do harm: they are refused in one line that names the file, at once."""

import json
import os
import shutil
import struct
import tracemalloc

import hf_checkpoints
import pytest

from gdn_jax.commands.errors import RunError
from gdn_jax.hf import load_hf, save_hf
from gdn_jax.inspect.info import InfoOptions, info


def shown(folder):
    """What `gdn info` prints of a checkpoint."""
    from rich.console import Console

    console = Console(width=120, record=True, file=open(os.devnull, "w"))
    info(folder, InfoOptions(), console)
    return console.export_text()


@pytest.mark.parametrize(
    "fields",
    [
        dict(hidden_size=10**9),
        dict(linear_num_value_heads=10**9),
        dict(linear_key_head_dim=10**9),
        dict(vocab_size=10**30),
        dict(num_attention_heads=2**40),
        dict(num_hidden_layers=10**8, layer_types=None),
        dict(num_hidden_layers=10**30, layer_types=None),
        dict(rms_norm_eps=float("inf")),
        dict(layer_types=[["linear_attention"], {}]),
        dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=float("inf"))),
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("reads", [load_hf, shown], ids=["load_hf", "info"])
def test_sizes_take_no_memory(fields, reads, tmp_path):
    """A config of a few kB takes a few MB, whatever it says."""
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    hf_checkpoints.change_config(folder, **fields)
    tracemalloc.start()
    with pytest.raises((ValueError, NotImplementedError, RunError), match=r"config.json|tensor"):
        reads(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6


def test_experts_take_no_memory(tmp_path):
    folder = hf_checkpoints.copy("qwen3_5_moe", tmp_path)
    hf_checkpoints.change_config(folder, num_experts=10**9)
    with pytest.raises(ValueError, match=r"expected at most .* num_experts"):
        load_hf(folder)


@pytest.mark.parametrize(
    "place", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x" * 5000]
)
def test_an_index_names_files_of_its_folder(place, tmp_path):
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    shutil.copyfile(folder / "model.safetensors", tmp_path / "secret.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": place}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="in a file of this folder"):
        load_hf(folder)


def test_links_that_leave_the_folder_are_not_copied(tmp_path):
    """A secret does not get into the folder that is published; the links of the hub's cache do."""
    secret = tmp_path / "id_ed25519"
    secret.write_text("TOP SECRET")
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    (folder / "chat_template.jinja").symlink_to(secret)
    model = load_hf(folder)
    with pytest.raises(ValueError, match=r"chat_template.jinja.*got a link to"):
        save_hf(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists() and not (tmp_path / "saved.tmp").exists()

    cache = tmp_path / "models--ours--tiny"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir()
    for i, file in enumerate(hf_checkpoints.FOLDER.joinpath("qwen3_5").iterdir()):
        shutil.copyfile(file, cache / "blobs" / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    save_hf(load_hf(snapshot), tmp_path / "saved")
    assert (tmp_path / "saved" / "generation_config.json").is_file()


def test_what_a_killed_save_left_is_named(tmp_path, no_type_checks):
    model = load_hf(hf_checkpoints.FOLDER / "qwen3_5")
    (tmp_path / "saved.tmp").mkdir()
    with pytest.raises(ValueError, match=r"saved.tmp: another save_hf writes there, or one was killed"):
        save_hf(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="max_file_bytes: expected a whole number"):
        save_hf(model, tmp_path / "other", max_file_bytes=float("nan"))


DEEP = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "header"])
def test_deep_json(file, tmp_path):
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    if file == "header":
        text = DEEP.encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    else:
        if file != "config.json":
            (folder / "model.safetensors").unlink()
        (folder / file).write_text(DEEP)
    with pytest.raises(ValueError, match="nested too deep"):
        load_hf(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_pipes_and_devices_are_not_read(file, tmp_path):
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(ValueError, match=r"config.json|safetensors"):
        load_hf(folder)
    (folder / file).unlink()
    (folder / file).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"config.json|safetensors"):
        load_hf(folder)


def test_names_are_no_markup(tmp_path):
    """A path with brackets is printed as it is."""
    folder = hf_checkpoints.copy("qwen3_5", tmp_path / "a[/b]")
    assert "a[/b]" in shown(folder)
